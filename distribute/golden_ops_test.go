package distribute_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// goldenCPUs is the number of logical CPU devices that TensorFlow had.
const goldenCPUs = 5

// goldenRun is one case under test.
type goldenRun struct {
	*testing.T
	c       *goldenCase
	devices []int
	instead *variant // nil: the case's own
}

// strategy returns the case's strategy.
func (g *goldenRun) strategy() (*distribute.Strategy, error) {
	s, err := g.strategyOf(g.c.Strategy)
	if err != nil {
		return nil, err
	}
	for _, d := range s.EngineDevices() {
		g.devices = append(g.devices, d.Index)
	}
	return s, nil
}

// names returns a list of strings of a case; nil if there is none.
func names(v any) []string {
	list, ok := v.([]any)
	if !ok {
		return nil
	}
	out := make([]string, len(list))
	for i, name := range list {
		out[i] = fmt.Sprint(name)
	}
	return out
}

// strategyOf returns the strategy that a case describes.
func (g *goldenRun) strategyOf(spec map[string]any) (*distribute.Strategy, error) {
	var ops distribute.CrossDeviceOps
	var s *distribute.Strategy
	var err error
	if g.instead != nil && spec["type"] == "MirroredStrategy" {
		if ops, err = g.instead.make(g, names(spec["devices"])); err != nil {
			return nil, err
		}
	} else if spec, ok := spec["cross_device_ops"].(map[string]any); ok {
		if ops, err = g.crossDeviceOps(spec, names(g.c.Strategy["devices"])); err != nil {
			return nil, err
		}
	}
	device, _ := spec["device"].(string)
	parameters, _ := spec["parameter_device"].(string)
	switch kind := spec["type"]; kind {
	case "MirroredStrategy":
		s, err = distribute.NewMirroredStrategy(distribute.MirroredConfig{
			Devices:     names(spec["devices"]),
			LogicalCPUs: goldenCPUs, CrossDeviceOps: ops,
		})
	case "OneDeviceStrategy":
		s, err = distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{Device: device, LogicalCPUs: goldenCPUs})
	case "CentralStorageStrategy":
		s, err = distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{
			ComputeDevices: names(spec["compute_devices"]), ParameterDevice: parameters, LogicalCPUs: goldenCPUs,
		})
	case "MultiWorkerMirroredStrategy":
		options, e := communication(spec["options"])
		if e != nil {
			return nil, e
		}
		s, err = distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
			Devices:     names(spec["devices"]),
			LogicalCPUs: goldenCPUs, Options: options,
		})
	case "Default":
		return distribute.Default(), nil
	default:
		return nil, fmt.Errorf("unknown strategy %v", kind)
	}
	if err != nil {
		return nil, err
	}
	g.Cleanup(func() {
		if err := s.Close(); err != nil {
			g.Errorf("Close: %v", err)
		}
	})
	return s, nil
}

// reduceOp parses the case's reduction; "$SUM" names the constant.
func (g *goldenRun) reduceOp() (distribute.ReduceOp, error) {
	name, ok := g.c.Options["reduce_op"].(string)
	if !ok {
		return 0, fmt.Errorf("reduce_op %v: %w", g.c.Options["reduce_op"], errNotInGo)
	}
	op, err := collective.ParseReduceOp(strings.TrimPrefix(name, "$"))
	if err != nil {
		return 99, nil // no reduction: the call refuses it
	}
	return op, nil
}

// axis returns the case's axis for ReduceOptions. Only integers and tuples of them can be written in Go.
func (g *goldenRun) axis() ([]int, error) {
	var items []any
	switch a := g.c.Options["axis"].(type) {
	case nil:
		return nil, nil
	case json.Number:
		items = []any{a}
	case map[string]any:
		var ok bool
		if items, ok = a["tuple"].([]any); ok {
			break
		}
		// TensorFlow rejects a list only where it caches the compiled reduction by its axis.
		if items, ok = a["list"].([]any); !ok || g.c.Options["in_function"] != true {
			return nil, fmt.Errorf("axis %v: %w", a, errNotInGo)
		}
	default:
		return nil, fmt.Errorf("axis %v: %w", a, errNotInGo)
	}
	axes := []int{}
	for _, item := range items {
		n, _ := item.(json.Number)
		i, err := strconv.Atoi(n.String())
		if err != nil {
			return nil, fmt.Errorf("axis %v: %w", item, errNotInGo)
		}
		axes = append(axes, i)
	}
	return axes, nil
}

