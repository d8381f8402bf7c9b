package cli

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
)

// Readers receives a value when an output of this process has lost its reader. It must be buffered.
type Readers chan struct{}

// Of returns w with its write errors watched.
func (r Readers) Of(w io.Writer) io.Writer { return readOutput{w, r} }

type readOutput struct {
	io.Writer
	readers Readers
}

// Stat describes the file of the output, if it is a file.
func (o readOutput) Stat() (fs.FileInfo, error) {
	if f, ok := o.Writer.(interface{ Stat() (fs.FileInfo, error) }); ok {
		return f.Stat()
	}
	return nil, errors.ErrUnsupported
}

func (o readOutput) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		select {
		case o.readers <- struct{}{}:
		default: // reported before
		}
	}
	return n, err
}

// PassOnSignals calls a function for Ctrl-C and SIGTERM, until the function that it returns is called. A closed
// terminal, and an output that has lost its reader, count as SIGTERM.
func PassOnSignals(to func(os.Signal), unread Readers) (stop func()) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	// SIGPIPE must not end this process. It can come from any broken pipe, also that of an agent that exited
	// before it read its order, so it does not show that an output has lost its reader.
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case sig := <-signals:
				if sig == syscall.SIGHUP {
					sig = syscall.SIGTERM
				}
				to(sig)
			case <-unread:
				unread = nil // one report is enough
				to(syscall.SIGTERM)
			case <-ended:
				return
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		signal.Stop(pipes)
		close(ended)
		<-done
	}
}

// IgnoreSignals makes this process ignore Ctrl-C and SIGTERM, until the function that it returns is called: its
// launcher forwards them. The signals are caught, because workers would inherit an ignored signal.
func IgnoreSignals() (stop func()) { return PassOnSignals(func(os.Signal) {}, nil) }
