package train

import (
	"errors"
	"math"

	"github.com/lockstep-ml/lockstep/engine"
)

// noiseMetric is the name of the gradient noise scale in a [Result] of training with Config.NoiseScale.
const noiseMetric = "gradient_noise_scale"

// noiseScalars are the further scalars of a step with Config.NoiseScale: the sum over the replicas of the squared norm
// of a replica's mean gradient times the weight of its examples, and the number of replicas with examples.
const noiseScalars = 2

// noiseSummary computes the noise scale from the estimates of all steps. Both are averaged before the division, as
// McCandlish et al. (2018, appendix A.1) do, because their quotient is biased.
var noiseSummary = engine.Summary{Sums: 2, Value: func(sums []float64, _ float64) float64 {
	switch noise, gradient := sums[0], sums[1]; {
	case noise == 0 && gradient == 0: // no step had two replicas with examples
		return math.NaN()
	case gradient <= 0: // the noise hides the gradient
		return math.Inf(1)
	default:
		return noise / gradient
	}
}}

// checkNoiseScale returns an error if the noise scale cannot be measured.
func (t *Trainer) checkNoiseScale() error {
	switch {
	case !t.config.NoiseScale:
		return nil
	case t.strategy.NumReplicasInSync() < 2:
		return errors.New("it compares the gradients of replicas, and there is one: want at least 2, or leave it out")
	case t.config.diloco() != nil:
		return errors.New("with DiLoCo the workers do not sum their gradients: leave it out")
	}
	return nil
}

// addSquares adds the squares of a bucket's gradients of this replica, which are complete and not reduced yet.
func (t *Trainer) addSquares(p *localReplica, k int) error {
	if !t.config.NoiseScale {
		return nil
	}
	if err := t.memory(p.replica.LocalID(), k); err != nil {
		return err
	}
	for i, x := range p.gradients[k] {
		blocks := p.blocks[:0]
		for block := range normBlocks(x.Len()) {
			blocks = append(blocks, blockSquares(x, block))
		}
		p.blocks = blocks
		p.squares[t.buckets[k].parameters[i]] = treeSum(blocks)
	}
	return nil
}

// putNoise sets a replica's scalars. Its gradients are divided by the weight of the whole step; those of the mean over
// its own examples are larger by total/own.
func (t *Trainer) putNoise(local int, b *stepBatches) {
	if !t.config.NoiseScale {
		return
	}
	p, own := &t.local[local], 0.0
	for _, g := range b.list {
		for _, w := range g.shares[local].Weights {
			own += float64(w)
		}
	}
	if own == 0 {
		return
	}
	squares := 0.0
	for _, x := range p.squares { // by parameter, so the sum does not depend on the buckets
		squares += x
	}
	to := p.scalars[1+t.sums+agreed:]
	to[0], to[1] = squares*b.weightSum*b.weightSum/own, 1
}

// noise estimates the trace of the covariance of an example's gradient, and the squared norm of the expected gradient,
// from the last step. With n replicas of the weights w of sum W, the squared norm of a replica's mean gradient is
// expected to be gradient + noise/w, and that of the gradient of all gradient + noise/W. Equal weights give the
// formulas of McCandlish et al.
func (t *Trainer) noise(weightSum float64) (noise, gradient float64) {
	from := t.local[0].scalars[1+t.sums+agreed:]
	if from[1] < 2 {
		return 0, 0
	}
	all := t.norm * t.norm
	noise = (from[0] - weightSum*all) / (from[1] - 1)
	return noise, all - noise/weightSum
}