// options returns the case's communication options.
func (g *goldenRun) options() (distribute.Options, error) {
	o, err := communication(g.c.Options["comm"])
	if g.instead != nil {
		o.BytesPerPack = g.instead.bytes
	}
	return o, err
}

// communication returns the communication options that a case describes.
func communication(v any) (distribute.Options, error) {
	comm, _ := v.(map[string]any)
	var o distribute.Options
	if n, ok := comm["bytes_per_pack"]; ok {
		var err error
		if o.BytesPerPack, err = wholeNumber(n); err != nil {
			return o, err
		}
	}
	if given := comm["timeout_seconds"]; given != nil {
		n, ok := given.(json.Number)
		if !ok {
			return o, fmt.Errorf("timeout %v: %w", given, errNotInGo)
		}
		seconds, err := n.Float64()
		if err != nil {
			return o, err
		}
		if o.Timeout = time.Duration(seconds * float64(time.Second)); seconds == 0 {
			o.Timeout = distribute.NoTimeout
		}
	}
	if given, ok := comm["implementation"]; ok {
		name, isText := given.(string)
		if !isText {
			return o, fmt.Errorf("implementation %v: %w", given, errNotInGo)
		}
		var err error
		if o.Implementation, err = distribute.ParseImplementation(name); err != nil {
			return o, errors.Join(o.Validate(), err) // TensorFlow reports the first of them
		}
	}
	return o, nil
}

// destination returns the destination of a case's result.
func (g *goldenRun) destination(
	s *distribute.Strategy, spec any, value distribute.Value,
) (distribute.Value, error) {
	switch d := spec.(type) {
	case nil:
		return value, nil
	case string:
		if d == "value" {
			return value, nil
		}
		return d, nil
	case map[string]any:
		switch d["kind"] {
		case "variable":
			return s.NewVariable(g.Context(), distribute.VariableConfig{Initial: float32(0)})
		case "mirrored_on":
			var values []distribute.Value
			for _, name := range d["devices"].([]any) {
				dev, err := device.Canonical(name.(string))
				if err != nil {
					return nil, err
				}
				values = append(values, tensor.Scalar(float32(1)).OnDevice(dev.Index))
			}
			if len(values) == 1 {
				return values[0], nil
			}
			return mirroredOf(values...), nil
		case "number":
			n, err := decodeNumber(d["value"].(json.Number))
			return n, err
		}
	}
	return nil, fmt.Errorf("unknown destination %v", spec)
}

// devicesOf returns the devices of a result, in short form.
func devicesOf(v distribute.Value) []any {
	leaves := []distribute.Value{v}
	if m, ok := v.(*distribute.Mirrored); ok {
		leaves = m.Values
	}
	var out []any
	for _, leaf := range leaves {
		if d, ok := device.Of(leaf); ok {
			out = append(out, d.Short())
		}
	}
	return out
}

func (g *goldenRun) input(name string) (distribute.Value, error) {
	return decodeValue(g.c.Inputs[name], g.devices)
}

// inputs decodes a list of values: separate ones, or one per replica.
func (g *goldenRun) inputs(name string, spread bool) ([]any, error) {
	return decodeList(g.c.Inputs[name], g.devices, spread)
}

func goldenReduce(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	axis, err := g.axis()
	if err != nil {
		return nil, err
	}
	ctx := g.Context()
	if g.c.Options["in_scope"] == true {
		ctx = s.Scope(ctx)
	}
	out, err := s.Extended().Reduce(ctx, op, v, distribute.ReduceOptions{Axis: axis})
	if err != nil {
		return nil, err
	}
	out, err = g.returned(out)
	return map[string]any{"value": out}, err
}

func goldenReduceTo(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	o, err := g.options()
	if err != nil {
		return nil, err
	}
	to, err := g.destination(s, g.c.Options["destinations"], v)
	if err != nil {
		return nil, err
	}
	out, err := s.Extended().ReduceTo(s.Scope(g.Context()), op, v, to, o)
	return map[string]any{"value": out, "devices": devicesOf(out)}, err
}

