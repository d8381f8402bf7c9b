package training

import (
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestTraceLast checks that a trace that cannot be written is reported after the results, which are complete.
func TestTraceLast(t *testing.T) {
	const full = "/dev/full"
	if _, err := os.Stat(full); err != nil {
		t.Skip("needs " + full)
	}
	dir := t.TempDir()
	cmd := clitest.Commands()
	var out strings.Builder
	cmd.SetOut(&out)
	cmd.SetArgs(append([]string{
		"train", "--steps", "3", "--replicas", "1", "--progress", "none", "--trace", full, "--out", dir,
	}, clitest.TinyTable(t)...))
	if err := cmd.Execute(); err == nil || !strings.HasPrefix(err.Error(), "--trace "+full) {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(out.String(), "test accuracy") || strings.Contains(out.String(), "trace") {
		t.Errorf("printed\n%s", out.String())
	}
	for _, name := range []string{WeightsFile, historyFile, summaryFile, ConfigFile, reportFile} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
}

func TestSummary(t *testing.T) {
	s, _ := clitest.Train(t, "--replicas", "2", "--steps", "2")
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
	config := s["config"].(map[string]any)
	for name, want := range map[string]any{
		"shift": 1.0, "eval-batch": 0.0, "shard-optimizer": "auto", "data-file": []any{}, "learning-rate": 0.003,
	} {
		if got := config[name]; !reflect.DeepEqual(got, want) {
			t.Errorf("the setting %s is %v, want %v", name, got, want)
		}
	}
	for _, share := range []string{"reduce_share", "wait_share"} {
		if x := s[share].(float64); x < 0 || x > 1 {
			t.Errorf("%s is %v", share, x)
		}
	}
	sharded, _ := clitest.Train(t, "--replicas", "2", "--steps", "2", "--shard-optimizer", "on")
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
	race.SkipTimed(t, "several trainings")
	hash := func(seed string) any {
		s, _ := clitest.Train(t, "--model", "cnn", "--replicas", "2", "--steps", "3", "--seed", seed)
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
	race.SkipTimed(t, "several trainings")
	small := append(clitest.TinyTable(t), "--replicas", "2", "--steps", "4", "--global-batch", "20")
	var first any
	for _, bytes := range []string{"1GiB", "64KiB", "1"} {
		s, _ := clitest.Train(t, append(small, "--bucket-bytes", bytes)...)
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
	small := append(clitest.TinyTable(t), "--replicas", "2", "--steps", "4", "--global-batch", "20")
	hashes := map[any]string{}
	for _, codec := range []string{"none", "int8", "powersgd:4", "bfloat16", "float16"} {
		s, _ := clitest.Train(t, append(small, "--compress", codec)...)
		if other, ok := hashes[s["weights_hash"]]; ok {
			t.Errorf("%s and %s gave the same bits", codec, other)
		}
		hashes[s["weights_hash"]] = codec
	}
}

// TestDiLoCo: each part of DiLoCo's configuration has an effect.
func TestDiLoCo(t *testing.T) {
	small := append(clitest.TinyTable(t), "--replicas", "2", "--steps", "6", "--global-batch", "20")
	hashes := map[any][]string{}
	for _, flags := range [][]string{
		nil,
		{"--diloco", "2"},
		{"--diloco", "3"},
		{"--diloco", "2", "--outer-learning-rate", "1"},
		{"--diloco", "2", "--outer-momentum", "0"},
	} {
		s, _ := clitest.Train(t, append(small, flags...)...)
		if other, ok := hashes[s["weights_hash"]]; ok {
			t.Errorf("%v and %v gave the same bits", flags, other)
		}
		hashes[s["weights_hash"]] = flags
	}
}

// TestAccumulateAndClip checks that steps that accumulate batches, clipped or not, have the results of larger batches
// except for rounding.
func TestAccumulateAndClip(t *testing.T) {
	small := append(clitest.TinyTable(t), "--replicas", "2", "--steps", "4")
	for _, clip := range [][]string{{"--clip-norm", "0.5"}, nil, {"--clip-value", "0.01"}} {
		args := slices.Concat(small, clip)
		large, _ := clitest.Train(t, append(args, "--global-batch", "60")...)
		parts, _ := clitest.Train(t, append(args, "--global-batch", "20", "--accumulate", "3")...)
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
	small := append(clitest.TinyTable(t), "--global-batch", "50", "--optimizer", "sgd", "--steps", "30")
	var first []checkpoint.Tensor
	for _, replicas := range []string{"1", "3", "2"} {
		_, weights := clitest.Train(t, append(small, "--replicas", replicas)...)
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
