package train

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// compareModels returns an error unless all workers have the chief's model and configuration.
func (t *Trainer) compareModels(ctx context.Context) error {
	mine := t.describe()
	theirs, err := fromChief(ctx, t, mine, nil)
	if err != nil {
		return fmt.Errorf("train: comparing the workers' models: %w", err)
	}
	for i, line := range theirs {
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
		case i == len(theirs)-1 && len(mine) > i+1:
			return fmt.Errorf("train: this worker's model differs from the chief's: it also has %s", mine[i+1])
		}
	}
	return t.comparePrograms(ctx)
}

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
	if err := t.compareModels(ctx); err != nil {
		return err
	}
	differ, err := t.differentValues(ctx, prints)
	if err != nil {
		return err
	}
	for _, i := range differ {
		v := t.variables[i]
		value, err := t.gather(ctx, t.ofChief(t.table[i]), true)
		if err != nil {
			return fmt.Errorf("train: receiving the initial value of %s from the chief: %w", v.Name, err)
		}
		if err := t.write(i, value); err != nil {
			return fmt.Errorf("train: %w", err)
		}
	}
	return nil
}

// fingerprint is a 128-bit hash of a value.
type fingerprint [2]uint64

// initialPrints returns, by local replica and variable, the fingerprint of the initial value. It is 0 where the
// replica's device does not have the variable, or another replica of this device represents it. It sets t.initial.
func (t *Trainer) initialPrints() ([][]fingerprint, error) {
	prints := make([][]fingerprint, len(t.local))
	own := xxh3.New()
	for replica := range prints {
		prints[replica] = make([]fingerprint, len(t.variables))
		first := t.devices[t.deviceOf[replica]].replicas[0] == replica
		for i, v := range t.variables {
			if !t.hasAll(replica, i) || !first && v.Role != engine.Average {
				continue
			}
			value, err := t.program.Read(replica, i)
			if err != nil {
				return nil, fmt.Errorf("train: reading %s: %w", v.Name, err)
			}
			h := xxh3.Hash128(value.Memory().HostBytes())
			if prints[replica][i] = (fingerprint{h.Hi, h.Lo}); replica == 0 && !t.table[i].divided() {
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
func (t *Trainer) differentValues(ctx context.Context, prints [][]fingerprint) (differ []int, err error) {
	all, err := fromWorkers(ctx, t, prints)
	if err != nil {
		return nil, fmt.Errorf("train: comparing the workers' initial values: %w", err)
	}
	values := byReplica(t, all)
	for i, v := range t.table {
		want := values[t.ofChief(v).entries[0].owner][i]
		if slices.ContainsFunc(values, func(of []fingerprint) bool { return of[i] != want && of[i] != fingerprint{} }) {
			differ = append(differ, i)
		}
	}
	return differ, nil
}

// comparePrograms returns an error unless all workers compute the same, including constants, because rates
// and layers are not variables. Engines with different names build different programs from one model, so only
// workers with the same engine name are compared. All workers get the same result.
func (t *Trainer) comparePrograms(ctx context.Context) error {
	lines := t.program.Info().Operations
	text := strings.Join(lines, "\n")
	type program struct {
		Engine string // its name
		Hash   uint64 // of the operations
	}
	mine := program{t.strategy.Engine().Name(), xxh3.HashString(text)}
	workers, err := fromWorkers(ctx, t, mine)
	if err != nil {
		return fmt.Errorf("train: comparing the workers' programs: %w", err)
	}
	for w, p := range workers {
		like := slices.IndexFunc(workers, func(q program) bool { return q.Engine == p.Engine })
		if workers[like].Hash == p.Hash {
			continue
		}
		var both [2]string
		for i, sender := range []int{like, w} {
			bytes, err := t.fromWorker(ctx, sender == t.worker, []byte(text))
			if err != nil {
				return fmt.Errorf("train: comparing the workers' programs (those of workers %d and %d differ): %w", like, w, err)
			}
			both[i] = string(bytes)
		}
		return fmt.Errorf("train: the workers have compiled different programs: %s. "+
			"Give all workers the same model, loss and optimizer, with the same constants (such as rates)",
			programDifference(like, w, both[0], both[1]))
	}
	var others []int
	for w, p := range workers {
		if p.Engine != mine.Engine {
			others = append(others, w)
		}
	}
	if len(others) > 0 && t.IsChief() { // one worker's warning is enough
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
		fmt.Sprint(len(t.buckets), bucketsOfGradients), fmt.Sprintf("compression %v", t.config.Exchange.codec()),
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
	if d := t.config.diloco(); d != nil {
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
