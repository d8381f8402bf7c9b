package setup

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/listener"
)

// WorkerFlags are the flags of a command that can run as a worker of a job.
type WorkerFlags struct {
	Worker, Workers   int
	endpoint, id      string
	secretFile        string
	plaintext         bool
	rdzvTimeout       time.Duration
	heartbeatTimeout  time.Duration
	collectiveTimeout time.Duration
	progressTimeout   time.Duration
	listen, ports     string
	noSharedMemory    bool
	AnyEngine         bool
	mixedBuilds       bool
	implementation    string

	Set *pflag.FlagSet
}

// Add adds the flags.
func (o *WorkerFlags) Add(f *pflag.FlagSet) {
	o.Set = pflag.NewFlagSet("worker", pflag.ContinueOnError)
	o.Set.SortFlags = false
	w := o.Set
	w.IntVar(&o.Worker, "worker", -1, "this worker's number, from 0")
	w.IntVar(&o.Workers, "workers", 0, "number of workers")
	w.StringVar(&o.endpoint, "rdzv-endpoint", "", "`host:port` of worker 0, or file:///folder")
	w.StringVar(&o.id, "rdzv-id", "", "`name` of the job")
	w.StringVar(&o.secretFile, "secret-file", "", "`file` with the job's secret")
	w.BoolVar(&o.plaintext, "data-plaintext", false, "do not encrypt tensors between hosts")
	w.DurationVar(&o.rdzvTimeout, "rdzv-timeout", 10*time.Minute, "time for all workers to join")
	w.DurationVar(&o.heartbeatTimeout, "heartbeat-timeout", 30*time.Second, "silence of a lost worker")
	w.DurationVar(&o.collectiveTimeout, "collective-timeout", 10*time.Minute, "wait for other replicas")
	w.DurationVar(&o.progressTimeout, "progress-timeout", 0, "wait for a worker without progress")
	w.StringVar(&o.listen, "interface", "", "`address` or interface to listen on")
	w.StringVar(&o.ports, "port-range", "", "to listen on, such as 29600-29699")
	w.BoolVar(&o.noSharedMemory, "no-shared-memory", false, "use TCP within a host, too")
	w.BoolVar(&o.AnyEngine, "mixed-engines", false, "accept other engines and processors")
	w.BoolVar(&o.mixedBuilds, "mixed-builds", false, "accept other executables")
	cli.ChoiceVar(w, &o.implementation, "implementation", "auto", "", "auto", "ring", "nccl", "mpi")
	cli.Limit(w, "(0s,), such as 30s or 10m", "rdzv-timeout", "heartbeat-timeout", "collective-timeout")
	cli.Limit(w, "[1,)", "workers")
	cli.Limit(w, "[0,)", "worker")
	w.Lookup("worker").DefValue = "0" // so that help does not show -1
	w.VisitAll(func(f *pflag.Flag) {
		if f.Name != "implementation" {
			cli.NotCompared(w, f.Name)
		}
	})
	f.AddFlagSet(w)
}

// Stray returns the first of these flags that was given, or an empty string.
func (o *WorkerFlags) Stray(given func(flag string) bool) (name string) {
	o.Set.VisitAll(func(f *pflag.Flag) {
		if name == "" && given(f.Name) {
			name = f.Name
		}
	})
	return name
}

// Check validates the flags.
func (o *WorkerFlags) Check() error {
	if o.Set.Changed("progress-timeout") && o.progressTimeout <= 0 || o.progressTimeout < 0 {
		return cli.Usagef("--progress-timeout %v: want a time such as 30s or 10m", o.progressTimeout)
	}
	if o.ports != "" {
		if _, _, err := listener.ParsePorts(o.ports); err != nil {
			return cli.Usagef("--port-range: %v", err)
		}
	}
	if o.Workers > 0 && o.Worker >= o.Workers {
		return cli.Usagef("--worker %d of --workers %d: workers are counted from 0", o.Worker, o.Workers)
	}
	return nil
}

// Discover detects the job, and which worker this process is.
func (o *WorkerFlags) Discover() (*cluster.Job, error) {
	return cluster.Discover(cluster.Discovery{Worker: o.Worker, Workers: o.Workers, Store: o.endpoint, ID: o.id})
}

// join joins the other workers. The caller must close the worker.
func (o *WorkerFlags) join(ctx context.Context, job *cluster.Job, replicas int) (*worker.Worker, error) {
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
		OnProgress:  OnProgress,
		// the sources of the job have been printed
		Logger: cli.Warnings(os.Stderr),
	})
}

// reducer returns the collectives backend. the flag takes no other name.
func (o *WorkerFlags) reducer() distribute.Implementation {
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
var OnProgress func(step int64, phase string)
