package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// The first word about something that takes long, and the longest silence between two.
const (
	patienceFirst = 2 * time.Second
	patienceMax   = time.Minute
)

// reassure writes a line to w whenever something has taken long: after 2 s, 4 s, 8 s and so on, and at least every minute. text
// says what is being done; it is called by another goroutine. stop ends it, and may be called more than once.
func reassure(w io.Writer, text func() string) (stop func()) {
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
