package train

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Fact is something that is to be the same on all workers of a job.
type Fact struct{ Name, Value string }

// Facts returns what is to be the same on all workers before the first step, for them to compare: the steps made, how batches are cut,
// every variable's role, type, shape, and the first bits of a hash of its value (not of averages, which each replica has its own of); and,
// with several workers, [InitialFact].
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
		{"packs", fmt.Sprint(len(t.packs))},
		{"metrics", fmt.Sprint(t.metrics)},
		{"variables", fmt.Sprint(len(t.variables))},
	}
	if t.others() {
		out = append(out, Fact{InitialFact, fmt.Sprintf("hashed %016x", t.initial)})
	}
	for i, v := range t.variables {
		value := fmt.Sprintf("%v of %v%s", v.Role, v.DType, tensor.FormatShape(v.Shape))
		if v.Role != engine.Average {
			value += fmt.Sprintf(", values hashed %016x", uint64(prints[i]))
		}
		out = append(out, Fact{"variable " + v.Name, value})
	}
	return out, nil
}

// InitialFact is the name of a fact about the values with which the model would have begun on this worker, had it not got the chief's: if
// they differ, either the model does, or the engines round differently.
const InitialFact = "own initial values"
