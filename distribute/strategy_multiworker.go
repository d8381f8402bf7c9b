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

// MultiWorkerConfig configures a strategy over several workers. The zero value is a single worker.
type MultiWorkerConfig struct {
	// Devices lists this worker's devices, by replica. Default: all accelerators of the engine or, without any,
	// CPU:0 alone, as in TensorFlow.
	Devices []string
	// Resolver describes the job's cluster. Default: that of Worker, else the result of [cluster.Discover],
	// which reads TF_CONFIG among others. Without any of these the job has this process only.
	Resolver cluster.Resolver
	// Worker is this process as a worker of its job, if it has joined already. Its replicas are those of
	// Devices. The strategy uses its Group and reports Runs and their failures to it. The caller closes it
	// after the strategy. A worker must not be shared by several strategies.
	Worker *clusterworker.Worker
	// Join configures how this process joins its job, if the job has several workers and neither Worker nor
	// Group is set. The strategy then joins ([worker.Join]), as TensorFlow's does, and its Close leaves the
	// job. The strategy sets Job, Replicas and the communicator's options.
	Join clusterworker.Config
	// Group holds the communicators of this worker's replicas, in the order of Devices: its local ranks are
	// this worker's replicas, and its size is the number of replicas of all workers. A worker's ranks are
	// consecutive, and workers are in the order of [cluster.IDInCluster]. Workers may have different numbers of
	// replicas. Set it to use your own communicators. Default: the group of Worker or the strategy's own. The
	// strategy closes it, unless NewMultiWorkerMirroredStrategy fails.
	Group collective.Group
	// Engine, LogicalCPUs, Options, Stall and Logger are as in [MirroredConfig].
	Engine      engine.Engine
	LogicalCPUs int
	Options     Options
	Stall       time.Duration
	Logger      *slog.Logger
}

