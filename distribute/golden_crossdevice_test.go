package distribute_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/distribute/internal/twolevel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// The operations of the golden cases on CrossDeviceOps, packs and gathers.

// wholeNumber reads a whole number of a case.
func wholeNumber(v any) (int, error) {
	n, ok := v.(json.Number)
	if !ok {
		return 0, fmt.Errorf("%v (%T): %w", v, v, errNotInGo)
	}
	i, err := n.Int64()
	if err != nil {
		return 0, fmt.Errorf("%v: %w", n, errNotInGo)
	}
	return int(i), nil
}

// directDevices returns the devices of a case that belongs to no strategy.
func (g *goldenRun) directDevices() []string {
	if devices := names(g.c.Options["devices"]); devices != nil {
		return devices
	}
	return []string{"CPU:0"}
}

// crossDeviceOps makes the operations that a case describes.
func (g *goldenRun) crossDeviceOps(spec map[string]any, devices []string) (distribute.CrossDeviceOps, error) {
	packs := 1
	if given, ok := spec["num_packs"]; ok {
		var err error
		if packs, err = wholeNumber(given); err != nil {
			return nil, err
		}
	}
	switch kind := spec["type"]; kind {
	case "ReductionToOneDevice":
		to, _ := spec["reduce_to_device"].(string)
		return distribute.NewReductionToOneDevice(to, nil), nil
	case "HierarchicalCopyAllReduce":
		return distribute.NewHierarchicalCopyAllReduce(packs, nil)
	case "NcclAllReduce":
		return distribute.NewNcclAllReduce(packs, quiet)
	case "CollectiveAllReduce":
		options, err := communication(spec["options"])
		if err != nil {
			return nil, err
		}
		cfg := distribute.CollectiveConfig{Devices: devices, Options: options, Logger: quiet}
		if given, ok := spec["group_size"]; ok {
			if cfg.GroupSize, err = wholeNumber(given); err != nil {
				return nil, err
			}
		}
		ops, err := distribute.NewCollectiveAllReduce(cfg)
		if err != nil {
			return nil, err
		}
		g.Cleanup(func() {
			if err := ops.Close(); err != nil {
				g.Errorf("Close: %v", err)
			}
		})
		return ops, nil
	default:
		return nil, fmt.Errorf("unknown cross_device_ops %v", kind)
	}
}

// direct prepares a case that calls CrossDeviceOps without a strategy.
func (g *goldenRun) direct() (ops distribute.CrossDeviceOps, op distribute.ReduceOp, o distribute.Options, err error) {
	for _, name := range g.directDevices() {
		d, e := device.Canonical(name)
		err = errors.Join(err, e)
		g.devices = append(g.devices, d.Index)
	}
	spec, _ := g.c.Options["cross_device_ops"].(map[string]any)
	switch {
	case err != nil:
	case g.instead != nil:
		ops, err = g.instead.make(g, g.directDevices())
	default:
		ops, err = g.crossDeviceOps(spec, g.directDevices())
	}
	if err == nil {
		op, err = g.reduceOp()
	}
	if err == nil {
		o, err = g.options()
	}
	return ops, op, o, err
}

func goldenCrossDeviceReduce(g *goldenRun) (map[string]any, error) {
	ops, op, o, err := g.direct()
	if err != nil {
		return nil, err
	}
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	to, err := g.destination(distribute.Default(), g.c.Options["destinations"], v)
	if err != nil {
		return nil, err
	}
	out, err := reduceWith(g.Context(), ops, op, v, to, o)
	return map[string]any{"value": out, "devices": devicesOf(out)}, err
}

func goldenCrossDeviceBatchReduce(g *goldenRun) (map[string]any, error) {
	ops, op, o, err := g.direct()
	if err != nil {
		return nil, err
	}
	values, err := g.inputs("values", false)
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
		to, err := g.destination(distribute.Default(), spec, v)
		if err != nil {
			return nil, err
		}
		batch.add(v, to)
	}
	out, err := tf.BatchReduceWith(g.Context(), ops, op, batch.values, batch.to, o)
	return map[string]any{"values": out}, err
}

func goldenCrossDeviceConstructor(g *goldenRun) (map[string]any, error) {
	spec, _ := g.c.Options["cross_device_ops"].(map[string]any)
	ops, err := g.crossDeviceOps(spec, g.directDevices())
	if err != nil {
		return nil, err
	}
	var packs any
	if p, ok := ops.(interface{ Packs() int }); ok {
		packs = p.Packs()
	}
	return map[string]any{"value": map[string]any{"class": ops.String(), "num_packs": packs}}, nil
}

