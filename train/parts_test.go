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
	sharded(t, ShardOff)
	want, history, _ := fitInFolder(t, []int{3}, cfg, BackupConfig{})
	layouts := [][]int{{3}, {1, 1, 1}, {1, 2}, {2, 1}}
	for i, from := range layouts {
		for j, to := range layouts {
			for mode, modes := range [][2]Sharding{{ShardOn, ShardOn}, {ShardOn, ShardOff}, {ShardOff, ShardOn}} {
				if (i+j+mode)%3 > 0 {
					continue
				}
				dir := t.TempDir()
				some := cfg
				some.Steps = 1 + (3*i+j+mode)%8
				sharded(t, modes[0])
				fitInFolder(t, from, some, BackupConfig{Dir: dir, EverySteps: 2})
				all, err := checkpoint.List(dir)
				if err != nil || len(all) == 0 {
					t.Fatal(err)
				}
				parts, err := filepath.Glob(filepath.Join(all[len(all)-1], "*.safetensors"))
				files := 1
				if modes[0] == ShardOn {
					files = len(from)
				}
				if err != nil || len(parts) != files {
					t.Errorf("%v, sharding %v: parts %v, want %d", from, modes[0], parts, files)
				}
				if left, _ := filepath.Glob(filepath.Join(dir, ".snapshot*")); left != nil {
					t.Errorf("%v: %v is left", from, left)
				}
				sharded(t, modes[1])
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

// TestPartCannotBeWritten checks that a worker that cannot write its part of a snapshot ends the training on all
// workers, and that the snapshots before it stay.
func TestPartCannotBeWritten(t *testing.T) {
	sharded(t, ShardOn)
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
	sharded(t, ShardOn)
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
		c := &compressed{codec: "bfloat16", shard: ShardOn}
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
