package train

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// fitInFolder trains over workers that all have the folder of the snapshots. It returns the complete state, the chief's
// history, and what was restored.
func fitInFolder(t *testing.T, layout []int, cfg FitConfig, own BackupConfig) (*Snapshot, *History, Restored) {
	t.Helper()
	ds := sizes(lineExamples(16), 7, 7, 2)
	var state *Snapshot
	histories := make([]*History, len(layout))
	var restored Restored
	errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
		if err != nil {
			return err
		}
		defer trainer.Close()
		b := backup(t, trainer, own)
		r, err := b.Restore(t.Context())
		if err != nil {
			return err
		}
		mine := cfg
		mine.Callbacks = []Callback{b.Callback()}
		if histories[w], err = trainer.Fit(t.Context(), ds, mine); err != nil {
			return err
		}
		timeless(histories[w])
		s2, err := trainer.Snapshot(t.Context())
		if w == 0 {
			state, restored = s2, r
		}
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%v: %v", layout, err)
	}
	return state, histories[0], restored
}

// TestSnapshotsByOwners checks that workers with a common folder each write a part of a snapshot of a sharded
// optimizer, and that it restores on any workers, with a sharded optimizer or without, as an unsharded one does with.
func TestSnapshotsByOwners(t *testing.T) {
	cfg := FitConfig{Epochs: 3}
	shardFakes(t, AllReduce{})
	want, history, _ := fitInFolder(t, []int{3}, cfg, BackupConfig{})
	layouts, metadata := [][]int{{3}, {1, 1, 1}, {1, 2}, {2, 1}}, map[string]string{"classes": "cat, dog"}
	for i, from := range layouts {
		for j, to := range layouts {
			for mode, modes := range [][2]Exchange{{Sharded{}, Sharded{}}, {Sharded{}, AllReduce{}}, {AllReduce{}, Sharded{}}} {
				if (i+j+mode)%3 > 0 {
					continue
				}
				dir := t.TempDir()
				some := cfg
				some.Steps = 1 + (3*i+j+mode)%8
				shardFakes(t, modes[0])
				fitInFolder(t, from, some, BackupConfig{Dir: dir, EverySteps: 2, Metadata: metadata})
				all, err := checkpoint.List(dir)
				if err != nil || len(all) == 0 {
					t.Fatal(err)
				}
				parts, err := filepath.Glob(filepath.Join(all[len(all)-1], "*.safetensors"))
				files := 1
				if modes[0] == (Sharded{}) {
					files = len(from)
				}
				if err != nil || len(parts) != files {
					t.Errorf("%v, sharding %v: parts %v, want %d", from, modes[0], parts, files)
				}
				if left, _ := filepath.Glob(filepath.Join(dir, ".snapshot*")); left != nil {
					t.Errorf("%v: %v is left", from, left)
				}
				weights, err := LoadWeights(all[len(all)-1])
				if err != nil || len(weights) != len(fakeVariables) {
					t.Errorf("%v, sharding %v: the weights of a snapshot: %d, %v", from, modes[0], len(weights), err)
				}
				if s, _, err := checkpoint.Find(all[len(all)-1]); err != nil {
					t.Error(err)
				} else if s, err := SnapshotOf(&s.Contents); err != nil || !reflect.DeepEqual(s.Metadata, metadata) {
					t.Errorf("%v, sharding %v: metadata %v, %v", from, modes[0], s.Metadata, err)
				}
				shardFakes(t, modes[1])
				got, h, restored := fitInFolder(t, to, cfg, BackupConfig{Dir: dir})
				if !restored.Found || restored.Step != int64(some.Steps) || restored.Differ != nil || restored.Refused != nil {
					t.Errorf("%v to %v, sharding %v: %+v", from, to, modes, restored)
				}
				if !reflect.DeepEqual(h, history) || HashWeights(got.Variables) != HashWeights(want.Variables) {
					t.Errorf("%v to %v, sharding %v: got\n%+v\n%v, want\n%+v\n%v", from, to, modes, h, got.Variables, history,
						want.Variables)
				}
			}
		}
	}
}

