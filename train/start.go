package train

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// startEqual gives all workers the chief's initial values, as TensorFlow's multi-worker strategy does when
// it creates variables, because a model may draw random ones. First it checks that all workers have the same
// model. It sends only the values that differ between workers.
func (t *Trainer) startEqual(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			t.failOthers(ctx, err)
		}
	}()
	prints, err := t.initialPrints()
	if err != nil {
		return err
	}
	chief := t.strategy.Properties().ShouldCheckpoint
	mine := t.describe()
	theirs, err := t.fromChief(ctx, chief, []byte(strings.Join(mine, "\n")))
	if err != nil {
		return fmt.Errorf("train: receiving the chief's model description: %w", err)
	}
	for i, line := range strings.Split(string(theirs), "\n") {
		switch {
		case i >= len(mine):
			return fmt.Errorf("train: this worker's model differs from the chief's: the chief also has %s", line)
		case mine[i] != line:
			hint := ""
			if strings.HasPrefix(line, "bucket ") || strings.HasSuffix(line, bucketsOfGradients) {
				hint = ": give all workers the same model, engine, build and Config.BucketBytes, which decide on the buckets"
			}
			return fmt.Errorf("train: this worker's model differs from the chief's: it has %s, the chief has %s%s", mine[i],
				line, hint)
		case i == strings.Count(string(theirs), "\n") && len(mine) > i+1:
			return fmt.Errorf("train: this worker's model differs from the chief's: it also has %s", mine[i+1])
		}
	}
	if err := t.comparePrograms(ctx); err != nil {
		return err
	}
	differ, err := t.differentValues(ctx, prints)
	if err != nil {
		return err
	}
	for _, i := range differ {
		v := t.variables[i]
		value, err := t.fromKeeper(ctx, i)
		if err != nil {
			return fmt.Errorf("train: receiving the initial value of %s from the chief: %w", v.Name, err)
		}
		for replica := range t.parts {
			if err := t.program.Write(replica, i, value); err != nil {
				return fmt.Errorf("train: setting %s on replica %d: %w", v.Name, replica, err)
			}
		}
	}
	return nil
}

// initialPrints returns, by local replica and variable, a 128-bit hash of the initial value: two numbers. Both are 0
// where the replica's device does not have the variable, or another replica of this device represents it. It sets
// t.initial.
func (t *Trainer) initialPrints() ([][]int64, error) {
	prints := make([][]int64, len(t.parts))
	own := xxh3.New()
	for replica := range prints {
		prints[replica] = make([]int64, 2*len(t.variables))
		first := t.devices[t.deviceOf[replica]].replicas[0] == replica
		for i, v := range t.variables {
			if !t.owned(replica, i) || !first && v.Role != engine.Average {
				continue
			}
			value, err := t.program.Read(replica, i)
			if err != nil {
				return nil, fmt.Errorf("train: reading %s: %w", v.Name, err)
			}
			h := xxh3.Hash128(value.Memory().HostBytes())
			prints[replica][2*i], prints[replica][2*i+1] = int64(h.Hi), int64(h.Lo)
			if replica == 0 && !t.divided(i) {
				b := h.Bytes()
				own.Write(b[:])
			}
		}
	}
	t.initial = own.Sum64()
	return prints, nil
}

// differentValues returns the variables whose initial values differ between replicas, from the prints of this worker's.
// All workers get the same result.
func (t *Trainer) differentValues(ctx context.Context, prints [][]int64) (differ []int, err error) {
	rows := make([]distribute.Value, len(prints))
	for replica, p := range prints {
		rows[replica] = tensor.Of(p, 1, len(p))
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return nil, fmt.Errorf("train: comparing the workers' initial values: %w", err)
	}
	list, n := tensor.Data[int64](all), 2*len(t.variables)
	for i := range t.variables {
		keeper, _ := t.keeper(i)
		want := list[keeper*n+2*i:][:2]
		for replica := range len(list) / n {
			got := list[replica*n+2*i:][:2]
			if !slices.Equal(got, want) && (got[0] != 0 || got[1] != 0) {
				differ = append(differ, i)
				break
			}
		}
	}
	return differ, nil
}

