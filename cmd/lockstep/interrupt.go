package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/train"
)

// interrupter turns the first Ctrl-C (or SIGTERM) into an orderly stop, and exits on the second.
type interrupter struct {
	// Context is cancelled by the first Ctrl-C. Training does not use it: it stops between two steps.
	context.Context

	cancel      context.CancelFunc
	signals     chan os.Signal
	interrupted atomic.Bool
	fitting     atomic.Bool
}

func catchInterrupts(ctx context.Context) *interrupter {
	i := &interrupter{signals: make(chan os.Signal, 2)}
	i.Context, i.cancel = context.WithCancel(ctx)
	signal.Notify(i.signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		if _, ok := <-i.signals; !ok {
			return
		}
		i.interrupted.Store(true)
		if i.fitting.Load() {
			fmt.Fprintln(os.Stderr, "\nlockstep: stopping after this step; press Ctrl-C again to stop at once")
		}
		i.cancel()
		if _, ok := <-i.signals; ok {
			os.Exit(exitInterrupted)
		}
	}()
	return i
}

// interruptible runs a command that the first Ctrl-C ends.
func interruptible(cmd *cobra.Command, run func(ctx context.Context, out io.Writer) error) error {
	in := catchInterrupts(cmd.Context())
	defer in.close()
	err := run(in, cmd.OutOrStdout())
	if in.interrupted.Load() {
		return errInterrupted
	}
	return err
}

// close stops catching signals.
func (i *interrupter) close() {
	signal.Stop(i.signals)
	close(i.signals)
	i.cancel()
}

// stopOn makes the first Ctrl-C stop the trainer, on all workers, until release is called.
func (i *interrupter) stopOn(t *train.Trainer) (release func()) {
	end := context.AfterFunc(i, t.Stop)
	return func() { end() }
}

// callback records whether a step may be running.
func (i *interrupter) callback() train.Callback {
	return train.Callback{
		OnTrainBegin: func(context.Context) error { i.fitting.Store(true); return nil },
		OnTrainEnd:   func(context.Context, *train.History, error) { i.fitting.Store(false) },
	}
}
