package main

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// trainOnce runs lockstep train and returns its summary and weights.
func trainOnce(t *testing.T, args ...string) (summary map[string]any, weights []checkpoint.Tensor) {
	t.Helper()
	return trainInto(t, t.TempDir(), args...)
}

// trainInto runs lockstep train with --out, and returns its summary and weights.
func trainInto(t *testing.T, dir string, args ...string) (summary map[string]any, weights []checkpoint.Tensor) {
	t.Helper()
	root := newRoot()
	var out strings.Builder
	root.SetOut(&out)
	root.SetArgs(append([]string{"train", "--progress", "none", "--out", dir}, args...))
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &summary); err != nil {
		t.Fatal(err)
	}
	if weights, _, err = checkpoint.Load(filepath.Join(dir, "weights.safetensors")); err != nil {
		t.Fatal(err)
	}
	return summary, weights
}

// tinyTable returns flags that train a small perceptron on a table of 90 rows. With the digits, most of the time of a
// short training is the evaluation of their 1,797 test images.
func tinyTable(t *testing.T) []string {
	t.Helper()
	rows := []string{"a,b,c,d,label"}
	random := rand.New(rand.NewPCG(1, 2))
	for row := range 90 {
		class := row % 3
		rows = append(rows, fmt.Sprintf("%.2f,%.2f,%.2f,%.2f,%d", float64(class)+random.NormFloat64(),
			random.NormFloat64()-float64(class), random.NormFloat64(), random.NormFloat64(), class))
	}
	file := filepath.Join(t.TempDir(), "table.csv")
	if err := os.WriteFile(file, []byte(strings.Join(rows, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--data", "csv", "--data-file", file, "--label", "label", "--model", "mlp", "--hidden", "64,32"}
}

func TestSummary(t *testing.T) {
	s, _ := trainOnce(t, "--replicas", "2", "--steps", "2")
	for _, field := range []string{
		"data", "model", "strategy", "replicas", "global_batch", "epochs", "steps", "test_accuracy", "test_loss",
		"examples_per_second", "reduce_share", "wait_share", "seconds", "weights_hash",
	} {
		if s[field] == nil {
			t.Errorf("the summary has no %s: %v", field, s)
		}
	}
	if s["data"] != "digits" || s["model"] != "cnn" || s["strategy"] != "mirrored" || s["replicas"] != 2.0 ||
		s["global_batch"] != 64.0 || s["steps"] != 2.0 {
		t.Errorf("the summary is %v", s)
	}
	for _, share := range []string{"reduce_share", "wait_share"} {
		if x := s[share].(float64); x < 0 || x > 1 {
			t.Errorf("%s is %v", share, x)
		}
	}
	sharded, _ := trainOnce(t, "--replicas", "2", "--steps", "2", "--shard-optimizer", "on")
	if s["shard_optimizer"] != false || sharded["shard_optimizer"] != true ||
		sharded["weights_hash"] != s["weights_hash"] {
		t.Errorf("the summary of a sharded optimizer is %v, of another %v", sharded, s)
	}
	const counters = 100                            // bytes that both devices keep
	unsharded := s["optimizer_bytes"].(float64) / 2 // two devices
	if bytes := sharded["optimizer_bytes"].(float64); unsharded < 1e5 || bytes < unsharded || bytes > unsharded+counters {
		t.Errorf("%v bytes of slots, want %v and counters", bytes, unsharded)
	}
}

// TestSeedDecides: the same command and seed give the same hash, another seed gives another hash.
func TestSeedDecides(t *testing.T) {
	skipShort(t, "several trainings")
	hash := func(seed string) any {
		s, _ := trainOnce(t, "--model", "cnn", "--replicas", "2", "--steps", "3", "--seed", seed)
		return s["weights_hash"]
	}
	first := hash("1")
	if again := hash("1"); again != first {
		t.Errorf("seed 1 gave %v, then %v", first, again)
	}
	if other := hash("2"); other == first {
		t.Errorf("seeds 1 and 2 both gave %v", first)
	}
}

// TestBucketsGiveTheSameBits: the number of buckets does not change the bits of the Go engine.
func TestBucketsGiveTheSameBits(t *testing.T) {
	skipShort(t, "several trainings")
	small := append(tinyTable(t), "--replicas", "2", "--steps", "4", "--global-batch", "20")
	var first any
	for _, bytes := range []string{"1GiB", "64KiB", "1"} {
		s, _ := trainOnce(t, append(small, "--bucket-bytes", bytes)...)
		if first == nil {
			first = s["weights_hash"]
		}
		if got := s["weights_hash"]; got != first {
			t.Errorf("buckets of %s gave %v, one bucket %v", bytes, got, first)
		}
	}
}

// TestCompress: training with every codec works, and each gives other bits.
func TestCompress(t *testing.T) {
	small := append(tinyTable(t), "--replicas", "2", "--steps", "4", "--global-batch", "20")
	hashes := map[any]string{}
	for _, codec := range []string{"none", "int8", "powersgd:4", "bfloat16", "float16"} {
		s, _ := trainOnce(t, append(small, "--compress", codec)...)
		if other, ok := hashes[s["weights_hash"]]; ok {
			t.Errorf("%s and %s gave the same bits", codec, other)
		}
		hashes[s["weights_hash"]] = codec
	}
}

// TestDiLoCo: each part of DiLoCo's configuration has an effect.
func TestDiLoCo(t *testing.T) {
	small := append(tinyTable(t), "--replicas", "2", "--steps", "6", "--global-batch", "20")
	hashes := map[any][]string{}
	for _, flags := range [][]string{
		nil,
		{"--diloco", "2"},
		{"--diloco", "3"},
		{"--diloco", "2", "--outer-learning-rate", "1"},
		{"--diloco", "2", "--outer-momentum", "0"},
	} {
		s, _ := trainOnce(t, append(small, flags...)...)
		if other, ok := hashes[s["weights_hash"]]; ok {
			t.Errorf("%v and %v gave the same bits", flags, other)
		}
		hashes[s["weights_hash"]] = flags
	}
}

// TestAccumulateAndClip checks that steps that accumulate batches, clipped or not, have the results of larger batches
// except for rounding.
func TestAccumulateAndClip(t *testing.T) {
	small := append(tinyTable(t), "--replicas", "2", "--steps", "4")
	for _, clip := range [][]string{{"--clip-norm", "0.5"}, nil, {"--clip-value", "0.01"}} {
		args := slices.Concat(small, clip)
		large, _ := trainOnce(t, append(args, "--global-batch", "60")...)
		parts, _ := trainOnce(t, append(args, "--global-batch", "20", "--accumulate", "3")...)
		if parts["steps"] != large["steps"] {
			t.Errorf("%v: %v steps, want %v", clip, parts["steps"], large["steps"])
		}
		if a, b := parts["train_loss"].(float64), large["train_loss"].(float64); math.Abs(a-b) > 1e-4*b {
			t.Errorf("%v: loss %v, want %v", clip, a, b)
		}
	}
}

// TestReplicasGiveTheSameWeights: 30 steps of 50 examples on 1, 3 and 2 replicas differ in rounding only.
func TestReplicasGiveTheSameWeights(t *testing.T) {
	small := append(tinyTable(t), "--global-batch", "50", "--optimizer", "sgd", "--steps", "30")
	var first []checkpoint.Tensor
	for _, replicas := range []string{"1", "3", "2"} {
		_, weights := trainOnce(t, append(small, "--replicas", replicas)...)
		if first == nil {
			first = weights
		}
		largest := 0.0
		for i, w := range weights {
			a, b := tensor.Data[float32](first[i].Value), tensor.Data[float32](w.Value)
			for j := range a {
				largest = max(largest, math.Abs(float64(a[j])-float64(b[j])))
			}
		}
		t.Logf("%s replicas: largest difference %.2g", replicas, largest)
		if !(largest <= 1e-5) {
			t.Errorf("%s replicas: a weight differs by %v from 1 replica's", replicas, largest)
		}
	}
}

// TestNumbers: a NaN of a diverged run is null in JSON.
func TestNumbers(t *testing.T) {
	text, err := json.Marshal([]number{1.5, number(math.NaN()), number(math.Inf(-1)), 1e-9, 5000000})
	if err != nil || string(text) != "[1.5,null,null,1e-09,5e+06]" {
		t.Errorf("got %s, %v", text, err)
	}
}

func TestGrouped(t *testing.T) {
	for n, want := range map[int]string{
		0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -999: "-999",
		-1000: "-1,000",
	} {
		if got := grouped(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}

func TestClosest(t *testing.T) {
	names := []string{"epochs", "steps", "seed", "replicas", "global-batch"}
	for word, want := range map[string]string{
		"epoch": "epochs", "epcohs": "epochs", "step": "steps", "replica": "replicas", "globalbatch": "global-batch",
		"sed":    "seed",
		"colour": "", "x": "", "": "", "verbose": "",
	} {
		if got := closest(word, names); got != want {
			t.Errorf("%s: got %q, want %q", word, got, want)
		}
	}
}

func TestWrapWords(t *testing.T) {
	for _, c := range []struct {
		text    string
		columns int
		want    string
	}{
		{"", 10, ""},
		{"one two three", 20, "one two three"},
		{"one two three", 13, "one two three"},
		{"one two three", 12, "one two|three"},
		{"one two three", 7, "one two|three"},
		{"one two three", 6, "one|two|three"},
		{"one two three", -5, "one|two|three"},
		{"é ü ö", 3, "é ü|ö"},
	} {
		if got := strings.Join(wrapWords(c.text, c.columns), "|"); got != c.want {
			t.Errorf("%q in %d columns: got %q, want %q", c.text, c.columns, got, c.want)
		}
	}
}
