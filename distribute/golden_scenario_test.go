package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// scenario is a program of the cases' generator, in Go. other is a second strategy, where a case names one.
type scenario func(g *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any, error)

func goldenScenario(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	var other *distribute.Strategy
	if spec, ok := g.c.Options["other"].(map[string]any); ok {
		if other = s; !reflect.DeepEqual(spec, g.c.Strategy) { // TensorFlow made one strategy of each kind
			if other, err = g.strategyOf(spec); err != nil {
				return nil, err
			}
		}
	}
	name, _ := g.c.Options["scenario"].(string)
	if why, ok := ruledOut[name]; ok {
		return nil, fmt.Errorf("%w: %s", errNotInGo, why.reason)
	}
	do, ok := scenarios[name]
	if !ok {
		return nil, fmt.Errorf("the runner does not know the scenario %q", name)
	}
	out, err := do(g, g.Context(), s, other)
	if err != nil {
		return nil, err
	}
	return map[string]any{"value": loose(out)}, nil
}

// bareStep is a step function without arguments.
type bareStep = func(context.Context, *distribute.Replica) (distribute.Value, error)

// inRun runs a step function without arguments.
func inRun(ctx context.Context, s *distribute.Strategy, f bareStep) (distribute.Value, error) {
	return distribute.RunNest(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			return f(ctx, r)
		})
}

func one(context.Context, *distribute.Replica) (distribute.Value, error) { return scalar(1), nil }

// mergeValue is a merge function of one argument.
type mergeValue = func(context.Context, *distribute.CrossReplica, distribute.Value) (distribute.Value, error)

// runMerging runs a step that gives a copy of each replica's value to a merge function.
func (g *goldenRun) runMerging(ctx context.Context, s *distribute.Strategy, f mergeValue) (any, error) {
	v, err := g.input("value")
	if err != nil {
		return nil, err
	}
	return distribute.RunNest(ctx, s,
		func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
			x, err := timesOne(args[0])
			if err != nil {
				return nil, err
			}
			return distribute.MergeNests(ctx, r,
				func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
					return f(ctx, c, args[0])
				}, x.OnDevice(r.ID()))
		}, v)
}

// timesOne returns a copy of a tensor, like x * 1.0; integers cannot be multiplied by a float.
func timesOne(v distribute.Value) (*tensor.Tensor, error) {
	t, ok := v.(*tensor.Tensor)
	if !ok || !t.DType().IsFloat() {
		return nil, fmt.Errorf("%v times 1.0: %w", v, distribute.ErrInvalid)
	}
	return t.Clone(), nil
}

// newVariable makes a float32 variable.
func newVariable(
	ctx context.Context, s *distribute.Strategy, x float64, cfg distribute.VariableConfig,
) (*distribute.Variable, error) {
	cfg.Initial = scalar(x)
	return s.NewVariable(ctx, cfg)
}

// kindOf returns the name of TensorFlow's class of a variable.
func kindOf(v *distribute.Variable) string { return v.Kind() }

// errBoom is an error of a step, a ValueError in TensorFlow's cases.
func errBoom(where string) error { return fmt.Errorf("%w: boom from %s", distribute.ErrInvalid, where) }

// assignSeven sets a component to 7.
func assignSeven(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
	return nil, c.Variable().Assign(c, scalar(7))
}

