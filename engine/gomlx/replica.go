package gomlx

import (
	"context"
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// replica is the state of one replica, with its input buffers.
type replica struct {
	p      *program
	index  int
	device *device
	first  bool // of its device

	shapes                 []*feed // of the batches; that of the Spec is first
	current                *feed   // of the current batch
	weightSum, rng         *hostBuffer
	lossScale              *hostBuffer
	borrowed               map[unsafe.Pointer]*hostBuffer // buffers of the batches of NewBatch, by their memory
	feedInputs, feedLabels []*hostBuffer                  // of the current batch, copied or borrowed
	feedWeights            *hostBuffer
	rngTensor              *tensor.Tensor // a view of the memory of rng
	weightSumTensor        *tensor.Tensor
	lossScaleTensor        *tensor.Tensor
	examples               *hostBuffer // the number of rows of the current batch that are examples

	averages        []compute.Buffer // by variable: the committed values of averages
	pendingAverages []compute.Buffer // by variable: uncommitted values of the gradients program; nil if none
	losses          compute.Buffer   // by row: of the last gradients or evaluate program; nil if none

	// gradients are the buffers of the step's gradients. memory is set when they are complete: views of the
	// buffers, or host copies, with nil buffers, if host and device share no memory.
	gradients []compute.Buffer
	memory    []*tensor.Tensor
	begun     bool             // the step computes gradients, so the caller cannot fill them
	added     bool             // gradients of a micro-batch are in the buffers or in staged
	staged    []*tensor.Tensor // host copies, if host and device share no memory
	fetched   []*tensor.Tensor // the same of one micro-batch that is added; nil: none yet
	uploads   []compute.Buffer // staged gradients that an update reads

	sums    map[stages.Program][]*sum // by gradients program, and its all-reduces
	stats   *tensor.Tensor            // loss and metrics
	results []float64                 // the same
	doing   map[*executable]string    // what runs, for errors
	args    []compute.Buffer          // scratch
}

// feed are the buffers for batches of one shape.
type feed struct {
	*shape
	inputs, labels []*hostBuffer // to which batches are copied
	weights        *hostBuffer
}

// newFeed returns buffers for batches of a shape.
func (r *replica) newFeed(s *shape) (f *feed, err error) {
	f = &feed{shape: s}
	one := func(of shapes.Shape) *hostBuffer {
		if err != nil {
			return nil
		}
		var c *hostBuffer
		c, err = newHostBuffer(r.p.backend, r.device.num, of)
		return c
	}
	for _, of := range s.inputShapes {
		f.inputs = append(f.inputs, one(of))
	}
	for _, of := range s.labelShapes {
		f.labels = append(f.labels, one(of))
	}
	f.weights = one(shapes.Make(dtypes.Float32, s.Rows))
	if err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func (f *feed) close() {
	for _, c := range slices.Concat(f.inputs, f.labels, []*hostBuffer{f.weights}) {
		c.close()
	}
}

// fits reports whether the rows of tensors have a shape.
func fits(rows int, features []engine.Feature, list []*tensor.Tensor) bool {
	if len(features) != len(list) {
		return false
	}
	for i, f := range features {
		if sameRows(list[i], f.DType, rows, f.Shape) != nil {
			return false
		}
	}
	return true
}

// choose sets the shape of the current batch: that of the Spec if it has none of the shapes, for the error. Predictions
// have no labels.
func (r *replica) choose(inputs, labels []*tensor.Tensor, predict bool) {
	r.current = r.shapes[0]
	for _, f := range r.shapes {
		if fits(f.Rows, f.Inputs, inputs) && (predict || fits(f.Rows, f.Labels, labels)) {
			r.current = f
			return
		}
	}
}

func newReplica(p *program, index int, d *device) (*replica, error) {
	n := len(p.cells)
	r := &replica{
		p:               p,
		index:           index,
		device:          d,
		first:           true,
		averages:        make([]compute.Buffer, n),
		pendingAverages: make([]compute.Buffer, n),
		gradients:       make([]compute.Buffer, p.parameters),
		memory:          make([]*tensor.Tensor, p.parameters),
		borrowed:        map[unsafe.Pointer]*hostBuffer{},
		doing:           map[*executable]string{},
		sums:            map[stages.Program][]*sum{},
		feedInputs:      make([]*hostBuffer, len(p.spec.Inputs)),
		feedLabels:      make([]*hostBuffer, len(p.spec.Labels)),
	}
	for _, other := range p.replicas {
		r.first = r.first && other.device != d
	}
	var err error
	newHostBuffers := func(list []shapes.Shape) (buffers []*hostBuffer) {
		for _, s := range list {
			var c *hostBuffer
			if err == nil {
				if c, err = newHostBuffer(p.backend, d.num, s); err == nil {
					buffers = append(buffers, c)
				}
			}
		}
		return buffers
	}
	for _, s := range p.shapes {
		f, err := r.newFeed(s)
		if err != nil {
			return r, err
		}
		r.shapes = append(r.shapes, f)
	}
	others := newHostBuffers([]shapes.Shape{
		shapes.Make(p.lossType), graph.RNGStateShape, shapes.Make(dtypes.Int32), shapes.Make(p.lossType),
	})
	if err != nil {
		for _, c := range others {
			c.close()
		}
		return r, err
	}
	r.weightSum, r.rng, r.examples, r.lossScale = others[0], others[1], others[2], others[3]
	r.rngTensor = tensor.Wrap(r.rng.mem, tensor.Uint64, 3)
	t, err := fromGoMLX(p.lossType)
	if err != nil {
		return r, err
	}
	r.weightSumTensor, r.lossScaleTensor = tensor.Wrap(r.weightSum.mem, t), tensor.Wrap(r.lossScale.mem, t)
	r.stats, r.results = tensor.New(t, 1+p.sums), make([]float64, 1+p.sums)
	if !p.backend.HasSharedBuffers() {
		for _, v := range p.variables[:p.parameters] {
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
		if c, err = newHostBuffer(r.p.backend, r.device.num, like.shape); err != nil {
			return nil
		}
		made = append(made, c)
		d, err = fromGoMLX(like.shape.DType)
		return tensor.Wrap(c.mem, d, rows...)
	}
	of := r.shapes[0]
	for _, c := range of.inputs {
		b.Inputs = append(b.Inputs, one(c, c.shape.Dimensions))
	}
	for _, c := range of.labels {
		b.Labels = append(b.Labels, one(c, c.shape.Dimensions))
	}
	weights := one(of.weights, of.weights.shape.Dimensions)
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
	r.choose(b.Inputs, b.Labels, false)
	of := r.current
	if err := r.take("input", r.feedInputs, of.inputs, of.Inputs, b.Inputs); err != nil {
		return err
	}
	if err := r.take("label", r.feedLabels, of.labels, of.Labels, b.Labels); err != nil {
		return err
	}
	if len(b.Weights) != of.Rows {
		return fmt.Errorf("gomlx: %d weights for replica %d: want one per row, %d", len(b.Weights), r.index, of.Rows)
	}
	if b.Padding < 0 || b.Padding > of.Rows {
		return fmt.Errorf("gomlx: padding of %d rows for replica %d: want 0 to %d", b.Padding, r.index, of.Rows)
	}
	if !(weightSum > 0) {
		return fmt.Errorf("gomlx: weight sum %v of the global batch: want a positive number; a batch of weight 0 has no "+
			"mean: skip it", weightSum)
	}
	r.feedWeights = r.hostBufferOf(tensor.HostMemory(b.Weights), of.weights)
	setScalar(r.weightSumTensor, weightSum)
	tensor.Data[int32](tensor.Wrap(r.examples.mem, tensor.Int32))[0] = int32(of.Rows - b.Padding)
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
		if err := sameRows(t, f.DType, r.current.Rows, f.Shape); err != nil {
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

// run runs a program on the replica's device with its current values and input buffers. It takes the device's
// turn. Programs read the values that the gradients program has set in this step, before they are committed: so
// micro-batches continue each other's averages, and updates read a learning rate that a schedule in the model
// function has set, as in GoMLX's trainer, which has one program for both.
//
// take, if not nil, receives the outputs of x.buckets, which are nil in the result. donate, if not nil, lists the
// arguments whose memory results may take; the caller must forget their buffers, even after an error.
func (r *replica) run(ctx context.Context, x *executable, take stages.Take, donate []bool) (
	out []compute.Buffer, err error,
) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("gomlx: %s: %w", r.nameOf(x), context.Cause(ctx))
	}
	if err := x.compile(); err != nil {
		return nil, err
	}
	r.device.turn.Lock()
	defer r.device.turn.Unlock()
	r.args = r.args[:0]
	for _, a := range x.args {
		b, err := r.argument(a, x.inference)
		if err != nil {
			return nil, fmt.Errorf("gomlx: arguments of %s: %w", r.nameOf(x), err)
		}
		r.args = append(r.args, b)
	}
	doing := r.doing[x]
	if doing == "" {
		doing = "run " + r.nameOf(x)
		r.doing[x] = doing
	}
	err = catch(doing, func() error {
		if p, ok := x.exe.(stages.Program); ok {
			out, err = r.runProgram(ctx, p, take)
			return err
		}
		if out, err = x.exe.Execute(r.args, donate, r.device.num); err != nil || take == nil {
			return err
		}
		for k, outputs := range x.buckets {
			list := make([]compute.Buffer, len(outputs))
			for i, o := range outputs {
				list[i], out[o] = out[o], nil
			}
			if err := take(k, list); err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

func (r *replica) nameOf(x *executable) string {
	return fmt.Sprintf("the %s program of replica %d", x.name, r.index)
}

func (r *replica) argument(a argument, inference bool) (compute.Buffer, error) {
	switch a.kind {
	case inputArg:
		return r.feedInputs[a.index].load()
	case labelArg:
		return r.feedLabels[a.index].load()
	case weightsArg:
		return r.feedWeights.load()
	case weightSumArg:
		return r.weightSum.load()
	case lossScaleArg:
		return r.lossScale.load()
	case examplesArg:
		return r.examples.load()
	case rngArg:
		return r.rng.load()
	case gradientArg:
		return r.gradientArgument(a.index)
	}
	switch {
	case !inference && r.pendingAverages[a.index] != nil:
		return r.pendingAverages[a.index], nil
	case r.p.central != nil:
		return r.device.copyCentral(a.index)
	case r.averages[a.index] != nil:
		return r.averages[a.index], nil
	}
	b, err := r.device.value(a.index)
	if err == nil && b == nil {
		err = r.device.noValue(a.index)
	}
	return b, err
}

// gradientArgument returns a complete gradient on the device.
func (r *replica) gradientArgument(i int) (compute.Buffer, error) {
	if r.gradients[i] != nil {
		return r.gradients[i], nil
	}
	b, err := r.device.upload(i, r.memory[i])
	if err == nil {
		r.uploads = append(r.uploads, b)
	}
	return b, err
}

func (r *replica) freeUploads() {
	for _, b := range r.uploads {
		release(b)
	}
	r.uploads = r.uploads[:0]
}

// computeGradients implements [engine.Program.Gradients].
func (r *replica) computeGradients(ctx context.Context, m engine.Micro, ready func(bucket int),
) (engine.Scalars, error) {
	if m.Add && !r.added {
		return engine.Scalars{}, fmt.Errorf("gomlx: Micro.Add is set, but replica %d has no gradients to add to: the step's "+
			"first micro-batch must not set it, and a failed one must be discarded", r.index)
	}
	if !m.Add {
		r.discard() // results of a step that was neither committed nor discarded
	}
	added := r.added
	r.begun, r.added = true, false // added stays false if anything fails
	clear(r.memory)
	scale := m.LossScale
	switch {
	case scale == 0:
		scale = 1
	case !isScale(scale) || !isScale(1/scale):
		return engine.Scalars{}, fmt.Errorf("gomlx: Micro.LossScale is %v: want a positive number that is finite in "+
			"float32, like its inverse, or 0 for 1", scale)
	}
	if err := r.feed(m.Batch, m.WeightSum); err != nil {
		return engine.Scalars{}, err
	}
	setScalar(r.lossScaleTensor, scale)
	copy(tensor.Data[uint64](r.rngTensor), m.RNG[:])
	x := r.current.gradients
	if x == nil {
		return engine.Scalars{}, errNotTraining
	}
	out, err := r.run(ctx, x, func(k int, gradients []compute.Buffer) error {
		if err := r.addGradients(k, gradients, added, scale); err != nil || !m.Last {
			return err
		}
		return r.handOver(k, ready)
	}, nil)
	if err != nil {
		return engine.Scalars{}, err
	}
	release(r.losses)
	r.losses = out[1]
	for i, v := range x.changed {
		release(r.pendingAverages[v])
		r.pendingAverages[v] = out[firstGradient+r.p.parameters+i]
	}
	s, err := r.scalars(out[0])
	r.added = err == nil
	return s, err
}

// isScale reports whether x is positive and finite in float32, in which gradients are multiplied.
func isScale(x float64) bool { return float32(x) > 0 && float32(x) <= math.MaxFloat32 }

// step implements [engine.Program.Step].
func (r *replica) step(ctx context.Context, m engine.Micro) (engine.Scalars, bool, error) {
	r.discard()
	r.begun = true // gradients of a whole step have no memory
	if err := r.feed(m.Batch, m.WeightSum); err != nil {
		return engine.Scalars{}, false, err
	}
	copy(tensor.Data[uint64](r.rngTensor), m.RNG[:])
	x := r.current.step
	if x == nil {
		return engine.Scalars{}, false, errNotTraining
	}
	out, err := r.run(ctx, x, nil, nil)
	if err != nil {
		return engine.Scalars{}, false, err
	}
	const first = 3 // loss and metrics, losses, whether the gradients are finite
	r.losses = out[1]
	for i, v := range x.changed {
		pending := r.device.pending
		if r.p.variables[v].Role == engine.Average {
			pending = r.pendingAverages
		}
		release(pending[v])
		pending[v] = out[first+i]
	}
	var finite [1]int32
	err = out[2].ToFlatData(finite[:])
	release(out[2])
	if err != nil {
		release(out[0])
		return engine.Scalars{}, false, fmt.Errorf("gomlx: fetch whether gradients are finite: %w", err)
	}
	s, err := r.scalars(out[0])
	return s, finite[0] != 0, err
}

// addGradients takes the gradients of a bucket, divides them by scale, and adds them to those of earlier
// micro-batches if add is set.
func (r *replica) addGradients(bucket int, gradients []compute.Buffer, add bool, scale float64) error {
	for j, i := range r.p.buckets[bucket].Parameters {
		b := gradients[j]
		to, from, err := r.takeGradient(i, b, add)
		if err != nil {
			for _, x := range gradients[j:] {
				if x != r.gradients[i] {
					release(x)
				}
			}
			return err
		}
		if scale != 1 {
			multiply(from, 1/scale)
		}
		if add {
			a, b := to.Memory().Ptr, from.Memory().Ptr
			kernel.Reduce(kernel.Sum, to.DType(), a, a, b, to.Len())
		}
		if r.staged != nil || add {
			release(b)
		}
	}
	return nil
}

// takeGradient returns the memory of a parameter's sum, and that of the gradient to be added to it, which is the
// same if add is not set.
func (r *replica) takeGradient(i int, b compute.Buffer, add bool) (to, from *tensor.Tensor, err error) {
	v := r.p.variables[i]
	if r.staged == nil {
		if !add {
			r.gradients[i] = b
		}
		if from, err = viewOf(b, v.Variable, v.shape, r.device.num); err != nil || !add {
			return from, from, err
		}
		to, err = viewOf(r.gradients[i], v.Variable, v.shape, r.device.num)
		return to, from, err
	}
	to, from = r.staged[i], r.staged[i]
	if add {
		if r.fetched == nil {
			r.fetched = make([]*tensor.Tensor, r.p.parameters)
		}
		if r.fetched[i] == nil {
			r.fetched[i] = tensor.New(v.DType, v.Shape...)
		}
		from = r.fetched[i]
	}
	if err := b.ToFlatData(flatOf(from.Memory(), v.shape.DType, from.Len())); err != nil {
		return nil, nil, fmt.Errorf("gomlx: fetch the gradient of %s: %w", v.Name, err)
	}
	return to, from, nil
}

// handOver gives the memory of a bucket's complete gradients to the caller.
func (r *replica) handOver(bucket int, ready func(bucket int)) error {
	for _, i := range r.p.buckets[bucket].Parameters {
		if r.staged != nil {
			r.memory[i] = r.staged[i]
			continue
		}
		v := r.p.variables[i]
		var err error
		if r.memory[i], err = viewOf(r.gradients[i], v.Variable, v.shape, r.device.num); err != nil {
			return err
		}
	}
	if ready != nil {
		ready(bucket)
	}
	return nil
}

// freeGradients frees the gradients of the step.
func (r *replica) freeGradients() {
	for i, b := range r.gradients {
		release(b)
		r.gradients[i] = nil
	}
	clear(r.memory)
}

// gradient implements [engine.Program.Gradient].
func (r *replica) gradient(i int) (*tensor.Tensor, error) {
	v := r.p.variables[i]
	switch {
	case r.memory[i] != nil:
		return r.memory[i], nil
	case r.begun:
		return nil, fmt.Errorf("gomlx: the gradient of %s on replica %d is incomplete: set Micro.Last in the step's last "+
			"micro-batch, and wait for ready of its bucket; after an error discard the step", v.Name, r.index)
	case r.staged != nil:
		clear(r.staged[i].Memory().HostBytes())
		r.memory[i] = r.staged[i]
		return r.memory[i], nil
	}
	c, err := newHostBuffer(r.p.backend, r.device.num, v.shape)
	if err != nil {
		return nil, err
	}
	r.gradients[i], r.memory[i] = c.buffer, tensor.Wrap(c.mem, v.DType, v.Shape...)
	return r.memory[i], nil
}

// multiply multiplies a gradient by a factor.
func multiply(t *tensor.Tensor, factor float64) {
	kernel.Multiply(t.DType(), t.Memory().Ptr, t.Len(), factor)
}

// scalars reads and frees the vector of loss and metrics.
func (r *replica) scalars(b compute.Buffer) (engine.Scalars, error) {
	err := b.ToFlatData(flatOf(r.stats.Memory(), r.p.lossType, r.stats.Len()))
	release(b)
	if err != nil {
		return engine.Scalars{}, fmt.Errorf("gomlx: fetch loss and metrics: %w", err)
	}
	if r.stats.DType() == tensor.Float32 {
		for i, x := range tensor.Data[float32](r.stats) {
			r.results[i] = float64(x)
		}
	} else {
		copy(r.results, tensor.Data[float64](r.stats))
	}
	return engine.Scalars{Loss: r.results[0], Metrics: r.results[1:]}, nil
}

// write sets the committed value of an average.
func (r *replica) write(v int, value *tensor.Tensor) error {
	b, err := r.device.upload(v, value)
	if err != nil {
		return err
	}
	release(r.averages[v])
	r.averages[v] = b
	return nil
}

// commit makes the uncommitted averages visible, and frees the step's other results. An update may have changed
// an average, too.
func (r *replica) commit() {
	for _, v := range r.p.gradients.changed {
		next := r.pendingAverages[v]
		switch {
		case next == nil:
			continue
		case r.p.keepsAverages(r):
			if r.device.pending[v] != nil {
				continue
			}
			r.device.set(v, next)
		case r.p.central != nil:
			continue
		default:
			if updated := r.device.pending[v]; updated != nil {
				release(next)
				next, r.device.pending[v] = updated, nil
			}
			release(r.averages[v])
			r.averages[v] = next
		}
		r.pendingAverages[v] = nil
	}
	r.discard()
}

// discard frees uncommitted results. It does not touch the device, where other replicas may be computing.
func (r *replica) discard() {
	for _, v := range r.p.gradients.changed {
		release(r.pendingAverages[v])
		r.pendingAverages[v] = nil
	}
	r.freeGradients()
	r.begun, r.added = false, false
	release(r.losses)
	r.losses = nil
}

func (r *replica) close() {
	r.discard()
	for _, b := range r.averages {
		release(b)
	}
	for _, list := range r.sums {
		for _, s := range list {
			s.close()
		}
	}
	for _, f := range r.shapes {
		f.close()
	}
	for _, c := range []*hostBuffer{r.weightSum, r.rng, r.examples, r.lossScale} {
		c.close()
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

// toHosts is toHost for the results of a call, or returns its error. It frees the buffers.
func toHosts(out []compute.Buffer, err error) ([]*tensor.Tensor, error) {
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
