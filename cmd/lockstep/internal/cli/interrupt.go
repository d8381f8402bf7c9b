package cli

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

// Interrupter turns the first Ctrl-C (or SIGTERM) into an orderly stop, and exits on the second.
type Interrupter struct {
	// Context is cancelled by the first Ctrl-C. Training does not use it: it stops between two steps.
	context.Context

	cancel      context.CancelFunc
	signals     chan os.Signal
	Interrupted atomic.Bool
	fitting     atomic.Bool
}

// CatchInterrupts catches signals until Close.
func CatchInterrupts(ctx context.Context) *Interrupter {
	i := &Interrupter{signals: make(chan os.Signal, 2)}
	i.Context, i.cancel = context.WithCancel(ctx)
	signal.Notify(i.signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		if _, ok := <-i.signals; !ok {
			return
		}
		i.Interrupted.Store(true)
		if i.fitting.Load() {
			fmt.Fprintln(os.Stderr, "\nlockstep: stopping after this step; press Ctrl-C again to stop at once")
		}
		i.cancel()
		if _, ok := <-i.signals; ok {
			os.Exit(ExitInterrupted)
		}
	}()
	return i
}

// Interruptible runs a command that the first Ctrl-C ends.
func Interruptible(cmd *cobra.Command, run func(ctx context.Context, out io.Writer) error) error {
	in := CatchInterrupts(cmd.Context())
	defer in.Close()
	err := run(in, cmd.OutOrStdout())
	if in.Interrupted.Load() {
		return ErrInterrupted
	}
	return err
}

// Close stops catching signals.
func (i *Interrupter) Close() {
	signal.Stop(i.signals)
	close(i.signals)
	i.cancel()
}

// StopOn makes the first Ctrl-C stop the trainer, on all workers, until release is called.
func (i *Interrupter) StopOn(t *train.Trainer) (release func()) {
	end := context.AfterFunc(i, t.Stop)
	return func() { end() }
}

// Callback records whether a step may be running.
func (i *Interrupter) Callback() train.Callback {
	return train.Callback{
		OnTrainBegin: func(context.Context) error { i.fitting.Store(true); return nil },
		OnTrainEnd:   func(context.Context, *train.History, error) { i.fitting.Store(false) },
	}
}
