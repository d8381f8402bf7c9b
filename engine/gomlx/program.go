package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
	"github.com/lockstep-ml/lockstep/tensor"
)

// variable is a variable of the program with its GoMLX shape.
type variable struct {
	engine.Variable
	shape shapes.Shape
}

// program implements [engine.Program].
type program struct {
	backend   *backend
	spec      engine.Spec
	lossType  dtypes.DType
	metrics   []string
	variables []variable // parameters first
	packOf    []int      // by parameter
	classes   []int      // by label; 0: not a class

	gradients, evaluate, predict *executable
	packs                        []*executable

	replicas         []*replica
	central          *central  // nil: every replica has a copy of the variables
	oldGradients     *recycler // for a replica's gradients
	oldValues        *recycler // for the values that a step replaces
	replaced         []int     // the variables that a step replaces, for oldValues
	parametersByPack [][]int
}

var (
	_ engine.BatchBuffers = (*program)(nil)
	_ engine.InPlace      = (*program)(nil)
	_ engine.Central      = (*program)(nil)
	_ engine.Scheduled    = (*program)(nil)
	_ engine.Described    = (*program)(nil)
	_ engine.Inspector    = (*program)(nil)
)

// open creates the replicas, all with the same initial values.
func (p *program) open(initial []*tensor.Tensor, inputs, labels []shapes.Shape) error {
	var gradients, values []shapes.Shape
	for i := range p.packOf {
		gradients = append(gradients, p.variables[i].shape)
	}
	p.replaced = p.replacedByStep()
	for _, i := range p.replaced {
		values = append(values, p.variables[i].shape)
	}
	var err error
	if p.oldGradients, err = newRecycler(p.backend, gradients); err != nil {
		return err
	}
	if p.oldValues, err = newRecycler(p.backend, values); err != nil {
		return err
	}
	p.parametersByPack = make([][]int, len(p.packs))
	for i, k := range p.packOf {
		p.parametersByPack[k] = append(p.parametersByPack[k], i)
	}
	if err := p.openCentral(); err != nil {
		return err
	}
	for i, d := range p.spec.Devices {
		r, err := newReplica(p, i, d, inputs, labels)
		p.replicas = append(p.replicas, r)
		if err != nil {
			return err
		}
		if p.central != nil && i != p.central.replica {
			continue
		}
		for v, value := range initial {
			if err := p.Write(i, v, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// replacedByStep lists the variables that every step sets.
func (p *program) replacedByStep() []int {
	seen := make([]bool, len(p.variables))
	for _, x := range append([]*executable{p.gradients}, p.packs...) {
		for _, v := range x.changed {
			seen[v] = true
		}
	}
	var list []int
	for v, yes := range seen {
		if yes {
			list = append(list, v)
		}
	}
	return list
}

// Describe implements [engine.Described].
func (p *program) Describe() []string {
	var list []string
	for _, x := range append([]*executable{p.gradients, p.evaluate, p.predict}, p.packs...) {
		for _, line := range x.description {
			list = append(list, x.name+": "+line)
		}
	}
	return list
}

// Parameters implements [engine.Program].
func (p *program) Parameters() []engine.Variable { return p.describe(len(p.packOf)) }

// Variables implements [engine.Program].
func (p *program) Variables() []engine.Variable { return p.describe(len(p.variables)) }

func (p *program) describe(n int) []engine.Variable {
	list := make([]engine.Variable, n)
	for i := range list {
		list[i] = p.variables[i].Variable
	}
	return list
}

// Metrics implements [engine.Program].
func (p *program) Metrics() []string { return p.metrics }

// Packs implements [engine.Program].
func (p *program) Packs() int { return len(p.packs) }

// Pack implements [engine.Program].
func (p *program) Pack(parameter int) int { return p.packOf[parameter] }

// NewBatch implements [engine.BatchBuffers].
func (p *program) NewBatch(replica int) (engine.Batch, error) {
	r, err := p.replica(replica)
	if err != nil {
		return engine.Batch{}, err
	}
	return r.newBatch()
}

// LastStep implements [engine.Scheduled]: the variable is the one that GoMLX's train.Loop sets.
func (p *program) LastStep() int {
	return slices.IndexFunc(p.variables, func(v variable) bool { return v.Name == lastStepPath })
}

// Gradients implements [engine.Program].
func (p *program) Gradients(ctx context.Context, replica int, b engine.Batch, weightSum float64,
	rng [3]uint64,
) (engine.Gradients, error) {
	r, err := p.replica(replica)
	if err != nil {
		return engine.Gradients{}, err
	}
	r.discard() // results of a step that was neither committed nor discarded
	if err := r.feed(b, weightSum); err != nil {
		return engine.Gradients{}, err
	}
	copy(tensor.Data[uint64](r.rngTensor), rng[:])
	out, err := r.run(ctx, p.gradients)
	if err != nil {
		return engine.Gradients{}, err
	}
	r.losses = out[1]
	n := len(p.packOf)
	r.gradients = append(r.gradients[:0], out[2:2+n]...)
	for i, v := range p.gradients.changed {
		r.pendingAverages[v] = out[2+n+i]
	}
	loss, metrics, err := r.stats(out[0])
	if err != nil {
		return engine.Gradients{}, err
	}
	views, err := r.views()
	if err != nil {
		return engine.Gradients{}, err
	}
	return engine.Gradients{Tensors: views, Loss: loss, Metrics: metrics}, nil
}

// Inputs implements [engine.Program].
func (p *program) Inputs(replica, pack int) []tensor.Memory {
	r := p.mustReplica(replica)
	list := make([]tensor.Memory, len(p.parametersByPack[pack]))
	for i, v := range p.parametersByPack[pack] {
		list[i] = r.reduced[v].mem
	}
	return list
}

// InPlace implements [engine.InPlace]. Both backends guarantee that a program's outputs do not overlap other
// memory, including its constants and arguments: XLA copies where they would, and the Go backend returns only
// buffers that it owns.
func (p *program) InPlace() bool { return p.backend.HasSharedBuffers() }

// Apply implements [engine.Program].
func (p *program) Apply(ctx context.Context, replica, pack int) error {
	return p.apply(ctx, replica, pack, false)
}

// ApplyInPlace implements [engine.InPlace].
func (p *program) ApplyInPlace(ctx context.Context, replica, pack int) error {
	return p.apply(ctx, replica, pack, true)
}

func (p *program) apply(ctx context.Context, replica, pack int, inPlace bool) error {
	r, err := p.replica(replica)
	if err != nil {
		return err
	}
	switch {
	case inPlace && !p.InPlace():
		return errors.New("gomlx: apply in place: the gradients are copies, because host and device share no memory")
	case inPlace && len(r.gradients) == 0:
		return fmt.Errorf("gomlx: apply in place: replica %d has no gradients: call Gradients first, and neither Commit "+
			"nor Discard in between", replica)
	}
	if pack < 0 || pack >= len(p.packs) {
		return fmt.Errorf("gomlx: no pack %d: the program has %d", pack, len(p.packs))
	}
	if c := p.central; c != nil && c.replica != replica {
		return nil
	}
	x := p.packs[pack]
	r.inPlace = inPlace
	out, err := r.run(ctx, x)
	if err != nil {
		return err
	}
	for i, v := range x.changed {
		release(r.pendingUpdates[v]) // not nil for a step counter, or after a second apply
		r.pendingUpdates[v] = out[i]
	}
	return nil
}

// Commit implements [engine.Program].
func (p *program) Commit(replica int) { p.mustReplica(replica).commit() }

// Discard implements [engine.Program].
func (p *program) Discard(replica int) { p.mustReplica(replica).discard() }

// Evaluate implements [engine.Program].
func (p *program) Evaluate(ctx context.Context, replica int, b engine.Batch, weightSum float64) (float64, []float64,
	error,
) {
	r, err := p.replica(replica)
	if err != nil {
		return 0, nil, err
	}
	if err := r.feed(b, weightSum); err != nil {
		return 0, nil, err
	}
	r.fixedRandom()
	out, err := r.run(ctx, p.evaluate)
	if err != nil {
		return 0, nil, err
	}
	release(r.losses)
	r.losses = out[1]
	return r.stats(out[0])
}

// Losses implements [engine.Inspector].
func (p *program) Losses(replica int) ([]float64, error) {
	r, err := p.replica(replica)
	if err != nil {
		return nil, err
	}
	if r.losses == nil {
		return nil, fmt.Errorf("gomlx: replica %d has no losses: call Gradients or Evaluate first", replica)
	}
	t, err := toHost(r.losses)
	if err != nil {
		return nil, err
	}
	return t.Float64s(), nil
}

// Classes implements [engine.Inspector].
func (p *program) Classes() []int { return p.classes }

// Predict implements [engine.Program].
func (p *program) Predict(ctx context.Context, replica int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error) {
	r, err := p.replica(replica)
	if err != nil {
		return nil, err
	}
	if err := r.take("input", r.feedInputs, r.inputs, p.spec.Inputs, inputs); err != nil {
		return nil, err
	}
	r.fixedRandom()
	out, err := r.run(ctx, p.predict)
	if err != nil {
		return nil, err
	}
	list := make([]*tensor.Tensor, len(out))
	for i, b := range out {
		if err == nil {
			list[i], err = toHost(b)
		}
		release(b)
	}
	if err != nil {
		return nil, err
	}
	return list, nil
}

// Read implements [engine.Program].
func (p *program) Read(replica, variable int) (*tensor.Tensor, error) {
	r, err := p.replica(replica)
	if err != nil {
		return nil, err
	}
	if err := p.checkVariable(variable); err != nil {
		return nil, err
	}
	if p.central != nil {
		r = p.replicas[p.central.replica]
	}
	return toHost(r.values[variable])
}

// Write implements [engine.Program].
func (p *program) Write(replica, variable int, value *tensor.Tensor) error {
	r, err := p.replica(replica)
	if err != nil {
		return err
	}
	if err := p.checkVariable(variable); err != nil {
		return err
	}
	if p.central != nil {
		r = p.replicas[p.central.replica]
	}
	v := p.variables[variable]
	if err := sameType(value, v.DType, v.Shape); err != nil {
		return fmt.Errorf("gomlx: write variable %s: %w", v.Name, err)
	}
	b, err := p.backend.BufferFromFlatData(r.device, flatOf(value.Memory(), v.shape.DType, value.Len()), v.shape)
	if err != nil {
		return fmt.Errorf("gomlx: write variable %s of replica %d: %w", v.Name, replica, err)
	}
	release(r.values[variable])
	r.values[variable] = b
	p.central.changed(variable)
	return nil
}

// Close implements [engine.Program].
func (p *program) Close() error {
	for _, r := range p.replicas {
		r.close()
	}
	p.replicas = nil
	for _, x := range append([]*executable{p.gradients, p.evaluate, p.predict}, p.packs...) {
		x.close()
	}
	p.oldGradients.close()
	p.oldValues.close()
	p.oldGradients, p.oldValues = nil, nil
	return nil
}

func (p *program) replica(i int) (*replica, error) {
	if p.replicas == nil {
		return nil, errors.New("gomlx: the program is closed")
	}
	if i < 0 || i >= len(p.replicas) {
		return nil, fmt.Errorf("gomlx: no replica %d: the program has %d", i, len(p.replicas))
	}
	return p.replicas[i], nil
}

// mustReplica is replica for methods without an error result. It panics on an invalid index, which is a bug
// of the caller.
func (p *program) mustReplica(i int) *replica {
	r, err := p.replica(i)
	if err != nil {
		panic(err.Error())
	}
	return r
}

func (p *program) checkVariable(i int) error {
	if i < 0 || i >= len(p.variables) {
		return fmt.Errorf("gomlx: no variable %d: the program has %d", i, len(p.variables))
	}
	return nil
}

// replica is the state of one replica, with its input buffers.
type replica struct {
	p      *program
	index  int
	device compute.DeviceNum

	inputs, labels          []*hostBuffer // to which batches are copied
	weights, weightSum, rng *hostBuffer
	borrowed                map[unsafe.Pointer]*hostBuffer // buffers of the batches of NewBatch, by their memory
	feedInputs, feedLabels  []*hostBuffer                  // of the current batch, copied or borrowed
	feedWeights             *hostBuffer
	rngTensor               *tensor.Tensor // a view of the memory of rng
	weightSumTensor         *tensor.Tensor
	examples                *hostBuffer   // the number of rows of the current batch that are examples
	reduced                 []*hostBuffer // by parameter: apply's gradients

	values          []compute.Buffer // by variable: the committed values
	pendingAverages []compute.Buffer // by variable: uncommitted values of the gradients program; nil if none
	pendingUpdates  []compute.Buffer // by variable: uncommitted values of the apply programs; nil if none
	gradients       []compute.Buffer // by parameter: of the last gradients program
	losses          compute.Buffer   // by row: of the last gradients or evaluate program; nil if none
	inPlace         bool             // apply reads gradients, not reduced

	staged []*tensor.Tensor // by parameter: host copies of the gradients, where there is no shared memory
	copied []uint64         // by variable: the version of the central copy that values holds, on other devices
	sums   []*sum           // by all-reduce of the gradients program
	args   []compute.Buffer // scratch
	old    []compute.Buffer // scratch
}

func newReplica(p *program, index int, d engine.Device, inputs, labels []shapes.Shape) (*replica, error) {
	n := len(p.variables)
	r := &replica{
		p:               p,
		index:           index,
		values:          make([]compute.Buffer, n),
		pendingAverages: make([]compute.Buffer, n),
		pendingUpdates:  make([]compute.Buffer, n),
		borrowed:        map[unsafe.Pointer]*hostBuffer{},
		feedInputs:      make([]*hostBuffer, len(inputs)),
		feedLabels:      make([]*hostBuffer, len(labels)),
	}
	var err error
	if r.device, err = p.backend.deviceNum(d); err != nil {
		return r, err
	}
	newHostBuffers := func(list []shapes.Shape) (buffers []*hostBuffer) {
		for _, s := range list {
			var c *hostBuffer
			if err == nil {
				if c, err = newHostBuffer(p.backend, r.device, s); err == nil {
					buffers = append(buffers, c)
				}
			}
		}
		return buffers
	}
	r.inputs, r.labels = newHostBuffers(inputs), newHostBuffers(labels)
	others := newHostBuffers([]shapes.Shape{
		shapes.Make(dtypes.Float32, p.spec.Rows), shapes.Make(p.lossType), graph.RNGStateShape, shapes.Make(dtypes.Int32),
	})
	for i := range p.packOf {
		r.reduced = append(r.reduced, newHostBuffers([]shapes.Shape{p.variables[i].shape})...)
	}
	if err != nil {
		for _, c := range others {
			c.close()
		}
		return r, err
	}
	r.weights, r.weightSum, r.rng, r.examples = others[0], others[1], others[2], others[3]
	r.rngTensor = tensor.Wrap(r.rng.mem, tensor.Uint64, 3)
	d2, err := fromGoMLX(p.lossType)
	if err != nil {
		return r, err
	}
	r.weightSumTensor = tensor.Wrap(r.weightSum.mem, d2)
	if !p.backend.HasSharedBuffers() {
		for i := range p.packOf {
			v := p.variables[i]
			r.staged = append(r.staged, tensor.New(v.DType, v.Shape...))
		}
	}
	return r, nil
}

// newBatch returns a batch in new host buffers.
func (r *replica) newBatch() (b engine.Batch, err error) {
	var made []*hostBuffer
	one := func(like *hostBuffer, rows []int) *tensor.Tensor {
		if err != nil {
			return nil
		}
		var c *hostBuffer
		var d tensor.DType
		if c, err = newHostBuffer(r.p.backend, r.device, like.shape); err != nil {
			return nil
		}
		made = append(made, c)
		d, err = fromGoMLX(like.shape.DType)
		return tensor.Wrap(c.mem, d, rows...)
	}
	for _, c := range r.inputs {
		b.Inputs = append(b.Inputs, one(c, c.shape.Dimensions))
	}
	for _, c := range r.labels {
		b.Labels = append(b.Labels, one(c, c.shape.Dimensions))
	}
	weights := one(r.weights, r.weights.shape.Dimensions)
	if err != nil {
		for _, c := range made {
			c.close()
		}
		return engine.Batch{}, err
	}
	b.Weights = tensor.Data[float32](weights)
	for _, c := range made {
		if c.mem.Bytes > 0 {
			r.borrowed[c.mem.Ptr] = c
		} else {
			c.close() // empty, so it is never read
		}
	}
	return b, nil
}

// hostBufferOf returns the host buffer that holds m, a part of a batch. If newBatch allocated m, that is its
// buffer. Otherwise m is copied to b.
func (r *replica) hostBufferOf(m tensor.Memory, b *hostBuffer) *hostBuffer {
	if own := r.borrowed[m.Ptr]; own != nil && own.shape.Equal(b.shape) {
		return own
	}
	copy(b.mem.HostBytes(), m.HostBytes())
	return b
}

// feed sets the batch that the next program reads.
func (r *replica) feed(b engine.Batch, weightSum float64) error {
	if err := r.take("input", r.feedInputs, r.inputs, r.p.spec.Inputs, b.Inputs); err != nil {
		return err
	}
	if err := r.take("label", r.feedLabels, r.labels, r.p.spec.Labels, b.Labels); err != nil {
		return err
	}
	if len(b.Weights) != r.p.spec.Rows {
		return fmt.Errorf("gomlx: %d weights for replica %d: want one per row, %d", len(b.Weights), r.index, r.p.spec.Rows)
	}
	if b.Padding < 0 || b.Padding > r.p.spec.Rows {
		return fmt.Errorf("gomlx: padding of %d rows for replica %d: want 0 to %d", b.Padding, r.index, r.p.spec.Rows)
	}
	if !(weightSum > 0) {
		return fmt.Errorf("gomlx: weight sum %v of the global batch: want a positive number; a batch of weight 0 has no "+
			"mean: skip it", weightSum)
	}
	r.feedWeights = r.hostBufferOf(tensor.HostMemory(b.Weights), r.weights)
	setScalar(r.weightSumTensor, weightSum)
	tensor.Data[int32](tensor.Wrap(r.examples.mem, tensor.Int32))[0] = int32(r.p.spec.Rows - b.Padding)
	return nil
}

// take sets, in read, the host buffers of tensors of one kind. It copies a tensor that is in no borrowed
// buffer to one of buffers.
func (r *replica) take(
	what string, read, buffers []*hostBuffer, features []engine.Feature, list []*tensor.Tensor,
) error {
	if len(list) != len(buffers) {
		return fmt.Errorf("gomlx: %d %ss for replica %d: want %d", len(list), what, r.index, len(buffers))
	}
	for i, t := range list {
		f := features[i]
		if err := sameRows(t, f.DType, r.p.spec.Rows, f.Shape); err != nil {
			return fmt.Errorf("gomlx: %s %d of replica %d: %w", what, i, r.index, err)
		}
		read[i] = r.hostBufferOf(t.Memory(), buffers[i])
	}
	return nil
}

// fixedRandom sets the random state for programs in inference mode, whose results must be reproducible.
func (r *replica) fixedRandom() {
	copy(tensor.Data[uint64](r.rngTensor), []uint64{uint64(r.p.spec.Seed), 0, 0})
}

// run runs a program on the replica's device with its current values and input buffers. The apply programs
// read the values that the gradients program set in this step, before they are committed. GoMLX's trainer,
// which has one program for both, does the same, and a learning-rate schedule in the model function depends
// on it.
func (r *replica) run(ctx context.Context, x *executable) (out []compute.Buffer, err error) {
	doing := fmt.Sprintf("the %s program of replica %d", x.name, r.index)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("gomlx: %s: %w", doing, context.Cause(ctx))
	}
	if err := x.compile(); err != nil {
		return nil, err
	}
	r.args = r.args[:0]
	for _, a := range x.args {
		b, err := r.argument(a, x.applies)
		if err != nil {
			return nil, fmt.Errorf("gomlx: arguments of %s: %w", doing, err)
		}
		r.args = append(r.args, b)
	}
	err = catch("run "+doing, func() error {
		if p, ok := x.exe.(*stages.Program); ok {
			out, err = r.runStages(ctx, p)
		} else {
			out, err = x.exe.Execute(r.args, nil, r.device)
		}
		return err
	})
	return out, err
}

func (r *replica) argument(a argument, applying bool) (compute.Buffer, error) {
	switch a.kind {
	case inputArg:
		return r.feedInputs[a.index].load()
	case labelArg:
		return r.feedLabels[a.index].load()
	case weightsArg:
		return r.feedWeights.load()
	case weightSumArg:
		return r.weightSum.load()
	case examplesArg:
		return r.examples.load()
	case rngArg:
		return r.rng.load()
	case gradientArg:
		if r.inPlace {
			return r.gradients[a.index], nil
		}
		return r.reduced[a.index].load()
	}
	if applying && r.pendingAverages[a.index] != nil {
		return r.pendingAverages[a.index], nil
	}
	if c := r.p.central; c != nil {
		return c.value(r, a.index)
	}
	return r.values[a.index], nil
}

// stats reads and frees the vector of loss and metrics.
func (r *replica) stats(b compute.Buffer) (loss float64, metrics []float64, err error) {
	t, err := toHost(b)
	release(b)
	if err != nil {
		return 0, nil, err
	}
	list := t.Float64s()
	return list[0], list[1:], nil
}

// views returns the gradients as views of the backend's memory, or as host copies if it is not shared.
func (r *replica) views() ([]*tensor.Tensor, error) {
	list := make([]*tensor.Tensor, len(r.gradients))
	for i, b := range r.gradients {
		v := r.p.variables[i]
		if r.staged != nil {
			if err := b.ToFlatData(flatOf(r.staged[i].Memory(), v.shape.DType, r.staged[i].Len())); err != nil {
				return nil, fmt.Errorf("gomlx: fetch the gradient of %s: %w", v.Name, err)
			}
			list[i] = r.staged[i]
			continue
		}
		flat, err := b.Data()
		if err != nil {
			return nil, fmt.Errorf("gomlx: view the gradient of %s: %w", v.Name, err)
		}
		list[i] = tensor.Wrap(memoryOf(flat, v.shape, int(r.device)), v.DType, v.Shape...)
	}
	return list, nil
}

// commit makes the uncommitted values visible and frees those that they replace.
func (r *replica) commit() {
	if c := r.p.central; c != nil && c.replica != r.index {
		r.discard()
		return
	}
	r.old = r.old[:0]
	for _, v := range r.p.replaced {
		next := r.pendingUpdates[v]
		if next == nil {
			next = r.pendingAverages[v]
		} else {
			release(r.pendingAverages[v])
		}
		r.pendingAverages[v], r.pendingUpdates[v] = nil, nil
		if next == nil {
			continue
		}
		r.old = append(r.old, r.values[v])
		r.values[v] = next
		r.p.central.changed(v)
	}
	r.p.oldValues.free(r.old)
	r.p.oldGradients.free(r.gradients)
	r.gradients = r.gradients[:0]
	release(r.losses)
	r.losses = nil
}

// discard frees uncommitted results.
func (r *replica) discard() {
	for _, v := range r.p.replaced {
		release(r.pendingAverages[v])
		release(r.pendingUpdates[v])
		r.pendingAverages[v], r.pendingUpdates[v] = nil, nil
	}
	r.p.oldGradients.free(r.gradients)
	r.gradients = r.gradients[:0]
	release(r.losses)
	r.losses = nil
}

func (r *replica) close() {
	r.discard()
	for _, b := range r.values {
		release(b)
	}
	for _, s := range r.sums {
		s.close()
	}
	for _, list := range [][]*hostBuffer{r.inputs, r.labels, r.reduced, {r.weights, r.weightSum, r.rng, r.examples}} {
		for _, c := range list {
			c.close()
		}
	}
	for _, c := range r.borrowed {
		c.close()
	}
}

// toHost copies a buffer to a host tensor.
func toHost(b compute.Buffer) (*tensor.Tensor, error) {
	shape, err := b.Shape()
	if err != nil {
		return nil, fmt.Errorf("gomlx: shape of a result: %w", err)
	}
	d, err := fromGoMLX(shape.DType)
	if err != nil {
		return nil, err
	}
	t := tensor.New(d, shape.Dimensions...)
	if err := b.ToFlatData(flatOf(t.Memory(), shape.DType, t.Len())); err != nil {
		return nil, fmt.Errorf("gomlx: fetch a result: %w", err)
	}
	return t, nil
}

// sameType checks a tensor's dtype and shape.
func sameType(t *tensor.Tensor, d tensor.DType, shape []int) error {
	if t == nil {
		return fmt.Errorf("nil tensor: want %v %s", d, tensor.FormatShape(shape))
	}
	same := t.DType() == d && len(t.Shape()) == len(shape)
	for i := 0; same && i < len(shape); i++ {
		same = t.Shape()[i] == shape[i]
	}
	if !same {
		return fmt.Errorf("%v %s: want %v %s", t.DType(), tensor.FormatShape(t.Shape()), d, tensor.FormatShape(shape))
	}
	return nil
}

// sameRows checks the dtype and shape of rows rows of a feature.
func sameRows(t *tensor.Tensor, d tensor.DType, rows int, shape []int) error {
	same := t != nil && t.DType() == d && len(t.Shape()) == len(shape)+1 && t.Shape()[0] == rows
	for i := 0; same && i < len(shape); i++ {
		same = t.Shape()[i+1] == shape[i]
	}
	if same {
		return nil
	}
	return sameType(t, d, append([]int{rows}, shape...))
}

// setScalar stores x in a tensor of rank 0 with a floating-point dtype.
func setScalar(t *tensor.Tensor, x float64) {
	switch t.DType() {
	case tensor.Float32:
		tensor.Data[float32](t)[0] = float32(x)
	case tensor.Float64:
		tensor.Data[float64](t)[0] = x
	case tensor.Float16:
		tensor.Data[tensor.F16](t)[0] = tensor.F16From(float32(x))
	case tensor.BFloat16:
		tensor.Data[tensor.BF16](t)[0] = tensor.BF16From(float32(x))
	}
}
