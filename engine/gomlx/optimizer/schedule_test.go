package optimizer_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
)

const rateName = "/optimizers/learning_rate"

// TestSchedules compares the rates of 25 updates with the formulas of Keras and PyTorch in plain Go.
func TestSchedules(t *testing.T) {
	oneCycle := func(top, rise, div, final float64, steps int, linear bool) func(float64) float64 {
		return func(s float64) float64 {
			anneal := func(from, to, share float64) float64 {
				if linear {
					return (to-from)*share + from
				}
				return to + (from-to)/2*(1+math.Cos(math.Pi*share))
			}
			first := top / div
			end := rise*float64(steps) - 1
			last := float64(steps - 1)
			if s <= end {
				return anneal(first, top, s/end)
			}
			return anneal(top, first/final, min(1, (s-end)/(last-end)))
		}
	}
	for name, test := range map[string]struct {
		made optimizer.Schedule
		want func(step float64) float64
	}{
		"constant": {optimizer.Constant(0.25), func(float64) float64 { return 0.25 }},
		"warm-up and cosine": {
			optimizer.LinearWarmup(0.01, 0.5, 5, optimizer.CosineDecay(0.5, 15, 0.1)),
			func(s float64) float64 {
				if s < 5 {
					return (0.5-0.01)*s/5 + 0.01
				}
				return cosine(0.5, 15, 0.1, int(s)-5)
			},
		},
		"warm-up alone": {
			optimizer.LinearWarmup(0, 0.5, 10, nil),
			func(s float64) float64 { return 0.5 * min(s/10, 1) },
		},
		"cosine with restarts": {
			optimizer.CosineDecayRestarts(0.5, 4, 2, 0.5, 0.1),
			func(s float64) float64 {
				length, high := 4.0, 1.0
				for s >= length {
					s, length, high = s-length, 2*length, high/2
				}
				return 0.5 * (0.9*high*(1+math.Cos(math.Pi*s/length))/2 + 0.1)
			},
		},
		"cosine with equal restarts": {
			optimizer.CosineDecayRestarts(0.5, 4, 1, 1, 0),
			func(s float64) float64 { return 0.25 * (1 + math.Cos(math.Pi*math.Mod(s, 4)/4)) },
		},
		"exponential": {
			optimizer.ExponentialDecay(0.5, 4, 0.3, false),
			func(s float64) float64 { return 0.5 * math.Pow(0.3, s/4) },
		},
		"step": {
			optimizer.StepDecay(0.5, 4, 0.3),
			func(s float64) float64 { return 0.5 * math.Pow(0.3, math.Floor(s/4)) },
		},
		"inverse time": {
			optimizer.InverseTimeDecay(0.5, 4, 0.3, false),
			func(s float64) float64 { return 0.5 / (1 + 0.3*s/4) },
		},
		"polynomial": {
			optimizer.PolynomialDecay(0.5, 10, 0.01, 2, false),
			func(s float64) float64 { return (0.5-0.01)*math.Pow(1-min(s, 10)/10, 2) + 0.01 },
		},
		"polynomial with cycles": {
			optimizer.PolynomialDecay(0.5, 10, 0.01, 1, true),
			func(s float64) float64 {
				steps := 10 * max(1, math.Ceil(s/10))
				return (0.5-0.01)*(1-s/steps) + 0.01
			},
		},
		"piecewise": {
			optimizer.PiecewiseConstant([]int{3, 7}, []float64{1, 0.5, 0.1}),
			func(s float64) float64 {
				switch {
				case s <= 3:
					return 1
				case s <= 7:
					return 0.5
				}
				return 0.1
			},
		},
		"one cycle": {
			optimizer.OneCycle(optimizer.OneCycleConfig{Max: 0.5, Steps: 20}), oneCycle(0.5, 0.3, 25, 1e4, 20, false),
		},
		"one cycle in lines": {
			optimizer.OneCycle(optimizer.OneCycleConfig{
				Max: 0.5, Steps: 20, RiseShare: 0.25, DivFactor: 10, FinalDivFactor: 100, Linear: true,
			}), oneCycle(0.5, 0.25, 10, 100, 20, true),
		},
	} {
		t.Run(name, func(t *testing.T) {
			ours := line(t, tensor.Float64, optimizer.SGD().Schedule(test.made).Done(), 0, nil)
			theirs := line(t, tensor.Float32, optimizer.Scheduled(gomlxoptimizer.Adam().Done(), test.made), 1, nil)
			for step := range 25 {
				makeStep(t, ours, tensor.Float64, step)
				makeStep(t, theirs, tensor.Float32, step)
				want := test.want(float64(step))
				if got := read(t, ours, rateName)[0]; math.Abs(got-want) > 1e-14 {
					t.Errorf("step %d: rate %v, want %v", step, got, want)
				}
				if got := read(t, theirs, rateName)[0]; math.Abs(got-want) > 1e-6 {
					t.Errorf("step %d: GoMLX's Adam has rate %v, want %v", step, got, want)
				}
			}
		})
	}
}