func goldenBatchReduceTo(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	values, err := g.inputs("values", false)
	if err != nil {
		return nil, err
	}
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	o, err := g.options()
	if err != nil {
		return nil, err
	}
	specs, _ := g.c.Options["destinations"].([]any)
	var batch reductions
	for i, v := range values {
		var spec any
		if i < len(specs) {
			spec = specs[i]
		}
		to, err := g.destination(s, spec, v)
		if err != nil {
			return nil, err
		}
		batch.add(v, to)
	}
	out, err := s.Extended().BatchReduceTo(s.Scope(g.Context()), op, batch.values, batch.to, o)
	if g.c.Options["in_function"] == true { // the case then lists components
		for i, v := range out {
			components := []any{v}
			switch v := v.(type) {
			case *distribute.Mirrored:
				components = v.Values
			case *distribute.Components:
				components = v.Values()
			}
			out[i] = components
		}
	}
	return map[string]any{"values": out}, err
}

func goldenAllReduce(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	o, err := g.options()
	if err != nil {
		return nil, err
	}
	values, err := g.inputs("per_replica", true)
	if err != nil {
		return nil, err
	}
	if _, err := tf.Regroup(values); err != nil {
		return nil, err // TensorFlow got one argument, of one structure
	}
	out, err := distribute.Run(g.Context(), s,
		func(ctx context.Context, r *distribute.Replica, v distribute.Value) (distribute.Value, error) {
			return distribute.AllReduce(ctx, r, op, v, o)
		}, values)
	return map[string]any{"per_replica": []any(out)}, err
}

func goldenBroadcast(g *goldenRun) (map[string]any, error) {
	spec, _ := g.c.Options["cross_device_ops"].(map[string]any)
	if _, err := g.crossDeviceOps(spec, g.directDevices()); err != nil {
		return nil, err
	}
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	to, err := g.destination(nil, g.c.Options["destinations"], nil)
	if err != nil {
		return nil, err
	}
	out, err := tf.Broadcast(g.Context(), v, to)
	return map[string]any{"value": out, "devices": devicesOf(out)}, err
}

// runFunctions are the step functions that cases name, with the names of their parameters; nil: any number of any name.
var runFunctions = map[string]struct {
	params []string
	call   func(ctx context.Context, r *distribute.Replica, args []any) (distribute.Value, error)
}{
	"identity": {[]string{"x"}, func(_ context.Context, _ *distribute.Replica, args []any) (distribute.Value, error) {
		return args[0], nil
	}},
	"times_two": {[]string{"x"}, func(ctx context.Context, _ *distribute.Replica, args []any) (distribute.Value, error) {
		return tensor.Map(args[0], func(leaf any) (any, error) {
			switch x := leaf.(type) {
			case int:
				return 2 * x, nil
			case float64:
				return 2 * x, nil
			case *tensor.Tensor:
				if x.DType() == tensor.Bool {
					return x.Clone(), nil // the product of bools is their conjunction, and 2 is true
				}
				return addAll(x, x)
			}
			return nil, fmt.Errorf("two times %v: %w", leaf, distribute.ErrInvalid)
		})
	}},
	"add_replica_id": {
		[]string{"x"},
		func(ctx context.Context, r *distribute.Replica, args []any) (distribute.Value, error) {
			return tensor.Map(args[0], func(leaf any) (any, error) {
				x, ok := leaf.(*tensor.Tensor)
				if !ok {
					return nil, fmt.Errorf("%v and a replica id: %w", leaf, distribute.ErrInvalid)
				}
				if !x.DType().IsNumeric() {
					return addAll(x, x) // it returns the reason
				}
				ids := tensor.New(x.DType(), x.Shape()...)
				for i := range ids.Len() {
					setNumber(ids, i, float64(r.ID()))
				}
				return addAll(x, ids)
			})
		},
	},
	"sum_args": {nil, func(ctx context.Context, _ *distribute.Replica, args []any) (distribute.Value, error) {
		return addAll(args...)
	}},
	"mean_loss": {[]string{"x"}, func(ctx context.Context, _ *distribute.Replica, args []any) (distribute.Value, error) {
		return meanOf(ctx, args[0])
	}},
	"swap": {[]string{"a", "b"}, func(_ context.Context, _ *distribute.Replica, args []any) (distribute.Value, error) {
		return tensor.Tuple{args[1], args[0]}, nil
	}},
	"dict_out": {[]string{"x"}, func(_ context.Context, r *distribute.Replica, args []any) (distribute.Value, error) {
		return map[string]any{"in": args[0], "id": tensor.Scalar(int32(r.ID()))}, nil
	}},
}

