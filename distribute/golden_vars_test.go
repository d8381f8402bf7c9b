package distribute_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// program is a var_program case while it runs.
type program struct {
	*goldenRun
	s     *distribute.Strategy
	vars  []*distribute.Variable
	saved []byte // the last checkpoint
}

// goldenVarProgram executes the steps of a case one after the other; a step that fails does not end the program.
func goldenVarProgram(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	p := &program{goldenRun: g, s: s}
	specs, _ := g.c.Inputs["variables"].([]any)
	for _, spec := range specs {
		v, err := g.variable(s, spec.(map[string]any))
		if err != nil {
			return nil, err
		}
		p.vars = append(p.vars, v)
	}
	steps, _ := g.c.Inputs["steps"].([]any)
	out := []any{}
	for _, st := range steps {
		result, err := p.step(st.(map[string]any))
		out = append(out, stepAnswer{result, err})
	}
	return map[string]any{"steps": out}, nil
}

// stepAnswer is one step's result, or its error.
type stepAnswer struct {
	result any
	err    error
}

// variableMutations are the writes to a variable, by the names in steps.
var variableMutations = map[string]func(*distribute.Variable, distribute.Context, distribute.Value) error{
	"assign": (*distribute.Variable).Assign, "assign_add": (*distribute.Variable).AssignAdd,
	"assign_sub":  (*distribute.Variable).AssignSub,
	"scatter_add": scatter(distribute.ScatterAdd), "scatter_sub": scatter(distribute.ScatterSub),
	"scatter_mul": scatter(distribute.ScatterMul), "scatter_div": scatter(distribute.ScatterDiv),
	"scatter_min": scatter(distribute.ScatterMin), "scatter_max": scatter(distribute.ScatterMax),
	"scatter_update": scatter(distribute.ScatterUpdate),
}

func (p *program) step(st map[string]any) (any, error) {
	v := p.vars[0]
	if n, ok := st["var"].(json.Number); ok {
		i, err := n.Int64()
		if err != nil || i < 0 || int(i) >= len(p.vars) {
			return nil, fmt.Errorf("no variable %v", n)
		}
		v = p.vars[i]
	}
	cross, err := p.s.Cross(p.Context())
	if err != nil {
		return nil, err
	}
	do, _ := st["do"].(string)
	if change, ok := variableMutations[do]; ok {
		return p.mutate(st, v, cross, change)
	}
	inCross := st["context"] == "cross"
	switch do {
	case "read", "value":
		return p.read(v, cross, inCross, func(t *tensor.Tensor) (distribute.Value, error) { return t, nil })
	case "add_scalar":
		x, err := decodeValue(st["value"], p.devices)
		if err != nil {
			return nil, err
		}
		return p.read(v, cross, inCross, func(t *tensor.Tensor) (distribute.Value, error) {
			x := x // a copy for each replica
			if host, ok := hostNumber(x); ok {
				if !t.DType().IsNumeric() {
					return addAll(t, t) // it returns the reason
				}
				number := tensor.New(t.DType())
				setNumber(number, 0, host)
				x = number
			}
			if t.DType() == tensor.String {
				return appended(t, x)
			}
			return addAll(t, spread(x, t))
		})
	case "read_outside_scope", "read_var":
		return v.Read(cross)
	case "components":
		return v.Values(), nil
	case "reduce":
		op, err := collective.ParseReduceOp(st["reduce_op"].(string))
		if err != nil {
			return nil, err
		}
		out, err := p.s.Extended().Reduce(p.s.Scope(p.Context()), op, v, distribute.ReduceOptions{})
		if same, isVar := out.(*distribute.Variable); isVar && err == nil {
			return same.Read(cross) // the value now, not after the steps that follow
		}
		return out, err
	case "update":
		return p.update(st, v, cross, inCross)
	case "save":
		t, err := v.Saved(cross)
		if err != nil {
			return nil, err
		}
		return t, p.save(t)
	case "save_plain":
		x, err := decodeValue(st["value"], p.devices)
		if err != nil {
			return nil, err
		}
		plain, err := distribute.Default().NewVariable(p.Context(), distribute.VariableConfig{Initial: x})
		if err != nil {
			return nil, err
		}
		return nil, p.save(plain.Values()[0].(*tensor.Tensor))
	case "restore":
		t, err := p.load()
		if err != nil {
			return nil, err
		}
		if err := v.Restore(cross, t); err != nil {
			return nil, err
		}
		return v.Values(), nil
	case "restore_plain":
		return p.restorePlain(v)
	}
	return nil, fmt.Errorf("the runner does not know the step %q", do)
}

