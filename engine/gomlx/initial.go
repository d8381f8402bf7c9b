package gomlx

import (
	"fmt"

	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/tensor"
)

// initialValues draws the values of all variables on the host, with a separate Go backend. Backends draw
// different numbers from the same seed, and every engine must start from the same values. The user's
// initialisers run there too.
func initialValues(store *model.Store, variables []variable) ([]*tensor.Tensor, error) {
	host, err := newGoBackend()
	if err != nil {
		return nil, err
	}
	defer host.Finalize()
	err = catch("draw the initial values", func() error { return store.InitializeVariables(host, nil) })
	if err != nil {
		return nil, err
	}
	list := make([]*tensor.Tensor, len(variables))
	for i, v := range variables {
		value, err := store.GetVariable(v.Name).Value()
		if err != nil {
			return nil, fmt.Errorf("gomlx: initial value of %s: %w", v.Name, err)
		}
		list[i] = tensor.New(v.DType, v.Shape...)
		err = value.ConstBytes(func(data []byte) { copy(list[i].Memory().HostBytes(), data) })
		if err != nil {
			return nil, fmt.Errorf("gomlx: initial value of %s: %w", v.Name, err)
		}
	}
	store.Finalize()
	return list, nil
}