// addAll adds tensors of one dtype and shape; host numbers count as tensors.
func addAll(values ...any) (distribute.Value, error) {
	return reduceWith(context.Background(), distribute.NewReductionToOneDevice("", nil), distribute.Sum,
		distribute.NewComponents(values...), "CPU:0")
}

// meanOf returns the mean of a tensor's elements in the tensor's dtype, as tf.reduce_mean does: the
// mean of integers is truncated, and the sum of int32 wraps around.
func meanOf(ctx context.Context, v distribute.Value) (distribute.Value, error) {
	t, ok := v.(*tensor.Tensor)
	if !ok {
		return nil, fmt.Errorf("the mean of %v: %w", v, distribute.ErrInvalid)
	}
	if !t.DType().IsNumeric() {
		return addAll(t, t) // it returns the reason
	}
	out := tensor.New(t.DType())
	if t.DType().IsFloat() {
		sum := 0.0
		for _, x := range t.Float64s() {
			sum += x
		}
		setNumber(out, 0, sum/float64(t.Len()))
		return out, nil
	}
	if t.Len() == 0 {
		return out, nil
	}
	var sum int64
	for i := range t.Len() {
		sum += integerAt(t, i)
	}
	switch n := int64(t.Len()); t.DType() {
	case tensor.Uint64:
		tensor.Data[uint64](out)[0] = uint64(sum) / uint64(n)
		return out, nil
	case tensor.Int32:
		sum = int64(int32(sum)) / n
	default:
		sum /= n
	}
	return out, setElement(out, 0, json.Number(strconv.FormatInt(sum, 10)))
}

// setProduct sets an element to the product of the elements of two tensors of one dtype; integers wrap around.
func setProduct(out *tensor.Tensor, i int, a, b *tensor.Tensor) {
	if out.DType().IsFloat() {
		setNumber(out, i, a.Float64s()[i]*b.Float64s()[i])
		return
	}
	setInteger(out, i, integerAt(a, i)*integerAt(b, i))
}

// setInteger sets an element of a tensor of integers, truncated to their width.
func setInteger(t *tensor.Tensor, i int, x int64) {
	switch t.DType() {
	case tensor.Int64:
		tensor.Data[int64](t)[i] = x
	case tensor.Uint64:
		tensor.Data[uint64](t)[i] = uint64(x)
	case tensor.Uint32:
		tensor.Data[uint32](t)[i] = uint32(x)
	case tensor.Int32:
		tensor.Data[int32](t)[i] = int32(x)
	default:
		setNumber(t, i, float64(int32(x)))
	}
}

// integerAt returns an element of a tensor of integers.
func integerAt(t *tensor.Tensor, i int) int64 {
	switch t.DType() {
	case tensor.Int64:
		return tensor.Data[int64](t)[i]
	case tensor.Uint64:
		return int64(tensor.Data[uint64](t)[i])
	}
	return int64(t.Float64s()[i])
}

// returned converts a result to the case's form: a function that TensorFlow compiled returns host numbers as tensors.
func (g *goldenRun) returned(v distribute.Value) (distribute.Value, error) {
	if g.c.Options["in_function"] != true {
		return v, nil
	}
	return tensor.Map(v, func(leaf any) (any, error) {
		switch x := leaf.(type) {
		case *distribute.Components:
			components := slices.Clone(x.Values())
			for i, c := range components {
				var err error
				if components[i], err = g.returned(c); err != nil {
					return nil, err
				}
			}
			return distribute.NewComponents(components...), nil
		case int:
			return tensor.Scalar(int32(x)), nil
		case float64:
			return tensor.Scalar(float32(x)), nil
		}
		return leaf, nil
	})
}

// mapNumbers applies f to every number of the tensors in a nest.
func mapNumbers(v distribute.Value, f func(float64) float64) (distribute.Value, error) {
	return tensor.Map(v, func(leaf any) (any, error) {
		t, ok := leaf.(*tensor.Tensor)
		if !ok {
			return nil, fmt.Errorf("no tensor: %v", leaf)
		}
		out := tensor.New(t.DType(), t.Shape()...)
		for i, x := range t.Float64s() {
			setNumber(out, i, f(x))
		}
		return out, nil
	})
}

