package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/listener"
)

// Config configures how a process joins its job. The zero value reads everything from the environment.
type Config struct {
	// Job is the job and this process's index in it. Default: the result of [cluster.Discover].
	Job *cluster.Job
	// Replicas is the number of this worker's replicas. Workers may have different numbers. Default 1.
	Replicas int
	// Store is the URL of the rendezvous store. Default: the job's.
	Store string
	// Schemes adds kinds of stores, as in [rendezvous.Config], to those of package rendezvous and etcd.
	Schemes map[string]rendezvous.Opener
	// Secret is the job's secret. Default: that of LOCKSTEP_SECRET or LOCKSTEP_SECRET_FILE, if one of them is
	// set.
	Secret secret.Secret
	// DataPlaintext disables the encryption of the replicas' traffic, for trusted networks; the workers still
	// authenticate each other with the secret. It also allows several hosts without a secret; then any
	// process can join and disturb the job. A job whose workers are all known to be on one host uses this
	// user's key on this host anyway.
	DataPlaintext bool
	// RendezvousTimeout is how long Join and Compare wait for the other workers. Default 10 minutes.
	RendezvousTimeout time.Duration
	// HeartbeatTimeout is how long a worker, the store, or a connection between two workers may be silent
	// before it is lost. Default 30 seconds; negative: no limit. It is at least four of the intervals in which
	// this host reports (membership.NewTiming). The agent of lockstep run reports every second, unless its own
	// timeout is below 8 seconds: so under it a timeout below 4 seconds becomes 4 seconds, with a warning. All
	// nodes together send at most 1,000 reports a second: so in a job of more than 250 nodes per second of the
	// timeout (7,500 for 30 seconds) the timeout is longer.
	HeartbeatTimeout time.Duration
	// ProgressTimeout is how long a worker's training goroutine may make no progress, outside any call, while
	// others wait for it; it is logged as stuck after HeartbeatTimeout. Default: the deadline of the waiting
	// workers (Collective.Timeout, 10 minutes) plus HeartbeatTimeout, so that the deadline expires first.
	// Negative: no limit. A shorter timeout does not apply to the phases "compile" and "snapshot", which may be slow:
	// these have the default.
	ProgressTimeout time.Duration
	// Listen is the address that the process listens on, without a port. Default: that of the interface by
	// which it reaches the store; loopback, if all workers are known to be on this host. Ports is the port or the range
	// of ports: "7000-7099". Default: the port in the job's spec for this worker, if there is one, as in
	// TF_CONFIG, else any. A worker that serves the store uses the store's port and address for everything,
	// unless Listen is another address.
	Listen, Ports string
	// NoSharedMemory makes processes of one host communicate by TCP.
	NoSharedMemory bool
	// Apart makes processes with different values count as being on different hosts.
	Apart string
	// Build identifies the program; it must be equal on all workers. Default: the program's path, version and
	// revision, as far as the build information has them, and, among workers of one platform, a hash of the
	// executable.
	Build string
	// MixedBuilds allows the workers to run different programs, with a warning. It takes effect if it is set
	// on all of them.
	MixedBuilds bool
	// Collective configures the communicator. Join sets its Epoch and Describe.
	Collective collective.Config
	// Opener opens the communicator of the workers' replicas. Default: the library's own transports and
	// collectives. All workers must use an Opener of the same name.
	Opener *Opener
	// OnProgress is called by Progress, and by Join with the phase "rendezvous", on the same goroutine.
	// Default none.
	OnProgress func(step int64, phase string)
	// Logger receives the job's source, lost workers, and warnings. Default slog.Default().
	Logger *slog.Logger

	// Getenv and ReadFile default to os.LookupEnv and [cluster.ReadFile]. Tests replace them.
	Getenv   func(string) (string, bool)
	ReadFile func(string) ([]byte, error)
}

// Opener is a third-party backend that connects the replicas of all workers, such as MPI, in place of the
// library's own.
type Opener struct {
	// Name is its name: "mpi".
	Name string
	// Open creates the group: this worker's ranks are those of its [Member]. All workers call it after the
	// rendezvous; data that they need from each other goes through Exchange. cfg has the job's epoch and
	// describes the ranks. Open returns nil if the library's own transports shall be used after all, on all
	// workers alike.
	Open func(ctx context.Context, w *Worker, cfg collective.Config) (collective.Group, error)
}

const (
	defaultRendezvous = 10 * time.Minute
	defaultHeartbeat  = 30 * time.Second
	defaultDeadline   = 10 * time.Minute // package collective's
)

