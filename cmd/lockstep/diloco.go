package main

import (
	"fmt"
	"math"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/train"
)

// dilocoFlags are the flags of DiLoCo.
type dilocoFlags struct {
	innerSteps        int // 0: gradients are exchanged in each step
	outerLearningRate float64
	outerMomentum     float64
}

func (o *dilocoFlags) add(f *pflag.FlagSet) {
	f.IntVar(&o.innerSteps, "diloco", 0, "exchange parameters once in so many steps instead of gradients in each, over "+
		"very slow links: DiLoCo (default off)")
	f.Float64Var(&o.outerLearningRate, "outer-learning-rate", 0.7, "learning rate of DiLoCo's outer steps")
	f.Float64Var(&o.outerMomentum, "outer-momentum", 0.9, "Nesterov momentum of DiLoCo's outer steps, from 0 to 1")
}

func (o *dilocoFlags) check(given func(flag string) bool) error {
	switch {
	case given("diloco") && o.innerSteps < 1:
		return usagef("--diloco %d: want the number of steps between two exchanges, at least 1", o.innerSteps)
	case !(o.outerLearningRate > 0 && o.outerLearningRate <= math.MaxFloat32):
		return usagef("--outer-learning-rate %v: want a positive number", o.outerLearningRate)
	case !(o.outerMomentum >= 0 && o.outerMomentum < 1):
		return usagef("--outer-momentum %v: want at least 0 and less than 1", o.outerMomentum)
	}
	for _, flag := range []string{"outer-learning-rate", "outer-momentum"} {
		if given(flag) && o.innerSteps == 0 {
			return usagef("--%s is for --diloco: give both", flag)
		}
	}
	return nil
}

// config returns the configuration, or nil if DiLoCo is off.
func (o *dilocoFlags) config() *train.DiLoCo {
	if o.innerSteps == 0 {
		return nil
	}
	d := &train.DiLoCo{InnerSteps: o.innerSteps, LearningRate: o.outerLearningRate, Momentum: o.outerMomentum}
	if d.Momentum == 0 {
		d.Momentum = -1 // none
	}
	return d
}

// String describes the flags, for workers to compare.
func (o *dilocoFlags) String() string {
	if o.innerSteps == 0 {
		return "off"
	}
	return fmt.Sprintf("%d, outer learning rate %v, outer momentum %v", o.innerSteps, o.outerLearningRate, o.outerMomentum)
}
