package gomlx

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// inference implements [engine.Inference].
type inference struct {
	b         *backend
	device    compute.DeviceNum
	spec      engine.Spec
	x         *executable
	variables []variable
	random    compute.Buffer // the random state, the same in each call

	mu     sync.RWMutex // held for reading by Predict, for writing by Write and Close
	values []compute.Buffer
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
	bl, err := newBuilder(&alone, b, spec)
	if err != nil {
		return nil, err
	}
	p := &inference{b: b, device: num, spec: spec}
	if err := p.build(bl); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// build compiles the program and uploads the initial values.
func (p *inference) build(bl *builder) (err error) {
	if err := bl.masters(); err != nil {
		return err
	}
	if p.x, err = bl.prediction(); err != nil {
		return bl.explain(err)
	}
	if p.variables, err = bl.variables(); err != nil {
		return err
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
	p.values = make([]compute.Buffer, len(p.variables))
	if err := initialValues(bl.store, p.variables, p.Write); err != nil {
		return err
	}
	p.random, err = p.b.BufferFromFlatData(p.device, []uint64{uint64(p.spec.Seed), 0, 0}, graph.RNGStateShape)
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
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosedInference
	}
	b, err := p.b.BufferFromFlatData(p.device, flatOf(value.Memory(), v.shape.DType, value.Len()), v.shape)
	if err != nil {
		return fmt.Errorf("gomlx: write variable %s: %w", v.Name, err)
	}
	release(p.values[i])
	p.values[i] = b
	return nil
}

var errClosedInference = errors.New("gomlx: the model is closed")

// Predict implements [engine.Inference].
func (p *inference) Predict(ctx context.Context, inputs []*tensor.Tensor) (out []*tensor.Tensor, err error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("gomlx: predict: %w", context.Cause(ctx))
	}
	if len(inputs) != len(p.spec.Inputs) {
		return nil, fmt.Errorf("gomlx: predict: %d inputs, want %d", len(inputs), len(p.spec.Inputs))
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.closed {
		return nil, errClosedInference
	}
	fed := make([]compute.Buffer, len(inputs))
	defer func() {
		for _, b := range fed {
			release(b)
		}
	}()
	for i, f := range p.spec.Inputs {
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
	args := make([]compute.Buffer, len(p.x.args))
	for i, a := range p.x.args {
		switch a.kind {
		case inputArg:
			args[i] = fed[a.index]
		case rngArg:
			args[i] = p.random
		default:
			args[i] = p.values[a.index]
		}
	}
	var results []compute.Buffer
	err = catch("run predict", func() (err error) {
		results, err = p.x.exe.Execute(args, nil, p.device)
		return err
	})
	for _, b := range results {
		var t *tensor.Tensor
		if err == nil {
			t, err = toHost(b)
		}
		out = append(out, t)
		release(b)
	}
	return out, err
}

// Close implements [engine.Inference].
func (p *inference) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	for _, b := range append(p.values, p.random) {
		release(b)
	}
	if p.x != nil {
		p.x.close()
	}
	return nil
}
