package train

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// overWorkers runs f on every worker concurrently, and returns the error of each. layout lists the number of replicas
// of each worker.
func overWorkers(t failer, layout []int, f func(worker int, s *distribute.Strategy) error) []error {
	t.Helper()
	engines := make([]engine.Engine, len(layout))
	for w, n := range layout {
		engines[w] = fakeEngine{n}
	}
	return overWorkersOn(t, layout, engines, f)
}

// overReplicas is overWorkers with the ids of each worker's replicas.
func overReplicas(t failer, ids [][]int, f func(worker int, s *distribute.Strategy) error) []error {
	t.Helper()
	engines := make([]engine.Engine, len(ids))
	for w := range ids {
		engines[w] = fakeEngine{len(ids[w])}
	}
	return overReplicasOn(t, ids, engines, f)
}

// overWorkersOn is overWorkers with an engine for each worker.
func overWorkersOn(t failer, layout []int, engines []engine.Engine,
	f func(worker int, s *distribute.Strategy) error,
) []error {
	t.Helper()
	ids, next := make([][]int, len(layout)), 0
	for w, n := range layout {
		for range n {
			ids[w] = append(ids[w], next)
			next++
		}
	}
	return overReplicasOn(t, ids, engines, f)
}

// overReplicasOn is overWorkersOn with the ids of each worker's replicas.
func overReplicasOn(t failer, ids [][]int, engines []engine.Engine,
	f func(worker int, s *distribute.Strategy) error,
) []error {
	t.Helper()
	replicas := 0
	var tasks []string
	for w := range ids {
		replicas += len(ids[w])
		tasks = append(tasks, fmt.Sprintf("host%d:1", w))
	}
	spec := cluster.NewSpec(map[string][]string{"worker": tasks})
	ends := mem.NewPipes(replicas)
	errs := make([]error, len(ids))
	var done, all sync.WaitGroup
	all.Add(len(ids))
	for w := range ids {
		var own []transport.Endpoint
		var devices []string
		for i, id := range ids[w] {
			own, devices = append(own, ends[id]), append(devices, fmt.Sprintf("CPU:%d", i))
		}
		group, err := collective.Open(own, collective.Config{Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		done.Go(func() {
			s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
				Resolver: &cluster.Simple{Cluster: spec, This: &cluster.Task{Type: "worker", Index: w}},
				Devices:  devices, Group: group, Engine: engines[w], Options: distribute.Options{Timeout: time.Minute},
			})
			if err != nil {
				errs[w] = errors.Join(err, group.Close())
				all.Done()
				return
			}
			errs[w] = f(w, s)
			all.Done()
			all.Wait() // no worker leaves while others need it
			errs[w] = errors.Join(errs[w], s.Close())
		})
	}
	done.Wait()
	return errs
}

// failer is the common part of testing.T and rapid.T.
type failer interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
}

// fitOver trains a fake model over workers, each with its own callbacks. It returns their histories without times,
// their weights and their errors.
func fitOver(t failer, layout []int, seen func(worker int) data.Dataset,
	cfg func(worker int, trainer *Trainer) FitConfig,
) (histories []*History, weights []string, errs []error) {
	t.Helper()
	histories, weights = make([]*History, len(layout)), make([]string, len(layout))
	errs = overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
		trainer, err := New(context.Background(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
		if err != nil {
			return err
		}
		defer trainer.Close()
		histories[w], err = trainer.Fit(context.Background(), seen(w), cfg(w, trainer))
		timeless(histories[w])
		if err != nil {
			return err
		}
		weights[w], err = trainer.WeightsHash(context.Background())
		return err
	})
	return histories, weights, errs
}

func timeless(h *History) {
	h.Speed = Speed{}
	if len(h.Epochs) == 0 {
		h.Epochs = nil
	}
	for i := range h.Epochs {
		h.Epochs[i].Duration = 0
	}
}

// stopAt is a callback that requests a stop at the n-th event, counted from 0.
func stopAt(n int) Callback {
	event := func() error {
		n--
		if n == -1 {
			return ErrStop
		}
		return nil
	}
	return Callback{
		OnTrainBegin: func(context.Context) error { return event() },
		OnEpochBegin: func(context.Context, EpochBegin) error { return event() },
		OnStepEnd:    func(context.Context, Step) error { return event() },
		OnEpochEnd:   func(context.Context, Epoch) error { return event() },
	}
}

