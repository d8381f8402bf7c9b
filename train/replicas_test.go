package train

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// scattered are divisions of four replicas among workers: ids that are not contiguous, or not in the workers' order.
var scattered = [][][]int{{{0, 2}, {1, 3}}, {{1, 3}, {0, 2}}, {{0, 3}, {1, 2}}, {{2}, {0, 1, 3}}, {{3}, {2}, {0, 1}}}

// TestReplicasOfWorkers checks that a training equals that of one process bit for bit, whichever replicas the workers
// have: its weights and snapshots, also after it was resumed, its evaluation and its predictions; with rows that each
// worker reads for its replicas, and with whole batches.
func TestReplicasOfWorkers(t *testing.T) {
	m := wide{128, 640, 40}
	const steps = 6
	run := func(t *testing.T, ids [][]int, x Exchange, rows bool, until int, dir string) (got string) {
		t.Helper()
		layout := make([]int, len(ids))
		for w := range ids {
			layout[w] = len(ids[w])
		}
		results := make([]string, len(ids))
		errs := overReplicasOn(t, ids, goEngines(t, layout), func(w int, s *distribute.Strategy) error {
			cfg := m.config()
			cfg.Exchange, cfg.ClipNorm, cfg.Seed, cfg.GlobalBatch = x, 0.01, 5, 7
			trainer, err := New(t.Context(), s, m.model(), cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			b := backup(t, trainer, BackupConfig{Dir: dir, EverySteps: 2})
			if _, err := b.Restore(t.Context()); err != nil {
				return err
			}
			ds := data.Dataset(fromTensors(m.batch(18, 0)).Shuffle(1).Batch(7))
			if !rows {
				ds = data.FromSeq(-1, ds.Iter)
			}
			history, err := trainer.Fit(t.Context(), ds, FitConfig{
				Epochs: 2, Steps: until, Validation: ds, Callbacks: []Callback{b.Callback()},
			})
			if err != nil {
				return err
			}
			if err := trainer.CheckMirrored(); err != nil {
				return err
			}
			predicted, err := trainer.Predict(t.Context(), ds)
			if err != nil {
				return err
			}
			results[w], err = trainer.WeightsHash(t.Context())
			results[w] += fmt.Sprintf("\n%s\n%v", textOf(history), HashWeights([]Weight{{"", predicted[0]}}))
			state, e := trainer.Snapshot(t.Context())
			if w == 0 && e == nil {
				got = fmt.Sprint(HashWeights(state.Variables), HashWeights(state.Compression))
			}
			return errors.Join(err, e)
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("%v: %v", ids, err)
		}
		for w, result := range results {
			if result != results[0] {
				t.Errorf("%v: worker %d has\n%s, worker 0\n%s", ids, w, result, results[0])
			}
		}
		return got + results[0]
	}
	one := [][]int{{0, 1, 2, 3}}
	int8 := compress.Codec{Method: compress.Int8}
	for name, c := range map[string]struct {
		exchange Exchange
		rows     bool
	}{
		"all-reduce":         {AllReduce{}, true},
		"whole batches":      {AllReduce{}, false},
		"int8":               {AllReduce{Compress: int8}, true},
		"sharded":            {Sharded{}, true},
		"sharded, with int8": {Sharded{Compress: int8}, true},
	} {
		t.Run(name, func(t *testing.T) {
			want := run(t, one, c.exchange, c.rows, steps, "")
			for i, ids := range scattered {
				if got := run(t, ids, c.exchange, c.rows, steps, ""); got != want {
					t.Errorf("%v: got\n%s, want\n%s", ids, got, want)
				}
				dir := t.TempDir()
				run(t, ids, c.exchange, c.rows, 4, dir)
				to := append(scattered, one)[(i+1)%(len(scattered)+1)]
				if got := run(t, to, c.exchange, c.rows, steps, dir); got != want {
					t.Errorf("%v, resumed by %v: got\n%s, want\n%s", ids, to, got, want)
				}
			}
		})
	}
}

// TestErrorsNameReplicas checks that errors have the ids of replicas, not their local numbers.
func TestErrorsNameReplicas(t *testing.T) {
	ids := [][]int{{0, 2}, {1, 3}}
	for w, err := range overReplicas(t, ids, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(8))
		if err != nil {
			return err
		}
		defer trainer.Close()
		parameter := trainer.Variables()[0]
		other := tensor.New(parameter.DType, parameter.Shape...)
		tensor.Data[float64](other)[0] = 7
		if err := trainer.program.Write(1, 0, other); err != nil {
			return err
		}
		want := fmt.Sprintf("against replica %d, replica %d at ", ids[w][0], ids[w][1])
		if err := trainer.CheckMirrored(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("worker %d: %v, want %s", w, err, want)
		}
		trainer.program = unreadable{trainer.program}
		_, reading := trainer.readParameters(1)
		for want, err := range map[string]error{
			"reading %s on replica %d: ": reading,
			"%s on replica %d: lost":     trainer.CheckMirrored(),
			"setting %s on replica %d: ": trainer.writeTo(1, 0, nil),
		} {
			if want := fmt.Sprintf(want, parameter.Name, ids[w][1]); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("worker %d: %v, want %s", w, err, want)
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// unreadable is a program whose second replica cannot be read and written.
type unreadable struct{ engine.Program }

func (p unreadable) Read(local, variable int) (*tensor.Tensor, error) {
	if local == 1 {
		return nil, errors.New("lost")
	}
	return p.Program.Read(local, variable)
}

func (unreadable) Write(int, int, *tensor.Tensor) error { return errors.New("lost") }

// TestDiLoCoReplicas checks that DiLoCo trains and resumes to the same bits if the ids of the workers' replicas are not
// contiguous, and reports a snapshot of the same numbers of replicas divided otherwise.
func TestDiLoCoReplicas(t *testing.T) {
	m := wide{16, 32, 8}
	run := func(ids [][]int, from *Snapshot) (middle, last *Snapshot, restored Restored, hash string) {
		t.Helper()
		layout := []int{len(ids[0]), len(ids[1])}
		errs := overReplicasOn(t, ids, goEngines(t, layout), func(w int, s *distribute.Strategy) error {
			cfg := m.config()
			cfg.Exchange = DiLoCo{InnerSteps: 3, Compress: compress.Codec{Method: compress.Int8}}
			trainer, err := New(t.Context(), s, m.model(), cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			its, err := trainer.Restore(t.Context(), from)
			if err != nil {
				return err
			}
			ds := fromTensors(m.batch(24, 0)).Shuffle(1).Batch(4)
			save := func(ctx context.Context, _ Step) error {
				if trainer.Steps() != 9 {
					return nil
				}
				state, err := trainer.Snapshot(ctx)
				if w == 0 {
					middle = state
				}
				return err
			}
			fit := FitConfig{Epochs: 2, Callbacks: []Callback{{OnStepEnd: save}}}
			if _, err := trainer.Fit(t.Context(), ds, fit); err != nil {
				return err
			}
			state, err := trainer.Snapshot(t.Context())
			if err != nil {
				return err
			}
			weights, err := trainer.WeightsHash(t.Context())
			if w == 0 {
				last, restored, hash = state, its, weights
			}
			return err
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("%v: %v", ids, err)
		}
		return middle, last, restored, hash
	}
	for _, ids := range scattered[:4] {
		middle, whole, _, want := run(ids, nil)
		_, again, restored, got := run(ids, middle)
		if got != want || restored.Differ != nil || HashWeights(again.Variables) != HashWeights(whole.Variables) ||
			HashWeights(again.Compression) != HashWeights(whole.Compression) ||
			HashWeights(again.OuterMomentum) != HashWeights(whole.OuterMomentum) {
			t.Errorf("%v: resumed %+v to the weights %s, want %s", ids, restored, got, want)
		}
		if len(ids[0]) != 2 {
			continue
		}
		_, _, restored, _ = run([][]int{{0, 1}, {2, 3}}, middle)
		report := fmt.Sprintf("by workers with the replicas %v, this training has workers with [[0 1] [2 3]]", ids)
		if len(restored.Differ) != 1 || !strings.Contains(restored.Differ[0], report) {
			t.Errorf("%v: %q, want %q", ids, restored.Differ, report)
		}
	}
}
