package compress_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// TestErrorFeedback minimizes a sum of quadratic functions, one per replica, whose large gradients cancel in element 0
// and hide those of the other elements. With error feedback int8 reaches the minimum; without it, it does not move.
func TestErrorFeedback(t *testing.T) {
	const elements, replicas, steps, rate = 256, 4, 4000, 0.02
	parameters := []compress.Parameter{{Name: "w", DType: tensor.Float32, Shape: []int{elements}}}
	minimum := func(i int) float32 { return float32(i%7-3) / 10 }
	train := func(feedback bool) (distance float64) {
		g := newGroup(t, compress.Codec{Method: compress.Int8}, replicas, parameters)
		w := make([]float32, elements)
		for step := range int64(steps) {
			gradients := make([][]*tensor.Tensor, replicas)
			for r := range gradients {
				x := make([]float32, elements)
				for i := range x {
					x[i] = (w[i] - minimum(i)) / replicas
				}
				x[0] += 100 * float32(1-2*(r%2))
				gradients[r] = []*tensor.Tensor{tensor.Of(x)}
			}
			g.exchange(gradients, step)
			if feedback {
				g.commit()
			} else {
				g.discard()
			}
			for i, x := range tensor.Data[float32](gradients[0][0]) {
				w[i] -= rate * x
			}
		}
		for i := range w {
			if i > 0 {
				distance = max(distance, math.Abs(float64(w[i]-minimum(i))))
			}
		}
		return distance
	}
	with, without := train(true), train(false)
	t.Logf("distance from the minimum: %v with error feedback, %v without", with, without)
	if with > 0.05 || without < 0.25 {
		t.Errorf("distance from the minimum: %v with error feedback, want at most 0.05; %v without, want at least 0.25",
			with, without)
	}
}

// TestLogisticRegression trains a softmax regression, whose examples are divided among the replicas, and compares the
// final loss with that of exact sums.
func TestLogisticRegression(t *testing.T) {
	const features, classes, perReplica, replicas, steps, rate = 40, 16, 32, 3, 100, 1
	parameters := []compress.Parameter{
		{Name: "w", DType: tensor.Float32, Shape: []int{features, classes}},
		{Name: "b", DType: tensor.Float32, Shape: []int{classes}},
	}
	r := rand.New(rand.NewPCG(1, 1))
	x, labels := make([]float64, replicas*perReplica*features), make([]int, replicas*perReplica)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	for i := range labels {
		labels[i] = r.IntN(classes)
	}
	w, b := make([]float64, features*classes), make([]float64, classes)
	// gradient adds the gradient of some examples' loss to dw and db and returns the loss.
	gradient := func(from, to int, dw, db []float32) (loss float64) {
		for e := from; e < to; e++ {
			logits, sum := make([]float64, classes), 0.0
			for c := range logits {
				logits[c] = b[c]
				for f := range features {
					logits[c] += x[e*features+f] * w[f*classes+c]
				}
			}
			for c := range logits {
				logits[c] = math.Exp(logits[c])
				sum += logits[c]
			}
			for c := range logits {
				d := logits[c] / sum
				if c == labels[e] {
					loss -= math.Log(d)
					d--
				}
				d /= replicas * perReplica
				db[c] += float32(d)
				for f := range features {
					dw[f*classes+c] += float32(d * x[e*features+f])
				}
			}
		}
		return loss / (replicas * perReplica)
	}
	train := func(c compress.Codec) (loss float64) {
		clear(w)
		clear(b)
		var g *group
		if c.Method != compress.None {
			g = newGroup(t, c, replicas, parameters)
		}
		for step := range int64(steps) {
			loss = 0
			gradients := make([][]*tensor.Tensor, replicas)
			for i := range gradients {
				dw, db := make([]float32, len(w)), make([]float32, len(b))
				loss += gradient(i*perReplica, (i+1)*perReplica, dw, db)
				gradients[i] = []*tensor.Tensor{tensor.Of(dw, features, classes), tensor.Of(db)}
			}
			total := sums(gradients)
			if g != nil {
				g.exchange(gradients, step)
				g.commit()
				total = [][]float64{gradients[0][0].Float64s(), gradients[0][1].Float64s()}
			}
			for i := range w {
				w[i] -= rate * total[0][i]
			}
			for i := range b {
				b[i] -= rate * total[1][i]
			}
		}
		return loss
	}
	exact := train(compress.Codec{})
	for _, c := range codecs {
		tolerance := 0.01
		if c.Method == compress.PowerSGD {
			tolerance = 0.3
		}
		loss := train(c)
		t.Logf("%v: loss %.4f, exact %.4f", c, loss, exact)
		if math.Abs(loss-exact) > tolerance*exact {
			t.Errorf("%v: the loss is %.4f, with exact sums %.4f", c, loss, exact)
		}
	}
}