// arguments returns the case's arguments in the order of the parameters, and an error where they do not fit.
func (g *goldenRun) arguments(params []string) ([]any, error) {
	args := []any{}
	if g.c.Inputs["args"] != nil {
		var err error
		if args, err = g.inputs("args", false); err != nil {
			return nil, err
		}
	}
	named, _ := g.c.Inputs["kwargs"].(map[string]any)
	if params == nil {
		params = slices.Sorted(maps.Keys(named))
	} else if len(args)+len(named) != len(params) {
		return nil, fmt.Errorf("%d arguments for %v: %w", len(args)+len(named), params, errNotInGo)
	} else {
		params = params[len(args):]
	}
	for _, name := range params {
		arg, ok := named[name]
		if !ok {
			return nil, fmt.Errorf("no argument %s: %w", name, errNotInGo)
		}
		v, err := decodeValue(arg, g.devices)
		if err != nil {
			return nil, err
		}
		args = append(args, v)
	}
	return args, nil
}

func goldenRunStep(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	name, _ := g.c.Options["fn"].(string)
	f, ok := runFunctions[name]
	if !ok {
		return nil, fmt.Errorf("unknown fn %q", name)
	}
	args, err := g.arguments(f.params)
	if err != nil {
		return nil, err
	}
	out, err := distribute.RunNest(g.Context(), s,
		func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
			return f.call(ctx, r, args)
		}, args...)
	if err != nil {
		return nil, err
	}
	if out, err = g.returned(out); err != nil {
		return nil, err
	}
	return map[string]any{"value": out, "local_results": s.Extended().LocalResults(out)}, nil
}

func goldenLocalResults(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	v, err := g.input("value")
	return map[string]any{"local_results": s.Extended().LocalResults(v)}, err
}

// valueFunctions are the value functions that cases name.
var valueFunctions = map[string]func(distribute.ValueContext) distribute.Value{
	"ctx_fields": func(c distribute.ValueContext) distribute.Value {
		return tensor.From([]int32{int32(c.ReplicaID), int32(c.NumReplicas)})
	},
	"ragged": func(c distribute.ValueContext) distribute.Value {
		out := tensor.New(tensor.Float32, c.ReplicaID+1)
		for i := range tensor.Data[float32](out) {
			tensor.Data[float32](out)[i] = float32(c.ReplicaID)
		}
		return out
	},
	"tuple": func(c distribute.ValueContext) distribute.Value {
		return tensor.Tuple{tensor.Scalar(int32(c.ReplicaID)), tensor.Scalar(float32(c.ReplicaID) * 10)}
	},
	"dict": func(c distribute.ValueContext) distribute.Value {
		return map[string]any{"a": tensor.Scalar(float32(c.ReplicaID) + 0.5), "b": []any{tensor.Scalar(int32(c.NumReplicas))}}
	},
	"constant": func(distribute.ValueContext) distribute.Value { return tensor.Scalar(float32(7)) },
	"str":      func(c distribute.ValueContext) distribute.Value { return c.String() },
}

func goldenValuesFromFunction(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	name, _ := g.c.Options["fn"].(string)
	f, ok := valueFunctions[name]
	if !ok {
		return nil, fmt.Errorf("unknown fn %q", name)
	}
	out, err := s.Extended().DistributeValues(g.Context(),
		func(c distribute.ValueContext) (distribute.Value, error) { return f(c), nil })
	if err != nil {
		return nil, err
	}
	nest, err := distribute.Nested(s, out)
	return map[string]any{"value": nest, "local_results": s.Extended().LocalResults(nest)}, err
}

// goldenRegroup regroups like the case's call: leaves are wrapped even if they are the same on all replicas.
func goldenRegroup(g *goldenRun) (map[string]any, error) {
	values, err := g.inputs("per_replica", true)
	if err != nil {
		return nil, err
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: len(values)})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	out, err := distribute.Nested(s, values)
	return map[string]any{"value": out}, err
}

func goldenSelectReplica(g *goldenRun) (map[string]any, error) {
	if _, err := g.strategy(); err != nil {
		return nil, err
	}
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	replica, err := strconv.Atoi(g.c.Options["replica"].(json.Number).String())
	if err != nil {
		return nil, err
	}
	out, err := tf.SelectReplica(replica, v)
	return map[string]any{"value": out}, err
}

