package optimizer

import (
	"fmt"
	"math"
	"slices"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// Schedule builds the learning rate of an update from the number of previous updates. Both are scalars of the
// same floating-point dtype. The first update has number 0. After every update, the rate is stored in
// "/optimizers/learning_rate". The number is a variable of the optimizer, so a resumed training has the same rates.
//
// The functions that return a Schedule panic if they are called with numbers that make none.
type Schedule func(step *graph.Node) *graph.Node

// CosineDecay decreases the rate from initial to alpha·initial along half a cosine, over the given number of
// updates, and then keeps it constant. It is Keras' CosineDecay; GoMLX's cosineschedule restarts with the
// initial rate instead. Keras' warmup_target and warmup_steps are [LinearWarmup].
func CosineDecay(initial float64, steps int, alpha float64) Schedule {
	atLeastOne("CosineDecay", steps)
	return func(step *graph.Node) *graph.Node {
		progress := graph.DivScalar(graph.MinScalar(step, float64(steps)), float64(steps))
		return graph.MulScalar(graph.AddScalar(graph.MulScalar(halfCosine(progress), 1-alpha), alpha), initial)
	}
}

// CosineDecayRestarts decreases the rate like CosineDecay, over the given number of updates, and then starts again:
// each period is longMul times as long as the one before, and starts with highMul times its rate. It is Keras'
// CosineDecayRestarts, which calls them t_mul and m_mul (defaults 2 and 1), and PyTorch's
// CosineAnnealingWarmRestarts.
func CosineDecayRestarts(initial float64, steps int, longMul, highMul, alpha float64) Schedule {
	atLeastOne("CosineDecayRestarts", steps)
	if !(longMul >= 1) {
		panic(fmt.Sprintf("optimizer: CosineDecayRestarts with periods that grow by %v: want at least 1", longMul))
	}
	return func(step *graph.Node) *graph.Node {
		done := graph.DivScalar(step, float64(steps))
		var period, progress *graph.Node
		if longMul == 1 {
			period = graph.Floor(done)
			progress = graph.Sub(done, period)
		} else {
			// The sum of the first n periods, in units of the first one, is (longMulⁿ-1)/(longMul-1).
			period = graph.Floor(graph.DivScalar(graph.Log(graph.AddScalar(graph.MulScalar(done, longMul-1), 1)),
				math.Log(longMul)))
			length := power(longMul, period)
			before := graph.DivScalar(graph.AddScalar(length, -1), longMul-1)
			progress = graph.Div(graph.Sub(done, before), length)
		}
		highest := power(highMul, period)
		decayed := graph.AddScalar(graph.MulScalar(graph.Mul(highest, halfCosine(progress)), 1-alpha), alpha)
		return graph.MulScalar(decayed, initial)
	}
}

// LinearWarmup changes the rate from initial to target in a straight line, over the given number of updates, and then
// follows another schedule, whose updates count from there.
//
//	optimizer.LinearWarmup(0, 3e-4, 500, optimizer.CosineDecay(3e-4, 9500, 0.1))
//
// is Keras' CosineDecay(0, decay_steps=9500, alpha=0.1, warmup_target=3e-4, warmup_steps=500).
func LinearWarmup(initial, target float64, steps int, then Schedule) Schedule {
	atLeastOne("LinearWarmup", steps)
	if then == nil {
		then = Constant(target)
	}
	return func(step *graph.Node) *graph.Node {
		warm := graph.AddScalar(graph.MulScalar(graph.DivScalar(step, float64(steps)), target-initial), initial)
		rest := then(graph.MaxScalar(graph.AddScalar(step, float64(-steps)), 0))
		return graph.Where(less(step, float64(steps)), warm, rest)
	}
}

// Constant keeps the rate.
func Constant(rate float64) Schedule {
	return func(step *graph.Node) *graph.Node { return graph.Scalar(step.Graph(), step.DType(), rate) }
}

// ExponentialDecay multiplies the rate by factor once per the given number of updates: initial·factor^(step/steps).
// With staircase the exponent is rounded down, so that the rate changes only at multiples of steps. It is Keras'
// ExponentialDecay; PyTorch's ExponentialLR has steps 1.
func ExponentialDecay(initial float64, steps int, factor float64, staircase bool) Schedule {
	atLeastOne("ExponentialDecay", steps)
	return func(step *graph.Node) *graph.Node {
		return graph.MulScalar(power(factor, stairs(graph.DivScalar(step, float64(steps)), staircase)), initial)
	}
}

// StepDecay multiplies the rate by factor after each of the given number of updates. It is PyTorch's StepLR, with
// updates in place of epochs.
func StepDecay(initial float64, steps int, factor float64) Schedule {
	return ExponentialDecay(initial, steps, factor, true)
}

// InverseTimeDecay divides the rate: initial/(1+factor·step/steps). With staircase, step/steps is rounded down. It is
// Keras' InverseTimeDecay.
func InverseTimeDecay(initial float64, steps int, factor float64, staircase bool) Schedule {
	atLeastOne("InverseTimeDecay", steps)
	return func(step *graph.Node) *graph.Node {
		done := stairs(graph.DivScalar(step, float64(steps)), staircase)
		return graph.Div(graph.Scalar(step.Graph(), step.DType(), initial), graph.AddScalar(graph.MulScalar(done, factor), 1))
	}
}

// PolynomialDecay changes the rate from initial to end, over the given number of updates, and then keeps it constant:
// (initial-end)·(1-step/steps)^exponent + end. With cycle, steps is multiplied by the smallest integer that makes it
// at least step, so that the rate rises again. It is Keras' PolynomialDecay (defaults: end 0.0001, exponent 1); an
// exponent of 1 is a straight line, PyTorch's LinearLR.
func PolynomialDecay(initial float64, steps int, end, exponent float64, cycle bool) Schedule {
	atLeastOne("PolynomialDecay", steps)
	return func(step *graph.Node) *graph.Node {
		var progress *graph.Node
		if cycle {
			times := graph.MaxScalar(graph.Ceil(graph.DivScalar(step, float64(steps))), 1)
			progress = graph.Div(graph.DivScalar(step, float64(steps)), times)
		} else {
			progress = graph.DivScalar(graph.MinScalar(step, float64(steps)), float64(steps))
		}
		left := graph.OneMinus(progress)
		if exponent != 1 {
			left = graph.Pow(left, graph.Scalar(step.Graph(), step.DType(), exponent))
		}
		return graph.AddScalar(graph.MulScalar(left, initial-end), end)
	}
}

// PiecewiseConstant has the first rate up to and including the update of the first boundary, then the second, and so
// on. There is one rate more than boundaries, which ascend. It is Keras' PiecewiseConstantDecay. PyTorch's
// MultiStepLR changes the rate at a milestone, Keras after it.
func PiecewiseConstant(boundaries []int, rates []float64) Schedule {
	if len(rates) != len(boundaries)+1 || !slices.IsSorted(boundaries) {
		panic(fmt.Sprintf("optimizer: PiecewiseConstant with boundaries %v and rates %v: want ascending boundaries, and one "+
			"rate more", boundaries, rates))
	}
	boundaries, rates = slices.Clone(boundaries), slices.Clone(rates)
	return func(step *graph.Node) *graph.Node {
		rate := graph.Scalar(step.Graph(), step.DType(), rates[len(boundaries)])
		for i, boundary := range slices.Backward(boundaries) {
			rate = graph.Where(less(step, float64(boundary)+0.5), graph.Scalar(step.Graph(), step.DType(), rates[i]), rate)
		}
		return rate
	}
}

// OneCycleConfig configures [OneCycle]. The zero value of each field is PyTorch's default.
type OneCycleConfig struct {
	Max   float64 // the highest rate
	Steps int     // updates of the whole cycle (PyTorch's total_steps)
	// RiseShare is the share of the cycle in which the rate rises. Default: 0.3 (pct_start).
	RiseShare float64
	// DivFactor divides Max to give the first rate. Default: 25 (div_factor).
	DivFactor float64
	// FinalDivFactor divides the first rate to give the last one. Default: 10,000 (final_div_factor).
	FinalDivFactor float64
	// Linear selects straight lines instead of half cosines (anneal_strategy).
	Linear bool
}

// OneCycle raises the rate from Max/DivFactor to Max, and then decreases it to Max/(DivFactor·FinalDivFactor), which it
// keeps (Smith and Topin, 2017). It is PyTorch's OneCycleLR without three_phase and without its cycle of momentum.
func OneCycle(c OneCycleConfig) Schedule {
	atLeastOne("OneCycle", c.Steps)
	for _, option := range []struct {
		value *float64
		or    float64
	}{{&c.RiseShare, 0.3}, {&c.DivFactor, 25}, {&c.FinalDivFactor, 1e4}} {
		if *option.value == 0 {
			*option.value = option.or
		}
	}
	if !(c.RiseShare > 0 && c.RiseShare <= 1 && c.DivFactor > 0 && c.FinalDivFactor > 0) {
		panic(fmt.Sprintf("optimizer: OneCycle with RiseShare %v, DivFactor %v and FinalDivFactor %v: want a share up to 1, "+
			"and positive factors", c.RiseShare, c.DivFactor, c.FinalDivFactor))
	}
	first := c.Max / c.DivFactor
	last := first / c.FinalDivFactor
	top, end := c.RiseShare*float64(c.Steps)-1, float64(c.Steps-1)
	return func(step *graph.Node) *graph.Node {
		between := func(from, to, begin, end float64) *graph.Node {
			if !(end > begin) { // no update is inside it
				return graph.Scalar(step.Graph(), step.DType(), to)
			}
			progress := graph.MinScalar(graph.DivScalar(graph.AddScalar(step, -begin), end-begin), 1)
			if !c.Linear {
				progress = graph.OneMinus(halfCosine(progress))
			}
			return graph.AddScalar(graph.MulScalar(progress, to-from), from)
		}
		return graph.Where(less(step, top), between(first, c.Max, 0, top), between(c.Max, last, top, end))
	}
}

func atLeastOne(what string, steps int) {
	if steps < 1 {
		panic(fmt.Sprintf("optimizer: %s over %d steps: want at least 1", what, steps))
	}
}

// halfCosine falls from 1 to 0 while progress rises from 0 to 1.
func halfCosine(progress *graph.Node) *graph.Node {
	return graph.MulScalar(graph.OnePlus(graph.Cos(graph.MulScalar(progress, math.Pi))), 0.5)
}

func power(base float64, exponent *graph.Node) *graph.Node {
	return graph.Pow(graph.Scalar(exponent.Graph(), exponent.DType(), base), exponent)
}

func stairs(x *graph.Node, down bool) *graph.Node {
	if down {
		return graph.Floor(x)
	}
	return x
}

func less(x *graph.Node, limit float64) *graph.Node {
	return graph.LessThan(x, graph.Scalar(x.Graph(), x.DType(), limit))
}

// Scheduled gives any optimizer, such as one of GoMLX's ml/train/optimizer, a schedule of its learning rate. The
// optimizer must take its rate from "/optimizers/learning_rate" and count its updates in "/global_step", as GoMLX's
// do. The optimizers of this package have a method Schedule instead. GoMLX's stochastic gradient descent divides the
// rate by the square root of the step, unless it is configured WithDecay(false).
func Scheduled(o optimizer.Interface, s Schedule) optimizer.Interface {
	return &scheduled{wrapped{o}, s}
}

type scheduled struct {
	wrapped
	schedule Schedule
}

// UpdateGraphWithGradients implements GoMLX's train.OptimizeWithGradients.
func (s *scheduled) UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, lossType dtypes.DType) {
	dtype := atLeastFloat32(lossType)
	step := graph.ConvertDType(optimizer.GetGlobalStepVar(scope).NodeValue(gradients[0].Graph()), dtype)
	optimizer.LearningRateVar(scope, dtype, 0).SetNodeValue(s.schedule(step))
	s.inner().UpdateGraphWithGradients(scope, gradients, lossType)
}

// UpdateGraph implements GoMLX's optimizer.Interface.
func (s *scheduled) UpdateGraph(scope *model.Scope, g *graph.Graph, loss *graph.Node) {
	updateByLoss(s, scope, loss)
}
