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

// ReduceOp is the operation by which [AllReduce] combines the replicas' values.
type ReduceOp uint8

// The operations.
const (
	Sum ReduceOp = iota
	Mean
)

// AllReduce is a collective inside a model. It returns the sum or the mean of x over all replicas of the
// strategy, including those of other workers, in the shape of x. The result has the same bits on all
// replicas. x must be numeric, and floating-point for [Mean]. x is not weighted: a replica whose rows are all
// padding takes part like any other, so use [Examples] to exclude padding from x.
//
// AllReduce is differentiable in the same way as TensorFlow's ReplicaContext.all_reduce. The loss is the sum
// of the replicas' losses. Its gradient with respect to one replica's x is the sum (or mean), over replicas,
// of the gradients with respect to their results. It may be called any number of times, but not inside a
// condition or a loop. It works on every backend: the collectives are in the step's plan, or between the stages in
// which it is compiled.
//
// AllReduce is for training only: check Scope.IsTraining first. In evaluation and prediction the replicas do
// not wait for each other, and running a model that calls it is an error. With one replica, AllReduce returns
// x.
func AllReduce(x *graph.Node, op ReduceOp) *graph.Node {
	c := collectivesOf(x.Graph())
	switch {
	case op > Mean:
		panic(fmt.Errorf("gomlx.AllReduce: no operation %d: want Sum or Mean", op))
	case op == Mean && !x.DType().IsFloat():
		panic(fmt.Errorf("gomlx.AllReduce: cannot compute the mean of %s: want a floating-point type", x.DType()))
	case c == nil || c.replicas == 1:
		return x
	case c.replicas == 0:
		panic(errors.New("gomlx.AllReduce: the loss of a gomlx.Gradient is that of one replica: all-reduce the results of " +
			"Gradient.Of by distribute.AllReduce"))
	case c.recorder == nil:
		c.inference = true
		return x
	case !c.summable:
		panic(errors.New("gomlx.AllReduce: the model was compiled for several replicas without engine.Spec.Sum: set it"))
	}
	if d, err := fromGoMLX(x.DType()); err != nil || !d.IsNumeric() {
		panic(fmt.Errorf("gomlx.AllReduce: cannot sum %s: want a numeric type", x.DType()))
	}
	c.forward++
	y := c.sum(x, fmt.Sprintf("all_reduce_%d", c.forward))
	if op == Mean {
		y = graph.DivScalar(y, float64(c.replicas))
	}
	return y
}

// sum adds an all-reduce, whose gradient is also an all-reduce.
func (c *collectives) sum(x *graph.Node, name string) (y *graph.Node) {
	c.recorder.AllReduce(name, func() {
		y = graph.IdentityWithCustomGradient(x, func(_, v *graph.Node) *graph.Node { return c.sum(v, name+"/gradient") })
	})
	return y
}

// Replicas returns the number of replicas over which AllReduce adds in the model of graph g: those of all workers, or
// of one worker if the workers take inner steps of DiLoCo (train.DiLoCo). In the loss of a [Gradient] it is 0.
func Replicas(g *graph.Graph) int {
	if c := collectivesOf(g); c != nil {
		return c.replicas
	}
	return 1
}

// collectives is a graph's information about the other replicas.
type collectives struct {
	replicas  int              // 0: a Gradient, which knows no others
	summable  bool             // Spec.Sum is set
	recorder  *stages.Recorder // nil in inference
	forward   int              // all-reduces of the model function so far
	inference bool             // the model function calls AllReduce in inference
}

type collectivesKey struct{}

// collectivesOf returns nil for a graph that this package did not build.
func collectivesOf(g *graph.Graph) *collectives {
	c, _ := g.State(collectivesKey{}).(*collectives)
	return c
}

func (c *collectives) misused() error {
	if c == nil || !c.inference {
		return nil
	}
	return errors.New("the model function calls gomlx.AllReduce in inference, where replicas do not wait for each " +
		"other: call it only where Scope.IsTraining")
}

// replicas returns the number of replicas of the whole job.
func (bl *builder) replicas() int {
	if bl.spec.Replicas > 0 {
		return bl.spec.Replicas
	}
	return bl.spec.LocalReplicas()
}

// summed returns the number of replicas over which the model's own all-reduces add.
func (bl *builder) summed() int {
	if bl.spec.Summed > 0 {
		return bl.spec.Summed
	}
	return bl.replicas()
}

// overReplicas allows all-reduces in the graph of x, if there are other replicas.
func (bl *builder) overReplicas(x *executable) {
	x.g.AttachState(collectivesKey{}, &collectives{
		replicas: bl.summed(), summable: bl.spec.Sum != nil,
		recorder: x.recorder,
	})
}

// inference records in the graph of x that there are other replicas, but all-reduces are not allowed.
func (bl *builder) inference(x *executable) {
	x.g.AttachState(collectivesKey{}, &collectives{replicas: bl.summed()})
}

// sum is one all-reduce of a replica: its result and, if host and device share no memory, its operand.
type sum struct {
	name     string
	operand  *tensor.Tensor // nil if host and device share memory
	result   *hostBuffer
	resultAs *tensor.Tensor
}

func newSum(b *backend, device compute.DeviceNum, s stages.Sum) (*sum, error) {
	d, err := fromGoMLX(s.Shape.DType)
	if err != nil {
		return nil, err
	}
	c, err := newHostBuffer(b, device, s.Shape)
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

// view returns an operand as a tensor: a view, or a copy if host and device share no memory.
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

// runProgram runs a program with all-reduces or buckets on r.args.
func (r *replica) runProgram(ctx context.Context, p stages.Program, take stages.Take) ([]compute.Buffer, error) {
	for _, s := range p.Sums()[len(r.sums[p]):] {
		x, err := newSum(r.p.backend, r.device.num, s)
		if err != nil {
			return nil, fmt.Errorf("buffers of %s: %w", s.Name, err)
		}
		r.sums[p] = append(r.sums[p], x)
	}
	sums := r.sums[p]
	return p.Run(r.args, r.device.num, r.p.backend.name != "xla",
		func(which []int, buffers []compute.Buffer) ([]compute.Buffer, error) {
			return r.exchange(ctx, sums, which, buffers)
		}, take)
}

// exchange all-reduces operands over the replicas.
func (r *replica) exchange(ctx context.Context, all []*sum, which []int, operands []compute.Buffer) ([]compute.Buffer,
	error,
) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	var dst, src []*tensor.Tensor
	var names []string
	for i, k := range which {
		s := all[k]
		x, err := s.view(operands[i], r.device.num)
		if err != nil {
			return nil, fmt.Errorf("view the operand of %s: %w", s.name, err)
		}
		dst, src, names = append(dst, s.resultAs), append(src, x), append(names, s.name)
	}
	if err := r.allReduce(ctx, dst, src, names); err != nil {
		return nil, err
	}
	sums := make([]compute.Buffer, len(which))
	for i, k := range which {
		var err error
		if sums[i], err = all[k].result.load(); err != nil {
			return nil, fmt.Errorf("load the sum of %s: %w", all[k].name, err)
		}
	}
	return sums, nil
}

// allReduce calls Spec.Sum. Meanwhile the other replicas of the device may compute. The replica has its turn again
// when it returns, also by a panic.
func (r *replica) allReduce(ctx context.Context, dst, src []*tensor.Tensor, names []string) error {
	r.device.turn.Unlock()
	defer r.device.turn.Lock()
	return r.p.spec.Sum(ctx, r.index, dst, src, names)
}
