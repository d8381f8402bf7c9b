package distribute_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// contextState returns the state that a context reports.
func contextState(ctx context.Context, s *distribute.Strategy) map[string]any {
	state := map[string]any{
		"in_cross_replica_context": distribute.CurrentReplica(ctx) == nil,
		"has_strategy":             distribute.CurrentStrategy(ctx) != distribute.Default(),
		"replica_context":          nil,
		"strategy_is_mine":         distribute.CurrentStrategy(ctx) == s,
		"update_replica_id":        nil,
	}
	if r := distribute.CurrentReplica(ctx); r != nil {
		state["replica_context"] = map[string]any{"replica_id_in_sync_group": r.ID(), "num_replicas_in_sync": r.NumReplicas()}
	}
	if c := distribute.CurrentComponent(ctx); c != nil && c.Variable().Kind() == "MirroredVariable" {
		state["update_replica_id"] = c.Replica()
	} else if c != nil {
		state["update_replica_id"] = "device"
	}
	return state
}

// perReplicaStates runs a step that records the state of its context, and returns the states by replica.
func perReplicaStates(ctx context.Context, s *distribute.Strategy) ([]any, error) {
	return distribute.Run(ctx, s, func(ctx context.Context, _ *distribute.Replica, _ int) (any, error) {
		return contextState(ctx, s), nil
	}, nil)
}

// mergeAlone runs f in a merge call of all replicas and returns how often it was called.
func mergeAlone(
	ctx context.Context, s *distribute.Strategy, f func(context.Context, *distribute.CrossReplica) error,
) (int, error) {
	calls := 0
	_, err := distribute.Run(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) (distribute.Value, error) {
			return distribute.MergeNests(ctx, r,
				func(ctx context.Context, c *distribute.CrossReplica, _ ...distribute.Value) (distribute.Value, error) {
					calls++
					return nil, f(ctx, c)
				})
		}, nil)
	return calls, err
}

func goldenContextQuery(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	ctx := g.Context()
	switch where := g.c.Options["where"]; where {
	case "outside":
		return map[string]any{"value": contextState(ctx, s)}, nil
	case "scope":
		return map[string]any{"value": contextState(s.Scope(ctx), s)}, nil
	case "nested_scope":
		outer := s.Scope(ctx)
		_ = s.Scope(outer)
		return map[string]any{"value": contextState(outer, s)}, nil
	case "after_scope":
		_ = s.Scope(ctx)
		return map[string]any{"value": contextState(ctx, s)}, nil
	case "run":
		states, err := perReplicaStates(ctx, s)
		return map[string]any{"per_replica": states}, err
	case "run_in_scope":
		states, err := perReplicaStates(s.Scope(ctx), s)
		return map[string]any{"per_replica": states}, err
	case "merge_call":
		var state map[string]any
		calls, err := mergeAlone(ctx, s, func(ctx context.Context, c *distribute.CrossReplica) error {
			state = contextState(ctx, s)
			state["strategy_arg_is_mine"] = c.Strategy() == s
			return nil
		})
		return map[string]any{"calls": calls, "value": state}, err
	case "run_in_merge_call":
		var states []any
		_, err := mergeAlone(ctx, s, func(ctx context.Context, c *distribute.CrossReplica) error {
			var err error
			states, err = perReplicaStates(ctx, c.Strategy())
			return err
		})
		return map[string]any{"per_replica": states}, err
	case "update":
		v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: float32(1)})
		if err != nil {
			return nil, err
		}
		states := []any{}
		_, err = s.Extended().Update(ctx, v,
			func(ctx context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
				states = append(states, contextState(ctx, s))
				return valueOf(c), nil
			})
		return map[string]any{"per_component": states}, err
	case "default_merge_call":
		var state map[string]any
		calls := 0
		_, err := distribute.MergeCall(ctx, distribute.CurrentReplica(ctx),
			func(ctx context.Context, _ *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
				calls++
				state = contextState(ctx, s)
				return nil, nil
			}, 0)
		return map[string]any{"calls": calls, "value": state}, err
	default:
		return nil, fmt.Errorf("the runner does not know where %q is", where)
	}
}

// events collects events of replicas that run concurrently.
type events struct {
	mu    sync.Mutex
	lines []string
}

func (e *events) add(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lines = append(e.lines, fmt.Sprintf(format, args...))
}

// scalar returns a float32 scalar.
func scalar(x float64) *tensor.Tensor { return tensor.Scalar(float32(x)) }
