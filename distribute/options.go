package distribute

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/timeline"
)

// ReduceOp specifies how the replicas' values are combined (TensorFlow's ReduceOp): [Sum] or [Mean].
type ReduceOp = collective.ReduceOp

// The reductions of tf.distribute.
const (
	// Sum adds the values, along the canonical tree.
	Sum = collective.Sum
	// Mean is the sum, then a true division by the number of replicas: int32 and int64 give float64, smaller
	// integers float32.
	Mean = collective.Mean
)

// Implementation selects the implementation of the collectives (TensorFlow's CommunicationImplementation).
type Implementation uint8

// The implementations. As in TensorFlow, Ring means the library's own collectives, whatever the algorithm; Auto
// means the same here. MPI and NCCL are for [NewMultiWorkerMirroredStrategy], and do not add in the order of
// the canonical tree ([collective.Properties]). A strategy that requests MPI cannot be made without MPI. A
// request for NCCL that cannot be met, including that of a strategy of one process, is met by the library's own
// collectives, and a warning in the log says why.
const (
	ImplementationAuto Implementation = iota // the library's own collectives
	ImplementationRing                       // the library's own collectives
	ImplementationNCCL                       // NVIDIA's NCCL
	ImplementationMPI                        // Open MPI or MPICH; not TensorFlow's
)

var implementationNames = [...]string{"AUTO", "RING", "NCCL", "MPI"}

// String returns TensorFlow's name: "AUTO", "RING", "NCCL"; or "MPI".
func (i Implementation) String() string {
	return enumName("Implementation", uint8(i), implementationNames[:]...)
}

// ParseImplementation returns the implementation of that name, in any case.
func ParseImplementation(name string) (Implementation, error) {
	for i, n := range implementationNames {
		if strings.EqualFold(name, n) {
			return Implementation(i), nil
		}
	}
	return 0, errorf("ParseImplementation", ErrInvalid, "'%s' is not a valid CommunicationImplementation: want AUTO, "+
		"RING, NCCL or MPI", name)
}

// Options configure reductions (TensorFlow's CommunicationOptions). A zero field is inherited: a call's from
// its strategy, the strategy's from the defaults.
type Options struct {
	// BytesPerPack is the size of packs in bytes: tensors of one call are packed, the last tensors first, and a
	// pack is closed when it exceeds this size. Packing does not change results. 0: the library chooses;
	// [OnePack]: one pack for all tensors of a dtype.
	BytesPerPack int
	// Timeout is how long a call may wait for the other replicas. Default 10 minutes; negative: no timeout.
	Timeout time.Duration
	// Implementation selects the implementation of the collectives. Default: AUTO.
	Implementation Implementation
	// Order specifies whether sums use the canonical tree. Default: Canonical.
	Order collective.Order
	// Sparse specifies how IndexedSlices are reduced. Default: SparseKeep.
	Sparse Sparse
	// Accumulate is the type of partial sums of float16 and bfloat16 in transfers. Default: AccumulateDType.
	Accumulate collective.Accumulate
	// Concurrent makes the call on a second communicator between the replicas, so that it neither waits for started
	// calls ([Replica.StartAllReduce]) nor delays them: for the all-reduces of a model, such as those of batch
	// normalization, while gradients travel. It applies to a [Replica]'s reductions of tensors and its started calls. All
	// replicas make the calls of each communicator in the same order. The first such call opens the second communicator.
	Concurrent bool
}

// Values of fields of [Options].
const (
	// NoTimeout as Timeout disables the timeout, as TensorFlow's timeout_seconds of 0 does.
	NoTimeout time.Duration = -1
	// OnePack as BytesPerPack puts all tensors of a dtype into one pack. 0 lets the library choose.
	OnePack = packing.OnePack
)

// defaultTimeout bounds every wait unless the options change it.
const defaultTimeout = 10 * time.Minute

// merge returns o with each field that is set in over replaced by that of over.
func (o Options) merge(over Options) Options {
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
	o.Concurrent = o.Concurrent || over.Concurrent
	return o
}

