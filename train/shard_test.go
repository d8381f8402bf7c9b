package train

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// shardFakes sets the ShardOptimizer of fakeConfig and of golden trainings for a test.
func shardFakes(t *testing.T, s Exchange) {
	t.Helper()
	before := fakeSharding
	fakeSharding = s
	t.Cleanup(func() { fakeSharding = before })
}

// TestSharded runs tests of other files with a sharded optimizer. The fake program fills the slots that a device must
// not use with NaN. One worker, and several, make the same trainings.
func TestSharded(t *testing.T) {
	shardFakes(t, Sharded{})
	for name, test := range map[string]func(*testing.T){
		"fit":               TestFitEqualsOneLoop,
		"failed steps":      TestFailedStepChangesNothing,
		"bits repeat":       TestBitsRepeat,
		"workers":           TestTrainOverWorkers,
		"overlap":           TestReducesWhileComputing,
		"accumulate":        TestAccumulateEqualsLargeBatches,
		"several batches":   TestGradientsOfSeveralBatches,
		"clipped":           TestClipped,
		"infinite norm":     TestClippingByAnInfiniteNorm,
		"not finite":        TestNotFiniteOverWorkers,
		"skip is exact":     TestNotFiniteSkipIsExact,
		"loss scale":        TestLossScale,
		"loss scale ends":   TestLossScaleEnds,
		"loss scale, own":   TestLossScaleOfGradients,
		"own loop":          TestOwnLoop,
		"resume anywhere":   TestResumeAnywhere,
		"resume over":       TestResumeOverWorkers,
		"restart":           TestRestart,
		"set on one worker": TestSetOnOneWorker,
		"weights":           TestWeights,
	} {
		t.Run(name, test)
	}
}

