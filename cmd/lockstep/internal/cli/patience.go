package cli

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// The time until the first progress line, and the longest time between two lines.
const (
	patienceFirst = 2 * time.Second
	patienceMax   = time.Minute
)

// Reassure writes a progress line to w after 2 s, 4 s, 8 s and so on, and at least every minute. text describes
// what is being done; another goroutine calls it. stop ends the lines, and may be called more than once.
func Reassure(w io.Writer, text func() string) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	start := time.Now()
	go func() {
		defer close(ended)
		for pause := patienceFirst; ; pause = min(time.Since(start), patienceMax) {
			select {
			case <-time.After(pause):
				fmt.Fprintf(w, "lockstep: %s, %v so far\n", text(), time.Since(start).Round(time.Second))
			case <-end:
				return
			}
		}
	}()
	return sync.OnceFunc(func() {
		close(end)
		<-ended
	})
}
