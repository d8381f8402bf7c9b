package distribute_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// goldenCPUs is the number of logical CPU devices that TensorFlow had.
const goldenCPUs = 5

// goldenRun is one case under test.
type goldenRun struct {
	*testing.T
	c       *goldenCase
	devices []int
}

// strategy makes the case's strategy.
func (g *goldenRun) strategy() (*distribute.Strategy, error) {
	var s *distribute.Strategy
	var err error
	switch kind := g.c.Strategy["type"]; kind {
	case "MirroredStrategy":
		cfg := distribute.MirroredConfig{LogicalCPUs: goldenCPUs}
		if names, ok := g.c.Strategy["devices"].([]any); ok {
			cfg.Devices = []string{}
			for _, name := range names {
				cfg.Devices = append(cfg.Devices, name.(string))
			}
		}
		if spec, ok := g.c.Strategy["cross_device_ops"].(map[string]any); ok {
			if cfg.CrossDeviceOps, err = crossDeviceOps(spec); err != nil {
				return nil, err
			}
		}
		s, err = distribute.NewMirroredStrategy(cfg)
	case "OneDeviceStrategy":
		s, err = distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{Device: g.c.Strategy["device"].(string), LogicalCPUs: goldenCPUs})
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
	for _, d := range s.EngineDevices() {
		g.devices = append(g.devices, d.Index)
	}
	return s, nil
}

func crossDeviceOps(spec map[string]any) (distribute.CrossDeviceOps, error) {
	switch kind := spec["type"]; kind {
	case "ReductionToOneDevice":
		to, _ := spec["reduce_to_device"].(string)
		return distribute.ReductionToOneDevice{ReduceTo: to}, nil
	case "HierarchicalCopyAllReduce":
		packs := 1
		if n, ok := spec["num_packs"].(json.Number); ok {
			packs, _ = strconv.Atoi(n.String())
		}
		return distribute.NewHierarchicalCopyAllReduce(packs)
	default:
		return nil, fmt.Errorf("unknown cross_device_ops %v", kind)
	}
}

// reduceOp parses the case's reduction; "$SUM" names the constant.
func (g *goldenRun) reduceOp() (distribute.ReduceOp, error) {
	name, ok := g.c.Options["reduce_op"].(string)
	if !ok {
		return 0, fmt.Errorf("reduce_op %v: %w", g.c.Options["reduce_op"], errNotInGo)
	}
	return distribute.ParseReduceOp(strings.TrimPrefix(name, "$"))
}

// axis returns the case's axis as ReduceOptions has it. Only integers and tuples of them have a form in Go.
func (g *goldenRun) axis() ([]int, error) {
	var items []any
	switch a := g.c.Options["axis"].(type) {
	case nil:
		return nil, nil
	case json.Number:
		items = []any{a}
	case map[string]any:
		tuple, ok := a["tuple"].([]any)
		if !ok {
			return nil, fmt.Errorf("axis %v: %w", a, errNotInGo)
		}
		items = tuple
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
	comm, _ := g.c.Options["comm"].(map[string]any)
	var o distribute.Options
	if n, ok := comm["bytes_per_pack"].(json.Number); ok {
		o.BytesPerPack, _ = strconv.Atoi(n.String())
	}
	if n, ok := comm["timeout_seconds"].(json.Number); ok {
		seconds, err := n.Float64()
		if err != nil {
			return o, err
		}
		o.Timeout = time.Duration(seconds * float64(time.Second))
	}
	if name, ok := comm["implementation"].(string); ok {
		var err error
		if o.Implementation, err = distribute.ParseImplementation(name); err != nil {
			return o, err
		}
	}
	return o, nil
}

// destination returns where a result of the case goes.
func (g *goldenRun) destination(s *distribute.Strategy, spec any, value distribute.Value) (distribute.Destination, error) {
	switch d := spec.(type) {
	case nil:
		return distribute.Like(value), nil
	case string:
		if d == "value" {
			return distribute.Like(value), nil
		}
		return distribute.At(d), nil
	case map[string]any:
		switch d["kind"] {
		case "variable":
			return s.NewVariable(g.Context(), distribute.VariableConfig{Initial: float32(0)})
		case "mirrored_on":
			var values []distribute.Value
			for _, name := range d["devices"].([]any) {
				dev, err := distribute.CanonicalDevice(name.(string))
				if err != nil {
					return nil, err
				}
				values = append(values, tensor.Scalar(float32(1)).OnDevice(dev.Index))
			}
			if len(values) == 1 {
				return distribute.Like(values[0]), nil
			}
			return distribute.NewMirrored(values...), nil
		case "number":
			n, err := decodeNumber(d["value"].(json.Number))
			return distribute.Like(n), err
		}
	}
	return nil, fmt.Errorf("unknown destination %v", spec)
}

// devicesOf returns the devices that a result lies on, in short form.
func devicesOf(v distribute.Value) []any {
	leaves := []distribute.Value{v}
	if m, ok := v.(*distribute.Mirrored); ok {
		leaves = m.Values()
	}
	var out []any
	for _, leaf := range leaves {
		if d, ok := distribute.DeviceOf(leaf); ok {
			out = append(out, d.Short())
		}
	}
	return out
}

func (g *goldenRun) input(name string) (distribute.Value, error) {
	return decodeValue(g.c.Inputs[name], g.devices)
}

// inputs decodes a list of values, each of its own or of one replica.
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
	out, err := s.Reduce(ctx, op, v, distribute.ReduceOptions{Axis: axis})
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
	out, err := s.ReduceTo(s.Scope(g.Context()), op, v, to, o)
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
	batch := make([]distribute.ValueTo, len(values))
	for i, v := range values {
		var spec any
		if i < len(specs) {
			spec = specs[i]
		}
		batch[i].Value = v
		if batch[i].To, err = g.destination(s, spec, v); err != nil {
			return nil, err
		}
	}
	out, err := s.BatchReduceTo(s.Scope(g.Context()), op, batch, o)
	if g.c.Options["in_function"] == true { // the case then lists components
		for i, v := range out {
			components := []any{v}
			switch v := v.(type) {
			case *distribute.Mirrored:
				components = v.Values()
			case *distribute.PerReplica:
				components = v.Values()
			}
			out[i] = components
		}
	}
	return map[string]any{"values": out}, err
}

