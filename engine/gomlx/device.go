package gomlx

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// device is a device of the program with its copy of the mirrored variables.
type device struct {
	p     *program
	index int // into Spec.Devices
	num   compute.DeviceNum

	updates   *updates
	variables []variable // with the shapes of what the device keeps: vectors, of slots of which it has a piece
	ranges    [][2]int   // by variable: the elements that it keeps; none of slots of parameters that other shards own
	foreign   []bool     // by parameter: other shards own elements of it

	// turn is held while a program runs on the device, except while a replica waits for an all-reduce of the
	// model. So several replicas compute in turn.
	turn sync.Mutex

	values   []compute.Buffer // by variable: the committed values
	deferred *replica         // whose gradients Commit applies, with program.inPlace; nil: none
	pending  []compute.Buffer // by variable: uncommitted values of the updates; nil if none
	replaced []int            // the variables that the updates set
	kept     []int            // the foreign parameters, whose old values become memory for new ones
	spare    []compute.Buffer // by parameter that is kept: memory for its next value; nil if none
	own      []bool           // by parameter that is kept: the committed value can become a spare

	// Where host and device share no memory, Updated lends a host copy of a parameter. The value on the device
	// is out of date from Commit until it is needed.
	lent   []*tensor.Tensor // by parameter; nil: none yet
	dirty  []bool           // lent in this step
	mu     sync.Mutex       // guards outdated, because other devices read the central one
	behind []bool           // the committed value is in lent, and not on the device

	versions []uint64 // by variable: how often the central copy was written
	copied   []uint64 // by variable: the version of the central copy that values holds
}

func newDevice(p *program, index int, d engine.Device, u *updates) (*device, error) {
	n := len(p.variables)
	x := &device{
		p: p, index: index, updates: u, variables: slices.Clone(p.variables), ranges: make([][2]int, n),
		foreign: make([]bool, p.parameters),
		values:  make([]compute.Buffer, n), pending: make([]compute.Buffer, n),
		lent: make([]*tensor.Tensor, p.parameters), dirty: make([]bool, p.parameters), behind: make([]bool, p.parameters),
		versions: make([]uint64, n), copied: make([]uint64, n),
		spare: make([]compute.Buffer, p.parameters), own: make([]bool, n),
	}
	var err error
	if x.num, err = p.backend.deviceNum(d); err != nil {
		return nil, err
	}
	seen, used := make([]bool, n), make([]bool, n)
	whole := slices.Clone(seen) // parameters
	for _, y := range u.programs {
		for _, v := range y.changed {
			seen[v], used[v] = true, true
			whole[v] = y.piece == nil
		}
	}
	for _, x := range append([]*executable{p.gradients, p.evaluate, p.predict}, u.programs...) {
		for _, a := range x.args {
			if a.kind == variableArg {
				used[a.index] = true
			}
		}
	}
	for v := range n {
		if p.variables[v].Role != engine.Slot || !p.ofUpdates[v] || used[v] {
			x.ranges[v][1] = p.variables[v].shape.Size()
		}
		if v < p.parameters {
			x.foreign[v] = !whole[v]
		}
		if v < p.parameters && !whole[v] {
			x.kept = append(x.kept, v)
		}
	}
	for _, y := range u.programs {
		for _, v := range y.divided {
			x.ranges[v] = [2]int{y.piece.From, y.piece.To}
			of := &x.variables[v]
			of.Shape = []int{y.piece.To - y.piece.From}
			of.shape = shapes.Make(of.shape.DType, of.Shape...)
		}
	}
	for v, yes := range seen {
		if yes && !slices.Contains(x.kept, v) && p.mirrored(v) {
			x.replaced = append(x.replaced, v)
		}
	}
	return x, nil
}

// update runs the update program of a part with the gradients of r.
func (d *device) update(ctx context.Context, r *replica, part int, factor float64) error {
	x, parameters := d.updates.programs[part], d.updates.parts[part]
	for _, i := range parameters {
		if r.memory[i] == nil {
			return fmt.Errorf("gomlx: update of %s on device %d: replica %d has no gradient: compute it by Gradients with "+
				"Micro.Last, or fill the memory of Gradient, and neither Commit nor Discard in between",
				d.p.variables[i].Name, d.index, r.index)
		}
	}
	if factor != 1 {
		for _, i := range parameters {
			multiply(x.part(r.memory[i]), factor)
		}
	}
	if d.p.inPlace {
		if ctx.Err() != nil {
			return fmt.Errorf("gomlx: %s: %w", r.nameOf(x), context.Cause(ctx))
		}
		d.deferred = r
		return nil
	}
	return d.compute(ctx, r, part, nil)
}

