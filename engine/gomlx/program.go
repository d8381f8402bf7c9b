package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// variable is a variable of the program with its GoMLX shape.
type variable struct {
	engine.Variable
	shape shapes.Shape
}

// cell is a range of a variable's elements of which devices keep a value: all, or those of a piece.
type cell struct {
	variable // with the shape of the range, a vector if it is not all
	from, to int
}

// program implements [engine.Program].
type program struct {
	info       engine.Info
	backend    *backend
	spec       engine.Spec
	lossType   dtypes.DType
	metrics    []string
	sums       int        // of all metrics
	variables  []variable // parameters first
	cells      []cell     // all elements of each variable, then the ranges of divided slots
	parameters int
	buckets    []engine.Bucket

	*shape               // of the Spec, with its programs
	shapes      []*shape // all, that of the Spec first
	model       *Model
	pieces      []engine.Piece
	updates     []*updates // by shard
	ofUpdates   []bool     // by variable: an update of all parameters uses it
	wholeUpdate []string   // description of that update, if updates are sharded

	devices  []*device
	replicas []*replica
	central  *device // that keeps the only copy of every variable; nil: every device has one
	inPlace  bool    // Commit computes the update, in the memory of the old values
}

var _ engine.Program = (*program)(nil)

// open creates the devices and replicas, without values of the variables.
func (p *program) open() error {
	for i, d := range p.spec.Devices {
		x, err := newDevice(p, i, d)
		if err != nil {
			return err
		}
		x.place(p.shardsOn(i))
		p.devices = append(p.devices, x)
	}
	if err := p.openCentral(); err != nil {
		return err
	}
	return p.openReplicas()
}

func (p *program) openReplicas() error {
	for i := range p.spec.LocalReplicas() {
		r, err := newReplica(p, i, p.devices[p.spec.DeviceOf(i)])
		p.replicas = append(p.replicas, r)
		if err != nil {
			return err
		}
	}
	return nil
}

// shardOf returns the shard of a replica.
func (p *program) shardOf(replica int) int {
	if p.spec.Shards <= 1 {
		return 0
	}
	return p.spec.ReplicaShards[replica]
}

// shardsOn lists the shards of a device's replicas.
func (p *program) shardsOn(device int) (list []int) {
	for r := range p.spec.LocalReplicas() {
		if k := p.shardOf(r); p.spec.DeviceOf(r) == device && !slices.Contains(list, k) {
			list = append(list, k)
		}
	}
	return list
}

// Place implements [engine.Program].
func (p *program) Place(replicaDevices, replicaShards []int) error {
	spec := p.spec
	if spec.ReplicaDevices = append([]int{}, replicaDevices...); spec.Shards > 1 {
		spec.ReplicaShards = slices.Clone(replicaShards)
	}
	switch err := p.averagesNeedDevices(spec); {
	case err != nil:
		return fmt.Errorf("gomlx: place replicas: %w", err)
	case p.replicas == nil:
		return errors.New("gomlx: place replicas: the program is closed")
	case p.central != nil:
		return errors.New("gomlx: place replicas: Spec.Central is set: the replicas of central variables stay where they are")
	}
	for _, r := range p.replicas {
		r.close()
	}
	p.replicas, p.spec = nil, spec
	from := p.devices[slices.IndexFunc(p.devices, func(d *device) bool { return d.shards != nil })]
	for i, d := range p.devices {
		if shards := p.shardsOn(i); d.shards == nil && shards != nil {
			d.place(shards)
			if err := d.copyShared(from); err != nil {
				return err
			}
		}
	}
	for i, d := range p.devices {
		d.place(p.shardsOn(i))
	}
	return p.openReplicas()
}

// makeCells makes the cells, and maps the arguments and results of updates of pieces to them.
func (p *program) makeCells() {
	for _, v := range p.variables {
		p.cells = append(p.cells, cell{v, 0, v.shape.Size()})
	}
	for _, u := range p.updates {
		used := make([]bool, len(p.variables))
		for _, x := range append([]*executable{p.gradients, p.evaluate, p.predict}, u.programs...) {
			for _, a := range x.args {
				if a.kind == variableArg {
					used[a.index] = true
				}
			}
		}
		for _, x := range u.programs {
			for _, v := range x.changed {
				used[v] = true
			}
		}
		for v := range p.variables {
			c := v
			if p.variables[v].Role == engine.Slot && p.ofUpdates[v] && !used[v] {
				c = -1
			}
			u.cells = append(u.cells, c)
		}
		for _, x := range u.programs {
			for _, v := range x.divided {
				of := cell{p.variables[v], x.piece.From, x.piece.To}
				of.Shape = []int{of.to - of.from}
				of.shape = shapes.Make(of.shape.DType, of.Shape...)
				u.cells[v] = len(p.cells)
				p.cells = append(p.cells, of)
				for i, a := range x.args {
					if a == (argument{variableArg, v}) {
						x.args[i].index = u.cells[v]
					}
				}
				for i, changed := range x.changed {
					if changed == v {
						x.changed[i] = u.cells[v]
					}
				}
			}
		}
	}
}

