package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// CommunicationTime returns how long the communication of a training step takes when nothing else runs: the median
// time that the first local replica needs for the calls of a step, n times. The gradients of all buckets are reduced,
// compressed if Config.Exchange compresses, and new values gathered if the optimizer is sharded. A step that waits for
// less has hidden the rest behind its computation. Every worker must call it, with the same n, while no other method
// of the Trainer runs. It changes no variable. With one replica the result is 0.
func (t *Trainer) CommunicationTime(ctx context.Context, n int) (time.Duration, error) {
	if n < 1 {
		return 0, fmt.Errorf("train: communication time: %d measurements requested: want at least 1", n)
	}
	if t.strategy.NumReplicasInSync() == 1 {
		return 0, nil
	}
	var times []time.Duration
	err := t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
		p := &t.local[r.LocalID()]
		p.ctx, p.replica = ctx, r
		for i := range n + 1 { // the first one allocates
			if err := t.fillGradients(r.LocalID()); err != nil {
				return err
			}
			start := time.Now()
			if err := t.exchangeAll(ctx, p); err != nil {
				return err
			}
			if r.LocalID() == 0 && i > 0 {
				times = append(times, time.Since(start))
			}
		}
		return nil
	})
	t.discard()
	if err != nil {
		return 0, fmt.Errorf("train: communication time: %w", err)
	}
	slices.Sort(times)
	return times[n/2], nil
}

// WholeSteps reports whether a step of one batch computes gradients and update as one program, as the only replica of a
// job does on an engine that supports it ([engine.Info].WholeStep).
func (t *Trainer) WholeSteps() bool { return t.whole && t.scale.Scale == 0 }

// ForwardTime returns how long the forward pass of a training step takes on the first local replica: the median of n
// evaluations of the first global batch of ds, with loss and metrics, while this worker's other replicas evaluate their
// shares too. Layers work in inference mode: without dropout, and batch normalization by its moving averages. What the
// gradients of such a batch take beyond that is the backward pass. Every worker must call it, with the same n, while no
// other method of the Trainer runs. It changes no variable.
func (t *Trainer) ForwardTime(ctx context.Context, ds data.Dataset, n int) (time.Duration, error) {
	if n < 1 {
		return 0, fmt.Errorf("train: forward time: %d measurements requested: want at least 1", n)
	}
	var times []time.Duration
	err := t.each(ctx, ds, true, func(g *globalBatch) error {
		if times != nil {
			return nil
		}
		return t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
			for i := range n + 1 { // the first one compiles
				start := time.Now()
				if _, _, err := t.program.Evaluate(ctx, r.LocalID(), g.shares[r.LocalID()], g.weightSum); err != nil {
					return err
				}
				if r.LocalID() == 0 && i > 0 {
					times = append(times, time.Since(start))
				}
			}
			return nil
		})
	})
	if err == nil && times == nil {
		err = errors.New("the dataset has no examples")
	}
	if err != nil {
		return 0, fmt.Errorf("train: forward time: %w", err)
	}
	slices.Sort(times)
	return times[n/2], nil
}

// fillGradients fills a replica's gradients with small numbers. Zeros could be copied and compressed faster.
func (t *Trainer) fillGradients(local int) error {
	for k := range t.buckets {
		if err := t.memory(local, k); err != nil {
			return err
		}
		for _, gradient := range t.local[local].gradients[k] {
			if gradient.DType() != tensor.Float32 {
				continue
			}
			for i, x := 0, tensor.Data[float32](gradient); i < len(x); i++ {
				x[i] = float32(i*7919%1009-504) / 1e6
			}
		}
	}
	return nil
}

// exchangeAll makes the calls of a step for a replica.
func (t *Trainer) exchangeAll(ctx context.Context, p *localReplica) error {
	p.updates = true
	for k := range t.buckets {
		var scalars []float64
		if k == len(t.buckets)-1 {
			scalars = p.scalars[:t.summedScalars()]
		}
		if err := t.startReduction(p, k, scalars); err != nil {
			return err
		}
	}
	if err := t.exchange.finish(ctx, p, func(int) error { return nil }); err != nil {
		return err
	}
	if s, ok := t.exchange.(*sharded); ok {
		for k := range t.buckets {
			if err := s.transfer(ctx, p, k); err != nil {
				return err
			}
		}
	}
	return p.receive(ctx)
}
