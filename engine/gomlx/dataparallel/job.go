package dataparallel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Job is this worker's membership in a job. A program has one, and trains one model at a time with it. The caller
// must call [Job.Close].
type Job struct {
	ctx    context.Context
	worker *worker.Worker // nil: the caller has connected the ranks
	comm   collective.Communicator

	mu   sync.Mutex // held during a call of comm, so that calls are in the order of the program
	step int64      // of the loop
}

// Join makes this process a worker of its job and waits for the other workers. The zero value of cfg reads
// everything from the environment, as [worker.Join] documents; without any job, the process is the only
// worker. ctx ends all waits of the job.
func Join(ctx context.Context, cfg worker.Config) (*Job, error) {
	if cfg.Replicas > 1 {
		return nil, fmt.Errorf("dataparallel: Config.Replicas is %d: want one, since a process runs one loop", cfg.Replicas)
	}
	cfg.Replicas = 1
	w, err := worker.Join(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("dataparallel: %w", err)
	}
	return &Job{ctx: ctx, worker: w, comm: w.Group().Local()[0]}, nil
}

// MustJoin is [Join] with the environment's settings and without a limit on waits but those of the job. It panics on
// errors, as GoMLX's constructors with this prefix do.
func MustJoin() *Job {
	j, err := Join(context.Background(), worker.Config{})
	if err != nil {
		panic(err)
	}
	return j
}

// New returns a job over a communicator, which stays the caller's. Each rank runs the same program; ranks of
// one process need a backend and a store each.
func New(ctx context.Context, comm collective.Communicator) *Job { return &Job{ctx: ctx, comm: comm} }

// Rank returns this worker's number, from 0.
func (j *Job) Rank() int { return j.comm.Rank() }

// Size returns the number of workers.
func (j *Job) Size() int { return j.comm.Size() }

// Chief reports whether this is worker 0, which writes checkpoints and prints for all.
func (j *Job) Chief() bool { return j.Rank() == 0 }

// Close leaves the job.
func (j *Job) Close() error {
	if j.worker == nil {
		return nil
	}
	return j.worker.Close()
}

// call executes a collective call, and reports its failure to the job.
func (j *Job) call(c *collective.Call) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.worker != nil {
		j.worker.Progress(j.step, "reduce")
	}
	err := j.comm.Do(j.ctx, c)
	if j.worker != nil {
		if err != nil {
			return errors.Join(err, j.worker.Fail(err))
		}
		j.worker.Progress(j.step, "compute")
	}
	return err
}

// Mean returns the mean of each value over all workers: for losses and metrics. Every worker calls it with as
// many values.
func (j *Job) Mean(values ...float64) ([]float64, error) {
	out := slices.Clone(values)
	err := j.call(&collective.Call{
		Op: collective.AllReduce, Reduce: collective.Mean, Type: tensor.Float64,
		Src: tensor.HostMemory(out), Dst: tensor.HostMemory(out),
	})
	if err != nil {
		return nil, fmt.Errorf("dataparallel: mean: %w", err)
	}
	return out, nil
}

// checkEvery is the number of steps between two comparisons of the workers' weights.
const checkEvery = 100

// Attach prepares the workers at the start of each of the loop's runs, and compares their weights. At the start they
// get the seed of the initial values and the variables that already exist, such as the random state, from
// worker 0. After the first step, after every 100 and at the end of a run, Attach compares the trainable
// variables of all workers; if they differ, the loop ends with an error on all of them.
//
// A checkpoint that GoMLX loads variable by variable must be readable by every worker.
func (j *Job) Attach(loop *train.Loop) {
	const name = "lockstep"
	first := true
	loop.OnStart(name, -1000, func(loop *train.Loop, _ train.Dataset) error {
		first = true
		return j.start(loop.Trainer.Store())
	})
	check := func(loop *train.Loop) error { return j.compare(loop.Trainer.Store()) }
	loop.OnStep(name, -1000, func(loop *train.Loop, _ []*tensors.Tensor) error {
		j.mu.Lock()
		j.step++
		due := first || j.step%checkEvery == 0
		j.mu.Unlock()
		if first = false; due {
			return check(loop)
		}
		return nil
	})
	loop.OnEnd(name, -1000, func(loop *train.Loop, _ []*tensors.Tensor) error { return check(loop) })
}

