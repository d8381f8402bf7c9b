package gomlx

import (
	"path"
	"slices"

	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
)

// learningRate returns the variable of the learning rate, or -1, and whether every update sets it.
func (p *program) learningRate() (variable int, scheduled bool) {
	variable = p.named(path.Join("/", gomlxoptimizer.Scope, gomlxoptimizer.ParamLearningRate))
	if variable < 0 {
		return variable, false
	}
	return variable, slices.ContainsFunc(p.allUpdates(), func(x *executable) bool {
		return slices.Contains(x.changed, variable)
	})
}

// ema returns, for each parameter, the slot with its moving average; nil: the optimizer keeps none.
func (p *program) ema() []int {
	list := make([]int, p.parameters)
	for i := range list {
		if list[i] = p.named(optimizer.EMAScope + p.variables[i].Name); list[i] < 0 {
			return nil
		}
	}
	return list
}

// named returns the index of the variable of a name, or -1.
func (p *program) named(name string) int {
	return slices.IndexFunc(p.variables, func(v variable) bool { return v.Name == name })
}
