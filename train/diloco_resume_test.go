package train

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// local is a training of an MLP by Adam with DiLoCo, which may start from a snapshot.
type local struct {
	layout    []int
	codec     string
	diloco    *DiLoCo
	from      *Snapshot
	steps     int
	snapshots []*Snapshot // of the chief, after each outer step
	last      *Snapshot   // at the end
	hash      string      // of the weights
	restored  Restored
}

// train trains on all workers.
func (l *local) train(t *testing.T) {
	t.Helper()
	codec, err := compress.Parse(l.codec)
	if err != nil {
		t.Fatal(err)
	}
	set, err := digits.Load()
	if err != nil {
		t.Fatal(err)
	}
	engines := make([]engine.Engine, len(l.layout))
	for w, n := range l.layout {
		if engines[w], err = gomlx.Open("go", gomlx.Options{Devices: n}); err != nil {
			t.Fatal(err)
		}
		defer engines[w].Close()
	}
	hashes := make([]string, len(l.layout))
	errs := overWorkersOn(t, l.layout, engines, func(w int, s *distribute.Strategy) (err error) {
		m := &gomlx.Model{
			Forward: models.MLP{Hidden: []int{48}}.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
			Optimizer: optimizer.Adam().Done(),
		}
		trainer, err := New(t.Context(), s, m, Config{
			GlobalBatch: 30, Seed: 3, BucketBytes: 4096, Exchange: withCodec(l.exchange(), codec),
			Logger: slog.New(slog.DiscardHandler),
			Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
			Labels: []engine.Feature{{DType: tensor.Int32}},
		})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, trainer.Close()) }()
		if l.from != nil {
			var from *Snapshot
			if w == 0 {
				contents, err := l.from.Contents()
				if err != nil {
					return err
				}
				if from, err = SnapshotOf(contents); err != nil {
					return err
				}
			}
			restored, err := trainer.Restore(t.Context(), from)
			if err != nil {
				return err
			}
			if w == 0 {
				l.restored = restored
			}
		}
		if l.steps > 0 {
			_, err = trainer.Fit(t.Context(), set.Train.Take(240).Shuffle(1).Batch(30), FitConfig{
				Epochs: 3, Steps: l.steps, Callbacks: []Callback{{OnStepEnd: func(ctx context.Context, step Step) error {
					if !step.Outer {
						return nil
					}
					snapshot, err := trainer.Snapshot(ctx)
					if w == 0 {
						l.snapshots = append(l.snapshots, snapshot)
					}
					return err
				}}},
			})
			if err != nil {
				return err
			}
		}
		if hashes[w], err = trainer.WeightsHash(t.Context()); err != nil {
			return err
		}
		last, err := trainer.Snapshot(t.Context())
		if w == 0 {
			l.last = last
		}
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%v, %s: %v", l.layout, l.codec, err)
	}
	if slices.ContainsFunc(hashes, func(h string) bool { return h != hashes[0] }) {
		t.Fatalf("%v, %s: the workers have weights %v", l.layout, l.codec, hashes)
	}
	l.hash = hashes[0]
}

func (l *local) exchange() Exchange {
	if l.diloco == nil {
		return nil
	}
	return *l.diloco
}

// A training with DiLoCo resumes to the same bits from every outer step, with the optimizer's slots of each worker, the
// outer momentum and the residuals of compression.
func TestDiLoCoResumes(t *testing.T) {
	for _, c := range []struct {
		codec  string
		layout []int
	}{
		{"none", []int{1, 1}},
		{"none", []int{2, 1}},
		{"int8", []int{1, 1}},
		{"powersgd:2:1", []int{1, 1}},
		{"bfloat16", []int{1, 1}},
	} {
		whole := &local{layout: c.layout, codec: c.codec, diloco: &DiLoCo{InnerSteps: 3}, steps: 17}
		whole.train(t)
		if len(whole.snapshots) != 4 { // epochs of 8 steps: after 3, 6, 11 and 14
			t.Fatalf("%d outer steps within epochs, want 4", len(whole.snapshots))
		}
		for _, from := range []int{0, 2} {
			resumed := &local{
				layout: c.layout, codec: c.codec, diloco: &DiLoCo{InnerSteps: 3}, steps: 17, from: whole.snapshots[from],
			}
			resumed.train(t)
			if resumed.hash != whole.hash || resumed.restored.Differ != nil {
				t.Errorf("%s over %v from snapshot %d: %+v, weights %s, want %s", c.codec, c.layout, from, resumed.restored,
					resumed.hash, whole.hash)
			}
		}
	}
}

