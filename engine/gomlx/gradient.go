package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Gradient computes a loss and its gradients on one replica (TensorFlow's GradientTape), for a step of your own in
// distribute.Run. All methods may be called concurrently, so one Gradient serves all replicas.
type Gradient struct {
	b    *backend
	loss func(parameters, inputs []*graph.Node) *graph.Node

	mu     sync.RWMutex // held for reading by Of, for writing by Close
	closed bool

	building sync.Mutex // guards programs
	programs map[string]*executable
}

// maxGradientShapes is the number of different shapes of the arguments for which a Gradient is compiled.
const maxGradientShapes = 64

// NewGradient returns the Gradient of a loss on an engine that this package opened. The caller must close it.
//
// The loss is a GoMLX graph function. It gets a node for each of the tensors that are given to [Gradient.Of], and
// returns a floating-point scalar. It must use no other variables and no [AllReduce]. It is called once for every
// combination of shapes, on the goroutine that uses it first.
func NewGradient(e engine.Engine, loss func(parameters, inputs []*graph.Node) *graph.Node) (*Gradient, error) {
	b, ok := e.(*backend)
	switch {
	case !ok:
		return nil, fmt.Errorf("gomlx: a gradient of this package cannot run on engine %T: open one with gomlx.Open", e)
	case loss == nil:
		return nil, errors.New("gomlx: the loss function of NewGradient is nil")
	}
	return &Gradient{b: b, loss: loss, programs: map[string]*executable{}}, nil
}

// Of computes on device d, such as Strategy.EngineDevices()[Replica.LocalID()]. It returns the loss, and for each of
// the parameters its gradient, of the same dtype and shape; the gradient is 0 if the loss does not depend on the
// parameter. Inputs have no gradient. The results are new tensors of this replica alone: distribute.AllReduce combines
// them. The arguments are only read, until Of returns.
//
// The loss is compiled when shapes and dtypes are first used, for at most 64 combinations. Calls of other goroutines
// wait meanwhile. A panic of the loss function becomes a [*ModelError]. ctx is read when Of begins: a computation is
// not interrupted.
func (x *Gradient) Of(ctx context.Context, d engine.Device, parameters, inputs []*tensor.Tensor) (
	loss *tensor.Tensor, gradients []*tensor.Tensor, err error,
) {
	if ctx.Err() != nil {
		return nil, nil, fmt.Errorf("gomlx: gradient: %w", context.Cause(ctx))
	}
	num, err := x.b.deviceNum(d)
	if err != nil {
		return nil, nil, err
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	if x.closed {
		return nil, nil, errors.New("gomlx: the gradient is closed")
	}
	list, err := argumentShapes(parameters, inputs)
	if err != nil {
		return nil, nil, err
	}
	program, err := x.program(list, len(parameters))
	if err != nil {
		return nil, nil, err
	}
	args := make([]compute.Buffer, len(list))
	defer func() {
		for _, b := range args {
			release(b)
		}
	}()
	for i, t := range slices.Concat(parameters, inputs) {
		args[i], err = x.b.BufferFromFlatData(num, flatOf(t.Memory(), list[i].DType, t.Len()), list[i])
		if err != nil {
			return nil, nil, fmt.Errorf("gomlx: gradient: %s: %w", argumentName(i, len(parameters)), err)
		}
	}
	var out []compute.Buffer
	err = catch("run the gradient", func() (err error) {
		out, err = program.exe.Execute(args, nil, num)
		return err
	})
	results, err := toHosts(out, err)
	if err != nil {
		return nil, nil, err
	}
	return results[0], results[1:], nil
}

// argumentShapes returns the shapes of a Gradient's arguments, parameters first.
func argumentShapes(parameters, inputs []*tensor.Tensor) ([]shapes.Shape, error) {
	if len(parameters) == 0 {
		return nil, errors.New("gomlx: gradient: no parameters: give those that the gradients are of")
	}
	var list []shapes.Shape
	for i, t := range slices.Concat(parameters, inputs) {
		name := argumentName(i, len(parameters))
		if t == nil {
			return nil, fmt.Errorf("gomlx: gradient: %s is nil", name)
		}
		d, err := toGoMLX(t.DType())
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w (%s of a gradient)", err, name)
		case i < len(parameters) && !d.IsFloat():
			return nil, fmt.Errorf("gomlx: gradient: %s is of %v: want a floating-point type, or give it as an input", name,
				t.DType())
		case t.Len() == 0:
			return nil, fmt.Errorf("gomlx: gradient: %s of shape %s has no elements: on a replica without examples, give zeros "+
				"to the all-reduce instead", name, tensor.FormatShape(t.Shape()))
		}
		list = append(list, shapes.Make(d, t.Shape()...))
	}
	return list, nil
}

func argumentName(i, parameters int) string {
	if i < parameters {
		return fmt.Sprintf("parameter %d", i)
	}
	return fmt.Sprintf("input %d", i-parameters)
}

// program returns the program for arguments of these shapes, of which the first are parameters.
func (x *Gradient) program(list []shapes.Shape, parameters int) (*executable, error) {
	key := fmt.Sprint(parameters, list)
	x.building.Lock()
	defer x.building.Unlock()
	if p := x.programs[key]; p != nil {
		return p, nil
	}
	if len(x.programs) == maxGradientShapes {
		return nil, fmt.Errorf("gomlx: gradient: the arguments have had %d combinations of shapes, and now %v: pad the "+
			"inputs to fewer shapes, since each is compiled", maxGradientShapes, list)
	}
	bl := &builder{b: x.b, spec: engine.Spec{Replicas: 1}}
	p := bl.newExecutable("gradient")
	err := catch("build the gradient", func() error { return x.build(p, list, parameters) })
	if err == nil {
		err = p.compile()
	}
	if err != nil {
		p.close()
		return nil, err
	}
	x.programs[key] = p
	return p, nil
}

// build builds the graph of the loss and its gradients.
func (x *Gradient) build(p *executable, list []shapes.Shape, parameters int) error {
	p.g.AttachState(collectivesKey{}, &collectives{}) // refuses AllReduce
	nodes := make([]*graph.Node, len(list))
	for i, s := range list {
		nodes[i] = graph.Parameter(p.g, argumentName(i, parameters), s)
	}
	loss := x.loss(nodes[:parameters:parameters], nodes[parameters:])
	switch {
	case loss == nil || !loss.IsScalar() || !loss.DType().IsFloat():
		return fmt.Errorf("the loss is %s: want a floating-point scalar, such as graph.ReduceAllMean of a value per example",
			shapeOf(loss))
	case p.g.NumParameters() != len(list):
		return fmt.Errorf("the loss function uses %q, a variable or parameter that was not given: want all as parameters or "+
			"inputs of Gradient.Of", p.g.GetParameterByHandle(graph.ParameterHandle(len(list))).GetParameterName())
	}
	p.outputs = append([]*graph.Node{loss}, graph.Gradient(loss, nodes[:parameters]...)...)
	return nil
}

// Close frees the compiled programs, after calls in progress. It must be called before the engine is closed.
func (x *Gradient) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	for _, p := range x.programs {
		p.close()
	}
	x.programs = nil
	return nil
}
