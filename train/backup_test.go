package train

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// backup returns a Backup, or fails the test.
func backup(t testing.TB, trainer *Trainer, cfg BackupConfig) *Backup {
	t.Helper()
	b, err := NewBackup(trainer, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// textOf formats a history without its times, exactly: equal bits give equal text, also for NaN.
func textOf(h *History) string {
	text := fmt.Sprintf("%d steps, %d skipped, stopped %v", h.Steps, h.Skipped, h.Stopped)
	for _, e := range h.Epochs {
		text += fmt.Sprintf("\nepoch %d, %d steps: %v", e.Epoch, e.Steps, e.Result)
		if e.Validation != nil {
			text += fmt.Sprintf(", validation %v", *e.Validation)
		}
	}
	return text
}

// sameFit compares two trainings: the state of every replica, the history and the steps.
func sameFit(t failer, what string, got, want *History, gotState, wantState []fakeValues, gotSteps, wantSteps int64) {
	t.Helper()
	if textOf(got) != textOf(want) || !reflect.DeepEqual(gotState, wantState) || gotSteps != wantSteps {
		t.Errorf("%s: got\n%s\n%v, %d steps, want\n%s\n%v, %d steps", what, textOf(got), gotState, gotSteps, textOf(want),
			wantState, wantSteps)
	}
}

// weighted gives some batches weights, and some of those the weight 0.
func weighted(examples data.Batch, rng func(n int) int) data.Batch {
	w := make([]float32, examples.Rows())
	for i := range w {
		w[i] = float32(rng(3))
	}
	examples.Weights = tensor.Of(w, len(w))
	return examples
}

// TestResumeAnywhere checks that training resumed from the snapshot of any step ends with the history, and on every
// replica with the bits, of an uninterrupted training.
func TestResumeAnywhere(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		replicas := rapid.IntRange(1, 4).Draw(rt, "replicas")
		rows := rapid.SliceOfN(rapid.IntRange(1, 5), 1, 4).Draw(rt, "rows of the batches")
		cfg := FitConfig{
			Epochs:        rapid.IntRange(1, 3).Draw(rt, "epochs"),
			StepsPerEpoch: rapid.SampledFrom([]int{0, 0, 1, 3}).Draw(rt, "steps per epoch"),
			Accumulate:    rapid.SampledFrom([]int{0, 1, 2, 3}).Draw(rt, "accumulated batches"),
		}
		config := fakeConfig(5)
		if rapid.Bool().Draw(rt, "clip") {
			config.ClipNorm = 2
		}
		if rapid.Bool().Draw(rt, "limit") {
			cfg.Steps = rapid.IntRange(1, 8).Draw(rt, "steps")
		}
		total := 0
		for _, n := range rows {
			total += n
		}
		examples := lineExamples(total)
		if rapid.Bool().Draw(rt, "weights") {
			examples = weighted(examples, func(n int) int { return rapid.IntRange(0, n-1).Draw(rt, "weight") })
			if len(rows) > 1 && rapid.Bool().Draw(rt, "skip one") {
				clear(tensor.Data[float32](examples.Weights)[:rows[0]])
			}
		}
		ds := sizes(examples, rows...)
		if rapid.Bool().Draw(rt, "validation") {
			cfg.Validation = ds
		}
		trainer, program := newFakeWith(t, replicas, config, fakeModel{})
		want, err := trainer.Fit(t.Context(), ds, cfg)
		if err != nil {
			rt.Fatal(err)
		}

		saving, savingProgram := newFakeWith(t, replicas, config, fakeModel{})
		var taken []*checkpoint.Contents
		take := func(ctx context.Context) error {
			snapshot, err := saving.Snapshot(ctx)
			if err != nil {
				return err
			}
			c, err := snapshot.Contents()
			taken = append(taken, c)
			return err
		}
		everywhere := cfg
		everywhere.Callbacks = []Callback{{
			OnTrainBegin: take,
			OnEpochBegin: func(ctx context.Context, _ EpochBegin) error { return take(ctx) },
			OnStepEnd:    func(ctx context.Context, _ Step) error { return take(ctx) },
			OnEpochEnd:   func(ctx context.Context, _ Epoch) error { return take(ctx) },
			OnTrainDone:  func(ctx context.Context, _ *History) error { return take(ctx) },
		}}
		got, err := saving.Fit(t.Context(), ds, everywhere)
		if err != nil {
			rt.Fatal(err)
		}
		sameFit(rt, "while saving", got, want, savingProgram.snapshot(), program.snapshot(), saving.Steps(), trainer.Steps())
		if len(taken) < want.Steps {
			rt.Fatalf("%d snapshots of %d steps", len(taken), want.Steps)
		}
		for i, c := range taken {
			again, againProgram := newFakeWith(t, replicas, config, fakeModel{})
			s, err := SnapshotOf(c)
			if err != nil {
				rt.Fatal(err)
			}
			if _, err := again.Restore(t.Context(), s); err != nil {
				rt.Fatal(err)
			}
			got, err := again.Fit(t.Context(), ds, cfg)
			if err != nil {
				rt.Fatal(err)
			}
			sameFit(rt, fmt.Sprintf("from snapshot %d, %s", i, c.State), got, want, againProgram.snapshot(), program.snapshot(),
				again.Steps(), trainer.Steps())
		}
	})
}

