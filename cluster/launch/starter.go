package launch

import "runtime"

// starter starts processes from one thread of its own, which lives until it is closed. What a process inherits from the thread
// that starts it counts here: Linux sends the signal of a parent's death when that thread ends, not its process, and a process
// begins on the CPUs that the thread may use.
type starter struct {
	work chan func()
	done chan struct{}
}

func newStarter() *starter {
	s := &starter{work: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for f := range s.work {
			f()
		}
	}()
	return s
}

// do calls f on the thread, and waits for it.
func (s *starter) do(f func()) {
	done := make(chan struct{})
	s.work <- func() {
		defer close(done)
		f()
	}
	<-done
}

func (s *starter) close() {
	close(s.work)
	<-s.done
}
