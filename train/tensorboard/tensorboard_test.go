package tensorboard_test

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/tensorboard"
)

// readInPython prints what TensorBoard finds in a folder of event files.
const readInPython = `
import json, sys
from tensorboard.backend.event_processing import event_accumulator as ea
from tensorboard.plugins.hparams import plugin_data_pb2
a = ea.EventAccumulator(sys.argv[1], size_guidance={k: 0 for k in ("scalars", "histograms", "tensors")})
a.Reload()
out = {"scalars": {}, "histograms": {}, "texts": {}, "hparams": {}, "metrics": []}
for tag in a.Tags()["scalars"]:
    out["scalars"][tag] = [[e.step, e.value] for e in a.Scalars(tag)]
for tag in a.Tags()["histograms"]:
    h = a.Histograms(tag)[-1].histogram_value
    out["histograms"][tag] = {"n": h.num, "min": h.min, "max": h.max, "sum": h.sum, "squares": h.sum_squares,
                              "counts": sum(h.bucket), "buckets": len(h.bucket), "limit": h.bucket_limit[-1]}
for tag in a.Tags()["tensors"]:
    m = a.SummaryMetadata(tag)
    if m.plugin_data.plugin_name == "text":
        out["texts"][tag] = [e.tensor_proto.string_val[0].decode() for e in a.Tensors(tag)]
hparams = a.PluginTagToContent("hparams") if "_hparams_/session_start_info" in a.summary_metadata else {}
for tag, content in hparams.items():
    d = plugin_data_pb2.HParamsPluginData.FromString(content)
    for k, v in d.session_start_info.hparams.items():
        out["hparams"][k] = getattr(v, v.WhichOneof("kind"))
    out["metrics"] += [m.name.tag for m in d.experiment.metric_infos]
    out["hparams"].update({"type of " + i.name: i.type for i in d.experiment.hparam_infos})
json.dump(out, sys.stdout)
`

// found is the output of readInPython.
type found struct {
	Scalars    map[string][][2]float64
	Histograms map[string]struct {
		N, Min, Max, Sum, Squares, Counts, Limit float64
		Buckets                                  int
	}
	Texts   map[string][]string
	HParams map[string]any
	Metrics []string
}

// readTensorBoard reads a folder by the real TensorBoard, or skips the test. LOCKSTEP_TENSORBOARD_PYTHON names a Python
// that has it; .ci/run makes one.
func readTensorBoard(t *testing.T, dir string) (out found) {
	t.Helper()
	name := os.Getenv("LOCKSTEP_TENSORBOARD_PYTHON")
	if name == "" {
		name = "python3"
	}
	if out, err := exec.Command(name, "-c", "import tensorboard.backend").CombinedOutput(); err != nil {
		t.Skipf("no Python with tensorboard here (LOCKSTEP_TENSORBOARD_PYTHON may name one): %v %s", err, out)
	}
	c := exec.Command(name, "-c", readInPython, dir)
	c.Stderr = os.Stderr
	text, err := c.Output()
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return out
}

// TestPythonReads checks that TensorBoard reads what a Writer writes.
func TestPythonReads(t *testing.T) {
	dir := t.TempDir()
	w, err := tensorboard.NewWriter(dir)
	check(t, err)
	for step := range int64(5) {
		check(t, w.Scalar(step, "loss", float64(step)/4))
	}
	check(t, w.Text(1, "note", "# Überschrift\n\n*done*"))
	check(t, w.HParams(map[string]any{"rate": 0.25, "optimizer": "adam", "nesterov": true, "batch": 32}, []string{"loss"}))
	check(t, w.Close())
	again, err := tensorboard.NewWriter(dir)
	check(t, err)
	check(t, again.Restart(3))
	check(t, again.Scalar(3, "loss", 7))
	check(t, again.Close())
	got := readTensorBoard(t, dir)
	if s := got.Scalars["loss"]; len(s) != 4 || s[2] != [2]float64{2, 0.5} || s[3] != [2]float64{3, 7} {
		t.Errorf("scalars %v", s)
	}
	if got.Texts["note/text_summary"][0] != "# Überschrift\n\n*done*" {
		t.Errorf("texts %v", got.Texts)
	}
	want := map[string]any{
		"rate": 0.25, "optimizer": "adam", "nesterov": true, "batch": 32.0,
		"type of rate": 3.0, "type of optimizer": 1.0, "type of nesterov": 2.0, "type of batch": 3.0,
	}
	for name, x := range want {
		if got.HParams[name] != x {
			t.Errorf("hyperparameter %s is %v, want %v", name, got.HParams[name], x)
		}
	}
	if len(got.HParams) != len(want) || len(got.Metrics) != 1 || got.Metrics[0] != "loss" {
		t.Errorf("hyperparameters %v, metrics %v", got.HParams, got.Metrics)
	}
}

