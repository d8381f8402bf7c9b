package gomlx

import (
	"fmt"

	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/tensor"
)

// initialValues draws the values of all variables on the host, with a Go backend of its own: the backends draw other
// numbers from one seed, and every engine must start alike. Initialisers of the user's run there too.
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