// start makes the stores of all workers equal.
func (j *Job) start(store *model.Store) error {
	seed := []int64{rand.Int64()}
	if value, ok := store.GetParam(model.ParamInitialSeed); ok {
		if seed[0], ok = value.(int64); !ok {
			return fmt.Errorf("dataparallel: the parameter %s is a %T: want an int64", model.ParamInitialSeed, value)
		}
	}
	variables := existing(store)
	h := xxh3.New()
	for _, v := range variables {
		fmt.Fprintln(h, v.Path(), v.Shape())
	}
	names := int64(h.Sum64())
	root := []int64{seed[0], names}
	if err := j.broadcast(tensor.HostMemory(root)); err != nil {
		return err
	}
	if err := j.agree(names == root[1], "have other variables than worker 0 at the start"); err != nil {
		return err
	}
	store.SetParam(model.ParamInitialSeed, root[0])
	for _, v := range variables {
		value, err := v.Value()
		if err != nil {
			return err
		}
		var failed error
		err = value.MutableBytes(func(b []byte) { failed = j.broadcast(tensor.HostMemory(b)) })
		if err = errors.Join(err, failed); err != nil {
			return fmt.Errorf("dataparallel: variable %s: %w", v.Path(), err)
		}
	}
	return nil
}

// existing lists the variables that have values, sorted by path. Metrics are not among them: GoMLX gives their
// variables random names.
func existing(store *model.Store) []*model.Variable {
	var list []*model.Variable
	for v := range store.IterVariables() {
		if v.HasValue() && !strings.Contains(v.Path(), "/metrics/") {
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b *model.Variable) int { return strings.Compare(a.Path(), b.Path()) })
	return list
}

// broadcast sets memory to that of worker 0.
func (j *Job) broadcast(m tensor.Memory) error {
	if m.Bytes == 0 {
		return nil
	}
	err := j.call(&collective.Call{Op: collective.Broadcast, Type: tensor.Uint8, Src: m, Dst: m})
	if err != nil {
		return fmt.Errorf("dataparallel: broadcast from worker 0: %w", err)
	}
	return nil
}

// compare returns an error on all workers if their trainable variables differ.
func (j *Job) compare(store *model.Store) error {
	var list []*model.Variable
	for v := range store.IterVariables() {
		if v.Trainable && v.HasValue() {
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b *model.Variable) int { return strings.Compare(a.Path(), b.Path()) })
	h := xxh3.New()
	for _, v := range list {
		value, err := v.Value()
		if err != nil {
			return err
		}
		fmt.Fprintln(h, v.Path(), v.Shape())
		if err := value.ConstBytes(func(b []byte) { _, _ = h.Write(b) }); err != nil {
			return fmt.Errorf("dataparallel: variable %s: %w", v.Path(), err)
		}
	}
	mine := []int64{int64(h.Sum64())}
	root := slices.Clone(mine)
	if err := j.broadcast(tensor.HostMemory(root)); err != nil {
		return err
	}
	return j.agree(mine[0] == root[0], "have other weights than worker 0: the optimizer must be that of Job.Optimizer, "+
		"and all workers must start from the same checkpoint")
}

// agree returns an error on all workers that names those with ok false.
func (j *Job) agree(ok bool, what string) error {
	wrong := make([]int64, j.Size())
	if !ok {
		wrong[j.Rank()] = 1
	}
	err := j.call(&collective.Call{
		Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Int64,
		Src: tensor.HostMemory(wrong), Dst: tensor.HostMemory(wrong),
	})
	if err != nil {
		return fmt.Errorf("dataparallel: comparing the workers: %w", err)
	}
	var list []string
	for i, n := range wrong {
		if n != 0 {
			list = append(list, fmt.Sprint(i))
		}
	}
	if list == nil {
		return nil
	}
	return fmt.Errorf("dataparallel: the workers %s %s", strings.Join(list, ", "), what)
}
