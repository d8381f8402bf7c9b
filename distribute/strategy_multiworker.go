package distribute

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/engine"
)

// MultiWorkerConfig describes a strategy over several workers. The zero value is a single worker.
type MultiWorkerConfig struct {
	// Devices lists this worker's devices, by replica. None: all accelerators that the engine reports or, if it has none, CPU:0
	// alone, as in TensorFlow.
	Devices []string
	// Resolver says who is in the job. Default: [cluster.TFConfig], which without TF_CONFIG says that this process is alone.
	Resolver cluster.Resolver
	// Group is the communicators of this worker's replicas, in the order of Devices: its local ranks are these, and its size is the
	// number of replicas of all workers. A worker's ranks follow each other, and workers come in the order of
	// [cluster.IDInCluster]. Workers may have different numbers of replicas. With several workers it must be given; nil: the
	// strategy makes its own. The strategy closes it, unless it could not be made.
	Group collective.Group
	// Engine, LogicalCPUs, Options, Stall and Logger are as in [MirroredConfig].
	Engine      engine.Engine
	LogicalCPUs int
	Options     Options
	Stall       time.Duration
	Logger      *slog.Logger
}

// NewMultiWorkerMirroredStrategy returns a strategy that keeps variables equal on the devices of all workers
// (TensorFlow's MultiWorkerMirroredStrategy). Every worker makes one, and all make the same calls of it in the same order: with
// several workers this function, what makes variables, reductions and gathers in cross-replica context, reads of sync-on-read
// variables there, and a distributed dataset's steps wait for the other workers, as replicas' calls do.
//
// Replica ids run over all workers; distributed values and variables hold the components of this worker's replicas. What a
// reduction or a gather is given that is not distributed counts, with several workers, as the value of every replica of its
// worker; its sum is an error where a worker has several replicas.
func NewMultiWorkerMirroredStrategy(cfg MultiWorkerConfig) (*Strategy, error) {
	const op = "NewMultiWorkerMirroredStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	if cfg.Resolver == nil {
		cfg.Resolver = &cluster.TFConfig{}
	}
	p, err := findPlace(op, cfg.Resolver)
	if err != nil {
		return nil, err
	}
	names := cfg.Devices
	if len(names) == 0 {
		if names = defaultDevices(known); known[len(known)-1].Kind == "CPU" {
			names = names[:1]
		}
	}
	devices, err := canonicalDevices(op, names, known)
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: multiWorkerKind, devices: devices, params: devices, engine: cfg.Engine, resolver: cfg.Resolver, task: p.task,
		options: cfg.Options, stall: cfg.Stall, logger: cfg.Logger,
		size: len(devices), workersInSync: p.workers, workerID: p.id, chief: p.chief,
	}
	switch {
	case cfg.Group != nil:
		if err := s.give(op, cfg.Group); err != nil {
			return nil, err
		}
	case p.workers > 1:
		return nil, errorf(op, ErrInvalid, "the cluster has %d workers, and no Group is given: want the communicators of this worker's %d replicas with those of the others", p.workers, len(devices))
	}
	if s, err = s.open(op); err != nil || s.workersInSync == 1 {
		return s, err
	}
	if err := s.meetWorkers(op); err != nil {
		s.group.owner = nil // it stays the caller's
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// jobPlace is a process' place in the job.
type jobPlace struct {
	task    cluster.Task
	workers int // how many workers train together
	id      int // which of them this is
	chief   bool
}

// findPlace asks a resolver for this process' place.
func findPlace(op string, r cluster.Resolver) (jobPlace, error) {
	alone := jobPlace{task: cluster.NoTask, workers: 1, chief: true}
	spec, err := r.Spec()
	if err != nil {
		return alone, errorf(op, ErrInvalid, "%w", err)
	}
	if len(spec.Jobs()) == 0 {
		return alone, nil
	}
	p := jobPlace{}
	switch p.task, err = r.Task(); {
	case err != nil:
		return p, errorf(op, ErrInvalid, "%w", err)
	case !p.task.Known():
		return p, errorf(op, ErrInvalid, "when a cluster spec is given, you must also specify the task's type and index: it is not known which task of the cluster this process is")
	}
	if p.id, err = cluster.IDInCluster(spec, p.task); err == nil {
		p.workers, err = cluster.WorkerCount(spec, p.task.Type)
	}
	if err == nil {
		p.chief, err = cluster.IsChief(spec, p.task)
	}
	if err != nil {
		return p, errorf(op, ErrInvalid, "%w", err)
	}
	return p, nil
}

// give sets the group between the replicas, if it is one that the strategy can have.
func (s *Strategy) give(op string, g collective.Group) error {
	local := g.Local()
	if len(local) != len(s.devices) {
		return errorf(op, ErrInvalid, "the group has %d communicators here for %d devices: want one each", len(local), len(s.devices))
	}
	s.given, s.size, s.first = g, local[0].Size(), local[0].Rank()
	if alone := s.size == len(s.devices); alone != (s.workersInSync == 1) {
		return errorf(op, ErrInvalid, "the cluster has %d workers, and the group has %d communicators here, of %d in all: want those of all workers in the group, and no others", s.workersInSync, len(local), s.size)
	}
	for i, c := range local {
		if c.Rank() != s.first+i {
			return errorf(op, ErrInvalid, "the group's communicators here are ranks %d and, at %d, %d: want a worker's ranks to follow each other", s.first, i, c.Rank())
		}
	}
	return nil
}

// meetWorkers waits until all workers are there, and checks that they mean the same job: every rank tells which worker it is of,
// of how many.
func (s *Strategy) meetWorkers(op string) error {
	mine := make([][]int64, len(s.devices))
	for i := range mine {
		mine[i] = []int64{int64(s.workerID), int64(s.workersInSync)}
	}
	all, err := s.collective.exchange(context.Background(), "workers of the job", mine, s.options)
	if err != nil {
		return errorf(op, nil, "meeting the other workers: %w", err)
	}
	s.replicasOf = make([]int, s.workersInSync)
	last := int64(0)
	for rank, is := range all {
		switch id, count := is[0], is[1]; {
		case count != int64(s.workersInSync):
			return errorf(op, ErrMismatch, "replica %d belongs to a cluster of %d workers, those of this worker to one of %d: want one cluster spec on all of them", rank, count, s.workersInSync)
		case id < last || id > last+1 || rank == 0 && id != 0:
			return errorf(op, ErrMismatch, "replica %d is of worker %d, the one before it of worker %d: want the group's ranks in the order of the workers, each worker's together, and every worker once", rank, id, last)
		default:
			s.replicasOf[id]++
			last = id
		}
	}
	if missing := slices.Index(s.replicasOf, 0); missing >= 0 {
		return errorf(op, ErrMismatch, "worker %d of %d has no replica in the group", missing, s.workersInSync)
	}
	if n := s.replicasOf[s.workerID]; n != len(s.devices) {
		return errorf(op, ErrMismatch, "two processes say that they are worker %d: it has %d replicas here and %d in the group", s.workerID, len(s.devices), n)
	}
	return nil
}

// LocalReplicas returns which replicas this worker has: so many, with ids from first on.
func (s *Strategy) LocalReplicas() (first, n int) { return s.first, len(s.devices) }

// everywhere returns, with several workers, a value with a component for each of this worker's replicas. What is not
// distributed has the same one for all of them, and so no sum.
func (s *Strategy) everywhere(name string, op ReduceOp, v Value) (Value, error) {
	_, ok := v.(distributed)
	_, variable := v.(*Variable)
	switch {
	case s.workersInSync == 1 || ok || variable:
		return v, nil
	case op == Sum && len(s.devices) > 1:
		return nil, errorf(name, ErrInvalid, "a non-DistributedValues value %v cannot be reduced with the given reduce op %v: it is the same on the %d replicas of this worker. Want a value of each replica, such as Run returns", v, op, len(s.devices))
	}
	return s.onAll(v), nil
}

// countAll returns the sum of the workers' counts.
func (s *Strategy) countAll(ctx context.Context, name string, count int, o Options) (int, error) {
	if s.workersInSync == 1 {
		return count, nil
	}
	mine := make([][]int64, len(s.devices))
	for i := range mine {
		mine[i] = []int64{0}
	}
	mine[0][0] = int64(count)
	all, err := s.collective.exchange(ctx, "number of elements of "+name, mine, o)
	if err != nil {
		return 0, err
	}
	count = 0
	for _, of := range all {
		count += int(of[0])
	}
	return count, nil
}

// destination returns the devices of a destination. A device of this worker may be named as one of its task.
func (s *Strategy) destination(op string, to Destination) ([]Device, error) {
	if s.task.Known() {
		at, ok := to.(At)
		if l, like := to.(likeValue); like {
			var name string
			name, ok = l.v.(string)
			at = At(name)
		}
		if d, err := CanonicalDevice(string(at)); ok && err == nil && d.Job == s.task.Type && d.Task == s.task.Index {
			d.Job, d.Task = localCPU.Job, localCPU.Task
			to = d
		}
	}
	if to == nil {
		return nil, errNoDestination(op)
	}
	return to.destination(op)
}
