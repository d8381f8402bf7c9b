package training

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v4"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/datasets"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// summary is the content of --summary's file. Fields may be added.
type summary struct {
	Version        string                `json:"version"`
	Data           string                `json:"data"`
	Model          string                `json:"model"`
	Engine         string                `json:"engine"`
	Strategy       string                `json:"strategy"`
	Devices        []string              `json:"devices"`
	Replicas       int                   `json:"replicas"`
	Workers        int                   `json:"workers"`
	GlobalBatch    int                   `json:"global_batch"`
	Optimizer      string                `json:"optimizer"`
	ShardOptimizer bool                  `json:"shard_optimizer"`
	OptimizerBytes int                   `json:"optimizer_bytes"` // of the slots that this worker keeps
	LearningRate   float64               `json:"learning_rate"`
	Schedule       string                `json:"schedule"`
	Seed           int64                 `json:"seed"`
	Epochs         int                   `json:"epochs"` // started
	Steps          int                   `json:"steps"`
	Interrupted    bool                  `json:"interrupted"`
	TrainLoss      cli.Number            `json:"train_loss"` // of the last epoch
	TrainAccuracy  cli.Number            `json:"train_accuracy"`
	TestAccuracy   cli.Number            `json:"test_accuracy"` // null: interrupted, or the model has none
	TestLoss       cli.Number            `json:"test_loss"`
	TestMetrics    map[string]cli.Number `json:"test_metrics"` // all, by name; null: interrupted
	Unit           string                `json:"unit"`         // what an example is: images, rows or sequences
	PerSecond      cli.Number            `json:"examples_per_second"`
	ReduceShare    cli.Number            `json:"reduce_share"`
	WaitShare      cli.Number            `json:"wait_share"`
	Seconds        cli.Number            `json:"seconds"` // of training, without validation and evaluation
	WeightsHash    string                `json:"weights_hash"`
	Kernels        string                `json:"kernels"` // by which the hash can be compared
	Config         map[string]any        `json:"config"`  // all settings, as in config.yaml
}

func (r *trainRun) summarise() summary {
	s := summary{
		Version: cli.Version(), Data: r.flags.Data.Name, Model: r.flags.Model, Engine: r.Engine.Name(),
		Strategy: r.flags.strategy, Devices: r.Strategy.Devices(), Replicas: r.Strategy.NumReplicasInSync(),
		Workers:        r.workerCount(),
		ShardOptimizer: r.Trainer.Sharded(), OptimizerBytes: r.Trainer.OptimizerBytes(),
		GlobalBatch: r.batch, Optimizer: r.flags.optimizer, LearningRate: r.flags.learningRate, Schedule: r.flags.schedule,
		Seed:   r.flags.seed,
		Epochs: len(r.history.Epochs), Steps: r.history.Steps, Interrupted: r.stopped,
		TrainLoss: cli.Number(math.NaN()), TrainAccuracy: cli.Number(math.NaN()), TestAccuracy: cli.Number(math.NaN()),
		TestLoss: cli.Number(math.NaN()),
		Unit:     r.set.Unit, PerSecond: cli.Number(r.history.Speed.ExamplesPerSecond),
		ReduceShare: cli.Number(r.history.Speed.ReduceShare), WaitShare: cli.Number(r.history.Speed.WaitShare),
		Seconds: cli.Number(r.trainingTime().Seconds()), WeightsHash: train.HashWeights(r.weights),
		Kernels: machine.Kernels(r.Engine.Name()),
	}
	if n := len(r.history.Epochs); n > 0 {
		last := r.history.Epochs[n-1]
		s.TrainLoss, s.TrainAccuracy = cli.Number(last.Loss), datasets.Accuracy(last.Result)
	}
	if r.test != nil {
		s.TestLoss, s.TestAccuracy = cli.Number(r.test.Loss), datasets.Accuracy(*r.test)
		s.TestMetrics = datasets.Numbers(*r.test)
	}
	_ = r.configValues().Decode(&s.Config) // cannot fail: texts, numbers and lists of them by name
	return s
}