// TestPythonReadsHistograms checks histograms, whose steps are before any restart.
func TestPythonReadsHistograms(t *testing.T) {
	dir := t.TempDir()
	w, err := tensorboard.NewWriter(dir)
	check(t, err)
	check(t, w.Histogram(3, "w", []float64{-1, 0.5, 3, 3, math.NaN()}))
	check(t, w.Histogram(3, "same", []float64{2, 2}))
	check(t, w.Close())
	got := readTensorBoard(t, dir)
	h := got.Histograms["w"]
	if h.N != 4 || h.Min != -1 || h.Max != 3 || h.Sum != 5.5 || h.Squares != 19.25 || h.Counts != 4 || h.Limit != 3 {
		t.Errorf("histogram %+v", h)
	}
	if h := got.Histograms["same"]; h.N != 2 || h.Counts != 2 || h.Limit != 2 || h.Buckets != 1 {
		t.Errorf("histogram of equal numbers %+v", h)
	}
}

// TestCallback checks the event files of a training, and that each record has the form of a TFRecord.
func TestCallback(t *testing.T) {
	dir := t.TempDir()
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	check(t, err)
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	check(t, err)
	defer s.Close()
	set, err := digits.Load()
	check(t, err)
	batches := set.Train.Take(90).Batch(30)
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			return []*graph.Node{layer.Dense(s.In("readout"), graph.Reshape(in[0], in[0].Shape().Dim(0), -1), 10)}
		},
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.SGD().LearningRate(0.25).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	sharded, err := train.New(t.Context(), s, m, train.Config{Data: batches, Exchange: train.Sharded{}})
	check(t, err)
	defer sharded.Close()
	if _, err := tensorboard.New(sharded, tensorboard.Config{Dir: dir, HistogramEvery: 1, Gradients: true}); err == nil ||
		!strings.Contains(err.Error(), "the optimizer is sharded") {
		t.Errorf("histograms of gradients with a sharded optimizer: %v", err)
	}
	trainer, err := train.New(t.Context(), s, m, train.Config{Data: batches, ClipNorm: 10, NoiseScale: true})
	check(t, err)
	defer trainer.Close()
	board, err := tensorboard.New(trainer, tensorboard.Config{
		Dir: dir, EverySteps: 2, HistogramEvery: 1, Gradients: true, HParams: map[string]any{"rate": 0.25},
	})
	check(t, err)
	h, err := trainer.Fit(t.Context(), batches, train.FitConfig{
		Epochs: 2, Validation: batches, ValidateEvery: 2, Callbacks: []train.Callback{board},
	})
	check(t, err)
	for part, want := range map[string]int{"train": 21, "validation": 11} {
		names, err := filepath.Glob(filepath.Join(dir, part, "events.out.tfevents.*"))
		if err != nil || len(names) != 1 {
			t.Fatal(names, err)
		}
		n := 0
		for _, err := range data.TFRecords(names...).Iter(context.Background()) {
			check(t, err)
			n++
		}
		if n < want {
			t.Errorf("%s: %d events, want at least %d", part, n, want)
		}
	}
	got := readTensorBoard(t, filepath.Join(dir, "train"))
	losses := got.Scalars["epoch_loss"]
	for i, e := range h.Epochs {
		if losses[i] != [2]float64{float64(3 * (i + 1)), float64(float32(e.Loss))} {
			t.Errorf("epoch_loss %v, want %v", losses[i], e.Loss)
		}
	}
	if n := len(got.Scalars["batch_loss"]); n != 3 || len(got.Scalars["batch_gradient_norm"]) != 3 ||
		got.Scalars["batch_learning_rate"][2] != [2]float64{6, 0.25} || got.Scalars["epoch_accuracy"] == nil {
		t.Errorf("scalars %v", got.Scalars)
	}
	if x := got.Scalars["batch_gradient_noise_scale"]; len(x) != 3 || !(x[2][1] > 0) {
		t.Errorf("noise scale %v", x)
	}
	if h := got.Histograms["readout/dense/weights/gradient"]; h.N != 640 || h.Counts != 640 {
		t.Errorf("histograms %+v", got.Histograms)
	}
	if h := got.Histograms["readout/dense/weights"]; h.N != 640 || h.Counts != 640 {
		t.Errorf("histograms %+v", got.Histograms)
	}
	if got.HParams["rate"] != 0.25 || strings.Join(got.Metrics, " ") != "epoch_loss epoch_accuracy" {
		t.Errorf("hyperparameters %v, metrics %v", got.HParams, got.Metrics)
	}
	held := readTensorBoard(t, filepath.Join(dir, "validation")).Scalars
	if len(held["evaluation_loss_vs_iterations"]) != 3 || len(held["epoch_accuracy"]) != 2 {
		t.Errorf("validation %v", held)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
