package train

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Fact is a named property that must be the same on all workers of a job.
type Fact struct{ Name, Value string }

// Facts returns the properties that must be the same on all workers before the first step, so that the
// workers can compare them. They are the steps taken, how batches are split, and every variable's role,
// dtype, shape and a 64-bit hash of its value. Averages have no hash, because they differ
// between replicas, nor have the optimizer's slots with DiLoCo, and those that a sharded optimizer has on some
// devices only. With several workers, Facts includes [InitialFact].
func (t *Trainer) Facts() ([]Fact, error) {
	prints, err := t.fingerprints()
	if err != nil {
		return nil, err
	}
	out := []Fact{
		{"steps made", fmt.Sprint(t.committed)},
		{"replicas", fmt.Sprint(t.strategy.NumReplicasInSync())},
		{"global batch", fmt.Sprint(t.config.GlobalBatch)},
		{"seed", fmt.Sprint(t.config.Seed)},
		{"buckets", fmt.Sprint(len(t.buckets))},
		{"compression", t.config.Exchange.codec().String()},
		{"loss reduction", t.config.LossReduction.String()},
		{"sharded optimizer", fmt.Sprint(t.Sharded())},
		{"metrics", fmt.Sprint(t.Metrics())},
		{"variables", fmt.Sprint(len(t.variables))},
	}
	if t.others() {
		out = append(out, Fact{InitialFact, fmt.Sprintf("hashed %016x", t.initial)})
	}
	for i, v := range t.variables {
		value := fmt.Sprintf("%v of %v%s", v.Role, v.DType, tensor.FormatShape(v.Shape))
		if t.table[i].mirrored {
			value += fmt.Sprintf(", values hashed %016x", uint64(prints[i]))
		}
		out = append(out, Fact{"variable " + v.Name, value})
	}
	return out, nil
}

// InitialFact is the name of the [Fact] with the hash of this worker's own initial values, computed before it
// receives the chief's. If it differs between workers, either the models differ, or the engines round
// differently.
const InitialFact = "own initial values"