// TestStopOverWorkers checks that after a stop request, of any worker at any event, all workers end after the step
// after which a single worker would end, with its history and bits.
func TestStopOverWorkers(t *testing.T) {
	examples := lineExamples(16)
	layouts := [][]int{{1, 1, 1}, {1, 2}, {2, 1}}
	rapid.Check(t, func(rt *rapid.T) {
		layout := rapid.SampledFrom(layouts).Draw(rt, "layout")
		event := rapid.IntRange(0, 16).Draw(rt, "event")
		who := rapid.SliceOfNDistinct(rapid.IntRange(0, len(layout)-1), 1, len(layout), rapid.ID).Draw(rt, "who")
		cfg := FitConfig{Epochs: 3}
		if rapid.Bool().Draw(rt, "validation") {
			cfg.Validation = sizes(examples, 7, 3)
		}
		steps := 9
		if rapid.Bool().Draw(rt, "steps per epoch") {
			cfg.StepsPerEpoch, steps = 2, 6
		}
		ds := sizes(examples, 7, 7, 2)

		trainer, _ := newFake(t, 3, 7, fakeModel{rate: 1.0 / 64})
		alone := cfg
		alone.Callbacks = []Callback{stopAt(event)}
		want, err := trainer.Fit(t.Context(), ds, alone)
		if err != nil {
			rt.Fatal(err)
		}
		timeless(want)
		hash, err := trainer.WeightsHash(t.Context())
		if err != nil {
			rt.Fatal(err)
		}

		histories, weights, errs := fitOver(rt, layout, func(int) data.Dataset { return ds },
			func(w int, _ *Trainer) FitConfig {
				mine := cfg
				mine.Callbacks = []Callback{{}}
				if slices.Contains(who, w) {
					mine.Callbacks = append(mine.Callbacks, stopAt(event))
				}
				return mine
			})
		for w, got := range histories {
			if errs[w] != nil {
				rt.Errorf("worker %d: %v", w, errs[w])
				continue
			}
			if got.Steps == steps { // the complete training: no worker was left to notify
				want.Stopped = got.Stopped
			}
			if weights[w] != hash || !reflect.DeepEqual(got, want) {
				rt.Errorf("worker %d has\n%+v, %s, one worker\n%+v, %s", w, got, weights[w], want, hash)
			}
		}
	})
}

// TestStopFromOutside checks that Stop on one worker ends an endless Fit on all workers after the same step. It ends
// nothing else: later evaluations run until they are stopped themselves.
func TestStopFromOutside(t *testing.T) {
	for _, layout := range [][]int{{2}, {1, 1}, {1, 2}} {
		steps := make([]int, len(layout))
		errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(7))
			if err != nil {
				return err
			}
			defer trainer.Close()
			var cfg FitConfig
			if w == len(layout)-1 {
				cfg.Callbacks = []Callback{{OnStepEnd: func(_ context.Context, s Step) error {
					if s.Step == 5 {
						go trainer.Stop()
					}
					return nil
				}}}
			}
			h, err := trainer.Fit(t.Context(), fromTensors(lineExamples(7)).Batch(7).Repeat(-1), cfg)
			if err != nil || !h.Stopped {
				return fmt.Errorf("stopped: %v, error %w", h.Stopped, err)
			}
			steps[w] = h.Steps
			evaluate := func() error {
				_, err := trainer.Evaluate(t.Context(), sizes(lineExamples(7), 7))
				return err
			}
			if err := evaluate(); err != nil {
				return fmt.Errorf("the evaluation after a Fit that was stopped: %w", err)
			}
			if w == len(layout)-1 {
				trainer.Stop()
			}
			if err := evaluate(); !errors.Is(err, ErrStop) || strings.Contains(err.Error(), "callback") {
				return fmt.Errorf("the evaluation after Stop ends with %v", err)
			}
			if err := evaluate(); err != nil {
				return fmt.Errorf("the evaluation after one that was stopped: %w", err)
			}
			return nil
		})
		if err := errors.Join(errs...); err != nil {
			t.Errorf("%v: %v", layout, err)
		}
		if steps[0] < 5 || slices.Min(steps) != slices.Max(steps) {
			t.Errorf("%v: the workers made %v steps", layout, steps)
		}
	}
}

