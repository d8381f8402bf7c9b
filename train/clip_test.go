package train

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestClipByGlobalNorm checks the norm of tensors of all types and sizes, and that clipping reduces it to the limit.
func TestClipByGlobalNorm(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16} {
		var list []*tensor.Tensor
		want := 0.0
		for _, n := range []int{0, 1, 4095, 4096, 4097, 20000} {
			x := tensor.New(dtype, n)
			numbers := tensor.New(tensor.Float32, n)
			for i := range n {
				tensor.Data[float32](numbers)[i] = random.Float32() - 0.5
			}
			if dtype == tensor.Float64 {
				x = tensor.Of(numbers.Float64s(), n)
			} else {
				kernel.Convert(dtype, tensor.Float32, x.Memory().Ptr, numbers.Memory().Ptr, n)
			}
			for _, v := range x.Float64s() {
				want += v * v
			}
			list = append(list, x)
		}
		want = math.Sqrt(want)
		if got := GlobalNorm(list); math.Abs(got-want) > 1e-12*want {
			t.Errorf("%v: the norm is %v, want %v", dtype, got, want)
		}
		before := fmt.Sprint(list[2].Float64s())
		if got := ClipByGlobalNorm(list, 2*want); math.Abs(got-want) > 1e-12*want ||
			fmt.Sprint(list[2].Float64s()) != before {
			t.Errorf("%v: the norm is %v, want %v; elements changed below the limit", dtype, got, want)
		}
		if got := ClipByGlobalNorm(list, want/4); math.Abs(got-want) > 1e-12*want {
			t.Errorf("%v: the norm before clipping is %v, want %v", dtype, got, want)
		}
		if got := GlobalNorm(list); math.Abs(got-want/4) > 1e-3*want {
			t.Errorf("%v: the norm after clipping is %v, want %v", dtype, got, want/4)
		}
	}
	bad := []*tensor.Tensor{tensor.From([]float32{1, float32(math.Inf(1))})}
	if got := ClipByGlobalNorm(bad, 1); !math.IsInf(got, 1) || !math.IsNaN(float64(tensor.Data[float32](bad[0])[0])) {
		t.Errorf("clipped by the norm %v: %v, want NaNs", got, bad[0])
	}
}

