package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestCallbackFlags trains a few steps with all flags of callbacks.
func TestCallbackFlags(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	data := append(tinyTable(t), "--replicas", "2")
	small := slices.Concat(data, []string{"--validation-split", "0.3", "--epochs", "3", "--global-batch", "20"})
	s, _ := trainOnce(t, append(small, "--schedule", "warmup-cosine", "--warmup-steps", "3", "--ema", "0.5",
		"--validate-every", "2", "--best", at("best"), "--csv-log", at("log.csv"), "--json-log", at("log.jsonl"),
		"--log-every", "1", "--tensorboard", at("board"))...)
	if _, _, err := checkpoint.Load(at("best")); err != nil || s["steps"].(float64) < 4 {
		t.Errorf("%v steps, the best weights: %v", s["steps"], err)
	}
	// The averages are the final weights, with and without early stopping.
	averages := append(small, "--ema", "0.9", "--best", at("averages"), "--monitor", "loss")
	without, _ := trainOnce(t, append(small, "--ema", "0.9")...)
	with, _ := trainOnce(t, append(averages, "--early-stopping", "5")...) // every epoch is better
	tested, _ := trainOnce(t, append(data, "--epochs", "0", "--weights", at("averages"))...)
	for name, s := range map[string]map[string]any{"--ema": without, "--early-stopping": with} {
		if s["weights_hash"] != tested["weights_hash"] {
			t.Errorf("%s ends with weights %v, want those of --best, %v", name, s["weights_hash"], tested["weights_hash"])
		}
	}
	log, err := os.ReadFile(at("log.csv"))
	lines := strings.Split(string(log), "\n")
	if err != nil || lines[0] != "event,epoch,step,learning_rate,accuracy,loss,val_accuracy,val_loss" ||
		!strings.HasPrefix(lines[1], "step,1,1,0,") || !strings.HasPrefix(lines[2], "validation,1,2,0.001") {
		t.Errorf("%v: the log is\n%s", err, log)
	}
	if list, err := filepath.Glob(at("board/*/events.out.tfevents.*")); err != nil || len(list) != 2 {
		t.Errorf("event files %v, %v", list, err)
	}
	// Nothing improves if the rate is tiny and reduced at once: the first epoch without improvement stops.
	s, _ = trainOnce(t, append(small, "--schedule", "constant", "--monitor", "accuracy", "--learning-rate", "1e-30",
		"--reduce-lr", "1", "--early-stopping", "1")...)
	if perEpoch := 3.0; s["steps"].(float64) > 2*perEpoch {
		t.Errorf("%v steps: want at most two epochs of %v", s["steps"], perEpoch)
	}
}

// TestCallbackFlagMistakes checks the errors of flags that do not go together.
func TestCallbackFlagMistakes(t *testing.T) {
	for args, want := range map[string]string{
		"--ema 1":                                 "--ema 1: want a number between 0 and 1",
		"--early-stopping 0":                      "--early-stopping 0: want at least 1",
		"--early-stopping 3":                      "need --validation-split",
		"--reduce-lr 3":                           "--reduce-lr needs --schedule constant",
		"--warmup-steps 3":                        "--warmup-steps is for --schedule warmup-cosine",
		"--validate-every 3":                      "--validate-every needs --validation-split",
		"--monitor loss":                          "--monitor is for --early-stopping",
		"--schedule slow":                         "--schedule slow: want cosine, constant, exponential",
		"--reduce-lr-factor 2":                    "--reduce-lr-factor 2",
		"--reduce-lr-factor 0.5":                  "--reduce-lr-factor is for --reduce-lr",
		"--log-every 2":                           "--log-every is for --csv-log",
		"--schedule linear --batch-per-replica 8": "--schedule linear with --batch-per-replica needs --steps",
	} {
		root := newRoot()
		root.SetArgs(append([]string{"train"}, strings.Fields(args)...))
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", args, err, want)
		}
	}
}