func goldenCanonicalizeDevice(g *goldenRun) (map[string]any, error) {
	name, _ := g.c.Inputs["device"].(string)
	var defaults []string
	if d, ok := g.c.Options["default"].(string); ok {
		defaults = []string{d}
	}
	d, err := device.Canonical(name, defaults...)
	return map[string]any{"value": d.String()}, err
}

// goldenTrainLoop trains y = w*x by SGD, and reduces and applies the gradients like a user's program.
func goldenTrainLoop(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	return g.trainLoop(s)
}

// trainLoop trains the case's linear model with a strategy.
func (g *goldenRun) trainLoop(s *distribute.Strategy) (map[string]any, error) {
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	number := func(name string) float64 {
		n, _ := g.c.Options[name].(json.Number)
		f, e := n.Float64()
		err = errors.Join(err, e)
		return f
	}
	epochs, batch, rate := int(number("epochs")), int(number("global_batch_size")), number("lr")
	parts := map[string]*tensor.Tensor{}
	for _, name := range []string{"w", "x", "y"} {
		v, e := g.input(name)
		err = errors.Join(err, e)
		parts[name], _ = v.(*tensor.Tensor)
	}
	if err != nil {
		return nil, err
	}
	w, err := s.NewVariable(g.Context(), distribute.VariableConfig{Initial: parts["w"]})
	if err != nil {
		return nil, err
	}
	source := fromTensors(data.Batch{
		Inputs: []*tensor.Tensor{parts["x"]},
		Labels: []*tensor.Tensor{parts["y"]},
	}).Batch(batch)
	set, err := s.DistributeDataset(source)
	if err != nil {
		return nil, err
	}
	step := func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
		b := args[0].(data.Batch)
		weights, err := w.Read(r)
		if err != nil {
			return nil, err
		}
		loss, gradient := linearLoss(weights, b.Inputs[0], b.Labels[0], batch)
		reduced, err := distribute.AllReduce(ctx, r, op, gradient)
		if err != nil {
			return nil, err
		}
		_, err = distribute.MergeNests(ctx, r,
			func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
				mean, err := c.Strategy().Extended().ReduceTo(ctx, distribute.Mean, args[0], w)
				if err != nil {
					return nil, err
				}
				return c.Strategy().Extended().Update(ctx, w,
					func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
						scaled, err := mapNumbers(args[0], func(x float64) float64 { return float64(float32(rate) * float32(x)) })
						if err != nil {
							return nil, err
						}
						return nil, w.AssignSub(c, scaled)
					}, mean)
			}, reduced)
		return loss, err
	}
	losses := []any{}
	for range epochs {
		for element, err := range set.Iter(g.Context()) {
			if err != nil {
				return nil, err
			}
			perReplica, err := distribute.RunNest(g.Context(), s, step, element)
			if err != nil {
				return nil, err
			}
			loss, err := s.Extended().Reduce(g.Context(), distribute.Sum, perReplica, distribute.ReduceOptions{})
			if err != nil {
				return nil, err
			}
			losses = append(losses, loss)
		}
	}
	return map[string]any{"losses": losses, "w": w.Values()}, nil
}

// linearLoss returns sum((x*w - y)^2)/batch and its gradient with respect to w, rounded at each step as
// TensorFlow's are.
func linearLoss(w, x, y *tensor.Tensor, batch int) (loss, gradient *tensor.Tensor) {
	ws, xs := tensor.Data[float32](w), tensor.Data[float32](x)
	gradient = tensor.New(tensor.Float32, len(ws))
	g := tensor.Data[float32](gradient)
	sum, n := float32(0), float32(batch)
	for i, want := range tensor.Data[float32](y) {
		row := xs[i*len(ws) : (i+1)*len(ws)]
		predicted := float32(0)
		for j, v := range row {
			predicted += v * ws[j]
		}
		err := predicted - want
		sum += err * err
		for j, v := range row {
			g[j] += v * (2 * err / n)
		}
	}
	return tensor.Scalar(sum / n), gradient
}

