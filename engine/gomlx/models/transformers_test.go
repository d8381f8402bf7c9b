package models_test

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/gomlx/gomlx/ml/zoo/transformer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestTransformers compares logits with those of Hugging Face's transformers, by weights that
// testdata/make_transformers.py has written. Several goroutines predict at the same time.
func TestTransformers(t *testing.T) {
	for _, name := range []string{"gpt2", "llama", "llama-tied"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("testdata", "transformers", name)
			m, tokens, want := pretrained(t, name)
			weights, err := train.LoadWeights(dir)
			if err != nil {
				t.Fatal(err)
			}
			e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			p, err := train.NewPredictor(t.Context(), &gomlx.Model{Forward: m.Forward}, train.PredictorConfig{
				Engine: e, Inputs: []engine.Feature{{DType: tensor.Int32, Shape: tokens.Shape()[1:]}}, Batch: 3,
				Weights: weights,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					got, err := p.Predict(t.Context(), tokens)
					if err != nil {
						t.Error(err)
						return
					}
					if d := furthest(t, got[0], want); !(d < 1e-4) {
						t.Errorf("logits differ by %g from those of transformers, want less than 1e-4", d)
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestZooTransformer computes Gemma 3 by GoMLX's ml/zoo/transformer, with weights that a map of names renames.
func TestZooTransformer(t *testing.T) {
	tokens, want := recorded(t, "gemma3")
	weights, err := train.LoadWeights("testdata/transformers/gemma3")
	if err != nil {
		t.Fatal(err)
	}
	names, err := checkpoint.LoadNameMap("testdata/gemma3-names.txt")
	if err != nil {
		t.Fatal(err)
	}
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	forward := func(s *model.Scope, in []*graph.Node) []*graph.Node {
		m := transformer.New(s).WithVocabSize(53).WithEmbedDim(16).WithFFNDim(24).WithNumLayers(2).WithNumHeads(4).
			WithNumKVHeads(2).WithHeadDim(8).WithMaxPosEmbed(32).WithBias(false).WithTransposedWeights(true).
			WithArchitecture(transformer.ArchitectureGemma3).WithActivation(activation.TypeGeluApprox).
			WithNormalization("rms").WithFinalNormalization("rms").WithNormEpsilon(1e-6).WithRoPE(5000)
		return []*graph.Node{m.Logits(in[0], transformer.CallOptions{})}
	}
	p, err := train.NewPredictor(t.Context(), &gomlx.Model{Forward: forward}, train.PredictorConfig{
		Engine: e, Inputs: []engine.Feature{{DType: tensor.Int32, Shape: tokens.Shape()[1:]}}, Batch: 2,
		Weights: weights, Load: train.LoadOptions{Names: names},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	got, err := p.Predict(t.Context(), tokens)
	if err != nil {
		t.Fatal(err)
	}
	if d := furthest(t, got[0], want); !(d < 1e-4) {
		t.Errorf("logits differ by %g from those of transformers, want less than 1e-4", d)
	}
}

// pretrained returns a model of testdata, and tokens with their logits.
func pretrained(t *testing.T, name string) (m *models.CausalLM, tokens, logits *tensor.Tensor) {
	t.Helper()
	m, err := models.LoadCausalLM(filepath.Join("testdata", "transformers", name, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	tokens, logits = recorded(t, name)
	return m, tokens, logits
}

// recorded returns tokens, and the logits that transformers computes of them.
func recorded(t *testing.T, name string) (tokens, logits *tensor.Tensor) {
	t.Helper()
	list, _, err := checkpoint.Load(filepath.Join("testdata", "transformers", name+"-logits.safetensors"))
	if err != nil || len(list) != 2 {
		t.Fatalf("%d tensors, %v", len(list), err)
	}
	return list[1].Value, list[0].Value
}

// furthest returns the largest difference of two tensors.
func furthest(t *testing.T, got, want *tensor.Tensor) (most float64) {
	if got.DType() != want.DType() || !got.SameShape(want) {
		t.Fatalf("got %v%v, want %v%v", got.DType(), got.Shape(), want.DType(), want.Shape())
	}
	a, b := got.Float64s(), want.Float64s()
	for i := range a {
		if d := math.Abs(a[i] - b[i]); !(d <= most) {
			most = d
		}
	}
	return most
}

// TestTrainTransformers trains a model from Hugging Face's weights on two replicas, and exports it with the
// library's names.
func TestTrainTransformers(t *testing.T) {
	for _, name := range []string{"gpt2", "llama"} {
		t.Run(name, func(t *testing.T) {
			m, tokens, _ := pretrained(t, name)
			weights, err := train.LoadWeights(filepath.Join("testdata", "transformers", name))
			if err != nil {
				t.Fatal(err)
			}
			e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			sequence := engine.Feature{DType: tensor.Int32, Shape: []int{10}}
			trainer, err := train.New(t.Context(), s, &gomlx.Model{
				Forward: m.Forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
				Optimizer: optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.01),
			}, train.Config{GlobalBatch: 2, Inputs: []engine.Feature{sequence}, Labels: []engine.Feature{sequence}})
			if err != nil {
				t.Fatal(err)
			}
			defer trainer.Close()
			if _, err := trainer.LoadWeights(weights, train.LoadOptions{}); err != nil {
				t.Fatal(err)
			}
			x, y := tensor.New(tensor.Int32, 2, 10), tensor.New(tensor.Int32, 2, 10)
			for row := range 2 {
				ids := tensor.Data[int32](tokens)[row*11:][:11]
				copy(tensor.Data[int32](x)[row*10:], ids[:10])
				copy(tensor.Data[int32](y)[row*10:], ids[1:])
			}
			rows, err := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}})
			if err != nil {
				t.Fatal(err)
			}
			history, err := trainer.Fit(t.Context(), rows.Batch(2), train.FitConfig{Epochs: 5})
			if err != nil {
				t.Fatal(err)
			}
			if first, last := history.Epochs[0].Loss, history.Epochs[4].Loss; !(last < 0.95*first) {
				t.Errorf("the loss is %v after %v: want it to decrease", last, first)
			}
			file := filepath.Join(t.TempDir(), "model.safetensors")
			if err := trainer.Export(t.Context(), file, nil); err != nil {
				t.Fatal(err)
			}
			got, err := train.LoadWeights(file)
			if err != nil || len(got) != len(weights) {
				t.Fatalf("%d weights, %v, want %d", len(got), err, len(weights))
			}
			for _, w := range got {
				found := false
				for _, old := range weights {
					found = found || w.Name == "/"+strings.ReplaceAll(old.Name, ".", "/") && w.Value.SameShape(old.Value)
				}
				if !found {
					t.Errorf("the export has %s %v, which the library does not have", w.Name, w.Value.Shape())
				}
			}
		})
	}
}

func TestLoadCausalLMErrors(t *testing.T) {
	const llama = `"model_type":"llama","vocab_size":5,"hidden_size":8,"num_hidden_layers":1,"num_attention_heads":2,` +
		`"intermediate_size":4,"max_position_embeddings":4,"rms_norm_eps":1e-6,"hidden_act":"silu"`
	file := filepath.Join(t.TempDir(), "config.json")
	for _, test := range []struct{ text, want string }{
		{"{" + llama + "}", ""},
		{`{"model_type":"bert"}`, `model_type "bert"`},
		{`{"model_type":"llama"}`, "missing or not positive"},
		{"{" + llama + `,"num_key_value_heads":3}`, "want a divisor"},
		{"{" + llama + `,"rope_scaling":{"rope_type":"llama3"}}`, "scaled"},
		{"{" + llama + `,"rope_parameters":{"rope_type":"yarn"}}`, "scaled"},
		{"{" + llama + `,"hidden_act":"relu"}`, `activation "relu"`},
		{"{" + llama + `,"head_dim":3}`, "even"},
		{"[]", "cannot unmarshal"},
	} {
		if err := os.WriteFile(file, []byte(test.text), 0o666); err != nil {
			t.Fatal(err)
		}
		_, err := models.LoadCausalLM(file)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q in it", test.text, err, test.want)
		}
	}
}
