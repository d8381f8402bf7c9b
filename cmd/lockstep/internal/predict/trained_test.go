package predict

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/training"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// runLockstep runs a command in this process and returns what it prints.
func runLockstep(t *testing.T, args ...string) string {
	t.Helper()
	var out strings.Builder
	cmd := clitest.Commands()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out.String())
	}
	return out.String()
}

// TestTrainedFolderAlone trains, and uses the folder without the data of the training. The results must be those of
// weights without metadata, which need these data.
func TestTrainedFolderAlone(t *testing.T) {
	root := t.TempDir()
	dataDir, other := filepath.Join(root, "data"), filepath.Join(root, "other")
	for class, level := range map[string]uint8{"black": 10, "white": 240} {
		for i := range 6 {
			writeGrey(t, filepath.Join(dataDir, "images", class, string(rune('a'+i))+".png"), 8, level+uint8(i))
		}
		writeGrey(t, filepath.Join(other, "images", class, "1.png"), 20, level)
	}
	rows, more := []string{"age,colour,size,kind"}, []string{"age,colour,size,kind"}
	for i := range 60 {
		size := fmt.Sprint(i % 7)
		if i%9 == 0 {
			size = ""
		}
		row := fmt.Sprintf("%d,%s,%s,%s", 20+i*7%50, []string{"red", "blue"}[i%2], size, []string{"hi", "lo", "mid"}[i%3])
		rows = append(rows, row)
		if i%10 == 0 {
			more = append(more, row)
		}
	}
	table, new := filepath.Join(dataDir, "t.csv"), filepath.Join(other, "new.csv")
	for file, lines := range map[string][]string{table: rows, new: more} {
		if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	black, white := filepath.Join(other, "images", "black"), filepath.Join(other, "images", "white", "1.png")
	held := filepath.Join(dataDir, "held.csv")
	if err := os.WriteFile(held, []byte(strings.Join(more, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	csv := []string{
		"--data", "csv", "--data-file", table, "--test-file", held, "--text-columns", "colour,kind", "--hidden", "8",
	}
	uses := map[string][][]string{}
	train := func(name, folder string, args []string, use ...[]string) {
		dir := filepath.Join(root, name)
		runLockstep(t, append([]string{
			"train", "--steps", "3", "--replicas", "1", "--global-batch", "6", "--progress", "none", folder, dir,
		}, args...)...)
		uses[dir] = use
	}
	images := []string{"--data", "images", "--data-dir", filepath.Join(dataDir, "images")}
	train("images", "--out", images, []string{"predict", black, white}, []string{"predict", "--data-dir", black},
		[]string{"eval", "--data-dir", filepath.Join(other, "images")})
	train("snapshots", "--checkpoint-dir", images, []string{"predict", black, white})
	train("classes", "--out", append(slices.Clone(csv), "--label", "kind"), []string{"predict", new},
		[]string{"predict", "--data-file", new, "--format", "json"}, []string{"eval", "--data-file", new})
	train("numbers", "--out", append(slices.Clone(csv), "--label", "age", "--loss", "mse"), []string{"predict", new},
		[]string{"eval", "--data-file", new})

	results := func() (all []string) {
		for _, dir := range cli.Sorted(uses) {
			for _, use := range uses[dir] {
				text := runLockstep(t, append(slices.Clone(use), "--from", dir)...)
				all = append(all, strings.ReplaceAll(text, "; 7 rows with missing values", "")) // in the training's data
			}
		}
		return all
	}
	// Without metadata, the training's data are read.
	for dir := range uses {
		file := filepath.Join(dir, training.WeightsFile)
		if tensors, _, err := checkpoint.Load(file); err == nil {
			if err := os.Rename(file, file+".whole"); err != nil {
				t.Fatal(err)
			}
			if err := checkpoint.Save(file, tensors, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	want := results()
	for dir := range uses {
		file := filepath.Join(dir, training.WeightsFile)
		if _, err := os.Stat(file); err == nil {
			if err := os.Rename(file+".whole", file); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.RemoveAll(dataDir); err != nil {
		t.Fatal(err)
	}
	if got := results(); !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"predict", filepath.Join(root, "none.png"), "--from", filepath.Join(root, "images")}, "none.png"},
		{[]string{"predict", "--from", filepath.Join(root, "images")}, "give other data"},
		{[]string{"predict", new, table, "--from", filepath.Join(root, "classes")}, "takes one file of rows"},
	} {
		cmd := clitest.Commands()
		cmd.SetArgs(test.args)
		cmd.SetOut(&strings.Builder{})
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want %q in it", test.args, err, test.want)
		}
	}
}

// TestTokenizerAlone checks that a trained folder has its tokenizer.
func TestTokenizerAlone(t *testing.T) {
	dir := t.TempDir()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "data", "tokenizer", "testdata", "bert.json"))
	if err != nil {
		t.Fatal(err)
	}
	file, out := filepath.Join(dir, "bert.json"), filepath.Join(dir, "out")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	runLockstep(t, "train", "--data", "text", "--tokenizer", file, "--width", "8", "--layers", "1", "--heads", "1",
		"--positions", "8", "--steps", "1", "--global-batch", "2", "--eval-batch", "256", "--replicas", "1", "--progress",
		"none", "--checkpoint-dir", out)
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := runLockstep(t, "generate", "--from", out, "--prompt", "12", "--tokens", "2"); !strings.HasPrefix(got, "12") {
		t.Errorf("generated %q", got)
	}
}

// TestGenerateTransformers compares greedy texts of models of Hugging Face with what all positions together give.
func TestGenerateTransformers(t *testing.T) {
	const positions = 12
	root := filepath.Join("..", "..", "..", "..", "engine", "gomlx", "models", "testdata", "transformers")
	letter := func(i int32) string { return string(rune('A' + i)) }
	for _, name := range []string{"gpt2", "gpt2 without a head", "llama"} {
		t.Run(name, func(t *testing.T) {
			model, headless := strings.CutSuffix(name, " without a head")
			dir, from := t.TempDir(), filepath.Join(root, model)
			if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
				t.Fatal(err)
			}
			weights, err := train.LoadWeights(from)
			if err != nil {
				t.Fatal(err)
			}
			if headless {
				var list []checkpoint.Tensor
				for _, w := range weights {
					list = append(list, checkpoint.Tensor{Name: strings.TrimPrefix(w.Name, "transformer."), Value: w.Value})
				}
				if err := checkpoint.Save(filepath.Join(dir, "model.safetensors"), list, nil); err != nil {
					t.Fatal(err)
				}
			}
			m, err := models.LoadCausalLM(filepath.Join(from, "config.json"))
			if err != nil {
				t.Fatal(err)
			}
			var pieces [][]any
			for i := range int32(m.Vocabulary) {
				pieces = append(pieces, []any{letter(i), 0})
			}
			space := map[string]any{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
			tokenizer, err := json.Marshal(map[string]any{
				"pre_tokenizer": space, "decoder": space,
				"model": map[string]any{"type": "Unigram", "unk_id": 0, "vocab": pieces},
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), tokenizer, 0o600); err != nil {
				t.Fatal(err)
			}
			e, err := gomlx.OpenGo(gomlx.GoOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			p, err := train.NewPredictor(t.Context(), &gomlx.Model{Forward: m.Forward}, train.PredictorConfig{
				Engine: e, Inputs: []engine.Feature{{DType: tensor.Int32, Shape: []int{positions}}}, Batch: 1, Weights: weights,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			tokens, want := make([]int32, positions), ""
			copy(tokens, []int32{7, 1, 30})
			for n := 3; n < positions; n++ {
				logits, err := p.Predict(t.Context(), tensor.Of(tokens, 1, positions))
				if err != nil {
					t.Fatal(err)
				}
				last := tensor.Data[float32](logits[0])[(n-1)*m.Vocabulary : n*m.Vocabulary]
				tokens[n] = int32(slices.Index(last, slices.Max(last)))
			}
			for _, token := range tokens {
				want += letter(token)
			}
			got := runLockstep(t, "generate", "--from", dir, "--prompt", want[:3], "--tokens", fmt.Sprint(positions-3),
				"--temperature", "0", "--engine", "go")
			if got != want+"\n" {
				t.Errorf("generated %q, want %q", got, want)
			}
		})
	}
}
