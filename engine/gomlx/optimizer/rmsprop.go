package optimizer

import (
	"errors"
	"fmt"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// RMSPropConfig configures RMSprop; see [RMSProp].
type RMSPropConfig struct {
	common
	rho, momentum, epsilon float64
	centered               bool
}

// RMSProp configures RMSprop (Tieleman and Hinton, 2012):
//
//	v ← rho·v + (1-rho)·g²
//	w ← w - rate·g/sqrt(v+epsilon)
//
// If centered, the root is that of v - a² + epsilon, where a ← rho·a + (1-rho)·g. With momentum, the step of
// w is s ← momentum·s + rate·g/sqrt(v+epsilon). Call Done to get the optimizer.
func RMSProp() *RMSPropConfig {
	return &RMSPropConfig{common: common{rate: -1, fallback: 0.001}, rho: 0.9, epsilon: 1e-7}
}

// LearningRate sets the learning rate. The default is the hyperparameter "learning_rate", or else 0.001.
func (c *RMSPropConfig) LearningRate(rate float64) *RMSPropConfig { c.rate = rate; return c }

// Schedule makes the learning rate a function of the number of updates, in place of LearningRate.
func (c *RMSPropConfig) Schedule(s Schedule) *RMSPropConfig { c.schedule = s; return c }

// Rho sets the share of the moving average of squared gradients that an update keeps. The default is 0.9.
func (c *RMSPropConfig) Rho(rho float64) *RMSPropConfig { c.rho = rho; return c }

// Momentum sets the share of the last step that the next one keeps. The default is 0.
func (c *RMSPropConfig) Momentum(m float64) *RMSPropConfig { c.momentum = m; return c }

// Epsilon sets the number added under the root. The default is 1e-7.
func (c *RMSPropConfig) Epsilon(epsilon float64) *RMSPropConfig { c.epsilon = epsilon; return c }

// Centered divides by the estimated standard deviation of the gradients, instead of the root of their mean
// square.
func (c *RMSPropConfig) Centered(enabled bool) *RMSPropConfig { c.centered = enabled; return c }

// WeightDecay sets a decoupled weight decay: an update also subtracts decay times the learning rate times the
// variable. The default is 0.
func (c *RMSPropConfig) WeightDecay(decay float64) *RMSPropConfig { c.decay = decay; return c }

// Done returns the optimizer. Later calls of the other methods do not affect it. Invalid options make Compile
// fail.
func (c *RMSPropConfig) Done() optimizer.Interface {
	return &built{c.common, &rmsProp{rho: c.rho, momentum: c.momentum, epsilon: c.epsilon, centered: c.centered}}
}

type rmsProp struct {
	rho, momentum, epsilon float64
	centered               bool
}

func (p *rmsProp) name() string { return "RMSProp" }

func (p *rmsProp) validate() error {
	var epsilon error
	if !(p.epsilon >= 0) {
		epsilon = fmt.Errorf("epsilon %v: want 0 or more", p.epsilon)
	}
	return errors.Join(fraction("rho", p.rho), fraction("momentum", p.momentum), epsilon)
}

func (p *rmsProp) step(u update, gradient *graph.Node, slot func(string) *slot) *graph.Node {
	v := slot("mean_square")
	square := v.set(average(v.value(), graph.Square(gradient), p.rho))
	if p.centered {
		a := slot("mean")
		square = graph.Sub(square, graph.Square(a.set(average(a.value(), gradient, p.rho))))
	}
	step := graph.Div(graph.Mul(gradient, u.rate), graph.Sqrt(graph.AddScalar(square, p.epsilon)))
	if p.momentum > 0 {
		m := slot("momentum")
		step = m.set(graph.Add(graph.MulScalar(m.value(), p.momentum), step))
	}
	return step
}