// scenarios are those of the generator, by name, without those in [ruledOut].
var scenarios = map[string]scenario{
	"scope_nested_same_strategy": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return distribute.CurrentStrategy(s.Scope(s.Scope(ctx))) == s, nil
	},
	"scope_nested_other_strategy": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any, error) {
		_, err := other.Cross(other.Scope(s.Scope(ctx)))
		return nil, err
	},
	"scope_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) {
			return s.Cross(s.Scope(ctx))
		})
	},
	"reduce_other_strategy_scope": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any, error) {
		return s.Extended().Reduce(other.Scope(ctx), distribute.Sum, scalar(1), distribute.ReduceOptions{})
	},
	"run_other_strategy_scope": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any, error) {
		return inRun(other.Scope(ctx), s, one)
	},
	"run_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s,
			func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) { return inRun(ctx, s, one) })
	},
	"reduce_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) {
			return s.Extended().Reduce(ctx, distribute.Sum, scalar(1), distribute.ReduceOptions{})
		})
	},
	"gather_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) {
			return s.Extended().Gather(ctx, tensor.From([]float32{1}), 0)
		})
	},
	"reduce_to_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) {
			return s.Extended().ReduceTo(ctx, distribute.Sum, scalar(1), "CPU:0")
		})
	},
	"batch_reduce_to_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) {
			return s.Extended().BatchReduceTo(ctx, distribute.Sum,
				[]distribute.Value{scalar(1)}, []distribute.Value{"CPU:0"})
		})
	},
	"update_inside_run_mirrored": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := newVariable(ctx, s, 1, distribute.VariableConfig{})
		if err != nil {
			return nil, err
		}
		_, err = inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			return distribute.MergeNests(ctx, r,
				func(ctx context.Context, c *distribute.CrossReplica, _ ...distribute.Value) (distribute.Value, error) {
					return c.Strategy().Extended().Update(ctx, v, assignSeven)
				})
		})
		return v.Values(), err
	},
	"merge_call_in_cross_replica": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		kept, err := distribute.Run(ctx, s,
			func(_ context.Context, r *distribute.Replica, _ int) (*distribute.Replica, error) { return r, nil }, nil)
		if err != nil {
			return nil, err
		}
		return distribute.MergeNests(s.Scope(ctx), kept[0],
			func(context.Context, *distribute.CrossReplica, ...distribute.Value) (distribute.Value, error) {
				return 1, nil
			})
	},
	"merge_call_from_other_replica_context": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any,
		error,
	) {
		first := make(chan *distribute.Replica, 1)
		return inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			switch r.ID() {
			case 0:
				first <- r
			case 1:
				return distribute.MergeNests(ctx, <-first, nothing)
			}
			return nil, nil
		})
	},
	"merge_call_uneven_count": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			if r.ID() == 0 {
				if _, err := distribute.MergeNests(ctx, r, nothing); err != nil {
					return nil, err
				}
			}
			return scalar(1), nil
		})
	},
	"merge_call_returns_mirrored": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return g.runMerging(ctx, s,
			func(ctx context.Context, c *distribute.CrossReplica, x distribute.Value) (distribute.Value, error) {
				return c.Strategy().Extended().ReduceTo(ctx, distribute.Sum, x, x)
			})
	},
	"merge_call_returns_per_replica_arg": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return g.runMerging(ctx, s,
			func(_ context.Context, _ *distribute.CrossReplica, x distribute.Value) (distribute.Value, error) {
				return x, nil
			})
	},
	"merge_call_returns_host_tensor": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return g.runMerging(ctx, s,
			func(ctx context.Context, c *distribute.CrossReplica, x distribute.Value) (distribute.Value, error) {
				return c.Strategy().Extended().Reduce(ctx, distribute.Sum, x, distribute.ReduceOptions{})
			})
	},
	"merge_call_kwargs": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := g.input("value")
		if err != nil {
			return nil, err
		}
		return distribute.RunNest(ctx, s,
			func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
				x, err := timesOne(args[0])
				if err != nil {
					return nil, err
				}
				ten, err := mapNumbers(x, func(x float64) float64 { return 10 * x })
				if err != nil {
					return nil, err
				}
				return distribute.MergeNests(ctx, r,
					func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
						sum, err := c.Strategy().Extended().Reduce(ctx, distribute.Sum, args[0], distribute.ReduceOptions{})
						if err != nil {
							return nil, err
						}
						mean, err := c.Strategy().Extended().Reduce(ctx, distribute.Mean, args[1].(map[string]any)["k"],
							distribute.ReduceOptions{})
						if err != nil {
							return nil, err
						}
						return addAll(sum, mean)
					}, args[0], map[string]any{"k": ten})
			}, v)
	},
	"merge_call_uses_replica0_fn": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		called := []any{}
		_, err := inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			id := r.ID()
			return distribute.MergeNests(ctx, r,
				func(context.Context, *distribute.CrossReplica, ...distribute.Value) (distribute.Value, error) {
					called = append(called, id)
					return nil, nil
				})
		})
		return called, err
	},
	"merge_call_order": mergeCallOrder,
	"exception_in_replica_fn": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(_ context.Context, r *distribute.Replica) (distribute.Value, error) {
			if r.ID() == 1 {
				return nil, errBoom("replica 1")
			}
			return scalar(1), nil
		})
	},
	"exception_in_merge_fn": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		_, err := mergeAlone(ctx, s, func(context.Context, *distribute.CrossReplica) error { return errBoom("merge_fn") })
		return nil, err
	},
	"state_ok_after_exception": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		_, err := inRun(ctx, s, func(_ context.Context, r *distribute.Replica) (distribute.Value, error) {
			if r.ID() == 1 {
				return nil, errBoom("replica 1")
			}
			return scalar(1), nil
		})
		if s.NumReplicasInSync() > 1 && err == nil {
			return nil, errors.New("the first Run did not fail")
		}
		out, err := inRun(ctx, s,
			func(context.Context, *distribute.Replica) (distribute.Value, error) { return scalar(2), nil })
		return []any{distribute.CurrentStrategy(ctx) != distribute.Default(), s.Extended().LocalResults(out)}, err
	},
	"run_result_structure_mismatch": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(_ context.Context, r *distribute.Replica) (distribute.Value, error) {
			list := []any{}
			for range r.ID() + 1 {
				list = append(list, scalar(1))
			}
			return list, nil
		})
	},
	"run_result_dict_keys_mismatch": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(_ context.Context, r *distribute.Replica) (distribute.Value, error) {
			return map[string]any{fmt.Sprintf("k%d", r.ID()): scalar(1)}, nil
		})
	},
	"run_options_ignored": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		out, err := inRun(ctx, s,
			func(context.Context, *distribute.Replica) (distribute.Value, error) { return scalar(3), nil })
		return s.Extended().LocalResults(out), err // these options do not exist here
	},
	"per_replica_outside_run": func(_ *goldenRun, _ context.Context, _, _ *distribute.Strategy) (any, error) {
		return tf.Regroup([]distribute.Value{scalar(1), scalar(2)})
	},
	"mirrored_used_outside_run": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := g.input("value")
		if err != nil {
			return nil, err
		}
		if m, ok := v.(*distribute.Mirrored); ok {
			return m.Get(s.Scope(ctx)), nil
		}
		return v, nil
	},
	"var_from_other_strategy_assign_cross": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any,
		error,
	) {
		return withForeign(ctx, s, other, func(v *distribute.Variable, in *distribute.CrossReplica) (any, error) {
			return nil, v.Assign(in, scalar(2))
		})
	},
	"var_from_other_strategy_read_cross": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any,
		error,
	) {
		return withForeign(ctx, s, other,
			func(v *distribute.Variable, in *distribute.CrossReplica) (any, error) { return v.Read(in) })
	},
	"var_from_other_strategy_assign_in_run": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any,
		error,
	) {
		v, err := newVariable(ctx, other, 1, distribute.VariableConfig{Aggregation: distribute.AggregateSum})
		if err != nil {
			return nil, err
		}
		return inRun(ctx, s, func(_ context.Context, r *distribute.Replica) (distribute.Value, error) {
			if err := v.Assign(r, scalar(2)); err != nil {
				return nil, err
			}
			return v.Read(r)
		})
	},
	"plain_var_update": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := newVariable(ctx, distribute.Default(), 1, distribute.VariableConfig{})
		if err != nil {
			return nil, err
		}
		return s.Extended().Update(s.Scope(ctx), v,
			func(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
				return changed(c, c.Variable().Assign(c, scalar(5)))
			})
	},
	"update_per_replica_args": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		x, err := g.input("value")
		if err != nil {
			return nil, err
		}
		v, err := newVariable(ctx, s, 0, distribute.VariableConfig{})
		if err != nil {
			return nil, err
		}
		_, err = s.Extended().Update(s.Scope(ctx), v, updateFunctions["assign_add"], x)
		return v.Values(), err
	},
	"colocate_vars_with": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		ctx = s.Scope(ctx)
		base, err := newVariable(ctx, s, 1, distribute.VariableConfig{Name: "base"})
		if err != nil {
			return nil, err
		}
		if ctx, err = s.Extended().ColocateVariablesWith(ctx, base); err != nil {
			return nil, err
		}
		slot, err := newVariable(ctx, s, 2, distribute.VariableConfig{Name: "slot"})
		if err != nil {
			return nil, err
		}
		return []any{shortDevices(slot.Devices()), kindOf(slot)}, nil
	},
	"colocate_vars_with_plain_var": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return colocate(ctx, s.Scope(ctx), distribute.Default(), s)
	},
	"colocate_vars_with_other_strategy": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any,
		error,
	) {
		return colocate(ctx, s.Scope(ctx), other, s)
	},
	"colocate_vars_with_outside_scope": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return colocate(ctx, ctx, s, s)
	},
	"variable_created_in_scope_plain": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := newVariable(ctx, distribute.Default(), 1, distribute.VariableConfig{})
		return v.Strategy() == s, err
	},
	"variable_created_in_scope_other": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any,
		error,
	) {
		v, err := newVariable(ctx, other, 1, distribute.VariableConfig{})
		return v.Strategy() == s, err
	},
	"create_var_in_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := createInRun(ctx, s, func(r *distribute.Replica) distribute.VariableConfig {
			return distribute.VariableConfig{Initial: scalar(float64(r.ID() + 3))}
		})
		if err != nil {
			return nil, err
		}
		return []any{kindOf(v), v.Values(), v.Name()}, nil
	},
	"create_var_in_run_same_name_twice": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		out, err := inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			list := []any{}
			for i := range 2 {
				v, err := r.Strategy().NewVariable(ctx, distribute.VariableConfig{Name: "foo", Initial: scalar(float64(i + 1))})
				if err != nil {
					return nil, err
				}
				list = append(list, v)
			}
			return list, nil
		})
		if err != nil {
			return nil, err
		}
		values := []any{}
		for _, v := range out.([]any) {
			values = append(values, v.(*distribute.Variable).Values())
		}
		return values, nil
	},
	"create_var_in_run_name_mismatch": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return createInRun(ctx, s, func(r *distribute.Replica) distribute.VariableConfig {
			return distribute.VariableConfig{Name: []string{"foo", "bar"}[min(r.ID(), 1)], Initial: scalar(1)}
		})
	},
	"create_var_only_replica0": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			if r.ID() > 0 {
				return scalar(0), nil
			}
			v, err := r.Strategy().NewVariable(ctx, distribute.VariableConfig{Name: "foo", Initial: scalar(1)})
			if err != nil {
				return nil, err
			}
			return v.Read(r)
		})
	},
	"create_var_in_run_canonical_suffix": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := createInRun(ctx, s, func(r *distribute.Replica) distribute.VariableConfig {
			return distribute.VariableConfig{Name: fmt.Sprintf("foo_%d", r.ID()), Initial: scalar(1)}
		})
		if err != nil {
			return nil, err
		}
		return []any{kindOf(v), v.Name()}, nil
	},
	"init_value_callable_called_once": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		calls := 0
		v, err := s.NewVariable(ctx, distribute.VariableConfig{Init: func(context.Context) (distribute.Value, error) {
			calls++
			return scalar(float64(calls)), nil
		}})
		if err != nil {
			return nil, err
		}
		return []any{calls, v.Values()}, nil
	},
	"set_strategy_inside_scope": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return distribute.WithStrategy(s.Scope(ctx), s)
	},
	"set_strategy_replace_and_clear": func(_ *goldenRun, ctx context.Context, s, other *distribute.Strategy) (any, error) {
		out := []any{}
		for _, next := range []*distribute.Strategy{s, other, nil} {
			var err error
			if ctx, err = distribute.WithStrategy(ctx, next); err != nil {
				return nil, err
			}
			if next == nil {
				out = append(out, distribute.CurrentStrategy(ctx) != distribute.Default())
			} else {
				out = append(out, distribute.CurrentStrategy(ctx) == next)
			}
		}
		return out, nil
	},
	"next_iterator_inside_run": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		set, err := s.DistributeDataset(fromTensors(counting(0, 4)).Batch(2))
		if err != nil {
			return nil, err
		}
		return inRun(ctx, s, func(ctx context.Context, _ *distribute.Replica) (distribute.Value, error) {
			for element, err := range set.Iter(ctx) {
				return element, err
			}
			return nil, nil
		})
	},
	"is_initialized": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := newVariable(ctx, s, 1, distribute.VariableConfig{})
		if err != nil {
			return nil, err
		}
		return !slices.Contains(v.Values(), distribute.Value(nil)), nil
	},
	"all_reduce_bad_reduce_op": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			op, err := collective.ParseReduceOp("MAX")
			if err != nil {
				return nil, err
			}
			return distribute.AllReduce(ctx, r, op, scalar(1))
		})
	},
	"reduce_bad_reduce_op": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		op, err := collective.ParseReduceOp("PROD")
		if err != nil {
			return nil, err
		}
		return s.Extended().Reduce(ctx, op, scalar(1), distribute.ReduceOptions{})
	},
	"reduce_op_not_enum_with_axis": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := g.input("value")
		if err != nil {
			return nil, err
		}
		return s.Extended().Reduce(ctx, 3, v, distribute.ReduceOptions{Axis: []int{0}})
	},
	"reduce_op_not_enum_no_axis": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := g.input("value")
		if err != nil {
			return nil, err
		}
		return s.Extended().Reduce(ctx, 3, v, distribute.ReduceOptions{})
	},
	"batch_reduce_to_mixed_host_device": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := g.input("value")
		if err != nil {
			return nil, err
		}
		ints := distribute.NewComponents(tensor.Scalar(int32(1)), tensor.Scalar(int32(2)))
		out, err := s.Extended().BatchReduceTo(s.Scope(ctx), distribute.Sum,
			[]distribute.Value{v, ints}, []distribute.Value{v, ints})
		return []any(out), err
	},
	"reduce_to_list_destinations": func(g *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := g.input("value")
		if err != nil {
			return nil, err
		}
		return s.Extended().ReduceTo(s.Scope(ctx), distribute.Sum, v, []string{"CPU:0"})
	},
	"batch_reduce_to_empty": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		out, err := s.Extended().BatchReduceTo(s.Scope(ctx), distribute.Sum, nil, nil)
		return append([]any{}, out...), err
	},
	"strategy_reduce_sum_mirrored_variable": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any,
		error,
	) {
		return reduceVariable(ctx, s, distribute.Sum)
	},
	"strategy_reduce_mean_mirrored_variable": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any,
		error,
	) {
		return reduceVariable(ctx, s, distribute.Mean)
	},
	"all_reduce_mirrored_variable": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		v, err := newVariable(ctx, s, 2, distribute.VariableConfig{})
		if err != nil {
			return nil, err
		}
		return inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
			return distribute.AllReduce(ctx, r, distribute.Sum, distribute.Value(v))
		})
	},
	"all_reduce_outside_strategy": func(_ *goldenRun, ctx context.Context, _, _ *distribute.Strategy) (any, error) {
		return distribute.AllReduce(ctx, distribute.CurrentReplica(ctx), distribute.Sum, scalar(5))
	},
	"all_gather_outside_strategy": func(_ *goldenRun, ctx context.Context, _, _ *distribute.Strategy) (any, error) {
		return distribute.AllGather(ctx, distribute.CurrentReplica(ctx), tensor.From([]float32{5}), 0)
	},
	"replica_id_dtype": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		return inRun(ctx, s, func(_ context.Context, r *distribute.Replica) (distribute.Value, error) {
			return tensor.Scalar(int32(r.ID())), nil // an int here, which is not a tensor
		})
	},
	"num_replicas_in_sync": func(_ *goldenRun, _ context.Context, s, _ *distribute.Strategy) (any, error) {
		return s.NumReplicasInSync(), nil
	},
	"strategy_properties": func(_ *goldenRun, _ context.Context, s, _ *distribute.Strategy) (any, error) {
		p := s.Properties()
		var resolver any
		if r := s.Properties().ClusterResolver; r != nil {
			names := map[string]string{reflect.TypeFor[*cluster.TFConfig]().String(): "TFConfigClusterResolver"}
			resolver = names[reflect.TypeOf(r).String()]
		}
		return map[string]any{
			"num_replicas_in_sync": p.NumReplicasInSync, "worker_devices": shortDevices(p.WorkerDevices),
			"parameter_devices": shortDevices(p.ParameterDevices), "should_checkpoint": p.ShouldCheckpoint,
			"should_save_summary": p.ShouldSaveSummary, "experimental_between_graph": p.BetweenGraph,
			"experimental_should_init": p.ShouldInit, "require_static_shapes": p.RequireStaticShapes,
			"cluster_resolver": resolver, "in_multi_worker_mode": p.InMultiWorkerMode,
		}, nil
	},
	"default_strategy_properties": func(_ *goldenRun, ctx context.Context, _, _ *distribute.Strategy) (any, error) {
		d := distribute.Default()
		out, err := inRun(ctx, d,
			func(context.Context, *distribute.Replica) (distribute.Value, error) { return scalar(4), nil })
		if err != nil {
			return nil, err
		}
		sum, err := d.Extended().Reduce(ctx, distribute.Sum, scalar(4), distribute.ReduceOptions{})
		return map[string]any{
			"num_replicas_in_sync": d.NumReplicasInSync(), "run": out, "reduce": sum,
			"local_results_len": len(d.Extended().LocalResults(scalar(4))),
		}, err
	},
	"values_from_function_none": func(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
		out, err := s.Extended().DistributeValues(ctx,
			func(distribute.ValueContext) (distribute.Value, error) { return nil, nil })
		return s.Extended().LocalResults(out), err
	},
}