// mayUpdateInPlace reports whether Commit can compute the update of the only replica. Then the step can fail no longer:
// so new values need no extra memory, and the results are the same.
func (p *program) mayUpdateInPlace() bool {
	u := p.updates[0]
	if p.spec.LocalReplicas() != 1 || p.spec.Replicas > 1 || p.spec.Shards > 1 || p.central != nil || p.step != nil ||
		len(u.programs) != 1 {
		return false
	}
	x, ok := u.programs[0].exe.(interface{ Planned() bool })
	return ok && x.Planned()
}

// updateInPlace computes the update that is deferred. It panics if the update does, since then values are lost.
func (d *device) updateInPlace() {
	r := d.deferred
	if r == nil {
		return
	}
	d.deferred = nil
	x := d.updates.programs[0]
	donate := make([]bool, len(x.args))
	for i, a := range x.args {
		donate[i] = a.kind == gradientArg ||
			a.kind == variableArg && d.p.mirrored(a.index) && slices.Contains(x.changed, a.index)
	}
	if err := d.compute(context.Background(), r, 0, donate); err != nil {
		panic(err)
	}
}

// compute runs the update program of a part. donate lists the arguments whose memory new values take; nil: none.
func (d *device) compute(ctx context.Context, r *replica, part int, donate []bool) error {
	x, parameters := d.updates.programs[part], d.updates.parts[part]
	out, err := r.run(ctx, x, nil, donate)
	r.freeUploads()
	for i := range donate {
		switch a := x.args[i]; {
		case !donate[i]:
		case a.kind == gradientArg:
			r.gradients[a.index], r.memory[a.index] = nil, nil
		default:
			d.values[a.index] = nil
		}
	}
	if err != nil {
		return err
	}
	for i, v := range x.changed {
		if x.piece != nil && v == x.piece.Parameter {
			if err = d.takePiece(x, out[i]); err != nil {
				return err
			}
			continue
		}
		release(d.pending[v]) // not nil for a step counter, or after a second update
		d.pending[v] = out[i]
	}
	if x.piece == nil {
		for _, i := range parameters {
			d.dirty[i] = false
		}
	}
	return nil
}

// part returns the elements of a parameter that x updates, of a tensor of all its elements.
func (x *executable) part(t *tensor.Tensor) *tensor.Tensor {
	if x.piece == nil {
		return t
	}
	return t.Reshape(t.Len()).Rows(x.piece.From, x.piece.To)
}

// takePiece copies the new values of a piece to the memory of the parameter's new value, and frees them.
func (d *device) takePiece(x *executable, b compute.Buffer) error {
	defer release(b)
	i := x.piece.Parameter
	whole, err := d.foreignMemory(i)
	if err != nil {
		return err
	}
	to := x.part(whole)
	if err := b.ToFlatData(flatOf(to.Memory(), d.p.variables[i].shape.DType, to.Len())); err != nil {
		return fmt.Errorf("gomlx: fetch new values of %s: %w", d.p.variables[i].Name, err)
	}
	return nil
}

// updated returns the memory of a parameter's new value.
func (d *device) updated(i int) (*tensor.Tensor, error) {
	if r := d.deferred; r != nil { // the caller may discard the values
		d.deferred = nil
		if err := d.compute(context.Background(), r, 0, nil); err != nil {
			return nil, err
		}
	}
	v, b := d.p.variables[i], d.pending[i]
	if d.foreign[i] {
		return d.foreignMemory(i)
	}
	if b == nil {
		return nil, fmt.Errorf("gomlx: device %d has no new value of %s: call Update of its part first", d.index, v.Name)
	}
	if d.p.backend.HasSharedBuffers() {
		return viewOf(b, v.Variable, v.shape, d.num)
	}
	if d.dirty[i] {
		return d.lent[i], nil
	}
	if _, err := d.value(i); err != nil { // before lent is overwritten
		return nil, err
	}
	if d.lent[i] == nil {
		d.lent[i] = tensor.New(v.DType, v.Shape...)
	}
	if err := b.ToFlatData(flatOf(d.lent[i].Memory(), v.shape.DType, d.lent[i].Len())); err != nil {
		return nil, fmt.Errorf("gomlx: fetch the new value of %s: %w", v.Name, err)
	}
	d.dirty[i] = true
	return d.lent[i], nil
}