// TestFailureIsReported checks that a failure of one worker between steps ends Fit on all workers.
func TestFailureIsReported(t *testing.T) {
	cause := errors.New("the disk is full")
	examples := lineExamples(16)
	good := sizes(examples, 7, 7, 2)
	for _, c := range []struct {
		name     string
		bad      data.Dataset // of worker 1
		callback Callback     // of worker 1
		want     string       // in all workers' errors
	}{
		{"at the beginning", good, Callback{OnTrainBegin: func(context.Context) error { return cause }}, cause.Error()},
		{
			"before an epoch", good,
			Callback{OnEpochBegin: func(context.Context, EpochBegin) error { return cause }},
			cause.Error(),
		},
		{"after a step", good, Callback{OnStepEnd: func(context.Context, Step) error { return cause }}, cause.Error()},
		{"after the last epoch", good, Callback{OnEpochEnd: func(_ context.Context, e Epoch) error {
			if e.Epoch == 1 {
				return cause
			}
			return nil
		}}, cause.Error()},
		{
			"other data", sizes(lineExamples(9), 7, 2),
			Callback{},
			"the workers do not make the same step: worker 1: 2 examples in batch 2 of pass 1 over the data, workers 0, 2: 7. " +
				"All workers must read",
		},
		{
			"fewer data", sizes(examples, 7, 7),
			Callback{},
			"the workers do not make the same step: worker 1: batch 1 of pass 2 over the data, workers 0, 2: batch 3 of pass 1",
		},
		{"damaged data", batches(data.Batch{}), Callback{}, "it has 0 inputs: want 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, errs := fitOver(t, []int{1, 1, 1}, func(w int) data.Dataset {
				if w == 1 {
					return c.bad
				}
				return good
			}, func(w int, _ *Trainer) FitConfig {
				cfg := FitConfig{Epochs: 2}
				if w == 1 {
					cfg.Callbacks = []Callback{c.callback}
				}
				return cfg
			})
			for w, err := range errs {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("worker %d ends with %v, want %q", w, err, c.want)
				}
			}
		})
	}
}

// namedEngine is a fakeEngine of another name.
type namedEngine struct {
	fakeEngine
	name string
}

func (e namedEngine) Name() string { return e.name }

// TestProgramsNotCompared checks that the chief logs one warning if programs are not compared because the engines have
// different names.
func TestProgramsNotCompared(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  string // in the chief's log; "": no warning
	}{
		{[]string{"fake", "fake", "fake"}, ""},
		{[]string{"fake", "other", "fake"}, `msg="train: engines of different names build different programs of one model, ` +
			`which are not compared: make sure that all workers have the same model, loss and optimizer, with the same ` +
			`constants" engine=fake "workers with others"=[1]`},
	} {
		var engines []engine.Engine
		for _, name := range c.names {
			engines = append(engines, namedEngine{fakeEngine{1}, name})
		}
		logs := make([]strings.Builder, len(engines))
		errs := overWorkersOn(t, []int{1, 1, 1}, engines, func(w int, s *distribute.Strategy) error {
			cfg, m := fakeConfig(6), fakeModel{}
			cfg.Logger = slog.New(slog.NewTextHandler(&logs[w], nil))
			if engines[w].Name() == "other" {
				m.rate = 1
			}
			trainer, err := New(t.Context(), s, m, cfg)
			if err != nil {
				return err
			}
			return trainer.Close()
		})
		if err := errors.Join(errs...); err != nil {
			t.Errorf("%v: %v", c.names, err)
		}
		for w := range logs {
			want := c.want
			if w > 0 {
				want = ""
			}
			if got := logs[w].String(); !strings.Contains(got, want) || strings.Count(got, "\n") != min(1, len(want)) {
				t.Errorf("%v: worker %d logs %q, want %q", c.names, w, got, want)
			}
		}
	}
}

