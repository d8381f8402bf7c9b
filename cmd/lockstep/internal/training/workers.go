package training

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
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
	return "; " + cli.AllOf(names) + " agree"
}

// announceWorkers adds the rows about the workers of the job.
func (r *trainRun) announceWorkers(t *cli.Table) {
	if r.Worker == nil {
		return
	}
	name := "workers"
	for _, m := range r.Worker.Members() {
		t.Row(name, "%v", &m)
		name = ""
	}
	if links := r.Worker.Links(); links != "" {
		t.Row("transport", "%s", links)
	}
	if p := r.Worker.Group().Local()[0].Properties(); !p.Canonical {
		t.Row("backend", "%s, which adds in another order: the bits differ from those of Lockstep's own collectives",
			p.Transport)
	}
}

// compareOptions compares the program and options of all workers, before anything that takes time.
func (r *trainRun) compareOptions() error {
	if r.Worker == nil {
		return nil
	}
	r.Worker.Progress(-1, "comparing options")
	err := r.Worker.Compare(r.in, "engine", []rendezvous.Fact{
		{Name: "engine", Value: r.Engine.Description()},
		{Name: "processor", Value: runtime.GOARCH + " with " + machine.Vectors()},
	})
	if err != nil && (!r.flags.workers.AnyEngine || !errors.Is(err, worker.ErrDiffer)) {
		return fmt.Errorf("%w\nengines and processors round differently, so the weights of the workers would diverge. "+
			"Start the same build on machines of one kind, or give --mixed-engines", err)
	}
	if err != nil {
		slog.Default().Warn("lockstep: the workers' engines differ, so results may differ between runs and machines", "error",
			err)
	}
	var facts []rendezvous.Fact
	cli.Compared(r.flags.config.flags, func(flag, value string) {
		facts = append(facts, rendezvous.Fact{Name: "--" + flag, Value: value})
	})
	return r.Worker.Compare(r.in, "options", facts)
}

// compareModel compares the data and models of all workers, before the first step.
func (r *trainRun) compareModel() error {
	if r.Worker == nil {
		return nil
	}
	r.Worker.Progress(-1, "comparing data and models")
	var facts []rendezvous.Fact
	for _, part := range []struct {
		name string
		data data.Pipeline
	}{{"training " + r.set.Unit, r.set.Train}, {"test " + r.set.Unit, r.set.Test}} {
		hash, err := hashOf(r.in, part.data)
		if err != nil {
			return fmt.Errorf("reading the %s: %w", part.name, err)
		}
		facts = append(facts, rendezvous.Fact{
			Name:  part.name,
			Value: fmt.Sprintf("%s, hashed %.16s", cli.Grouped(part.data.Len()), hash),
		})
	}
	own, err := r.Trainer.Facts()
	if err != nil {
		return err
	}
	for _, f := range own {
		if f.Name == train.InitialFact && r.flags.workers.AnyEngine {
			continue
		}
		facts = append(facts, rendezvous.Fact(f))
	}
	return r.Worker.Compare(r.in, "model and data", facts)
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
	if r.Worker == nil {
		return err
	}
	if r.in.Interrupted.Load() && !r.stopped {
		err = fmt.Errorf("%w: %w", worker.ErrInterrupted, err)
	}
	if e := r.Worker.Fail(err); e != nil {
		slog.Default().Warn("lockstep: reporting the failure to the other workers failed", "error", e)
	}
	return err
}

// reportPanic reports a panic to the other workers, and panics again.
func (r *trainRun) reportPanic() {
	if r.Worker == nil {
		return
	}
	if v := recover(); v != nil {
		_ = r.Worker.Fail(&panicked{v, debug.Stack()}) // the panic has the details
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
	if r.Config.Job == nil {
		return 1
	}
	return r.Config.Job.Workers
}