// TestDiLoCoRestoresElsewhere: with another number of workers every worker gets the mean of the slots; snapshots with
// and without DiLoCo, and of the same replicas divided otherwise, can be exchanged. The differences are reported, and
// the parameters are those of the snapshot.
func TestDiLoCoRestoresElsewhere(t *testing.T) {
	three := &DiLoCo{InnerSteps: 3}
	before := &local{layout: []int{1, 1}, codec: "none", diloco: three, steps: 3}
	before.train(t)
	plain := &local{layout: []int{1, 1}, codec: "none", steps: 3}
	plain.train(t)
	uneven := &local{layout: []int{1, 2}, codec: "none", diloco: three, steps: 3}
	uneven.train(t)
	snapshot := before.snapshots[0]
	for _, c := range []struct {
		from   *local
		layout []int
		diloco *DiLoCo
		differ string
	}{
		{
			uneven,
			[]int{2, 1},
			three,
			"made by workers with the replicas [[0] [1 2]], this training has workers with [[0 1] [2]]",
		},
		{before, []int{1, 1, 1}, three, "made by 2 workers with an optimizer state each, this training has 3 workers"},
		{before, []int{1, 1}, nil, "this training has no DiLoCo"},
		{before, []int{1, 1}, &DiLoCo{InnerSteps: 5}, "3 inner steps, outer learning rate 0.7 and outer momentum 0.9, this"},
	} {
		after := &local{layout: c.layout, codec: "none", diloco: c.diloco, from: c.from.snapshots[0]}
		after.train(t)
		if after.hash != c.from.hash || len(after.restored.Differ) == 0 ||
			!strings.Contains(after.restored.Differ[0], c.differ) {
			t.Errorf("over %v with %v: %q, weights %s, want %s", c.layout, c.diloco, after.restored.Differ, after.hash,
				c.from.hash)
		}
	}
	elsewhere := &local{layout: []int{1, 1, 1}, codec: "none", diloco: three, from: snapshot}
	elsewhere.train(t)
	slots := 0
	for i, v := range snapshot.Variables {
		again := elsewhere.last.Variables[i].Value
		if v.Value.DType() != tensor.Float32 || v.Value.SameShape(again) {
			continue
		}
		slots++
		two, three := v.Value.Float64s(), again.Float64s()
		for k, x := range three {
			n := len(two) / 2
			if mean := (two[k%n] + two[n+k%n]) / 2; math.Abs(x-mean) > 1e-6*math.Abs(mean) {
				t.Fatalf("%s: element %d is %v on one of 3 workers, want the mean %v", v.Name, k, x, mean)
			}
		}
	}
	if slots < 8 || len(snapshot.OuterMomentum) != 4 { // two moments of 4 parameters
		t.Errorf("the snapshot has %d slots with a row for each worker, and %d tensors of momentum", slots,
			len(snapshot.OuterMomentum))
	}
	from := &Snapshot{}
	*from = *snapshot
	broken := *from.DiLoCo
	broken.InnerSteps = 0
	from.DiLoCo = &broken
	contents, err := from.Contents()
	if err == nil {
		_, err = SnapshotOf(contents)
	}
	if err == nil || !strings.Contains(err.Error(), "DiLoCo: InnerSteps is 0") {
		t.Errorf("a broken snapshot: %v", err)
	}
}

// TestRestoreRefusesKept checks that a snapshot whose compression or outer momentum does not fit is refused, and not
// replaced by zeros.
func TestRestoreRefusesKept(t *testing.T) {
	m := wide{16, 32, 8}
	for w, err := range overWorkersOn(t, []int{2}, goEngines(t, []int{2}), func(_ int, s *distribute.Strategy) error {
		cfg := m.config()
		cfg.Exchange = DiLoCo{InnerSteps: 3, Compress: compress.Codec{Method: compress.Int8}}
		cfg.Logger = slog.New(slog.DiscardHandler)
		trainer, err := New(t.Context(), s, m.model(), cfg)
		if err != nil {
			return err
		}
		defer trainer.Close()
		good, err := trainer.Snapshot(t.Context())
		if err != nil {
			return err
		}
		for _, list := range []func(*Snapshot) *[]Weight{
			func(s *Snapshot) *[]Weight { return &s.Compression },
			func(s *Snapshot) *[]Weight { return &s.OuterMomentum },
		} {
			bad := *good
			values := list(&bad)
			*values = slices.Clone(*values)
			(*values)[0].Value = tensor.New(tensor.Float32, 7)
			want := (*values)[0].Name + ": got float32(7,), want "
			if _, err := trainer.Restore(t.Context(), &bad); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
			*values = nil
			if _, err := trainer.Restore(t.Context(), &bad); err != nil { // they begin with zeros
				t.Error(err)
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}
