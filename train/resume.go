package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// fitPosition is the position of Fit between two steps.
type fitPosition struct {
	epoch     int           // in progress, or to begin next
	step      int           // steps of it that were taken
	next      batchPosition // of the batch to read next
	truncated bool          // the epoch was truncated by FitConfig.Steps
}

// open reports whether the epoch has steps and was not truncated.
func (p *fitPosition) open() bool { return p.step > 0 && !p.truncated }

// endEpoch is called after an epoch's validation. An epoch that the limit of steps truncated may be resumed
// later with a higher limit.
func (f *fit) endEpoch() {
	if f.left() == 0 {
		f.position.truncated = true
		return
	}
	next := batchPosition{pass: f.position.epoch + 1}
	if f.cfg.StepsPerEpoch > 0 { // one pass continues over all epochs
		next = f.position.next
	}
	f.position = fitPosition{epoch: f.position.epoch + 1, next: next}
}

// done calls the callbacks' OnTrainDone, in reverse order.
func (f *fit) done(ctx context.Context) error {
	reversed := slices.Clone(f.cfg.Callbacks)
	slices.Reverse(reversed)
	err := fire(reversed, func(c Callback) error {
		if c.OnTrainDone == nil {
			return nil
		}
		return c.OnTrainDone(ctx, f.history)
	})
	if errors.Is(err, ErrStop) { // it has stopped already
		return nil
	}
	if err != nil {
		f.t.failOthers(ctx, err)
	}
	return err
}

// position returns the position between two steps.
func (s *fitState) position() fitPosition {
	return fitPosition{s.Epoch, s.Step, batchPosition{s.Pass, s.Batch}, s.Cut}
}

// fitState is Fit's part of a snapshot.
type fitState struct {
	StepsPerEpoch int          `json:"steps_per_epoch,omitempty"`
	Accumulate    int          `json:"accumulate,omitempty"` // 0: 1
	Batches       int          `json:"batches"`              // of the dataset, or -1
	Epoch         int          `json:"epoch"`
	Step          int          `json:"step"`
	Pass          int          `json:"pass"`
	Batch         int          `json:"batch"`
	Cut           bool         `json:"cut,omitempty"`
	Mean          *meanState   `json:"mean,omitempty"` // nil: no step of the epoch was taken
	Epochs        []epochState `json:"epochs"`         // the one in progress, if it has steps, last
	Steps         int          `json:"steps"`
	Skipped       int          `json:"skipped"`

	Validations []validationState `json:"validations,omitempty"`
	Callbacks   []string          `json:"callbacks,omitempty"` // the names of the callbacks with state

	callbacks map[string][]Weight // the state
}

type validationState struct {
	Epoch    int         `json:"epoch"`
	Step     int         `json:"step"`
	Result   resultState `json:"result"`
	Training resultState `json:"training"`
}

type meanState struct {
	Loss     exact   `json:"loss"`
	Sums     []exact `json:"sums"`
	Weight   exact   `json:"weight"`
	Examples int64   `json:"examples"`

	Streams map[string][]exact `json:"streams,omitempty"` // by metric
}

type epochState struct {
	Epoch      int           `json:"epoch"`
	Steps      int           `json:"steps"`
	Duration   time.Duration `json:"nanoseconds"`
	Result     resultState   `json:"result"`
	Validation *resultState  `json:"validation,omitempty"`
}

type resultState struct {
	Loss     exact            `json:"loss"`
	Metrics  map[string]exact `json:"metrics"`
	Examples int64            `json:"examples"`

	Tables map[string][]exact `json:"tables,omitempty"`
}

// exact is a float64 whose JSON form preserves all bits, except for the payload of a NaN.
type exact float64

