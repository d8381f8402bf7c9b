package distribute

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ReductionToOneDevice adds all components on one device and copies the result to the destinations (TensorFlow's
// ReductionToOneDevice). The zero value is ready to use.
type ReductionToOneDevice struct {
	// ReduceTo is the device that adds. Default: the first destination. It has no effect on logical CPU
	// devices, which share the host's memory and cores.
	ReduceTo string
	// AccumulationFn replaces the sum of dense tensors. Its argument is in the order of the replicas. Default:
	// the sum along the canonical tree. A mean divides its result.
	AccumulationFn func([]*tensor.Tensor) (*tensor.Tensor, error)
}

// String returns "ReductionToOneDevice".
func (ReductionToOneDevice) String() string { return "ReductionToOneDevice" }

// BatchReduce implements [CrossDeviceOps].
func (r ReductionToOneDevice) BatchReduce(
	_ context.Context, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	if r.ReduceTo != "" {
		if _, err := CanonicalDevice(r.ReduceTo); err != nil {
			return nil, errorf(r.String(), ErrInvalid, "ReduceTo: %w", err)
		}
	}
	return reduceEach(r.String(), op, batch, opts, false, func(_ int, ts []*tensor.Tensor) (*tensor.Tensor, error) {
		if r.AccumulationFn == nil {
			return dense.Reduce(op, ts, opts.Accumulate), nil
		}
		sum, err := r.AccumulationFn(ts)
		switch {
		case err != nil:
			return nil, fmt.Errorf("AccumulationFn: %w", err)
		case sum == nil:
			return nil, errors.New("AccumulationFn returned nil without an error")
		case op == Mean:
			sum = dense.Divide(sum, len(ts))
		}
		return sum, nil
	})
}
