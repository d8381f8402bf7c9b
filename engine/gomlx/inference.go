package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// inference implements [engine.Inference].
type inference struct {
	m         *Model
	b         *backend
	device    compute.DeviceNum
	spec      engine.Spec
	x         *executable
	variables []variable // of the values
	values    *inferenceValues
	shares    bool // the values are those of another inference, which closes them

	mu     sync.RWMutex // held for reading by Predict, for writing by Close
	closed bool

	updating sync.Mutex
	updates  map[stateForm]*graph.Graph // of new values of states; compiled on first use
}

// inferenceValues are the values of the variables, of all inferences of one model that share them.
type inferenceValues struct {
	mu     sync.RWMutex // held for reading by Predict, for writing by Write and Close; after inference.mu
	list   []compute.Buffer
	random compute.Buffer // the random state, the same in each call
	closed bool
}

var _ engine.InferenceModel = (*Model)(nil)

// CompileInference builds the predict program alone, for an engine that this package opened. It implements
// [engine.InferenceModel]. Loss, Optimizer and Metrics may be nil.
func (m *Model) CompileInference(ctx context.Context, e engine.Engine, spec engine.Spec) (engine.Inference, error) {
	b, ok := e.(*backend)
	switch {
	case !ok:
		return nil, fmt.Errorf("gomlx: a model of this package cannot run on engine %T: open one with gomlx.Open", e)
	case m.Forward == nil:
		return nil, errors.New("gomlx: Model.Forward is nil: set a model function")
	case len(spec.Devices) != 1:
		return nil, fmt.Errorf("gomlx: Spec.Devices has %d elements: want one device for predictions", len(spec.Devices))
	}
	num, err := b.deviceNum(spec.Devices[0])
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("gomlx: compile: %w", context.Cause(ctx))
	}
	alone := *m
	alone.Loss, spec.Labels, spec.Replicas = nil, nil, 1
	p := &inference{
		m: &alone, b: b, device: num, spec: spec, values: &inferenceValues{},
		updates: map[stateForm]*graph.Graph{},
	}
	if err := p.build(); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// ForInputs implements [engine.Inference].
func (p *inference) ForInputs(ctx context.Context, inputs []engine.Feature) (engine.Inference, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("gomlx: compile: %w", context.Cause(ctx))
	}
	q := &inference{
		m: p.m, b: p.b, device: p.device, spec: p.spec, values: p.values, variables: p.variables, shares: true,
		updates: map[stateForm]*graph.Graph{},
	}
	q.spec.Inputs = inputs
	if err := q.build(); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return q, nil
}

// build compiles the program and, if the values are not shared, uploads the initial ones.
func (p *inference) build() error {
	bl, err := newBuilder(p.m, p.b, p.spec)
	if err != nil {
		return err
	}
	if err := bl.masters(); err != nil {
		return err
	}
	if p.x, err = bl.prediction(); err != nil {
		return bl.explain(err)
	}
	own, err := bl.variables()
	if err != nil {
		return err
	}
	if !p.shares {
		p.variables = own
	}
	for _, v := range own {
		if !slices.ContainsFunc(p.variables, func(w variable) bool { return w.Name == v.Name && w.shape.Equal(v.shape) }) {
			return fmt.Errorf("gomlx: the model has for these inputs the variable %s of shape %s, which it has not for those "+
				"whose values it shares: want the same variables", v.Name, v.shape)
		}
	}
	index := map[string]int{}
	for i, v := range p.variables {
		index[v.Name] = i
	}
	if err := p.x.bind(index); err != nil {
		return err
	}
	for _, a := range p.x.args {
		if a.kind != variableArg && a.kind != inputArg && a.kind != rngArg {
			return fmt.Errorf("gomlx: the model function uses %s in prediction, which only training has", argPrefix[a.kind])
		}
	}
	if err := p.x.compile(); err != nil {
		return err
	}
	if p.shares {
		return nil
	}
	p.values.list = make([]compute.Buffer, len(p.variables))
	if err := initialValues(nil, bl.store, p.variables, p.Write, nil); err != nil {
		return err
	}
	p.values.random, err = p.b.BufferFromFlatData(p.device, []uint64{uint64(p.spec.Seed), 0, 0}, graph.RNGStateShape)
	return err
}