// TestResumeChain checks that a training that is stopped or fails many times, and resumes each time, equals an
// uninterrupted training.
func TestResumeChain(t *testing.T) {
	cause := errors.New("killed")
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("LOCKSTEP_TEST_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("LOCKSTEP_TEST_SEED=%d repeats it", seed)
	g := rand.New(rand.NewPCG(seed, 0))
	ds := sizes(lineExamples(16), 7, 7, 2)
	for replicas := 1; replicas <= 4; replicas++ {
		cfg := FitConfig{Epochs: 4, Validation: ds, StepsPerEpoch: 2 * g.IntN(2)}
		trainer, program := newFake(t, replicas, 7, fakeModel{})
		want, err := trainer.Fit(t.Context(), ds, cfg)
		if err != nil {
			t.Fatal(err)
		}
		dir, every := t.TempDir(), g.IntN(4)
		for {
			again, againProgram := newFake(t, replicas, 7, fakeModel{})
			some := cfg
			n, end := g.IntN(7), ErrStop
			if g.IntN(2) == 0 {
				n, end = n+5, cause // it must get further than the last snapshot
			}
			event := func() error {
				if n--; n == -1 {
					return end
				}
				return nil
			}
			some.Callbacks = []Callback{backup(t, again, BackupConfig{Dir: dir, EverySteps: every, Keep: 2}).Callback(), {
				OnStepEnd:  func(context.Context, Step) error { return event() },
				OnEpochEnd: func(context.Context, Epoch) error { return event() },
			}}
			got, err := again.Fit(t.Context(), ds, some)
			if errors.Is(err, cause) || err == nil && got.Stopped {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			sameFit(t, "at the end", got, want, againProgram.snapshot(), program.snapshot(), again.Steps(), trainer.Steps())
			break
		}
	}
}

// TestRaiseLimit checks that a training that the limit of steps ended inside an epoch resumes with a higher limit as if
// that had been its limit.
func TestRaiseLimit(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	for _, per := range []int{0, 2} {
		trainer, program := newFake(t, 2, 7, fakeModel{})
		want, err := trainer.Fit(t.Context(), ds, FitConfig{Epochs: 4, StepsPerEpoch: per, Steps: 8, Validation: ds})
		if err != nil {
			t.Fatal(err)
		}
		timeless(want)
		for first := 1; first <= 8; first++ {
			dir := t.TempDir()
			for _, steps := range []int{first, first, 8} {
				again, againProgram := newFake(t, 2, 7, fakeModel{})
				got, err := again.Fit(t.Context(), ds, FitConfig{
					Epochs: 4, StepsPerEpoch: per, Steps: steps, Validation: ds,
					Callbacks: []Callback{backup(t, again, BackupConfig{Dir: dir}).Callback()},
				})
				if err != nil {
					t.Fatal(err)
				}
				if got.Steps != steps {
					t.Errorf("%d steps, want %d", got.Steps, steps)
				}
				if timeless(got); steps == 8 && (!reflect.DeepEqual(got, want) ||
					!reflect.DeepEqual(againProgram.snapshot(), program.snapshot())) {
					t.Errorf("after %d steps, %d a epoch: got\n%+v, want\n%+v", first, per, got, want)
				}
			}
		}
	}
}

// fitWithBackup trains over workers with a Backup, and returns the chief's history and the state of all replicas.
func fitWithBackup(t *testing.T, layout []int, ds data.Dataset, cfg FitConfig, own BackupConfig) (*History,
	[]fakeValues, Restored,
) {
	t.Helper()
	states := make([][]fakeValues, len(layout))
	histories := make([]*History, len(layout))
	restored := make([]Restored, len(layout))
	errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
		if err != nil {
			return err
		}
		defer trainer.Close()
		mine, its := cfg, own
		if w > 0 { // the chief's configuration applies; the others access no folder
			its = BackupConfig{Dir: filepath.Join(os.DevNull, "none"), EverySteps: w, Resume: os.DevNull}
		}
		b := backup(t, trainer, its)
		if restored[w], err = b.Restore(t.Context()); err != nil {
			return err
		}
		mine.Callbacks = append(mine.Callbacks, b.Callback())
		if histories[w], err = trainer.Fit(t.Context(), ds, mine); err != nil {
			return err
		}
		timeless(histories[w])
		states[w] = trainer.program.(*fakeProgram).snapshot()
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%v: %v", layout, err)
	}
	for w := range layout {
		if !reflect.DeepEqual(histories[w], histories[0]) || !reflect.DeepEqual(restored[w], restored[0]) {
			t.Errorf("%v: worker %d has\n%+v, %+v, the chief\n%+v, %+v", layout, w, histories[w], restored[w], histories[0],
				restored[0])
		}
	}
	return histories[0], slices.Concat(states...), restored[0]
}

// TestResumeOverWorkers checks that three replicas resume from a snapshot of any layout in any other layout, with the
// bits of one worker.
func TestResumeOverWorkers(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	cfg := FitConfig{Epochs: 3, Validation: ds}
	trainer, program := newFake(t, 3, 7, fakeModel{})
	want, err := trainer.Fit(t.Context(), ds, cfg)
	if err != nil {
		t.Fatal(err)
	}
	timeless(want)
	layouts := [][]int{{3}, {1, 1, 1}, {1, 2}, {2, 1}}
	if testing.Short() {
		t.Log("-short: from each layout to one other")
	}
	for i, from := range layouts {
		for j, to := range layouts {
			if testing.Short() && j != (i+1)%len(layouts) {
				continue
			}
			dir := filepath.Join(t.TempDir(), "not", "there")
			some := cfg
			some.Steps = 1 + (3*i+j)%8
			fitWithBackup(t, from, ds, some, BackupConfig{Dir: dir, EverySteps: 2})
			got, state, restored := fitWithBackup(t, to, ds, cfg, BackupConfig{Dir: dir})
			if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(state, program.snapshot()) {
				t.Errorf("%v to %v: got\n%+v\n%v, want\n%+v\n%v", from, to, got, state, want, program.snapshot())
			}
			if !restored.Found || restored.Step != int64(some.Steps) || restored.Differ != nil || restored.Refused != nil ||
				filepath.Dir(restored.Path) != dir {
				t.Errorf("%v to %v: %+v", from, to, restored)
			}
		}
	}
}

// TestResumeOnOtherReplicas checks that a snapshot can be resumed with another number of replicas: averages are
// combined, and Restored reports that bits differ.
func TestResumeOnOtherReplicas(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	dir := t.TempDir()
	_, before, _ := fitWithBackup(t, []int{2, 1}, ds, FitConfig{Epochs: 3, Steps: 4}, BackupConfig{Dir: dir})
	mean := (before[0][4][0] + before[1][4][0] + before[2][4][0]) / 3
	for _, layout := range [][]int{{1}, {2}, {1, 1}, {2, 2}} {
		got, state, restored := fitWithBackup(t, layout, ds, FitConfig{Epochs: 3, Steps: 4}, BackupConfig{Resume: dir})
		if got.Steps != 4 || len(restored.Differ) != 1 ||
			!strings.Contains(restored.Differ[0], "made by 3 replicas, this is ") {
			t.Errorf("%v: %+v, %+v", layout, got, restored)
		}
		for _, replica := range state {
			if !reflect.DeepEqual(replica[:4], before[0][:4]) || replica[4][0] != mean {
				t.Errorf("%v: got %v, want those of %v and the average %v", layout, replica, before[0], mean)
			}
		}
		if got, _, _ = fitWithBackup(t, layout, ds, FitConfig{Epochs: 3}, BackupConfig{Resume: dir}); got.Steps != 9 {
			t.Errorf("%v: %d steps, want 9", layout, got.Steps)
		}
	}
}

// TestRestoreFailsEverywhere checks that all workers return the same error if the chief cannot read a snapshot or must
// not write one.
func TestRestoreFailsEverywhere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		cfg  BackupConfig
		want string
	}{
		{BackupConfig{Resume: filepath.Join(file, "absent")}, "absent"},
		{BackupConfig{Resume: file}, "file is not a folder"},
		{BackupConfig{Dir: filepath.Join(file, "dir")}, "file"},
	} {
		errs := overWorkers(t, []int{1, 2}, func(_ int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(7))
			if err != nil {
				return err
			}
			defer trainer.Close()
			_, err = backup(t, trainer, c.cfg).Restore(t.Context())
			return err
		})
		for w, err := range errs {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v: worker %d: %v, want %q", c.cfg, w, err, c.want)
			}
		}
	}
}