// TestShardedDevices checks that a sharded optimizer makes the bits of an unsharded one, however the replicas share
// devices: in Fit, in a custom loop and after setting a slot.
func TestShardedDevices(t *testing.T) {
	const steps = 6
	for name, change := range map[string]func(*Config){
		"plain":            func(*Config) {},
		"ClipNorm":         func(c *Config) { c.ClipNorm = 0.1 },
		"ClipVariableNorm": func(c *Config) { c.ClipVariableNorm = 0.1 },
		"ClipValue":        func(c *Config) { c.ClipValue = 0.1 },
	} {
		t.Run(name, func(t *testing.T) {
			want := ""
			for _, deviceOf := range [][]int{nil, {0, 1, 2, 3}, {0, 0, 0, 0}, {0, 1, 1, 0}, {0, 0, 1, 2}} {
				cfg := fakeConfig(8)
				change(&cfg)
				if deviceOf != nil {
					cfg.Exchange = Sharded{}
				}
				trainer, _ := newFakeWith(t, 4, cfg, fakeModel{})
				if deviceOf != nil {
					share(t, trainer, deviceOf...)
				}
				got := ""
				fit := func() {
					h, err := trainer.Fit(t.Context(), sizes(lineExamples(8*steps+3), 8, 8, 8, 8, 8, 8, 3), FitConfig{Accumulate: 2})
					if err != nil {
						t.Fatal(err)
					}
					got += fmt.Sprint(h.Epochs[0].Result)
				}
				fit()
				g, result, err := trainer.Gradients(t.Context(), lineExamples(8))
				if err == nil {
					err = trainer.ApplyGradients(t.Context(), g)
				}
				if err == nil {
					err = trainer.SetVariable("momentum/bias", tensor.Scalar(0.5))
				}
				if err != nil {
					t.Fatal(err)
				}
				fit()
				s, err := trainer.Snapshot(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for _, v := range s.Variables {
					got += fmt.Sprint(v.Name, v.Value.Float64s())
				}
				if got += fmt.Sprint(result); want == "" {
					want = got
				}
				if got != want {
					t.Errorf("devices %v: got\n%s, want\n%s", deviceOf, got, want)
				}
				if sharded := trainer.Sharded(); sharded != (deviceOf != nil) {
					t.Errorf("devices %v: sharded %v", deviceOf, sharded)
				}
			}
		})
	}
}

// TestEnginesChooseDifferently: engines that choose differently whether to shard the optimizer are an error on all
// workers, which names those that do.
func TestEnginesChooseDifferently(t *testing.T) {
	for w, err := range overWorkers(t, []int{2, 1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(8)
		cfg.Exchange = nil
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64, quick: w != 1}, cfg)
		if err == nil {
			trainer.Close()
		}
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "yes on workers 0, 2, no on worker 1;") {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// TestSlotsAreGatheredAtChief checks that a snapshot that the chief writes has the slots of all workers, which the
// others do not receive.
func TestSlotsAreGatheredAtChief(t *testing.T) {
	shardFakes(t, Sharded{})
	errs := overWorkers(t, []int{1, 1, 1}, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(6))
		if err != nil {
			return err
		}
		defer trainer.Close()
		divided := 0
		for i, v := range trainer.variables {
			row := trainer.table[i]
			if !row.divided() {
				continue
			}
			divided++
			want := tensor.New(v.DType, v.Shape...)
			for j := range tensor.Data[float64](want) {
				tensor.Data[float64](want)[j] = float64(i + j)
			}
			if local := trainer.localOf(row.entries[0].owner); local >= 0 {
				if err := trainer.program.Write(local, i, want); err != nil {
					return err
				}
			}
			got, err := trainer.gather(t.Context(), row, false)
			switch {
			case err != nil:
				return err
			case w == 0 && !got.Equal(want), w > 0 && got != nil:
				t.Errorf("worker %d: %s is %v, want %v on the chief only", w, v.Name, got, want)
			}
		}
		if divided != 2 {
			return fmt.Errorf("%d variables are on some devices only, want 2", divided)
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// wide is a perceptron whose first matrix has most of its parameters.
type wide struct{ in, hidden, out int }

func (m wide) model() *gomlx.Model {
	// random numbers take long for 20 million parameters
	sevenths := func(g *graph.Graph, shape shapes.Shape) *graph.Node {
		numbers := graph.ConvertDType(graph.Mod(graph.Iota(g, shapes.Make(dtypes.Int32, shape.Size()), 0),
			graph.Const(g, int32(7))), shape.DType)
		return graph.Reshape(graph.DivScalar(graph.AddScalar(numbers, -3), 100), shape.Dimensions...)
	}
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			s = s.WithInitializer(sevenths)
			return []*graph.Node{layer.Dense(s.In("1"), layer.Relu(layer.Dense(s.In("0"), in[0], m.hidden)), m.out)}
		},
		Loss: gomlx.MeanSquaredError, Optimizer: optimizer.Adam().Done(),
	}
}

func (m wide) config() Config {
	return Config{
		Inputs:      []engine.Feature{{DType: tensor.Float32, Shape: []int{m.in}}},
		Labels:      []engine.Feature{{DType: tensor.Float32, Shape: []int{m.out}}},
		GlobalBatch: 4, Exchange: Sharded{},
	}
}

// examples returns so many batches of the global batch.
func (m wide) examples(n int) data.Dataset {
	var list []data.Batch
	for i := range n {
		list = append(list, m.batch(4, i))
	}
	return batches(list...)
}

// batch returns so many examples, other ones for each i.
func (m wide) batch(rows, i int) data.Batch {
	numbers := func(columns, k int) *tensor.Tensor {
		x := tensor.New(tensor.Float32, rows, columns)
		for i := range tensor.Data[float32](x) {
			tensor.Data[float32](x)[i] = float32(i*k%11-5) / 10
		}
		return x
	}
	return data.Batch{Inputs: []*tensor.Tensor{numbers(m.in, 3+i)}, Labels: []*tensor.Tensor{numbers(m.out, 5+i)}}
}

// goEngines opens a Go engine for each worker.
func goEngines(t *testing.T, layout []int) []engine.Engine {
	t.Helper()
	engines := make([]engine.Engine, len(layout))
	for w, n := range layout {
		e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: n})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		engines[w] = e
	}
	return engines
}

