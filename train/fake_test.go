package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// fakeEngine computes on logical CPUs. Its models are linear regressions in plain Go.
type fakeEngine struct{ devices int }

func (fakeEngine) Name() string        { return "fake" }
func (fakeEngine) Description() string { return "linear regression in plain Go" }
func (fakeEngine) Close() error        { return nil }
func (e fakeEngine) Devices() (out []engine.Device) {
	for i := range e.devices {
		out = append(out, engine.Device{Kind: "CPU", Index: i})
	}
	return out
}

// fakeModel is y = x·weights + bias for x of two numbers, mean squared error, and SGD with momentum. It notes the mean
// of the inputs it saw as a sync-on-read average, and counts predictions within 1/2 of the label. All numbers are
// float64.
type fakeModel struct {
	rate  float64
	start float64                               // added to the initial values
	shift float64                               // times the average: added to the predictions in inference
	limit float64                               // of a scaled derivative in float16; 0: it computes in float64
	fail  func(phase string, replica int) error // may panic; nil: nothing fails
	ready func(r *fakeReplica, bucket int)      // called when a bucket was handed over; nil: nothing
	turn  bool                                  // swap the buckets
	quick bool                                  // it expects shorter steps with a sharded optimizer
}

// The fake's variables, as a program must list them: by role, then by name.
var fakeVariables = []engine.Variable{
	{Name: "bias", Role: engine.Parameter, DType: tensor.Float64, Shape: []int{}},
	{Name: "weights", Role: engine.Parameter, DType: tensor.Float64, Shape: []int{2}},
	{Name: "momentum/bias", Role: engine.Slot, DType: tensor.Float64, Shape: []int{}},
	{Name: "momentum/weights", Role: engine.Slot, DType: tensor.Float64, Shape: []int{2}},
	{Name: "seen", Role: engine.Average, DType: tensor.Float64, Shape: []int{}},
}

const fakeAverage = 4 // the index of the only variable that is not mirrored

func (m fakeModel) Compile(_ context.Context, _ engine.Engine, spec engine.Spec) (engine.Program, error) {
	if err := m.failed("compile", 0); err != nil {
		return nil, err
	}
	if spec.ShardIfFaster && !m.quick { // tests that shard ask for it
		spec.Shards, spec.ReplicaShards = 0, nil
	}
	p := &fakeProgram{model: m, spec: spec, pieces: engine.Pieces(fakeVariables[:2], max(spec.Shards, 1), false)}
	p.buckets = []engine.Bucket{{Parameters: []int{1}, Bytes: 16}, {Parameters: []int{0}, Bytes: 8}}
	if spec.Replicas == 1 {
		p.buckets = []engine.Bucket{{Parameters: []int{0, 1}, Bytes: 24}}
	}
	if m.turn {
		slices.Reverse(p.buckets)
	}
	for replica := range spec.LocalReplicas() {
		r := &fakeReplica{now: newFakeValues(), next: newFakeValues()}
		if d := spec.DeviceOf(replica); d < len(p.devices) { // the mirrored variables are its device's
			first := p.replicas[slices.Index(spec.ReplicaDevices, d)]
			copy(r.now[:fakeAverage], first.now)
			copy(r.next[:fakeAverage], first.next)
		} else {
			device := &fakeDevice{fakeReplica: r}
			for i, v := range p.Parameters() {
				device.updated = append(device.updated, tensor.Of(r.next[i], v.Shape...))
			}
			p.devices = append(p.devices, device)
			r.now[1][0] = float64(spec.Seed) + m.start
			copy(r.next[1], r.now[1])
		}
		for i := 2; i < fakeAverage; i++ { // what another shard owns must not be used
			if !p.ownedOn(spec.DeviceOf(replica), i) {
				for j := range r.now[i] {
					r.now[i][j], r.next[i][j] = math.NaN(), math.NaN()
				}
			}
		}
		r.gradients = []*tensor.Tensor{tensor.New(tensor.Float64), tensor.New(tensor.Float64, 2)}
		p.replicas = append(p.replicas, r)
	}
	return p, nil
}

