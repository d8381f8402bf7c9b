package optimizer

import (
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// SGDConfig configures stochastic gradient descent; see [SGD].
type SGDConfig struct {
	common
	momentum float64
	nesterov bool
}

// SGD configures stochastic gradient descent, w ← w - rate·g. With momentum it is
//
//	m ← momentum·m - rate·g
//	w ← w + m                      or, with Nesterov momentum,
//	w ← w + momentum·m - rate·g
//
// The rate is part of m, so a change of the rate acts on later gradients only. PyTorch keeps m without the rate. Both
// agree while the rate is constant.
//
// Call Done to get the optimizer.
func SGD() *SGDConfig { return &SGDConfig{common: common{rate: -1, fallback: 0.01}} }

// LearningRate sets the learning rate. The default is the hyperparameter "learning_rate", or else 0.01.
func (c *SGDConfig) LearningRate(rate float64) *SGDConfig { c.rate = rate; return c }

// Schedule makes the learning rate a function of the number of updates, in place of LearningRate.
func (c *SGDConfig) Schedule(s Schedule) *SGDConfig { c.schedule = s; return c }

// Momentum sets the share of the last update that the next one keeps, at least 0 and below 1. The default, 0,
// means no momentum; the optimizer then keeps no state.
func (c *SGDConfig) Momentum(m float64) *SGDConfig { c.momentum = m; return c }

// Nesterov selects Nesterov momentum. It has no effect without momentum.
func (c *SGDConfig) Nesterov(enabled bool) *SGDConfig { c.nesterov = enabled; return c }

// WeightDecay sets a decoupled weight decay: an update also subtracts decay times the learning rate times the
// variable. The default is 0.
func (c *SGDConfig) WeightDecay(decay float64) *SGDConfig { c.decay = decay; return c }

// Done returns the optimizer. Later calls of the other methods do not affect it. Invalid options make Compile
// fail.
func (c *SGDConfig) Done() optimizer.Interface {
	return &built{c.common, &sgd{momentum: c.momentum, nesterov: c.nesterov}}
}

type sgd struct {
	momentum float64
	nesterov bool
}

func (s *sgd) name() string { return "SGD" }

func (s *sgd) validate() error { return fraction("momentum", s.momentum) }

func (s *sgd) step(u update, gradient *graph.Node, slot func(string) *slot) *graph.Node {
	step := graph.Mul(gradient, u.rate)
	if s.momentum == 0 {
		return step
	}
	m := slot("momentum")
	next := m.set(graph.Sub(graph.MulScalar(m.value(), s.momentum), step))
	if s.nesterov {
		return graph.Sub(step, graph.MulScalar(next, s.momentum))
	}
	return graph.Neg(next)
}