// nothing is a merge function that does nothing.
func nothing(context.Context, *distribute.CrossReplica, ...distribute.Value) (distribute.Value, error) {
	return nil, nil
}

// mergeCallOrder returns what happens on replicas that merge twice. They run concurrently: events between two
// merges have no order, and are sorted by replica.
func mergeCallOrder(_ *goldenRun, ctx context.Context, s, _ *distribute.Strategy) (any, error) {
	var log events
	_, err := inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
		for k := range 2 {
			log.add("r%d.before%d", r.ID(), k)
			_, err := distribute.MergeCall(ctx, r,
				func(context.Context, *distribute.CrossReplica, distribute.PerReplica[int]) (distribute.Value, error) {
					log.add("merge%d", k)
					return nil, nil
				}, 0)
			if err != nil {
				return nil, err
			}
		}
		log.add("r%d.end", r.ID())
		return nil, nil
	})
	out := []any{}
	for len(log.lines) > 0 {
		end := slices.IndexFunc(log.lines, func(line string) bool { return strings.HasPrefix(line, "merge") })
		if end < 0 {
			end = len(log.lines)
		}
		slices.Sort(log.lines[:end])
		end = min(end+1, len(log.lines))
		for _, line := range log.lines[:end] {
			out = append(out, line)
		}
		log.lines = log.lines[end:]
	}
	return out, err
}

