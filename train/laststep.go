package train

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/tensor"
)

// lastStep returns the index and the value of the variable that holds the number of the last step. The index
// is negative if the model does not depend on it.
func (t *Trainer) lastStep() (variable int, value int64, err error) {
	if variable = t.program.Info().LastStep; variable < 0 {
		return variable, 0, nil
	}
	x, err := t.program.Read(0, variable)
	if err != nil {
		return variable, 0, fmt.Errorf("reading %s: %w", t.variables[variable].Name, err)
	}
	return variable, tensor.Data[int64](x)[0], nil
}

// knowsLastStep returns an error if the model depends on the number of the last step, and it is not set.
func (t *Trainer) knowsLastStep() error {
	variable, value, err := t.lastStep()
	if err != nil || variable < 0 || value >= 0 {
		return err
	}
	name := t.variables[variable].Name
	return fmt.Errorf("the model's schedule depends on the number of the last step, "+
		"which is not known outside Fit: set it by SetVariable(%q, tensor.Scalar(int64(steps)))", name)
}

// setLastStep sets the model's number of the last step to that of this Fit, if the model depends on it.
func (f *fit) setLastStep() error {
	variable, value, err := f.t.lastStep()
	if err != nil || variable < 0 {
		return err
	}
	name := f.t.variables[variable].Name
	planned := f.planned()
	if planned < 0 {
		if value > f.t.committed { // set by the program
			return nil
		}
		return fmt.Errorf("the model's schedule depends on the number of the last step, "+
			"but the dataset does not know its length: set FitConfig.StepsPerEpoch or FitConfig.Steps, "+
			"or the number by SetVariable(%q, tensor.Scalar(int64(steps)))", name)
	}
	made := int64(f.history.Steps - f.history.Skipped) // by this Fit, before a restore
	return f.t.SetVariable(name, tensor.Scalar(f.t.committed-made+int64(planned)))
}

// planned returns the total number of steps of this Fit, including those before a restore; negative:
// unknown.
func (f *fit) planned() int {
	epochs, n := f.cfg.Epochs-f.cfg.InitialEpoch, -1
	if f.cfg.StepsPerEpoch > 0 {
		n = epochs * f.cfg.StepsPerEpoch
	} else if steps := f.stepsOf(f.ds.Len()); steps >= 0 {
		n = epochs * steps
	}
	if limit := f.cfg.Steps; limit > 0 && (n < 0 || limit < n) {
		n = limit
	}
	return n
}
