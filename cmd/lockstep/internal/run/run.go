// Package run is lockstep run, which starts and supervises the workers of a job, and lockstep render, which writes
// scripts and manifests by which clusters start them.
package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/monitor"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/terminal"
)

// runFlags are the flags of lockstep run.
type runFlags struct {
	perNode               string
	nodes                 string
	nodeRank              int
	backend, endpoint, id string
	masterAddr            string
	masterPort            int
	standalone            bool
	timeout, heartbeat    time.Duration
	localAddr             string
	hosts, ssh            string
	env                   []string
	plaintext             bool
	maxRestarts           int
	restartDelay          time.Duration
	grace                 time.Duration
	logDir, tee, ranks    string
	bind                  string
	dashboard             monitor.Flags
	progress              string

	command []string
	given   func(flag string) bool
	readers cli.Readers
	tracker *status.Tracker
	table   *monitor.Table // nil: none
}

// New returns lockstep run.
func New() *cobra.Command {
	var o runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] [--] PROGRAM [ARGUMENT...]",
		Short: "Start a program as the workers of a job, and supervise them",
		Long: `Run starts a program several times, as the workers of one job, and supervises
them. Each worker finds its number in environment variables: LOCKSTEP_WORKER and
related ones, torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..., and
TF_CONFIG. In the output, [rank2] is worker 2. The program does not have to use
Lockstep.

Several nodes can be started in two ways. With -H, run reaches the hosts by ssh.
Or start the same command on each node, with --nnodes, --node-rank and the
address of node 0 as --rdzv-endpoint. Then all nodes need the same
LOCKSTEP_SECRET (or LOCKSTEP_SECRET_FILE, a file that holds it). For one node,
and with -H, a new secret is generated if none is set.

When a worker fails, all others are stopped: they get SIGTERM, and SIGKILL after
--grace. A report says which worker failed first, where and why. Then all
workers are restarted, up to --max-restarts times, after a pause if they made no
progress before. The exit code is that of the worker that failed first, or
128 plus the signal's number if a signal ended it. No process is left behind,
even if run itself is killed.

The first Ctrl-C or SIGTERM is forwarded, and the workers finish their step. A
second one kills them. The exit code is then 130.

torchrun's variables PET_NNODES, PET_NPROC_PER_NODE, ... set the flags that are
not given. Flags may be written with underscores, such as --nproc_per_node.`,
		Example: `  lockstep run --nproc-per-node 2 -- ./prog --epochs 3
  lockstep run --nproc-per-node auto --max-restarts 3 --log-dir logs -- ./prog
  lockstep run --nproc-per-node 4 -- python train.py
  lockstep run -H host1:4,host2:4 -- ./prog
  lockstep run --nnodes 2 --node-rank 1 --rdzv-endpoint host1:29400 -- ./prog`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.Usagef("no program: want one such as in 'lockstep run --nproc-per-node 2 -- ./prog'")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.command = args
			if err := setFromEnvironment(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			o.given = cmd.Flags().Changed
			return o.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.SetInterspersed(false) // arguments after the program belong to it
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-")) // torchrun accepts both
	})
	o.add(f)
	return cmd
}

