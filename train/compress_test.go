package train

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

var testedCodecs = []string{"bfloat16", "float16", "int8", "powersgd:2", "powersgd:1:3"}

// compressed trains an MLP of several buckets with compressed gradients for some steps. It may start from a snapshot,
// and returns one.
type compressed struct {
	codec    string
	steps    int // 0: none
	from     *Snapshot
	middle   *Snapshot    // after step 4
	batches  data.Dataset // default: digits
	policy   NotFinitePolicy
	restored Restored
	shard    Exchange
	before   func(context.Context, *Trainer) error // nil: nothing
}

func (c *compressed) train(ctx context.Context, s *distribute.Strategy) (snapshot *Snapshot, hash string, err error) {
	codec, err := compress.Parse(c.codec)
	if err != nil {
		return nil, "", err
	}
	if c.batches == nil {
		set, err := digits.Load()
		if err != nil {
			return nil, "", err
		}
		c.batches = set.Train.Take(230).Shuffle(1).Batch(30)
	}
	m := &gomlx.Model{
		Forward: models.MLP{Hidden: []int{48}}.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.01).Done(),
	}
	t, err := New(ctx, s, m, Config{
		GlobalBatch: 30, Seed: 3, BucketBytes: 4096, Exchange: withCodec(c.shard, codec), NotFinite: c.policy,
		Logger: slog.New(slog.DiscardHandler),
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
		Labels: []engine.Feature{{DType: tensor.Int32}},
	})
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if c.from != nil {
		contents, err := c.from.Contents()
		if err != nil {
			return nil, "", err
		}
		again, err := SnapshotOf(contents)
		if err != nil {
			return nil, "", err
		}
		if c.restored, err = t.Restore(ctx, again); err != nil {
			return nil, "", err
		}
	}
	if c.before != nil {
		if err := c.before(ctx, t); err != nil {
			return nil, "", err
		}
	}
	if c.steps > 0 {
		cfg := FitConfig{Epochs: 2, Steps: c.steps}
		cfg.Callbacks = []Callback{{OnStepEnd: func(ctx context.Context, _ Step) (err error) {
			if t.Steps() == 4 {
				c.middle, err = t.Snapshot(ctx)
			}
			return err
		}}}
		if _, err := t.Fit(ctx, c.batches, cfg); err != nil {
			return nil, "", err
		}
	}
	if hash, err = t.WeightsHash(ctx); err != nil {
		return nil, "", err
	}
	snapshot, err = t.Snapshot(ctx)
	return snapshot, hash, err
}

// alone trains in one process.
func (c *compressed) alone(t *testing.T, replicas int) (*Snapshot, string) {
	t.Helper()
	e, err := gomlx.Open("go", gomlx.Options{Devices: replicas})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	snapshot, hash, err := c.train(t.Context(), s)
	if err != nil {
		t.Fatalf("%s, %d replicas: %v", c.codec, replicas, err)
	}
	return snapshot, hash
}