// perReplicaArg returns the replicas' values as one argument of Run.
func (g *goldenRun) perReplicaArg() (distribute.Value, []any, error) {
	values, err := g.inputs("per_replica", true)
	if err != nil {
		return nil, nil, err
	}
	arg, err := distribute.Regroup(values)
	return arg, values, err
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
	out, err := distribute.RunTyped(g.Context(), s, func(ctx context.Context, r *distribute.Replica, v distribute.Value) (distribute.Value, error) {
		return r.AllReduce(ctx, op, v, o)
	}, values)
	return map[string]any{"per_replica": out}, err
}

func goldenBroadcast(g *goldenRun) (map[string]any, error) {
	spec, _ := g.c.Options["cross_device_ops"].(map[string]any)
	if _, err := crossDeviceOps(spec); err != nil {
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
	out, err := distribute.Broadcast(v, to)
	return map[string]any{"value": out, "devices": devicesOf(out)}, err
}

// runFunctions are the step functions that cases name.
var runFunctions = map[string]func(r *distribute.Replica, args []any) (distribute.Value, error){
	"identity": func(_ *distribute.Replica, args []any) (distribute.Value, error) { return args[0], nil },
	"times_two": func(_ *distribute.Replica, args []any) (distribute.Value, error) {
		return mapNumbers(args[0], func(x float64) float64 { return 2 * x })
	},
	"add_replica_id": func(r *distribute.Replica, args []any) (distribute.Value, error) {
		return mapNumbers(args[0], func(x float64) float64 { return x + float64(r.ID()) })
	},
	"sum_args": func(_ *distribute.Replica, args []any) (distribute.Value, error) {
		first := args[0].(*tensor.Tensor)
		out := tensor.New(first.DType(), first.Shape()...)
		for i := range out.Len() {
			sum := 0.0
			for _, a := range args {
				sum += a.(*tensor.Tensor).Float64s()[i]
			}
			setNumber(out, i, sum)
		}
		return out, nil
	},
	"mean_loss": func(_ *distribute.Replica, args []any) (distribute.Value, error) {
		t := args[0].(*tensor.Tensor)
		sum := 0.0
		for _, x := range t.Float64s() {
			sum += x
		}
		out := tensor.New(t.DType())
		setNumber(out, 0, sum/float64(t.Len()))
		return out, nil
	},
	"swap": func(_ *distribute.Replica, args []any) (distribute.Value, error) {
		return tensor.Tuple{args[1], args[0]}, nil
	},
	"dict_out": func(r *distribute.Replica, args []any) (distribute.Value, error) {
		return map[string]any{"in": args[0], "id": tensor.Scalar(int32(r.ID()))}, nil
	},
}

// mapNumbers applies f to every number of a nest, host numbers and tensors alike.
func mapNumbers(v distribute.Value, f func(float64) float64) (distribute.Value, error) {
	return tensor.Map(v, func(leaf any) (any, error) {
		switch leaf := leaf.(type) {
		case int:
			return int(f(float64(leaf))), nil
		case float64:
			return f(leaf), nil
		case *tensor.Tensor:
			out := tensor.New(leaf.DType(), leaf.Shape()...)
			for i, x := range leaf.Float64s() {
				setNumber(out, i, f(x))
			}
			return out, nil
		}
		return nil, fmt.Errorf("no number: %v", leaf)
	})
}

// copied returns a nest with copies of its tensors: a function that TensorFlow compiled returns new ones always.
func copied(v distribute.Value) (distribute.Value, error) {
	return tensor.Map(v, func(leaf any) (any, error) {
		if t, ok := leaf.(*tensor.Tensor); ok {
			return t.Clone(), nil
		}
		return leaf, nil
	})
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
	args := []any{}
	if g.c.Inputs["args"] != nil {
		if args, err = g.inputs("args", false); err != nil {
			return nil, err
		}
	}
	named, _ := g.c.Inputs["kwargs"].(map[string]any)
	var names []string
	for k := range named {
		names = append(names, k)
	}
	sort.Strings(names)
	for _, k := range names {
		v, err := decodeValue(named[k], g.devices)
		if err != nil {
			return nil, err
		}
		args = append(args, v)
	}
	out, err := distribute.Run(g.Context(), s, func(_ context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
		v, err := f(r, args)
		if err == nil && g.c.Options["in_function"] == true {
			return copied(v)
		}
		return v, err
	}, args...)
	if err != nil {
		return nil, err
	}
	return map[string]any{"value": out, "local_results": s.LocalResults(out)}, nil
}

func goldenLocalResults(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	v, err := g.input("value")
	return map[string]any{"local_results": s.LocalResults(v)}, err
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
	out, err := s.DistributeValuesFromFunction(g.Context(), func(c distribute.ValueContext) (distribute.Value, error) { return f(c), nil })
	if err != nil {
		return nil, err
	}
	return map[string]any{"value": out, "local_results": s.LocalResults(out)}, nil
}

func goldenRegroup(g *goldenRun) (map[string]any, error) {
	arg, _, err := g.perReplicaArg()
	return map[string]any{"value": arg}, err
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
	out, err := distribute.SelectReplica(replica, v)
	return map[string]any{"value": out}, err
}

func goldenCanonicalizeDevice(g *goldenRun) (map[string]any, error) {
	name, _ := g.c.Inputs["device"].(string)
	var defaults []string
	if d, ok := g.c.Options["default"].(string); ok {
		defaults = []string{d}
	}
	d, err := distribute.CanonicalDevice(name, defaults...)
	return map[string]any{"value": d.String()}, err
}

// goldenTrainLoop trains y = w*x by SGD, with the gradients reduced and applied as a user would.
func goldenTrainLoop(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
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
	source := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{parts["x"]}, Labels: []*tensor.Tensor{parts["y"]}}).Batch(batch)
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
		reduced, err := r.AllReduce(ctx, op, gradient)
		if err != nil {
			return nil, err
		}
		_, err = r.MergeCall(ctx, func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
			mean, err := c.ReduceTo(ctx, distribute.Mean, args[0], w)
			if err != nil {
				return nil, err
			}
			return c.Update(ctx, w, func(_ context.Context, v *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
				scaled, err := mapNumbers(args[0], func(x float64) float64 { return float64(float32(rate) * float32(x)) })
				if err != nil {
					return nil, err
				}
				return nil, v.AssignSub(scaled)
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
			perReplica, err := distribute.Run(g.Context(), s, step, element)
			if err != nil {
				return nil, err
			}
			loss, err := s.Reduce(g.Context(), distribute.Sum, perReplica, distribute.ReduceOptions{})
			if err != nil {
				return nil, err
			}
			losses = append(losses, loss)
		}
	}
	return map[string]any{"losses": losses, "w": s.LocalResults(w)}, nil
}

