package predict

import (
	"cmp"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
)

// sampler draws tokens from the logits of a language model.
type sampler struct {
	temperature float64 // logits are divided by it; 0: the likeliest token is taken
	topK        int     // the number of likeliest tokens to draw from; 0: all
	topP        float64 // the least probability of the likeliest tokens to draw from; 1: all
	random      *rand.Rand
}

// errNotFinite is the error of logits that define no distribution.
var errNotFinite = errors.New("the model computes logits that are not finite (NaN): its training has diverged: train " +
	"again with a lower --learning-rate")

// next draws a token.
func (s *sampler) next(logits []float32) (int32, error) {
	tokens, probabilities, err := s.distribution(logits)
	if err != nil {
		return 0, err
	}
	at := 0.0
	for u := s.random.Float64(); at <= u && len(tokens) > 1; tokens, probabilities = tokens[1:], probabilities[1:] {
		if at += probabilities[0]; at > u {
			break
		}
	}
	return tokens[0], nil
}

// distribution returns the tokens that can be drawn, the likeliest first, and their probabilities. Of equal logits the
// token of the lower number counts as likelier. First the temperature applies, then top-k, then top-p.
func (s *sampler) distribution(logits []float32) (tokens []int32, probabilities []float64, err error) {
	tokens = make([]int32, len(logits))
	best := 0
	for i, x := range logits {
		if math.IsNaN(float64(x)) || math.IsInf(float64(x), 1) {
			return nil, nil, errNotFinite
		}
		tokens[i] = int32(i)
		if x > logits[best] {
			best = i
		}
	}
	if s.temperature == 0 {
		return tokens[best : best+1], []float64{1}, nil
	}
	slices.SortFunc(tokens, func(a, b int32) int { return cmp.Or(cmp.Compare(logits[b], logits[a]), cmp.Compare(a, b)) })
	if s.topK > 0 {
		tokens = tokens[:min(s.topK, len(tokens))]
	}
	probabilities = make([]float64, len(tokens))
	sum := 0.0
	for i, t := range tokens {
		probabilities[i] = math.Exp((float64(logits[t]) - float64(logits[tokens[0]])) / s.temperature)
		sum += probabilities[i]
	}
	kept, n := 0.0, 0
	for ; n < len(tokens) && (n == 0 || kept < s.topP*sum || s.topP == 1); n++ {
		kept += probabilities[n]
	}
	tokens, probabilities = tokens[:n], probabilities[:n]
	for i := range probabilities {
		probabilities[i] /= kept
	}
	return tokens, probabilities, nil
}
