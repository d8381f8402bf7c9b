package distribute

import (
	"fmt"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
)

// ReduceOp says how the replicas' values are combined: [Sum] or [Mean].
type ReduceOp = collective.ReduceOp

// The reductions of tf.distribute. Mean is the sum, then a true division by the number of replicas: int32 and int64 give
// float64, smaller integers float32.
const (
	Sum  = collective.Sum
	Mean = collective.Mean
)

// ParseReduceOp returns the reduction of that name, SUM or MEAN in any case.
func ParseReduceOp(name string) (ReduceOp, error) {
	for _, op := range []ReduceOp{Sum, Mean} {
		if strings.EqualFold(name, op.String()) {
			return op, nil
		}
	}
	return 0, errorf("ParseReduceOp", ErrInvalid, "'%s' is not a valid ReduceOp: want SUM or MEAN", name)
}

// Implementation chooses who carries out collectives.
type Implementation uint8

// The implementations. As in TensorFlow Ring means the library's own collectives, whatever their algorithm; so does Auto here. MPI
// and NCCL are for [NewMultiWorkerMirroredStrategy], and add in orders of their own ([collective.Properties]). Without MPI a strategy
// that names it is not made. A wish for NCCL that cannot be met, also by strategies of one process, is met by the library's own
// collectives, with a warning in the log that says why.
const (
	ImplementationAuto Implementation = iota
	ImplementationRing
	ImplementationNCCL
	ImplementationMPI // not TensorFlow's
)

var implementationNames = [...]string{"AUTO", "RING", "NCCL", "MPI"}

// String returns TensorFlow's name: "AUTO", "RING", "NCCL"; or "MPI".
func (i Implementation) String() string {
	if int(i) < len(implementationNames) {
		return implementationNames[i]
	}
	return fmt.Sprintf("Implementation(%d)", uint8(i))
}

// ParseImplementation returns the implementation of that name, in any case.
func ParseImplementation(name string) (Implementation, error) {
	for i, n := range implementationNames {
		if strings.EqualFold(name, n) {
			return Implementation(i), nil
		}
	}
	return 0, errorf("ParseImplementation", ErrInvalid, "'%s' is not a valid CommunicationImplementation: want AUTO, RING, NCCL or MPI", name)
}

// Options tune reductions (TensorFlow's CommunicationOptions). A zero field inherits: a call's from its strategy's, the
// strategy's from the defaults.
type Options struct {
	// BytesPerPack groups the tensors of one call, the last ones first: those that travel as one are closed once they have
	// more bytes than this. It changes no result. 0: the library chooses; [OnePack]: all tensors of a dtype are one pack.
	BytesPerPack int
	// Timeout is how long a call may wait for the other replicas. Default 10 minutes; negative: for ever.
	Timeout time.Duration
	// Implementation chooses who carries out the collectives; default AUTO.
	Implementation Implementation
	// Order says whether sums keep the canonical tree; default Canonical.
	Order collective.Order
	// Sparse says how IndexedSlices are reduced; default SparseKeep.
	Sparse Sparse
	// Accumulate says in which type partial sums of float16 and bfloat16 travel; default AccumulateDType.
	Accumulate collective.Accumulate
}

// CollectiveHints returns the options that TensorFlow's older tf.distribute.experimental.CollectiveHints describes: how
// tensors are packed, and how long a call waits. A hint of 0 says nothing.
func CollectiveHints(bytesPerPack int, timeout time.Duration) Options {
	return Options{BytesPerPack: bytesPerPack, Timeout: timeout}
}

// NoTimeout as [Options.Timeout] lets a call wait for ever, which TensorFlow's timeout_seconds of 0 does.
const NoTimeout time.Duration = -1

// defaultTimeout bounds every wait unless the options say otherwise.
const defaultTimeout = 10 * time.Minute

// Merge returns o with the fields that are set in over taking its place.
func (o Options) Merge(over Options) Options {
	if over.BytesPerPack != 0 {
		o.BytesPerPack = over.BytesPerPack
	}
	if over.Timeout != 0 {
		o.Timeout = over.Timeout
	}
	if over.Implementation != ImplementationAuto {
		o.Implementation = over.Implementation
	}
	if over.Order != collective.OrderInherit {
		o.Order = over.Order
	}
	if over.Sparse != SparseInherit {
		o.Sparse = over.Sparse
	}
	if over.Accumulate != collective.AccumulateInherit {
		o.Accumulate = over.Accumulate
	}
	return o
}

// Validate reports what is wrong with the options.
func (o Options) Validate() error {
	switch {
	case o.BytesPerPack < 0:
		return errorf("Options", ErrInvalid, "argument BytesPerPack must be >=0, received %d", o.BytesPerPack)
	case o.Implementation > ImplementationMPI:
		return errorf("Options", ErrInvalid, "%v is not a valid CommunicationImplementation: want AUTO, RING, NCCL or MPI", o.Implementation)
	case o.Order > collective.Any:
		return errorf("Options", ErrInvalid, "Order(%d) is none of Canonical and Any", o.Order)
	case o.Sparse > SparseDense:
		return errorf("Options", ErrInvalid, "%v is no way to reduce IndexedSlices: want keep, auto, gather, reduce or dense", o.Sparse)
	case o.Accumulate > collective.AccumulateFloat32:
		return errorf("Options", ErrInvalid, "Accumulate(%d) is none of AccumulateDType and AccumulateFloat32", o.Accumulate)
	}
	return nil
}

// over merges a call's options over these and validates the outcome.
func (o Options) over(call []Options) (Options, error) {
	for _, c := range call {
		o = o.Merge(c)
	}
	return o, o.Validate()
}

func (o Options) collective() collective.Options {
	return collective.Options{Timeout: o.Timeout, Order: o.Order, Accumulate: o.Accumulate}
}

// checkReduceOp refuses the reductions that tf.distribute does not have.
func checkReduceOp(op string, r ReduceOp) error {
	if r != Sum && r != Mean {
		return errorf(op, ErrInvalid, "'%v' is not a valid ReduceOp: want SUM or MEAN", r)
	}
	return nil
}