// TestStartEqual checks that all workers begin with the chief's values, whatever their own initial values are; that
// values are sent only if they differ; that different models are an error on all workers; and that a worker that cannot
// compile its model is reported to the others.
func TestStartEqual(t *testing.T) {
	refuse := errors.New("no such operation")
	for _, c := range []struct {
		name   string
		change func(*Config, *fakeModel) // on worker 1
		want   string                    // there; "": it works
	}{
		{"the same values", func(*Config, *fakeModel) {}, ""},
		{"other values", func(_ *Config, m *fakeModel) { m.start = 7 }, ""},
		{
			"other seed", func(c *Config, _ *fakeModel) { c.Seed = 9 },
			"this worker's model differs from the chief's: it has seed 9, the chief has seed 3",
		},
		{
			"other batch", func(c *Config, _ *fakeModel) { c.GlobalBatch = 8 },
			"global batches of 8, the chief has global batches of 7",
		},
		{
			"other rate", func(_ *Config, m *fakeModel) { m.rate = 0.25 },
			"train: the workers have compiled different programs: worker 1 computes \"update: momentum, rate 0.25\", where " +
				"worker 0 computes \"update: momentum, rate 0\". Give all workers the same model",
		},
		{
			"other buckets", func(_ *Config, m *fakeModel) { m.turn = true },
			"this worker's model differs from the chief's: it has bucket 0 of 1 gradient (hash of names: ",
		},
		{
			"what other buckets mean", func(_ *Config, m *fakeModel) { m.turn = true },
			"): give all workers the same model, engine, build and Config.BucketBytes",
		},
		{"a part of the data", func(c *Config, _ *fakeModel) {
			*c = Config{Data: fromTensors(lineExamples(14)).Shard(1, 3).Batch(7), Seed: 3}
		}, "train: Config.Data: the dataset has Shard(1, 3), so this worker would train on only a part of its share"},
		{"no model", func(_ *Config, m *fakeModel) { m.fail = func(string, int) error { return refuse } }, refuse.Error()},
	} {
		t.Run(c.name, func(t *testing.T) {
			values := make([]string, 3)
			prints := make([]Fact, 3)
			written := make([]string, 3)
			errs := overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
				cfg, m := fakeConfig(7), fakeModel{}
				if w == 1 {
					c.change(&cfg, &m)
				}
				trainer, err := New(t.Context(), s, m, cfg)
				if err != nil {
					return err
				}
				values[w] = fmt.Sprint(trainer.program.(*fakeProgram).replicas[0].now)
				written[w] = fmt.Sprint(trainer.program.(*fakeProgram).written)
				facts, err := trainer.Facts()
				prints[w] = facts[slices.IndexFunc(facts, func(f Fact) bool { return f.Name == InitialFact })]
				return errors.Join(err, trainer.Close())
			})
			for w, err := range errs {
				if c.want == "" && (err != nil || values[w] != values[0]) {
					t.Errorf("worker %d begins with %s, the chief with %s, error %v", w, values[w], values[0], err)
				}
				if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
					t.Errorf("worker %d ends with %v, want %q", w, err, c.want)
				}
			}
			if c.want != "" {
				return
			}
			equal, want := c.name == "the same values", []string{"[weights]", "[weights weights]", "[weights]"}
			if equal {
				want = []string{"[]", "[]", "[]"}
			}
			if (prints[1] == prints[0]) != equal || prints[2] != prints[0] {
				t.Errorf("the workers' own initial values: %v", prints)
			}
			if !slices.Equal(written, want) {
				t.Errorf("the workers received %v, want %v", written, want)
			}
		})
	}
}

// TestWorkersDiverge checks that a difference between the variables of workers is found, whichever worker differs.
func TestWorkersDiverge(t *testing.T) {
	for bad := range 3 {
		errs := overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(7))
			if err != nil {
				return err
			}
			defer trainer.Close()
			_, err = trainer.Fit(t.Context(), sizes(lineExamples(7), 7),
				FitConfig{Callbacks: []Callback{{OnEpochEnd: func(context.Context, Epoch) error {
					for _, r := range trainer.program.(*fakeProgram).replicas {
						if r.now[4][0]++; w == bad { // averages may differ
							r.now[1][1]++
						}
					}
					return nil
				}}}})
			return err
		})
		for w, err := range errs {
			want := []string{
				"differ from those of replica 1, 2, 3", "differ from those of replica 1, 2",
				"differ from those of replica 3",
			}[bad]
			if err == nil || !strings.Contains(err.Error(),
				"the mirrored variable weights is no longer the same on all workers: the bits of replica 0 "+want) {
				t.Errorf("worker %d, while %d differs: %v", w, bad, err)
			}
		}
	}
}