func (m fakeModel) failed(phase string, replica int) error {
	if m.fail == nil {
		return nil
	}
	return m.fail(phase, replica)
}

type fakeValues [][]float64

func newFakeValues() (out fakeValues) {
	for _, v := range fakeVariables {
		out = append(out, make([]float64, tensor.New(v.DType, v.Shape...).Len()))
	}
	return out
}

type fakeReplica struct {
	now, next fakeValues
	gradients []*tensor.Tensor // by parameter
	own       [2]float64       // the weights' gradient before it is reduced
	shift     float64          // of the predictions
	losses    []float64        // of the rows of the last batch
}

// fakeDevice has the mirrored variables of its first replica.
type fakeDevice struct {
	*fakeReplica
	updated   []*tensor.Tensor // by parameter: next
	computing atomic.Int32     // replicas in Gradients
	updates   int
}

// gradient returns the elements of a parameter's gradient.
func (r *fakeReplica) gradient(parameter int) []float64 {
	return tensor.Data[float64](r.gradients[parameter])
}

type fakeProgram struct {
	model    fakeModel
	spec     engine.Spec
	pieces   []engine.Piece // one for each parameter
	buckets  []engine.Bucket
	replicas []*fakeReplica
	devices  []*fakeDevice
	written  []string // the variables of the calls of Write

	mu     sync.Mutex
	added  []int                // rows of the shapes of AddShape
	states map[[3]uint64]string // random states that were used, and their users
	closed bool
}

// Info implements engine.Program. The rate is not a variable.
func (p *fakeProgram) Info() engine.Info {
	i := engine.Info{
		Operations: []string{
			"gradients: y = x·weights + bias", fmt.Sprintf("update: momentum, rate %v", p.model.rate), "update: return",
		},
		ComputeDType: tensor.Float64, LastStep: -1, LearningRate: -1,
	}
	if p.model.limit > 0 {
		i.ComputeDType = tensor.Float16
	}
	return i
}

// Step implements engine.Program.
func (p *fakeProgram) Step(context.Context, engine.Micro) (engine.Scalars, bool, error) {
	panic("Info.WholeStep is not set")
}

// Losses implements engine.Program.
func (p *fakeProgram) Losses(replica int) ([]float64, error) { return p.replicas[replica].losses, nil }

func (p *fakeProgram) Parameters() []engine.Variable { return fakeVariables[:2] }
func (p *fakeProgram) Variables() []engine.Variable  { return fakeVariables }
func (p *fakeProgram) Metrics() []string             { return []string{"near"} }
func (p *fakeProgram) Buckets() []engine.Bucket      { return p.buckets }
func (p *fakeProgram) Close() error                  { p.closed = true; return nil }

// Parts has a part for each bucket of which the device owns parameters.
func (p *fakeProgram) Parts(device int) (parts [][]int) {
	for _, b := range p.buckets {
		part := slices.DeleteFunc(slices.Clone(b.Parameters), func(i int) bool { return !p.ownedOn(device, 2+i) })
		if len(part) > 0 {
			parts = append(parts, part)
		}
	}
	return parts
}

// Pieces implements engine.Program.
func (p *fakeProgram) Pieces() []engine.Piece { return p.pieces }

// Kept implements engine.Program: a slot is kept with its parameter.
func (p *fakeProgram) Kept(replica, variable int) (from, to int) {
	if !p.owned(replica, variable) {
		return 0, 0
	}
	return 0, fakeVariables[variable].Bytes() / 8
}

// Place implements engine.Program.
func (p *fakeProgram) Place(_, _ []int) error { return errors.New("fake: the replicas stay") }

// ownedOn reports whether a device has a variable.
func (p *fakeProgram) ownedOn(device, variable int) bool {
	for r := range p.spec.LocalReplicas() {
		if p.spec.DeviceOf(r) == device && p.owned(r, variable) {
			return true
		}
	}
	return false
}