// settings returns what the live page shows of the training: what it trains, and the flags that were given.
func (r *trainRun) settings() map[string]string {
	out := map[string]string{
		"data": r.flags.Data.Name, "model": r.flags.Model, "engine": r.Engine.Name(), "optimizer": r.flags.optimizer,
		"schedule": r.flags.schedule,
	}
	r.flags.config.flags.Visit(func(f *pflag.Flag) {
		if !slices.Contains(ownFlags, f.Name) {
			out["--"+f.Name] = f.Value.String()
		}
	})
	return out
}

// The files of --out.
const (
	WeightsFile = "weights.safetensors"
	historyFile = "history.json"
	summaryFile = "summary.json"
)

// write writes the files of --summary and --out. If one fails, it writes the others.
func (r *trainRun) write() error {
	var errs []error
	if !r.chief {
		return nil
	}
	if r.flags.summary != "" {
		errs = append(errs, r.writeJSON("summary", r.flags.summary, r.summarise()))
	}
	if dir := r.flags.out; dir != "" {
		errs = append(errs,
			r.writeWeights(filepath.Join(dir, WeightsFile)),
			r.writeJSON("history", filepath.Join(dir, historyFile), historyTable(r.history)),
			r.writeJSON("summary", filepath.Join(dir, summaryFile), r.summarise()),
			r.writeConfig(filepath.Join(dir, ConfigFile)))
		r.written = append(r.written, [2]string{"config", filepath.Join(dir, ConfigFile)})
	}
	return errors.Join(errs...)
}

func (r *trainRun) writeWeights(file string) error {
	tensors := make([]checkpoint.Tensor, len(r.weights))
	for i, w := range r.weights {
		tensors[i] = checkpoint.Tensor(w)
	}
	if err := checkpoint.Save(file, tensors, r.metadata); err != nil {
		return fmt.Errorf("writing weights: %w", err)
	}
	r.written = append(r.written, [2]string{"weights", file})
	return nil
}

// configValues returns the flags of this run. The default number of replicas depends on the machine, and decides the
// bits, so they have the number.
func (r *trainRun) configValues() *yaml.Node {
	replicas := 0
	if r.flags.strategy == "mirrored" && len(r.flags.devices) == 0 {
		replicas = r.Strategy.NumReplicasInSync()
	}
	return r.flags.config.values(replicas)
}

// writeConfig writes the flags of this run and, beside them, a copy of the tokenizer, if there is one.
func (r *trainRun) writeConfig(file string) error {
	return errors.Join(r.flags.config.write(file, r.configValues()), r.flags.Data.WriteTokenizer(filepath.Dir(file)))
}

func (r *trainRun) writeJSON(what, file string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err == nil {
		err = cli.WriteFile(file, append(text, '\n'))
	}
	if err != nil {
		return fmt.Errorf("writing the %s: %w", what, err)
	}
	r.written = append(r.written, [2]string{what, file})
	return nil
}

// historyTable returns a history as Keras' History.history: a list per loss and metric, an element per epoch.
func historyTable(h *train.History) map[string][]cli.Number {
	table := map[string][]cli.Number{}
	add := func(prefix string, r train.Result) {
		table[prefix+"loss"] = append(table[prefix+"loss"], cli.Number(r.Loss))
		for name, x := range r.Metrics {
			table[prefix+name] = append(table[prefix+name], cli.Number(x))
		}
	}
	for _, e := range h.Epochs {
		table["epoch"] = append(table["epoch"], cli.Number(e.Epoch))
		table["seconds"] = append(table["seconds"], cli.Number(e.Duration.Seconds()))
		add("", e.Result)
		if e.Validation != nil {
			add("val_", *e.Validation)
		}
	}
	return table
}