// parseEnum finds a constant by its name.
func parseEnum[T fmt.Stringer](what string, v any, values ...T) (T, error) {
	name, _ := v.(string)
	for _, x := range values {
		if x.String() == name {
			return x, nil
		}
	}
	var zero T
	return zero, fmt.Errorf("%s %q: %w", what, name, errNotInGo)
}

// variable returns the variable that a case describes.
func (g *goldenRun) variable(s *distribute.Strategy, spec map[string]any) (*distribute.Variable, error) {
	initial, err := decodeValue(spec["initial"], g.devices)
	if err != nil {
		return nil, err
	}
	cfg := distribute.VariableConfig{Initial: initial}
	cfg.Name, _ = spec["name"].(string)
	if v, ok := spec["synchronization"]; ok {
		if cfg.Synchronization, err = parseEnum("synchronization", v, distribute.Auto, distribute.OnWrite, distribute.OnRead,
			distribute.SynchronizeNone); err != nil {
			return nil, err
		}
	}
	if v, ok := spec["aggregation"]; ok {
		if cfg.Aggregation, err = parseEnum("aggregation", v, distribute.AggregateNone, distribute.AggregateSum,
			distribute.AggregateMean, distribute.AggregateFirst); err != nil {
			return nil, err
		}
	}
	if v, ok := spec["trainable"].(bool); ok {
		cfg.Trainable, cfg.NotTrainable = v, !v
	}
	return s.NewVariable(g.Context(), cfg)
}

func goldenVarCreate(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	v, err := g.variable(s, g.c.Inputs["variable"].(map[string]any))
	if err != nil {
		return nil, err
	}
	shape, names, components := []any{}, []any{}, []any{}
	for _, d := range v.Shape() {
		shape = append(shape, d)
	}
	for i, c := range v.Values() {
		names = append(names, v.ComponentName(i))
		components = append(components, c)
	}
	return map[string]any{"value": map[string]any{
		"class": v.Kind(), "synchronization": v.Config().Synchronization.String(),
		"aggregation": v.Config().Aggregation.String(),
		"trainable":   v.Config().Trainable, "name": v.Name(), "dtype": v.DType().String(), "shape": shape,
		"component_names": names, "component_devices": shortDevices(v.Devices()), "components": components,
		"created_in_scope": v.Strategy() == s,
	}}, nil
}

// checkPlainSum compares the answer to a reduction with a plain sum of the inputs.
func checkPlainSum(g *goldenRun, answer map[string]any, err error) error {
	if g.c.fails() &&
		(errors.Is(err, distribute.ErrMismatch) || errors.Is(err, distribute.ErrInvalid) &&
			strings.Contains(err.Error(), "is not in the list of allowed values")) {
		return nil // also invalid; TensorFlow reports the other error first
	}
	if err != nil {
		return err
	}
	op, err := g.reduceOp()
	if err != nil {
		return err
	}
	replicas, results, err := g.reduction(answer)
	if err != nil {
		return err
	}
	for i, result := range results {
		_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
			return nil, plainSum(fmt.Sprintf("result %d%s", i, path), op, leaves[0], leaves[1:])
		}, nil, append([]any{result}, replicas...)...)
		if err != nil {
			return err
		}
	}
	return nil
}

// checkAlone checks that a batch returns single tensors unchanged: they are values of one component.
func checkAlone(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	specs, isBatch := g.c.Inputs["values"].([]any)
	results, _ := answer["values"].([]any)
	if !isBatch {
		specs, results = []any{g.c.Inputs["value"]}, []any{answer["value"]}
	}
	op, err := g.reduceOp()
	if err != nil {
		return err
	}
	alone := false
	for i, spec := range specs {
		in, err := decodeValue(spec, nil)
		if err != nil {
			return err
		}
		components := []any{in}
		if d, ok := in.(interface{ Values() []distribute.Value }); ok {
			components = d.Values()
		}
		alone = alone || len(components) < max(g.c.Replicas, 2)
		got, err := tf.SelectReplica(0, results[i])
		if err != nil {
			return err
		}
		if err := plainSum(fmt.Sprintf("value %d", i), op, got, components); err != nil {
			return err
		}
	}
	if !alone {
		return errors.New("each has a component for each device")
	}
	return nil
}

