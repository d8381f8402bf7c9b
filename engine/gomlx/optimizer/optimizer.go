package optimizer

import (
	"fmt"
	"math"
	"path"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// common holds the options that all optimizers share.
type common struct {
	rate     float64 // negative: from the hyperparameter "learning_rate", or fallback
	fallback float64
	schedule Schedule
	decay    float64
}

// rule is the part of an optimizer that differs between them.
type rule interface {
	// name returns the name of the optimizer, which is also the scope of its variables.
	name() string
	// validate returns an error if an option has an invalid value.
	validate() error
	// step computes, from a variable's gradient and slots, the step that one update subtracts from the
	// variable.
	step(u update, gradient *graph.Node, slot func(name string) *slot) *graph.Node
}

// update holds the scalars of one update.
type update struct {
	rate  *graph.Node
	count *graph.Node // of updates, including this one
}

// slot is a variable of the optimizer that belongs to a trained variable and has its shape. Its first value is 0.
type slot struct {
	variable *model.Variable
	graph    *graph.Graph
}

func (s *slot) value() *graph.Node { return s.variable.NodeValue(s.graph) }

// slotOf returns the slot of a name in a scope.
func slotOf(scope *model.Scope, name string, shape shapes.Shape, g *graph.Graph) *slot {
	return &slot{scope.WithInitializer(initializer.Zero).VariableWithShape(name, shape).SetTrainable(false), g}
}

// set sets the slot's next value, and returns it.
func (s *slot) set(next *graph.Node) *graph.Node {
	s.variable.SetNodeValue(next)
	return next
}

// built is a configured optimizer.
type built struct {
	common
	rule
}

var (
	_ optimizer.Interface         = (*built)(nil)
	_ train.OptimizeWithGradients = (*built)(nil)
)

// String returns the optimizer's name, for errors.
func (b *built) String() string { return b.name() }

// UpdateGraph implements GoMLX's optimizer.Interface.
func (b *built) UpdateGraph(scope *model.Scope, _ *graph.Graph, loss *graph.Node) {
	updateByLoss(b, scope, loss)
}

// updateByLoss builds the update of an optimizer by the gradients of a loss.
func updateByLoss(o train.OptimizeWithGradients, scope *model.Scope, loss *graph.Node) {
	if !loss.Shape().IsScalar() {
		panic(fmt.Errorf("optimizer %v: the loss has shape %s: want a scalar", o, loss.Shape()))
	}
	o.UpdateGraphWithGradients(scope, scope.BuildTrainableVariablesGradientsGraph(loss), loss.DType())
}

// trained lists the trainable variables that a graph uses.
func trained(scope *model.Scope, g *graph.Graph) (list []*model.Variable) {
	for v := range scope.IterVariables() {
		if v.Trainable && v.InUseByGraph(g) {
			list = append(list, v)
		}
	}
	return list
}

// atLeastFloat32 returns the type in which to compute: 8 or 11 bits of precision are too few for counts and averages.
func atLeastFloat32(dtype dtypes.DType) dtypes.DType {
	if dtype == dtypes.Float16 || dtype == dtypes.BFloat16 {
		return dtypes.Float32
	}
	return dtype
}

// UpdateGraphWithGradients implements GoMLX's train.OptimizeWithGradients. The gradients are those of the
// trainable variables that the graph uses, in the order of scope.IterVariables.
func (b *built) UpdateGraphWithGradients(scope *model.Scope, gradients []*graph.Node, lossType dtypes.DType) {
	if err := b.check(); err != nil {
		panic(fmt.Errorf("optimizer %s: %w", b.name(), err))
	}
	var g *graph.Graph
	var variables []*model.Variable
	if len(gradients) > 0 {
		g = gradients[0].Graph()
		variables = trained(scope, g)
	}
	if len(gradients) == 0 || len(gradients) != len(variables) {
		panic(fmt.Errorf("optimizer %s: %d gradients for %d trainable variables in use: want one for each, and at least one",
			b.name(), len(gradients), len(variables)))
	}
	dtype := atLeastFloat32(lossType)
	u := b.begin(scope, g, dtype)
	for i, v := range variables {
		b.updateVariable(scope, u, v, gradients[i], dtype)
	}
}

// begin increments the count of updates and sets the learning rate.
func (b *built) begin(scope *model.Scope, g *graph.Graph, dtype dtypes.DType) update {
	rate := b.rate
	if rate < 0 {
		rate = model.GetParamOr(scope, optimizer.ParamLearningRate, b.fallback)
	}
	variable := optimizer.LearningRateVar(scope, dtype, rate)
	u := update{count: optimizer.IncrementGlobalStep(g, dtype)}
	if b.schedule != nil {
		variable.SetNodeValue(b.schedule(graph.MinusOne(u.count)))
	}
	u.rate = variable.NodeValue(g)
	return u
}

// updateVariable sets the next values of v and its slots. It computes in dtype.
func (b *built) updateVariable(
	scope *model.Scope, u update, v *model.Variable, gradient *graph.Node, dtype dtypes.DType,
) {
	g := gradient.Graph()
	gradient = graph.ConvertDType(gradient, dtype)
	optimizer.TraceNaNInGradients(scope, v, gradient)
	gradient = optimizer.ClipNaNsInGradients(scope, gradient)
	step := b.step(u, gradient, func(name string) *slot {
		shape := v.Shape().Clone()
		shape.DType = dtype
		return slotOf(scope.Store().Scope(path.Join("/", b.name(), v.Scope())), v.Name()+"_"+name, shape, g)
	})
	value := graph.ConvertDType(v.NodeValue(g), dtype)
	if b.decay > 0 {
		step = graph.Add(step, graph.Mul(graph.MulScalar(value, b.decay), u.rate))
	}
	next := graph.Sub(value, optimizer.ClipStepByValue(scope, step))
	next = optimizer.ClipNaNsInUpdates(scope, value, next)
	v.SetNodeValue(graph.ConvertDType(next, v.DType()))
}

// Clear deletes the optimizer's variables. It implements GoMLX's optimizer.Interface.
func (b *built) Clear(scope *model.Scope) error {
	return scope.Store().Scope(path.Join("/", b.name())).DeleteVariablesInScope()
}

func (b *built) check() error {
	if math.IsNaN(b.rate) || math.IsInf(b.rate, 0) {
		return fmt.Errorf("learning rate %v: want a finite number", b.rate)
	}
	if !(b.decay >= 0) {
		return fmt.Errorf("weight decay %v: want 0 or more", b.decay)
	}
	return b.validate()
}

// fraction returns an error unless x is at least 0 and below 1.
func fraction(what string, x float64) error {
	if !(x >= 0 && x < 1) {
		return fmt.Errorf("%s %v: want at least 0, and below 1", what, x)
	}
	return nil
}

// average is the exponential moving average old + (1-keep)·(now-old).
func average(old, now *graph.Node, keep float64) *graph.Node {
	return graph.Add(old, graph.MulScalar(graph.Sub(now, old), 1-keep))
}