// TestScheduledUses checks that GoMLX's optimizer uses the rate of the schedule, and that the engine reports that it is
// scheduled.
func TestScheduledUses(t *testing.T) {
	plain := func() gomlxoptimizer.Interface {
		return gomlxoptimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.5).Done()
	}
	p := line(t, tensor.Float64, plain(), 0, nil)
	s := line(t, tensor.Float64, optimizer.Scheduled(plain(), optimizer.PiecewiseConstant([]int{0}, []float64{0.5, 0})),
		0, nil)
	for step := range 3 {
		if step == 0 {
			makeStep(t, p, tensor.Float64, step)
		}
		makeStep(t, s, tensor.Float64, step)
		if got, want := read(t, s, "/one/w"), read(t, p, "/one/w"); !slices.Equal(got, want) {
			t.Errorf("step %d: %v, want %v", step, got, want)
		}
	}
	for _, test := range []struct {
		p         engine.Program
		scheduled bool
	}{{p, false}, {s, true}} {
		i, scheduled := test.p.Info().LearningRate, test.p.Info().RateScheduled
		if i < 0 || test.p.Variables()[i].Name != rateName || scheduled != test.scheduled {
			t.Errorf("learning rate: variable %d, scheduled %v: want scheduled %v", i, scheduled, test.scheduled)
		}
	}
}

// TestEMA compares the averages with plain Go, for one part and for two, with and without overwriting, for an optimizer
// of this package and one of GoMLX's.
func TestEMA(t *testing.T) {
	for _, every := range []int{0, 3} {
		for _, o := range []gomlxoptimizer.Interface{
			optimizer.SGD().LearningRate(0.1).Momentum(0.9).Done(),
			gomlxoptimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1).Done(),
		} {
			made := optimizer.EMA(o, optimizer.EMAConfig{Momentum: 0.8, OverwriteEvery: every})
			one, two := line(t, tensor.Float64, made, 0, nil), line(t, tensor.Float64, made, 1, nil)
			if n := len(two.Parts(0)); n != 2 {
				t.Fatalf("%d parts, want 2", n)
			}
			bare := line(t, tensor.Float64, o, 0, nil)
			want := map[string][]float64{"/one/w": starts["/one/w"], "/two/v": starts["/two/v"]}
			for step := range 7 {
				makeStep(t, one, tensor.Float64, step)
				makeStep(t, two, tensor.Float64, step)
				makeStep(t, bare, tensor.Float64, step)
				for name, old := range want {
					next, updated := slices.Clone(old), read(t, one, name)
					if every == 0 && !slices.Equal(updated, read(t, bare, name)) {
						t.Errorf("step %d: %s is %v, without averages %v", step, name, updated, read(t, bare, name))
					}
					got := read(t, one, "/EMA"+name)
					if every > 0 && (step+1)%every == 0 {
						if !slices.Equal(updated, got) {
							t.Errorf("step %d: %s is %v: want its average, %v", step, name, updated, got)
						}
						next = got
					} else {
						for i, x := range updated {
							next[i] = 0.8*old[i] + (1-0.8)*x
						}
					}
					for i := range got {
						if math.Abs(got[i]-next[i]) > 1e-14 {
							t.Errorf("step %d: the average of %s is %v, want %v", step, name, got, next)
						}
					}
					if both := read(t, two, "/EMA"+name); !slices.Equal(got, both) {
						t.Errorf("step %d: the average of %s is %v with two parts, %v with one", step, name, both, got)
					}
					want[name] = got
				}
			}
			for i, v := range one.Info().EMA {
				if got, want := one.Variables()[v].Name, "/EMA"+one.Parameters()[i].Name; got != want {
					t.Errorf("the average of parameter %d is %s, want %s", i, got, want)
				}
			}
			if list := bare.Info().EMA; list != nil {
				t.Errorf("an optimizer without averages has %v", list)
			}
		}
	}
}

// TestEMAOfHalfWidth checks that averages of bfloat16 variables are float32.
func TestEMAOfHalfWidth(t *testing.T) {
	p := line(t, tensor.BFloat16, optimizer.EMA(optimizer.SGD().Done(), optimizer.EMAConfig{}), 0, nil)
	makeStep(t, p, tensor.BFloat16, 0)
	for _, i := range p.Info().EMA {
		if v := p.Variables()[i]; v.DType != tensor.Float32 || v.Role != engine.Slot {
			t.Errorf("%s is a %v of %v, want a slot of float32", v.Name, v.Role, v.DType)
		}
	}
}

// TestScheduleMistakes checks that invalid numbers are errors.
func TestScheduleMistakes(t *testing.T) {
	for want, f := range map[string]func(){
		"ExponentialDecay over":  func() { optimizer.StepDecay(1, 0, 1) },
		"OneCycle with RiseSha":  func() { optimizer.OneCycle(optimizer.OneCycleConfig{Max: 1, Steps: 2, RiseShare: 2}) },
		"OneCycle over 0 steps":  func() { optimizer.OneCycle(optimizer.OneCycleConfig{Max: 1}) },
		"with boundaries [2 1]":  func() { optimizer.PiecewiseConstant([]int{2, 1}, []float64{1, 1, 1}) },
		"periods that grow by 0": func() { optimizer.CosineDecayRestarts(1, 2, 0, 1, 0) },
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, want) {
					t.Errorf("panics with %s, want %s", got, want)
				}
			}()
			f()
		}()
	}
}
