package train

import (
	"math"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Timeline returns the recorder of this process: where the last steps spent their time, and the last events.
func (t *Trainer) Timeline() *timeline.Recorder { return t.strategy.Timeline() }

// clock records what a local replica does: one kind of work after the other. Only the replica's goroutine uses it, and
// that of Fit between steps.
type clock struct {
	kind  timeline.Kind
	idle  bool // nothing is recorded
	since time.Duration
}

// kindOf returns what a phase is in the timeline.
func kindOf(p Phase) timeline.Kind {
	switch p {
	case PhaseCompile:
		return timeline.Compile
	case PhaseStart:
		return timeline.Start
	case PhaseData:
		return timeline.Input
	case PhaseCompute:
		return timeline.Forward
	case PhaseReduce:
		return timeline.Wait
	case PhaseUpdate:
		return timeline.Update
	case PhaseOuter:
		return timeline.Outer
	case PhaseBetween:
		return timeline.Callbacks
	case PhaseEvaluate:
		return timeline.Evaluate
	case PhasePredict:
		return timeline.Predict
	case PhaseSnapshot:
		return timeline.Snapshot
	case PhaseRestore:
		return timeline.Restore
	}
	return timeline.Other
}

// begins records that a local replica begins work of a kind, which ends the previous one.
func (t *Trainer) begins(local int, kind timeline.Kind) {
	if c := &t.clocks[local]; c.kind != kind || c.idle {
		t.ends(local, 0)
		c.kind, c.idle = kind, false
	}
}

// ends records what a local replica has done until now, for a bucket of gradients or 0.
func (t *Trainer) ends(local, bucket int) {
	c, r := &t.clocks[local], t.Timeline()
	now := r.Now()
	if !c.idle {
		if first, _ := t.strategy.LocalReplicas(); c.kind != timeline.Other {
			r.Add(timeline.Event{
				Kind: c.kind, Replica: first + local, Step: t.committed + 1, Start: c.since, End: now, Bucket: bucket,
			})
		}
		if local == 0 {
			t.took[c.kind] += now - c.since
		}
	}
	c.since = now
}

// finished records that a replica has done its part of a step. Then only the first one records, for the whole worker.
func (t *Trainer) finished(r *distribute.Replica) {
	local := r.LocalID()
	t.begins(local, timeline.Wait) // for the other replicas
	t.clocks[local].idle = local > 0
}

// reached records that the gradients of bucket k are computed, in the order of their computation.
func (t *Trainer) reached(local, k int) {
	t.ends(local, k+1)
	c := &t.clocks[local]
	c.kind = timeline.Backward
	if k == len(t.buckets)-1 {
		c.kind = timeline.Other
	}
}

// stepEnded records the step that was just committed, when the callbacks after it begin.
func (t *Trainer) stepEnded(b *stepBatches) {
	s := timeline.Step{
		Step: t.committed, End: t.clocks[0].since, Loss: math.NaN(), Trainer: t.number,
		Input:   t.took[timeline.Input],
		Compute: t.took[timeline.Forward] + t.took[timeline.Backward] + t.took[timeline.Other],
		Wait:    t.took[timeline.Wait] + t.took[timeline.Outer],
		Update:  t.took[timeline.Update] + t.took[timeline.Commit], Callbacks: t.took[timeline.Callbacks],
		Evaluate: t.took[timeline.Evaluate] + t.took[timeline.Predict],
		Snapshot: t.took[timeline.Snapshot] + t.took[timeline.Restore],
	}
	if b != nil {
		s.Examples = b.examples
		s.Loss, _ = t.scalars()
	}
	t.waited = s.Wait
	t.Timeline().AddStep(s)
	t.Timeline().SetStep(t.committed + 1)
	clear(t.took[:])
}

// publishEvery is the shortest interval between two updates of the recorder's Training.
const publishEvery = 100 * time.Millisecond

// publish sets the progress of the training, for the live page and other readers.
func (f *fit) publish(s *Step) {
	now := f.t.clocks[0].since
	if now < f.published+publishEvery && s.Step != s.Steps && s.Validation == nil {
		return
	}
	f.published = now
	mean := s.Mean()
	to := &timeline.Training{
		Epoch: s.Epoch + 1, Epochs: s.Epochs, Step: s.Step, Steps: s.Steps, Unit: f.cfg.Unit,
		Metrics: map[string]float64{},
	}
	if isFinite(mean.Loss) {
		to.Loss = &mean.Loss
	}
	addFinite(to.Metrics, mean.Metrics)
	latest := s.Validation
	if n := len(f.history.Validations); latest == nil && n > 0 {
		latest = &f.history.Validations[n-1].Result
	}
	for i := len(f.history.Epochs) - 1; i >= 0 && latest == nil; i-- {
		latest = f.history.Epochs[i].Validation
	}
	if latest != nil {
		to.Validation = map[string]float64{}
		addFinite(to.Validation, latest.Metrics)
		addFinite(to.Validation, map[string]float64{"loss": latest.Loss})
	}
	f.t.Timeline().SetTraining(to)
}

func isFinite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// addFinite adds the numbers that JSON can encode.
func addFinite(to, from map[string]float64) {
	for name, x := range from {
		if isFinite(x) {
			to[name] = x
		}
	}
}
