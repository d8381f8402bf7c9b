package gomlx

import (
	"fmt"

	"github.com/gomlx/gomlx/ml/model"

	planned "github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/tensor"
)

// initialValues draws the values of all variables on the host, with a separate backend in pure Go, and passes each to
// write, which must not keep it: so there is only one copy besides those that write makes. Backends draw
// different numbers from the same seed, and every engine must start from the same values. The user's initialisers
// run there too.
func initialValues(store *model.Store, variables []variable, write func(v int, value *tensor.Tensor) error) error {
	host, err := planned.New("")
	if err != nil {
		return err
	}
	defer host.Finalize()
	defer store.Finalize()
	err = catch("draw the initial values", func() error { return store.InitializeVariables(host, nil) })
	if err != nil {
		return err
	}
	for i, v := range variables {
		drawn := store.GetVariable(v.Name)
		value, err := drawn.Value()
		if err != nil {
			return fmt.Errorf("gomlx: initial value of %s: %w", v.Name, err)
		}
		var written error
		err = value.ConstFlatData(func(flat any) {
			written = write(i, tensor.Wrap(memoryOf(flat, v.shape, 0), v.DType, v.Shape...))
		})
		if err == nil {
			err = written
		}
		if err == nil {
			err = drawn.Finalize() // the next variables need its memory
		}
		if err != nil {
			return fmt.Errorf("gomlx: initial value of %s: %w", v.Name, err)
		}
	}
	return nil
}
