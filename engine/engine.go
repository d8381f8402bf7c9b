// Package engine is the contract between Lockstep and whatever computes: an [Engine] offers devices and compiles a
// [Model] into a [Program], whose gradients and apply steps the strategies run on every replica and join by
// collectives. The one implementation here is engine/gomlx.
//
// The package knows no network and no strategy. "Replica" below means a local slot 0…n-1 that the strategy has given a
// device; a program keeps the variables of each.
package engine

import (
	"context"
	"fmt"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Engine is an instance of a compute backend with the devices it drives.
type Engine interface {
	// Name returns the backend's short name: "go", "xla".
	Name() string
	// Description says in one line what computes, with versions: for the first lines of a run.
	Description() string
	// Devices lists what it computes on. A backend with one CPU may be given as several logical CPU devices.
	Devices() []Device
	// Close frees the backend. Programs must be closed before.
	Close() error
}

// Device is one device of an engine.
type Device struct {
	Kind  string // "CPU", "GPU", "TPU"
	Index int    // among the devices of its kind
}

// Model is what an engine can compile. A user makes one with the engine's own package (gomlx.Model).
type Model interface {
	// Compile makes the programs for e, once for all replicas. Errors of the user's model function (panics included)
	// are returned.
	Compile(ctx context.Context, e Engine, spec Spec) (Program, error)
}

// Spec is what a program is compiled for.
type Spec struct {
	Rows    int       // examples of one replica's batch, padding included
	Inputs  []Feature // one row of each input
	Labels  []Feature // one row of each label
	Devices []Device  // of each local replica
	Seed    int64     // of the initial values

	// Central, if not nil, is the device that keeps the only copy of every variable, for all replicas, which are those
	// of Devices. A program that can do so is a [Central].
	Central *Device
	// Replicas is the number of replicas of the whole job, those of other processes included; 0 means len(Devices).
	Replicas int
	// Sum adds up tensors over all replicas, for models that do so inside of their training step; nil if the caller
	// cannot, and then such models do not compile for more than one replica.
	Sum SumFunc
}

// SumFunc leaves the sum of all replicas' src[i] in dst[i], which has the same type and shape and is other memory.
// Program.Gradients calls it for its replica, with its own context; every replica comes to the same calls in the same
// order. names says in errors which tensor is meant. An error ends Gradients.
type SumFunc func(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error

// Feature is the type of one row of an input or a label.
type Feature struct {
	DType tensor.DType
	Shape []int // without the batch dimension
}

// Batch is one replica's padded share of a global batch: every tensor has Spec.Rows rows. It belongs to the caller, who
// leaves it alone until the call returns.
type Batch struct {
	Inputs  []*tensor.Tensor
	Labels  []*tensor.Tensor
	Weights []float32
	Padding int // rows at the end that are no examples; their weight must be 0
}

// Lender is a [Program] that lends out the memory in which it reads a batch, so that whoever fills it copies once, not twice.
type Lender interface {
	Program
	// NewBatch returns a batch of zeros, with inputs, labels and weights, that Gradients, Evaluate and Predict of that replica read
	// where it lies. It may be filled again and again, but not while one of them reads it, and ends with Close. It is not to be called
	// while another method works for the replica.
	NewBatch(replica int) (Batch, error)
}

// InPlace is a [Program] whose gradients can be reduced where they lie: the caller writes the sums over Gradients.Tensors, and apply
// reads them there. That spares other memory of their size, and every step the way to it.
type InPlace interface {
	Program
	// InPlace reports whether the program can, which never changes: it cannot where Gradients.Tensors are copies of what a device has.
	InPlace() bool
	// ApplyInPlace is Apply from the tensors of the replica's last Gradients in place of Inputs. It is an error after Commit or Discard, as
	// they are gone then.
	ApplyInPlace(ctx context.Context, replica, pack int) error
}

// Central is a [Program] that can keep one copy of every variable for all replicas, where Spec.Central says. Read
// returns that copy and Write sets it, whatever the replica. What the replicas' Gradients make of an average is
// combined to its mean, through Spec.Sum. A step's new values are computed once: Apply of other replicas than one does
// nothing. Commit must not be called while another replica computes.
type Central interface {
	Program
	// Central reports whether it does.
	Central() bool
}

// Scheduled is a [Program] whose model may depend on the number of steps that training makes in all, such as a
// learning-rate schedule over the whole of it.
type Scheduled interface {
	Program
	// LastStep returns the index in Variables of the variable that holds the number of the last step, counted from 1:
	// an int64 scalar, negative while the number is not known, written by whoever trains. It returns -1 if the model
	// does not depend on it.
	LastStep() int
}

// Described is a [Program] that can list what it computes, so that the workers of a job can compare their programs
// before they train.
type Described interface {
	Program
	// Describe lists the operations of all compiled programs, one a line, with all that decides what they compute
	// besides variables and batches: attributes, shapes, and the values of constants (rates, say). Equal models give
	// equal lines, in every process with an engine of the same name; models that compute anything else give others. It
	// is empty for one replica, which has nobody to be compared with.
	Describe() []string
}

// Inspector is a [Program] that helps to find out why a loss is not a finite number. Its methods are called
// after a failure only.
type Inspector interface {
	Program
	// Losses returns a copy of the loss of every row, Spec.Rows of them, that the replica's last Gradients or
	// Evaluate computed. It is an error after Commit or Discard, as they are gone then.
	Losses(replica int) ([]float64, error)
	// Classes returns for each label the number of classes that the model tells apart by it: its elements are
	// whole numbers from 0 to that number - 1. 0 means that the label is no class, or that this is not known.
	Classes() []int
}

// Gradients is what one replica's gradients step gives. Its tensors are views of the backend's memory, valid until
// that replica's next Gradients, Commit or Discard. They lie apart from each other and from all else, so a caller may write to them.
type Gradients struct {
	Tensors []*tensor.Tensor // by the order of Program.Parameters
	Loss    float64          // this replica's share of the global mean loss: the sum over replicas is the loss
	Metrics []float64        // weighted sums over this replica's examples, by the order of Program.Metrics
}

// Role says what a variable is for, and so how its replicas' values relate.
type Role uint8

// The roles.
const (
	Parameter Role = iota // trained; mirrored
	Slot                  // optimizer's state; mirrored
	Average               // changed by the gradients program (moving averages): sync-on-read, mean over replicas
	Frozen                // neither trained nor changed by a step; mirrored
)

// String returns the role in words: "parameter", "optimizer's slot", "average", "frozen".
func (r Role) String() string {
	if names := [...]string{"parameter", "optimizer's slot", "average", "frozen"}; int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("Role(%d)", uint8(r))
}

// Variable describes one variable of a program.
type Variable struct {
	Name  string // path in the model; unique
	Role  Role
	DType tensor.DType
	Shape []int
}

// Program is a compiled model with the state of every local replica. Methods that name a replica may be called at the
// same time for different replicas, not for one. A step is Gradients, the reduction of Gradients.Tensors into Inputs,
// Apply (or see [InPlace]), then Commit on all replicas or, if anything failed on any, Discard on all: until Commit every variable keeps
// its old value.
type Program interface {
	// Parameters lists the trained variables, sorted by name: the order of gradients.
	Parameters() []Variable
	// Variables lists all variables, sorted by role, then by name.
	Variables() []Variable
	// Metrics lists the names of the metrics ("accuracy").
	Metrics() []string
	// Packs returns how many parts Apply is compiled in, at least 1, and Pack the part that a parameter belongs to.
	Packs() int
	Pack(parameter int) int

	// Gradients computes the replica's gradients of the loss: the sum over its examples of weight times loss, divided
	// by weightSum, the sum of the weights of the whole global batch. rng is the random state of this replica and step.
	Gradients(ctx context.Context, replica int, b Batch, weightSum float64, rng [3]uint64) (Gradients, error)
	// Inputs returns apply's input buffers of one pack, where the reduced gradients must be written: one per parameter
	// of the pack, by the order of Parameters. The same memory every step.
	Inputs(replica, pack int) []tensor.Memory
	// Apply computes new values of the pack's parameters and slots from Inputs, without showing them.
	Apply(ctx context.Context, replica, pack int) error
	// Commit shows the new values: of Apply, and of the averages that Gradients changed. After Gradients alone it shows
	// the averages.
	Commit(replica int)
	// Discard forgets what Gradients and Apply computed.
	Discard(replica int)

	// Evaluate returns the replica's share of loss and metrics of a batch, as Gradients does, in inference mode. It
	// changes nothing.
	Evaluate(ctx context.Context, replica int, b Batch, weightSum float64) (loss float64, metrics []float64, err error)
	// Predict returns the model's outputs for the batch's inputs, Spec.Rows rows each, as new host tensors.
	Predict(ctx context.Context, replica int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error)

	// Read returns a copy of a variable's value on a replica, by the index in Variables.
	Read(replica, variable int) (*tensor.Tensor, error)
	// Write sets a variable's value on a replica. The value is copied.
	Write(replica, variable int, value *tensor.Tensor) error
	// Close frees programs and state.
	Close() error
}
