package distribute

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/engine"
)

// MultiWorkerConfig describes a strategy over several workers. The zero value is a single worker.
type MultiWorkerConfig struct {
	// Devices lists this worker's devices, by replica. None: all accelerators that the engine reports or, if it has none, CPU:0
	// alone, as in TensorFlow.
	Devices []string
	// Resolver says who is in the job. Default: Worker's, else what [cluster.Discover] finds, TF_CONFIG among others; without any of
	// that this process is alone.
	Resolver cluster.Resolver
	// Worker is this process as a worker of its job, if it has joined it before. Its replicas are those of Devices. The strategy uses
	// its Group and tells it of Runs and of their failures; the caller closes it after the strategy. One worker is for one strategy.
	Worker *clusterworker.Worker
	// Join sets up how this process joins its job, if it has several workers and neither Worker nor Group is given: then the
	// strategy joins by itself ([worker.Join]), as TensorFlow's does, and leaves with its Close. Job, Replicas and the
	// communicator's options are the strategy's to say.
	Join clusterworker.Config
	// Group is the communicators of this worker's replicas, in the order of Devices: its local ranks are these, and its size is the
	// number of replicas of all workers. A worker's ranks follow each other, and workers come in the order of
	// [cluster.IDInCluster]. Workers may have different numbers of replicas. It is for those who make their own; nil: Worker's or
	// the strategy's. The strategy closes it, unless it could not be made.
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
// Replica ids run over all workers; distributed values and variables hold the components of this worker's replicas. A value that
// is not distributed, given to a reduction or a gather in cross-replica context, is one value of its worker with several workers:
// it counts once for each worker, however many replicas that has. Only where some workers have one replica and others several does
// it count for every replica of its worker, and has no sum: a value of a worker's only replica looks the same.
func NewMultiWorkerMirroredStrategy(cfg MultiWorkerConfig) (*Strategy, error) {
	const op = "NewMultiWorkerMirroredStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	if err := cfg.Options.Validate(); err != nil { // before others are met
		return nil, err
	}
	p, job, err := cfg.place(op)
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
	if cfg.Worker == nil && cfg.Group == nil && p.workers > 1 {
		if cfg.Worker, err = cfg.join(op, job, len(devices)); err != nil {
			return nil, err
		}
		s.joined = true
	}
	if s.member = cfg.Worker; s.member != nil && p.workers > 1 {
		cfg.Group = s.member.Group()
	}
	made, err := s.begin(op, cfg.Group)
	if err != nil {
		s.giveUp(err)
	}
	return made, err
}

