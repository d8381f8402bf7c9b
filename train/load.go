package train

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// LoadOptions configures [Trainer.LoadWeights] and [NewPredictor]. The zero value is strict.
type LoadOptions struct {
	// Names renames the weights of a program that uses other names; nil: they have the model's names.
	Names *checkpoint.NameMap
	// Partial accepts weights of which some are missing, so that variables keep their values, or which the model
	// does not have (PyTorch's strict=False). At least one must fit. Shapes must be equal in any case.
	Partial bool
}

// Loaded lists what [Trainer.LoadWeights] did, by the names of the model's variables.
type Loaded struct {
	Set        []string // variables that have new values
	Converted  []string // those of Set whose values have had another floating-point type
	Missing    []string // variables without a weight, which keep their values
	Unexpected []string // weights without a variable, by the weights' names
}

// LoadWeights sets variables of the model on every replica to weights of a file ([LoadWeights]), of this
// or another program. A weight belongs to the variable that has its name, or its name with slashes for dots:
// "transformer.h.0.ln_1.weight" is that of /transformer/h/0/ln_1/weight. Values of another floating-point type are
// converted. Optimizer slots keep their values: those of a snapshot are ignored. Of moving averages of several
// replicas, which snapshots have, the mean is taken.
//
// Without LoadOptions.Partial, LoadWeights returns an error that lists what is missing and what the model does
// not have. On error nothing has changed, unless the engine itself failed. With several workers, every worker
// must call it with the same weights, as with [Trainer.SetVariable].
func (t *Trainer) LoadWeights(weights []Weight, o LoadOptions) (Loaded, error) {
	values, loaded, err := matchWeights(t.variables, weights, o)
	if err == nil {
		err = t.assignAll(values)
	}
	if err != nil {
		return loaded, fmt.Errorf("train: load weights: %w", err)
	}
	return loaded, nil
}

// LoadWeights reads weights from a file or a folder in any format that [checkpoint.LoadWeights] reads:
// safetensors (also several files with an index, as of Hugging Face), checkpoints of TensorFlow, Keras and
// GoMLX, and snapshots ([checkpoint.IsSnapshot]), also those of which several workers wrote a part. A snapshot's
// weights include the optimizer's slots, and a moving average of each replica. The caller owns the tensors.
func LoadWeights(path string) ([]Weight, error) {
	if checkpoint.IsSnapshot(path) {
		on, err := checkpoint.ReadSnapshot(path)
		if err != nil {
			return nil, err
		}
		s, err := SnapshotOf(&on.Contents)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		return s.Variables, nil
	}
	tensors, _, err := checkpoint.LoadWeights(path)
	if err != nil {
		return nil, err
	}
	return weightsOf(tensors), nil
}

func weightsOf(tensors []checkpoint.Tensor) []Weight {
	weights := make([]Weight, len(tensors))
	for i, t := range tensors {
		weights[i] = Weight(t)
	}
	return weights
}

// tensorsOf is the inverse of weightsOf.
func tensorsOf(weights []Weight) []checkpoint.Tensor {
	tensors := make([]checkpoint.Tensor, len(weights))
	for i, w := range weights {
		tensors[i] = checkpoint.Tensor(w)
	}
	return tensors
}

// matchWeights returns the new value of each variable, nil for those that keep theirs.
func matchWeights(variables []engine.Variable, weights []Weight, o LoadOptions) ([]*tensor.Tensor, Loaded, error) {
	shapes := map[string][]int{}
	for _, v := range variables {
		shapes[v.Name] = v.Shape
	}
	named, err := o.Names.Apply(tensorsOf(weights), shapes)
	if err != nil {
		return nil, Loaded{}, err
	}
	var loaded Loaded
	values := make([]*tensor.Tensor, len(variables))
	for _, w := range named {
		i := slices.IndexFunc(variables, func(v engine.Variable) bool { return v.Name == w.Name })
		if i < 0 {
			path := "/" + strings.ReplaceAll(w.Name, ".", "/")
			i = slices.IndexFunc(variables, func(v engine.Variable) bool { return v.Name == path })
		}
		if i < 0 {
			loaded.Unexpected = append(loaded.Unexpected, w.Name)
			continue
		}
		if variables[i].Role == engine.Slot {
			continue
		}
		v := variables[i]
		if values[i] != nil {
			return nil, loaded, fmt.Errorf("%s is given twice", v.Name)
		}
		value := w.Value
		if ofReplicas(value, v) {
			value = combineComponents(value, v.DType, v.Shape)
		}
		if value != nil && value.DType() != v.DType && value.DType().IsFloat() && v.DType.IsFloat() {
			value = fromFloat64s(v.DType, value.Shape(), value.Float64s())
			loaded.Converted = append(loaded.Converted, v.Name)
		}
		if err := fits(value, v.DType, v.Shape); err != nil {
			return nil, loaded, fmt.Errorf("%s: %w", v.Name, err)
		}
		values[i] = value
	}
	for i, v := range variables {
		switch {
		case values[i] != nil:
			loaded.Set = append(loaded.Set, v.Name)
		case v.Role != engine.Slot:
			loaded.Missing = append(loaded.Missing, v.Name)
		}
	}
	return values, loaded, loaded.check(o.Partial)
}

// ofReplicas reports whether a value is an average with a component of each replica, as in a snapshot.
func ofReplicas(value *tensor.Tensor, v engine.Variable) bool {
	return v.Role == engine.Average && value != nil && value.Rank() == len(v.Shape)+1 && value.Shape()[0] > 0 &&
		slices.Equal(value.Shape()[1:], v.Shape)
}

// check returns an error if the weights do not fit the model.
func (l Loaded) check(partial bool) error {
	complete := len(l.Missing) == 0 && len(l.Unexpected) == 0
	switch {
	case complete || partial && len(l.Set) > 0:
		return nil
	case len(l.Set) == 0:
		return fmt.Errorf("no weight has the name of a variable: the weights are %s; the model has %s: want a map of names",
			formatNames(l.Unexpected), formatNames(l.Missing))
	}
	var parts []string
	if len(l.Missing) > 0 {
		parts = append(parts, fmt.Sprintf("%d missing (%s)", len(l.Missing), formatNames(l.Missing)))
	}
	if len(l.Unexpected) > 0 {
		parts = append(parts, fmt.Sprintf("%d that the model does not have (%s)", len(l.Unexpected),
			formatNames(l.Unexpected)))
	}
	return errors.New("the weights are not those of the model: " + strings.Join(parts, ", and ") +
		": want all of them, a map of names, or a partial load")
}

// formatNames joins names for an error: the first ten, and the number of the others.
func formatNames(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return checkpoint.FormatNames(names)
}