// writeInitial writes the value of a variable on all devices and replicas that keep one.
func (p *program) writeInitial(v int, value *tensor.Tensor) error {
	if !p.mirrored(v) {
		for _, r := range p.replicas {
			if err := r.write(v, value); err != nil {
				return err
			}
		}
		return nil
	}
	for _, d := range p.devices {
		if p.central == nil || p.central == d {
			if err := d.write(v, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// adoptInitial sets the value of a variable to a buffer of the backend, if only one device keeps it, and all of it.
func (p *program) adoptInitial(v int, b func() (compute.Buffer, error)) (done bool, err error) {
	if len(p.devices) > 1 || p.central != nil || !p.mirrored(v) ||
		!slices.Equal(p.devices[0].cellsOf(v), []int{v}) {
		return false, nil
	}
	value, err := b()
	if err == nil {
		p.devices[0].set(v, value)
	}
	return true, err
}

// mirrored reports whether devices keep the value of a cell, not replicas.
func (p *program) mirrored(c int) bool {
	return p.cells[c].Role != engine.Average || p.spec.Central != nil
}

// programs lists the executables for the Spec's shape, and the updates.
func (p *program) programs() []*executable {
	return append(p.shape.programs(), p.allUpdates()...)
}

// allUpdates lists the update programs of all shards.
func (p *program) allUpdates() (list []*executable) {
	for _, u := range p.updates {
		list = append(list, u.programs...)
	}
	return list
}

// operations describes all compiled programs.
func (p *program) operations() []string {
	var list []string
	add := func(name string, lines []string) {
		for _, line := range lines {
			list = append(list, name+": "+line)
		}
	}
	for _, x := range p.programs() {
		if p.wholeUpdate == nil || slices.Contains([]*executable{p.gradients, p.evaluate, p.predict}, x) {
			add(x.name, x.description)
		}
	}
	add("update", p.wholeUpdate)
	return list
}

// Info implements [engine.Program].
func (p *program) Info() engine.Info { return p.info }

// Parameters implements [engine.Program].
func (p *program) Parameters() []engine.Variable { return p.describe(p.parameters) }

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

// Buckets implements [engine.Program].
func (p *program) Buckets() []engine.Bucket { return p.buckets }

// Parts implements [engine.Program].
func (p *program) Parts(device int) [][]int { return p.devices[device].parts }

// NewBatch implements [engine.Program].
func (p *program) NewBatch(replica int) (engine.Batch, error) {
	r, err := p.replica(replica)
	if err != nil {
		return engine.Batch{}, err
	}
	return r.newBatch()
}

// Gradients implements [engine.Program].
func (p *program) Gradients(ctx context.Context, replica int, m engine.Micro, ready func(bucket int)) (engine.Scalars,
	error,
) {
	r, err := p.replica(replica)
	if err != nil {
		return engine.Scalars{}, err
	}
	return r.computeGradients(ctx, m, ready)
}

// Step implements [engine.Program].
func (p *program) Step(ctx context.Context, m engine.Micro) (engine.Scalars, bool, error) {
	r, err := p.replica(0)
	switch {
	case err != nil:
		return engine.Scalars{}, false, err
	case p.step == nil:
		return engine.Scalars{}, false, errors.New("gomlx: a whole step in one program is for the xla engine and a job " +
			"with one replica")
	case m.Add || m.LossScale != 0 && m.LossScale != 1:
		return engine.Scalars{}, false, errors.New("gomlx: Micro.Add and Micro.LossScale need Gradients and Update, not Step")
	}
	return r.step(ctx, m)
}

// Gradient implements [engine.Program].
func (p *program) Gradient(replica, parameter int) (*tensor.Tensor, error) {
	r, err := p.replica(replica)
	if err != nil {
		return nil, err
	}
	if err := p.checkParameter(parameter); err != nil {
		return nil, err
	}
	return r.gradient(parameter)
}

// Update implements [engine.Program].
func (p *program) Update(ctx context.Context, device, replica, part int, factor float64) error {
	r, err := p.replica(replica)
	if err != nil {
		return err
	}
	d, err := p.device(device)
	switch {
	case err != nil:
		return err
	case r.device != d:
		return fmt.Errorf("gomlx: update device %d from the gradients of replica %d, which is on device %d: want a replica "+
			"of the device", device, replica, r.device.index)
	case part < 0 || part >= len(d.parts):
		return fmt.Errorf("gomlx: no part %d: device %d has %d", part, device, len(d.parts))
	case p.central != nil && p.central != d:
		return nil
	}
	return d.update(ctx, r, part, factor)
}

// Updated implements [engine.Program].
func (p *program) Updated(device, parameter int) (*tensor.Tensor, error) {
	d, err := p.device(device)
	if err != nil {
		return nil, err
	}
	if err := p.checkParameter(parameter); err != nil {
		return nil, err
	}
	return d.updated(parameter)
}

// Pieces implements [engine.Program].
func (p *program) Pieces() []engine.Piece { return p.pieces }

// Kept implements [engine.Program].
func (p *program) Kept(replica, variable int) (from, to int) {
	c := p.cellOf(replica, variable)
	if c < 0 {
		return 0, 0
	}
	return p.cells[c].from, p.cells[c].to
}

// cellOf returns the cell with the elements that a replica's device keeps for it, or -1.
func (p *program) cellOf(replica, variable int) int {
	return p.updates[p.shardOf(replica)].cells[variable]
}

// Commit implements [engine.Program].
func (p *program) Commit() {
	for _, d := range p.devices {
		d.updateInPlace()
	}
	for _, r := range p.replicas {
		r.commit()
	}
	for _, d := range p.devices {
		d.commit()
	}
}

// Discard implements [engine.Program].
func (p *program) Discard() {
	for _, r := range p.replicas {
		r.discard()
	}
	for _, d := range p.devices {
		d.discard()
	}
}

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
	out, err := r.run(ctx, r.current.evaluate, nil, nil)
	if err != nil {
		return 0, nil, err
	}
	release(r.losses)
	r.losses = out[1]
	s, err := r.scalars(out[0])
	return s.Loss, slices.Clone(s.Metrics), err
}

// Losses implements [engine.Program].
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

// Predict implements [engine.Program].
func (p *program) Predict(ctx context.Context, replica int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error) {
	r, err := p.replica(replica)
	if err != nil {
		return nil, err
	}
	r.choose(inputs, nil, true)
	if err := r.take("input", r.feedInputs, r.current.inputs, r.current.Inputs, inputs); err != nil {
		return nil, err
	}
	r.fixedRandom()
	return toHosts(r.run(ctx, r.current.predict, nil, nil))
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
	switch {
	case p.central != nil:
		return p.central.read(variable)
	case p.mirrored(variable):
		c := p.cellOf(replica, variable)
		if c < 0 {
			return nil, fmt.Errorf("gomlx: read variable %s on replica %d: %w", p.variables[variable].Name, replica,
				engine.ErrNotOwned)
		}
		return r.device.read(c)
	}
	return toHost(r.averages[variable])
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
	v := p.variables[variable]
	if err := sameType(value, v.DType, v.Shape); err != nil {
		if c := p.cellOf(replica, variable); c >= len(p.variables) && sameType(value, v.DType, p.cells[c].Shape) == nil {
			return r.device.writeCell(c, value)
		}
		return fmt.Errorf("gomlx: write variable %s: %w", v.Name, err)
	}
	switch {
	case p.central != nil:
		return p.central.write(variable, value)
	case p.mirrored(variable):
		return r.device.write(variable, value)
	}
	return r.write(variable, value)
}

// Close implements [engine.Program].
func (p *program) Close() error {
	for _, r := range p.replicas {
		r.close()
	}
	for _, d := range p.devices {
		d.close()
	}
	p.replicas, p.devices = nil, nil
	for _, x := range p.allUpdates() {
		x.close()
	}
	for _, s := range p.shapes {
		s.close()
	}
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

func (p *program) device(i int) (*device, error) {
	if p.devices == nil {
		return nil, errors.New("gomlx: the program is closed")
	}
	if i < 0 || i >= len(p.devices) {
		return nil, fmt.Errorf("gomlx: no device %d: the program has %d", i, len(p.devices))
	}
	return p.devices[i], nil
}

func (p *program) checkVariable(i int) error {
	if i < 0 || i >= len(p.variables) {
		return fmt.Errorf("gomlx: no variable %d: the program has %d", i, len(p.variables))
	}
	return nil
}

func (p *program) checkParameter(i int) error {
	if i < 0 || i >= p.parameters {
		return fmt.Errorf("gomlx: no parameter %d: the program has %d", i, p.parameters)
	}
	return nil
}