// Four replicas with compressed gradients train to the same bits in one process, in two and in four, with a sharded
// optimizer or without.
func TestCompressOverWorkers(t *testing.T) {
	_, exact := (&compressed{codec: "none", steps: 6}).alone(t, 4)
	for _, codec := range testedCodecs {
		_, want := (&compressed{codec: codec, steps: 6}).alone(t, 4)
		if want == exact {
			t.Errorf("%s: the bits are those of uncompressed gradients", codec)
		}
		for i, layout := range [][]int{{2, 2}, {2, 2}, {1, 1, 1, 1}, {1, 1, 1, 1}, {4}} {
			shard := [...]Exchange{Sharded{}, AllReduce{}}[i%2]
			engines := make([]engine.Engine, len(layout))
			for w, n := range layout {
				e, err := gomlx.Open("go", gomlx.Options{Devices: n})
				if err != nil {
					t.Fatal(err)
				}
				defer e.Close()
				engines[w] = e
			}
			errs := overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) error {
				c := compressed{codec: codec, steps: 6, shard: shard}
				if _, got, err := c.train(t.Context(), s); err != nil || got != want {
					return fmt.Errorf("%s, sharding %v: worker %d of %v: %s, %w, want %s", codec, shard, w, layout, got, err, want)
				}
				return nil
			})
			for _, err := range errs {
				if err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// A training with compressed gradients resumes to the same bits, with the residuals of every replica.
func TestCompressResumes(t *testing.T) {
	for _, codec := range testedCodecs {
		c := compressed{codec: codec, steps: 7}
		last, want := c.alone(t, 2)
		c = compressed{codec: codec, steps: 7, from: c.middle}
		again, got := c.alone(t, 2)
		if got != want || c.restored.Step != 4 || c.restored.Differ != nil {
			t.Errorf("%s: resumed %+v to %s, want %s", codec, c.restored, got, want)
		}
		residuals := strings.HasPrefix(codec, "int8") || strings.HasPrefix(codec, "powersgd")
		if len(again.Compression) != len(last.Compression) || residuals != (len(last.Compression) > 0) {
			t.Errorf("%s: the snapshot has %d tensors of the compression, and %d after resuming", codec,
				len(last.Compression), len(again.Compression))
		}
		for i, w := range last.Compression {
			if !w.Value.Equal(again.Compression[i].Value) {
				t.Errorf("%s: the %s differs after resuming", codec, w.Name)
			}
		}
	}
}

// With another number of replicas the residuals are divided; with another codec they are dropped. Both are reported.
func TestCompressRestoresElsewhere(t *testing.T) {
	for _, codec := range []string{"int8", "powersgd:2"} {
		before, _ := (&compressed{codec: codec, steps: 4}).alone(t, 2)
		c := compressed{codec: codec, from: before}
		after, _ := c.alone(t, 3)
		if len(c.restored.Differ) != 1 {
			t.Errorf("%s: with 3 replicas: %q", codec, c.restored.Differ)
		}
		for i, w := range before.Compression {
			a, b := w.Value.Float64s(), after.Compression[i].Value.Float64s()
			if strings.HasPrefix(w.Name, "PowerSGD's Q") {
				if !slices.Equal(a, b) {
					t.Errorf("%s: the %s has changed", codec, w.Name)
				}
				continue
			}
			sums, largest := make([]float64, len(a)/2), 0.0
			for k, x := range a {
				sums[k%len(sums)] += x
				largest = max(largest, math.Abs(x))
			}
			for k, x := range b {
				sums[k%len(sums)] -= x
			}
			for k, x := range sums {
				if math.Abs(x) > 1e-6*largest {
					t.Fatalf("%s: element %d of the %s: the sum over the replicas has changed by %v", codec, k, w.Name, x)
				}
			}
			if largest == 0 {
				t.Errorf("%s: the %s is 0", codec, w.Name)
			}
		}
		c = compressed{codec: "bfloat16", from: before}
		if after, _ := c.alone(t, 2); len(c.restored.Differ) != 1 || len(after.Compression) != 0 ||
			!strings.Contains(c.restored.Differ[0], "made with compression "+codec) {
			t.Errorf("%s: with bfloat16: %q, %d tensors", codec, c.restored.Differ, len(after.Compression))
		}
		plain, _ := (&compressed{codec: "none", steps: 4}).alone(t, 2)
		c = compressed{codec: codec, from: plain}
		if c.alone(t, 2); len(c.restored.Differ) != 1 || !strings.Contains(c.restored.Differ[0], "compression none") {
			t.Errorf("%s: from an uncompressed training: %q", codec, c.restored.Differ)
		}
	}
}

// A skipped batch that is not finite leaves no trace in the residuals: the steps without it have the same bits.
func TestCompressSkipsNotFinite(t *testing.T) {
	set, err := digits.Load()
	if err != nil {
		t.Fatal(err)
	}
	var good, bad []data.Batch
	for e, err := range set.Train.Take(120).Batch(30).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		b := e.(data.Batch)
		good, bad = append(good, b), append(bad, b)
		if len(bad) == 3 {
			x := b.Inputs[0].Clone()
			tensor.Data[float32](x)[100] = float32(math.Inf(1))
			bad = append(bad, data.Batch{Inputs: []*tensor.Tensor{x}, Labels: b.Labels})
		}
	}
	for _, codec := range testedCodecs {
		want, _ := (&compressed{codec: codec, steps: 100, batches: batches(good...)}).alone(t, 2)
		got, _ := (&compressed{codec: codec, batches: batches(bad...), steps: 100, policy: SkipNotFinite}).alone(t, 2)
		for i, w := range slices.Concat(want.Variables, want.Compression) {
			if !w.Value.Equal(slices.Concat(got.Variables, got.Compression)[i].Value) {
				t.Errorf("%s: %s differs", codec, w.Name)
			}
		}
	}
}

// An overflow of float16 on the wire is found although every replica's gradient is finite.
func TestCompressOverflows(t *testing.T) {
	set, err := digits.Load()
	if err != nil {
		t.Fatal(err)
	}
	var list []data.Batch
	for e, err := range set.Train.Take(30).Batch(30).Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		b := e.(data.Batch)
		x := b.Inputs[0].Clone()
		for i := range tensor.Data[float32](x) {
			tensor.Data[float32](x)[i] *= 1e7
		}
		list = append(list, data.Batch{Inputs: []*tensor.Tensor{x}, Labels: b.Labels})
	}
	e, err := gomlx.Open("go", gomlx.Options{Devices: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for codec, fails := range map[string]bool{"float16": true, "bfloat16": false} {
		s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
		if err != nil {
			t.Fatal(err)
		}
		c := compressed{codec: codec, batches: batches(list...), steps: 1}
		_, _, err = c.train(t.Context(), s)
		var problem *NotFiniteError
		if errors.As(err, &problem) != fails || !fails && err != nil {
			t.Errorf("%s: %v", codec, err)
		}
		if fails && !strings.Contains(err.Error(), "float16") {
			t.Errorf("%s: the error does not name the compression: %v", codec, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestSnapshotOfCompressionIsTheChiefs: the rows of all replicas are much memory, which the other workers do not keep.
func TestSnapshotOfCompressionIsTheChiefs(t *testing.T) {
	e, err := gomlx.Open("go", gomlx.Options{Devices: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	errs := overWorkersOn(t, []int{1, 1}, []engine.Engine{e, e}, func(w int, s *distribute.Strategy) error {
		m := &gomlx.Model{
			Forward: models.MLP{Hidden: []int{8}}.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
			Optimizer: optimizer.StochasticGradientDescent().Done(),
		}
		trainer, err := New(t.Context(), s, m, Config{
			GlobalBatch: 4, Exchange: AllReduce{Compress: compress.Codec{Method: compress.Int8}},
			Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
			Labels: []engine.Feature{{DType: tensor.Int32}},
		})
		if err != nil {
			return err
		}
		var list []*tensor.Tensor
		for _, v := range trainer.compressed() {
			value, e := trainer.gather(t.Context(), v, false)
			if err = errors.Join(err, e); value != nil {
				list = append(list, value)
			}
		}
		if want := 4 * (1 - w); err == nil && len(list) != want {
			err = fmt.Errorf("worker %d keeps %d values, want %d", w, len(list), want)
		}
		return errors.Join(err, trainer.Close())
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// withCodec returns the exchange with a codec.
func withCodec(x Exchange, codec compress.Codec) Exchange {
	switch x := x.(type) {
	case Sharded:
		x.Compress = codec
		return x
	case DiLoCo:
		x.Compress = codec
		return x
	}
	if codec.Method == compress.None {
		return x
	}
	return AllReduce{Compress: codec}
}

func TestCompressConfig(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for text, codec := range map[string]compress.Codec{
		"no parameter is float32": {Method: compress.BFloat16},
		"only PowerSGD uses them": {Method: compress.Int8, Rank: 2},
	} {
		cfg := fakeConfig(4)
		cfg.Exchange = AllReduce{Compress: codec}
		if _, err := New(t.Context(), s, fakeModel{}, cfg); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %q", err, text)
		}
	}
	custom, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Engine: fakeEngine{2}, CrossDeviceOps: distribute.NewReductionToOneDevice("", nil),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer custom.Close()
	cfg := fakeConfig(4)
	cfg.Exchange = AllReduce{Compress: compress.Codec{Method: compress.Int8}}
	if _, err := New(t.Context(), custom, fakeModel{}, cfg); err == nil ||
		!strings.Contains(err.Error(), "ReductionToOneDevice only reduces: use a strategy without CrossDeviceOps") {
		t.Errorf("int8 with custom CrossDeviceOps: %v", err)
	}
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(4)
		cfg.Exchange = AllReduce{Compress: compress.Codec{Method: compress.Method(w)}}
		_, err := New(t.Context(), s, fakeModel{}, cfg)
		return err
	})
	if errors.Join(errs...) == nil {
		t.Error("workers with different codecs start")
	}
}