// TestOptimizerBytes checks the size of Adam's slots on each of four workers that train a network of which one matrix
// has most of the parameters: at most 0.27 of the unsharded size. The large one has 21 million parameters.
func TestOptimizerBytes(t *testing.T) {
	models := []wide{{512, 640, 256}}
	if !testing.Short() {
		models = append(models, wide{1024, 12288, 700})
	}
	for _, m := range models {
		layout := []int{1, 1, 1, 1}
		errs := overWorkersOn(t, layout, goEngines(t, layout), func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, m.model(), m.config())
			if err != nil {
				return err
			}
			defer trainer.Close()
			if _, err := trainer.Fit(t.Context(), m.examples(1), FitConfig{}); err != nil {
				return err
			}
			parameters, largest, slots := 0, 0, 0
			for _, v := range trainer.Variables() {
				switch v.Role {
				case engine.Parameter:
					n := v.Bytes() / v.DType.Bytes()
					parameters, largest = parameters+n, max(largest, n)
				case engine.Slot:
					slots += v.Bytes()
				}
			}
			share := float64(trainer.OptimizerBytes()) / float64(slots)
			t.Logf("worker %d: %d parameters, %d in one matrix; %d of %d bytes of the optimizer's slots: %.4f", w, parameters,
				largest, trainer.OptimizerBytes(), slots, share)
			if 2*largest < parameters || slots < 8*parameters || share > 0.27 {
				t.Errorf("worker %d has %.3f of the slots", w, share)
			}
			return nil
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDividedVariables checks that a training whose largest variables are divided among workers has the bits of an
// unsharded one, also after it was resumed by other workers, with and without sharding; and that what no worker has
// whole can be read and set.
func TestDividedVariables(t *testing.T) {
	m := wide{128, 640, 40}
	const steps = 6
	run := func(t *testing.T, layout []int, sharding Exchange, until int, dir string) (got string) {
		t.Helper()
		errs := overWorkersOn(t, layout, goEngines(t, layout), func(w int, s *distribute.Strategy) error {
			cfg := m.config()
			cfg.Exchange, cfg.ClipNorm = sharding, 0.01
			trainer, err := New(t.Context(), s, m.model(), cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			b := backup(t, trainer, BackupConfig{Dir: dir, EverySteps: 2})
			if _, err := b.Restore(t.Context()); err != nil {
				return err
			}
			h, err := trainer.Fit(t.Context(), m.examples(2*steps), FitConfig{
				Steps: until, Accumulate: 2, Callbacks: []Callback{b.Callback()},
			})
			if err != nil {
				return err
			}
			if s, ok := trainer.exchange.(*sharded); sharding == (Sharded{}) &&
				(!ok || len(s.pieces) == len(trainer.Parameters())) {
				return fmt.Errorf("nothing is divided: %v", s)
			}
			i := slices.IndexFunc(trainer.Variables(), func(v engine.Variable) bool { // Adam's moments
				return v.Role == engine.Slot && v.Bytes() == 4*m.in*m.hidden
			})
			slot := trainer.Variables()[i].Name
			value, err := trainer.weight(t.Context(), i)
			if err != nil {
				return fmt.Errorf("reading %s: %w", slot, err)
			}
			if until < steps {
				if err := trainer.SetVariable(slot, value); err != nil { // the value that it has
					return err
				}
			}
			state, err := trainer.Snapshot(t.Context())
			if err == nil && w == 0 {
				got = fmt.Sprint(HashWeights(state.Variables), h.Epochs[0].Result, HashWeights([]Weight{{slot, value}}))
			}
			return err
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		return got
	}
	int8 := compress.Codec{Method: compress.Int8} // what it keeps of each replica is in the parts of the workers
	want := map[compress.Codec]string{}
	for _, codec := range []compress.Codec{{}, int8} {
		want[codec] = run(t, []int{4}, AllReduce{Compress: codec}, steps, "")
	}
	for _, test := range []struct {
		from, to []int
		sharding [2]Exchange
	}{
		{[]int{1, 2, 1}, []int{2, 2}, [2]Exchange{Sharded{Compress: int8}, Sharded{Compress: int8}}},
		{[]int{1, 1, 1, 1}, []int{2, 2}, [2]Exchange{Sharded{}, Sharded{}}},
		{[]int{1, 3}, []int{4}, [2]Exchange{Sharded{}, AllReduce{}}},
		{[]int{4}, []int{1, 2, 1}, [2]Exchange{AllReduce{}, Sharded{}}},
	} {
		dir := t.TempDir()
		run(t, test.from, test.sharding[0], 3, dir)
		got, want := run(t, test.to, test.sharding[1], steps, dir), want[test.sharding[0].codec()]
		if got != want {
			t.Errorf("%v to %v, sharding %v: got %s, want %s", test.from, test.to, test.sharding, got, want)
		}
	}
}

// TestPieces checks that pieces of variables are joined, and that those that are not complete are an error.
func TestPieces(t *testing.T) {
	numbers := func(from, to int) *tensor.Tensor {
		x := tensor.New(tensor.Float64, to-from)
		for i := range x.Len() {
			tensor.Data[float64](x)[i] = float64(from + i)
		}
		return x
	}
	shapes := map[string][]int{"a[1]": {2, 3}}
	other := Weight{"b[0:2]", numbers(0, 2)} // the name of a variable
	got, err := joinPieces([]Weight{{"a[1][4:6]", numbers(4, 6)}, other, {"a[1][0:4]", numbers(0, 4)}}, shapes)
	if err != nil || len(got) != 2 || got[0].Name != "b[0:2]" || got[1].Name != "a[1]" ||
		!got[1].Value.Equal(numbers(0, 6).Reshape(2, 3)) {
		t.Errorf("got %v, %v", got, err)
	}
	for name, list := range map[string][]Weight{
		"no piece":   {other},
		"a gap":      {{"a[1][0:2]", numbers(0, 2)}, {"a[1][3:6]", numbers(3, 6)}},
		"overlap":    {{"a[1][0:4]", numbers(0, 4)}, {"a[1][3:6]", numbers(3, 6)}},
		"too few":    {{"a[1][0:4]", numbers(0, 4)}},
		"too many":   {{"a[1][0:7]", numbers(0, 7)}},
		"not as big": {{"a[1][0:6]", numbers(0, 5)}},
		"a matrix":   {{"a[1][0:6]", numbers(0, 6).Reshape(2, 3)}},
		"two types":  {{"a[1][0:4]", numbers(0, 4)}, {"a[1][4:6]", tensor.New(tensor.Float32, 2)}},
		"no number":  {{"a[1][0:x]", numbers(0, 6)}},
	} {
		if got, err := joinPieces(list, shapes); err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, shape := range [][]int{{-2, -3}, {1 << 40, 1 << 40}, {0, 3}} {
		if got, err := joinPieces([]Weight{{"a[0:6]", numbers(0, 6)}}, map[string][]int{"a": shape}); err == nil {
			t.Errorf("shape %v: %v", shape, got)
		}
	}
}

// TestLeaves checks that the sums of squares of pieces, put together, are those of whole parameters, to the bit.
func TestLeaves(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 6))
		n := 1 + r.IntN(40*normBlock)
		parameters := []engine.Variable{{DType: tensor.Float32, Shape: []int{n}}}
		var pieces []engine.Piece
		for from := 0; from < n; {
			to := min(n, from+normBlock<<r.IntN(5))
			pieces = append(pieces, engine.Piece{From: from, To: to, Owner: len(pieces)})
			from = to
		}
		leaves, err := leavesOf(parameters, pieces)
		if err != nil {
			t.Fatal(err)
		}
		whole := make([]float64, normBlocks(n))
		for i := range whole {
			whole[i] = r.ExpFloat64()
		}
		parts, owners := make([]float64, len(whole)), map[int]bool{}
		for _, l := range leaves {
			parts[l.from], owners[l.owner] = treeSum(whole[l.from:l.to]), true
		}
		if got, want := treeSum(parts), treeSum(whole); got != want || len(owners) != len(pieces) {
			t.Errorf("seed %d: pieces %v with leaves %v: %v, want %v", seed, pieces, leaves, got, want)
		}
	}
	_, err := leavesOf([]engine.Variable{{Name: "w"}}, []engine.Piece{{To: 1000}, {From: 1000, To: 2000}})
	if err == nil || !strings.Contains(err.Error(), "divides w at element 1000") {
		t.Errorf("got %v", err)
	}
}

// TestNotFiniteDividedSlot checks that a worker that has a part of a slot finds what is not finite in it.
func TestNotFiniteDividedSlot(t *testing.T) {
	m := wide{128, 640, 40}
	layout := []int{1, 1}
	errs := overWorkersOn(t, layout, goEngines(t, layout), func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, m.model(), m.config())
		if err != nil {
			return err
		}
		defer trainer.Close()
		i := slices.IndexFunc(trainer.Variables(), func(v engine.Variable) bool {
			return v.Role == engine.Slot && v.Bytes() == 4*m.in*m.hidden
		})
		if !trainer.table[i].divided() {
			return errors.New("the slot is not divided")
		}
		v := trainer.Variables()[i]
		value := tensor.New(tensor.Float32, v.Shape...)
		tensor.Data[float32](value)[value.Len()-1] = float32(math.Inf(1))
		if err := trainer.SetVariable(v.Name, value); err != nil {
			return err
		}
		want := fmt.Sprintf("slot %s was not finite before this step: element %s is +Inf", v.Name,
			position(v.Shape, value.Len()-1))
		x := tensor.New(tensor.Float32, 4, m.in)
		tensor.Data[float32](x)[0] = float32(math.NaN())
		_, err = trainer.Fit(t.Context(), batches(data.Batch{
			Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{tensor.New(tensor.Float32, 4, m.out)},
		}), FitConfig{})
		if err == nil || !strings.Contains(err.Error(), want) {
			return fmt.Errorf("worker %d: %v, want %s", w, err, want)
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}
