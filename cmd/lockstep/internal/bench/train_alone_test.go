package bench

import (
	"math"
	"testing"
	"time"
)

// TestExpectedMaximum compares the formula with the mean maximum of all pairs and triples.
func TestExpectedMaximum(t *testing.T) {
	list := []time.Duration{7, 1, 4, 4, 9}
	mean, pairs, triples := 0.0, 0.0, 0.0
	for _, a := range list {
		mean += float64(a) / 5
		for _, b := range list {
			pairs += float64(max(a, b)) / 25
			for _, c := range list {
				triples += float64(max(a, b, c)) / 125
			}
		}
	}
	for n, want := range map[int]float64{1: 1, 2: pairs / mean, 3: triples / mean} {
		if got := expectedMaximum(list, n); math.Abs(got-want) > 1e-12 {
			t.Errorf("maximum of %d draws: got %v times the mean, want %v", n, got, want)
		}
	}
}