func (p *fakeProgram) owned(replica, variable int) bool {
	return p.spec.Shards < 2 || variable < 2 || variable >= fakeAverage ||
		p.pieces[variable-2].Owner == p.spec.ReplicaShards[replica]
}

// AddShape implements engine.Program.
func (p *fakeProgram) AddShape(_ context.Context, s engine.Shape) error {
	if err := p.model.failed("shape", 0); err != nil {
		return err
	}
	p.added = append(p.added, s.Rows)
	return nil
}

func (p *fakeProgram) NewBatch(int) (engine.Batch, error) {
	rows := func(features []engine.Feature) (out []*tensor.Tensor) {
		for _, f := range features {
			out = append(out, tensor.New(f.DType, stackedShape(p.spec.Rows, f.Shape)...))
		}
		return out
	}
	return engine.Batch{
		Inputs: rows(p.spec.Inputs), Labels: rows(p.spec.Labels), Weights: make([]float32, p.spec.Rows),
	}, nil
}

// forward returns loss and metric sums, and calls back with each row's weighted derivative.
func (p *fakeProgram) forward(r *fakeReplica, b engine.Batch, weightSum float64,
	row func(x []float64, w, d float64),
) (loss float64, near float64) {
	rows := len(b.Weights)
	if rows != p.spec.Rows && !slices.Contains(p.added, rows) || b.Inputs[0].Shape()[0] != rows ||
		b.Labels[0].Shape()[0] != rows {
		panic("a share has another number of rows than the program was compiled for")
	}
	x, y := tensor.Data[float64](b.Inputs[0]), tensor.Data[float64](b.Labels[0])
	r.losses = r.losses[:0]
	for i, w := range b.Weights {
		in := x[2*i : 2*i+2]
		d := predict(r, in) - y[i]
		r.losses = append(r.losses, d*d)
		loss += float64(w) * d * d / weightSum
		if math.Abs(d) <= 0.5 {
			near += float64(w)
		}
		row(in, float64(w), 2*d*float64(w)/weightSum)
	}
	return loss, near
}

func predict(r *fakeReplica, x []float64) float64 {
	return x[0]*r.now[1][0] + x[1]*r.now[1][1] + r.now[0][0] + r.shift
}

func (p *fakeProgram) Gradients(_ context.Context, replica int, m engine.Micro, ready func(bucket int),
) (engine.Scalars, error) {
	r, d := p.replicas[replica], p.devices[p.spec.DeviceOf(replica)]
	d.computing.Add(1)
	defer d.computing.Add(-1)
	p.note(replica, m.RNG)
	r.shift = 0
	if err := p.model.failed("gradients", replica); err != nil {
		return engine.Scalars{}, err
	}
	if !m.Add {
		copy(r.next[fakeAverage], r.now[fakeAverage])
		clear(r.gradient(0))
		clear(r.gradient(1))
	}
	bias, weights := r.gradient(0), r.gradient(1)
	loss, near := p.forward(r, m.Batch, m.WeightSum, func(x []float64, w, d float64) {
		if p.model.limit > 0 && math.Abs(d)*m.LossScale > p.model.limit {
			d = math.Inf(1)
		}
		bias[0] += d
		weights[0] += d * x[0]
		weights[1] += d * x[1]
		r.next[fakeAverage][0] += w * x[0]
	})
	r.own = [2]float64(weights)
	if m.Last && ready != nil {
		for k := range p.buckets {
			ready(k)
			if p.model.ready != nil {
				p.model.ready(r, k)
			}
		}
	}
	return engine.Scalars{Loss: loss, Metrics: []float64{near}}, nil
}

func (p *fakeProgram) Gradient(replica, parameter int) (*tensor.Tensor, error) {
	return p.replicas[replica].gradients[parameter], nil
}

