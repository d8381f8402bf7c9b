package gomlx

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/ml/model"

	planned "github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/tensor"
)

// initialValues draws the values of all variables on the host, with a backend in pure Go, and passes each to write,
// which must not keep it: so there is only one copy besides those that write makes. Backends draw different numbers
// from the same seed, and every engine must start from the same values. The user's initialisers run there too.
//
// If b, that of the engine, is such a backend, it draws them, and adopt may take the buffer of a drawn value instead.
// Otherwise a separate one does.
func initialValues(b compute.Backend, store *model.Store, variables []variable,
	write func(v int, value *tensor.Tensor) error,
	adopt func(v int, buffer func() (compute.Buffer, error)) (done bool, err error),
) error {
	host, shared := b.(*planned.Backend)
	if !shared {
		separate, err := planned.New("")
		if err != nil {
			return err
		}
		defer separate.Finalize()
		host = separate.(*planned.Backend)
	}
	defer store.Finalize()
	given := map[string]bool{} // the model function may keep their values
	for v := range store.IterVariables() {
		given[v.Path()] = v.HasValue()
	}
	err := catch("draw the initial values", func() error { return store.InitializeVariables(host, nil) })
	if err != nil {
		return err
	}
	one := func(i int, v variable) error {
		drawn := store.GetVariable(v.Name)
		value, err := drawn.Value()
		if err != nil {
			return err
		}
		if shared && !given[v.Name] {
			done, err := adopt(i, func() (compute.Buffer, error) { return value.DonateBuffer(host, 0) })
			if done || err != nil {
				return err
			}
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
		return err
	}
	for i, v := range variables {
		if err := one(i, v); err != nil {
			return fmt.Errorf("gomlx: initial value of %s: %w", v.Name, err)
		}
	}
	return nil
}