func TestClippingConfig(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for want, change := range map[string]func(*Config){
		"Config.ClipNorm is -1":                                        func(c *Config) { c.ClipNorm = -1 },
		"Config.ClipVariableNorm is NaN":                               func(c *Config) { c.ClipVariableNorm = math.NaN() },
		"Config.ClipValue is +Inf":                                     func(c *Config) { c.ClipValue = math.Inf(1) },
		"ClipNorm 1, ClipVariableNorm 0 and ClipValue 2: set only one": func(c *Config) { c.ClipNorm, c.ClipValue = 1, 2 },
	} {
		cfg := fakeConfig(4)
		change(&cfg)
		if _, err := New(t.Context(), s, fakeModel{}, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestClipped checks each way to clip in one step of gradient descent.
func TestClipped(t *testing.T) {
	after := func(change func(*Config)) []float64 {
		cfg := fakeConfig(6)
		change(&cfg)
		trainer, p := newFakeWith(t, 2, cfg, fakeModel{rate: 1})
		if _, err := trainer.Fit(t.Context(), batches(lineExamples(6)), FitConfig{}); err != nil {
			t.Fatal(err)
		}
		v := p.replicas[1].now
		return []float64{-v[0][0], 3 - v[1][0], -v[1][1]} // the gradients: the weights start at 3 and 0, the bias at 0
	}
	g := after(func(*Config) {})
	norm := math.Sqrt(g[0]*g[0] + g[1]*g[1] + g[2]*g[2])
	weights := math.Sqrt(g[1]*g[1] + g[2]*g[2])
	limit := 0.75 * math.Min(math.Abs(g[0]), weights)
	sign := func(x float64) float64 { return math.Copysign(1, x) }
	clamped := make([]float64, 3)
	for i, x := range g {
		clamped[i] = sign(x) * min(math.Abs(x), limit)
	}
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   []float64
	}{
		{"norm", func(c *Config) { c.ClipNorm = norm / 2 }, []float64{g[0] / 2, g[1] / 2, g[2] / 2}},
		{"norm above", func(c *Config) { c.ClipNorm = norm * 1.01 }, g},
		{"variable norm", func(c *Config) { c.ClipVariableNorm = limit }, []float64{
			sign(g[0]) * limit, g[1] * limit / weights, g[2] * limit / weights,
		}},
		{"value", func(c *Config) { c.ClipValue = limit }, clamped},
	} {
		for i, x := range after(c.change) {
			if !close64(x, c.want[i]) {
				t.Errorf("%s: gradient %d is %v, want %v of %v", c.name, i, x, c.want[i], g[i])
			}
		}
	}
}

// TestClippingByAnInfiniteNorm: gradients of 1e200 are finite, and the sum of their squares is not.
func TestClippingByAnInfiniteNorm(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"the gradients' norm overflows":                 func(c *Config) { c.ClipNorm = 1 },
		"the norm of the gradient of weights overflows": func(c *Config) { c.ClipVariableNorm = 1 },
	} {
		cfg := fakeConfig(6)
		change(&cfg)
		trainer, p := newFakeWith(t, 2, cfg, fakeModel{})
		before := p.snapshot()
		b := lineExamples(6)
		tensor.Data[float64](b.Inputs[0])[0] = 1e150
		clear(tensor.Data[float64](b.Labels[0]))
		b.Weights = tensor.Of([]float32{1e-30, 0, 0, 0, 0, 0}, 6)
		tensor.Data[float32](b.Weights)[1] = 1
		_, err := trainer.Fit(t.Context(), batches(b), FitConfig{})
		var problem *NotFiniteError
		if !errors.As(err, &problem) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "a norm of the gradients of step 1 is not finite, though its loss is ") {
			t.Errorf("got %v, want %q", err, want)
		}
		gradients, _, err := trainer.Gradients(t.Context(), lineExamples(6))
		if err != nil {
			t.Fatal(err)
		}
		tensor.Data[float64](gradients[1])[1] = 1e200
		if err := trainer.ApplyGradients(t.Context(), gradients); err == nil || !strings.Contains(err.Error(), "not finite") {
			t.Errorf("applying gradients of 1e200: %v", err)
		}
		if trainer.Steps() != 0 || fmt.Sprint(p.snapshot()[0][:4]) != fmt.Sprint(before[0][:4]) {
			t.Errorf("%s: variables changed from %v to %v", want, before, p.snapshot())
		}
	}
}

// TestClippingHasTheSameBits checks that norms and weights of clipped trainings do not depend on how the replicas are
// divided among workers, nor on the buckets, nor on sharding.
func TestClippingHasTheSameBits(t *testing.T) {
	text, err := os.ReadFile("testdata/golden-train.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Cases []json.RawMessage }
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	trained := 0
	for _, raw := range file.Cases {
		var c goldenTraining
		if err := json.Unmarshal(raw, &c); err != nil {
			t.Fatal(err)
		}
		if c.ClipGlobalNorm == 0 || c.EMA != 0 || trained == 4 {
			continue
		}
		trained++
		var want string
		for _, layout := range [][]int{{4}, {2, 2}, {1, 1, 1, 1}} {
			for i := range 4 {
				c.bucketBytes = i / 2
				shardFakes(t, []Exchange{AllReduce{}, Sharded{}}[i%2])
				for w, got := range c.over(t, layout) {
					text := fmt.Sprint(got.norms, got.weights, got.stepLoss == nil)
					if want == "" {
						want = text
					}
					if text != want {
						t.Errorf("%s: workers with %v replicas, buckets of %d bytes, sharding %v, worker %d: other bits", c.ID,
							layout, c.bucketBytes, fakeSharding, w)
					}
				}
			}
		}
	}
	if trained == 0 {
		t.Error("no training clips")
	}
}

// over makes the training with the layout, and returns each worker's results.
func (c *goldenTraining) over(t *testing.T, layout []int) []*trainedGolden {
	t.Helper()
	engines := make([]engine.Engine, len(layout))
	for w, n := range layout {
		e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: n})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		engines[w] = e
	}
	results := make([]*trainedGolden, len(layout))
	for _, err := range overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) (err error) {
		results[w], err = c.train(t.Context(), s)
		return err
	}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	return results
}
