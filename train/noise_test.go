package train

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestNoiseScale compares the noise scale of two batches with the formulas of McCandlish et al., applied to the
// gradients of each replica's examples, on several layouts, with sharding and without.
func TestNoiseScale(t *testing.T) {
	const replicas, rows = 4, 8
	all := lineExamples(2 * rows)
	norm := func(b data.Batch) float64 { // of the gradient of the mean loss of the examples, with the initial weights
		cfg := fakeConfig(b.Rows())
		trainer, _ := newFakeWith(t, 1, cfg, fakeModel{})
		gradients, _, err := trainer.Gradients(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		return math.Pow(GlobalNorm(gradients), 2)
	}
	cut := func(lo, hi int) data.Batch {
		return data.Batch{
			Inputs: []*tensor.Tensor{all.Inputs[0].Rows(lo, hi)}, Labels: []*tensor.Tensor{all.Labels[0].Rows(lo, hi)},
		}
	}
	noise, gradient, small := 0.0, 0.0, float64(rows/replicas)
	for first := 0; first < 2*rows; first += rows {
		ofReplicas, ofAll := 0.0, norm(cut(first, first+rows))
		for lo := first; lo < first+rows; lo += rows / replicas {
			ofReplicas += norm(cut(lo, lo+rows/replicas)) / replicas
		}
		gradient += (rows*ofAll - small*ofReplicas) / (rows - small)
		noise += (ofReplicas - ofAll) / (1/small - 1.0/rows)
	}
	for _, sharding := range []Exchange{AllReduce{}, Sharded{}} {
		shardFakes(t, sharding)
		seen := ""
		for _, layout := range [][]int{{4}, {2, 2}, {1, 1, 1, 1}} {
			for _, err := range overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
				cfg := fakeConfig(rows)
				cfg.NoiseScale, cfg.Exchange = true, sharding
				trainer, err := New(t.Context(), s, fakeModel{rate: 1e-300}, cfg)
				if err != nil {
					return err
				}
				defer trainer.Close()
				h, err := trainer.Fit(t.Context(), sizes(all, rows, rows), FitConfig{})
				if err != nil {
					return err
				}
				got := h.Epochs[0].Metrics[noiseMetric]
				if !close64(got, noise/gradient) {
					t.Errorf("workers with %v replicas: the noise scale is %v, want %v", layout, got, noise/gradient)
				}
				if w == 0 && seen == "" {
					seen = fmt.Sprint(got)
				}
				if w == 0 && fmt.Sprint(got) != seen {
					t.Errorf("workers with %v replicas: the noise scale is %v, before %s", layout, got, seen)
				}
				return nil
			}) {
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestNoiseScaleOfUnequalShares: if all examples of a replica have the same gradient as those of the others, there is
// no noise, whatever the shares; a batch with examples for one replica only gives no estimate.
func TestNoiseScaleOfUnequalShares(t *testing.T) {
	same := func(n int) data.Batch {
		one := lineExamples(2)
		b := data.Batch{Inputs: []*tensor.Tensor{tensor.New(tensor.Float64, n, 2)}, Labels: []*tensor.Tensor{
			tensor.New(tensor.Float64, n),
		}}
		for i := range n {
			copy(tensor.Data[float64](b.Inputs[0])[2*i:], tensor.Data[float64](one.Inputs[0])[2:])
			tensor.Data[float64](b.Labels[0])[i] = tensor.Data[float64](one.Labels[0])[1]
		}
		return b
	}
	for rows, want := range map[int]float64{8: 0, 7: 0, 5: 0, 1: math.NaN()} {
		cfg := fakeConfig(8)
		cfg.NoiseScale = true
		trainer, _ := newFakeWith(t, 3, cfg, fakeModel{})
		h, err := trainer.Fit(t.Context(), batches(same(rows)), FitConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if got := h.Epochs[0].Metrics[noiseMetric]; !(math.Abs(got-want) < 1e-9) && !(math.IsNaN(got) && math.IsNaN(want)) {
			t.Errorf("%d rows: the noise scale is %v, want %v", rows, got, want)
		}
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cfg := fakeConfig(4)
	cfg.NoiseScale = true
	if _, err := New(t.Context(), s, fakeModel{}, cfg); err == nil || !strings.Contains(err.Error(), "want at least 2") {
		t.Errorf("one replica: %v", err)
	}
}

// TestKeepGradients checks that the kept gradients are those of the next step, and of no other.
func TestKeepGradients(t *testing.T) {
	all := lineExamples(12)
	for _, replicas := range []int{1, 2} {
		trainer, _ := newFakeWith(t, replicas, fakeConfig(4), fakeModel{})
		other, _ := newFakeWith(t, replicas, fakeConfig(4), fakeModel{})
		first, _, err := other.Gradients(t.Context(), data.Batch{
			Inputs: []*tensor.Tensor{all.Inputs[0].Rows(0, 4)}, Labels: []*tensor.Tensor{all.Labels[0].Rows(0, 4)},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := trainer.KeepGradients(); err != nil {
			t.Fatal(err)
		}
		var seen [][]Weight
		_, err = trainer.Fit(t.Context(), sizes(all, 4, 4, 4), FitConfig{Callbacks: []Callback{{
			OnStepEnd: func(context.Context, Step) error {
				seen = append(seen, trainer.KeptGradients())
				return nil
			},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		if len(seen) != 3 || len(seen[0]) != 2 || seen[1] != nil || seen[2] != nil {
			t.Fatalf("kept %v", seen)
		}
		for i, g := range seen[0] {
			if g.Name != trainer.Parameters()[i].Name || fmt.Sprint(g.Value.Float64s()) != fmt.Sprint(first[i].Float64s()) {
				t.Errorf("%d replicas: kept %s %v, want %v", replicas, g.Name, g.Value.Float64s(), first[i].Float64s())
			}
		}
	}
}
