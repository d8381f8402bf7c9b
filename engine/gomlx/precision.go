package gomlx

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
)

// Precision is the type in which a model computes: see [Model.Precision].
type Precision string

// The precisions, under Keras' names. The empty Precision computes in the types of the inputs, as GoMLX does.
const (
	Float32       Precision = "float32"
	MixedBFloat16 Precision = "mixed_bfloat16"
	MixedFloat16  Precision = "mixed_float16"
)

// Precisions lists the precisions.
var Precisions = []Precision{Float32, MixedBFloat16, MixedFloat16}

// width returns the dtype in which the layers compute, or InvalidDType for that of the inputs.
func (p Precision) width() (dtypes.DType, error) {
	switch p {
	case "", Float32:
		return dtypes.InvalidDType, nil
	case MixedBFloat16:
		return dtypes.BFloat16, nil
	case MixedFloat16:
		return dtypes.Float16, nil
	}
	names := make([]string, len(Precisions))
	for i, known := range Precisions {
		names[i] = string(known)
	}
	return dtypes.InvalidDType, fmt.Errorf("gomlx: Model.Precision is %q: want one of %s", p, strings.Join(names, ", "))
}

// widthKey is the key of the dtype in which a graph's layers compute, of a mixed precision. The float32 model
// that only makes the variables has float32.
type widthKey struct{}

// ComputeDType returns the dtype in which the layers of a mixed-precision model compute in the graph that is being
// built: bfloat16 or float16, and float32 in models of other precisions. Model functions whose inputs are integers
// pass it to their embeddings.
func ComputeDType(g *graph.Graph) dtypes.DType {
	if d, ok := g.State(widthKey{}).(dtypes.DType); ok {
		return d
	}
	return dtypes.Float32
}

// VariableDType returns the dtype for the variables of a layer that computes at least in float32 whatever the
// dtype of its input x is, such as batch normalization: float32 in a mixed-precision model, otherwise that of x.
func VariableDType(x *graph.Node) dtypes.DType {
	if _, mixed := x.Graph().State(widthKey{}).(dtypes.DType); mixed {
		return dtypes.Float32
	}
	return x.DType()
}

// cast converts the floating-point inputs of a mixed-precision model to the type in which it computes.
func (bl *builder) cast(g *graph.Graph, inputs []*graph.Node) []*graph.Node {
	if bl.width == dtypes.InvalidDType {
		return inputs
	}
	g.AttachState(widthKey{}, bl.width)
	list := slices.Clone(inputs)
	for i, x := range list {
		if x.DType().IsFloat() {
			list[i] = graph.ConvertDType(x, bl.width)
		}
	}
	return list
}

// masters makes the variables of a mixed-precision model. It builds the programs in float32, as if the policy
// were float32, and keeps of them only the store with its variables. So names, roles, initial values and the
// optimizer are those of the float32 model, to the bit. Programs of bl then read the variables through a
// castingBackend.
func (bl *builder) masters() error {
	if bl.width == dtypes.InvalidDType {
		return nil
	}
	full := &builder{
		m: bl.m, b: bl.b, spec: bl.spec, store: bl.store, layers: bl.store, width: dtypes.Float32, inputs: bl.inputs,
		labels: bl.labels,
	}
	var err error
	if bl.m.Loss != nil { // otherwise for prediction alone
		if _, err = full.training(); err == nil {
			_, err = full.evaluation()
		}
	}
	if err == nil {
		_, err = full.prediction()
	}
	for _, x := range full.graphs {
		x.close()
	}
	bl.hooks = full.hooks
	return err
}

// explain adds to an error of building a program in half width what to do about it: the model builds in float32.
func (bl *builder) explain(err error) error {
	if e, ok := errors.AsType[*ModelError](err); ok && bl.width != dtypes.InvalidDType {
		e.Cause = fmt.Errorf("%w (Model.Precision is %s: the model builds in float32, but not with inputs and variables "+
			"of %s: make constants and variables of the input's DType or of gomlx.ComputeDType, or convert with "+
			"gomlx.AtLeastFloat32 what needs float32)", e.Cause, bl.m.Precision, bl.width)
	}
	return err
}

// mastersOf returns the variables of the store with the values of a model function's variables.
func (bl *builder) mastersOf(list []*model.Variable) ([]*model.Variable, error) {
	masters := make([]*model.Variable, len(list))
	for i, v := range list {
		masters[i] = bl.store.GetVariable(v.Path())
		if masters[i] == nil || !masters[i].Shape().EqualDimensions(v.Shape()) {
			return nil, fmt.Errorf("the model function makes the variable %s of shape %s only in %s: want the same variables "+
				"in every precision", v.Path(), v.Shape(), bl.m.Precision)
		}
	}
	return masters, nil
}

// uses reports whether a graph uses a variable of the store.
func (bl *builder) uses(x *executable, v *model.Variable) bool {
	if v.InUseByGraph(x.g) {
		return true
	}
	in := bl.layers.GetVariable(v.Path())
	return in != nil && in.InUseByGraph(x.g)
}

// checkWidth returns an error if a model of mixed precision does not compute in half width, or changes a variable
// in it.
func (bl *builder) checkWidth(g *graph.Graph) error {
	if !half(bl.width) {
		return nil
	}
	any := false
	for v := range bl.layers.IterVariables() {
		if !v.InUseByGraph(g) || v.DType() != bl.width {
			continue
		}
		if v.ChangedInGraph(g) {
			return fmt.Errorf("the model function changes %s in %s, in which a moving average loses its small steps: use "+
				"layer.BatchNorm in the place of GoMLX's norm.BatchNorm, or make the variable and its new value float32 "+
				"(gomlx.AtLeastFloat32)", v.Path(), bl.width)
		}
		any = true
	}
	if !any {
		return fmt.Errorf("Model.Precision is %s, but no variable is used in %s: if the inputs are integers, make the "+
			"embedding of gomlx.ComputeDType", bl.m.Precision, bl.width)
	}
	return nil
}

func half(d dtypes.DType) bool { return d == dtypes.Float16 || d == dtypes.BFloat16 }

// castingBackend builds graphs in which variables have another dtype than their values: the program's parameter
// has the dtype of the variable in the store, and the graph sees its conversion.
func castingBackend(b compute.Backend, store *model.Store) compute.Backend {
	return parameterBackend{b, func(f compute.Function, name string, shape shapes.Shape) (compute.Value, error) {
		v := store.GetVariable(name)
		if v == nil || v.DType() == shape.DType || !strings.HasPrefix(name, model.ScopeSeparator) {
			return nil, nil
		}
		value, err := f.Parameter(name, v.Shape(), nil)
		if err != nil {
			return nil, err
		}
		return f.ConvertDType(value, shape.DType)
	}}
}