// TestPartsWithCallbackState checks that the state of a callback, which every worker has, is in one part only.
func TestPartsWithCallbackState(t *testing.T) {
	shardFakes(t, Sharded{})
	dir := t.TempDir()
	loaded := make([][]Weight, 2)
	for range 2 { // the second time resumes
		errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
			if err != nil {
				return err
			}
			defer trainer.Close()
			own := Callback{
				Name: "own",
				Save: func() []Weight { return []Weight{{"x", tensor.Scalar(float32(1 + w))}} },
				Load: func(state []Weight) error { loaded[w] = state; return nil },
			}
			b := backup(t, trainer, BackupConfig{Dir: dir})
			_, err = trainer.Fit(t.Context(), sizes(lineExamples(7), 7), FitConfig{Callbacks: []Callback{b.Callback(), own}})
			return err
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	for w, state := range loaded {
		if len(state) != 1 || state[0].Name != "x" || tensor.Data[float32](state[0].Value)[0] != 1 {
			t.Errorf("worker %d: loaded %v, want the chief's state", w, state)
		}
	}
}

// TestPartCannotBeWritten checks that a worker that cannot write its part of a snapshot ends the training on all
// workers, and that the snapshots before it stay.
func TestPartCannotBeWritten(t *testing.T) {
	shardFakes(t, Sharded{})
	dir := t.TempDir()
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
		if err != nil {
			return err
		}
		defer trainer.Close()
		b := backup(t, trainer, BackupConfig{Dir: dir})
		if _, err := b.Restore(t.Context()); err != nil {
			return err
		}
		ds := sizes(lineExamples(7), 7)
		if _, err := trainer.Fit(t.Context(), ds, FitConfig{Callbacks: []Callback{b.Callback()}}); err != nil {
			return err
		}
		if w == 1 {
			b.cfg.Dir = filepath.Join(os.DevNull, "none")
		}
		_, err = trainer.Fit(t.Context(), ds, FitConfig{Callbacks: []Callback{b.Callback()}})
		return err
	})
	for w, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "training stops because it could not be resumed") {
			t.Errorf("worker %d: %v", w, err)
		}
	}
	if s, refused, err := checkpoint.Latest(dir); err != nil || refused != nil || s == nil || s.Step != 1 {
		t.Errorf("the newest snapshot is %+v, refused %v, %v", s, refused, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".snapshot*")); left != nil {
		t.Errorf("%v is left", left)
	}
}

// TestTwoBackups checks that two Backups of a trainer with a sharded optimizer write to their own folders.
func TestTwoBackups(t *testing.T) {
	shardFakes(t, Sharded{})
	dirs := []string{t.TempDir(), t.TempDir()}
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
		if err != nil {
			return err
		}
		defer trainer.Close()
		cfg := FitConfig{Epochs: 4}
		for i, dir := range dirs {
			cfg.Callbacks = append(cfg.Callbacks, backup(t, trainer, BackupConfig{Dir: dir, EverySteps: i + 1}).Callback())
		}
		_, err = trainer.Fit(t.Context(), sizes(lineExamples(16), 7, 7, 2), cfg)
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if s, refused, err := checkpoint.Latest(dir); err != nil || refused != nil || s == nil || s.Step != 12 {
			t.Errorf("the newest snapshot is %+v, refused %v, %v", s, refused, err)
		}
	}
}

// TestPartsWrittenCompressed checks that with a sharded optimizer and compressed gradients all workers know in a step
// that one of them is still writing its part of a snapshot, so that none waits for it.
func TestPartsWrittenCompressed(t *testing.T) {
	slow, written := make(chan struct{}), make(chan struct{})
	close(written)
	engines := make([]engine.Engine, 2)
	for w := range engines {
		e, err := gomlx.Open("go", gomlx.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		engines[w] = e
	}
	errs := overWorkersOn(t, []int{1, 1}, engines, func(w int, s *distribute.Strategy) error {
		c := &compressed{codec: "bfloat16", shard: Sharded{}}
		c.before = func(ctx context.Context, trainer *Trainer) error {
			defer func() { trainer.partial = nil }()
			trainer.partial = &partialSnapshot{done: written}
			if w == 1 {
				trainer.partial.done = slow
			}
			steps := 0
			_, err := trainer.Fit(ctx, c.batches, FitConfig{Steps: 3, Callbacks: []Callback{{
				OnStepEnd: func(context.Context, Step) error {
					steps++
					if got, want := trainer.partsWritten(), steps > 2; got != want {
						t.Errorf("worker %d, step %d: partsWritten is %v, want %v", w, steps, got, want)
					}
					if w == 1 && steps == 2 {
						close(slow)
					}
					return nil
				},
			}}})
			return err
		}
		_, _, err := c.train(t.Context(), s)
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