func goldenSelectedOps(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	switch g.c.Strategy["type"] {
	case "MirroredStrategy", "MultiWorkerMirroredStrategy":
	default:
		return nil, fmt.Errorf("the strategy has no choice of CrossDeviceOps: %w", errNotInGo)
	}
	return map[string]any{"value": map[string]any{
		"class": s.CrossDeviceOps().String(), "implementation": s.Options().Implementation.String(),
	}}, nil
}

// goldenCollectiveTimeout waits for members that never join, in fake time.
func goldenCollectiveTimeout(g *goldenRun) (answer map[string]any, err error) {
	synctest.Test(g.T, func(t *testing.T) {
		inside := &goldenRun{T: t, c: g.c}
		var ops distribute.CrossDeviceOps
		if ops, err = inside.crossDeviceOps(map[string]any{
			"type":       "CollectiveAllReduce",
			"group_size": g.c.Options["group_size"],
		}, inside.directDevices()); err != nil {
			return
		}
		var o distribute.Options
		if o, err = inside.options(); err != nil {
			return
		}
		for _, name := range inside.directDevices() {
			d, _ := device.Canonical(name)
			inside.devices = append(inside.devices, d.Index)
		}
		var v, out distribute.Value
		if v, err = inside.input("value"); err != nil {
			return
		}
		start := time.Now()
		out, err = reduceWith(t.Context(), ops, distribute.Sum, v, v, o)
		if passed := time.Since(start); err != nil && passed != o.Timeout {
			t.Errorf("the call ended after %v, want %v: %v", passed, o.Timeout, err)
		}
		answer = map[string]any{"value": out}
	})
	return answer, err
}

func goldenCollectiveKeys(*goldenRun) (map[string]any, error) {
	return nil, fmt.Errorf("a group counts its calls, and has no keys: %w", errNotInGo)
}

