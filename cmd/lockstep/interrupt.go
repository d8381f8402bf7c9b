package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/lockstep-ml/lockstep/train"
)

// interrupter turns the first Ctrl-C (or SIGTERM) into an orderly end, and leaves at once on the second.
type interrupter struct {
	// Context ends with the first Ctrl-C. Training does not run under it: it stops between two steps.
	context.Context

	cancel  context.CancelFunc
	signals chan os.Signal
	asked   atomic.Bool
	fitting atomic.Bool
}

func catchInterrupts(ctx context.Context) *interrupter {
	i := &interrupter{signals: make(chan os.Signal, 2)}
	i.Context, i.cancel = context.WithCancel(ctx)
	signal.Notify(i.signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		if _, ok := <-i.signals; !ok {
			return
		}
		i.asked.Store(true)
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

// close stops catching.
func (i *interrupter) close() {
	signal.Stop(i.signals)
	close(i.signals)
	i.cancel()
}

// stops lets the first Ctrl-C stop the trainer, on all workers. release ends that.
func (i *interrupter) stops(t *train.Trainer) (release func()) {
	end := context.AfterFunc(i, t.Stop)
	return func() { end() }
}

// callback notes whether there is a step to end.
func (i *interrupter) callback() train.Callback {
	return train.Callback{
		OnTrainBegin: func(context.Context) error { i.fitting.Store(true); return nil },
		OnTrainEnd:   func(context.Context, *train.History, error) { i.fitting.Store(false) },
	}
}