// TestLeftOverBatches checks that workers agree after a pass over the data ended early, although each may have read
// ahead by a different number of batches.
func TestLeftOverBatches(t *testing.T) {
	for w, err := range overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1}, fakeConfig(2))
		if err != nil {
			return err
		}
		defer trainer.Close()
		examples := lineExamples(8)
		stream, err := trainer.feed(t.Context(), sizes(examples, 2, 2, 2, 2), feedConfig{limit: 3 * w, labels: true})
		if err != nil {
			return err
		}
		for range 3 * w {
			g, err := stream.next(t.Context())
			if err != nil {
				return err
			}
			stream.release(g)
		}
		stream.close()
		_, _, err = trainer.Gradients(t.Context(), data.Batch{
			Inputs: []*tensor.Tensor{examples.Inputs[0].Rows(0, 2)},
			Labels: []*tensor.Tensor{examples.Labels[0].Rows(0, 2)},
		})
		return err
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// TestProgress checks that every phase of a step is reported with the number of the step.
func TestProgress(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var reported []string
	cfg := fakeConfig(4)
	cfg.Progress = func(step int64, phase Phase) { reported = append(reported, fmt.Sprintf("%d %s", step, phase)) }
	trainer, err := New(t.Context(), s, fakeModel{}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	ds := sizes(lineExamples(8), 4, 4)
	if _, err := trainer.Fit(t.Context(), ds, FitConfig{}); err != nil {
		t.Fatal(err)
	}
	var want []string
	// training and its epoch begin last
	for _, phase := range []Phase{PhaseCompile, PhaseStart, PhaseBetween, PhaseBetween} {
		want = append(want, "1 "+phase)
	}
	for step := 1; step <= 2; step++ {
		for _, phase := range []Phase{
			PhaseData, PhaseCompute, PhaseReduce, PhaseUpdate, PhaseReduce, PhaseUpdate, PhaseReduce,
		} {
			want = append(want, fmt.Sprintf("%d %s", step, phase))
		}
		want = append(want, fmt.Sprintf("%d %s", step+1, PhaseBetween))
	}
	want = append(want, "3 "+PhaseData, "3 "+PhaseBetween)
	if !slices.Equal(reported, want) {
		t.Errorf("reported\n%v\nwant\n%v", reported, want)
	}
	reported = nil
	if _, err := trainer.Evaluate(t.Context(), sizes(lineExamples(4), 4)); err != nil {
		t.Fatal(err)
	}
	if want := []string{"3 data", "3 evaluate", "3 reduce", "3 data"}; !slices.Equal(reported, want) {
		t.Errorf("an evaluation reported %v, want %v", reported, want)
	}
}

// TestFacts checks that the facts of two trainers differ exactly in what differs between them.
func TestFacts(t *testing.T) {
	facts := func(change func(*Config, *Trainer)) map[string]string {
		cfg := fakeConfig(6)
		change(&cfg, nil)
		s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		trainer, err := New(t.Context(), s, fakeModel{}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer trainer.Close()
		change(&cfg, trainer)
		list, err := trainer.Facts()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for _, f := range list {
			out[f.Name] = f.Value
		}
		if len(out) != len(list) {
			t.Errorf("two facts have one name: %v", list)
		}
		return out
	}
	same := facts(func(*Config, *Trainer) {})
	if got := same["variable weights"]; !strings.HasPrefix(got, "parameter of float64(2,), values hashed ") {
		t.Errorf("weights: %s", got)
	}
	for _, c := range []struct {
		name   string
		change func(*Config, *Trainer)
		differ []string
	}{
		{"nothing", func(*Config, *Trainer) {}, nil},
		{"an average", func(_ *Config, t *Trainer) {
			if t != nil {
				t.program.(*fakeProgram).replicas[0].now[4][0] = 5
			}
		}, nil},
		{"seed", func(c *Config, _ *Trainer) { c.Seed++ }, []string{"seed", "variable weights"}},
		{"global batch", func(c *Config, _ *Trainer) { c.GlobalBatch++ }, []string{"global batch"}},
		{"momentum", func(_ *Config, t *Trainer) {
			if t != nil {
				t.program.(*fakeProgram).replicas[0].now[3][1] = 5
			}
		}, []string{"variable momentum/weights"}},
		{"steps", func(_ *Config, t *Trainer) {
			if t != nil {
				t.committed = 7
			}
		}, []string{"steps made"}},
	} {
		var differ []string
		for name, value := range facts(c.change) {
			if same[name] != value {
				differ = append(differ, name)
			}
		}
		slices.Sort(differ)
		if !slices.Equal(differ, c.differ) {
			t.Errorf("%s: %v differ, want %v", c.name, differ, c.differ)
		}
	}
}

// TestSameHash checks that all replicas find any difference between their hashes, for any hashes and any number of
// replicas.
func TestSameHash(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.SampledFrom([]int{2, 3, 4, 7, 512, 513, 4096, 20000}).Draw(rt, "replicas")
		width := pieceBits(n)
		if top := math.Ldexp(1, width) - 1; float64(n)*top*top >= 1<<53 {
			rt.Fatalf("%d bits of %d replicas are too many to be added up exactly", width, n)
		}
		kept := uint64(1)<<min(64, agreedPieces*width) - 1 // of a hash
		if agreedPieces*width >= 64 {
			kept = math.MaxUint64
		}
		few := rapid.SliceOfN(rapid.OneOf(rapid.Uint64(), rapid.SampledFrom([]uint64{0, 1, 2, 3, math.MaxUint64})), 1,
			4).Draw(rt, "hashes")
		sums, one := make([]float64, agreed), make([]float64, agreed)
		equal := true
		for i := range n {
			hash := few[0]
			if i < len(few) {
				hash = few[i]
			}
			equal = equal && hash&kept == few[0]&kept
			putHash(hash, n, one)
			for k := range sums {
				sums[k] += one[k]
			}
		}
		if got := sameHash(sums, n); got != equal {
			rt.Errorf("%d replicas with %x: equal: %v", n, few, got)
		}
	})
}