// begin opens the strategy over the group that it was given, if any.
func (s *Strategy) begin(op string, group collective.Group) (*Strategy, error) {
	if group != nil {
		if err := s.give(op, group); err != nil {
			return nil, err
		}
	}
	s, err := s.open(op)
	if err != nil || s.workersInSync == 1 {
		return s, err
	}
	err = s.meetWorkers(op) // first: whoever waits in the store is not told of a worker that fails
	if err == nil {
		err = s.compareOptions(op)
	}
	if err != nil {
		s.giveUp(err)
		s.group.owner = nil // it stays the caller's
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// giveUp leaves the job that the strategy has joined by itself, for err.
func (s *Strategy) giveUp(err error) {
	if s.joined {
		_ = s.member.Fail(err) // the caller gets err, whether the others can be told of it or not
		_ = s.member.Close()
	}
}

// place finds this process' place, and the job that it is to join if it has to join one by itself.
func (cfg *MultiWorkerConfig) place(op string) (jobPlace, *cluster.Job, error) {
	if cfg.Worker != nil && cfg.Group != nil {
		return jobPlace{}, nil, errorf(op, ErrInvalid, "a Worker and a Group are given: want one of them, for a worker has a group")
	}
	var job *cluster.Job
	switch {
	case cfg.Resolver != nil:
	case cfg.Worker != nil:
		job = cfg.Worker.Job()
		cfg.Resolver = job.Resolver()
	case cfg.Group != nil:
		cfg.Resolver = &cluster.TFConfig{}
	default:
		var err error
		if job, err = cfg.discover(op); err != nil {
			return jobPlace{}, nil, err
		}
	}
	p, err := findPlace(op, cfg.Resolver)
	switch {
	case err != nil:
		return p, nil, err
	case job == nil && p.workers > 1 && cfg.Group == nil:
		job, err = jobOf(op, cfg.Resolver, p)
	case job != nil && (p.workers != job.Workers || p.id != job.Worker):
		err = errorf(op, ErrInvalid, "the process is %v, but its cluster has %d workers, of which it is number %d", job, p.workers, p.id)
	}
	return p, job, err
}

// discover finds out which job this is, and the resolver that says so. Where TF_CONFIG does, or nobody, it is TensorFlow's default.
func (cfg *MultiWorkerConfig) discover(op string) (*cluster.Job, error) {
	tf := &cluster.TFConfig{}
	if _, err := findPlace(op, tf); err != nil {
		return nil, err // in TensorFlow's words
	}
	job, err := cluster.Discover(cluster.Discovery{})
	if err != nil {
		return nil, errorf(op, ErrInvalid, "%w", err)
	}
	cfg.Resolver = tf
	if spec, err := tf.Spec(); err != nil || len(spec) == 0 && job.Workers > 1 {
		cfg.Resolver = job.Resolver()
	}
	return job, nil
}

// jobOf returns the job that a resolver of the caller's describes: the workers meet at the address of the first.
func jobOf(op string, r cluster.Resolver, p jobPlace) (*cluster.Job, error) {
	spec, err := r.Spec()
	if err != nil {
		return nil, errorf(op, ErrInvalid, "%w", err)
	}
	addresses := append(spec.Tasks(cluster.Chief), spec.Tasks(cluster.Worker)...)
	if _, _, err := net.SplitHostPort(addresses[0]); err != nil {
		return nil, errorf(op, ErrInvalid, "the workers would meet at the first one's address in the cluster spec, %q: want host:port, a Worker or a Group", addresses[0])
	}
	return &cluster.Job{
		Source: "the resolver", Worker: p.id, Workers: p.workers, LocalWorker: -1, Store: "tcp://" + addresses[0], Spec: spec, Task: p.task,
	}, nil
}

// join has this process join its job, with so many replicas.
func (cfg *MultiWorkerConfig) join(op string, job *cluster.Job, replicas int) (*clusterworker.Worker, error) {
	c := cfg.Join
	c.Job, c.Replicas = job, replicas
	if c.Logger == nil {
		c.Logger = cfg.Logger
	}
	if c.Opener == nil {
		c.Opener = cfg.Options.Implementation.Opener()
	}
	c.Collective = collective.Config{
		Name: "replicas", Timeout: cfg.Options.Timeout, Stall: cfg.Stall, Order: cfg.Options.Order, Accumulate: cfg.Options.Accumulate, Logger: cfg.Logger,
	}
	w, err := clusterworker.Join(context.Background(), c)
	if err != nil {
		return nil, errorf(op, nil, "%w", err)
	}
	return w, nil
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

// compareOptions holds what all workers must want alike against the others, if there is a store for it. How long one waits is its own affair.
func (s *Strategy) compareOptions(op string) error {
	if s.member == nil {
		return nil // the first reduction finds it
	}
	o, order, accumulate := s.options, "Canonical", "AccumulateDType" // the defaults
	if o.Order == collective.Any {
		order = "Any"
	}
	if o.Accumulate == collective.AccumulateFloat32 {
		accumulate = "AccumulateFloat32"
	}
	err := s.member.Compare(context.Background(), "options of the strategy", []rendezvous.Fact{
		{Name: "BytesPerPack", Value: fmt.Sprint(o.BytesPerPack)},
		{Name: "Implementation", Value: fmt.Sprint(o.Implementation)},
		{Name: "Order", Value: order},
		{Name: "Sparse", Value: fmt.Sprint(o.Sparse)},
		{Name: "Accumulate", Value: accumulate},
	})
	if errors.Is(err, clusterworker.ErrDiffer) {
		return errorf(op, ErrMismatch, "%w", err)
	}
	if err != nil {
		return errorf(op, nil, "%w", err)
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

// Worker returns this process as a worker of its job: the one that the strategy was given, or has become by itself; nil for
// strategies of one process.
func (s *Strategy) Worker() *clusterworker.Worker { return s.member }

// LocalReplicas returns which replicas this worker has: so many, with ids from first on.
func (s *Strategy) LocalReplicas() (first, n int) { return s.first, len(s.devices) }

// everywhere returns, with several workers, a value with a component for each of this worker's replicas. What is not
// distributed has the same one for all of them, and so no sum.
func (s *Strategy) everywhere(name string, op ReduceOp, v Value) (Value, error) {
	switch {
	case s.workersInSync == 1 || !isPlain(v):
		return v, nil
	case op == Sum && len(s.devices) > 1:
		return nil, errorf(name, ErrInvalid, "a non-DistributedValues value %v cannot be reduced with the given reduce op %v: "+
			"it is the same on the %d replicas of this worker, and other workers have one replica. "+
			"Want a value of each replica, such as Run returns", v, op, len(s.devices))
	}
	return s.onAll(v), nil
}

// isOfWorker reports whether a value is one of the whole worker, and not of a replica. That is known only where every worker
// has several replicas: the value of a worker's only replica is not wrapped.
func (s *Strategy) isOfWorker(v Value) bool {
	return s.workersInSync > 1 && isPlain(v) && slices.Min(s.replicasOf) > 1
}

// isPlain reports whether a value is not distributed.
func isPlain(v Value) bool {
	_, isDistributed := v.(distributed)
	_, isVariable := v.(*Variable)
	return !isDistributed && !isVariable
}

// reduceWorkers reduces a value of each worker, which counts once for each of them, however many replicas they have.
func (s *Strategy) reduceWorkers(
	ctx context.Context, name string, op ReduceOp, v Value, to []Device, o Options,
) (Value, error) {
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf(name, ErrInvalid, "%w", err)
	}
	all, err := s.workersValues(ctx, fmt.Sprintf("%v of a value of each worker", op), leaf, o)
	if err != nil {
		return nil, err
	}
	out, err := ReductionToOneDevice{}.BatchReduce(ctx, op, []Reduction{{Value: NewPerReplica(all...), To: to}}, o)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// workersValues gives every worker the values of all of them, by worker.
func (s *Strategy) workersValues(ctx context.Context, what string, v Value, o Options) ([]Value, error) {
	mine := make([]Value, len(s.devices)) // nothing for the others of its replicas
	mine[0] = v
	all, err := s.collective.gatherValues(ctx, what, mine, o)
	if err != nil {
		return nil, err
	}
	out, first := make([]Value, s.workersInSync), 0
	for worker, replicas := range s.replicasOf {
		out[worker] = all[first]
		first += replicas
	}
	return out, nil
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
