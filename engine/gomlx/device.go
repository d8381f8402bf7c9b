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

	shards   []int         // that it updates: those of its replicas; nil: it has none
	parts    [][]int       // the parameters of each update
	programs []*executable // the updates
	foreign  []bool        // by parameter: it is not updated as a whole, but joined of pieces

	// turn is held while a program runs on the device, except while a replica waits for an all-reduce of the
	// model. So several replicas compute in turn.
	turn sync.Mutex

	values   []compute.Buffer // by cell: the committed values; nil: not kept, or not written yet
	deferred *replica         // whose gradients Commit applies, with program.inPlace; nil: none
	pending  []compute.Buffer // by cell: uncommitted values of the updates; nil if none
	replaced []int            // the cells that the updates set
	kept     []int            // the foreign parameters, whose old values become memory for new ones
	spare    []compute.Buffer // by parameter that is kept: memory for its next value; nil if none
	own      []bool           // by parameter that is kept: the committed value can become a spare

	// Where host and device share no memory, Updated lends a host copy of a parameter. The value on the device
	// is out of date from Commit until it is needed.
	lent   []*tensor.Tensor // by parameter; nil: none yet
	dirty  []bool           // lent in this step
	mu     sync.Mutex       // guards outdated, because other devices read the central one
	behind []bool           // the committed value is in lent, and not on the device

	versions []uint64 // by cell: how often the central copy was written
	copied   []uint64 // by cell: the version of the central copy that values holds
}

func newDevice(p *program, index int, d engine.Device) (x *device, err error) {
	n := len(p.cells)
	x = &device{
		p: p, index: index, foreign: make([]bool, p.parameters),
		values: make([]compute.Buffer, n), pending: make([]compute.Buffer, n),
		lent: make([]*tensor.Tensor, p.parameters), dirty: make([]bool, p.parameters), behind: make([]bool, p.parameters),
		versions: make([]uint64, n), copied: make([]uint64, n),
		spare: make([]compute.Buffer, p.parameters), own: make([]bool, n),
	}
	x.num, err = p.backend.deviceNum(d)
	return x, err
}

// place sets the shards of the device's replicas; nil: it has no replica. It frees the values that it does not keep.
func (d *device) place(shards []int) {
	d.discard()
	d.shards, d.parts, d.programs, d.replaced, d.kept = shards, nil, nil, nil, nil
	keeps, set := make([]bool, len(d.p.cells)), make([]bool, len(d.p.cells))
	for _, k := range shards {
		u := d.p.updates[k]
		d.parts, d.programs = append(d.parts, u.parts...), append(d.programs, u.programs...)
		for _, c := range u.cells {
			if c >= 0 {
				keeps[c] = true
			}
		}
	}
	whole := make([]bool, d.p.parameters)
	for _, x := range d.programs {
		for _, c := range x.changed {
			if set[c] = d.p.mirrored(c); c < len(whole) {
				whole[c] = x.piece == nil
			}
		}
	}
	for i := range whole {
		release(d.spare[i])
		d.spare[i], d.foreign[i] = nil, !whole[i]
		if d.foreign[i] {
			d.kept = append(d.kept, i)
		}
	}
	clear(d.own)
	for c, keep := range keeps {
		if set[c] && (c >= len(whole) || whole[c]) {
			d.replaced = append(d.replaced, c)
		}
		if keep {
			continue
		}
		release(d.values[c])
		if d.values[c] = nil; c < len(d.behind) {
			d.behind[c] = false
		}
	}
}

// copyShared sets what all replicas share to the values of another device.
func (d *device) copyShared(from *device) error {
	for v := range d.p.variables {
		if !d.p.mirrored(v) || len(d.cellsOf(v)) == 0 || from.values[v] == nil {
			continue
		}
		value, err := from.read(v)
		if err == nil {
			err = d.writeCell(v, value)
		}
		if err != nil {
			return fmt.Errorf("gomlx: copy variable %s to device %d: %w", d.p.variables[v].Name, d.index, err)
		}
	}
	return nil
}

// cellsOf lists the cells of a variable that the device keeps.
func (d *device) cellsOf(v int) (list []int) {
	for _, k := range d.shards {
		if c := d.p.updates[k].cells[v]; c >= 0 && !slices.Contains(list, c) {
			list = append(list, c)
		}
	}
	return list
}

// update runs the update program of a part with the gradients of r.
func (d *device) update(ctx context.Context, r *replica, part int, factor float64) error {
	x, parameters := d.programs[part], d.parts[part]
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
	x := d.programs[0]
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
	x, parameters := d.programs[part], d.parts[part]
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

// value returns the committed value of a cell on the device.
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
	x := d.p.cells[v]
	b, err := d.p.backend.BufferFromFlatData(d.num, flatOf(t.Memory(), x.shape.DType, t.Len()), x.shape)
	if err != nil {
		return nil, fmt.Errorf("gomlx: write variable %s on device %d: %w", x.Name, d.index, err)
	}
	return b, nil
}

// read returns a copy of the value of a cell.
func (d *device) read(c int) (*tensor.Tensor, error) {
	b, err := d.value(c)
	if err == nil && b == nil {
		err = d.noValue(c)
	}
	if err != nil {
		return nil, err
	}
	return toHost(b)
}

// noValue returns the error of a use of a cell before it was written.
func (d *device) noValue(c int) error {
	return fmt.Errorf("gomlx: variable %s has no value on device %d: Write it after Place", d.p.cells[c].Name, d.index)
}

// write sets all elements of a variable that the device keeps.
func (d *device) write(v int, value *tensor.Tensor) error {
	for _, c := range d.cellsOf(v) {
		of, part := d.p.cells[c], value
		if of.to-of.from < value.Len() {
			part = value.Reshape(value.Len()).Rows(of.from, of.to)
		}
		if err := d.writeCell(c, part); err != nil {
			return err
		}
	}
	return nil
}

// writeCell sets the value of a cell.
func (d *device) writeCell(c int, value *tensor.Tensor) error {
	b, err := d.upload(c, value)
	if err == nil {
		d.set(c, b)
	}
	return err
}

// set replaces the committed value of a cell.
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