// Variables implements [engine.Inference].
func (p *inference) Variables() []engine.Variable {
	list := make([]engine.Variable, len(p.variables))
	for i, v := range p.variables {
		list[i] = v.Variable
	}
	return list
}

// Write implements [engine.Inference].
func (p *inference) Write(i int, value *tensor.Tensor) error {
	if i < 0 || i >= len(p.variables) {
		return fmt.Errorf("gomlx: no variable %d: the model has %d", i, len(p.variables))
	}
	v := p.variables[i]
	if err := sameType(value, v.DType, v.Shape); err != nil {
		return fmt.Errorf("gomlx: write variable %s: %w", v.Name, err)
	}
	p.values.mu.Lock()
	defer p.values.mu.Unlock()
	if p.values.closed {
		return errClosedInference
	}
	b, err := p.b.BufferFromFlatData(p.device, flatOf(value.Memory(), v.shape.DType, value.Len()), v.shape)
	if err != nil {
		return fmt.Errorf("gomlx: write variable %s: %w", v.Name, err)
	}
	release(p.values.list[i])
	p.values.list[i] = b
	return nil
}

var errClosedInference = errors.New("gomlx: the model is closed")

// Predict implements [engine.Inference].
func (p *inference) Predict(ctx context.Context, inputs []*tensor.Tensor) ([]*tensor.Tensor, error) {
	if len(inputs) != len(p.spec.Inputs) {
		return nil, fmt.Errorf("gomlx: predict: %d inputs, want %d", len(inputs), len(p.spec.Inputs))
	}
	end, err := p.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	return toHosts(p.execute(inputs, nil))
}

// begin keeps the program and the values of the variables until end.
func (p *inference) begin(ctx context.Context) (end func(), err error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("gomlx: predict: %w", context.Cause(ctx))
	}
	p.mu.RLock()
	p.values.mu.RLock()
	end = func() {
		p.values.mu.RUnlock()
		p.mu.RUnlock()
	}
	if p.closed || p.values.closed {
		end()
		return nil, errClosedInference
	}
	return end, nil
}

// execute runs the program, between begin and its end. kept are the last inputs, after inputs.
func (p *inference) execute(inputs []*tensor.Tensor, kept []compute.Buffer) (results []compute.Buffer, err error) {
	fed := make([]compute.Buffer, len(inputs), len(inputs)+len(kept))
	defer func() {
		for _, b := range fed[:len(inputs)] {
			release(b)
		}
	}()
	for i, f := range p.spec.Inputs[:len(inputs)] {
		if err := sameRows(inputs[i], f.DType, p.spec.Rows, f.Shape); err != nil {
			return nil, fmt.Errorf("gomlx: predict: input %d: %w", i, err)
		}
		shape, err := batchShape(f, p.spec.Rows)
		if err != nil {
			return nil, err
		}
		if fed[i], err = p.b.BufferFromFlatData(p.device, flatOf(inputs[i].Memory(), shape.DType, inputs[i].Len()),
			shape); err != nil {
			return nil, fmt.Errorf("gomlx: predict: input %d: %w", i, err)
		}
	}
	fed = append(fed, kept...)
	args := make([]compute.Buffer, len(p.x.args))
	for i, a := range p.x.args {
		switch a.kind {
		case inputArg:
			args[i] = fed[a.index]
		case rngArg:
			args[i] = p.values.random
		default:
			args[i] = p.values.list[a.index]
		}
	}
	err = catch("run predict", func() (err error) {
		results, err = p.x.exe.Execute(args, nil, p.device)
		return err
	})
	return results, err
}

// Close implements [engine.Inference].
func (p *inference) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	if !p.shares {
		p.values.close()
	}
	if p.x != nil {
		p.x.close()
	}
	for _, g := range p.updates {
		g.Finalize()
	}
	return nil
}

func (v *inferenceValues) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	for _, b := range append(v.list, v.random) {
		release(b)
	}
	v.list = nil
}
