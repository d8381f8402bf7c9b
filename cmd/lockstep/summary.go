package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strconv"

	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// summary is the content of --summary's file. Fields may be added.
type summary struct {
	Version        string            `json:"version"`
	Data           string            `json:"data"`
	Model          string            `json:"model"`
	Engine         string            `json:"engine"`
	SIMD           bool              `json:"simd"`
	Strategy       string            `json:"strategy"`
	Devices        []string          `json:"devices"`
	Replicas       int               `json:"replicas"`
	Workers        int               `json:"workers"`
	GlobalBatch    int               `json:"global_batch"`
	Optimizer      string            `json:"optimizer"`
	ShardOptimizer bool              `json:"shard_optimizer"`
	OptimizerBytes int               `json:"optimizer_bytes"` // of the slots that this worker keeps
	LearningRate   float64           `json:"learning_rate"`
	Schedule       string            `json:"schedule"`
	Seed           int64             `json:"seed"`
	Epochs         int               `json:"epochs"` // started
	Steps          int               `json:"steps"`
	Interrupted    bool              `json:"interrupted"`
	TrainLoss      number            `json:"train_loss"` // of the last epoch
	TrainAccuracy  number            `json:"train_accuracy"`
	TestAccuracy   number            `json:"test_accuracy"` // null: interrupted, or the model has none
	TestLoss       number            `json:"test_loss"`
	TestMetrics    map[string]number `json:"test_metrics"` // all, by name; null: interrupted
	Unit           string            `json:"unit"`         // what an example is: images, rows or sequences
	PerSecond      number            `json:"examples_per_second"`
	ReduceShare    number            `json:"reduce_share"`
	WaitShare      number            `json:"wait_share"`
	Seconds        number            `json:"seconds"` // of training, without validation and evaluation
	WeightsHash    string            `json:"weights_hash"`
	Kernels        string            `json:"kernels"` // by which the hash can be compared
}

// number is a float64 in JSON: null if it is not finite.
type number float64

// MarshalJSON implements json.Marshaler.
func (n number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, float64(n), 'g', -1, 64), nil
}

func (r *trainRun) summarise() summary {
	s := summary{
		Version: version(), Data: r.flags.data.name, Model: r.flags.model, Engine: r.engine.Name(), SIMD: withSIMD,
		Strategy: r.flags.strategy, Devices: r.strategy.Devices(), Replicas: r.strategy.NumReplicasInSync(),
		Workers:        r.workerCount(),
		ShardOptimizer: r.trainer.Sharded(), OptimizerBytes: r.trainer.OptimizerBytes(),
		GlobalBatch: r.batch, Optimizer: r.flags.optimizer, LearningRate: r.flags.learningRate, Schedule: r.flags.schedule,
		Seed:   r.flags.seed,
		Epochs: len(r.history.Epochs), Steps: r.history.Steps, Interrupted: r.stopped,
		TrainLoss: number(math.NaN()), TrainAccuracy: number(math.NaN()), TestAccuracy: number(math.NaN()),
		TestLoss: number(math.NaN()),
		Unit:     r.set.unit, PerSecond: number(r.history.Speed.ExamplesPerSecond),
		ReduceShare: number(r.history.Speed.ReduceShare), WaitShare: number(r.history.Speed.WaitShare),
		Seconds: number(r.trainingTime().Seconds()), WeightsHash: train.HashWeights(r.weights),
		Kernels: kernels(r.flags.engine),
	}
	if n := len(r.history.Epochs); n > 0 {
		last := r.history.Epochs[n-1]
		s.TrainLoss, s.TrainAccuracy = number(last.Loss), accuracy(last.Result)
	}
	if r.test != nil {
		s.TestLoss, s.TestAccuracy, s.TestMetrics = number(r.test.Loss), accuracy(*r.test), numbersOf(*r.test)
	}
	return s
}

// The files of --out.
const (
	weightsFile = "weights.safetensors"
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
			r.writeWeights(filepath.Join(dir, weightsFile)),
			r.writeJSON("history", filepath.Join(dir, historyFile), historyTable(r.history)),
			r.writeJSON("summary", filepath.Join(dir, summaryFile), r.summarise()),
			r.writeConfig(filepath.Join(dir, configFile)))
		r.written = append(r.written, [2]string{"config", filepath.Join(dir, configFile)})
	}
	return errors.Join(errs...)
}

func (r *trainRun) writeWeights(file string) error {
	tensors := make([]checkpoint.Tensor, len(r.weights))
	for i, w := range r.weights {
		tensors[i] = checkpoint.Tensor(w)
	}
	metadata := map[string]string{"program": "lockstep " + version(), "model": r.flags.model, "data": r.flags.data.name}
	if err := checkpoint.Save(file, tensors, metadata); err != nil {
		return fmt.Errorf("writing weights: %w", err)
	}
	r.written = append(r.written, [2]string{"weights", file})
	return nil
}

// writeConfig writes the flags of this run. The default number of replicas depends on the machine, and decides the
// bits, so the file has the number.
func (r *trainRun) writeConfig(file string) error {
	replicas := 0
	if r.flags.strategy == "mirrored" && len(r.flags.devices) == 0 {
		replicas = r.strategy.NumReplicasInSync()
	}
	return r.flags.config.write(file, replicas)
}

func (r *trainRun) writeJSON(what, file string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err == nil {
		err = checkpoint.WriteFile(file, func(w io.Writer) error {
			_, err := w.Write(append(text, '\n'))
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("writing the %s: %w", what, err)
	}
	r.written = append(r.written, [2]string{what, file})
	return nil
}

// historyTable returns a history as Keras' History.history: a list per loss and metric, an element per epoch.
func historyTable(h *train.History) map[string][]number {
	table := map[string][]number{}
	add := func(prefix string, r train.Result) {
		table[prefix+"loss"] = append(table[prefix+"loss"], number(r.Loss))
		for name, x := range r.Metrics {
			table[prefix+name] = append(table[prefix+name], number(x))
		}
	}
	for _, e := range h.Epochs {
		table["epoch"] = append(table["epoch"], number(e.Epoch))
		table["seconds"] = append(table["seconds"], number(e.Duration.Seconds()))
		add("", e.Result)
		if e.Validation != nil {
			add("val_", *e.Validation)
		}
	}
	return table
}