// linearLoss returns sum((x*w - y)^2)/batch and its gradient with respect to w.
func linearLoss(w, x, y *tensor.Tensor, batch int) (loss, gradient *tensor.Tensor) {
	ws, xs, ys := w.Float64s(), x.Float64s(), y.Float64s()
	sum, grad := 0.0, make([]float64, len(ws))
	for i, want := range ys {
		row := xs[i*len(ws) : (i+1)*len(ws)]
		err := -want
		for j, v := range row {
			err += v * ws[j]
		}
		sum += err * err
		for j, v := range row {
			grad[j] += 2 * err * v / float64(batch)
		}
	}
	gradient = tensor.New(w.DType(), w.Shape()...)
	for j, v := range grad {
		setNumber(gradient, j, v)
	}
	loss = tensor.New(w.DType())
	setNumber(loss, 0, sum/float64(batch))
	return loss, gradient
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

// variable makes a variable that a case describes.
func (g *goldenRun) variable(s *distribute.Strategy, spec map[string]any) (*distribute.Variable, error) {
	initial, err := decodeValue(spec["initial"], g.devices)
	if err != nil {
		return nil, err
	}
	cfg := distribute.VariableConfig{Initial: initial}
	cfg.Name, _ = spec["name"].(string)
	if v, ok := spec["synchronization"]; ok {
		if cfg.Synchronization, err = parseEnum("synchronization", v, distribute.Auto, distribute.OnWrite, distribute.OnRead, distribute.SynchronizeNone); err != nil {
			return nil, err
		}
	}
	if v, ok := spec["aggregation"]; ok {
		if cfg.Aggregation, err = parseEnum("aggregation", v, distribute.AggregateNone, distribute.AggregateSum, distribute.AggregateMean, distribute.AggregateFirst); err != nil {
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
	class := "MirroredVariable"
	switch {
	case strings.HasPrefix(v.String(), "<tf.Variable"):
		class = "ResourceVariable"
	case strings.HasPrefix(v.String(), "SyncOnReadVariable:{"):
		class = "SyncOnReadVariable"
	}
	shape, names, devices, components := []any{}, []any{}, []any{}, []any{}
	for _, d := range v.Shape() {
		shape = append(shape, d)
	}
	for i, c := range v.Values() {
		names = append(names, v.ComponentName(i))
		d, _ := distribute.DeviceOf(c)
		devices = append(devices, d.Short())
		components = append(components, c)
	}
	return map[string]any{"value": map[string]any{
		"class": class, "synchronization": v.Synchronization().String(), "aggregation": v.Aggregation().String(),
		"trainable": v.Trainable(), "name": v.Name(), "dtype": v.DType().String(), "shape": shape,
		"component_names": names, "component_devices": devices, "components": components,
		"created_in_scope": v.Strategy() == s,
	}}, nil
}

// checkPlainSum holds the answer to all_reduce or batch_reduce_to against a plain sum of the inputs.
func checkPlainSum(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	op, err := g.reduceOp()
	if err != nil {
		return err
	}
	var replicas, results []any // nests
	if g.c.Op == "all_reduce" {
		if replicas, err = g.inputs("per_replica", true); err != nil {
			return err
		}
		results = answer["per_replica"].([]any)
	} else {
		values, err := g.inputs("values", false)
		if err != nil {
			return err
		}
		for i := range g.devices {
			mine, err := distribute.SelectReplica(i, values)
			if err != nil {
				return err
			}
			replicas = append(replicas, mine)
			got := make([]any, len(values))
			for j, v := range answer["values"].([]any) {
				if list, ok := v.([]any); ok {
					got[j] = list[i]
				} else if got[j], err = distribute.SelectReplica(i, v); err != nil {
					return err
				}
			}
			results = append(results, got)
		}
	}
	for i, result := range results {
		_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
			return nil, plainSum(fmt.Sprintf("replica %d%s", i, path), op, leaves[0], leaves[1:])
		}, nil, append([]any{result}, replicas...)...)
		if err != nil {
			return err
		}
	}
	return nil
}

func plainSum(path string, op distribute.ReduceOp, got any, inputs []any) error {
	result, ok := got.(*tensor.Tensor)
	if !ok {
		return fmt.Errorf("%s: got %v, want a tensor", path, got)
	}
	sum := make([]float64, result.Len())
	for _, in := range inputs {
		for i, x := range in.(*tensor.Tensor).Float64s() {
			sum[i] += x
		}
	}
	for i, x := range result.Float64s() {
		want := sum[i]
		if op == distribute.Mean {
			want /= float64(len(inputs))
		}
		if !near(want, x, 1e-2, tolerance{}) {
			return fmt.Errorf("%s: element %d is %v, want %v", path, i, x, want)
		}
	}
	return nil
}