// reduction returns the replicas' nests and the nests of the results.
func (g *goldenRun) reduction(answer map[string]any) (replicas, results []any, err error) {
	var in, out any
	switch g.c.Op {
	case "all_reduce":
		replicas, err = g.inputs("per_replica", true)
		results, _ = answer["per_replica"].([]any)
		return replicas, results, err
	case "all_reduce_gradient":
		if g.c.Inputs["upstream"] == nil {
			replicas, err = g.inputs("per_replica", true)
			results, _ = answer["outputs"].([]any)
			return replicas, results, err
		}
		// the gradient is the sum of the gradients of the results
		ins, e := g.inputs("upstream", true)
		if e != nil {
			return nil, nil, e
		}
		outs, _ := answer["gradients"].([]any)
		return ins, outs, nil
	case "batch_reduce_to", "cross_device_batch_reduce":
		in, err = g.inputs("values", false)
		batch, _ := answer["values"].([]any)
		for i, v := range batch {
			if components, ok := v.([]any); ok { // inside of a function
				batch[i] = distribute.NewComponents(components...)
			}
		}
		out = batch
	default:
		in, err = g.input("value")
		out = answer["value"]
	}
	for i := range g.devices {
		mine, e := tf.SelectReplica(i, in)
		err = errors.Join(err, e)
		replicas = append(replicas, mine)
	}
	result, e := tf.SelectReplica(0, out)
	return replicas, []any{result}, errors.Join(err, e)
}

// plainSum compares one leaf of a reduction with a plain sum in float64. The sum of IndexedSlices is all their
// rows. If only some of the inputs are IndexedSlices, these are converted to dense tensors.
func plainSum(path string, op distribute.ReduceOp, got any, inputs []any) error {
	if slices, ok := got.(*tensor.IndexedSlices); ok {
		return plainRows(path, op, slices, inputs)
	}
	result, err := plainNumbers(got)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	sum := make([]float64, len(result))
	for _, in := range inputs {
		xs, err := plainNumbers(in)
		if err != nil || len(xs) != len(sum) {
			return fmt.Errorf("%s: got %v of %v: %w", path, got, in, err)
		}
		for i, x := range xs {
			sum[i] += x
		}
	}
	if t, ok := inputs[0].(*tensor.Tensor); ok && t.DType().IsInteger() {
		sum = wrappedSum(t, inputs)
	}
	return plainMatch(path, op, result, sum, len(inputs))
}

// wrappedSum returns the sum of tensors of one dtype of integers, like the first, which wraps around.
func wrappedSum(like *tensor.Tensor, inputs []any) []float64 {
	out := tensor.New(like.DType(), like.Shape()...)
	for i := range out.Len() {
		var sum int64
		for _, in := range inputs {
			sum += integerAt(in.(*tensor.Tensor), i)
		}
		setInteger(out, i, sum)
	}
	return out.Float64s()
}

func plainNumbers(v any) ([]float64, error) {
	switch v := v.(type) {
	case *tensor.Tensor:
		return v.Float64s(), nil
	case *tensor.IndexedSlices:
		t, err := sparse.Densify(v)
		if err != nil {
			return nil, err
		}
		return t.Float64s(), nil
	}
	x, ok := hostNumber(v)
	if !ok {
		return nil, fmt.Errorf("%v is not a number", v)
	}
	return []float64{x}, nil
}

func plainRows(path string, op distribute.ReduceOp, got *tensor.IndexedSlices, inputs []any) error {
	var rows, indices []float64
	for _, in := range inputs {
		s, ok := in.(*tensor.IndexedSlices)
		if !ok {
			return fmt.Errorf("%s: got %v of %v", path, got, in)
		}
		rows, indices = append(rows, s.Values.Float64s()...), append(indices, s.Indices.Float64s()...)
	}
	return errors.Join(plainMatch(path+".values", op, got.Values.Float64s(), rows, len(inputs)),
		plainMatch(path+".indices", distribute.Sum, got.Indices.Float64s(), indices, 1))
}

func plainMatch(path string, op distribute.ReduceOp, got, sum []float64, n int) error {
	if len(got) != len(sum) {
		return fmt.Errorf("%s: got %d elements, want %d", path, len(got), len(sum))
	}
	for i, x := range got {
		want := sum[i]
		if op == distribute.Mean {
			want /= float64(n)
		}
		if !near(want, x, 1e-2, tolerance{}) {
			return fmt.Errorf("%s: element %d is %v, want %v", path, i, x, want)
		}
	}
	return nil
}
