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
			fmt.Fprintln(os.Stderr, "\nlockstep: stopping after this step; once more to stop at once")
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

// callback stops training after the step in which the first Ctrl-C came.
func (i *interrupter) callback() train.Callback {
	stop := func() error {
		if i.asked.Load() {
			return train.ErrStop
		}
		return nil
	}
	return train.Callback{
		OnTrainBegin: func(context.Context) error { i.fitting.Store(true); return stop() },
		OnStepEnd:    func(context.Context, train.Step) error { return stop() },
		OnEpochEnd:   func(context.Context, train.Epoch) error { return stop() },
		OnTrainEnd:   func(context.Context, *train.History, error) { i.fitting.Store(false) },
	}
}
