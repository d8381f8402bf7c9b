package predict

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"unicode/utf8"

	"github.com/lockstep-ml/lockstep/data"
)

// slowDistribution computes the probability of each token from the definitions.
func slowDistribution(logits []float32, temperature float64, topK int, topP float64) []float64 {
	before := func(i, j int) bool { return logits[i] > logits[j] || logits[i] == logits[j] && i < j }
	weights := make([]float64, len(logits))
	normalise := func() {
		sum := 0.0
		for _, w := range weights {
			sum += w
		}
		for i := range weights {
			weights[i] /= sum
		}
	}
	for i, x := range logits {
		rank := 0
		for j := range logits {
			if before(j, i) {
				rank++
			}
		}
		if topK == 0 || rank < topK {
			weights[i] = math.Exp(float64(x) / temperature)
		}
	}
	normalise()
	kept := make([]bool, len(logits))
	for i := range logits {
		likelier := 0.0
		for j := range logits {
			if before(j, i) {
				likelier += weights[j]
			}
		}
		kept[i] = likelier < topP
	}
	for i := range weights {
		if !kept[i] {
			weights[i] = 0
		}
	}
	normalise()
	return weights
}

// TestSampler compares distributions with their definitions, and draws with the distributions.
func TestSampler(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		logits := make([]float32, 1+r.IntN(40))
		for i := range logits {
			logits[i] = float32(r.NormFloat64() * 3)
			if r.IntN(4) == 0 {
				logits[i] = 1 // equal to others
			}
		}
		s := sampler{temperature: []float64{0.3, 1, 2}[r.IntN(3)], topK: r.IntN(8), topP: 1, random: r}
		if round%2 == 0 {
			s.topP = 0.01 + 0.98*r.Float64()
		}
		want := slowDistribution(logits, s.temperature, s.topK, s.topP)
		tokens, probabilities, err := s.distribution(logits)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]float64, len(logits))
		for i, token := range tokens {
			got[token] = probabilities[i]
		}
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-9 {
				t.Fatalf("%+v of %v: token %d has %v, want %v", s, logits, i, got[i], want[i])
			}
		}
		if round >= 5 {
			continue
		}
		const draws = 5000
		counts := make([]float64, len(logits))
		for range draws {
			token, err := s.next(logits)
			if err != nil {
				t.Fatal(err)
			}
			counts[token]++
		}
		for i, n := range counts {
			if p := want[i]; math.Abs(n-draws*p) > 5*math.Sqrt(draws*p*(1-p))+1e-6 {
				t.Errorf("%+v: token %d was drawn %v times, want about %.0f", s, i, n, draws*p)
			}
		}
	}
}

// TestSamplerGreedy takes the likeliest token, and of equal ones the first.
func TestSamplerGreedy(t *testing.T) {
	s := sampler{topP: 1, random: rand.New(rand.NewPCG(1, 2))}
	for want, logits := range map[int32][]float32{0: {5}, 2: {1, -3, 7, 7, 0}, 1: {-3, -1}} {
		if got, err := s.next(logits); err != nil || got != want {
			t.Errorf("%v: got %d, %v: want %d", logits, got, err, want)
		}
	}
	for _, x := range []float64{math.NaN(), math.Inf(1)} {
		if _, err := s.next([]float32{1, float32(x)}); !errors.Is(err, errNotFinite) {
			t.Errorf("%v: got %v", x, err)
		}
	}
}

// TestTextStream gives tokens one by one: only whole characters are printed, and together the text.
func TestTextStream(t *testing.T) {
	for _, text := range []string{"plain", "Grüße, 世界 🎉", "broken \xff\xe4\xb8 end", "\xf0\x9f"} {
		tokens, _ := data.Bytes{}.Encode(text)
		s := textStream{tokenizer: data.Bytes{}}
		got := ""
		for n := range len(tokens) + 1 {
			piece := s.next(tokens[:n], n == len(tokens))
			if utf8.ValidString(text) && !utf8.ValidString(piece) {
				t.Errorf("%q: the piece %q is cut within a character", text, piece)
			}
			got += piece
		}
		if got != text {
			t.Errorf("got %q, want %q", got, text)
		}
	}
}