// validate returns an error if the options are invalid.
func (o Options) validate() error {
	switch {
	case o.BytesPerPack < 0:
		return errorf("Options", ErrInvalid, "argument BytesPerPack must be >=0, received %d", o.BytesPerPack)
	case o.Implementation > ImplementationMPI:
		return errorf("Options", ErrInvalid, "%v is not a valid CommunicationImplementation: want AUTO, RING, NCCL or MPI",
			o.Implementation)
	case o.Order > collective.Any:
		return errorf("Options", ErrInvalid, "Order(%d) is not one of Canonical and Any", o.Order)
	case o.Sparse > SparseDense:
		return errorf("Options", ErrInvalid, "%v is not a way to reduce IndexedSlices: want keep, auto, gather, reduce or "+
			"dense", o.Sparse)
	case o.Accumulate > collective.AccumulateFloat32:
		return errorf("Options", ErrInvalid, "Accumulate(%d) is not one of AccumulateDType and AccumulateFloat32",
			o.Accumulate)
	}
	return nil
}

// over merges a call's options into o and validates the result.
func (o Options) over(call []Options) (Options, error) {
	for _, c := range call {
		o = o.merge(c)
	}
	return o, o.validate()
}

// group returns the configuration of communicators between replicas.
func (o Options) group(stall time.Duration, logger *slog.Logger, r *timeline.Recorder) collective.Config {
	return collective.Config{
		Name: "replicas", Timeout: o.Timeout, Stall: stall, Order: o.Order, Accumulate: o.Accumulate, Logger: logger,
		Timeline: r,
	}
}

// collective returns the options of one collective call.
func (o Options) collective() collective.Options {
	return collective.Options{Timeout: o.Timeout, Order: o.Order, Accumulate: o.Accumulate}
}

// checkReduceOp returns an error for reductions that tf.distribute does not have.
func checkReduceOp(op string, r ReduceOp) error {
	if r != Sum && r != Mean {
		return errorf(op, ErrInvalid, "'%v' is not a valid ReduceOp: want SUM or MEAN", r)
	}
	return nil
}

// Sparse specifies how IndexedSlices are reduced.
type Sparse uint8

// The ways to reduce IndexedSlices. [SparseKeep] is TensorFlow's, and the default: the result has the rows of
// all replicas, in the order of the replicas. Rows with equal indices are not combined; they add up when the
// slices are applied.
//
// All others add the rows with equal indices, first within a replica in their order, then over the replicas
// along the canonical tree. Their results represent the same tensor, bit for bit; the transferred data differ.
// With [SparseGather] every replica gathers and combines all rows; it is best if few replicas share few rows.
// With [SparseReduce] the indices are gathered, then the rows of their union are summed; it is best if many
// replicas have the same rows. Both return each index once, in ascending order. With [SparseDense] slices are
// converted to tensors first; it is best if most rows are present. Its result is a tensor.
//
// [SparseAuto] chooses one of the three for each leaf of each call. Let K be the number of rows of all
// replicas, u the number of distinct rows among them, and R the number of rows of the tensor. Gathering
// transfers K rows to every replica, summing the union about 2u, and summing tensors about 2R. K is computed
// from the lengths, which are exchanged first; u is known after the indices are gathered.
const (
	SparseInherit Sparse = iota // the strategy's
	SparseKeep                  // rows with equal indices stay apart
	SparseAuto                  // one of the following three, by their costs
	SparseGather                // every replica gathers all rows, and adds them
	SparseReduce                // the rows of the union of all indices are summed
	SparseDense                 // tensors are summed
)

// String returns the way's name: "keep".
func (s Sparse) String() string {
	return enumName("Sparse", uint8(s), "inherit", "keep", "auto", "gather", "reduce", "dense")
}

// keeps reports whether rows with equal indices are not combined.
func (s Sparse) keeps() bool { return s == SparseInherit || s == SparseKeep }

// enumName returns the name of a value of an enumeration, or a text such as "Sparse(9)" for an invalid one.
func enumName(enum string, value uint8, names ...string) string {
	if int(value) < len(names) {
		return names[value]
	}
	return fmt.Sprintf("%s(%d)", enum, value)
}
