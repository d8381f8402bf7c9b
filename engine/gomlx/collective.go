package gomlx

import (
	"context"
	"errors"
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ReduceOp says how [AllReduce] combines the replicas' values.
type ReduceOp uint8

// The operations.
const (
	Sum ReduceOp = iota
	Mean
)

// AllReduce is a collective inside of a model: it returns the sum or the mean of x over all replicas of the strategy,
// those of other workers included, of x's shape, the same bits on all of them. x must be of a numeric type, a
// floating-point one for [Mean], and is not weighted: a replica whose rows are all padding takes part as any other, so
// leave padding out of x by [Examples].
//
// It is differentiable as TensorFlow's ReplicaContext.all_reduce is: the gradient of the loss, which is the sum of the
// replicas' losses, with respect to one replica's x is the sum (or mean) over replicas of the gradients with respect to
// their results. It may be called any number of times, but not inside of a condition or a loop. The step is compiled in
// stages, with Lockstep's collectives between them, so it works on every backend.
//
// It belongs to training: in evaluation and prediction, where replicas do not wait for each other, a model that calls it
// is an error when it runs, so ask Scope.IsTraining first. With one replica x is returned.
func AllReduce(x *graph.Node, op ReduceOp) *graph.Node {
	c := collectivesOf(x.Graph())
	switch {
	case op > Mean:
		panic(fmt.Errorf("gomlx.AllReduce: no operation %d: want Sum or Mean", op))
	case op == Mean && !x.DType().IsFloat():
		panic(fmt.Errorf("gomlx.AllReduce: the mean of %s is none: want a floating-point type", x.DType()))
	case c == nil || c.replicas == 1:
		return x
	case c.recorder == nil:
		c.inference = true
		return x
	case !c.summable:
		panic(errors.New("gomlx.AllReduce: whoever compiles this model for several replicas has set no engine.Spec.Sum"))
	}
	if d, err := fromGoMLX(x.DType()); err != nil || !d.IsNumeric() {
		panic(fmt.Errorf("gomlx.AllReduce: %s has no sum: want a number", x.DType()))
	}
	c.forward++
	y := c.sum(x, fmt.Sprintf("all_reduce_%d", c.forward))
	if op == Mean {
		y = graph.DivScalar(y, float64(c.replicas))
	}
	return y
}

// sum adds an all-reduce. Its gradient is one too.
func (c *collectives) sum(x *graph.Node, name string) (y *graph.Node) {
	c.recorder.AllReduce(name, func() {
		y = graph.IdentityWithCustomGradient(x, func(_, v *graph.Node) *graph.Node { return c.sum(v, name+"/gradient") })
	})
	return y
}

// Replicas returns the number of replicas that train the model whose graph this is.
func Replicas(g *graph.Graph) int {
	if c := collectivesOf(g); c != nil {
		return c.replicas
	}
	return 1
}

// collectives is what a graph knows of the other replicas.
type collectives struct {
	replicas  int
	summable  bool             // there is a way to add up over replicas
	recorder  *stages.Recorder // nil in inference
	forward   int              // all-reduces of the model function so far
	inference bool             // the model function wants one in inference
}

type collectivesKey struct{}

// collectivesOf returns nil for a graph of another package.
func collectivesOf(g *graph.Graph) *collectives {
	c, _ := g.State(collectivesKey{}).(*collectives)
	return c
}

func (c *collectives) misused() error {
	if c == nil || !c.inference {
		return nil
	}
	return errors.New("the model function calls gomlx.AllReduce in inference, where replicas do not wait for each other: call it only where Scope.IsTraining")
}

// replicas returns the number of replicas of the whole job.
func (bl *builder) replicas() int {
	if bl.spec.Replicas > 0 {
		return bl.spec.Replicas
	}
	return len(bl.spec.Devices)
}

// overReplicas lets the graph of x have all-reduces, if there are other replicas.
func (bl *builder) overReplicas(x *executable) {
	x.g.AttachState(collectivesKey{}, &collectives{replicas: bl.replicas(), summable: bl.spec.Sum != nil, recorder: x.recorder})
}

// inference lets the graph of x know that there are other replicas.
func (bl *builder) inference(x *executable) {
	x.g.AttachState(collectivesKey{}, &collectives{replicas: bl.replicas()})
}

// sum is one all-reduce of a replica: its operand, where host and device share no memory, and its result.
type sum struct {
	name     string
	operand  *tensor.Tensor // nil where the backend's memory is the host's
	result   *cell
	resultAs *tensor.Tensor
}

func newSum(b *backend, device compute.DeviceNum, s stages.Sum) (*sum, error) {
	d, err := fromGoMLX(s.Shape.DType)
	if err != nil {
		return nil, err
	}
	c, err := newCell(b, device, s.Shape)
	if err != nil {
		return nil, err
	}
	x := &sum{name: s.Name, result: c, resultAs: tensor.Wrap(c.mem, d, s.Shape.Dimensions...)}
	if !b.HasSharedBuffers() {
		x.operand = tensor.New(d, s.Shape.Dimensions...)
	}
	return x, nil
}

func (s *sum) close() {
	if s != nil {
		s.result.close()
	}
}

// view returns an operand as a tensor, where it lies or as a copy.
func (s *sum) view(b compute.Buffer, device compute.DeviceNum) (*tensor.Tensor, error) {
	if s.operand != nil {
		return s.operand, b.ToFlatData(flatOf(s.operand.Memory(), s.result.shape.DType, s.operand.Len()))
	}
	flat, err := b.Data()
	if err != nil {
		return nil, err
	}
	return tensor.Wrap(memoryOf(flat, s.result.shape, int(device)), s.resultAs.DType(), s.resultAs.Shape()...), nil
}

// runStages runs a program with all-reduces, with r.args.
func (r *replica) runStages(ctx context.Context, p *stages.Program) ([]compute.Buffer, error) {
	for _, s := range p.Sums()[len(r.sums):] {
		x, err := newSum(r.p.backend, r.device, s)
		if err != nil {
			return nil, fmt.Errorf("buffers of %s: %w", s.Name, err)
		}
		r.sums = append(r.sums, x)
	}
	return p.Run(r.args, r.device, r.p.backend.recycles, func(which []int, buffers []compute.Buffer) ([]compute.Buffer, error) {
		return r.exchange(ctx, which, buffers)
	})
}

// exchange adds up operands over the replicas.
func (r *replica) exchange(ctx context.Context, which []int, operands []compute.Buffer) ([]compute.Buffer, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	var dst, src []*tensor.Tensor
	var names []string
	for i, k := range which {
		s := r.sums[k]
		x, err := s.view(operands[i], r.device)
		if err != nil {
			return nil, fmt.Errorf("see the operand of %s: %w", s.name, err)
		}
		dst, src, names = append(dst, s.resultAs), append(src, x), append(names, s.name)
	}
	if err := r.p.spec.Sum(ctx, r.index, dst, src, names); err != nil {
		return nil, err
	}
	sums := make([]compute.Buffer, len(which))
	for i, k := range which {
		var err error
		if sums[i], err = r.sums[k].result.load(); err != nil {
			return nil, fmt.Errorf("load the sum of %s: %w", r.sums[k].name, err)
		}
	}
	return sums, nil
}
