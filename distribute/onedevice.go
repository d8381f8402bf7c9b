package distribute

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// reductionToOneDevice adds all components on one device.
type reductionToOneDevice struct {
	reduceTo     string
	accumulation func([]*tensor.Tensor) (*tensor.Tensor, error)
}

// NewReductionToOneDevice returns operations that add all components on one device and copy the result to the
// destinations (TensorFlow's ReductionToOneDevice). reduceTo is the device that adds, empty for the first destination;
// it has no effect on logical CPU devices, which share the host's memory and cores. accumulation replaces the sum of
// dense tensors, in the order of the replicas; nil is the sum along the canonical tree. A mean divides its result.
func NewReductionToOneDevice(
	reduceTo string, accumulation func([]*tensor.Tensor) (*tensor.Tensor, error),
) CrossDeviceOps {
	return reductionToOneDevice{reduceTo, accumulation}
}

// String returns "ReductionToOneDevice".
func (reductionToOneDevice) String() string { return "ReductionToOneDevice" }

// BatchReduce implements [CrossDeviceOps].
func (r reductionToOneDevice) BatchReduce(
	_ context.Context, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	if r.reduceTo != "" {
		if _, err := device.Canonical(r.reduceTo); err != nil {
			return nil, errorf(r.String(), ErrInvalid, "ReduceTo: %w", err)
		}
	}
	return reduceEach(r.String(), op, batch, opts, false, func(_ int, ts []*tensor.Tensor) (*tensor.Tensor, error) {
		if r.accumulation == nil {
			return dense.Reduce(op, ts, opts.Accumulate), nil
		}
		sum, err := r.accumulation(ts)
		switch {
		case err != nil:
			return nil, fmt.Errorf("the accumulation function: %w", err)
		case sum == nil:
			return nil, errors.New("the accumulation function returned nil without an error")
		case op == Mean:
			sum = dense.Divide(sum, len(ts))
		}
		return sum, nil
	})
}