func (p *fakeProgram) note(replica int, rng [3]uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.states == nil {
		p.states = map[[3]uint64]string{}
	}
	p.states[rng] += fmt.Sprintf("%d ", replica)
}

func (p *fakeProgram) Update(_ context.Context, device, replica, part int, factor float64) error {
	if err := p.model.failed(fmt.Sprintf("update %d", part), replica); err != nil {
		return err
	}
	r := p.devices[device]
	if p.spec.DeviceOf(replica) != device || r.computing.Load() > 0 {
		return fmt.Errorf("device %d is updated by replica %d while %d of its replicas compute", device, replica,
			r.computing.Load())
	}
	r.updates++
	for _, parameter := range p.Parts(device)[part] {
		for i, g := range p.replicas[replica].gradient(parameter) {
			m := 0.5*r.now[2+parameter][i] + factor*g
			r.next[2+parameter][i] = m
			r.next[parameter][i] = r.now[parameter][i] - p.model.rate*m
		}
	}
	return nil
}

func (p *fakeProgram) Updated(device, parameter int) (*tensor.Tensor, error) {
	return p.devices[device].updated[parameter], nil
}

func (p *fakeProgram) Commit() {
	for _, r := range p.replicas {
		for i := range r.now {
			copy(r.now[i], r.next[i])
		}
	}
}

func (p *fakeProgram) Discard() {
	for _, r := range p.replicas {
		for i := range r.now {
			copy(r.next[i], r.now[i])
		}
	}
}

func (p *fakeProgram) Evaluate(_ context.Context, replica int, b engine.Batch, weightSum float64,
) (float64, []float64, error) {
	if err := p.model.failed("evaluate", replica); err != nil {
		return 0, nil, err
	}
	p.infer(replica)
	loss, near := p.forward(p.replicas[replica], b, weightSum, func([]float64, float64, float64) {})
	return loss, []float64{near}, nil
}

func (p *fakeProgram) infer(replica int) {
	p.replicas[replica].shift = p.model.shift * p.replicas[replica].now[fakeAverage][0]
}

func (p *fakeProgram) Predict(_ context.Context, replica int, inputs []*tensor.Tensor) ([]*tensor.Tensor, error) {
	if err := p.model.failed("predict", replica); err != nil {
		return nil, err
	}
	p.infer(replica)
	x := tensor.Data[float64](inputs[0])
	rows := inputs[0].Shape()[0]
	if rows != p.spec.Rows && !slices.Contains(p.added, rows) {
		panic("inputs have another number of rows than the program was compiled for")
	}
	out := make([]float64, rows)
	for i := range out {
		out[i] = predict(p.replicas[replica], x[2*i:2*i+2])
	}
	return []*tensor.Tensor{tensor.Of(out, rows, 1), tensor.From(x, rows, 2)}, nil
}

func (p *fakeProgram) Read(replica, variable int) (*tensor.Tensor, error) {
	if err := p.model.failed("read", replica); err != nil {
		return nil, err
	}
	if !p.owned(replica, variable) {
		return nil, engine.ErrNotOwned
	}
	return tensor.From(p.replicas[replica].now[variable],
		len(p.replicas[replica].now[variable])).Reshape(fakeVariables[variable].Shape...), nil
}

func (p *fakeProgram) Write(replica, variable int, value *tensor.Tensor) error {
	p.written = append(p.written, fakeVariables[variable].Name)
	if !p.owned(replica, variable) {
		return nil
	}
	copy(p.replicas[replica].now[variable], tensor.Data[float64](value))
	copy(p.replicas[replica].next[variable], tensor.Data[float64](value))
	return nil
}

// fakeSharding is the Exchange of fakeConfig.
var fakeSharding Exchange

// fakeConfig is for a fakeModel.
func fakeConfig(globalBatch int) Config {
	return Config{
		Inputs:      []engine.Feature{{DType: tensor.Float64, Shape: []int{2}}},
		Labels:      []engine.Feature{{DType: tensor.Float64, Shape: []int{}}},
		GlobalBatch: globalBatch,
		Seed:        3,

		Exchange: fakeSharding,
	}
}