// TestRestoreRefuses checks that a snapshot of a different training is refused and changes nothing.
func TestRestoreRefuses(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	dir := t.TempDir()
	saving, _ := newFake(t, 2, 7, fakeModel{})
	facts := []Fact{{"model", "line"}, {"data set", "examples"}}
	b := backup(t, saving, BackupConfig{Dir: dir, Facts: facts, Build: []Fact{{"engine", "one"}}})
	if _, err := saving.Fit(t.Context(), ds, FitConfig{Steps: 2, Callbacks: []Callback{b.Callback()}}); err != nil {
		t.Fatal(err)
	}
	s, err := saving.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(s *Snapshot){
		"made with seed 4 and a global batch of 7 examples, and this training has seed 3": func(s *Snapshot) { s.Seed = 4 },
		"a global batch of 8 examples":      func(s *Snapshot) { s.GlobalBatch = 8 },
		"the snapshot has no variable bias": func(s *Snapshot) { s.Variables = s.Variables[1:] },
		"the model has no variable another": func(s *Snapshot) {
			s.Variables = append(s.Variables, Weight{"another", s.Variables[0].Value})
		},
		"seen: got float64(2,), want float64(3,)": func(s *Snapshot) { s.Replicas = 3 },
		"weights: got float32(2,), want float64(2,)": func(s *Snapshot) {
			s.Variables[1].Value = tensor.New(tensor.Float32, 2)
		},
	} {
		trainer, program := newFake(t, 2, 7, fakeModel{})
		before, bad := program.snapshot(), *s
		bad.Variables = slices.Clone(s.Variables)
		change(&bad)
		if _, err := trainer.Restore(t.Context(), &bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
		if !reflect.DeepEqual(program.snapshot(), before) || trainer.Steps() != 0 {
			t.Errorf("%s: the trainer was changed", want)
		}
	}
	for want, cfg := range map[string]BackupConfig{
		"is of another training: its model is line, here it is curve; its data set is examples, this training has none": {
			Dir: dir, Facts: []Fact{{"model", "curve"}},
		},
		"it does not record its optimizer, this training has sgd": {
			Resume: dir, Facts: append([]Fact{{"optimizer", "sgd"}}, facts...),
		},
	} {
		trainer, _ := newFake(t, 2, 7, fakeModel{})
		if _, err := backup(t, trainer, cfg).Restore(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	trainer, _ := newFake(t, 2, 7, fakeModel{})
	r, err := backup(t, trainer, BackupConfig{
		Dir: dir, Facts: facts,
		Build: []Fact{{"engine", "two"}},
	}).Restore(t.Context())
	if err != nil || !slices.Equal(r.Differ, []string{"its engine is one, here it is two"}) || r.Step != 2 ||
		r.EpochAt != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	for want, fit := range map[string]struct {
		ds  data.Dataset
		cfg FitConfig
	}{
		"FitConfig.StepsPerEpoch is 2, but the snapshot was taken with 0": {ds, FitConfig{StepsPerEpoch: 2}},
		"FitConfig.Accumulate is 2, but the snapshot was taken with 1":    {ds, FitConfig{Accumulate: 2}},
		"FitConfig.InitialEpoch is 1":                                     {ds, FitConfig{InitialEpoch: 1, Epochs: 2}},
		"this dataset has 2 batches, but the snapshot's had 3":            {sizes(lineExamples(14), 7, 7), FitConfig{}},
		"the dataset has 1 batches, but the snapshot was taken after 2": {
			data.Of(ds).Take(1).Through(identity),
			FitConfig{},
		},
	} {
		if _, err := trainer.Restore(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if _, err := backup(t, trainer, BackupConfig{
			Resume: dir, Facts: facts,
			Build: []Fact{{"engine", "one"}},
		}).Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := trainer.Fit(t.Context(), fit.ds, fit.cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// identity is a dataset's elements without its length.
func identity(_ context.Context, seq iter.Seq2[data.Element, error]) iter.Seq2[data.Element, error] {
	return seq
}

// TestResumeModes checks the modes auto and never, and a newest snapshot that is damaged.
func TestResumeModes(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	dir := t.TempDir()
	train := func(resume string, steps int) (*History, Restored) {
		t.Helper()
		trainer, _ := newFake(t, 2, 7, fakeModel{})
		b := backup(t, trainer, BackupConfig{Dir: dir, EverySteps: 1, Resume: resume})
		r, err := b.Restore(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var stop []Callback // before the first step
		if steps == 0 {
			stop = []Callback{{OnTrainBegin: func(context.Context) error { return ErrStop }}}
		}
		h, err := trainer.Fit(t.Context(), ds, FitConfig{Epochs: 9, Steps: steps, Callbacks: append(stop, b.Callback())})
		if err != nil {
			t.Fatal(err)
		}
		return h, r
	}
	if _, r := train("auto", 3); r.Found {
		t.Errorf("an empty folder: %+v", r)
	}
	if _, r := train(ResumeAuto, 5); r.Step != 3 {
		t.Errorf("auto: %+v", r)
	}
	if h, r := train(ResumeNever, 2); r.Found || h.Steps != 2 {
		t.Errorf("never: %+v, %d steps", r, h.Steps)
	}
	if _, r := train(ResumeAuto, 2); r.Step != 2 { // the newest, not the one of most steps
		t.Errorf("auto, after never: %+v", r)
	}
	if _, r := train(ResumeNever, 0); r.Found { // as if killed before its first step
		t.Errorf("never: %+v", r)
	}
	if _, r := train(ResumeAuto, 3); !r.Found || r.Step != 0 {
		t.Errorf("auto, after never and nothing more: %+v", r)
	}
	paths, err := checkpoint.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	before := paths[0]
	if _, r := train(before, 0); r.Path != before || r.Step != 2 {
		t.Errorf("from the one before: %+v", r)
	}
	if _, r := train(ResumeAuto, 0); r.Step != 2 || r.EpochAt != 2 {
		t.Errorf("auto, after the one before: %+v", r)
	}
	if _, r := train(ResumeAuto, 3); r.Step != 2 {
		t.Errorf("auto, again: %+v", r)
	}
	if paths, err = checkpoint.List(dir); err != nil {
		t.Fatal(err)
	}
	newest := paths[len(paths)-1]
	if err := os.Truncate(filepath.Join(newest, "state.safetensors"), 30); err != nil {
		t.Fatal(err)
	}
	_, r := train(ResumeAuto, 4)
	if r.Path != paths[len(paths)-2] || len(r.Refused) != 1 ||
		!strings.Contains(r.Refused[0], newest+" is refused: state.safetensors has 30 bytes") {
		t.Errorf("with a damaged one: %+v", r)
	}
	if _, err := NewBackup(nil, BackupConfig{EverySteps: -1}); err == nil {
		t.Error("EverySteps -1 was accepted")
	}
}

// FuzzSnapshotState checks that resuming from any state in a manifest ends with a history or an error.
func FuzzSnapshotState(f *testing.F) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	saving, _ := newFake(f, 2, 7, fakeModel{})
	var good *checkpoint.Contents
	_, err := saving.Fit(f.Context(), ds, FitConfig{
		Epochs: 2, Validation: ds,
		Callbacks: []Callback{{OnStepEnd: func(ctx context.Context, _ Step) error {
			s, err := saving.Snapshot(ctx)
			if err != nil {
				return err
			}
			good, err = s.Contents()
			f.Add([]byte(good.State))
			return err
		}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(`{"replicas":1,"global_batch":7,"seed":3,"fit":{"epoch":1,"pass":9,"batch":5,"batches":3}}`))
	f.Add([]byte(`{"replicas":1,"global_batch":7,"seed":3,"divided":{"weights":[2],"momentum/weights":[-1]}}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		s, err := SnapshotOf(&checkpoint.Contents{State: state, Tensors: good.Tensors})
		if err != nil {
			return
		}
		trainer, _ := newFake(t, 2, 7, fakeModel{})
		if _, err := trainer.Restore(t.Context(), s); err != nil {
			return
		}
		if h, err := trainer.Fit(t.Context(), ds, FitConfig{Epochs: 2, Steps: 9}); h == nil {
			t.Errorf("no history, %v", err)
		}
	})
}

// FuzzSharedTensor checks that a tensor's bytes match its description, or are refused.
func FuzzSharedTensor(f *testing.F) {
	f.Add(uint8(tensor.Float32), 2, 3, make([]byte, 24))
	f.Add(uint8(tensor.Int8), 0, 1<<20, []byte{})
	f.Add(uint8(tensor.Float64), math.MaxInt, math.MaxInt, make([]byte, 8))
	f.Fuzz(func(t *testing.T, dtype uint8, rows, columns int, elements []byte) {
		d := tensor.DType(dtype)
		v, err := tensorHeader{"x", d, []int{rows, columns}}.value(elements)
		if err == nil && (v.DType() != d || !slices.Equal(v.Shape(), []int{rows, columns}) ||
			string(v.Memory().HostBytes()) != string(elements)) {
			t.Errorf("%d (%d, %d) of %d bytes: got %v", dtype, rows, columns, len(elements), v)
		}
		fits := d.Valid() && d != tensor.String && rows >= 0 && columns >= 0 && rows < 1<<20 && columns < 1<<20 &&
			rows*columns*d.Bytes() == len(elements)
		if fits != (err == nil) && rows < 1<<20 && columns < 1<<20 {
			t.Errorf("%d (%d, %d) of %d bytes: got %v", dtype, rows, columns, len(elements), err)
		}
	})
}

// TestRestart checks that a restarted job resumes from the newest snapshot if it wrote that itself, whatever Resume is,
// and from no other job's snapshot.
func TestRestart(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	other, dir := t.TempDir(), t.TempDir()
	for _, layout := range [][]int{{2}, {1, 1}} {
		fitWithBackup(t, layout, ds, FitConfig{Steps: 1}, BackupConfig{Dir: other, Resume: ResumeNever, Job: "former"})
		fitWithBackup(t, layout, ds, FitConfig{Steps: 2}, BackupConfig{Dir: dir, Resume: ResumeNever, Job: "former"})
		for resume, first := range map[string]int64{ResumeNever: 0, other: 1} {
			_, _, r := fitWithBackup(t, layout, ds, FitConfig{Epochs: 9, Steps: 4},
				BackupConfig{Dir: dir, Resume: resume, Job: "own", Epoch: 1})
			if r.Step != first {
				t.Errorf("%v, resume %q, without a snapshot: %+v", layout, resume, r)
			}
			_, _, r = fitWithBackup(t, layout, ds, FitConfig{Epochs: 9, Steps: 5},
				BackupConfig{Dir: dir, Resume: resume, Job: "own", Epoch: 1})
			if r.Step != 4 {
				t.Errorf("%v, resume %q, with one: %+v", layout, resume, r)
			}
			_, _, r = fitWithBackup(t, layout, ds, FitConfig{Epochs: 9, Steps: 5},
				BackupConfig{Dir: dir, Resume: resume, Job: "own"})
			if r.Step != first {
				t.Errorf("%v, resume %q, when it was not restarted: %+v", layout, resume, r)
			}
			fitWithBackup(t, layout, ds, FitConfig{Steps: 2}, BackupConfig{Dir: dir, Resume: ResumeNever, Job: "former"})
		}
	}
}

// TestBackupFails checks that a snapshot that cannot be written ends training on all workers, with an error that names
// the last snapshot.
func TestBackupFails(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	for _, layout := range [][]int{{2}, {1, 2}} {
		for _, every := range []int{0, 1} {
			dir := filepath.Join(t.TempDir(), "dir")
			errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
				trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(7))
				if err != nil {
					return err
				}
				defer trainer.Close()
				lose := Callback{OnStepEnd: func(_ context.Context, s Step) error {
					if w == 0 && s.Epoch == 1 && s.Step == 2 {
						return os.Rename(dir, dir+" elsewhere")
					}
					return nil
				}}
				b := backup(t, trainer, BackupConfig{Dir: dir, EverySteps: every})
				h, err := trainer.Fit(t.Context(), ds, FitConfig{Epochs: 1000, Callbacks: []Callback{lose, b.Callback()}})
				if h.Steps > 20 {
					t.Errorf("%v: worker %d continued for %d steps", layout, w, h.Steps)
				}
				return err
			})
			for w, err := range errs {
				if err == nil || !strings.Contains(err.Error(),
					"training stops because it could not be resumed: checkpoint: the snapshot ") ||
					// one may be in progress
					!strings.Contains(err.Error(), "could not be written") &&
						!strings.Contains(err.Error(), "was written, but old ones could not be removed") {
					t.Errorf("%v, every %d: worker %d ends with %v", layout, every, w, err)
				}
			}
		}
	}
}

// TestModelCheckpoint checks which epochs' weights are written, and under which names.
func TestModelCheckpoint(t *testing.T) {
	ds := sizes(lineExamples(16), 7, 7, 2)
	fit := func(m ModelCheckpointConfig, validation data.Dataset) error {
		trainer, _ := newFake(t, 2, 7, fakeModel{})
		c, err := NewModelCheckpoint(trainer, m)
		if err != nil {
			return err
		}
		_, err = trainer.Fit(t.Context(), ds, FitConfig{Epochs: 3, Validation: validation, Callbacks: []Callback{c}})
		return err
	}
	dir := t.TempDir()
	if err := fit(ModelCheckpointConfig{Path: filepath.Join(dir, "w-{epoch:02d}-{step}")}, nil); err != nil {
		t.Fatal(err)
	}
	best := ModelCheckpointConfig{
		Path: filepath.Join(dir, "best"), BestOnly: true, Metadata: map[string]string{"classes": "cat, dog"},
	}
	if err := fit(best, ds); err != nil {
		t.Fatal(err)
	}
	if _, metadata, err := checkpoint.Load(best.Path); err != nil || metadata["classes"] != "cat, dog" {
		t.Errorf("metadata %v, %v", metadata, err)
	}
	if err := fit(ModelCheckpointConfig{Path: filepath.Join(dir, "worst-{epoch}"), BestOnly: true, Mode: ModeMax},
		ds); err != nil {
		t.Fatal(err)
	}
	// Training that is stopped within an epoch has no val_loss of it.
	check(t, os.Mkdir(filepath.Join(dir, "stopped"), 0o777))
	trainer, _ := newFake(t, 2, 7, fakeModel{})
	c, err := NewModelCheckpoint(trainer, ModelCheckpointConfig{Path: filepath.Join(dir, "stopped",
		"val-{epoch}-{val_loss:.0f}-{near:.0f}")})
	if err != nil {
		t.Fatal(err)
	}
	steps := 0
	if h, err := trainer.Fit(t.Context(), ds, FitConfig{
		Epochs: 3, Validation: ds,
		Callbacks: []Callback{{OnStepEnd: func(context.Context, Step) error {
			if steps++; steps == 5 {
				return ErrStop
			}
			return nil
		}}, c},
	}); err != nil || !h.Stopped || h.Steps != 5 {
		t.Errorf("stopped within the second epoch: %+v, %v", h, err)
	}
	if list, _ := filepath.Glob(filepath.Join(dir, "stopped", "*")); len(list) != 1 ||
		!strings.HasPrefix(filepath.Base(list[0]), "val-1-") {
		t.Errorf("got %v, want the first epoch's", list)
	}
	check(t, os.RemoveAll(filepath.Join(dir, "stopped")))
	entries, err := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"best", "w-01-3", "w-02-6", "w-03-9", "worst-1"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("got %v, want %v", names, want)
	}
	tensors, metadata, err := checkpoint.Load(filepath.Join(dir, "best"))
	if err != nil || len(tensors) != 3 || metadata["epoch"] != "3" {
		t.Errorf("%v, %v, %v", tensors, metadata, err)
	}
	for want, m := range map[string]ModelCheckpointConfig{
		"Path is empty":                   {},
		"FitConfig.Validation is not set": {Path: "x", BestOnly: true},
		"the model has no such metric":    {Path: "x", BestOnly: true, Monitor: "accuracy"},
		"no number is named recall":       {Path: "{recall:.2f}"},
		"val_near does not exist, because FitConfig.Validation is not set": {Path: "{val_near}"},
	} {
		if err := fit(m, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want %q", m, err, want)
		}
	}
}

// TestDivergedSnapshots: no snapshot is written of workers whose mirrored variables differ, and training ends there.
func TestDivergedSnapshots(t *testing.T) {
	for _, layout := range [][]int{{1, 1}, {2}, {1, 2}} {
		dir := t.TempDir()
		errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(8)
			cfg.Logger = slog.New(slog.DiscardHandler)
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			b := backup(t, trainer, BackupConfig{Dir: dir, EverySteps: 2, Keep: 9})
			flip := Callback{OnStepEnd: func(context.Context, Step) error {
				if w == len(layout)-1 && trainer.Steps() == 5 {
					replicas := trainer.program.(*fakeProgram).replicas
					bits := math.Float64bits(replicas[len(replicas)-1].now[1][0])
					replicas[len(replicas)-1].now[1][0] = math.Float64frombits(bits ^ 1)
				}
				return nil
			}}
			_, err = trainer.Fit(t.Context(), sizes(lineExamples(80), 8, 8, 8, 8, 8, 8, 8, 8, 8, 8), FitConfig{
				Callbacks: []Callback{flip, b.Callback()},
			})
			return err
		})
		for w, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "the mirrored variable weights is no longer the same") {
				t.Errorf("%v, worker %d: %v", layout, w, err)
			}
		}
		last, _, err := checkpoint.Latest(dir)
		if err != nil || last == nil {
			t.Fatalf("%v: no snapshot: %v", layout, err)
		}
		if s, err := SnapshotOf(&last.Contents); err != nil || s.Step != 4 {
			t.Errorf("%v: the last snapshot is of step %d, want 4: %v", layout, s.Step, err)
		}
	}
}

// TestContextEnds: a context that ends in Fit stops the workers after the same step, with a snapshot, and the error
// says so in one line.
func TestContextEnds(t *testing.T) {
	for _, layout := range [][]int{{2}, {1, 1}} {
		dir := t.TempDir()
		histories := make([]*History, len(layout))
		errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(8)
			cfg.Logger = slog.New(slog.DiscardHandler)
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			ctx, cancel := context.WithCancelCause(t.Context())
			b := backup(t, trainer, BackupConfig{Dir: dir})
			end := Callback{OnStepEnd: func(context.Context, Step) error {
				if w == 0 && trainer.Steps() == 3 {
					cancel(errors.New("the service ends"))
					for !trainer.stopping.Load() {
						time.Sleep(time.Millisecond)
					}
				}
				return nil
			}}
			histories[w], err = trainer.Fit(ctx, sizes(lineExamples(64), 8, 8, 8, 8, 8, 8, 8, 8), FitConfig{
				Epochs: 5, Callbacks: []Callback{end, b.Callback()},
			})
			if trainer.stopping.Load() {
				t.Error("the stop request is left")
			}
			return err
		})
		const want = "train: stopped by the context in step 3: the service ends"
		if errs[0] == nil || errs[0].Error() != want {
			t.Errorf("%v: got %v, want %s", layout, errs[0], want)
		}
		for w, h := range histories {
			if w > 0 && errs[w] != nil {
				t.Errorf("%v, worker %d: %v", layout, w, errs[w])
			}
			if h.Steps != 3 || !h.Stopped {
				t.Errorf("%v, worker %d: %d steps, stopped %t", layout, w, h.Steps, h.Stopped)
			}
		}
		last, _, err := checkpoint.Latest(dir)
		if err != nil || last == nil {
			t.Fatalf("%v: no snapshot: %v", layout, err)
		}
		if s, err := SnapshotOf(&last.Contents); err != nil || s.Step != 3 {
			t.Errorf("%v: the last snapshot is of step %d, want 3: %v", layout, s.Step, err)
		}
	}
}

// TestRestoreReportsProgress: a worker that reads a snapshot reports progress for what it has read: to the others, one
// that reports none has hung.
func TestRestoreReportsProgress(t *testing.T) {
	dir := t.TempDir()
	fitWithBackup(t, []int{2}, sizes(lineExamples(16), 7, 7, 2), FitConfig{Steps: 1}, BackupConfig{Dir: dir})
	trainer, _ := newFake(t, 2, 7, fakeModel{})
	reports := 0
	trainer.config.Progress = func(_ int64, phase Phase) {
		if phase == PhaseRestore {
			reports++
		}
	}
	b := backup(t, trainer, BackupConfig{Dir: dir, Resume: ResumeAuto})
	if r, err := b.Restore(t.Context()); err != nil || !r.Found {
		t.Fatalf("%+v, %v", r, err)
	}
	if reports < 3 { // that the phase begins, and two passes over the file
		t.Errorf("%d reports, want at least 3", reports)
	}
}