func (o *runFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.perNode, "nproc-per-node", "1",
		"workers on this node: a number, cpu (one per core), gpu (one per GPU), auto (gpu if there are GPUs, else cpu)")
	f.StringVar(&o.nodes, "nnodes", "1", "number of nodes")
	f.IntVar(&o.nodeRank, "node-rank", 0, "number of this node, from 0")
	f.StringVarP(&o.hosts, "hosts", "H", "", "start all nodes from here by ssh: `hosts` and their numbers of workers, "+
		"such as host1:4,host2:4")
	f.BoolVar(&o.standalone, "standalone", false, "run on this node only (the default for one node)")
	f.StringVar(&o.backend, "rdzv-backend", "tcp",
		"rendezvous store: tcp (in node 0's lockstep run), file (a folder that all nodes share), etcd")
	f.StringVar(&o.endpoint, "rdzv-endpoint", "",
		"address of node 0 (default port 29400), the shared folder, or etcd's addresses; with -H this machine's address "+
			"(default any free port)")
	f.StringVar(&o.id, "rdzv-id", "", "`name` of the job, the same on all nodes (default a new name for one node, else "+
		"lockstep)")
	f.DurationVar(&o.timeout, "rdzv-timeout", 5*time.Minute, "how long the nodes wait for one another to join")
	f.StringVar(&o.masterAddr, "master-addr", "", "host of --rdzv-endpoint, as torchrun names it")
	f.IntVar(&o.masterPort, "master-port", 0, "port of --rdzv-endpoint, as torchrun names it")
	f.StringVar(&o.localAddr, "local-addr", "", "`address` at which other nodes reach this one (default that of the "+
		"route to the endpoint)")
	f.BoolVar(&o.plaintext, "data-plaintext", false,
		"allow several nodes without a secret, unencrypted: for isolated networks only; the program needs the same setting")
	f.IntVar(&o.maxRestarts, "max-restarts", 0, "maximum number of restarts of all workers after a failure or the loss "+
		"of a node (default 0); a lost node may be replaced by starting the same command again")
	f.DurationVar(&o.restartDelay, "restart-delay", time.Second, "pause before a restart if the workers failed before "+
		"their first step, or no later than before; it doubles each time, up to 1m")
	f.DurationVar(&o.heartbeat, "heartbeat-timeout", agentHeartbeat,
		"time without a heartbeat after which a node is lost, and time for which a worker may be suspended")
	f.DurationVar(&o.grace, "grace", 15*time.Second,
		"how long workers have to exit after another has failed, before they are killed")
	f.StringVar(&o.logDir, "log-dir", "",
		"also write the workers' output to this `folder`, one file per worker and stream")
	f.StringVar(&o.tee, "tee", "both", "streams to show: both, stdout, stderr, none (torchrun's 3, 1, 2, 0)")
	f.StringVar(&o.ranks, "ranks", "", "show only the output of the workers with these numbers, such as 0,2-3; "+
		"log files contain all")
	cli.ChoiceVar(f, &o.progress, "progress", "auto", "live table of the workers below their output: auto, table, none "+
		"(auto: on a terminal, if standard output is not a pipe)", "auto", "table", "none")
	o.dashboard.Add(f, "; on node 0")
	cli.BindVar(f, &o.bind, "each worker")
	f.StringArrayVar(&o.env, "env", nil, "environment variable for the workers on all hosts: `NAME=VALUE`, or NAME to "+
		"copy its value from here")
	f.StringVar(&o.ssh, "ssh", "", "`command` by which -H reaches a host; its arguments are the host and a shell "+
		"command (default $LOCKSTEP_SSH, else \"ssh -o BatchMode=yes\")")
	cli.Limit(f, "[0,)", "max-restarts")
	cli.Limit(f, "[0s,)", "restart-delay")
	cli.Limit(f, "(0s,)", "grace", "rdzv-timeout")
	cli.Limit(f, "[1s,)", "heartbeat-timeout")
	cli.Suggest(f, "rdzv-backend", "tcp", "file", "etcd")
	cli.Suggest(f, "tee", "both", "stdout", "stderr", "none")
	cli.Suggest(f, "nproc-per-node", "auto", "cpu", "gpu")
}

// run starts the workers and returns when they have exited.
func (o *runFlags) run(ctx context.Context) error {
	cfg, err := o.config()
	if err != nil {
		return err
	}
	watched, err := o.watch(&cfg)
	if err != nil {
		return err
	}
	defer watched.Close()
	if o.hosts != "" {
		return o.runHosts(ctx, cfg, watched)
	}
	return o.launch(ctx, cfg, watched)
}

// watch serves the state of the job, and shows it on the terminal. Its tracker is still empty.
func (o *runFlags) watch(cfg *launch.Config) (*monitor.Service, error) {
	o.tracker = status.NewTracker(cfg.ID, nil)
	if cfg.Nodes == 1 && o.hosts == "" && cfg.Workers == 1 || cfg.Nodes > 1 && o.nodeRank > 0 {
		return &monitor.Service{}, nil // one worker shows itself, and node 0 shows the workers of all nodes
	}
	watched, err := o.dashboard.Open(cfg.ID, o.tracker)
	if err != nil || o.progress == "none" || o.progress == "auto" && isPipe(os.Stdout) {
		return watched, err
	}
	if o.table = monitor.OpenTable(o.tracker); o.table != nil {
		watched.Table = o.table
		cfg.Stderr = o.readers.Of(o.table.Display)
		if sameFile(os.Stdout, os.Stderr) {
			cfg.Stdout = o.readers.Of(o.table.Display)
		}
	}
	return watched, nil
}

// messages returns where this process writes its messages.
func (o *runFlags) messages() io.Writer {
	if o.table != nil {
		return o.table.Display
	}
	return os.Stderr
}

// isPipe reports whether a file is a pipe. What reads it, such as tee, may write to the same terminal.
func isPipe(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&(os.ModeNamedPipe|os.ModeSocket) != 0
}

// sameFile reports whether two files are one, such as a terminal.
func sameFile(a, b *os.File) bool {
	x, err := a.Stat()
	if err != nil {
		return false
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y)
}

