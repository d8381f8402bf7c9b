package train

import (
	"maps"
	"slices"

	"github.com/lockstep-ml/lockstep/engine"
)

// Result is loss and metrics over a set of examples, combined over all replicas and weighted by example.
type Result struct {
	Loss    float64            // weighted mean; NaN without examples
	Metrics map[string]float64 // by metric name: weighted means, or what a metric computes from its sums
	// Tables are the metrics that are several sums, such as the counts of a confusion matrix, by metric name. Nil: none.
	Tables   map[string][]float64
	Examples int64 // number of examples, without padding
}

// names returns the metrics' names, sorted.
func (r Result) names() []string { return slices.Sorted(maps.Keys(r.Metrics)) }

// mean accumulates loss and metrics over batches. All sums are float64, on the host. A mean of the batches'
// means would overweight the examples of a short batch.
type mean struct {
	metrics  []metric
	loss     float64
	sums     []float64       // of all metrics, one after the other
	streams  []engine.Stream // by metric; nil: it follows from the sums
	weight   float64
	examples int64
	by       LossReduction
}

// metric is a metric with its name.
type metric struct {
	name string
	engine.Summary
}

func newMean(metrics []metric, by LossReduction) *mean {
	n, streams := 0, make([]engine.Stream, len(metrics))
	for i, m := range metrics {
		n += m.Sums
		if m.Stream != nil {
			streams[i] = m.Stream()
		}
	}
	return &mean{metrics: metrics, sums: make([]float64, n), streams: streams, by: by}
}

// newMean returns the mean over batches of a training, which may include the gradients' norm and noise scale.
func (t *Trainer) newMean() *mean {
	metrics := slices.Clip(t.metrics)
	if t.config.ClipNorm > 0 {
		metrics = append(metrics, metric{normMetric, engine.Summary{Sums: 1}})
	}
	if t.config.NoiseScale {
		metrics = append(metrics, metric{noiseMetric, noiseSummary})
	}
	return newMean(metrics, t.config.LossReduction)
}

// metricsOf lists the metrics of a program, and the number of their sums.
func metricsOf(p engine.Program) (list []metric, sums int) {
	summaries := p.Info().Summaries
	for i, name := range p.Metrics() {
		m := metric{name, engine.Summary{Sums: 1}}
		if summaries != nil {
			m.Summary = summaries[i]
		}
		list, sums = append(list, m), sums+m.Sums
	}
	return list, sums
}

// add adds the batches that t's replicas have just computed.
func (m *mean) add(b *stepBatches, t *Trainer) {
	m.examples += int64(b.examples)
	if b.weightSum == 0 {
		return
	}
	loss, sums := t.scalars()
	m.loss += loss * m.by.divisor(b.weightSum, int64(b.examples))
	for i, s := range sums {
		m.sums[i] += s
	}
	own := sums
	for i, s := range m.streams {
		if n := m.metrics[i].Sums; s != nil {
			s.Add(own[:n], b.weightSum)
		}
		own = own[min(m.metrics[i].Sums, len(own)):]
	}
	if len(m.sums) > len(sums) { // of training
		further := m.sums[len(sums):]
		if t.config.ClipNorm > 0 {
			further[0] += t.norm * b.weightSum
			further = further[1:]
		}
		if t.config.NoiseScale {
			noise, gradient := t.noise(b.weightSum)
			further[0], further[1] = further[0]+noise*b.weightSum, further[1]+gradient*b.weightSum
		}
	}
	m.weight += b.weightSum
}

// merge adds the batches of another mean. Neither has streams.
func (m *mean) merge(other *mean) {
	m.loss, m.weight, m.examples = m.loss+other.loss, m.weight+other.weight, m.examples+other.examples
	for i, s := range other.sums {
		m.sums[i] += s
	}
}

func (m *mean) result() Result {
	r := Result{
		Loss:     m.loss / m.by.divisor(m.weight, m.examples),
		Metrics:  make(map[string]float64, len(m.metrics)),
		Examples: m.examples,
	}
	sums := m.sums
	for i, x := range m.metrics {
		own := sums[:x.Sums]
		sums = sums[x.Sums:]
		switch {
		case m.streams[i] != nil:
			r.Metrics[x.name] = m.streams[i].Value()
		case x.Value != nil:
			r.Metrics[x.name] = x.Value(slices.Clone(own), m.weight)
		case x.Sums == 1:
			r.Metrics[x.name] = own[0] / m.weight
		default:
			if r.Tables == nil {
				r.Tables = map[string][]float64{}
			}
			r.Tables[x.name] = slices.Clone(own)
		}
	}
	return r
}
