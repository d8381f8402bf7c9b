package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/listener"
)

// workerFlags are the flags of a command that can run as a worker of a job.
type workerFlags struct {
	worker, workers   int
	endpoint, id      string
	secretFile        string
	plaintext         bool
	rdzvTimeout       time.Duration
	heartbeatTimeout  time.Duration
	collectiveTimeout time.Duration
	progressTimeout   time.Duration
	listen, ports     string
	noSharedMemory    bool
	anyEngine         bool
	mixedBuilds       bool
	implementation    string

	set *pflag.FlagSet
}

func (o *workerFlags) add(f *pflag.FlagSet) {
	o.set = pflag.NewFlagSet("worker", pflag.ContinueOnError)
	o.set.SortFlags = false
	w := o.set
	w.IntVar(&o.worker, "worker", -1, "this worker's number, from 0 (default detected from the environment)")
	w.IntVar(&o.workers, "workers", 0, "number of workers (default detected from the environment)")
	w.StringVar(&o.endpoint, "rdzv-endpoint", "",
		"rendezvous address: `host:port` of worker 0, or a URL such as file:///folder (default detected from the "+
			"environment)")
	w.StringVar(&o.id, "rdzv-id", "", "`name` of the job; workers of other jobs are refused")
	w.StringVar(&o.secretFile, "secret-file", "",
		"`file` with the job's secret (default $"+cluster.EnvSecretFile+" or $"+cluster.EnvSecret+")")
	w.BoolVar(&o.plaintext, "data-plaintext", false, "do not encrypt tensors between hosts: for trusted networks only")
	w.DurationVar(&o.rdzvTimeout, "rdzv-timeout", 10*time.Minute, "how long to wait for the other workers to join")
	w.DurationVar(&o.heartbeatTimeout, "heartbeat-timeout", 30*time.Second,
		"time without a heartbeat after which a worker has failed")
	w.DurationVar(&o.collectiveTimeout, "collective-timeout", 10*time.Minute,
		"how long replicas wait for one another in a step")
	w.DurationVar(&o.progressTimeout, "progress-timeout", 0,
		"how long a live worker may make no progress while others wait for it (default --collective-timeout plus "+
			"--heartbeat-timeout)")
	w.StringVar(&o.listen, "interface", "", "`address` or network interface to listen on (default that of the route to "+
		"the rendezvous)")
	w.StringVar(&o.ports, "port-range", "", "ports to listen on, such as 29600-29699 (default any)")
	w.BoolVar(&o.noSharedMemory, "no-shared-memory", false, "use TCP between workers of one host, too")
	w.BoolVar(&o.anyEngine, "mixed-engines", false,
		"only warn if workers have different builds of the engine or different processors")
	w.BoolVar(&o.mixedBuilds, "mixed-builds", false,
		"only warn if workers run different executables; give it to all workers")
	w.StringVar(&o.implementation, "implementation", "auto",
		"library of the collectives: auto (Lockstep's own), nccl, mpi (under mpirun), or ring "+
			"(TensorFlow's name for auto: it does not select the ring algorithm)")
	w.Lookup("worker").DefValue = "0" // so that help does not show -1
	f.AddFlagSet(w)
}

// stray returns the first of these flags that was given, or an empty string.
func (o *workerFlags) stray(given func(flag string) bool) (name string) {
	o.set.VisitAll(func(f *pflag.Flag) {
		if name == "" && given(f.Name) {
			name = f.Name
		}
	})
	return name
}

// check validates the flags.
func (o *workerFlags) check() error {
	for _, c := range []struct {
		flag  string
		value time.Duration
	}{
		{"rdzv-timeout", o.rdzvTimeout},
		{"heartbeat-timeout", o.heartbeatTimeout},
		{"collective-timeout", o.collectiveTimeout},
	} {
		if c.value <= 0 {
			return usagef("--%s %v: want a time such as 30s or 10m", c.flag, c.value)
		}
	}
	if o.set.Changed("progress-timeout") && o.progressTimeout <= 0 || o.progressTimeout < 0 {
		return usagef("--progress-timeout %v: want a time such as 30s or 10m", o.progressTimeout)
	}
	if o.ports != "" {
		if _, _, err := listener.ParsePorts(o.ports); err != nil {
			return usagef("--port-range: %v", err)
		}
	}
	if _, err := distribute.ParseImplementation(o.implementation); err != nil {
		return usagef("--implementation %s: want auto, ring, nccl or mpi", o.implementation)
	}
	if o.set.Changed("workers") && o.workers < 1 {
		return usagef("--workers %d: want at least 1", o.workers)
	}
	if o.set.Changed("worker") && o.worker < 0 {
		return usagef("--worker %d: want 0 or more", o.worker)
	}
	if o.workers > 0 && o.worker >= o.workers {
		return usagef("--worker %d of --workers %d: workers are counted from 0", o.worker, o.workers)
	}
	return nil
}

// discover detects the job, and which worker this process is.
func (o *workerFlags) discover() (*cluster.Job, error) {
	return cluster.Discover(cluster.Discovery{Worker: o.worker, Workers: o.workers, Store: o.endpoint, ID: o.id})
}

// join joins the other workers. The caller must close the worker.
func (o *workerFlags) join(ctx context.Context, job *cluster.Job, replicas int) (*worker.Worker, error) {
	var key secret.Secret // zero: from the environment
	if o.secretFile != "" {
		text, err := cluster.ReadFile(o.secretFile)
		if err != nil {
			return nil, fmt.Errorf("--secret-file: %w", err)
		}
		if key, err = secret.Parse(string(text)); err != nil {
			return nil, fmt.Errorf("--secret-file %s: %w", o.secretFile, err)
		}
	}
	listen, err := listenAddress(o.listen)
	if err != nil {
		return nil, err
	}
	return worker.Join(ctx, worker.Config{
		Job: job, Replicas: replicas, Secret: key,
		RendezvousTimeout: o.rdzvTimeout, HeartbeatTimeout: o.heartbeatTimeout, ProgressTimeout: o.progressTimeout,
		DataPlaintext: o.plaintext, Listen: listen, Ports: o.ports, NoSharedMemory: o.noSharedMemory,
		MixedBuilds: o.mixedBuilds,
		Collective:  collective.Config{Timeout: o.collectiveTimeout},
		Opener:      o.reducer().Opener(),
		OnProgress:  onProgress,
		// the sources of the job have been printed
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// reducer returns the collectives backend. check has validated its name.
func (o *workerFlags) reducer() distribute.Implementation {
	i, _ := distribute.ParseImplementation(o.implementation)
	return i
}

// listenAddress returns the address of --interface, which is an address or the name of an interface.
func listenAddress(name string) (string, error) {
	if name == "" || net.ParseIP(name) != nil {
		return name, nil
	}
	i, err := net.InterfaceByName(name)
	if err != nil {
		return "", fmt.Errorf("--interface %s: want an address or a network interface of this host: %w", name, err)
	}
	addresses, err := i.Addrs()
	if err != nil {
		return "", fmt.Errorf("--interface %s: %w", name, err)
	}
	best := ""
	for _, a := range addresses {
		n, ok := a.(*net.IPNet)
		switch {
		case !ok || n.IP.IsLinkLocalUnicast():
		case n.IP.To4() != nil:
			return n.IP.String(), nil
		case best == "":
			best = n.IP.String()
		}
	}
	if best == "" {
		return "", fmt.Errorf("--interface %s: this interface has no address", name)
	}
	return best, nil
}

// onProgress, if set, is called at each phase of each step. Tests inject faults there.
var onProgress func(step int64, phase string)