// launch starts this node's workers.
func (o *runFlags) launch(ctx context.Context, cfg launch.Config, watched *monitor.Service) error {
	m, err := o.rendezvous(&cfg)
	if err != nil {
		return err
	}
	opening, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	user := &stopRequest{cancel: cancel}
	defer cli.PassOnSignals(user.interrupt, o.readers)()
	place, err := m.Open(opening)
	if err != nil && user.isPending() {
		fmt.Fprintln(os.Stderr, "lockstep: stopped before this node reached the rendezvous store: if other nodes wait for "+
			"it, stop them, too")
		return cli.EndWith(cli.ExitInterrupted)
	}
	if err != nil {
		return err
	}
	defer place.Close()
	cfg.Store, cfg.StoreURL, cfg.StoreHolder, cfg.Secret = place.Store, place.URL, place.Holder, m.Secret.Text()
	agent, err := launch.New(cfg)
	if err != nil {
		return err
	}
	if len(watched.Servers) > 0 || watched.Table != nil {
		watched.Feed(func(ctx context.Context) { monitor.Follow(ctx, place.Store, cfg.ID, o.tracker) })
	}
	defer watched.Close() // before the store
	user.forward(agent.Interrupt)
	outcome, err := agent.Run(ctx)
	// only the report is left, and its reader may be gone: exit on the next signal
	user.forward(func(os.Signal) { os.Exit(max(outcome.Code, cli.ExitError)) })
	if err != nil && outcome.Code == cli.ExitOK {
		return err
	}
	if err != nil {
		fmt.Fprintf(o.messages(), "lockstep: %v\n", err)
	}
	return cli.EndWith(outcome.Code)
}

// stopRequest forwards the user's signals. Signals that arrive before there is a receiver are kept for it.
type stopRequest struct {
	cancel func() // cancels the work before there is a receiver

	mu      sync.Mutex // guards the fields below
	to      func(os.Signal)
	pending []os.Signal
}

func (s *stopRequest) interrupt(sig os.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.to != nil {
		s.to(sig)
		return
	}
	s.pending = append(s.pending, sig)
	s.cancel()
}

// forward sets the receiver, and sends it the pending signals.
func (s *stopRequest) forward(to func(os.Signal)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to = to
	for _, sig := range s.pending {
		to(sig)
	}
	s.pending = nil
}

func (s *stopRequest) isPending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending) > 0
}

// agentHeartbeat is the default time without a heartbeat after which a node is lost.
const agentHeartbeat = 30 * time.Second

// config turns the flags into an agent's configuration.
func (o *runFlags) config() (launch.Config, error) {
	o.readers = make(cli.Readers, 1)
	cfg := launch.Config{
		Command: o.command, ID: o.id, RestartsMax: o.maxRestarts, RestartDelay: o.restartDelay,
		RendezvousTimeout: o.timeout, HeartbeatTimeout: o.heartbeat, Grace: o.grace, Bind: affinity.Policy(o.bind),
		Stdout: o.readers.Of(os.Stdout), Stderr: o.readers.Of(os.Stderr),
	}
	if o.restartDelay == 0 {
		cfg.RestartDelay = -1
	}
	if o.hosts == "" && o.given("hosts") {
		return cfg, cli.Usagef("-H is empty: want hosts and their numbers of workers, such as host1:4,host2:4")
	}
	var err error
	if cfg.Workers, err = o.workers(); err != nil {
		return cfg, err
	}
	if cfg.Show, err = o.shown(); err != nil {
		return cfg, err
	}
	if cfg.Nodes, err = o.countNodes(); err != nil {
		return cfg, err
	}
	if cfg.Nodes == 1 && o.hosts == "" {
		if err = o.checkRanks(cfg.Show, cfg.Workers); err != nil {
			return cfg, err
		}
	}
	switch {
	case cfg.ID != "":
	case cfg.Nodes > 1:
		cfg.ID = "lockstep"
	default:
		cfg.ID = cli.JobID("run")
	}
	if !validID(cfg.ID) {
		return cfg, cli.Usagef("--rdzv-id %q: want up to 64 letters, digits, dots, dashes and underscores", cfg.ID)
	}
	if o.logDir != "" {
		cfg.Logs = filepath.Join(o.logDir, cfg.ID)
	}
	if cfg.Guard, err = cli.OwnCommand(guardCommand); err != nil {
		return cfg, err
	}
	if cfg.Env, err = o.environment(); err != nil {
		return cfg, err
	}
	if err := o.dashboard.Check(o.given); err != nil {
		return cfg, err
	}
	switch {
	case o.hosts == "" && cfg.Nodes == 1 && cfg.Workers == 1 && o.dashboard.Given():
		return cfg, cli.Usagef("--dashboard and --metrics of lockstep run show the workers of a job of several: give them " +
			"to the program of one worker, such as in 'lockstep train --dashboard :8080'")
	case o.nodeRank > 0 && o.dashboard.Given():
		return cfg, cli.Usagef("--dashboard and --metrics are for node 0, which shows the workers of all nodes, not for "+
			"--node-rank %d", o.nodeRank)
	case o.progress == "table" && o.hosts == "" && cfg.Nodes == 1 && cfg.Workers == 1:
		return cfg, cli.Usagef("--progress table: the table is for jobs of several workers: want --nproc-per-node or " +
			"--nnodes of at least 2")
	case o.progress == "table" && o.nodeRank > 0:
		return cfg, cli.Usagef("--progress table: node 0 shows the workers of all nodes, not --node-rank %d", o.nodeRank)
	case o.progress == "table" && !terminal.CanRedraw(os.Stderr):
		return cfg, cli.Usagef("--progress table: standard error is not a terminal on which a table can be drawn")
	}
	if o.hosts != "" { // the program is searched on those hosts
		return cfg, nil
	}
	return cfg, findProgram(o.command[0])
}