// NewMultiWorkerMirroredStrategy returns a strategy that keeps variables equal on the devices of all workers
// (TensorFlow's MultiWorkerMirroredStrategy). Every worker makes one, and all workers make the same calls in
// the same order. With several workers these calls wait for the other workers, as replicas' calls do: this
// function, the creation of variables, reductions and gathers in cross-replica context, reads of sync-on-read
// variables there, and the steps of a distributed dataset.
//
// Replica ids run over all workers. Distributed values and variables hold the components of this worker's
// replicas. With several workers a value that is not distributed, passed to a reduction or a gather in
// cross-replica context, is one value per worker: it counts once for each worker, whatever its number of
// replicas. There is one exception: if some workers have one replica and others several, it counts for every
// replica of its worker and has no sum, because it cannot be distinguished from a value of a worker's only
// replica.
func NewMultiWorkerMirroredStrategy(cfg MultiWorkerConfig) (*Strategy, error) {
	const op = "NewMultiWorkerMirroredStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	if err := cfg.Options.Validate(); err != nil { // before joining
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
	// Before comparing options: a worker that waits in the store is not notified of another's failure.
	err = s.joinWorkers(op)
	if err == nil {
		err = s.compareOptions(op)
	}
	if err != nil {
		s.giveUp(err)
		s.group.owner = nil // the caller keeps ownership
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// giveUp leaves the job that the strategy has joined, because of err.
func (s *Strategy) giveUp(err error) {
	if s.joined {
		_ = s.member.Fail(err) // the caller gets err, whether or not the others can be notified
		_ = s.member.Close()
	}
}

// place finds this process' place in the cluster, and the job to join if the strategy must join one.
func (cfg *MultiWorkerConfig) place(op string) (jobPlace, *cluster.Job, error) {
	if cfg.Worker != nil && cfg.Group != nil {
		return jobPlace{}, nil, errorf(op, ErrInvalid, "both Worker and Group are set: want only one, because a worker has a group")
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

// discover returns the job, and the resolver that describes it. If TF_CONFIG describes it, or nothing does, the
// result is TensorFlow's default.
func (cfg *MultiWorkerConfig) discover(op string) (*cluster.Job, error) {
	tf := &cluster.TFConfig{}
	if _, err := findPlace(op, tf); err != nil {
		return nil, err // TensorFlow's error text
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

// jobOf returns the job described by a caller's resolver. The rendezvous is at the address of the first worker.
func jobOf(op string, r cluster.Resolver, p jobPlace) (*cluster.Job, error) {
	spec, err := r.Spec()
	if err != nil {
		return nil, errorf(op, ErrInvalid, "%w", err)
	}
	addresses := append(spec.Tasks(cluster.Chief), spec.Tasks(cluster.Worker)...)
	if _, _, err := net.SplitHostPort(addresses[0]); err != nil {
		return nil, errorf(op, ErrInvalid, "the rendezvous is at the address of the first worker in the cluster spec, which is %q: want host:port, or set Worker or Group", addresses[0])
	}
	return &cluster.Job{
		Source: "the resolver", Worker: p.id, Workers: p.workers, LocalWorker: -1, Store: "tcp://" + addresses[0], Spec: spec, Task: p.task,
	}, nil
}

// join joins the job with the given number of replicas.
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
	workers int // number of workers that train together
	id      int // index of this worker
	chief   bool
}

// findPlace gets this process' place from a resolver.
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

// give validates and sets the group between the replicas.
func (s *Strategy) give(op string, g collective.Group) error {
	local := g.Local()
	if len(local) != len(s.devices) {
		return errorf(op, ErrInvalid, "the group has %d communicators here for %d devices: want one each", len(local), len(s.devices))
	}
	s.given, s.size, s.first = g, local[0].Size(), local[0].Rank()
	if alone := s.size == len(s.devices); alone != (s.workersInSync == 1) {
		return errorf(op, ErrInvalid, "the cluster has %d workers, and the group has %d communicators here, of %d in all: want a group of exactly these workers", s.workersInSync, len(local), s.size)
	}
	for i, c := range local {
		if c.Rank() != s.first+i {
			return errorf(op, ErrInvalid, "the group's communicators here are ranks %d and, at %d, %d: want consecutive ranks", s.first, i, c.Rank())
		}
	}
	return nil
}

// compareOptions checks through the store, if there is one, that all workers have the same options. Timeouts
// may differ.
func (s *Strategy) compareOptions(op string) error {
	if s.member == nil {
		return nil // the first reduction reports a difference
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

// joinWorkers waits until all workers have joined. Every rank sends its worker's id and the number of workers,
// and checks that these are consistent.
func (s *Strategy) joinWorkers(op string) error {
	mine := make([][]int64, len(s.devices))
	for i := range mine {
		mine[i] = []int64{int64(s.workerID), int64(s.workersInSync)}
	}
	all, err := s.collective.exchange(context.Background(), "workers of the job", mine, s.options)
	if err != nil {
		return errorf(op, nil, "joining the other workers: %w", err)
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
		return errorf(op, ErrMismatch, "two processes joined as worker %d: it has %d replicas here and %d in the group", s.workerID, len(s.devices), n)
	}
	return nil
}

// Worker returns this process as a worker of its job: the one in the configuration, or the one that the
// strategy created. It is nil for strategies of one process.
func (s *Strategy) Worker() *clusterworker.Worker { return s.member }

// LocalReplicas returns the id of this worker's first replica and the number of its replicas.
func (s *Strategy) LocalReplicas() (first, n int) { return s.first, len(s.devices) }

// everywhere returns, with several workers, a value with a component for each of this worker's replicas. A
// value that is not distributed is the same for all of them, and so has no sum.
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

// isOfWorker reports whether a value belongs to the whole worker, and not to a replica. This is known only if
// every worker has several replicas: the value of a worker's only replica is not wrapped.
func (s *Strategy) isOfWorker(v Value) bool {
	return s.workersInSync > 1 && isPlain(v) && slices.Min(s.replicasOf) > 1
}

// isPlain reports whether a value is not distributed.
func isPlain(v Value) bool {
	_, isDistributed := v.(distributed)
	_, isVariable := v.(*Variable)
	return !isDistributed && !isVariable
}

// reduceWorkers reduces one value per worker. Each counts once, whatever the worker's number of replicas.
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

// workersValues gathers the values of all workers on every worker, by worker.
func (s *Strategy) workersValues(ctx context.Context, what string, v Value, o Options) ([]Value, error) {
	mine := make([]Value, len(s.devices)) // nil for the worker's other replicas
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

// destination returns the devices of a destination. Devices of this worker may be named with its task.
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
