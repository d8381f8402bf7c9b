package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Stop asks to end early what the trainer does. It may be called from any goroutine, for a signal. A [Trainer.Fit] ends as by
// [ErrStop] from a callback after the step in progress, an [Trainer.Evaluate] returns ErrStop, in progress or later: it is for good. With
// several workers it is enough that one of them calls it.
func (t *Trainer) Stop() { t.stopping.Store(true) }

// others reports whether there are other workers.
func (t *Trainer) others() bool {
	_, local := t.strategy.LocalReplicas()
	return t.strategy.NumReplicasInSync() > local
}

// wantsStop reports whether the other workers are to be told that this one wants to stop.
func (t *Trainer) wantsStop() bool { return t.others() && (t.wish || t.stopping.Load()) }

// Workers that make the same steps need no message of their own to agree: what they must agree on travels with loss and metrics, as
// further elements of that vector.
const (
	agreedStop  = iota // how many replicas' workers want to stop
	agreedBatch        // a number that stands for the batch: every replica's is the same
	agreed             // how many elements these are
)

// stopAgreed reports whether any worker wanted to stop when the last batch began.
func (t *Trainer) stopAgreed() bool {
	return tensor.Data[float64](t.parts[0].global[0])[1+len(t.metrics)+agreedStop] > 0
}

// place is where a batch comes from: which pass over the dataset, and which batch of it, from 0.
type place struct{ pass, batch int }

// say writes what this worker has to say about the batch.
func (g *globalBatch) say(to []float64) {
	to[agreedStop] = 0
	if g.stop {
		to[agreedStop] = 1
	}
	to[agreedBatch] = float64(g.sum())
}

// heard returns an error unless all replicas said the same about the batch.
func (g *globalBatch) heard(sums []float64, replicas int) error {
	if sums[agreedBatch] == float64(g.sum())*float64(replicas) { // exact: a whole number below 2^53
		return nil
	}
	return fmt.Errorf("the workers are at different batches: this one has batch %d of pass %d over its data, of %d examples whose weights add up to %v. Want the same data in the same order on all of them",
		g.place.batch+1, g.place.pass+1, g.examples, g.weightSum)
}

// sum is a checksum of what can be told of a batch at no cost. A worker whose data end earlier would otherwise train on with other
// examples than the others' gradients are of.
func (g *globalBatch) sum() uint32 {
	var b [32]byte
	for i, v := range [...]uint64{uint64(g.place.pass), uint64(g.place.batch), uint64(g.examples), math.Float64bits(g.weightSum)} {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	return crc32.ChecksumIEEE(b[:])
}

// tellOthers ends with err what other workers wait for, or will wait for next, if there are any. What fails inside a step needs no
// such call.
func (t *Trainer) tellOthers(ctx context.Context, err error) {
	if !t.others() {
		return
	}
	_, _ = distribute.Run(context.WithoutCancel(ctx), t.strategy, func(context.Context, *distribute.Replica, ...distribute.Value) (distribute.Value, error) {
		return nil, told{err} // and so it does
	})
}

// told is an error that the others are told of by a step that does nothing else: nobody needs to know of that step.
type told struct{ error }

func (t told) Unwrap() error { return t.error }

// Plain returns the error alone (see worker.Worker.Fail).
func (t told) Plain() error { return t.error }