func validID(id string) bool {
	return id != "" && len(id) <= 64 && id != "." && id != ".." && !strings.ContainsFunc(id, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
	})
}

// workersMax bounds the number of workers that a typing error can start.
const workersMax = 4096

// workers returns how many workers this node has.
func (o *runFlags) workers() (int, error) {
	switch o.perNode {
	case "cpu":
		return runtime.GOMAXPROCS(0), nil
	case "auto":
		if n := gpus(os.Getenv, filepath.Glob); n > 0 {
			return n, nil
		}
		return runtime.GOMAXPROCS(0), nil
	case "gpu":
		n := gpus(os.Getenv, filepath.Glob)
		if n == 0 {
			return 0, errors.New("--nproc-per-node gpu: this machine has no NVIDIA GPU (no /dev/nvidia0), or " +
				"CUDA_VISIBLE_DEVICES hides them all")
		}
		return n, nil
	}
	n, err := strconv.Atoi(o.perNode)
	if err != nil || n < 1 || n > workersMax {
		return 0, cli.Usagef("--nproc-per-node %s: want a number from 1 to %d, auto, cpu or gpu", o.perNode, workersMax)
	}
	return n, nil
}

// gpus counts the NVIDIA GPUs that programs may use: those that CUDA_VISIBLE_DEVICES names, else all device files.
func gpus(getenv func(string) string, glob func(string) ([]string, error)) int {
	devices, _ := glob("/dev/nvidia[0-9]*")
	if visible := getenv("CUDA_VISIBLE_DEVICES"); visible != "" && len(devices) > 0 {
		n := 0
		for name := range strings.SplitSeq(visible, ",") {
			if strings.TrimSpace(name) == "-1" { // hides this GPU and those after it
				break
			}
			n++
		}
		return min(n, len(devices))
	}
	return len(devices)
}

// streamsShown are the values of --tee: words, and torchrun's numbers.
var streamsShown = map[string][2]bool{
	"both": {true, true}, "stdout": {true, false}, "stderr": {false, true}, "none": {},
	"3": {true, true}, "1": {true, false}, "2": {false, true}, "0": {},
}

// shown returns which workers and streams are shown.
func (o *runFlags) shown() (*launch.Shown, error) {
	streams, ok := streamsShown[o.tee]
	if !ok {
		return nil, cli.Usagef("--tee %s: want both, stdout, stderr or none", o.tee)
	}
	s := &launch.Shown{Streams: streams}
	if o.ranks == "" {
		return s, nil
	}
	var err error
	if s.Ranks, err = launch.ParseRanks(o.ranks); err != nil {
		return nil, cli.Usagef("--ranks: %v", err)
	}
	return s, nil
}

// checkRanks returns an error if --ranks lists a worker that does not exist.
func (o *runFlags) checkRanks(shown *launch.Shown, workers int) error {
	if len(shown.Ranks) > 0 && slices.Max(shown.Ranks) >= workers {
		return cli.Usagef("--ranks %s: worker %d does not exist: want 0 to %d", o.ranks, slices.Max(shown.Ranks), workers-1)
	}
	return nil
}

// findProgram returns an error if the program does not exist.
func findProgram(name string) error {
	_, err := exec.LookPath(name)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, exec.ErrDot):
		return cli.Usagef("program %s: found in this folder, which is not searched: write ./%s", name, name)
	case !strings.ContainsRune(name, filepath.Separator):
		if strings.HasSuffix(name, ".py") {
			return cli.Usagef("program %s: not found in $PATH: to run a Python script, write -- python %s", name, name)
		}
		if info, err := os.Stat(name); err == nil && !info.IsDir() {
			return cli.Usagef("program %s: found in this folder, which is not searched: write ./%s", name, name)
		}
		return cli.Usagef("program %s: not found in $PATH", name)
	}
	return cli.Usagef("program %s: %v", name, errors.Unwrap(err))
}
