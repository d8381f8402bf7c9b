package train

import (
	"maps"
	"slices"
)

// Result is loss and metrics over a set of examples, combined over all replicas and weighted by example.
type Result struct {
	Loss     float64            // weighted mean; NaN without examples
	Metrics  map[string]float64 // weighted means, by metric name
	Examples int64              // number of examples, without padding
}

// names returns the metrics' names, sorted.
func (r Result) names() []string { return slices.Sorted(maps.Keys(r.Metrics)) }

// mean accumulates loss and metrics over batches. All sums are float64, on the host. A mean of the batches'
// means would overweight the examples of a short batch.
type mean struct {
	names    []string
	loss     float64
	sums     []float64
	weight   float64
	examples int64
}

func newMean(names []string) *mean { return &mean{names: names, sums: make([]float64, len(names))} }

// newMean returns the mean over batches of a training, which may include the gradients' norm.
func (t *Trainer) newMean() *mean {
	names := t.metrics
	if t.config.ClipNorm > 0 {
		names = append(slices.Clone(names), normMetric)
	}
	return newMean(names)
}

// add adds the batches that t's replicas have just computed.
func (m *mean) add(b *stepBatches, t *Trainer) {
	m.examples += int64(b.examples)
	if b.weightSum == 0 {
		return
	}
	loss, sums := t.scalars()
	m.loss += loss * b.weightSum
	for i, s := range sums {
		m.sums[i] += s
	}
	if len(m.sums) > len(sums) {
		m.sums[len(sums)] += t.norm * b.weightSum
	}
	m.weight += b.weightSum
}

// merge adds the batches of another mean.
func (m *mean) merge(other *mean) {
	m.loss, m.weight, m.examples = m.loss+other.loss, m.weight+other.weight, m.examples+other.examples
	for i, s := range other.sums {
		m.sums[i] += s
	}
}

func (m *mean) result() Result {
	r := Result{Loss: m.loss / m.weight, Metrics: make(map[string]float64, len(m.names)), Examples: m.examples}
	for i, name := range m.names {
		r.Metrics[name] = m.sums[i] / m.weight
	}
	return r
}
