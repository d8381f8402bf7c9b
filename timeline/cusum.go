package timeline

import "math"

// cusum accumulates the excess of each of several series over steps (Page's test). It measures the noise of the series,
// so that noisy ones need a larger sum.
type cusum struct {
	sums    []float64 // by series
	batch   []float64 // by series: the mean of its excess in the current batch of steps, so far
	before  []float64 // by series: the mean of the batch before
	steps   int
	batches int     // that have ended
	noise   float64 // variance of the excess of a step, as sums of consecutive steps show it
	recent  float64 // the same, of the last batches
	// correlation is the factor by which sums of more steps than a batch vary more; 0: 1.
	correlation float64
	named       int   // series; -1: none
	step        int64 // at which it was named
}

func newCUSUM(series int) cusum {
	return cusum{
		sums: make([]float64, series), batch: make([]float64, series), before: make([]float64, series), named: -1,
	}
}

// add adds the excess of a series in this step. It adds to the sum what is above the allowance.
func (c *cusum) add(i int, excess, allowance float64) {
	excess = min(max(excess, -detectorClip), detectorClip)
	c.batch[i] += excess / detectorBatch
	c.sums[i] = min(max(c.sums[i]+excess-allowance, 0), detectorCeiling*c.limit())
}

// endStep ends a step, in which each series was added, and names the series with the largest sum above the limit.
func (c *cusum) endStep(step int64) {
	if c.steps++; c.steps%detectorBatch == 0 {
		c.endBatch()
	}
	if c.batches < detectorBatches {
		clear(c.sums)
	}
	if c.named >= 0 && c.sums[c.named] > 0 {
		return // it stays named until its excess is used up
	}
	c.named = -1
	for i, sum := range c.sums {
		if sum >= c.limit() && (c.named < 0 || sum > c.sums[c.named]) {
			c.named, c.step = i, step
		}
	}
}

// endBatch measures the noise by the differences between the means of consecutive batches: a series that changes once
// changes one of them only.
func (c *cusum) endBatch() {
	variance := 0.0
	for i, mean := range c.batch {
		change := mean - c.before[i]
		variance += detectorBatch * change * change / 2 / float64(len(c.batch))
		c.before[i], c.batch[i] = mean, 0
	}
	c.batches++
	if c.batches > detectorBatches { // so that a change of a series, or one long step, is not taken for noise
		variance = min(variance, detectorNoiseRise*c.noise)
	}
	if c.batches > 1 {
		c.noise += max(detectorNoise, 1/float64(c.batches-1)) * (variance - c.noise)
		c.recent += max(detectorRecent, 1/float64(c.batches-1)) * (variance - c.recent)
	}
}

// doubt returns the factor by which the variance may be larger than its estimate from few batches: that of the
// quantile of the chi-squared distribution one and a half standard deviations below its middle (by Wilson and
// Hilferty's approximation). The excesses of all series add up to about 0.
func (c *cusum) doubt() float64 {
	n := float64(max(len(c.sums)-1, 1)) * min(float64(max(c.batches-1, 1)), 2/detectorNoise-1)
	return 1 / math.Pow(1-2/(9*n)-1.5*math.Sqrt(2/(9*n)), 3)
}

// limit returns the sum at which a series is named. A sum of independent steps without a straggler reaches it about
// once in exp(2*limit*allowance/variance) steps.
func (c *cusum) limit() float64 {
	noise := max(c.recent, c.noise*c.doubt())
	return max(detectorLimit, detectorOdds*max(c.correlation, 1)*noise/(2*detectorAllowance))
}
