// Package engine defines the interface between Lockstep and a compute backend. An [Engine] provides devices
// and compiles a [Model] to a [Program]. Training runs the program's gradients and apply steps on every
// replica, and all-reduces the gradients between them. The implementation in this module is engine/gomlx.
//
// The package does not depend on networks or strategies. A "replica" below is a local index 0…n-1 to which
// the strategy has assigned a device. A program keeps the variables of each replica.
package engine

import (
	"context"
	"fmt"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Engine is an instance of a compute backend with its devices.
type Engine interface {
	// Name returns the backend's short name: "go", "xla".
	Name() string
	// Description describes the backend and its versions in one line, for logs.
	Description() string
	// Devices lists the engine's devices. A backend with one CPU may offer several logical CPU devices.
	Devices() []Device
	// Close frees the backend. All its programs must be closed first.
	Close() error
}

// Device is one device of an engine.
type Device struct {
	Kind  string // "CPU", "GPU", "TPU"
	Index int    // among the devices of its kind
}

// Model is a model that an engine can compile. Programs create one with the engine's package (gomlx.Model).
type Model interface {
	// Compile compiles the model's programs for e, once for all replicas. It returns errors of the user's
	// model function, including its panics.
	Compile(ctx context.Context, e Engine, spec Spec) (Program, error)
}

// Spec is the input of Model.Compile: shapes, devices and seed.
type Spec struct {
	Rows    int       // rows of one replica's batch, including padding
	Inputs  []Feature // one row of each input
	Labels  []Feature // one row of each label
	Devices []Device  // of each local replica
	Seed    int64     // of the initial values

	// Central, if not nil, is the device that keeps the only copy of every variable, shared by all replicas.
	// All replicas must then be local, those of Devices. A program that supports this is a [Central].
	Central *Device
	// Replicas is the number of replicas of the whole job, including those of other processes. 0 means
	// len(Devices).
	Replicas int
	// Sum all-reduces tensors over all replicas, for models that contain all-reduces. It is nil if the caller
	// does not support this; such models then do not compile for more than one replica.
	Sum SumFunc
}

// SumFunc writes the sum of all replicas' src[i] to dst[i], which has the same dtype and shape and does not
// overlap src[i]. Program.Gradients calls it for its replica with its context. Every replica makes the same
// calls in the same order. names are the tensors' names in errors. If SumFunc returns an error, Gradients
// ends with it.
type SumFunc func(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error

// Feature is the dtype and shape of one row of an input or a label.
type Feature struct {
	DType tensor.DType
	Shape []int // without the batch dimension
}

// Batch is one replica's padded share of a global batch: every tensor has Spec.Rows rows. The caller owns it,
// and must not modify it until the call returns.
type Batch struct {
	Inputs  []*tensor.Tensor // in the order of Spec.Inputs
	Labels  []*tensor.Tensor // in the order of Spec.Labels
	Weights []float32        // one per row
	Padding int              // number of padding rows at the end, whose weight must be 0
}

// BatchBuffers is a [Program] whose batch buffers the caller can fill, so that filling a batch takes one copy
// instead of two.
type BatchBuffers interface {
	Program
	// NewBatch returns a zeroed batch with inputs, labels and weights, which Gradients, Evaluate and Predict
	// of that replica read in place. The caller may refill it any number of times, but not while one of them
	// runs. The memory belongs to the program and is freed by Close. NewBatch must not be called while
	// another method runs for the replica.
	NewBatch(replica int) (Batch, error)
}

// InPlace is a [Program] whose gradients can be reduced in place. The caller overwrites Gradients.Tensors
// with the sums, and ApplyInPlace reads them there. This saves a second set of buffers, and a copy in every
// step.
type InPlace interface {
	Program
	// InPlace reports whether the program supports this. The result never changes. It is false if
	// Gradients.Tensors are host copies of device memory.
	InPlace() bool
	// ApplyInPlace is Apply, but reads the tensors of the replica's last Gradients instead of Inputs. It
	// returns an error after Commit or Discard, which free those tensors.
	ApplyInPlace(ctx context.Context, replica, pack int) error
}

// Central is a [Program] that can keep one copy of every variable for all replicas, on the device
// Spec.Central. Read returns that copy and Write sets it, for any replica. An average becomes the mean of the
// values that the replicas' Gradients compute, through Spec.Sum. New values are computed once per step: Apply
// has an effect on one replica only. Commit must not be called while another replica computes.
type Central interface {
	Program
	// Central reports whether the program does so.
	Central() bool
}

// Scheduled is a [Program] whose model may depend on the total number of training steps, such as a
// learning-rate schedule over the whole training.
type Scheduled interface {
	Program
	// LastStep returns the index in Variables of the variable that holds the number of the last step, counted
	// from 1. The variable is an int64 scalar, negative while the number is unknown, and is written by the
	// caller. LastStep returns -1 if the model does not depend on it.
	LastStep() int
}

// Described is a [Program] that can describe its operations, so that the workers of a job can compare their
// programs before training.
type Described interface {
	Program
	// Describe lists the operations of all compiled programs, one per line, with everything that determines
	// the results besides variables and batches: attributes, shapes, and the values of constants (such as
	// rates). Equal models give equal lines in every process with an engine of the same name. Models that
	// compute anything else give different lines. The result is empty for a single replica, which needs no
	// comparison.
	Describe() []string
}

// Inspector is a [Program] that helps to find the cause of a loss that is not finite. Its methods are called
// only after a failure.
type Inspector interface {
	Program
	// Losses returns a copy of the losses of all Spec.Rows rows, as computed by the replica's last Gradients
	// or Evaluate. It returns an error after Commit or Discard, which free them.
	Losses(replica int) ([]float64, error)
	// Classes returns, for each label, its number of classes n: the label's elements are integers from 0 to
	// n-1. It is 0 if the label is not a class, or the number is unknown.
	Classes() []int
}

// Gradients is the result of one replica's gradients step. Its tensors are views of the backend's memory,
// valid until that replica's next Gradients, Commit or Discard. They do not overlap each other or any other
// memory, so the caller may write to them.
type Gradients struct {
	Tensors []*tensor.Tensor // in the order of Program.Parameters
	Loss    float64          // this replica's share of the global mean loss: the sum over replicas is the loss
	Metrics []float64        // weighted sums over this replica's examples, in the order of Program.Metrics
}

// Role is the purpose of a variable. It determines how its values on the replicas relate.
type Role uint8

// The roles.
const (
	Parameter Role = iota // trained; mirrored
	Slot                  // optimizer state; mirrored
	Average               // changed by the gradients program (moving averages); sync-on-read, mean over replicas
	Frozen                // not changed by a step; mirrored
)

// String returns the name of the role: "parameter", "optimizer's slot", "average", "frozen".
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

// Program is a compiled model with the state of every local replica. Methods with a replica argument may run
// concurrently for different replicas, but not for the same one. A step consists of Gradients, the reduction
// of Gradients.Tensors into Inputs, and Apply (or see [InPlace]). Then it calls Commit on all replicas or, if
// anything failed on any, Discard on all. Until Commit, every variable keeps its old value.
type Program interface {
	// Parameters lists the trained variables, sorted by name. Gradients have the same order.
	Parameters() []Variable
	// Variables lists all variables, sorted by role, then by name.
	Variables() []Variable
	// Metrics lists the names of the metrics ("accuracy").
	Metrics() []string
	// Packs returns the number of parts in which Apply is compiled, at least 1. Pack returns the part of a
	// parameter.
	Packs() int
	Pack(parameter int) int

	// Gradients computes the replica's gradients of its loss. That loss is the sum over the replica's
	// examples of weight times loss, divided by weightSum, the sum of the weights of the whole global batch.
	// rng is the random state for this replica and step.
	Gradients(ctx context.Context, replica int, b Batch, weightSum float64, rng [3]uint64) (Gradients, error)
	// Inputs returns the input buffers of Apply for one pack, to which the caller writes the reduced
	// gradients: one per parameter of the pack, in the order of Parameters. The buffers belong to the program
	// and are the same in every step.
	Inputs(replica, pack int) []tensor.Memory
	// Apply computes new values of the pack's parameters and optimizer slots from Inputs. They become visible by
	// Commit.
	Apply(ctx context.Context, replica, pack int) error
	// Commit makes the new values visible: those of Apply, and the averages that Gradients changed. After
	// Gradients alone, it makes the averages visible.
	Commit(replica int)
	// Discard drops the results of Gradients and Apply.
	Discard(replica int)

	// Evaluate returns the replica's share of loss and metrics of a batch, as Gradients does, in inference
	// mode. It changes no variable.
	Evaluate(ctx context.Context, replica int, b Batch, weightSum float64) (loss float64, metrics []float64, err error)
	// Predict returns the model's outputs for the inputs, each with Spec.Rows rows, as new host tensors.
	Predict(ctx context.Context, replica int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error)

	// Read returns a copy of a variable's value on a replica. variable is an index into Variables.
	Read(replica, variable int) (*tensor.Tensor, error)
	// Write sets a variable's value on a replica. It copies the value. It returns an error if dtype or shape
	// differ.
	Write(replica, variable int, value *tensor.Tensor) error
	// Close frees programs and state. No other call may be running.
	Close() error
}