// foreignMemory returns the memory for the new value of a parameter of which other shards own elements.
func (d *device) foreignMemory(i int) (*tensor.Tensor, error) {
	v := d.p.variables[i]
	if !d.p.backend.HasSharedBuffers() {
		if _, err := d.value(i); err != nil { // before lent is overwritten
			return nil, err
		}
		if d.lent[i] == nil {
			d.lent[i] = tensor.New(v.DType, v.Shape...)
		}
		d.dirty[i] = true
		return d.lent[i], nil
	}
	if d.pending[i] == nil {
		d.pending[i], d.spare[i] = d.spare[i], nil
	}
	if d.pending[i] == nil {
		c, err := newHostBuffer(d.p.backend, d.num, v.shape)
		if err != nil {
			return nil, err
		}
		d.pending[i] = c.buffer
	}
	return viewOf(d.pending[i], v.Variable, v.shape, d.num)
}

// value returns the committed value of a variable on the device.
func (d *device) value(v int) (compute.Buffer, error) {
	if v >= len(d.behind) {
		return d.values[v], nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.behind[v] {
		b, err := d.upload(v, d.lent[v])
		if err != nil {
			return nil, err
		}
		release(d.values[v])
		d.values[v], d.behind[v] = b, false
	}
	return d.values[v], nil
}

// upload copies a tensor to the device.
func (d *device) upload(v int, t *tensor.Tensor) (compute.Buffer, error) {
	x := d.variables[v]
	b, err := d.p.backend.BufferFromFlatData(d.num, flatOf(t.Memory(), x.shape.DType, t.Len()), x.shape)
	if err != nil {
		return nil, fmt.Errorf("gomlx: write variable %s on device %d: %w", x.Name, d.index, err)
	}
	return b, nil
}

// keeps reports whether the device keeps elements of a variable. It does of variables without any.
func (d *device) keeps(v int) bool {
	return d.ranges[v][1] > d.ranges[v][0] || d.p.variables[v].shape.Size() == 0
}

func (d *device) read(v int) (*tensor.Tensor, error) {
	if !d.keeps(v) {
		return nil, fmt.Errorf("gomlx: read variable %s on device %d: %w", d.p.variables[v].Name, d.index,
			engine.ErrNotOwned)
	}
	b, err := d.value(v)
	if err != nil {
		return nil, err
	}
	return toHost(b)
}

func (d *device) write(v int, value *tensor.Tensor) error {
	if !d.keeps(v) {
		return nil
	}
	if r := d.ranges[v]; r[1]-r[0] < value.Len() {
		value = value.Reshape(value.Len()).Rows(r[0], r[1])
	}
	b, err := d.upload(v, value)
	if err != nil {
		return err
	}
	d.set(v, b)
	return nil
}

// set replaces the committed value of a variable.
func (d *device) set(v int, b compute.Buffer) {
	release(d.values[v])
	d.values[v] = b
	d.versions[v]++
	d.own[v] = false
	if v < len(d.behind) {
		d.behind[v] = false
	}
}

// commit makes the new values visible and frees those that they replace. Averages that an update has changed
// were taken by their replica.
func (d *device) commit() {
	for _, v := range d.replaced {
		if next := d.pending[v]; next != nil {
			d.pending[v] = nil
			d.set(v, next)
		}
	}
	for _, i := range d.kept {
		next := d.pending[i]
		if next == nil {
			continue
		}
		if d.own[i] {
			d.spare[i], d.values[i] = d.values[i], nil
		}
		d.set(i, next)
		d.pending[i], d.own[i] = nil, true
	}
	for i, dirty := range d.dirty {
		if dirty {
			d.behind[i], d.dirty[i] = true, false
		}
	}
	d.discard() // averages that no replica took
}

// discard frees uncommitted results.
func (d *device) discard() {
	d.deferred = nil
	for _, i := range d.kept {
		if d.pending[i] != nil {
			d.spare[i], d.pending[i] = d.pending[i], nil
		}
	}
	for v, b := range d.pending {
		release(b)
		d.pending[v] = nil
	}
	clear(d.dirty)
}

func (d *device) close() {
	d.discard()
	for _, b := range append(d.values, d.spare...) {
		release(b)
	}
}

// viewOf returns a buffer as a tensor. Host and device share its memory.
func viewOf(b compute.Buffer, v engine.Variable, shape shapes.Shape, num compute.DeviceNum) (*tensor.Tensor, error) {
	flat, err := b.Data()
	if err != nil {
		return nil, fmt.Errorf("gomlx: view the memory of %s: %w", v.Name, err)
	}
	return tensor.Wrap(memoryOf(flat, shape, int(num)), v.DType, v.Shape...), nil
}