// TestWrongData checks that different data on one worker ends the step that would use it on all workers, and that no
// worker counts this step.
func TestWrongData(t *testing.T) {
	const rows, steps = 6, 4
	good := func() data.Batch {
		b := lineExamples(rows * steps)
		b.Weights = tensor.From(slices.Repeat([]float32{1, 2}, rows*steps/2))
		return b
	}
	datasetOf := func(b data.Batch) data.Dataset { return fromTensors(b).Batch(rows) }
	for _, c := range []struct {
		name   string
		change func(b data.Batch, w int) data.Dataset // of the workers that have wrong data
		step   int                                    // in which it is found; 0: before the first
		want   string
	}{
		{"a bit of one input", func(b data.Batch, _ int) data.Dataset {
			x := tensor.Data[float64](b.Inputs[0])
			x[2*rows] = math.Nextafter(x[2*rows], 9)
			return datasetOf(b)
		}, 2, " in batch 2 of pass 1 over the data, of 6 examples. All workers must read the same global batches"},
		{"a label", func(b data.Batch, _ int) data.Dataset {
			tensor.Data[float64](b.Labels[0])[rows*steps-1]++
			return datasetOf(b)
		}, 4, " read other labels than worker"},
		{"weights of the same sum", func(b data.Batch, _ int) data.Dataset {
			w := tensor.Data[float32](b.Weights)
			w[2*rows], w[2*rows+1] = 2, 1
			return datasetOf(b)
		}, 3, " read other weights than worker"},
		{
			"the order", func(b data.Batch, _ int) data.Dataset { return fromTensors(b).Shuffle(5).Batch(rows) }, 1,
			" read other inputs and labels and weights than worker",
		},
		{"a hidden part", func(b data.Batch, w int) data.Dataset {
			return data.FromSeq(-1, fromTensors(b).Shard(w, 9).Iter).Batch(rows)
		}, 1, "examples in batch 1 of pass 1 over the data, "},
		{
			"a part", func(b data.Batch, w int) data.Dataset { return fromTensors(b).Shuffle(1).Shard(w, 3).Batch(rows) },
			0, "Leave out Shard",
		},
	} {
		for _, layout := range [][]int{{1, 1}, {1, 2, 1}} {
			t.Run(fmt.Sprint(c.name, layout), func(t *testing.T) {
				errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
					trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(rows))
					if err != nil {
						return err
					}
					defer trainer.Close()
					ds := datasetOf(good())
					if w == len(layout)-1 {
						ds = c.change(good(), w)
					}
					h, err := trainer.Fit(t.Context(), ds, FitConfig{})
					if trainer.Steps() != int64(max(c.step-1, 0)) || h.Steps != max(c.step-1, 0) {
						t.Errorf("worker %d made %d steps, %d in its history; the data differ in step %d", w, trainer.Steps(), h.Steps,
							c.step)
					}
					return err
				})
				for w, err := range errs {
					if err == nil || !strings.Contains(err.Error(), c.want) ||
						c.step > 0 && !strings.Contains(err.Error(), fmt.Sprintf("epoch 1, step %d: ", c.step)) {
						t.Errorf("worker %d ends with %v, want %q", w, err, c.want)
					}
				}
			})
		}
	}
}