func goldenCommunicationOptions(g *goldenRun) (map[string]any, error) {
	args, _ := g.c.Options["args"].(map[string]any)
	o, err := communication(args)
	if err != nil {
		return nil, err
	}
	if g.c.Options["hints"] == true {
		for name := range args {
			if name != "bytes_per_pack" && name != "timeout_seconds" {
				return nil, fmt.Errorf("CollectiveHints has no %s: %w", name, errNotInGo)
			}
		}
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if g.c.Options["merge"] != nil {
		over, err := communication(g.c.Options["merge"])
		if err == nil {
			err = over.Validate()
		}
		if err != nil {
			return nil, err
		}
		o = o.Merge(over)
	}
	var timeout any
	switch o.Timeout {
	case 0:
	case distribute.NoTimeout:
		timeout = 0.0 // TensorFlow's value for it
	default:
		timeout = o.Timeout.Seconds()
	}
	return map[string]any{"value": map[string]any{
		"bytes_per_pack": o.BytesPerPack, "timeout_seconds": timeout, "implementation": o.Implementation.String(),
	}}, nil
}

// packTensors reads the tensors that a case packs.
func (g *goldenRun) packTensors() ([]packing.Tensor, error) {
	list, _ := g.c.Inputs["tensors"].([]any)
	out := make([]packing.Tensor, len(list))
	for i, item := range list {
		spec, _ := item.(map[string]any)
		name, _ := spec["dtype"].(string)
		d, err := tensor.ParseDType(name)
		if err != nil {
			return nil, err
		}
		out[i] = packing.Tensor{Type: d, Count: 1}
		dims, _ := spec["shape"].([]any)
		for _, dim := range dims {
			n, err := wholeNumber(dim)
			if err != nil {
				return nil, err
			}
			out[i].Count *= n
		}
	}
	return out, nil
}

func goldenGroupBySize(g *goldenRun) (map[string]any, error) {
	tensors, err := g.packTensors()
	if err != nil {
		return nil, err
	}
	size, err := wholeNumber(g.c.Options["bytes_per_pack"])
	if err != nil {
		return nil, err
	}
	packs := []any{}
	for _, group := range packing.GroupBySize(tensors, size) {
		indices := []any{}
		for _, i := range group {
			indices = append(indices, i)
		}
		packs = append(packs, indices)
	}
	return map[string]any{"packs": packs}, nil
}

func goldenAllReducePacks(g *goldenRun) (map[string]any, error) {
	tensors, err := g.packTensors()
	if err != nil {
		return nil, err
	}
	o, err := g.options()
	if err != nil {
		return nil, err
	}
	if _, err := g.reduceOp(); err != nil {
		return nil, err
	}
	launches := []any{}
	for _, p := range packing.Plan(tensors, o.BytesPerPack) {
		if !p.Type.IsNumeric() {
			return nil, fmt.Errorf("a reduction of %v: %w", p.Type, distribute.ErrInvalid)
		}
		launches = append(launches, map[string]any{"elements": p.Count, "dtype": p.Type.String()})
	}
	return map[string]any{"launches": launches}, nil
}

// goldenConcatSplitPack packs and unpacks tensors by reducing them over one replica, in packs.
func goldenConcatSplitPack(g *goldenRun) (map[string]any, error) {
	packs, err := wholeNumber(g.c.Options["num_packs"])
	if err != nil {
		return nil, err
	}
	shapes, _ := g.c.Inputs["shapes"].([]any)
	total := 0
	var batch reductions
	for _, dims := range shapes {
		var shape []int
		for _, d := range dims.([]any) {
			n, err := wholeNumber(d)
			if err != nil {
				return nil, err
			}
			shape = append(shape, n)
		}
		t := tensor.New(tensor.Float32, shape...)
		for i := range t.Len() {
			tensor.Data[float32](t)[i] = float32(i)
		}
		total += t.Len()
		batch.add(distribute.NewComponents(t, tensor.New(tensor.Float32, shape...)), "CPU:0")
	}
	ops, err := distribute.NewHierarchicalCopyAllReduce(packs, nil)
	if err != nil {
		return nil, err
	}
	sizes, err := twolevel.Sizes(total, packs)
	if err != nil {
		return nil, err
	}
	unpacked, err := tf.BatchReduceWith(g.Context(), ops, distribute.Sum, batch.values, batch.to)
	list := []any{}
	for _, n := range sizes {
		list = append(list, n)
	}
	return map[string]any{"pack_sizes": list, "unpacked": unpacked}, err
}

func goldenGather(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	axis, err := wholeNumber(g.c.Options["axis"])
	if err != nil {
		return nil, err
	}
	out, err := s.Extended().Gather(g.Context(), v, axis)
	if err != nil {
		return nil, err
	}
	out, err = g.returned(out)
	return map[string]any{"value": out}, err
}

// perReplica returns the case's value for each replica. They must have one structure: TensorFlow got one argument.
func (g *goldenRun) perReplica(name string) ([]any, error) {
	values, err := g.inputs(name, true)
	if err == nil {
		_, err = tf.Regroup(values)
	}
	return values, err
}

func goldenAllGather(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	values, err := g.perReplica("per_replica")
	if err != nil {
		return nil, err
	}
	axis, err := wholeNumber(g.c.Options["axis"])
	if err != nil {
		return nil, err
	}
	o, err := g.options()
	if err != nil {
		return nil, err
	}
	out, err := distribute.Run(g.Context(), s,
		func(ctx context.Context, r *distribute.Replica, v distribute.Value) (distribute.Value, error) {
			return distribute.AllGather(ctx, r, v, axis, o)
		}, values)
	return map[string]any{"per_replica": []any(out)}, err
}

// gradients computes the result of a collective and its gradient on every replica.
func (g *goldenRun) gradients(forward func(context.Context, *distribute.Replica, distribute.Value) (distribute.Value,
	error),
	backward func(ctx context.Context, r *distribute.Replica, x, dy distribute.Value) (distribute.Value, error),
) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	xs, err := g.perReplica("per_replica")
	if err != nil {
		return nil, err
	}
	var dys []any
	if g.c.Inputs["upstream"] != nil {
		if dys, err = g.perReplica("upstream"); err != nil {
			return nil, err
		}
	}
	gradients := make([]any, len(xs))
	outputs, err := distribute.Run(g.Context(), s,
		func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
			y, err := forward(ctx, r, x)
			if err != nil {
				return nil, err
			}
			dy := onesLike(y)
			if dys != nil {
				dy = dys[r.ID()]
			}
			gradients[r.ID()], err = backward(ctx, r, x, dy)
			return y, err
		}, xs)
	return map[string]any{"outputs": []any(outputs), "gradients": gradients}, err
}

// onesLike returns the gradient of the sum of IndexedSlices' values with respect to these.
func onesLike(y distribute.Value) distribute.Value {
	s, ok := y.(*tensor.IndexedSlices)
	if !ok {
		return nil
	}
	out := tensor.New(s.Values.DType(), s.Values.Shape()...)
	for i := range out.Len() {
		setNumber(out, i, 1)
	}
	return out
}

