package train

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// StopOnInterrupt makes Ctrl-C and SIGTERM call t.Stop: the Fit or Evaluate in progress ends after the current step, on
// all workers, and the program can write its results. A second signal ends the process at once, as without
// StopOnInterrupt. release restores this; it may be called several times.
//
//	defer train.StopOnInterrupt(t)()
func StopOnInterrupt(t *Trainer) (release func()) {
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	release = sync.OnceFunc(func() {
		signal.Stop(signals)
		close(done)
	})
	go func() {
		select {
		case <-signals:
			t.Stop()
			release()
		case <-done:
		}
	}()
	return release
}