// MarshalJSON implements json.Marshaler: a number, or a string if it is none.
func (x exact) MarshalJSON() ([]byte, error) {
	text := strconv.FormatFloat(float64(x), 'g', -1, 64)
	if math.IsNaN(float64(x)) || math.IsInf(float64(x), 0) {
		text = strconv.Quote(text)
	}
	return []byte(text), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (x *exact) UnmarshalJSON(text []byte) error {
	s := string(text)
	if q, err := strconv.Unquote(s); err == nil {
		s = q
	}
	f, err := strconv.ParseFloat(s, 64)
	*x = exact(f)
	return err
}

// state returns Fit's state for a snapshot.
func (f *fit) state() *fitState {
	if f.t.resume != nil { // not resumed yet
		return f.t.resume
	}
	s := &fitState{
		StepsPerEpoch: f.cfg.StepsPerEpoch, Accumulate: f.cfg.Accumulate, Batches: f.ds.Len(),
		Epoch: f.position.epoch, Step: f.position.step,
		Pass: f.position.next.pass, Batch: f.position.next.batch, Cut: f.position.truncated,
		Steps: f.history.Steps, Skipped: f.history.Skipped,
	}
	if f.position.step > 0 {
		m := f.mean
		s.Mean = &meanState{Loss: exact(m.loss), Weight: exact(m.weight), Examples: m.examples}
		for _, sum := range m.sums {
			s.Mean.Sums = append(s.Mean.Sums, exact(sum))
		}
		for i, stream := range m.streams {
			if stream == nil {
				continue
			}
			if s.Mean.Streams == nil {
				s.Mean.Streams = map[string][]exact{}
			}
			for _, x := range stream.State() {
				s.Mean.Streams[m.metrics[i].name] = append(s.Mean.Streams[m.metrics[i].name], exact(x))
			}
		}
	}
	for i, e := range f.history.Epochs {
		if e.Steps == 0 && i == len(f.history.Epochs)-1 && f.position.step == 0 && e.Epoch == f.position.epoch {
			continue // begun, but without a step
		}
		state := epochState{Epoch: e.Epoch, Steps: e.Steps, Duration: e.Duration, Result: stateOf(e.Result)}
		if e.Validation != nil {
			v := stateOf(*e.Validation)
			state.Validation = &v
		}
		s.Epochs = append(s.Epochs, state)
	}
	for _, v := range f.history.Validations {
		s.Validations = append(s.Validations, validationState{v.Epoch, v.Step, stateOf(v.Result), stateOf(v.Training)})
	}
	for _, c := range f.cfg.Callbacks {
		if c.Save != nil {
			s.keep(c.Name, c.Save())
		}
	}
	if f.position.open() { // the history gets its result at its end only
		s.Epochs[len(s.Epochs)-1].Result = stateOf(f.mean.result())
	}
	return s
}

// keep adds the state of a callback.
func (s *fitState) keep(name string, state []Weight) {
	if s.callbacks == nil {
		s.callbacks = map[string][]Weight{}
	}
	s.Callbacks, s.callbacks[name] = append(s.Callbacks, name), state
}

// callbackPrefix is the prefix of the names of a callback's tensors in a snapshot. Variables have no such names: the
// prefix begins with no slash.
func callbackPrefix(name string) string { return "callback " + name + "/" }

// tensors returns the state of all callbacks, with names for a snapshot.
func (s *fitState) tensors() (list []Weight) {
	if s == nil {
		return nil
	}
	for _, name := range s.Callbacks {
		for _, w := range s.callbacks[name] {
			list = append(list, Weight{callbackPrefix(name) + w.Name, w.Value})
		}
	}
	return list
}

// take keeps a tensor of a snapshot if it is a callback's state.
func (s *fitState) take(w Weight) bool {
	if s == nil {
		return false
	}
	for _, name := range s.Callbacks {
		if short, ok := strings.CutPrefix(w.Name, callbackPrefix(name)); ok {
			if s.callbacks == nil {
				s.callbacks = map[string][]Weight{}
			}
			s.callbacks[name] = append(s.callbacks[name], Weight{short, w.Value})
			return true
		}
	}
	return false
}

func stateOf(r Result) resultState {
	metrics, tables := converted[exact](r.Metrics, r.Tables)
	return resultState{Loss: exact(r.Loss), Metrics: metrics, Examples: r.Examples, Tables: tables}
}

func (s resultState) result() Result {
	metrics, tables := converted[float64](s.Metrics, s.Tables)
	return Result{Loss: float64(s.Loss), Metrics: metrics, Examples: s.Examples, Tables: tables}
}

// converted returns copies of metrics, which is not nil, and of tables, which is nil if there are none.
func converted[T, F ~float64](metrics map[string]F, tables map[string][]F) (m map[string]T, t map[string][]T) {
	m = map[string]T{}
	for name, x := range metrics {
		m[name] = T(x)
	}
	for name, table := range tables {
		if t == nil {
			t = map[string][]T{}
		}
		for _, x := range table {
			t[name] = append(t[name], T(x))
		}
	}
	return m, t
}

// check returns an error if the numbers are inconsistent.
func (s *fitState) check() error {
	if s == nil {
		return nil
	}
	least := min(s.StepsPerEpoch, s.Accumulate, s.Epoch, s.Step, s.Pass, s.Batch, s.Steps, s.Skipped)
	switch {
	case least < 0 || s.Batches < -1 || s.Skipped > s.Steps || s.Step > s.Steps:
		return fmt.Errorf("inconsistent position: epoch %d, step %d, pass %d, batch %d of %d, with %d steps taken and %d "+
			"of them skipped", s.Epoch, s.Step, s.Pass, s.Batch, s.Batches, s.Steps, s.Skipped)
	case (s.Mean != nil) != (s.Step > 0) || s.Cut && s.Step == 0:
		return fmt.Errorf("its position is step %d of an epoch, but its means or its truncation do not match", s.Step)
	case s.Step > 0 && (len(s.Epochs) == 0 || s.Epochs[len(s.Epochs)-1].Epoch != s.Epoch ||
		s.Epochs[len(s.Epochs)-1].Steps != s.Step):
		return fmt.Errorf("its history does not end at its position, step %d of epoch %d", s.Step, s.Epoch)
	}
	return nil
}

// resumePosition applies the position that Trainer.Restore left for the next Fit.
func (f *fit) resumePosition() error {
	s := f.t.resume
	f.t.resume = nil
	if s == nil {
		return nil
	}
	batches := f.ds.Len()
	switch {
	case s.StepsPerEpoch != f.cfg.StepsPerEpoch:
		return fmt.Errorf("train: resuming: FitConfig.StepsPerEpoch is %d, but the snapshot was taken with %d",
			f.cfg.StepsPerEpoch, s.StepsPerEpoch)
	case max(s.Accumulate, 1) != f.cfg.Accumulate:
		return fmt.Errorf("train: resuming: FitConfig.Accumulate is %d, but the snapshot was taken with %d",
			f.cfg.Accumulate, max(s.Accumulate, 1))
	case s.Epoch < f.cfg.InitialEpoch:
		return fmt.Errorf("train: resuming: FitConfig.InitialEpoch is %d, but the snapshot is at epoch %d",
			f.cfg.InitialEpoch, s.Epoch)
	case s.Batches != batches && s.Batches >= 0 && batches >= 0:
		return fmt.Errorf("train: resuming: this dataset has %d batches, but the snapshot's had %d: use the same dataset",
			batches, s.Batches)
	case s.Mean != nil && len(s.Mean.Sums) != len(f.t.newMean().sums):
		return fmt.Errorf("train: resuming: the metrics of this training have %d sums, but the snapshot's had %d: use the "+
			"same model, Config.ClipNorm and NoiseScale", len(f.t.newMean().sums), len(s.Mean.Sums))
	}
	f.position = s.position()
	if s.Mean != nil {
		m := f.t.newMean()
		m.loss, m.weight, m.examples = float64(s.Mean.Loss), float64(s.Mean.Weight), s.Mean.Examples
		for i, sum := range s.Mean.Sums {
			m.sums[i] = float64(sum)
		}
		for i, stream := range m.streams {
			if stream == nil {
				continue
			}
			name := m.metrics[i].name
			var state []float64
			for _, x := range s.Mean.Streams[name] {
				state = append(state, float64(x))
			}
			if err := stream.SetState(state); err != nil {
				return fmt.Errorf("train: resuming: the metric %q: %w", name, err)
			}
		}
		f.mean = m
	}
	f.history.Steps, f.history.Skipped = s.Steps, s.Skipped
	for _, e := range s.Epochs {
		epoch := Epoch{Result: e.Result.result(), Epoch: e.Epoch, Steps: e.Steps, Duration: e.Duration}
		if e.Validation != nil {
			v := e.Validation.result()
			epoch.Validation = &v
		}
		f.history.Epochs = append(f.history.Epochs, epoch)
	}
	for _, v := range s.Validations {
		f.history.Validations = append(f.history.Validations,
			Validation{Epoch: v.Epoch, Step: v.Step, Result: v.Result.result(), Training: v.Training.result()})
	}
	for _, c := range f.cfg.Callbacks {
		if c.Load == nil || !slices.Contains(s.Callbacks, c.Name) {
			continue
		}
		if err := c.Load(s.callbacks[c.Name]); err != nil {
			return fmt.Errorf("train: resuming: the state of callback %q: %w", c.Name, err)
		}
	}
	if f.left() != 0 && f.position.truncated { // the truncated epoch continues
		f.position.truncated = false
		f.history.Epochs[len(f.history.Epochs)-1].Validation = nil
	}
	return nil
}
