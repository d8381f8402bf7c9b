package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/train"
)

// multiWorker is the strategy with which lockstep train is one worker of a job.
const multiWorker = "multi-worker"

// announceJob prints the job and the source of each value, before it waits for the other workers. The chief prints
// all values, except under lockstep run; other workers print one line.
func (r *trainRun) announceJob(job *cluster.Job) error {
	text := job.Describe()
	if _, launched := os.LookupEnv(cluster.EnvWorker); launched || !job.Chief() {
		text = job.String() + agreeing(job) + "\n"
	}
	_, err := fmt.Fprint(r.out, text)
	return err
}

// agreeing names the other sources that describe the same job.
func agreeing(job *cluster.Job) string {
	var names []string
	for _, c := range job.Beside {
		if c.Worker == job.Worker && c.Workers == job.Workers { // not an enclosing job
			names = append(names, c.Source)
		}
	}
	switch len(names) {
	case 0:
		return ""
	case 1:
		return "; " + names[0] + " agrees"
	}
	return "; " + strings.Join(names[:len(names)-1], ", ") + " and " + names[len(names)-1] + " agree"
}

// announceWorkers adds the rows about the workers of the job.
func (r *trainRun) announceWorkers(t *table) {
	if r.worker == nil {
		return
	}
	name := "workers"
	for _, m := range r.worker.Members() {
		t.row(name, "%v", &m)
		name = ""
	}
	if links := r.worker.Links(); links != "" {
		t.row("transport", "%s", links)
	}
	if p := r.worker.Group().Local()[0].Properties(); !p.Canonical {
		t.row("backend", "%s, which adds in another order: the bits differ from those of Lockstep's own collectives",
			p.Transport)
	}
}

// compareOptions compares the program and options of all workers, before anything that takes time.
func (r *trainRun) compareOptions() error {
	if r.worker == nil {
		return nil
	}
	r.worker.Progress(-1, "comparing options")
	err := r.worker.Compare(r.in, "engine", []rendezvous.Fact{
		{Name: "engine", Value: r.engine.Description()},
		{Name: "processor", Value: runtime.GOARCH + " with " + vectors()},
	})
	if err != nil && (!r.flags.workers.anyEngine || !errors.Is(err, worker.ErrDiffer)) {
		return fmt.Errorf("%w\nengines and processors round differently, so the weights of the workers would diverge. "+
			"Start the same build on machines of one kind, or give --mixed-engines", err)
	}
	if err != nil {
		slog.Default().Warn("lockstep: the workers' engines differ, so results may differ between runs and machines", "error",
			err)
	}
	o := &r.flags
	var facts []rendezvous.Fact
	for _, f := range []struct {
		flag  string
		value any
	}{
		{"data", o.data.name},
		{"shift", o.data.shift},
		{"flip", o.data.flip},
		{"image-size", o.data.imageSize},
		{"channels", o.data.channels},
		{"columns", o.data.columns},
		{"label", o.data.label},
		{"loss", o.data.loss},
		{"text-columns", o.data.textColumns},
		{"missing", o.data.missing},
		{"no-header", o.data.noHeader},
		{"test-split", o.data.testSplit},
		{"validation-split", o.data.validationSplit},
		{"model", o.model},
		{"hidden", o.hidden},
		{"layers", o.layers},
		{"width", o.width},
		{"heads", o.heads},
		{"positions", o.positions},
		{"dropout", o.dropout},
		{"global-batch", o.globalBatch},
		{"batch-per-replica", o.batchPerReplica},
		{"eval-batch", o.evalBatch},
		{"epochs", o.epochs},
		{"steps", o.steps},
		{"accumulate", o.step.accumulate},
		{"clip-norm", o.clipNorm},
		{"clip-value", o.clipValue},
		{"noise-scale", o.noiseScale},
		{"bucket-bytes", o.step.bucketBytes.text},
		{"compress", o.step.compress},
		{"diloco", &o.diloco},
		{"shard-optimizer", o.step.shard},
		{"precision", o.step.precision},
		{"optimizer", o.optimizer},
		{"beta1", o.adam.beta1},
		{"beta2", o.adam.beta2},
		{"weight-decay", o.adam.decay},
		{"learning-rate", o.learningRate},
		{"schedule", o.schedule},
		{"ema, --early-stopping, --reduce-lr, --best, --tensorboard", &o.callbacks},
		{"trace, --trace-steps", &o.trace},
		{"seed", o.seed},
		{"implementation", o.workers.implementation},
		{"weights-partial", o.weights.partial},
	} {
		facts = append(facts, rendezvous.Fact{Name: "--" + f.flag, Value: fmt.Sprint(f.value)})
	}
	weights := "not given"
	if o.weights.path != "" {
		weights = "given" // the path may differ per host; the content is compared later
	}
	facts = append(facts, rendezvous.Fact{Name: "--weights", Value: weights})
	return r.worker.Compare(r.in, "options", facts)
}