func goldenAllReduceGradient(g *goldenRun) (map[string]any, error) {
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	return g.gradients(func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
		if s, ok := x.(*tensor.IndexedSlices); ok {
			if _, err := timesOne(s.Values); err != nil { // the case does this first
				return nil, err
			}
		}
		return distribute.AllReduce(ctx, r, op, x)
	}, func(ctx context.Context, r *distribute.Replica, x, dy distribute.Value) (distribute.Value, error) {
		return distribute.AllReduceGradient(ctx, r, op, x, dy)
	})
}

func goldenAllGatherGradient(g *goldenRun) (map[string]any, error) {
	axis, err := wholeNumber(g.c.Options["axis"])
	if err != nil {
		return nil, err
	}
	return g.gradients(func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
		return distribute.AllGather(ctx, r, x, axis)
	}, func(ctx context.Context, r *distribute.Replica, x, dy distribute.Value) (distribute.Value, error) {
		return distribute.AllGatherGradient(ctx, r, x, dy, axis)
	})
}

// goldenGatherLimits lists the limits of TensorFlow's gathers and packs, as goldenLimits does those of its reductions.
var goldenGatherLimits = []goldenException{
	{
		"gather-axis", "TensorFlow's collective gather counts no axis from the end",
		func(c *goldenCase, message string) bool {
			axis, _ := wholeNumber(c.Options["axis"])
			return (isGather(c) || c.Op == "all_gather_gradient") && axis < 0 &&
				strings.Contains(message, "Requires start <= limit")
		},
		checkPlainGather,
	},
	{
		"gather-dtypes", "TensorFlow's collective gather knows only some dtypes",
		func(c *goldenCase, message string) bool {
			return (isGather(c) || c.Op == "all_gather_gradient") &&
				strings.Contains(message, "Value passed to parameter 'input' has DataType")
		},
		checkPlainGather,
	},
	{
		"gather-nest", "TensorFlow's gather takes a nest for one value: it fails, or gives the first replica's part",
		func(c *goldenCase, _ string) bool {
			value, _ := c.Inputs["value"].(map[string]any)
			return c.Op == "gather" && (value["kind"] == "list" || value["kind"] == "tuple" || value["kind"] == "dict")
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if errors.Is(err, distribute.ErrInvalid) && strings.Contains(err.Error(), "concatenating dimensions in the range") ||
				errors.Is(err, distribute.ErrMismatch) {
				return nil // a part cannot be gathered in this way
			}
			return checkPlainGather(g, answer, err)
		},
	},
	{
		"nccl-gather", "TensorFlow has no NCCL kernels for CPUs",
		func(c *goldenCase, message string) bool {
			return c.Op == "all_gather_gradient" &&
				(strings.Contains(message, "required for nccl collective ops") ||
					strings.Contains(message, "to support Op 'NcclAllReduce'"))
		},
		checkPlainGather,
	},
	{
		"one-replica-graph", "TensorFlow's collective strategies of one replica have no collectives in a graph, and no " +
			"gradients",
		func(c *goldenCase, message string) bool {
			return (strings.HasSuffix(c.Op, "_gradient") || c.Op == "all_gather" || c.Op == "all_reduce") && c.Replicas == 1 &&
				(strings.Contains(message, "destinations can not be empty") || strings.Contains(message, "slice index"))
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if err != nil {
				return err
			}
			if !strings.HasSuffix(g.c.Op, "_gradient") {
				return match("per_replica", g.c.Inputs["per_replica"], answer["per_replica"], exact)
			}
			return errors.Join(match("outputs", g.c.Inputs["per_replica"], answer["outputs"], exact),
				match("gradients", g.c.Inputs["upstream"], answer["gradients"], exact))
		},
	},
	{
		"sparse-gradient", "TensorFlow has no gradient of a reduction of IndexedSlices",
		func(c *goldenCase, _ string) bool {
			return c.Op == "all_reduce_gradient" && c.Inputs["upstream"] == nil && !c.fails()
		},
		checkSparseGradient,
	},
	{
		"pack-dtypes", "TensorFlow packs tensors of different dtypes into one, and fails",
		func(c *goldenCase, _ string) bool { return c.Op == "all_reduce_packs" && c.fails() },
		checkPackTotals,
	},
}

func isGather(c *goldenCase) bool { return c.Op == "gather" || c.Op == "all_gather" }