// withForeign calls f with a variable of another strategy, in the cross-replica context of s.
func withForeign(
	ctx context.Context, s, other *distribute.Strategy,
	f func(*distribute.Variable, *distribute.CrossReplica) (any, error),
) (any, error) {
	v, err := newVariable(ctx, other, 1, distribute.VariableConfig{Aggregation: distribute.AggregateSum})
	if err != nil {
		return nil, err
	}
	cross, err := s.Cross(s.Scope(ctx))
	if err != nil {
		return nil, err
	}
	return f(v, cross)
}

// colocate requests that s places variables on the devices of another strategy's variable.
func colocate(ctx, at context.Context, owner, s *distribute.Strategy) (any, error) {
	v, err := newVariable(ctx, owner, 1, distribute.VariableConfig{})
	if err != nil {
		return nil, err
	}
	_, err = s.Extended().ColocateVariablesWith(at, v)
	return nil, err
}

// createInRun makes a variable inside a step.
func createInRun(
	ctx context.Context, s *distribute.Strategy, cfg func(*distribute.Replica) distribute.VariableConfig,
) (*distribute.Variable, error) {
	out, err := inRun(ctx, s, func(ctx context.Context, r *distribute.Replica) (distribute.Value, error) {
		return r.Strategy().NewVariable(ctx, cfg(r))
	})
	if err != nil {
		return nil, err
	}
	return out.(*distribute.Variable), nil
}

func reduceVariable(ctx context.Context, s *distribute.Strategy, op distribute.ReduceOp) (any, error) {
	v, err := newVariable(ctx, s, 2, distribute.VariableConfig{})
	if err != nil {
		return nil, err
	}
	return s.Extended().Reduce(s.Scope(ctx), op, v, distribute.ReduceOptions{})
}

// shortDevices returns device names in the form of the cases: "CPU:0".
func shortDevices(names []string) []any {
	out := []any{}
	for _, name := range names {
		_, short, _ := strings.Cut(name, "/device:")
		out = append(out, short)
	}
	return out
}