// mutate writes a variable and returns what TensorFlow's methods return: the new value.
func (p *program) mutate(
	st map[string]any, v *distribute.Variable, cross *distribute.CrossReplica,
	change func(*distribute.Variable, distribute.Context, distribute.Value) error,
) (any, error) {
	values := []any{}
	if st["values"] == nil {
		x, err := decodeValue(st["value"], p.devices)
		if err != nil {
			return nil, err
		}
		if st["context"] == "cross" {
			return p.mutateCross(st, v, cross, func(in distribute.Context) error { return change(v, in, x) })
		}
		for range p.s.NumReplicasInSync() {
			values = append(values, x)
		}
	} else {
		var err error
		if values, err = decodeList(st["values"], p.devices, true); err != nil {
			return nil, err
		}
	}
	out, err := distribute.RunNest(p.Context(), p.s,
		func(_ context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			if err := change(v, r, values[r.ID()]); err != nil {
				return nil, err
			}
			return v.Read(r)
		})
	if err != nil || st["no_result"] == true {
		return nil, err
	}
	results := p.s.Extended().LocalResults(out)
	if do, _ := st["do"].(string); v.Kind() == "AggregatingVariable" && !strings.HasPrefix(do, "scatter_") {
		return results[:1], nil // an assignment returns the variable in TensorFlow, and all replicas the same one
	}
	return results, nil
}

func (p *program) mutateCross(
	st map[string]any, v *distribute.Variable, cross *distribute.CrossReplica, change func(distribute.Context) error,
) (any, error) {
	readBack := v.Kind() == "SyncOnReadVariable" && v.Config().Aggregation == distribute.AggregateNone // this fails
	if err := change(cross); err != nil || st["no_result"] == true && !readBack {
		return nil, err
	}
	if v.Kind() == "MirroredVariable" && len(v.Values()) > 1 {
		return mirroredOf(v.Values()...), nil
	}
	return v.Read(cross) // TensorFlow reads a sync-on-read variable back, which needs an aggregation
}

// read reads a variable in either context, in replica context on each replica, and applies f.
func (p *program) read(
	v *distribute.Variable, cross *distribute.CrossReplica, inCross bool, f func(*tensor.Tensor) (distribute.Value, error),
) (any, error) {
	if inCross {
		t, err := v.Read(cross)
		if err != nil {
			return nil, err
		}
		return f(t)
	}
	out, err := distribute.Run(p.Context(), p.s,
		func(_ context.Context, r *distribute.Replica, _ int) (distribute.Value, error) {
			t, err := v.Read(r)
			if err != nil {
				return nil, err
			}
			return f(t)
		}, nil)
	return []any(out), err
}

// spread returns a scalar as a tensor of t's shape, and any other value unchanged.
func spread(x distribute.Value, t *tensor.Tensor) distribute.Value {
	s, ok := x.(*tensor.Tensor)
	if !ok || s.Rank() != 0 || t.Rank() == 0 || !s.DType().IsNumeric() {
		return x
	}
	out := tensor.New(s.DType(), t.Shape()...)
	for i := range out.Len() {
		setNumber(out, i, s.Float64s()[0])
	}
	return out
}

// appended returns a tensor of strings with a suffix on each.
func appended(t *tensor.Tensor, x distribute.Value) (distribute.Value, error) {
	tail, ok := x.(*tensor.Tensor)
	if !ok || tail.DType() != tensor.String || tail.Len() != 1 {
		return nil, fmt.Errorf("%v behind a text: %w", x, distribute.ErrInvalid)
	}
	out := t.Clone()
	for i := range out.StringData() {
		out.StringData()[i] += tail.StringData()[0]
	}
	return out, nil
}

