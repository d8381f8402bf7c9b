package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
)

// stand is where a Fit stands between two steps.
type stand struct {
	epoch int   // in progress, or to begin next
	step  int   // steps of it that were made
	mean  *mean // over them
	next  place // of the batch to read next
	cut   bool  // FitConfig.Steps ended the epoch
}

// open reports whether an epoch has steps and was not ended.
func (s *stand) open() bool { return s.step > 0 && !s.cut }

// endEpoch comes after an epoch's validation. An epoch that the limit of steps has ended may go on some day, under a higher limit.
func (f *fit) endEpoch() {
	if f.left() == 0 {
		f.stand.cut = true
		return
	}
	next := place{pass: f.stand.epoch + 1}
	if f.cfg.StepsPerEpoch > 0 { // one reading for all epochs
		next = f.stand.next
	}
	f.stand = stand{epoch: f.stand.epoch + 1, next: next}
}

// done tells the callbacks that training has come to its end.
func (f *fit) done(ctx context.Context) error {
	err := fire(f.cfg.Callbacks, func(c Callback) error {
		if c.OnTrainDone == nil {
			return nil
		}
		return c.OnTrainDone(ctx, f.history)
	})
	if errors.Is(err, ErrStop) { // it has
		return nil
	}
	if err != nil {
		f.t.tellOthers(ctx, err)
	}
	return err
}

// fitState is what a snapshot holds of a Fit.
type fitState struct {
	StepsPerEpoch int          `json:"steps_per_epoch,omitempty"`
	Batches       int          `json:"batches"` // of the dataset, or -1
	Epoch         int          `json:"epoch"`
	Step          int          `json:"step"`
	Pass          int          `json:"pass"`
	Batch         int          `json:"batch"`
	Cut           bool         `json:"cut,omitempty"`
	Mean          *meanState   `json:"mean,omitempty"` // nil: no step of the epoch was made
	Epochs        []epochState `json:"epochs"`         // the one in progress, if it has steps, last
	Steps         int          `json:"steps"`
	Skipped       int          `json:"skipped"`
}

type meanState struct {
	Loss     exact   `json:"loss"`
	Sums     []exact `json:"sums"`
	Weight   exact   `json:"weight"`
	Examples int64   `json:"examples"`
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
}

// exact is a float64 as JSON, to the bit but for the payload of a NaN.
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

// state returns where the Fit stands.
func (f *fit) state() *fitState {
	if f.t.resume != nil { // it is not taken up yet
		return f.t.resume
	}
	s := &fitState{
		StepsPerEpoch: f.cfg.StepsPerEpoch, Batches: f.ds.Len(),
		Epoch: f.stand.epoch, Step: f.stand.step, Pass: f.stand.next.pass, Batch: f.stand.next.batch, Cut: f.stand.cut,
		Steps: f.history.Steps, Skipped: f.history.Skipped,
	}
	if f.stand.step > 0 {
		m := f.stand.mean
		s.Mean = &meanState{Loss: exact(m.loss), Weight: exact(m.weight), Examples: m.examples}
		for _, sum := range m.sums {
			s.Mean.Sums = append(s.Mean.Sums, exact(sum))
		}
	}
	for i, e := range f.history.Epochs {
		if e.Steps == 0 && i == len(f.history.Epochs)-1 && f.stand.step == 0 && e.Epoch == f.stand.epoch {
			continue // begun, but without a step
		}
		state := epochState{Epoch: e.Epoch, Steps: e.Steps, Duration: e.Duration, Result: stateOf(e.Result)}
		if e.Validation != nil {
			v := stateOf(*e.Validation)
			state.Validation = &v
		}
		s.Epochs = append(s.Epochs, state)
	}
	if f.stand.open() { // its result comes at its end
		s.Epochs[len(s.Epochs)-1].Result = stateOf(f.stand.mean.result())
	}
	return s
}

func stateOf(r Result) resultState {
	s := resultState{Loss: exact(r.Loss), Metrics: map[string]exact{}, Examples: r.Examples}
	for name, x := range r.Metrics {
		s.Metrics[name] = exact(x)
	}
	return s
}

func (s resultState) result() Result {
	r := Result{Loss: float64(s.Loss), Metrics: map[string]float64{}, Examples: s.Examples}
	for name, x := range s.Metrics {
		r.Metrics[name] = float64(x)
	}
	return r
}

// check returns an error if the numbers do not fit together.
func (s *fitState) check() error {
	least := min(s.StepsPerEpoch, s.Epoch, s.Step, s.Pass, s.Batch, s.Steps, s.Skipped)
	switch {
	case least < 0 || s.Batches < -1 || s.Skipped > s.Steps || s.Step > s.Steps:
		return fmt.Errorf("no Fit can stand at epoch %d, step %d, pass %d, batch %d of %d, with %d steps made and %d of them skipped", s.Epoch, s.Step, s.Pass, s.Batch, s.Batches, s.Steps, s.Skipped)
	case (s.Mean != nil) != (s.Step > 0) || s.Cut && s.Step == 0:
		return fmt.Errorf("it stands at step %d of an epoch: its means and its end do not fit that", s.Step)
	case s.Step > 0 && (len(s.Epochs) == 0 || s.Epochs[len(s.Epochs)-1].Epoch != s.Epoch || s.Epochs[len(s.Epochs)-1].Steps != s.Step):
		return fmt.Errorf("its history does not end with step %d of epoch %d, where it stands", s.Step, s.Epoch)
	}
	return nil
}

// goOn takes up what Trainer.Restore has left for the next Fit.
func (f *fit) goOn() error {
	s := f.t.resume
	f.t.resume = nil
	if s == nil {
		return nil
	}
	batches := f.ds.Len()
	switch {
	case s.StepsPerEpoch != f.cfg.StepsPerEpoch:
		return fmt.Errorf("train: the training that goes on here had FitConfig.StepsPerEpoch %d: got %d", s.StepsPerEpoch, f.cfg.StepsPerEpoch)
	case s.Epoch < f.cfg.InitialEpoch:
		return fmt.Errorf("train: the training that goes on here stands at epoch %d: FitConfig.InitialEpoch is %d", s.Epoch, f.cfg.InitialEpoch)
	case s.Batches != batches && s.Batches >= 0 && batches >= 0:
		return fmt.Errorf("train: the training that goes on here had a dataset of %d batches, this one has %d: it is another dataset", s.Batches, batches)
	case s.Mean != nil && len(s.Mean.Sums) != len(f.t.metrics):
		return fmt.Errorf("train: the training that goes on here had %d metrics, the model has %d", len(s.Mean.Sums), len(f.t.metrics))
	}
	f.stand = stand{epoch: s.Epoch, step: s.Step, next: place{s.Pass, s.Batch}, cut: s.Cut}
	if s.Mean != nil {
		m := newMean(f.t.metrics)
		m.loss, m.weight, m.examples = float64(s.Mean.Loss), float64(s.Mean.Weight), s.Mean.Examples
		for i, sum := range s.Mean.Sums {
			m.sums[i] = float64(sum)
		}
		f.stand.mean = m
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
	if f.left() != 0 && f.stand.cut { // the epoch goes on
		f.stand.cut = false
		f.history.Epochs[len(f.history.Epochs)-1].Validation = nil
	}
	return nil
}
