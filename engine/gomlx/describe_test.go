package gomlx_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// constants are values in a model that are not variables. Each choice makes a different program.
type constants struct {
	dropout, scale, l2, beta, decay, clip float64
	tanh, inference, another              bool
	table                                 []float32 // too long to be printed
	loop, step                            int
}

func someConstants() constants {
	return constants{
		dropout: 0.5, scale: 2, l2: 1e-3, beta: 0.9, decay: 1e-4, clip: 5, table: make([]float32, 12),
		loop: 3, step: 1,
	}
}

func (c constants) model() *gomlx.Model {
	forward := func(s *model.Scope, inputs []*graph.Node) []*graph.Node {
		x := inputs[0]
		g := x.Graph()
		x = graph.Mul(x, graph.ExpandLeftToRank(graph.Const(g, c.table), 2))
		x = layer.Dense(s.In("first"), x, 6)
		train.AddRegularizationLoss(graph.MulScalar(graph.ReduceAllSum(graph.Square(x)), c.l2))
		x = layer.SyncBatchNorm(s.In("norm"), x)
		if c.tanh {
			x = graph.Tanh(x)
		} else {
			x = layer.Relu(x)
		}
		x = layers.DropoutStatic(s, x, c.dropout)
		x = graph.MulScalar(x, c.scale)
		if c.another {
			x = graph.Neg(graph.Neg(x))
		}
		if c.inference && !s.IsTraining(g) {
			x = graph.AddScalar(x, 1)
		}
		limit := graph.Const(g, int32(c.loop))
		condition := graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			i := graph.Parameter(g, "i", limit.Shape())
			return []*graph.Node{graph.LessThan(i, limit)}
		})
		body := graph.NewClosure(g, func(g *graph.Graph) []*graph.Node {
			i := graph.Parameter(g, "i", limit.Shape())
			return []*graph.Node{graph.AddScalar(i, float64(c.step))}
		})
		end := graph.While(condition, body, graph.Const(g, int32(0)))
		x = graph.Add(x, graph.StopGradient(graph.ConvertDType(end[0], x.DType())))
		return []*graph.Node{layer.Dense(s.In("last"), x, 3)}
	}
	return &gomlx.Model{
		Forward: forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().Betas(c.beta, 0.999).WeightDecay(c.decay).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
		Params:    map[string]any{optimizer.ParamClipStepByValue: c.clip},
	}
}

// describe compiles a model for two replicas, and returns the description of its programs.
func (c constants) describe(t *testing.T, e engine.Engine) []string {
	t.Helper()
	s := features(e, 4, 12)
	s.Replicas, s.BucketBytes = 2, 100
	s.Sum = func(context.Context, int, []*tensor.Tensor, []*tensor.Tensor, []string) error { return nil }
	return compile(t, c.model(), e, s).Info().Operations
}

// TestDescribe checks that equal models have equal descriptions, however often they are built, and that every constant
// that a model's result depends on changes the description, which shows the first difference.
func TestDescribe(t *testing.T) {
	eachEngine(t, 2, func(t *testing.T, e engine.Engine) {
		want := someConstants().describe(t, e)
		slow := e.Name() == "xla" // to compile
		for range map[bool]int{false: 10, true: 1}[slow] {
			if got := someConstants().describe(t, e); !slices.Equal(got, want) {
				t.Fatalf("the same model has two descriptions: %s", firstDifference(got, want))
			}
		}
		for _, line := range want {
			if strings.Contains(line, "0x") || strings.Contains(line, "0xc0") {
				t.Errorf("an address: %s", line)
			}
		}
		for _, name := range []string{
			"gradients: return", "update 1 of 2: return", "update 2 of 2: return", "evaluate: return",
			"predict: return",
		} {
			if !slices.ContainsFunc(want, func(line string) bool { return strings.HasPrefix(line, name) }) {
				t.Errorf("the %s is missing", name)
			}
		}
		for _, test := range []struct {
			name   string
			change func(c *constants)
			shown  string // in the first line that differs; "": anything
		}{
			{"dropout", func(c *constants) { c.dropout = 0.3 }, "0.3"},
			{"scale", func(c *constants) { c.scale = 2.5 }, "2.5"},
			{"by a bit", func(c *constants) { c.scale = 2.0000002384185791015625 }, "2.0000002"},
			{"regularisation", func(c *constants) { c.l2 = 2e-3 }, "0.00"},
			{"optimizer's beta", func(c *constants) { c.beta = 0.8 }, "update 1 of 2"},
			{"weight decay", func(c *constants) { c.decay = 1e-3 }, "update 1 of 2"},
			{"clipping", func(c *constants) { c.clip = 6 }, "update 1 of 2"},
			{"activation", func(c *constants) { c.tanh = true }, "gradients: "},
			{"layer without variables", func(c *constants) { c.another = true }, "gradients: "},
			{"inference only", func(c *constants) { c.inference = true }, "evaluate: "},
			{"long constant", func(c *constants) { c.table = slices.Clone(c.table); c.table[11] = 1 }, "Constant"},
			{"captured by a loop", func(c *constants) { c.loop = 4 }, "Constant"},
			{"inside of a loop", func(c *constants) { c.step = 3 }, "While"},
		} {
			if slow && !slices.Contains([]string{"dropout", "inference only"}, test.name) {
				continue
			}
			c := someConstants()
			test.change(&c)
			got := c.describe(t, e)
			if slices.Equal(got, want) {
				t.Errorf("%s: the description is the same", test.name)
			} else if text := firstDifference(got, want); !strings.Contains(text, test.shown) {
				t.Errorf("%s: the first difference is %s, want %s in it", test.name, text, test.shown)
			}
		}
	})
}

// TestDescribeShards checks that processes with different shards describe their programs alike, with the update of all
// parameters.
func TestDescribeShards(t *testing.T) {
	e := openEngine(t, "go", 1)
	describe := func(shard int, beta float64) []string {
		s := features(e, 4, 12)
		s.Replicas, s.BucketBytes, s.Shards, s.ReplicaShards = 2, 100, 2, []int{shard}
		s.Sum = func(context.Context, int, []*tensor.Tensor, []*tensor.Tensor, []string) error { return nil }
		c := someConstants()
		c.beta = beta
		return compile(t, c.model(), e, s).Info().Operations
	}
	first := describe(0, 0.9)
	if second := describe(1, 0.9); !slices.Equal(first, second) {
		t.Errorf("two shards have two descriptions: %s", firstDifference(first, second))
	}
	if text := firstDifference(describe(1, 0.8), first); !strings.Contains(text, "update: ") {
		t.Errorf("another optimizer differs in %s, want the update", text)
	}
}

func firstDifference(got, want []string) string {
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return fmt.Sprintf("%q, not %q", got[i], want[i])
		}
	}
	return fmt.Sprintf("%d lines, not %d", len(got), len(want))
}