// updateFunctions are the update functions, by the names in steps.
var updateFunctions = map[string]distribute.UpdateFunc{
	"assign": func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
		return changed(c, c.Variable().Assign(c, args[0]))
	},
	"assign_add": func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
		return changed(c, c.Variable().AssignAdd(c, args[0]))
	},
	"assign_sub": func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
		return changed(c, c.Variable().AssignSub(c, args[0]))
	},
	"read": func(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
		return valueOf(c), nil
	},
	"scale_add": func(ctx context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
		by, ok := spread(asTensor(args[0], valueOf(c).DType()), valueOf(c)).(*tensor.Tensor)
		if !ok || by.DType() != valueOf(c).DType() || !by.SameShape(valueOf(c)) || !by.DType().IsNumeric() {
			_, err := addAll(valueOf(c), args[0]) // it returns the reason
			return nil, errors.Join(fmt.Errorf("scale_add by %v: %w", args[0], distribute.ErrInvalid), err)
		}
		scaled := tensor.New(valueOf(c).DType(), valueOf(c).Shape()...)
		for i := range scaled.Len() {
			setProduct(scaled, i, valueOf(c), by)
		}
		sum, err := addAll(scaled, spread(asTensor(args[1], valueOf(c).DType()), valueOf(c)))
		if err != nil {
			return nil, err
		}
		return changed(c, c.Variable().Assign(c, sum))
	},
	"return_list": func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
		if err := c.Variable().AssignAdd(c, args[0]); err != nil {
			return nil, err
		}
		if !valueOf(c).DType().IsFloat() {
			return nil, fmt.Errorf("10.0 is not of type %v: %w", valueOf(c).DType(), distribute.ErrInvalid)
		}
		ten, err := mapNumbers(valueOf(c), func(x float64) float64 { return 10 * x })
		return []any{valueOf(c), ten}, err
	},
}

func changed(c *distribute.Component, err error) (distribute.Value, error) {
	if err != nil {
		return nil, err
	}
	return valueOf(c), nil
}

// asTensor returns a host number as a tensor of the dtype, and a tensor as it is.
func asTensor(v distribute.Value, d tensor.DType) distribute.Value {
	x, ok := hostNumber(v)
	if !ok || !d.IsNumeric() {
		return v
	}
	t := tensor.New(d)
	setNumber(t, 0, x)
	return t
}

func (p *program) update(
	st map[string]any, v *distribute.Variable, cross *distribute.CrossReplica, inCross bool,
) (any, error) {
	name, _ := st["fn"].(string)
	f, ok := updateFunctions[name]
	if !ok {
		return nil, fmt.Errorf("the runner does not know the update function %q", name)
	}
	args := []any{}
	if st["args"] != nil {
		var err error
		if args, err = decodeList(st["args"], p.devices, false); err != nil {
			return nil, err
		}
	}
	update := p.s.Extended().Update
	if st["group"] == false {
		update = p.s.Extended().UpdateUngrouped
	}
	if inCross {
		out, err := update(p.Context(), v, f, args...)
		return loose(out), err
	}
	if st["values"] != nil {
		values, err := decodeList(st["values"], p.devices, true)
		if err != nil {
			return nil, err
		}
		args = []any{distribute.NewComponents(values...)}
		if len(values) == 1 {
			args = values
		}
	}
	op, err := collective.ParseReduceOp(st["reduce_op"].(string))
	if err != nil {
		return nil, err
	}
	out, err := distribute.RunNest(p.Context(), p.s,
		func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
			return distribute.MergeNests(ctx, r,
				func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
					for i, arg := range args {
						var err error
						if args[i], err = c.Strategy().Extended().ReduceTo(ctx, op, arg, v); err != nil {
							return nil, err
						}
					}
					return update(ctx, v, f, args...)
				}, args...)
		}, args...)
	if err != nil {
		return nil, err
	}
	return loose(p.s.Extended().LocalResults(out)), nil
}

// loose converts tuples to lists, which TensorFlow's answers do not distinguish here.
func loose(v any) any {
	switch v := v.(type) {
	case tensor.Tuple:
		return loose([]any(v))
	case []any:
		out := slices.Clone(v)
		for i, x := range out {
			out[i] = loose(x)
		}
		return out
	}
	return v
}

// save writes a checkpoint of one variable.
func (p *program) save(t *tensor.Tensor) error {
	var file bytes.Buffer
	if err := checkpoint.Write(&file, []checkpoint.Tensor{{Name: "var", Value: t}}, nil); err != nil {
		return fmt.Errorf("%w: %w", distribute.ErrInvalid, err)
	}
	p.saved = file.Bytes()
	return nil
}

var errNothingSaved = fmt.Errorf("%w: no checkpoint was saved", distribute.ErrInvalid)

// load reads the last checkpoint.
func (p *program) load() (*tensor.Tensor, error) {
	if p.saved == nil {
		return nil, errNothingSaved
	}
	tensors, _, err := checkpoint.Read(bytes.NewReader(p.saved), int64(len(p.saved)))
	if err != nil {
		return nil, err
	}
	return tensors[0].Value, nil
}

