package training

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestCallbackFlags trains a few steps with all flags of callbacks.
func TestCallbackFlags(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	data := append(clitest.TinyTable(t), "--replicas", "2")
	small := slices.Concat(data, []string{"--validation-split", "0.3", "--epochs", "3", "--global-batch", "20"})
	s, _ := clitest.Train(t, append(small, "--schedule", "cosine", "--warmup-steps", "3", "--ema", "0.5",
		"--validate-every", "2", "--best", at("best"), "--csv-log", at("log.csv"), "--json-log", at("log.jsonl"),
		"--log-every", "1", "--tensorboard", at("board"))...)
	if _, _, err := checkpoint.Load(at("best")); err != nil || s["steps"].(float64) < 4 {
		t.Errorf("%v steps, the best weights: %v", s["steps"], err)
	}
	// The averages are the final weights, with and without early stopping.
	averages := append(small, "--ema", "0.9", "--best", at("averages"), "--monitor", "loss")
	without, _ := clitest.Train(t, append(small, "--ema", "0.9")...)
	with, _ := clitest.Train(t, append(averages, "--early-stopping", "5")...) // every epoch is better
	tested, _ := clitest.Train(t, append(data, "--epochs", "0", "--weights", at("averages"))...)
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
	s, _ = clitest.Train(t, append(small, "--schedule", "constant", "--monitor", "accuracy", "--learning-rate", "1e-30",
		"--reduce-lr", "1", "--early-stopping", "1")...)
	if perEpoch := 3.0; s["steps"].(float64) > 2*perEpoch {
		t.Errorf("%v steps: want at most two epochs of %v", s["steps"], perEpoch)
	}
}

// TestScheduleFollowsSteps reads the learning rate of each step of two trainings of as many steps: with the
// global batch, and with that of a replica.
func TestScheduleFollowsSteps(t *testing.T) {
	table := clitest.TinyTable(t)
	for _, batch := range [][]string{{"--global-batch", "24"}, {"--batch-per-replica", "12"}} {
		log := filepath.Join(t.TempDir(), "log.csv")
		clitest.Train(t, append(append(batch, table...), "--replicas", "2", "--epochs", "2", "--optimizer", "adamw",
			"--beta1", "0.8", "--beta2", "0.9", "--weight-decay", "0.1", "--warmup-steps", "2", "--min-learning-rate", "0.002",
			"--learning-rate", "0.004", "--csv-log", log, "--log-every", "1")...)
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		var rates []float64
		for _, line := range strings.Split(string(text), "\n")[1:] {
			if fields := strings.Split(line, ","); fields[0] == "step" {
				rate, err := strconv.ParseFloat(fields[3], 64)
				if err != nil {
					t.Fatal(err)
				}
				rates = append(rates, rate)
			}
		}
		if len(rates) != 8 { // 81 rows: four batches an epoch
			t.Fatalf("%v: %d steps, want 8\n%s", batch, len(rates), text)
		}
		for i, rate := range rates {
			want := 0.004 * float64(i) / 2
			if i >= 2 {
				want = 0.002 + 0.002*(1+math.Cos(math.Pi*float64(i-2)/6))/2
			}
			if math.Abs(rate-want) > 1e-8 {
				t.Errorf("%v: step %d has learning rate %v, want %v", batch, i+1, rate, want)
			}
		}
	}
}

// TestCallbackFlagMistakes checks the errors of flags that do not go together.
func TestCallbackFlagMistakes(t *testing.T) {
	for args, want := range map[string]string{
		"--ema 1":                               "--ema 1: want a number between 0 and 1",
		"--early-stopping 0":                    "--early-stopping 0: want at least 1",
		"--early-stopping 3":                    "need --validation-split",
		"--reduce-lr 3":                         "--reduce-lr needs --schedule constant",
		"--warmup-steps 3 --schedule one-cycle": "--warmup-steps is for --schedule cosine",
		"--warmup-steps 999999":                 "the schedule has only ",
		"--schedule step --min-learning-rate 1": "--min-learning-rate is for --schedule cosine or linear, not step",
		"--min-learning-rate 0.01":              "--min-learning-rate 0.01: want at most --learning-rate, which is 0.003",
		"--min-learning-rate -1":                "--min-learning-rate -1: want at least 0",
		"--optimizer sgd --beta1 0.8":           "--beta1 is for --optimizer adam, adamw or adamax, not sgd",
		"--beta2 1":                             "--beta2 1: want at least 0 and less than 1",
		"--weight-decay 0.1":                    "--weight-decay is for --optimizer adamw, not adam",
		"--data text --dropout 1":               "--dropout 1: want at least 0 and less than 1",
		"--dropout 0.1":                         "--dropout is for --model gpt, not cnn",
		"--validate-every 3":                    "--validate-every needs --validation-split",
		"--model mlp --steps 1 --validation-split 0.1 --best x --monitor los": "--monitor los: want accuracy, " +
			"loss, val_accuracy or val_loss",
		"--monitor loss":         "--monitor is for --early-stopping",
		"--schedule slow":        "--schedule slow: want constant, cosine, exponential",
		"--reduce-lr-factor 2":   "--reduce-lr-factor 2",
		"--reduce-lr-factor 0.5": "--reduce-lr-factor is for --reduce-lr",
		"--log-every 2":          "--log-every is for --csv-log",
	} {
		root := clitest.Commands()
		root.SetArgs(append([]string{"train"}, strings.Fields(args)...))
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", args, err, want)
		}
	}
}

// TestAveragesOfSnapshot checks that lockstep eval, where only a snapshot exists, computes by the moving averages, as
// training with --ema does: by a snapshot of the middle of a training, with and without a sharded optimizer, and by
// that of its end, also after early stopping.
func TestAveragesOfSnapshot(t *testing.T) {
	table := append(clitest.TinyTable(t), "--replicas", "2", "--epochs", "2", "--global-batch", "20", "--schedule",
		"constant", "--ema", "0.9", "--save-every", "3")
	for name, flags := range map[string][]string{
		"middle":         {"--steps", "3"},
		"sharded":        {"--steps", "3", "--shard-optimizer", "on"},
		"end":            nil,
		"early stopping": {"--early-stopping", "1", "--monitor", "loss", "--validation-split", "0.3"},
	} {
		run, dir := t.TempDir(), t.TempDir()
		clitest.TrainInto(t, run, slices.Concat(table, flags, []string{"--checkpoint-dir", dir})...)
		if slices.Contains(flags, "--steps") { // steps 4 and 5 follow, whose snapshot is then lost
			clitest.TrainInto(t, t.TempDir(), slices.Concat(table, flags, []string{"--checkpoint-dir", dir, "--resume", "never"},
				[]string{"--steps", "5"})...)
			all, err := checkpoint.List(dir)
			if err != nil || len(all) < 2 {
				t.Fatal(all, err)
			}
			if err := os.RemoveAll(all[len(all)-1]); err != nil {
				t.Fatal(err)
			}
		}
		losses := map[string]any{}
		for _, from := range []string{run, dir} {
			var out strings.Builder
			root := clitest.Commands()
			root.SetOut(&out)
			root.SetArgs([]string{"eval", "--from", from, "--format", "json"})
			var result map[string]any
			if err := root.ExecuteContext(t.Context()); err != nil {
				t.Fatalf("%s: %v", name, err)
			} else if err := json.Unmarshal([]byte(out.String()), &result); err != nil {
				t.Fatal(err)
			}
			losses[from] = result["loss"]
		}
		if losses[run] != losses[dir] {
			t.Errorf("%s: loss %v by the weights, and %v by the newest snapshot", name, losses[run], losses[dir])
		}
	}
}