// TestEqualData checks that equivalent data count as equal: weights of 1, or no weights.
func TestEqualData(t *testing.T) {
	for w, err := range overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
		if err != nil {
			return err
		}
		defer trainer.Close()
		b := lineExamples(14)
		if w == 1 {
			b.Weights = tensor.From(slices.Repeat([]float32{1}, 14))
		}
		_, err = trainer.Fit(t.Context(), fromTensors(b).Batch(7), FitConfig{Epochs: 2})
		return err
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// TestWrongDataElsewhere checks that different data are also detected in evaluation, prediction and a custom training
// loop.
func TestWrongDataElsewhere(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(trainer *Trainer, b data.Batch) error
		want string
	}{
		{"evaluate", func(trainer *Trainer, b data.Batch) error {
			_, err := trainer.Evaluate(t.Context(), batches(b))
			return err
		}, "other inputs and labels than workers 0, 1 in batch 1"},
		{"predict", func(trainer *Trainer, b data.Batch) error {
			b.Labels = nil // not looked at
			_, err := trainer.Predict(t.Context(), batches(b))
			return err
		}, "other inputs than workers 0, 1 in batch 1"},
		{"gradients", func(trainer *Trainer, b data.Batch) error {
			_, _, err := trainer.Gradients(t.Context(), b)
			return err
		}, "other inputs and labels than workers 0, 1"},
		{"another step", func(trainer *Trainer, b data.Batch) error {
			if tensor.Data[float64](b.Labels[0])[0] != tensor.Data[float64](lineExamples(7).Labels[0])[0] {
				if err := trainer.ApplyGradients(t.Context(),
					[]*tensor.Tensor{tensor.New(tensor.Float64), tensor.New(tensor.Float64, 2)}); err != nil {
					return err
				}
			}
			_, err := trainer.Evaluate(t.Context(), batches(lineExamples(7)))
			return err
		}, "worker 2 took 1 steps before it, workers 0, 1 0."},
		{"Shard in an evaluation", func(trainer *Trainer, b data.Batch) error {
			_, err := trainer.Evaluate(t.Context(), fromTensors(b).Shard(1, 2).Batch(7))
			return err
		}, "the dataset has Shard(1, 2), so this worker would train on only a part of its share"},
	} {
		for w, err := range overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
			if err != nil {
				return err
			}
			defer trainer.Close()
			b := lineExamples(7)
			if w == 2 {
				b.Inputs[0], b.Labels[0] = tensor.From(slices.Repeat([]float64{1}, 14), 7,
					2), tensor.From(slices.Repeat([]float64{5}, 7))
			}
			return c.do(trainer, b)
		}) {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: worker %d ends with %v, want %q", c.name, w, err, c.want)
			}
		}
	}
}

// TestSetOnOneWorker checks that a variable that is set on some workers only, or to different values, fails the next
// step on all workers.
func TestSetOnOneWorker(t *testing.T) {
	set := func(name string, value float64) func(trainer *Trainer) error {
		return func(trainer *Trainer) error { return trainer.SetVariable(name, tensor.Of([]float64{value}).Reshape()) }
	}
	nothing := func(*Trainer) error { return nil }
	sameValue := func(trainer *Trainer) error {
		value, err := trainer.program.Read(0, 0)
		return errors.Join(err, trainer.SetVariable("bias", value))
	}
	for _, c := range []struct {
		name        string
		first, last func(trainer *Trainer) error // what worker 0 and the last one do after step 2
		want        string                       // "": no error
	}{
		{
			"on one", nothing, set("momentum/bias", 3),
			"variables were set between steps on some workers only, or to other values: worker 2 last momentum/bias, workers " +
				"0, 1 none. Call SetVariable and SetWeights on all workers",
		},
		{"other values", set("bias", 1), set("bias", 2), "last bias"},
		{"an average", nothing, set("seen", 2), "worker 2 last seen"},
		{"all weights", nothing, func(trainer *Trainer) error {
			return trainer.SetWeights([]Weight{
				{"bias", tensor.Of([]float64{5}).Reshape()},
				{"weights", tensor.Of([]float64{1, 2})},
				{"seen", tensor.Of([]float64{0}).Reshape()},
			})
		}, "worker 2 last "},
		{"the value that it has", nothing, sameValue, ""},
		{"alike", set("bias", 1), set("bias", 1), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			errs := overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
				trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(2))
				if err != nil {
					return err
				}
				defer trainer.Close()
				_, err = trainer.Fit(t.Context(), sizes(lineExamples(8), 2, 2, 2, 2),
					FitConfig{Callbacks: []Callback{{OnStepEnd: func(_ context.Context, s Step) error {
						if s.Step != 2 {
							return nil
						}
						if w == 2 {
							return c.last(trainer)
						}
						return c.first(trainer)
					}}}})
				if made := trainer.Steps(); c.want != "" && made != 2 || c.want == "" && made != 4 {
					t.Errorf("worker %d made %d steps", w, made)
				}
				return err
			})
			for w, err := range errs {
				if c.want == "" && err != nil || c.want != "" &&
					(err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "step 3")) {
					t.Errorf("worker %d ends with %v, want %q", w, err, c.want)
				}
			}
		})
	}
}

// BenchmarkContent measures the hash of a batch of 128 images of MNIST's size.
func BenchmarkContent(b *testing.B) {
	batch := data.Batch{
		Inputs: []*tensor.Tensor{tensor.New(tensor.Float32, 128, 28, 28, 1)},
		Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 128)},
	}
	b.SetBytes(128 * (28*28 + 1) * 4)
	for b.Loop() {
		contentOf(batch, true)
	}
}