// filled returns c with its defaults, or an error for an invalid configuration.
func (c Config) filled() (Config, error) {
	if c.Getenv == nil {
		c.Getenv = os.LookupEnv
	}
	if c.ReadFile == nil {
		c.ReadFile = cluster.ReadFile
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Collective.Logger == nil {
		c.Collective.Logger = c.Logger
	}
	if c.Collective.Name == "" {
		c.Collective.Name = "world"
	}
	if c.RendezvousTimeout <= 0 {
		c.RendezvousTimeout = defaultRendezvous
	}
	if c.HeartbeatTimeout == 0 {
		c.HeartbeatTimeout = defaultHeartbeat
	}
	switch {
	case c.Replicas == 0:
		c.Replicas = 1
	case c.Replicas < 0 || c.Replicas > replicasMax:
		return c, fmt.Errorf("worker: %d replicas: want 1 to %d", c.Replicas, replicasMax)
	}
	if c.Ports != "" {
		if _, _, err := listener.ParsePorts(c.Ports); err != nil {
			return c, fmt.Errorf("worker: Ports: %w", err)
		}
	}
	if c.Job == nil {
		job, err := cluster.Discover(cluster.Discovery{Getenv: c.Getenv, ReadFile: c.ReadFile})
		if err != nil {
			return c, fmt.Errorf("worker: discovering the job: %w", err)
		}
		c.Job = job
	}
	job := *c.Job
	c.Job = &job
	if job.ID == "" {
		job.ID = "lockstep"
	}
	if c.Store != "" {
		job.Store = c.Store
	}
	if job.Workers > 1 && job.Workers <= workersMax && len(job.Spec) == 0 {
		tasks := make(map[int]string, job.Workers)
		for i := range job.Workers {
			tasks[i] = "" // unknown addresses
		}
		job.Spec, job.Task = cluster.Spec{cluster.Worker: tasks}, cluster.Task{Type: cluster.Worker, Index: job.Worker}
	}
	if err := c.checkJob(); err != nil {
		return c, err
	}
	if c.Secret.Given() {
		return c, nil
	}
	s, _, err := secret.FromEnvironment(c.Getenv, c.ReadFile)
	if err != nil {
		return c, fmt.Errorf("worker: the job's secret: %w", err)
	}
	c.Secret = s
	return c, nil
}

// More replicas of one worker, or more workers, are a mistake.
const (
	replicasMax = 1 << 12
	workersMax  = 1 << 16
)

func (c *Config) checkJob() error {
	j := c.Job
	switch {
	case j.Workers < 1 || j.Workers > workersMax || j.Worker < 0 || j.Worker >= j.Workers:
		return fmt.Errorf("worker: %v: want a number from 0 to one less than the number of workers", j)
	case j.Workers > 1 && j.Store == "" && j.NoStore != "":
		return fmt.Errorf("worker: %v: no rendezvous store: %s", j, j.NoStore)
	case j.Workers > 1 && j.Store == "":
		return fmt.Errorf("worker: %v: no rendezvous store: set %s to one, such as tcp://host:29500 or file:///folder", j,
			cluster.EnvStore)
	}
	return nil
}

// ErrNoSecret is matched by the error of a job on several hosts that has no secret.
var ErrNoSecret = errors.New("several hosts without a secret")

// noSecret returns the error of a job that needs a secret, with the two remedies.
func noSecret(why string) error {
	return fmt.Errorf("worker: %w: %s. Either give all workers the same secret: %s=$(openssl rand -hex 32), or a file "+
		"that contains it with %s (lockstep run generates one for a single node, and with -H). "+
		"Or, on a trusted network that no one else can reach, use --data-plaintext (DataPlaintext): connections are then "+
		"neither encrypted nor authenticated",
		ErrNoSecret, why, cluster.EnvSecret, cluster.EnvSecretFile)
}

// workerReportsMax is how many reports about their steps all workers together send in a second: the process that serves
// the store trains too.
const workerReportsMax = 200

// reportInterval returns the shortest interval between two reports of one worker about its steps.
func reportInterval(workers int) time.Duration {
	return time.Duration(workers) * time.Second / workerReportsMax
}

// heartbeatInterval returns the interval between two heartbeats of a worker in a job of few nodes.
func (c *Config) heartbeatInterval() time.Duration {
	return membership.NewTiming(c.HeartbeatTimeout, 1).Every
}

// keepAlive makes a connection between two workers end after the same silence as the heartbeat's, since the
// store may still reach both.
func (c *Config) keepAlive() net.KeepAliveConfig {
	if c.HeartbeatTimeout < 0 {
		return net.KeepAliveConfig{Idle: -1, Interval: -1, Count: -1}
	}
	third := c.HeartbeatTimeout / 3
	return net.KeepAliveConfig{Enable: true, Idle: c.HeartbeatTimeout - 2*third, Interval: third, Count: 2}
}

// slowPhases are those in which a healthy worker may make no progress for a long time. One that reads a snapshot
// reports progress meanwhile.
var slowPhases = []string{"compile", "snapshot"}

// progressLimit returns how long a worker may stay in a phase while others wait for it; negative: no limit.
func (c *Config) progressLimit(phase string) time.Duration {
	most := c.Collective.Timeout
	if most == 0 {
		most = defaultDeadline
	}
	if most > 0 {
		most += max(c.HeartbeatTimeout, 0)
	}
	if c.ProgressTimeout == 0 || c.ProgressTimeout > 0 && slices.Contains(slowPhases, phase) &&
		(most < 0 || c.ProgressTimeout < most) {
		return most
	}
	return c.ProgressTimeout
}

// oneHost reports whether all workers of a job are known to be on this host.
func oneHost(j *cluster.Job) bool {
	if j.LocalWorkers == j.Workers {
		return true
	}
	known := 0
	for _, kind := range []string{cluster.Chief, cluster.Worker} {
		for _, address := range j.Spec.Tasks(kind) {
			if address == "" {
				return false
			}
			known++
		}
	}
	return known >= j.Workers && hosts(j) == nil
}

// hosts returns the hosts in the job's spec, if it names several: nil if it names one, or none.
func hosts(j *cluster.Job) []string {
	var names []string
	for _, kind := range []string{cluster.Chief, cluster.Worker} {
		for _, address := range j.Spec.Tasks(kind) {
			if address == "" {
				continue // unknown
			}
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				host = address
			}
			if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
				host = "localhost"
			}
			if !slices.Contains(names, host) {
				names = append(names, host)
			}
		}
	}
	if len(names) < 2 {
		return nil
	}
	return names
}