// compareModel compares the data and models of all workers, before the first step.
func (r *trainRun) compareModel() error {
	if r.worker == nil {
		return nil
	}
	r.worker.Progress(-1, "comparing data and models")
	var facts []rendezvous.Fact
	for _, part := range []struct {
		name string
		data data.Pipeline
	}{{"training " + r.set.unit, r.set.train}, {"test " + r.set.unit, r.set.test}} {
		hash, err := hashOf(r.in, part.data)
		if err != nil {
			return fmt.Errorf("reading the %s: %w", part.name, err)
		}
		facts = append(facts, rendezvous.Fact{
			Name:  part.name,
			Value: fmt.Sprintf("%s, hashed %.16s", grouped(part.data.Len()), hash),
		})
	}
	own, err := r.trainer.Facts()
	if err != nil {
		return err
	}
	for _, f := range own {
		if f.Name == train.InitialFact && r.flags.workers.anyEngine {
			continue
		}
		facts = append(facts, rendezvous.Fact(f))
	}
	return r.worker.Compare(r.in, "model and data", facts)
}

// hashOf returns a hash of examples: their fingerprint if they have one, which is known without reading all of them
// (of images in files it covers names and sizes), otherwise a hash of all.
func hashOf(ctx context.Context, examples data.Pipeline) (string, error) {
	if f := data.Fingerprint(examples); f != 0 {
		return fmt.Sprintf("%016x", f), nil
	}
	return data.Hash(ctx, examples.Batch(hashedAtOnce))
}

// hashedAtOnce is the batch size of a hash of examples. The hash depends on it.
const hashedAtOnce = 1024

// fail reports err to the other workers, and returns it.
func (r *trainRun) fail(err error) error {
	if r.worker == nil {
		return err
	}
	if r.in.interrupted.Load() && !r.stopped {
		err = fmt.Errorf("%w: %w", worker.ErrInterrupted, err)
	}
	if e := r.worker.Fail(err); e != nil {
		slog.Default().Warn("lockstep: reporting the failure to the other workers failed", "error", e)
	}
	return err
}

// reportPanic reports a panic to the other workers, and panics again.
func (r *trainRun) reportPanic() {
	if r.worker == nil {
		return
	}
	if v := recover(); v != nil {
		_ = r.worker.Fail(&panicked{v, debug.Stack()}) // the panic has the details
		panic(v)
	}
}

// panicked is a panic as an error.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) Error() string { return fmt.Sprintf("panic: %v\n\n%s", p.value, p.stack) }

// Unwrap returns the kind of the failure for the other workers.
func (p *panicked) Unwrap() error { return distribute.ErrPeerLost }

// workerCount returns the number of workers that train together.
func (r *trainRun) workerCount() int {
	if r.cfg.job == nil {
		return 1
	}
	return r.cfg.job.Workers
}

// separateHint returns a hint if several processes were started that do not train together, else an empty string.
func (r *trainRun) separateHint() string {
	if n := os.Getenv(cluster.EnvWorkers); r.worker == nil && n != "" && n != "1" {
		return fmt.Sprintf("lockstep run started %s processes, and each trains its own model; to train one model together, "+
			"give --strategy %s", n, multiWorker)
	}
	return ""
}
