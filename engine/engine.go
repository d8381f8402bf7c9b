// Package engine defines the interface between Lockstep and a compute backend. An [Engine] provides devices
// and compiles a [Model] to a [Program]. Training runs the program's gradients on every replica, all-reduces
// each bucket of gradients as soon as it is computed, and updates the variables of every device. The
// implementation in this module is engine/gomlx.
//
// The package does not depend on networks or strategies. A replica below is a local replica, 0…n-1, and a
// device is an index into [Spec].Devices. A device keeps one copy of the variables that all replicas share.
// A replica has its own share of the batch, gradients, random state and averages, and computes on one device.
package engine

import (
	"context"
	"errors"
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

// Spec is the input of Model.Compile: shapes, devices, replicas and seed.
type Spec struct {
	Rows   int       // rows of one replica's micro-batch, including padding
	Inputs []Feature // one row of each input
	Labels []Feature // one row of each label
	// Devices lists the devices that keep the variables and compute. Each has a copy of the mirrored ones.
	Devices []Device
	// ReplicaDevices is the device of each local replica, as an index into Devices. Each device has at least
	// one replica. Several replicas of one device compute in turn. nil means one replica per device.
	ReplicaDevices []int
	Seed           int64 // of the initial values

	// Central, if not nil, is the device that keeps the only copy of every variable, shared by all replicas.
	// It is one of Devices, and all replicas must be local. Info.Central reports whether the program does so.
	Central *Device
	// Replicas is the number of replicas of the whole job, including those of other processes. 0 means that all
	// are local.
	Replicas int
	// Sum all-reduces tensors over all replicas, for models that contain all-reduces. It is nil if the caller
	// does not support this; such models then do not compile for more than one replica.
	Sum SumFunc
	// Summed is the number of replicas over which Sum adds, if that is not Replicas: those of one worker, where the
	// workers exchange parameters from time to time and no gradients. 0: Replicas.
	Summed int

	// BucketBytes is the desired number of bytes of gradients per bucket; 0 is the engine's default. It has to
	// be the same on all workers. Another value may change the bits of results.
	BucketBytes int
	// Shards divides the update of the parameters, and with it the optimizer's slots, among the replicas of the
	// job: Program.Pieces lists what each shard updates. A device updates what the shards of its replicas own. 0 and 1
	// mean that every device updates every parameter.
	Shards int
	// ShardIfFaster makes Shards a proposal: where the engine expects no shorter steps, every device updates every
	// parameter, and all of Program.Pieces belong to shard 0. That depends only on the model, the engine and Replicas.
	ShardIfFaster bool
	// ReplicaShards is the shard of each local replica, from 0 to Shards-1. It is needed if Shards is more than 1. An
	// optimizer that combines gradients of several parameters cannot be sharded.
	ReplicaShards []int
}

// LocalReplicas returns the number of local replicas.
func (s Spec) LocalReplicas() int {
	if s.ReplicaDevices != nil {
		return len(s.ReplicaDevices)
	}
	return len(s.Devices)
}

// DeviceOf returns the device of a local replica, as an index into Devices.
func (s Spec) DeviceOf(replica int) int {
	if s.ReplicaDevices != nil {
		return s.ReplicaDevices[replica]
	}
	return replica
}

// ErrNotOwned is the error of Program.Read for a slot of a parameter that another shard than the replica's owns.
var ErrNotOwned = errors.New("another shard owns the variable")

// SumFunc writes the sum of all replicas' src[i] to dst[i], which has the same dtype and shape and does not
// overlap src[i]. Program.Gradients calls it for its replica with its context. Every replica makes the same
// calls in the same order. names are the tensors' names in errors. If SumFunc returns an error, Gradients
// ends with it.
type SumFunc func(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error

// InferenceModel is a [Model] that can be compiled for prediction alone, without loss, optimizer and labels.
type InferenceModel interface {
	Model
	// CompileInference compiles the prediction for the only device of spec.Devices, and batches of Spec.Rows. The
	// variables have their initial values.
	CompileInference(ctx context.Context, e Engine, spec Spec) (Inference, error)
}

// Inference is a model compiled for prediction alone. All methods may be called concurrently.
type Inference interface {
	// Variables lists the variables that the prediction uses, sorted by name.
	Variables() []Variable
	// Write sets a variable to a copy of value. It waits for calls of Predict in progress.
	Write(variable int, value *tensor.Tensor) error
	// Predict returns the predictions for Spec.Rows rows, in new tensors. It only reads the inputs, until it
	// returns. Several calls may compute at the same time.
	Predict(ctx context.Context, inputs []*tensor.Tensor) ([]*tensor.Tensor, error)
	// ForInputs compiles the model for other inputs. Both use one set of values of the variables, those of this
	// inference, so the new one must use no others, and is useless after Close of this one.
	ForInputs(ctx context.Context, inputs []Feature) (Inference, error)
	// NewState returns zeros for the inputs from first on. axis counts from that of the rows, 0.
	NewState(first, axis int) (State, error)
	// Continue is Predict with the values of a state as the last inputs, for a state of this inference or of one with
	// the same set of values of the variables. The last results, one for each value of the state, are not
	// returned: their first count elements along the state's axis replace those from at on in the state. After an
	// error the state is as before. Calls with one state compute one after the other.
	Continue(ctx context.Context, s State, at, count int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error)
	// Close frees the model, after calls in progress.
	Close() error
}

// State is the last inputs of an [Inference], which stay where the engine computes from one call to the next, such as
// the keys and values of a language model. Only Close must be called by others than the inference that made it, at
// any time; it frees the memory after a call in progress.
type State interface {
	Close() error
}

// Feature is the dtype and shape of one row of an input or a label.
type Feature struct {
	DType tensor.DType
	Shape []int // without the batch dimension
}

// Batch is one replica's padded share of a global batch, or a part of that share: every tensor has Spec.Rows
// rows. The caller owns it, and must not modify it until the call returns.
type Batch struct {
	Inputs  []*tensor.Tensor // in the order of Spec.Inputs
	Labels  []*tensor.Tensor // in the order of Spec.Labels
	Weights []float32        // one per row
	Padding int              // number of padding rows at the end, whose weight must be 0
}

// Micro is one micro-batch of a replica's step. A step without accumulation has one, with Last set.
type Micro struct {
	Batch
	// WeightSum is the sum of the weights of the whole global batch: of all micro-batches of all replicas. The loss is
	// divided by it, so the sum of the gradients over micro-batches and replicas is the gradient of the global mean
	// loss. It must not be divided again, unlike in PyTorch, whose DDP divides by the number of replicas.
	WeightSum float64
	// RNG is the random state for this replica, step and micro-batch.
	RNG [3]uint64
	// Add adds the gradients to those of the micro-batches before it, as PyTorch's backward() does. Without it a new
	// step begins, as after zero_grad(), and the replica's gradients and averages of an earlier one that were not
	// committed are dropped. (After Update, Commit or Discard must come first.)
	Add bool
	// Last completes the gradients: their sums over the micro-batches are handed over, bucket by bucket.
	Last bool
	// LossScale multiplies the loss before the backward pass. The gradients are multiplied by its inverse
	// afterwards, at least in float32. It keeps small gradients of float16 models from becoming 0, and should
	// be a power of 2. It and its inverse must be finite in float32. 0 means 1. Loss and metrics are never scaled.
	LossScale float64
}

// Scalars are the results of one micro-batch on one replica. Metrics is valid until the replica's next call.
type Scalars struct {
	Loss    float64   // the share of the global mean loss: the sum over replicas and micro-batches is the loss
	Metrics []float64 // weighted sums over the examples, in the order of Program.Metrics; see also Info.Summaries
}

// Bucket is a group of parameters whose gradients are handed over at the same time.
type Bucket struct {
	Parameters []int // ascending indexes into Program.Parameters
	Bytes      int   // of their gradients
}

// Info describes a program. An index of a variable is one into Program.Variables, or -1 if there is none.
type Info struct {
	// Operations lists the operations of the programs for the Spec's shape, one per line, with everything that
	// determines the results besides variables and batches: attributes, shapes, and the values of constants (such as
	// rates). The workers of a job compare it before training. Equal models give equal lines in every process with an
	// engine of the same name; models that compute anything else give different lines. It is empty for a single
	// replica, which needs no comparison.
	Operations []string
	// Summaries specifies for each of Program.Metrics how its value follows from sums over examples. Scalars.Metrics
	// holds the sums of all metrics, one metric after the other. Nil: each metric is the mean of one sum.
	Summaries []Summary
	// Classes has, for each label, its number of classes n: the label's elements are integers from 0 to n-1. It is 0 if
	// the label is not a class, or the number is unknown. Nil: all are 0.
	Classes []int
	// ComputeDType is the type in which the layers compute; Invalid: unknown. If it is float16, Micro.LossScale has to
	// keep small gradients from becoming 0.
	ComputeDType tensor.DType
	// LastStep is the variable that holds the number of the training's last step, counted from 1, for a model that
	// depends on it, such as a learning-rate schedule over the whole training. It is an int64 scalar, negative while
	// the number is unknown, and is written by the caller.
	LastStep int
	// LearningRate is the variable of the learning rate, a scalar. RateScheduled reports that every update sets it, so
	// that writing it has no effect.
	LearningRate  int
	RateScheduled bool
	// EMA has, for each parameter, the slot with its exponential moving average, of the same shape. It is nil if the
	// optimizer keeps none.
	EMA []int
	// Central reports whether the program keeps one copy of every variable for all replicas, as Spec.Central requests.
	// Read returns that copy and Write sets it, for any replica. An average becomes the mean of the values that the
	// replicas' Gradients compute, through Spec.Sum. New values are computed once per step: Update has no effect on
	// other devices than Spec.Central.
	Central bool
	// UpdatesInCommit reports that Program.Commit computes what Update has prepared.
	UpdatesInCommit bool
	// WholeStep reports whether Program.Step is supported.
	WholeStep bool
}

// Summary describes the sums of a metric.
type Summary struct {
	Sums int // their number
	// Value computes the metric from its sums over all examples, each multiplied by the example's weight, and the sum
	// of the weights. If it is nil, the metric is the mean of one sum, or a table of several.
	Value func(sums []float64, weight float64) float64
	// Stream makes an empty Stream, which gives the metric's value instead. Nil: the value does not depend on how the
	// examples are divided into batches.
	Stream func() Stream
}

// Stream computes a metric from the values of global batches in their order, such as a moving average. Every worker has
// one and adds the same numbers. Methods are not called concurrently.
type Stream interface {
	// Add adds a batch: the metric's sums over its examples, and the sum of their weights, which is positive.
	Add(sums []float64, weight float64)
	// Value returns the metric, NaN before the first Add.
	Value() float64
	// State returns a copy of the state, for snapshots.
	State() []float64
	// SetState sets the state from a State of a Stream of the same metric. It returns an error if it cannot be one.
	SetState(state []float64) error
}

// Shape is the shape of the batches of a replica.
type Shape struct {
	Rows           int       // including padding
	Inputs, Labels []Feature // one row of each input and label
	// Training also compiles Gradients, and Step where it is supported. Without it, the shape is for Evaluate and Predict.
	Training bool
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

// Bytes returns the number of bytes of the variable's value.
func (v Variable) Bytes() int {
	n := v.DType.Bytes()
	for _, d := range v.Shape {
		n *= d
	}
	return n
}

// Program is a compiled model with the state of every local replica and device.
//
// A step consists of one or more calls of Gradients on every replica, one per micro-batch; of the reduction of
// the gradients over all replicas of the job, in place, in the memory of Gradient; and of Update for every part
// on every device. Then Commit makes all new values visible or, if anything failed on any replica, Discard
// drops them. Until Commit, every variable keeps its old value. A step of one micro-batch on a program's only
// replica, where reduce starts the all-reduce of a gradient and wait waits for all of them:
//
//	micro := engine.Micro{Batch: batch, WeightSum: weightSum, RNG: rng, Last: true}
//	_, err := p.Gradients(ctx, replica, micro, func(bucket int) {
//		for _, i := range p.Buckets()[bucket].Parameters {
//			gradient, err := p.Gradient(replica, i)
//			reduce(gradient, err)
//		}
//	})
//	err = errors.Join(err, wait())
//	for part := range p.Parts(device) {
//		if err == nil {
//			err = p.Update(ctx, device, replica, part, 1)
//		}
//	}
//	if err != nil {
//		p.Discard()
//	} else {
//		p.Commit()
//	}
//
// A bucket is a unit of communication, and equal on all workers; a part is a unit of updating, and may differ between
// devices. For example, the buckets of four parameters may be {2, 3} and {0, 1}. Then a device that updates all of them
// has the parts {2, 3} and {0, 1}, and can update 2 and 3 while 0 and 1 are still reduced. With an optimizer that
// clips by the global norm, it has one part of all four. A device whose shard owns 0 and 3 has the parts {3} and {0}.
//
// Methods with a replica argument may run concurrently for different replicas, also for those of one device,
// but not for the same one. Exceptions are Gradient and Updated, which may be called at any time when the memory
// belongs to the caller. Update may run concurrently for different devices, but not for the same one, nor while
// a replica of that device computes. All other methods that change state (Commit, Discard, Write, Close) require
// that no other call is running.
type Program interface {
	// Info describes the program. The result never changes; the caller must not modify it.
	Info() Info
	// Parameters lists the trained variables, sorted by name.
	Parameters() []Variable
	// Variables lists all variables, sorted by role, then by name. The parameters are first, so an index into
	// Parameters is one into Variables.
	Variables() []Variable
	// Metrics lists the names of the metrics ("accuracy").
	Metrics() []string
	// Buckets lists the groups in which Gradients hands over gradients, in the order in which the backward pass
	// computes them. Every parameter is in exactly one. The result depends only on the model, the shapes of its batch,
	// the build of the engine, Spec.Replicas and Spec.BucketBytes. It is one bucket if the job has one replica.
	Buckets() []Bucket
	// Parts lists the groups of parameters that one Update computes on a device: each consists of whole buckets,
	// without what other shards own, or of the device's piece of one parameter that is divided. It is one group if the
	// optimizer combines gradients of several parameters.
	Parts(device int) [][]int

	// AddShape compiles the programs for batches of another shape than that of the Spec, such as sequences of another
	// length. From then on all methods that take batches or inputs take those of this shape too, which may be in any
	// memory; NewBatch returns batches of the Spec's shape only. Variables, buckets and parts stay as they are.
	// AddShape returns an error, and changes nothing, if the model has other variables, or variables of other shapes,
	// for these batches, or if the engine computes on one shape only. No other method may run.
	AddShape(ctx context.Context, s Shape) error

	// NewBatch returns a zeroed batch with inputs, labels and weights, which Gradients, Evaluate and Predict
	// of that replica read in place. So filling a batch takes one copy, where another batch takes two. The
	// caller may refill it any number of times, but not while one of them runs. The memory belongs to the
	// program and is freed by Close. NewBatch must not be called while another method runs for the replica.
	NewBatch(replica int) (Batch, error)

	// Gradients computes the gradients of a micro-batch. Their loss is the sum over the examples of weight times
	// loss, divided by m.WeightSum. Variables that the model function changes, such as moving averages, take new
	// values with each micro-batch of a step; the next one reads them.
	//
	// If m.Last is set, Gradients calls ready(k), if it is not nil, once for each bucket k, in their order, from
	// the calling goroutine, as soon as the bucket's gradients are complete in memory. Later ones may not be
	// computed yet. ready must not block: it starts the reduction of Gradient's memory, or notes that it can be
	// started. If Gradients returns an error after some calls of ready, those reductions must have ended before
	// Discard.
	Gradients(ctx context.Context, replica int, m Micro, ready func(bucket int)) (Scalars, error)
	// Gradient returns the memory of a parameter's gradient on a replica. Host code can read and write it. It
	// belongs to the caller from ready of its bucket until Commit or Discard; Update reads it there. No other
	// memory overlaps it. In a step without Gradients, it is zeroed memory that the caller fills: so gradients
	// that the program did not compute can be applied. It returns an error if the gradients are incomplete,
	// because Micro.Last was not set, the bucket is not ready, or Gradients failed, and after Step.
	Gradient(replica, parameter int) (*tensor.Tensor, error)

	// Update computes new values of the parameters of a part, and of their slots, on a device, from factor times
	// the gradients of a replica of that device. After the reduction the gradients of all replicas are equal, so
	// any of them will do. All gradients of the part must be complete, and no replica of the device may be
	// computing. A factor other than 1 may be multiplied into the memory of Gradient before the update; 1
	// changes no bit. Each part is updated once per step, in any order. In a job of one replica, Commit may compute the
	// values instead, from the memory of Gradient, in that of the old values.
	Update(ctx context.Context, device, replica, part int, factor float64) error
	// Updated returns the memory of a parameter's new value on a device. Host code can read and write it. It
	// belongs to the caller from the parameter's Update until Commit or Discard. The caller must fill the elements
	// that shards of other devices own in every step before Commit; their first contents are undefined.
	Updated(device, parameter int) (*tensor.Tensor, error)
	// Pieces lists which shard updates which elements of the parameters, as [BucketPieces] does for Spec.Shards.
	// Parameters are divided only if the optimizer works element by element. The result is the same in every process.
	Pieces() []Piece
	// Kept returns the range of a variable's elements that the device of a replica keeps for it: all, or, of the slots of
	// parameters, those that belong to the pieces of the replica's shard. It is empty if that has none.
	Kept(replica, variable int) (from, to int)

	// Place changes the number of local replicas, and their devices and shards: by local replica, as in Spec, but a
	// device may be left without replicas, and then keeps no values. It compiles nothing; the update of a piece that this
	// program has not updated before is compiled at its first use. Each other device keeps the variables that all
	// replicas share, and a device that had no replica gets a copy of those. It keeps the slots of the shards that it
	// updated and still updates. The caller must write the averages of all replicas, and the slots of all other shards,
	// before it computes. Place drops the results of Gradients and Update and the batches of NewBatch. Invalid arguments
	// are an error that changes nothing; after any other error the program can only be closed.
	Place(replicaDevices, replicaShards []int) error

	// Step is Gradients of a step's only micro-batch, and Update of every part with factor 1, as one program: if
	// Info.WholeStep is set, in a job of one replica. finite reports whether all gradients are finite; they have no
	// memory. The results are those of Gradients and Update, but may be rounded differently. m.Add and m.LossScale must
	// not be set. Commit or Discard must follow.
	Step(ctx context.Context, m Micro) (s Scalars, finite bool, err error)

	// Commit makes the new values visible: those of Update and Updated, and of the variables that Gradients
	// changed. After Gradients alone, it makes only the latter visible.
	Commit()
	// Discard drops the results of Gradients and Update.
	Discard()

	// Evaluate returns the replica's share of loss and metrics of a batch, as Gradients does, in inference
	// mode. It changes no variable. weightSum is the sum of the weights of the global batch.
	Evaluate(ctx context.Context, replica int, b Batch, weightSum float64) (loss float64, metrics []float64, err error)
	// Predict returns the model's outputs for the inputs, each with Spec.Rows rows, as new host tensors.
	Predict(ctx context.Context, replica int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error)

	// Losses returns a copy of the losses of all rows, as computed by the replica's last Gradients or Evaluate: to find
	// the cause of a loss that is not finite. It returns an error after Commit or Discard, which free them.
	Losses(replica int) ([]float64, error)

	// Read returns a copy of a variable's value on a replica: of a mirrored variable, that of its device.
	// variable is an index into Variables. Of a slot of which the replica's shard has a part, Read returns that part, as
	// a vector; of one that another shard owns, [ErrNotOwned]. See Kept.
	Read(replica, variable int) (*tensor.Tensor, error)
	// Write sets a variable's value on a replica, or on its device if it is mirrored. It copies the value. It
	// returns an error if dtype or shape differ. The device keeps its parts of a slot; the value can also be the part that
	// Read returns.
	Write(replica, variable int, value *tensor.Tensor) error
	// Close frees programs and state.
	Close() error
}
