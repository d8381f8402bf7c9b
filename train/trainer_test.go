package train

import (
	"context"
	"errors"
	"math"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestEvaluate(t *testing.T) {
	all := lineExamples(11)
	all.Weights = tensor.Of([]float32{1, 2, 0, 1, 1, 0.5, 1, 0, 0, 0, 3})
	var want struct{ loss, near, weight float64 }
	o := oracle{w0: 3}
	copied := o
	want.loss, want.near, want.weight = copied.step(0, all)
	for replicas := 1; replicas <= 4; replicas++ {
		trainer, p := newFake(t, replicas, 4, fakeModel{})
		before := p.snapshot()
		got, err := trainer.Evaluate(t.Context(), sizes(all, 4, 3, 3, 1)) // the third has the weights 0, 0, 0
		if err != nil {
			t.Fatal(err)
		}
		if !close64(got.Loss, want.loss/want.weight) || !close64(got.Metrics["near"], want.near/want.weight) ||
			got.Examples != 11 {
			t.Errorf("%d replicas: got %+v, want loss %v, near %v, 11 examples", replicas, got, want.loss/want.weight,
				want.near/want.weight)
		}
		if !reflect.DeepEqual(p.snapshot(), before) {
			t.Errorf("%d replicas: Evaluate changed variables", replicas)
		}
	}
}

func TestEvaluateFails(t *testing.T) {
	cause := errors.New("out of memory")
	trainer, _ := newFake(t, 3, 6, fakeModel{fail: func(at string, replica int) error {
		if (at == "evaluate" || at == "predict") && replica == 1 {
			return cause
		}
		return nil
	}})
	all := sizes(lineExamples(6), 6)
	if _, err := trainer.Evaluate(t.Context(), all); !errors.Is(err, cause) ||
		!strings.HasPrefix(err.Error(), "train: evaluate: ") {
		t.Errorf("Evaluate: %v", err)
	}
	if _, err := trainer.Predict(t.Context(), all); !errors.Is(err, cause) ||
		!strings.HasPrefix(err.Error(), "train: predict: ") {
		t.Errorf("Predict: %v", err)
	}
	if _, err := trainer.Evaluate(t.Context(), nil); err == nil || err.Error() != "train: evaluate: the dataset is nil" {
		t.Errorf("Evaluate of nothing: %v", err)
	}
	if _, err := trainer.Predict(t.Context(), nil); err == nil || err.Error() != "train: predict: the dataset is nil" {
		t.Errorf("Predict of nothing: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := trainer.Evaluate(ctx, all); !errors.Is(err, context.Canceled) {
		t.Errorf("Evaluate under an ended context: %v", err)
	}
}

func TestPredict(t *testing.T) {
	all := lineExamples(11)
	for replicas := 1; replicas <= 4; replicas++ {
		trainer, _ := newFake(t, replicas, 4, fakeModel{})
		ds := fromTensors(data.Batch{Inputs: all.Inputs}).Batch(4) // no labels
		out, err := trainer.Predict(t.Context(), ds)
		if err != nil {
			t.Fatal(err)
		}
		if len(out) != 2 || !out[1].Equal(all.Inputs[0]) {
			t.Fatalf("%d replicas: the second output is not the input in its order: %v", replicas, out)
		}
		x := tensor.Data[float64](all.Inputs[0])
		for i, y := range tensor.Data[float64](out[0]) {
			if y != 3*x[2*i] {
				t.Errorf("%d replicas: example %d: got %v, want %v", replicas, i, y, 3*x[2*i])
			}
		}
	}
	trainer, _ := newFake(t, 2, 4, fakeModel{})
	if _, err := trainer.Predict(t.Context(), sizes(all, 0)); err == nil || !strings.Contains(err.Error(), "no examples") {
		t.Errorf("no examples: %v", err)
	}
}

// TestOwnLoop checks that Gradients and ApplyGradients make the same step as Fit, bit for bit, and that Gradients alone
// changes only averages.
func TestOwnLoop(t *testing.T) {
	for replicas := 1; replicas <= 3; replicas++ {
		fitted, want := newFake(t, replicas, 7, fakeModel{})
		own, got := newFake(t, replicas, 7, fakeModel{})
		b := lineExamples(7)
		for range 5 {
			h, err := fitted.Fit(t.Context(), batches(b), FitConfig{})
			if err != nil {
				t.Fatal(err)
			}
			before := got.snapshot()
			gradients, result, err := own.Gradients(t.Context(), b)
			if err != nil {
				t.Fatal(err)
			}
			for r, values := range got.snapshot() {
				if !reflect.DeepEqual(values[:4], before[r][:4]) {
					t.Fatalf("Gradients changed a parameter or slot of replica %d: %v, before %v", r, values[:4], before[r][:4])
				}
			}
			if !reflect.DeepEqual(result, h.Epochs[0].Result) {
				t.Errorf("got %+v, want %+v", result, h.Epochs[0].Result)
			}
			if err := own.ApplyGradients(t.Context(), gradients); err != nil {
				t.Fatal(err)
			}
		}
		for r := range replicas {
			a, b := got.snapshot()[r], want.snapshot()[r]
			if !reflect.DeepEqual(a, b) {
				t.Errorf("replica %d of %d: got %v, want %v", r, replicas, a, b)
			}
		}
		if own.Steps() != 5 {
			t.Errorf("%d steps, want 5", own.Steps())
		}
	}
}

func TestApplyGradientsErrors(t *testing.T) {
	scalar, vector := tensor.Scalar(1.0), tensor.New(tensor.Float64, 2)
	cause := errors.New("no")
	armed := false
	trainer, p := newFake(t, 2, 4, fakeModel{fail: func(at string, replica int) error {
		if armed && at == "update 1" && replica == 1 {
			return cause
		}
		return nil
	}})
	for want, gradients := range map[string][]*tensor.Tensor{
		"1 gradients given for 2 parameters":                       {scalar},
		"gradient of bias: got float64(2,), want float64()":        {vector, vector},
		"gradient of weights: missing: want float64(2,)":           {scalar, nil},
		"gradient of weights: got float32(2,), want float64(2,)":   {scalar, tensor.New(tensor.Float32, 2)},
		"gradient of weights: got float64(1, 2), want float64(2,)": {scalar, tensor.New(tensor.Float64, 1, 2)},
	} {
		if err := trainer.ApplyGradients(t.Context(), gradients); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	armed = true
	before := p.snapshot()
	if err := trainer.ApplyGradients(t.Context(), []*tensor.Tensor{scalar, vector}); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	if !reflect.DeepEqual(p.snapshot(), before) || trainer.Steps() != 0 {
		t.Error("a failed ApplyGradients changed variables")
	}
	weightless := lineExamples(2)
	weightless.Weights = tensor.New(tensor.Float32, 2)
	if _, _, err := trainer.Gradients(t.Context(), weightless); err == nil ||
		!strings.Contains(err.Error(), "2 examples add up to 0") {
		t.Errorf("weights of 0: %v", err)
	}
}

func TestWeights(t *testing.T) {
	trainer, p := newFake(t, 3, 4, fakeModel{})
	for i, r := range p.replicas {
		r.now[4][0] = float64(3 * i) // the mean is 3
	}
	weights, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []Weight{
		{"bias", tensor.Scalar(0.0)},
		{"seen", tensor.Scalar(3.0)},
		{"weights", tensor.Of([]float64{3, 0}, 2)},
	}
	if len(weights) != len(want) {
		t.Fatalf("got %v", weights)
	}
	for i, w := range want {
		if weights[i].Name != w.Name || !weights[i].Value.Equal(w.Value) {
			t.Errorf("got %v, want %v", weights[i], w)
		}
	}
	other, q := newFake(t, 2, 4, fakeModel{})
	weights[0].Value = tensor.Scalar(5.0)
	if err := other.SetWeights(weights); err != nil {
		t.Fatal(err)
	}
	for _, r := range q.replicas {
		if r.now[0][0] != 5 || r.now[4][0] != 3 || r.now[1][0] != 3 {
			t.Errorf("a replica has %v", r.now)
		}
	}
	a, err := other.WeightsHash(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b := HashWeights(weights); a != b {
		t.Errorf("hash %s of the trainer, %s of the weights that it was given", a, b)
	}
}

func TestSetWeightsErrors(t *testing.T) {
	one, two := tensor.Scalar(1.0), tensor.New(tensor.Float64, 2)
	trainer, p := newFake(t, 2, 4, fakeModel{})
	before := p.snapshot()
	for want, weights := range map[string][]Weight{
		"bias is missing":                       {{"weights", two}, {"seen", one}},
		"bias is given twice":                   {{"bias", one}, {"bias", one}},
		"has no variable b2":                    {{"bias", one}, {"weights", two}, {"seen", one}, {"b2", one}},
		"bias: got float64(2,), want float64()": {{"bias", two}, {"weights", two}, {"seen", one}},
		"seen: got float32(), want float64()":   {{"bias", one}, {"weights", two}, {"seen", tensor.Scalar[float32](1)}},
		"has no variable momentum/bias":         {{"bias", one}, {"weights", two}, {"seen", one}, {"momentum/bias", one}},
		"weights: missing: want float64(2,)":    {{"bias", one}, {"weights", nil}, {"seen", one}},
	} {
		if err := trainer.SetWeights(weights); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	if err := trainer.SetVariable("rate", one); err == nil || !strings.Contains(err.Error(), "no variable rate") {
		t.Errorf("SetVariable: %v", err)
	}
	if err := trainer.SetVariable("bias", two); err == nil || !strings.Contains(err.Error(), "bias: got float64(2,)") {
		t.Errorf("SetVariable: %v", err)
	}
	if !reflect.DeepEqual(p.snapshot(), before) {
		t.Error("a refused call changed variables")
	}
}

func TestHashWeights(t *testing.T) {
	base := []Weight{{"a", tensor.Of([]float32{1, 2}, 2)}, {"b", tensor.Of([]float32{0}, 1)}}
	seen := map[string]string{}
	for name, w := range map[string][]Weight{
		"base":          base,
		"name":          {{"c", base[0].Value}, base[1]},
		"value":         {{"a", tensor.Of([]float32{1, 3}, 2)}, base[1]},
		"sign of zero":  {base[0], {"b", tensor.Of([]float32{float32(math.Copysign(0, -1))}, 1)}},
		"shape":         {{"a", tensor.Of([]float32{1, 2}, 1, 2)}, base[1]},
		"dtype":         {{"a", tensor.Of([]int32{1, 2}, 2)}, base[1]},
		"fewer":         base[:1],
		"none":          {},
		"split at name": {{"a", tensor.Of([]float32{1, 2, 0}, 3)}},
	} {
		h := HashWeights(w)
		if other, ok := seen[h]; ok {
			t.Errorf("%s and %s have one hash", name, other)
		}
		seen[h] = name
		if again := HashWeights(w); again != h {
			t.Errorf("%s: hashes %s and %s", name, h, again)
		}
	}
}

// TestStepAllocations bounds the trainer's allocations per step: batches live in reused buffers, and a sharded
// optimizer allocates no more objects than another.
func TestStepAllocations(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"plain":    func(*Config) {},
		"ClipNorm": func(c *Config) { c.ClipNorm = 0.1 },
	} {
		unsharded := 0.0
		for _, s := range []Exchange{AllReduce{}, Sharded{}} {
			cfg := fakeConfig(512)
			cfg.Exchange = s
			change(&cfg)
			bytes, objects := stepAllocations(t, cfg)
			if bytes > 8<<10 {
				t.Errorf("%s, sharding %v: a step allocates %v bytes, as much as its batch", name, s, bytes)
			}
			switch {
			case s == (AllReduce{}):
				unsharded = objects
			case objects > unsharded+0.5 && !race.Enabled: // sync.Pool drops items at random under the race detector
				t.Errorf("%s: a step allocates %v objects, and %v with a sharded optimizer", name, unsharded, objects)
			}
		}
	}
}

// stepAllocations returns the bytes and the objects that a step of two replicas allocates after some steps.
func stepAllocations(t *testing.T, cfg Config) (bytes, objects float64) {
	t.Helper()
	trainer, _ := newFakeWith(t, 2, cfg, fakeModel{})
	b := lineExamples(512) // 12 KiB
	const skipped, steps = 20, 220
	var before, after runtime.MemStats
	_, err := trainer.Fit(t.Context(), batches(b), FitConfig{StepsPerEpoch: steps, Callbacks: []Callback{{
		OnStepEnd: func(_ context.Context, s Step) error {
			switch s.Step {
			case skipped:
				runtime.ReadMemStats(&before)
			case steps:
				runtime.ReadMemStats(&after)
			}
			return nil
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	n := float64(steps - skipped)
	return float64(after.TotalAlloc-before.TotalAlloc) / n, float64(after.Mallocs-before.Mallocs) / n
}
