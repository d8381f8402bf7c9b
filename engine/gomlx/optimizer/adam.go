package optimizer

import (
	"errors"
	"fmt"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

// AdamConfig configures Adam; see [Adam].
type AdamConfig struct {
	common
	beta1, beta2, epsilon float64
}

// Adam configures Adam (Kingma and Ba, 2014, in the order of computation at the end of its section 2). With t
// updates, this one included:
//
//	m ← beta1·m + (1-beta1)·g
//	v ← beta2·v + (1-beta2)·g²
//	w ← w - rate·sqrt(1-beta2ᵗ)/(1-beta1ᵗ) · m/(sqrt(v)+epsilon)
//
// With WeightDecay it is AdamW (Loshchilov and Hutter, 2017). Call Done to get the optimizer.
func Adam() *AdamConfig {
	return &AdamConfig{common: common{rate: -1, fallback: 0.001}, beta1: 0.9, beta2: 0.999, epsilon: 1e-7}
}

// LearningRate sets the learning rate. The default is the hyperparameter "learning_rate", or else 0.001.
func (c *AdamConfig) LearningRate(rate float64) *AdamConfig { c.rate = rate; return c }

// Schedule makes the learning rate a function of the number of updates, in place of LearningRate.
func (c *AdamConfig) Schedule(s Schedule) *AdamConfig { c.schedule = s; return c }

// Betas sets the shares of the moving averages of gradients (beta1) and of their squares (beta2) that an
// update keeps. The defaults are 0.9 and 0.999.
func (c *AdamConfig) Betas(beta1, beta2 float64) *AdamConfig {
	c.beta1, c.beta2 = beta1, beta2
	return c
}

// Epsilon sets the number added to the denominator. The default is 1e-7.
func (c *AdamConfig) Epsilon(epsilon float64) *AdamConfig { c.epsilon = epsilon; return c }

// WeightDecay sets a decoupled weight decay, as in AdamW: an update also subtracts decay times the learning
// rate times the variable. The default is 0; in Keras' AdamW it is 0.004.
func (c *AdamConfig) WeightDecay(decay float64) *AdamConfig { c.decay = decay; return c }

// Done returns the optimizer. Later calls of the other methods do not affect it. Invalid options make Compile
// fail.
func (c *AdamConfig) Done() optimizer.Interface {
	return &built{c.common, &adam{beta1: c.beta1, beta2: c.beta2, epsilon: c.epsilon}}
}

type adam struct{ beta1, beta2, epsilon float64 }

func (a *adam) name() string { return "Adam" }

func (a *adam) validate() error {
	var epsilon error
	if !(a.epsilon >= 0) {
		epsilon = fmt.Errorf("epsilon %v: want 0 or more", a.epsilon)
	}
	return errors.Join(fraction("beta1", a.beta1), fraction("beta2", a.beta2), epsilon)
}

func (a *adam) step(u update, gradient *graph.Node, slot func(string) *slot) *graph.Node {
	m, v := slot("1st_moment"), slot("2nd_moment")
	moment := m.set(average(m.value(), gradient, a.beta1))
	square := v.set(average(v.value(), graph.Square(gradient), a.beta2))
	rate := graph.Div(graph.Mul(u.rate, graph.Sqrt(bias(a.beta2, u.count))), bias(a.beta1, u.count))
	return graph.Div(graph.Mul(moment, rate), graph.AddScalar(graph.Sqrt(square), a.epsilon))
}

// bias is 1 - betaⁿ: the share that a moving average of a constant 1 has reached after n updates from 0.
func bias(beta float64, count *graph.Node) *graph.Node {
	return graph.OneMinus(graph.Pow(graph.Scalar(count.Graph(), count.DType(), beta), count))
}
