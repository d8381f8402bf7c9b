package launch

import "runtime"

// starter starts processes from one dedicated thread, which lives until the starter is closed. Processes
// inherit properties of the thread that starts them: Linux sends the signal of a parent's death when that
// thread ends, not its process, and a process starts on the CPUs that the thread may use.
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