// comparePrograms returns an error unless all workers compute the same, including constants, because rates
// and layers are not variables. Engines with different names build different programs from one model, so only
// workers with the same engine name are compared. All workers get the same result.
func (t *Trainer) comparePrograms(ctx context.Context) error {
	var lines []string
	if p, ok := t.program.(engine.Described); ok {
		lines = p.Describe()
	}
	text := strings.Join(lines, "\n")
	first, _ := t.strategy.LocalReplicas()
	rows := make([]distribute.Value, len(t.parts))
	engineHash, textHash := xxh3.HashString(t.strategy.Engine().Name()), xxh3.HashString(text)
	for i := range rows {
		rows[i] = tensor.From([]int64{int64(first), int64(engineHash), int64(textHash)}, 1, 3)
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return fmt.Errorf("train: comparing the workers' programs: %w", err)
	}
	type program struct{ first, engine, hash int64 } // of a worker
	var workers []program
	for list := tensor.Data[int64](all); len(list) > 0; list = list[3:] {
		if p := (program{list[0], list[1], list[2]}); len(workers) == 0 || workers[len(workers)-1] != p {
			workers = append(workers, p)
		}
	}
	for w, p := range workers {
		like := slices.IndexFunc(workers, func(q program) bool { return q.engine == p.engine })
		if workers[like].hash == p.hash {
			continue
		}
		var both [2]string
		for i, q := range []program{workers[like], p} {
			bytes, err := t.fromWorker(ctx, q.first == int64(first), []byte(text))
			if err != nil {
				return fmt.Errorf("train: comparing the workers' programs (those of workers %d and %d differ): %w", like, w, err)
			}
			both[i] = string(bytes)
		}
		return fmt.Errorf("train: the workers have compiled different programs: %s. "+
			"Give all workers the same model, loss and optimizer, with the same constants (such as rates)",
			programDifference(like, w, both[0], both[1]))
	}
	t.workers, t.firsts = len(workers), nil
	for _, p := range workers {
		t.firsts = append(t.firsts, int(p.first))
	}
	var others []int
	for w, p := range workers {
		if p.first == int64(first) {
			t.worker = w
		}
		if p.engine != int64(engineHash) {
			others = append(others, w)
		}
	}
	if len(others) > 0 && t.strategy.Properties().ShouldCheckpoint { // one worker's warning is enough
		t.config.Logger.Warn("train: engines of different names build different programs of one model, which are not "+
			"compared: make sure that all workers have the same model, loss and optimizer, with the same constants",
			"engine", t.strategy.Engine().Name(), "workers with others", others)
	}
	return nil
}

// programDifference describes the first difference between two workers' programs.
func programDifference(v, w int, a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return fmt.Sprintf("worker %d computes %q, where worker %d computes %q", w, y[i], v, x[i])
		}
	}
	return fmt.Sprintf("the program of worker %d has %d operations, that of worker %d has %d", w, len(y), v, len(x))
}

// bucketsOfGradients follows the number of buckets in describe.
const bucketsOfGradients = " buckets of gradients"

// describe lists, one per line, the properties that must be the same on all workers for their steps to match.
func (t *Trainer) describe() []string {
	out := []string{
		fmt.Sprintf("global batches of %d", t.config.GlobalBatch), fmt.Sprintf("seed %d", t.config.Seed),
		fmt.Sprint(len(t.buckets), bucketsOfGradients), fmt.Sprintf("compression %v", t.config.Compress),
		fmt.Sprintf("metrics %q", t.Metrics()),
		fmt.Sprintf("the policy %q for what is not finite", t.config.NotFinite),
		fmt.Sprintf("gradients clipped by norm %v, by variable norm %v, by value %v",
			t.config.ClipNorm, t.config.ClipVariableNorm, t.config.ClipValue),
		fmt.Sprintf("noise scale of gradients: %v", t.config.NoiseScale),
	}
	for _, s := range t.shapes[1:] {
		purpose := "training"
		if s.evaluation {
			purpose = "evaluation only"
		}
		out = append(out, fmt.Sprintf("batches of at most %d examples of %s with labels %s, for %s", s.GlobalBatch,
			formatFeatures(s.Inputs), formatFeatures(s.Labels), purpose))
	}
	if d := t.config.DiLoCo; d != nil {
		out = append(out, d.String())
	}
	if t.scale.Scale != 0 {
		out = append(out, fmt.Sprintf("a loss scale of %v, raised after %d steps", t.scale.Scale,
			t.config.LossScaling.GrowthSteps))
	}
	for k, b := range t.buckets { // they can follow the order of a graph, which differs between engines
		out = append(out, fmt.Sprintf("bucket %d of %s (hash of names: %s)", k, plural(len(b.names), "gradient"), b.hash))
	}
	for _, v := range t.variables {
		out = append(out, fmt.Sprintf("the %v %q of %v%s", v.Role, v.Name, v.DType, tensor.FormatShape(v.Shape)))
	}
	return out
}

// chiefError is a failure on the chief, as the other workers receive it.
type chiefError struct{ text string }

func (e *chiefError) Error() string { return "train: restore: on the chief: " + e.text }

// FromWorker returns the worker that failed (see worker.Worker.Fail): 0, the chief.
func (e *chiefError) FromWorker() int { return 0 }