// restorePlain restores a variable without a strategy from the last checkpoint.
func (p *program) restorePlain(v *distribute.Variable) (any, error) {
	t, err := p.load()
	if err != nil {
		return nil, err
	}
	d := distribute.Default()
	plain, err := d.NewVariable(p.Context(), distribute.VariableConfig{Initial: tensor.New(v.DType(), v.Shape()...)})
	if err != nil {
		return nil, err
	}
	cross, err := d.Cross(p.Context())
	if err != nil {
		return nil, err
	}
	if err := plain.Restore(cross, t); err != nil {
		return nil, err
	}
	return plain.Values()[0], nil
}

// matchSteps compares the steps of a program with TensorFlow's, each of which may be an error. accident reports
// which of TensorFlow's errors to ignore.
func matchSteps(want []any, got []any, tol tolerance, accident func(message string) bool) error {
	if len(want) != len(got) {
		return fmt.Errorf("got %d steps, want %d", len(got), len(want))
	}
	for i, w := range want {
		expect, _ := w.(map[string]any)
		step := got[i].(stepAnswer)
		if message, _ := expect["error_message"].(string); accident(message) {
			if step.err != nil {
				return fmt.Errorf("step %d: %w", i, step.err)
			}
			continue
		}
		if kind, isError := expect["error_type"].(string); isError {
			message, _ := expect["error_message"].(string)
			if err := matchError(kind, message, map[string]any{"result": step.result}, step.err); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			continue
		}
		if step.err != nil {
			return fmt.Errorf("step %d: got the error: %w", i, step.err)
		}
		want, ok := expect["result"]
		if !ok {
			want = expect["value"]
		}
		if err := match(fmt.Sprintf("step %d", i), want, step.result, tol); err != nil {
			return err
		}
	}
	return nil
}

// failedWrite returns the first step of a program, except for the last, that writes on the replicas or updates, and
// fails; else -1.
func failedWrite(c *goldenCase) int {
	steps, _ := c.Inputs["steps"].([]any)
	answers, _ := c.Expect["steps"].([]any)
	for i, st := range steps[:max(len(steps)-1, 0)] {
		step, _ := st.(map[string]any)
		do, _ := step["do"].(string)
		if i >= len(answers) {
			break
		}
		answer, _ := answers[i].(map[string]any)
		if _, writes := variableMutations[do]; answer["error_type"] != nil &&
			(do == "update" || writes && step["context"] == "replica") {
			return i
		}
	}
	return -1
}

// checkNothingWritten compares the steps before a failing write with TensorFlow's, and the values after the write with
// those before it.
func checkNothingWritten(g *goldenRun, _ map[string]any, _ error) error {
	i := failedWrite(g.c)
	steps, _ := g.c.Inputs["steps"].([]any)
	look := map[string]any{"do": "components"}
	if v, ok := steps[i].(map[string]any)["var"]; ok {
		look["var"] = v
	}
	looking := *g.c
	looking.Inputs = maps.Clone(g.c.Inputs)
	looking.Inputs["steps"] = append(slices.Clone(steps[:i]), look, steps[i], look)
	answer, err := goldenVarProgram(&goldenRun{T: g.T, c: &looking})
	if err != nil {
		return err
	}
	got := answer["steps"].([]any)
	want, _ := g.c.Expect["steps"].([]any)
	before, write, after := got[i].(stepAnswer), got[i+1].(stepAnswer), got[i+2].(stepAnswer)
	if bitsOf(before) != bitsOf(after) {
		return fmt.Errorf("step %d has failed and changed %v to %v", i, before.result, after.result)
	}
	return matchSteps(want[:i+1], append(slices.Clone(got[:i]), write), g.tolerance(), func(string) bool { return false })
}

// isHostZeroAccident reports whether TensorFlow crashed on the host number 0, whose sum over the replicas is 0.
func isHostZeroAccident(message string) bool {
	return strings.Contains(message, "has no attribute 'shape'")
}

// checkHostZero compares all steps of a program with TensorFlow's, except those in which it crashed on a host number 0.
func checkHostZero(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	want, _ := g.c.Expect["steps"].([]any)
	got, ok := answer["steps"].([]any)
	if !ok {
		return errors.New("no steps")
	}
	return matchSteps(want, got, g.tolerance(), isHostZeroAccident)
}
