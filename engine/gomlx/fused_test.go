package gomlx

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/model/initializer"
	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestFusedUpdatesKeepBits compares updates by passes over memory with the same graphs executed by the Go backend: for
// every optimizer, type and option, after several steps with several parts, the last with NaNs and infinities, all
// variables have the same bits, except those of NaNs.
func TestFusedUpdatesKeepBits(t *testing.T) {
	ours := func(o gomlxoptimizer.Interface) func() gomlxoptimizer.Interface {
		return func() gomlxoptimizer.Interface { return o }
	}
	schedule := optimizer.LinearWarmup(0.01, 0.1, 2, optimizer.CosineDecay(0.1, 9, 0.1))
	for name, test := range map[string]struct {
		made   func() gomlxoptimizer.Interface
		params map[string]any
	}{
		"sgd":          {made: ours(optimizer.SGD().LearningRate(0.1).Done())},
		"momentum":     {made: ours(optimizer.SGD().Momentum(0.9).WeightDecay(0.01).Done())},
		"nesterov":     {made: ours(optimizer.SGD().Momentum(0.9).Nesterov(true).Schedule(schedule).Done())},
		"adam":         {made: ours(optimizer.Adam().LearningRate(0.01).WeightDecay(0.1).Done())},
		"rmsprop":      {made: ours(optimizer.RMSProp().Momentum(0.5).Centered(true).Done())},
		"rmsprop 2":    {made: ours(optimizer.RMSProp().Done())},
		"ema":          {made: ours(optimizer.EMA(optimizer.Adam().Done(), optimizer.EMAConfig{OverwriteEvery: 2}))},
		"scheduled":    {made: ours(optimizer.Scheduled(gomlxoptimizer.Adam().Done(), schedule))},
		"GoMLX sgd":    {made: ours(gomlxoptimizer.StochasticGradientDescent().Done())},
		"GoMLX adam":   {made: ours(gomlxoptimizer.Adam().Done())},
		"GoMLX adamw":  {made: ours(gomlxoptimizer.Adam().WeightDecay(0.01).Done())},
		"GoMLX adamax": {made: ours(gomlxoptimizer.Adam().Adamax().Done())},
		"GoMLX rms":    {made: ours(gomlxoptimizer.RMSProp().Done())},
		"clipped": {
			made:   ours(optimizer.Adam().LearningRate(1).Done()),
			params: map[string]any{gomlxoptimizer.ParamClipStepByValue: 0.02},
		},
		"without NaN": { // reads each gradient before the pass
			made: ours(optimizer.Adam().Done()), params: map[string]any{gomlxoptimizer.ParamClipNaN: true},
		},
	} {
		for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.BFloat16, tensor.Float16} {
			t.Run(fmt.Sprint(name, " ", dtype), func(t *testing.T) {
				fused, plain := updateModel(t, dtype, test.made(), test.params, true),
					updateModel(t, dtype, test.made(), test.params, false)
				whole := dtype == tensor.Float16 || dtype == tensor.BFloat16 && name == "GoMLX sgd" // which computes in bfloat16
				for _, x := range fused.allUpdates() {
					for _, v := range x.changed {
						f := fused.variables[v]
						if len(f.Shape) > 0 && !whole && !slices.Contains(x.fusedChanges(), v) {
							t.Fatalf("%s is left to the graph", f.Name)
						}
					}
				}
				for step := range 4 {
					factor := []float64{1, 0.3, 1, 0.7}[step]
					updateOnce(t, fused, step, factor)
					updateOnce(t, plain, step, factor)
				}
				for i, v := range fused.Variables() {
					a, err := fused.Read(0, i)
					if err != nil {
						t.Fatal(err)
					}
					b, err := plain.Read(0, i)
					if err != nil {
						t.Fatal(err)
					}
					x, y := a.Memory().HostBytes(), b.Memory().HostBytes()
					got, want := a.Float64s(), b.Float64s()
					for k := range x {
						at := k / v.DType.Bytes()
						if x[k] != y[k] && !(math.IsNaN(got[at]) && math.IsNaN(want[at])) {
							t.Fatalf("element %d of %s is %v, want %v", at, v.Name, got[at], want[at])
						}
					}
				}
			})
		}
	}
}

// updateModel compiles a model of parameters of several sizes, of which one has several chunks.
func updateModel(t *testing.T, dtype tensor.DType, o gomlxoptimizer.Interface, params map[string]any,
	fused bool,
) *program {
	t.Helper()
	e, err := OpenGo(GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	if !fused {
		e.(*backend).fused = nil
	}
	m := &Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			sum, x := in[0], in[0]
			large := 2000
			if x.DType() == dtypes.Float32 {
				large = 70000
			}
			sizes := [][]int{{1}, {7}, {3, 50}, {large}, {}}
			if params[gomlxoptimizer.ParamClipNaN] == nil { // for which the Go backend's Where panics
				sizes = append(sizes, []int{0, 3})
			}
			for i, dims := range sizes {
				v := s.In("%c", rune('a'+i)).WithInitializer(initializer.RandomUniformFn(s, -0.5, 0.5)).
					VariableWithShape("w", shapes.Make(x.DType(), dims...))
				sum = graph.Add(sum, graph.Mul(x, graph.ReduceAllSum(v.NodeValue(x.Graph()))))
			}
			return []*graph.Node{graph.Reshape(sum, -1)}
		},
		Loss: func(_, predictions []*graph.Node) *graph.Node { return predictions[0] }, Optimizer: o, Params: params,
	}
	p, err := m.Compile(context.Background(), e, engine.Spec{
		Rows: 1, Inputs: []engine.Feature{{DType: dtype, Shape: []int{1}}}, Labels: []engine.Feature{{DType: dtype}},
		Devices: e.Devices(), Replicas: 2, BucketBytes: 100, Seed: 5,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p.(*program)
}

// updateOnce takes a step with random gradients, of which some are large, small, 0, or not finite.
func updateOnce(t *testing.T, p *program, step int, factor float64) {
	t.Helper()
	r := rand.New(rand.NewPCG(uint64(step), 1))
	for i := range p.Parameters() {
		g, err := p.Gradient(0, i)
		if err != nil {
			t.Fatal(err)
		}
		for k := range g.Len() {
			x := r.NormFloat64() * math.Exp2(float64(r.IntN(20)-12))
			if r.IntN(10) == 0 {
				x = 0
			}
			if step == 3 && r.IntN(10) == 0 {
				x = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[r.IntN(3)]
			}
			switch g.DType() {
			case tensor.Float32:
				tensor.Data[float32](g)[k] = float32(x)
			case tensor.Float64:
				tensor.Data[float64](g)[k] = x
			case tensor.BFloat16:
				tensor.Data[tensor.BF16](g)[k] = tensor.BF16From(float32(x))
			default:
				tensor.Data[tensor.F16](g)[k] = tensor.F16From(float32(x))
			}
		}
	}
	for part := range p.Parts(0) {
		if err := p.Update(context.Background(), 0, 0, part, factor); err != nil {
			t.Fatal(err)
		}
	}
	p.Commit()
}
