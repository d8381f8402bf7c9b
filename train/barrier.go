package train

import (
	"context"
	"sync/atomic"
)

// barrier lets replicas of this process wait for each other within a step. It does not allocate.
type barrier struct {
	size    int32
	arrived atomic.Int32
	passed  chan struct{} // one token per replica, once all have arrived
}

func (b *barrier) init(size int) { b.size, b.passed = int32(size), make(chan struct{}, size) }

// reset prepares the barrier for the next step. No replica may be using it.
func (b *barrier) reset() {
	b.arrived.Store(0)
	for len(b.passed) > 0 { // a failed step leaves tokens
		<-b.passed
	}
}

// arrive counts one replica, which may wait later.
func (b *barrier) arrive() {
	if b.arrived.Add(1) == b.size {
		for range b.size {
			b.passed <- struct{}{}
		}
	}
}

// wait returns when all replicas have arrived, or the step has failed. Each replica waits at most once a step.
func (b *barrier) wait(ctx context.Context) error {
	select {
	case <-b.passed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
