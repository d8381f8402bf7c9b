package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
)

// readers tells when one of this process's outputs has lost its reader. Made with room for one.
type readers chan struct{}

// of watches an output.
func (r readers) of(w io.Writer) io.Writer { return readOutput{w, r} }

type readOutput struct {
	io.Writer
	readers readers
}

// Stat says which file the output is, if it is one.
func (o readOutput) Stat() (fs.FileInfo, error) {
	if f, ok := o.Writer.(*os.File); ok {
		return f.Stat()
	}
	return nil, errors.ErrUnsupported
}

func (o readOutput) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		select {
		case o.readers <- struct{}{}:
		default: // it has been said
		}
	}
	return n, err
}

// passOnSignals gives Ctrl-C and SIGTERM to a function, until the one that it returns is called. A terminal that is closed, and outputs that
// nobody reads any more, count as SIGTERM.
func passOnSignals(to func(os.Signal), unread readers) (stop func()) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // as nohup has it
		signal.Notify(signals, syscall.SIGHUP)
	}
	// SIGPIPE must not end this process. It is of any broken pipe, an agent's that ended before it was told what to do as well, and so says
	// nothing of the outputs.
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
				unread = nil // the first line tells, as every further one would
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

// ignoreSignals has this process take no notice of Ctrl-C and SIGTERM, until the function that it returns is called: its launcher
// tells it. It does not ignore them in the system's sense, for that the workers would inherit.
func ignoreSignals() (stop func()) { return passOnSignals(func(os.Signal) {}, nil) }