// checkPlainGather compares a gather with the parts, element by element.
func checkPlainGather(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	var parts, results []any
	if g.c.Op == "gather" {
		v, err := g.input("value")
		if err != nil {
			return err
		}
		for i := range g.devices {
			part, err := tf.SelectReplica(i, v)
			if err != nil {
				return err
			}
			parts = append(parts, part)
		}
		results = []any{answer["value"]}
	} else {
		if parts, err = g.inputs("per_replica", true); err != nil {
			return err
		}
		results, _ = answer["per_replica"].([]any)
		if g.c.Op == "all_gather_gradient" {
			results, _ = answer["outputs"].([]any)
			if err := checkPlainGatherGradient(g, parts, answer["gradients"].([]any)); err != nil {
				return err
			}
		}
	}
	axis, _ := wholeNumber(g.c.Options["axis"])
	for i, result := range results {
		_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
			var ts []*tensor.Tensor
			for _, leaf := range leaves[1:] {
				if s, ok := leaf.(*tensor.IndexedSlices); ok {
					dense, err := sparse.Densify(s)
					if err != nil {
						return nil, err
					}
					leaf = dense
				}
				ts = append(ts, leaf.(*tensor.Tensor))
			}
			at := axis
			if at < 0 {
				at += ts[0].Rank()
			}
			if err := checkGathered(ts, at, leaves[0].(*tensor.Tensor)); err != nil {
				return nil, fmt.Errorf("result %d%s: %w", i, path, err)
			}
			return nil, nil
		}, nil, append([]any{result}, parts...)...)
		if err != nil {
			return err
		}
	}
	return nil
}

// checkPlainGatherGradient compares each replica's gradient with its rows of the sum of all replicas' gradients of the
// results.
func checkPlainGatherGradient(g *goldenRun, parts, gradients []any) error {
	ups, err := g.inputs("upstream", true)
	if err != nil {
		return err
	}
	axis, _ := wholeNumber(g.c.Options["axis"])
	from := 0
	for i, gradient := range gradients {
		part, got := parts[i].(*tensor.Tensor), gradient.(*tensor.Tensor)
		at := axis
		if at < 0 {
			at += part.Rank()
		}
		if !got.SameShape(part) {
			return fmt.Errorf("replica %d: the gradient of %v is %v", i, part, got)
		}
		inner, n := 1, part.Shape()[at]
		for _, d := range part.Shape()[at+1:] {
			inner *= d
		}
		for k, x := range got.Float64s() {
			want := 0.0
			for _, up := range ups {
				all := up.(*tensor.Tensor)
				outer, rest := k/(n*inner), k%(n*inner)
				want += all.Float64s()[outer*all.Shape()[at]*inner+from*inner+rest]
			}
			if math.Abs(want-x) > 1e-1 && !near(want, x, 1e-2, tolerance{}) {
				return fmt.Errorf("replica %d: element %d of the gradient is %v, want %v", i, k, x, want)
			}
		}
		from += n
	}
	return nil
}

// checkSparseGradient checks the gradient of the sum of all values: each value is in every replica's sum, and in a mean
// divided by their number.
func checkSparseGradient(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	if err := match("outputs", g.c.Expect["outputs"], answer["outputs"], g.tolerance()); err != nil {
		return err
	}
	op, err := g.reduceOp()
	if err != nil {
		return err
	}
	want := float64(len(g.devices))
	if op == distribute.Mean {
		want = 1
	}
	xs, err := g.inputs("per_replica", true)
	if err != nil {
		return err
	}
	for i, x := range xs {
		gradient := answer["gradients"].([]any)[i].(*tensor.Tensor)
		if !gradient.SameShape(x.(*tensor.IndexedSlices).Values) {
			return fmt.Errorf("the gradient of %v is %v", x, gradient)
		}
		for _, got := range gradient.Float64s() {
			if !near(want, got, 1e-6, tolerance{}) {
				return fmt.Errorf("replica %d: the gradient is %v, want %v everywhere", i, gradient, want)
			}
		}
	}
	return nil
}

// checkPackTotals checks that packs have as many elements of each dtype as the tensors.
func checkPackTotals(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	tensors, err := g.packTensors()
	if err != nil {
		return err
	}
	left := map[string]int{}
	for _, t := range tensors {
		left[t.Type.String()] += t.Count
	}
	for _, l := range answer["launches"].([]any) {
		launch := l.(map[string]any)
		left[launch["dtype"].(string)] -= launch["elements"].(int)
	}
	for d, n := range left {
		if n != 0 {
			return fmt.Errorf("%d elements of %s are left over of %v", n, d, answer)
		}
	}
	return nil
}
