package distribute

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/engine"
)

// MultiWorkerConfig configures a strategy over several workers. The zero value is a single worker.
type MultiWorkerConfig struct {
	// Devices lists this worker's devices, by replica. Unlike in TensorFlow a device may have several replicas, which
	// compute in turn. Default: all accelerators of the engine or, without any, CPU:0 alone, as in TensorFlow.
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
	// Group holds the communicators of this worker's replicas, in the order of Devices: its local ranks are this worker's
	// replicas, and its size is the number of replicas of all workers. A worker's ranks are ascending, and need not be
	// consecutive. Workers may have different numbers of replicas. Set it to use your own communicators. Default: the
	// group of Worker or the strategy's own. The strategy closes it, unless NewMultiWorkerMirroredStrategy fails.
	Group collective.Group
	// Elastic makes a strategy whose group is not rebuilt after a failed Run: [Strategy.Reform] replaces it. Until then,
	// calls return the failure.
	Elastic     bool
	Engine      engine.Engine // as in [MirroredConfig]
	LogicalCPUs int           // as in MirroredConfig
	Options     Options       // as in MirroredConfig; equal on all workers, except for timeouts
	Stall       time.Duration // as in MirroredConfig
	Logger      *slog.Logger  // as in MirroredConfig
}

// place finds this process' place in the cluster, and the job to join if the strategy must join one.
func (cfg *MultiWorkerConfig) place(op string) (jobPlace, *cluster.Job, error) {
	if cfg.Worker != nil && cfg.Group != nil {
		return jobPlace{}, nil, errorf(op, ErrInvalid, "both Worker and Group are set: want only one, because a worker has "+
			"a group")
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
		err = errorf(op, ErrInvalid, "the process is %v, but its cluster has %d workers, of which it is number %d", job,
			p.workers, p.id)
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
		return nil, errorf(op, ErrInvalid, "the rendezvous is at the address of the first worker in the cluster spec, "+
			"which is %q: want host:port, or set Worker or Group", addresses[0])
	}
	return &cluster.Job{
		Source: "the resolver", Worker: p.id, Workers: p.workers, LocalWorker: -1, Store: "tcp://" +
			addresses[0], Spec: spec, Task: p.task,
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
	c.Collective = cfg.Options.group(cfg.Stall, cfg.Logger, nil)
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
	single := jobPlace{task: cluster.NoTask, workers: 1, chief: true}
	spec, err := r.Spec()
	if err != nil {
		return single, errorf(op, ErrInvalid, "%w", err)
	}
	if len(spec.Jobs()) == 0 {
		return single, nil
	}
	p := jobPlace{}
	switch p.task, err = r.Task(); {
	case err != nil:
		return p, errorf(op, ErrInvalid, "%w", err)
	case !p.task.Known():
		return p, errorf(op, ErrInvalid, "when a cluster spec is given, you must also specify the task's type and index: "+
			"it is not known which task of the cluster this process is")
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
