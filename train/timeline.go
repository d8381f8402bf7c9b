package train

import (
	"fmt"
	"maps"
	"math"
	"slices"
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

// kindOf returns the kind of work that the timeline shows for a phase.
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
	case PhaseRestore, PhasePlace:
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
		if c.kind != timeline.Other {
			r.Add(timeline.Event{
				Kind: c.kind, Replica: t.ids()[local], Step: t.committed + 1, Start: c.since, End: now,
				Bucket: bucket,
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

// publish sets the progress after a step, for the live page and other readers, if it is time to.
func (f *fit) publish(s *Step) {
	now := f.t.clocks[0].since
	if now < f.published+publishEvery && s.Step != s.Steps && s.Validation == nil {
		return
	}
	f.publishResult(s.EpochBegin, s.Step, s.Mean(), s.Validation)
}

// publishResult sets the progress after a step of an epoch: loss and metrics of the epoch so far, and the validation
// that followed the step; nil: none.
func (f *fit) publishResult(e EpochBegin, step int, mean Result, validation *Result) {
	f.published = f.t.clocks[0].since
	to := &timeline.Training{
		Epoch: e.Epoch + 1, Epochs: e.Epochs, Step: step, Steps: e.Steps, Unit: f.cfg.Unit,
		Metrics: map[string]float64{}, Settings: f.settings, Trainer: f.t.number,
	}
	if finite(mean.Loss) {
		to.Loss = &mean.Loss
	}
	addFinite(to.Metrics, mean.Metrics)
	if rate, ok := f.t.LearningRate(); ok && finite(rate) {
		to.LearningRate = &rate
	}
	to.Elapsed, to.Left = f.times(e, step)
	to.Validation = finiteNumbers(f.latestValidation(validation))
	m := timeline.Measurement{
		Step: f.t.committed, Metrics: to.Metrics, LearningRate: to.LearningRate, Validation: finiteNumbers(validation),
	}
	if n := len(f.measured); n > 0 && f.measured[n-1].Step == m.Step {
		f.measured = f.measured[:n-1]
	}
	f.measured = append(f.measured[max(len(f.measured)+1-timeline.MeasurementsMax, 0):], m)
	to.Measured = slices.Clone(f.measured)
	f.t.Timeline().SetTraining(to)
}

// times returns the time since the Fit began and an estimate of the rest, in seconds; nil: unknown.
func (f *fit) times(e EpochBegin, step int) (elapsed float64, rest *float64) {
	now := f.t.Timeline().Now()
	elapsed = (now - f.began).Seconds()
	if f.first == 0 { // the time before has compilation
		f.first, f.firstSteps = now, f.history.Steps
	}
	made := f.history.Steps - f.firstSteps
	steps := -1
	if e.Steps >= 0 {
		steps = e.Steps - step + (e.Epochs-1-e.Epoch)*e.Steps
	}
	if left := f.left(); left >= 0 && (steps < 0 || left < steps) {
		steps = left
	}
	if steps == 0 {
		return elapsed, new(0.0)
	}
	if steps < 0 || made < 1 {
		return elapsed, nil
	}
	return elapsed, new((now - f.first).Seconds() / float64(made) * float64(steps))
}

// latestValidation returns the given validation, or the one before; nil: none yet.
func (f *fit) latestValidation(latest *Result) *Result {
	if n := len(f.history.Validations); latest == nil && n > 0 {
		latest = &f.history.Validations[n-1].Result
	}
	for i := len(f.history.Epochs) - 1; i >= 0 && latest == nil; i-- {
		latest = f.history.Epochs[i].Validation
	}
	return latest
}

// describe returns the settings that the live page shows: those of FitConfig, and those of the trainer.
func (f *fit) describe() map[string]string {
	c := &f.t.config
	out := map[string]string{
		"strategy": f.t.strategy.String(), "replicas": fmt.Sprint(f.t.strategy.NumReplicasInSync()),
		"global batch": fmt.Sprint(c.GlobalBatch), "seed": fmt.Sprint(c.Seed),
	}
	if f.cfg.Accumulate > 1 {
		out["batches of a step"] = fmt.Sprint(f.cfg.Accumulate)
	}
	if text := c.Exchange.codec().String(); text != "none" {
		out["compression"] = text
	}
	if f.t.Sharded() {
		out["optimizer state"] = "sharded over the replicas"
	}
	if c.diloco() != nil {
		out["DiLoCo"] = c.Exchange.String()
	}
	maps.Copy(out, f.cfg.Settings)
	return out
}

// finiteNumbers returns the numbers of a result that JSON can encode; nil for none.
func finiteNumbers(r *Result) map[string]float64 {
	if r == nil {
		return nil
	}
	out := map[string]float64{}
	addFinite(out, r.Metrics)
	addFinite(out, map[string]float64{"loss": r.Loss})
	return out
}

// addFinite adds the numbers that JSON can encode.
func addFinite(to, from map[string]float64) {
	for name, x := range from {
		if finite(x) {
			to[name] = x
		}
	}
}