// newFake returns a trainer of a fakeModel over so many replicas, and its program.
func newFake(t testing.TB, replicas, globalBatch int, m fakeModel) (*Trainer, *fakeProgram) {
	t.Helper()
	return newFakeWith(t, replicas, fakeConfig(globalBatch), m)
}

// newFakeWith is newFake with a configuration.
func newFakeWith(t testing.TB, replicas int, cfg Config, m fakeModel) (*Trainer, *fakeProgram) {
	t.Helper()
	if m.rate == 0 {
		m.rate = 1.0 / 64
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{replicas}})
	if err != nil {
		t.Fatal(err)
	}
	trainer, err := New(t.Context(), s, m, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(trainer.Close(), s.Close()); err != nil {
			t.Error(err)
		}
	})
	return trainer, trainer.program.(*fakeProgram)
}

// share lets the trainer's replicas use the devices given, one each, of which there may be fewer.
func share(t testing.TB, trainer *Trainer, deviceOf ...int) *fakeProgram {
	t.Helper()
	old := trainer.program.(*fakeProgram)
	spec := old.spec
	spec.ReplicaDevices, spec.Devices = deviceOf, spec.Devices[:slices.Max(deviceOf)+1]
	spec.Shards, spec.ReplicaShards = 0, nil
	trainer.deviceOf, trainer.buckets, trainer.squares, trainer.table = deviceOf, nil, nil, nil
	trainer.devices = make([]*device, len(spec.Devices))
	for i := range trainer.devices {
		trainer.devices[i] = &device{}
	}
	for replica, i := range deviceOf {
		trainer.devices[i].replicas = append(trainer.devices[i].replicas, replica)
	}
	sharded, err := trainer.shardSpec(t.Context(), &spec)
	if err != nil {
		t.Fatal(err)
	}
	p, err := old.model.Compile(t.Context(), nil, spec)
	if err != nil {
		t.Fatal(err)
	}
	trainer.program = p
	if sharded, err = trainer.shardsChosen(t.Context(), sharded); err != nil {
		t.Fatal(err)
	}
	trainer.makeTable()
	if sharded {
		if err := trainer.divideSlots(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	trainer.shards = sharded
	trainer.plan()
	if err := trainer.openExchange(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p.(*fakeProgram)
}

// lineExamples returns n examples of y = 2*x0 - x1 + 1.
func lineExamples(n int) data.Batch {
	x, y := make([]float64, 2*n), make([]float64, n)
	for i := range n {
		x[2*i], x[2*i+1] = float64(i%7-3), float64(i*i%5-2)
		y[i] = 2*x[2*i] - x[2*i+1] + 1
	}
	return data.Batch{Inputs: []*tensor.Tensor{tensor.Of(x, n, 2)}, Labels: []*tensor.Tensor{tensor.Of(y, n)}}
}

// sizes returns a dataset of the examples of b, cut into batches of the sizes given.
func sizes(b data.Batch, rows ...int) data.Dataset {
	var out []data.Batch
	lo := 0
	for _, n := range rows {
		c := data.Batch{
			Inputs: []*tensor.Tensor{b.Inputs[0].Rows(lo, lo+n)},
			Labels: []*tensor.Tensor{b.Labels[0].Rows(lo, lo+n)},
		}
		if b.Weights != nil {
			c.Weights = b.Weights.Rows(lo, lo+n)
		}
		out = append(out, c)
		lo += n
	}
	return batches(out...)
}

// snapshot returns the values of all variables, by replica, with 0 for those that its device does not have.
func (p *fakeProgram) snapshot() []fakeValues {
	var out []fakeValues
	for replica, r := range p.replicas {
		var values fakeValues
		for i, v := range r.now {
			if !p.owned(replica, i) {
				v = make([]float64, len(v))
			}
			values = append(values, slices.Clone(v))
		}
		out = append(out, values)
	}
	return out
}