// TestOneWorkerCannotBegin: what ends Fit on one worker before its first step ends it on the others
// with the cause.
func TestOneWorkerCannotBegin(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(trainer *Trainer, cfg *FitConfig)
		want    string
	}{
		"resume": {func(trainer *Trainer, _ *FitConfig) {
			trainer.resume = &fitState{StepsPerEpoch: 7}
		}, "FitConfig.StepsPerEpoch is 0, but the snapshot was taken with 7"},
		"configuration": {func(_ *Trainer, cfg *FitConfig) { cfg.Steps = -1 }, "FitConfig.Steps is -1"},
		"averages":      {func(_ *Trainer, cfg *FitConfig) { cfg.EMA = true }, "FitConfig.EMA is set"},
	} {
		t.Run(name, func(t *testing.T) {
			errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
				cfg := fakeConfig(8)
				cfg.Logger = slog.New(slog.DiscardHandler)
				trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
				if err != nil {
					return err
				}
				defer trainer.Close()
				fit := FitConfig{Validation: sizes(lineExamples(8), 8)}
				if w == 1 {
					c.prepare(trainer, &fit)
				}
				_, err = trainer.Fit(t.Context(), sizes(lineExamples(16), 8, 8), fit)
				return err
			})
			for w, err := range errs {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("worker %d: got %v, want %q", w, err, c.want)
				}
			}
		})
	}
}

// TestSumOverBatchSize: with Keras' rule, the loss and the steps are those of the default with a learning rate that has
// the scale of the weights, by Fit, Evaluate and accumulated batches, on one worker and two.
func TestSumOverBatchSize(t *testing.T) {
	const n, sum = 8, 6.0 // examples of a batch, and the sum of their weights
	examples := lineExamples(4 * n)
	examples.Weights = tensor.New(tensor.Float32, 4*n)
	for i := range 4 * n {
		tensor.Data[float32](examples.Weights)[i] = []float32{2, 0, 0.5, 0.5}[i%4]
	}
	run := func(layout []int, rule LossReduction, rate float64, accumulate int) (losses [2]float64, values []fakeValues) {
		values = make([]fakeValues, len(layout))
		for w, err := range overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(n)
			cfg.Logger, cfg.LossReduction = slog.New(slog.DiscardHandler), rule
			trainer, err := New(t.Context(), s, fakeModel{rate: rate}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			history, err := trainer.Fit(t.Context(), sizes(examples, n, n, n, n), FitConfig{Accumulate: accumulate})
			if err != nil {
				return err
			}
			result, err := trainer.Evaluate(t.Context(), sizes(examples, n, n, n, n))
			if err != nil {
				return err
			}
			if w == 0 {
				losses = [2]float64{history.Epochs[0].Loss, result.Loss}
			}
			values[w] = trainer.program.(*fakeProgram).snapshot()[0]
			return nil
		}) {
			if err != nil {
				t.Fatalf("%v, worker %d: %v", layout, w, err)
			}
		}
		return losses, values
	}
	for _, layout := range [][]int{{2}, {1, 1}} {
		for _, accumulate := range []int{1, 2} {
			wantLoss, want := run(layout, WeightedMean, 1.0/64*sum/n, accumulate)
			gotLoss, got := run(layout, SumOverBatchSize, 1.0/64, accumulate)
			for i := range gotLoss {
				if math.Abs(gotLoss[i]-wantLoss[i]*sum/n) > 1e-12*wantLoss[i] {
					t.Errorf("%v, %d batches a step: loss %v, want %v times %v", layout, accumulate, gotLoss, sum/n, wantLoss)
				}
			}
			for i, w := range want[0][1] {
				if math.Abs(got[0][1][i]-w) > 1e-12 {
					t.Errorf("%v, %d batches a step: weights %v, want %v", layout, accumulate, got[0][1], want[0][1])
				}
			}
		}
	}
	for _, cfg := range []Config{{Exchange: DiLoCo{InnerSteps: 1}}, {NoiseScale: true}} {
		cfg.GlobalBatch, cfg.Inputs, cfg.Labels = 8, fakeConfig(8).Inputs, fakeConfig(8).Labels
		cfg.LossReduction = SumOverBatchSize
		for _, err := range overWorkers(t, []int{2}, func(_ int, s *distribute.Strategy) error {
			_, err := New(t.Context(), s, fakeModel{}, cfg)
			return err
		}) {
			if err == nil || !strings.Contains(err.Error(), "LossReduction") {
				t.Errorf("got %v", err)
			}
		}
	}
}
