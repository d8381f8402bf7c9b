package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// Config configures an agent. Command and Workers are required.
type Config struct {
	// Command is the program and its arguments, Dir its working directory (default this process's), and Env
	// its environment without the agent's own variables (default this process's).
	Command []string
	Dir     string
	Env     []string
	// Workers is the number of workers on this node.
	Workers int
	// Node is the index of this node among Nodes. Default: the only one.
	Node, Nodes int
	// ID names the job. Default "lockstep".
	ID string
	// Address is the address by which the other nodes reach this one. Default 127.0.0.1.
	Address string
	// Store is the rendezvous store of the agents. The agents also write the failure of a worker to it if the
	// worker could not; the caller closes it. Required with several nodes. StoreHolder describes, for
	// display, the process with which the store ends; "": none.
	Store       rendezvous.Store
	StoreHolder string
	// StoreURL and Secret are passed to the workers, if given: the URL of the job's store, and its secret as
	// text.
	StoreURL, Secret string
	// RestartsMax is how often all workers are restarted after a failure, or after the loss of an agent,
	// which another agent may replace then. It must be the same on all nodes.
	RestartsMax int
	// RendezvousTimeout bounds how long the agents wait for one another at the start of an epoch, including
	// for the replacement of a lost agent. Default 5 minutes.
	RendezvousTimeout time.Duration
	// Settle is how long workers have to notice that another has failed, and to report what they know, before
	// they are asked to exit. Default 1 second.
	Settle time.Duration
	// Grace is how long workers have to exit once they are asked to, before they are killed. Default 15
	// seconds.
	Grace time.Duration
	// HeartbeatTimeout is how long an agent may be without a heartbeat before the others declare it lost, and how
	// long a worker may be stopped before it has failed. Default 30 seconds. An agent publishes a heartbeat every
	// second, with a timeout below 8 seconds every eighth of it, and in a job of more than 1,000 nodes less often:
	// there the timeout of agents is at least four intervals (membership.NewTiming). It must be the same on all nodes.
	HeartbeatTimeout time.Duration
	// Bind is how the workers are bound to the CPUs of this process. Default [affinity.Share].
	Bind affinity.Policy
	// Records is the folder in which workers write failure and flight records. Default: a temporary folder,
	// which is removed at the end, unless the job has failed and the folder contains flight records.
	Records string
	// Stdout and Stderr receive the workers' lines and the agent's messages; nil: nothing. Show selects the
	// output of a worker that is written there; nil: all.
	Stdout, Stderr io.Writer
	Show           func(rank int, s Stream) bool
	// Logs is a folder for all output of the workers: epoch<e>/rank<r>.stdout.log and .stderr.log. "": none.
	Logs string
	// Guard is the command of a process that calls [Guard] on its standard input. Default: none.
	Guard []string
	// Quiet leaves the reporting of failures to another node's agent.
	Quiet bool
}

func (c Config) filled() (Config, error) {
	if len(c.Command) == 0 || c.Command[0] == "" {
		return c, errors.New("no program to run")
	}
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	switch {
	case c.Workers < 1:
		return c, fmt.Errorf("%d workers on a node: want at least 1", c.Workers)
	case c.Node < 0 || c.Node >= c.Nodes:
		return c, fmt.Errorf("node %d of %d: want 0 to %d", c.Node, c.Nodes, c.Nodes-1)
	case c.Nodes > 1 && c.Store == nil:
		return c, errors.New("several nodes need a rendezvous store")
	case c.RestartsMax < 0:
		return c, fmt.Errorf("%d restarts: want 0 or more", c.RestartsMax)
	}
	if c.ID == "" {
		c.ID = "lockstep"
	}
	if c.Address == "" {
		c.Address = "127.0.0.1"
	}
	if c.Env == nil {
		c.Env = os.Environ()
	}
	if c.Bind == "" {
		c.Bind = affinity.Share
	}
	for d, otherwise := range map[*time.Duration]time.Duration{
		&c.RendezvousTimeout: 5 * time.Minute, &c.Settle: time.Second, &c.Grace: 15 * time.Second,
		&c.HeartbeatTimeout: 30 * time.Second,
	} {
		if *d <= 0 {
			*d = otherwise
		}
	}
	return c, nil
}

// Agent starts the workers of one node and watches them.
type Agent struct {
	cfg        Config
	host       string
	root       fs.FS
	screen     screen
	starter    *starter
	guard      *guard
	peers      *peers
	signals    chan os.Signal // the user's
	userSignal os.Signal      // the first of them
	restart    string         // message to print when the next epoch has begun

	temporary bool // the folder for records

	mu       sync.Mutex // guards the fields below
	unlogged error      // the first error that left a log incomplete
}

// New returns an agent. It starts nothing yet.
func New(cfg Config) (*Agent, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("launch: this machine's name: %w", err)
	}
	a := &Agent{cfg: cfg, host: host, root: os.DirFS("/"), signals: make(chan os.Signal, 4)}
	a.screen.open(cfg.Stdout, cfg.Stderr)
	return a, nil
}

// Outcome is the result of a job.
type Outcome struct {
	// Code is the exit code: 0, or the root cause's, or 130 when the user ended the job.
	Code int
	// Restarts is how often the workers were restarted.
	Restarts int
	// Interrupted reports whether the user ended the job.
	Interrupted bool
	// Report describes the last failure; nil without one.
	Report *failure.Report
}

// codeInterrupted is the exit code of a job that its user ended, as in shells.
const codeInterrupted = 130

// Interrupt forwards a user's signal to the workers of all nodes, and lets them exit. The second time it
// kills them. It is safe for concurrent use.
func (a *Agent) Interrupt(sig os.Signal) {
	a.screen.hurry()
	select {
	case a.signals <- sig:
	default: // further signals add nothing
	}
}

// Run starts the workers and returns when those of all nodes have ended and will not be restarted. No process
// that it started is left then. The error reports a failure of the agent itself. When ctx ends, the workers
// are killed. Call it once.
//
// It returns when Stdout and Stderr have taken all output, unless the user ends the job: then it waits two
// seconds for an output that accepts nothing, and reports how much is lost. A call of its Write may continue
// after that.
func (a *Agent) Run(ctx context.Context) (Outcome, error) {
	defer a.screen.close(ctx)
	return a.run(ctx)
}

func (a *Agent) run(ctx context.Context) (Outcome, error) {
	a.starter = newStarter()
	defer a.starter.close()
	if len(a.cfg.Guard) > 0 {
		var err error
		if a.guard, err = startGuard(a.cfg.Guard); err != nil {
			return Outcome{Code: 1}, fmt.Errorf("launch: %w", err)
		}
		defer a.guard.close()
	}
	if err := a.recordFolder(); err != nil {
		return Outcome{Code: 1}, fmt.Errorf("launch: %w", err)
	}
	a.peers = newPeers(a)
	defer a.peers.close()
	o, err := a.epochs(ctx)
	if a.unlogged != nil {
		a.screen.print(fmt.Sprintf("lockstep run: the logs in %s are incomplete: %v\n", a.cfg.Logs, a.unlogged))
	}
	if a.temporary {
		if o.Code == 0 || !a.flightRecords() {
			os.RemoveAll(a.cfg.Records)
		}
		a.guard.remove(a.cfg.Records)
	}
	if err != nil {
		return o, fmt.Errorf("launch: %w", err)
	}
	return o, nil
}

// epochs runs one epoch after the other.
func (a *Agent) epochs(ctx context.Context) (Outcome, error) {
	if err := a.enter(ctx); err != nil {
		o := Outcome{Code: codeOf(a, 1), Interrupted: a.userSignal != nil}
		a.peers.withdraw(ctx, &o, err)
		return o, err
	}
	for number := a.peers.first; ; number++ {
		e, err := a.begin(ctx, number)
		if err != nil {
			if a.peers.cutOff != nil {
				err = a.isolated(err)
			}
			o := Outcome{Code: codeOf(a, 1), Restarts: int(number), Interrupted: a.userSignal != nil}
			if ended := (*jobEndedError)(nil); errors.As(err, &ended) {
				o.Code = ended.Code
			}
			if !errors.Is(err, errReplaced) {
				a.peers.endJob(ctx, o.Code, err.Error())
			}
			return o, err
		}
		number = e.number
		e.watch(ctx)
		e.doubt(ctx)
		a.peers.unwatchWorkers()
		e.removeCluster()
		o := e.outcome()
		last := int(number) >= a.cfg.RestartsMax || o.Interrupted || ctx.Err() != nil || e.ownErr != nil ||
			e.cutOff != nil && e.storeOut // it was awaited for the rendezvous timeout already
		if o.Report != nil && !a.cfg.Quiet {
			a.screen.print(e.failureText(o.Report))
		}
		if (o.Report != nil || e.cutOff != nil) && !a.cfg.Quiet {
			a.restart = fmt.Sprintf("lockstep run: starting all %d workers again: restart %d of %d\n", e.layout.world, number+1,
				a.cfg.RestartsMax)
		}
		if o.Code == 0 || last {
			err := e.finalError()
			if !errors.Is(err, errReplaced) {
				a.peers.endJob(ctx, o.Code, e.summary(&o, err))
			}
			return o, err
		}
		if e.cutOff != nil {
			if err := a.rejoin(ctx, e); err != nil {
				if a.peers.cutOff != nil {
					err = a.isolated(err)
				}
				o := Outcome{Code: codeOf(a, 1), Restarts: int(number), Interrupted: a.userSignal != nil}
				return o, err
			}
		}
	}
}

// rejoin waits until the store can be reached again, and ends the epoch on the other nodes if they have not
// noticed yet that this node's workers have ended.
func (a *Agent) rejoin(ctx context.Context, e *epoch) error {
	p := a.peers
	a.screen.print(fmt.Sprintf("lockstep run: node %d waits up to %v to reach the other nodes again\n", a.cfg.Node,
		a.cfg.RendezvousTimeout))
	ctx, cancel := context.WithTimeout(ctx, a.cfg.RendezvousTimeout)
	defer cancel()
	err := a.unlessStopped(ctx, func(ctx context.Context) error {
		for {
			err := p.probe(ctx)
			if err == nil || p.gone(err) || pause.For(ctx, p.interval) != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	p.cutOff = nil
	p.publish(e.layout.first, "event", "stop", e.number)
	p.publish(e.ends[e.layout.node].bounded(), "event", "end", e.number, e.layout.node)
	a.screen.print(fmt.Sprintf("lockstep run: node %d reaches the other nodes again\n", a.cfg.Node))
	return nil
}

// isolated returns the error of an agent that cannot reach the store.
func (a *Agent) isolated(why error) error {
	if a.peers.gone(why) {
		return a.peers.storeLost(why)
	}
	return fmt.Errorf("node %d (host %s, pid %d) cannot reach the rendezvous store, so the state of "+
		"the other nodes is unknown: its link is cut, or %s: %w",
		a.cfg.Node, a.host, os.Getpid(), a.peers.outageCause(), why)
}

// unlessStopped calls f with a context that ends when the user stops this node.
func (a *Agent) unlessStopped(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	for {
		select {
		case err := <-done:
			if a.userSignal != nil { // whether f has finished or not
				return a.stoppedEarly()
			}
			return err
		case sig := <-a.signals:
			if a.userSignal == nil {
				a.userSignal = sig
			}
			cancel(a.stoppedEarly())
		}
	}
}

// enter takes this node's slot in the job, and starts to receive the events of the other agents.
func (a *Agent) enter(ctx context.Context) error {
	if a.cfg.Nodes == 1 {
		if a.cfg.Store == nil {
			return nil
		}
		if err := a.unlessStopped(ctx, a.peers.takeReports); err != nil { // the token of the clean-up too
			return err
		}
		if a.cfg.StoreURL != "" {
			a.peers.startReporting()
		}
		return nil
	}
	if used := a.peers.timing.Timeout; used > a.cfg.HeartbeatTimeout && a.cfg.Node == 0 {
		a.printUnlessQuiet(fmt.Sprintf("lockstep run: %d nodes report every %v, so the heartbeat timeout is %v instead of "+
			"%v\n", a.cfg.Nodes, a.peers.timing.Every, used, a.cfg.HeartbeatTimeout))
	}
	err := a.unlessStopped(ctx, func(ctx context.Context) error {
		return a.peers.takeSlot(ctx, a.registration(make([]int, a.cfg.Workers+1)), a.printUnlessQuiet)
	})
	if err == nil {
		a.peers.start()
	}
	return err
}

// stoppedEarly returns the error of an agent whose user has ended the job before it, or its next epoch, has
// begun; the others receive the same text.
func (a *Agent) stoppedEarly() error {
	return fmt.Errorf("node %d was stopped by %s before all nodes joined", a.cfg.Node, signalText(a.userSignal))
}

// signalText formats a signal for display.
func signalText(sig os.Signal) string {
	if sig == sigInterrupt {
		return signalName(sig) + " (Ctrl-C)"
	}
	return signalName(sig)
}

// printUnlessQuiet prints a message about the other nodes, unless another agent does.
func (a *Agent) printUnlessQuiet(text string) {
	if !a.cfg.Quiet {
		a.screen.print(text)
	}
}

// registration returns this agent's registration, with its ports.
func (a *Agent) registration(ports []int) registration {
	return registration{
		Node: a.cfg.Node, Host: a.host, PID: os.Getpid(), Workers: a.cfg.Workers,
		Address: a.cfg.Address, MasterPort: ports[0], Ports: ports[1:], RestartsMax: a.cfg.RestartsMax,
		Heartbeat: a.cfg.HeartbeatTimeout,
	}
}

// notLogged reports, once, that writing a log failed.
func (a *Agent) notLogged(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.unlogged == nil {
		a.unlogged = err
		a.screen.print(fmt.Sprintf("lockstep run: a log cannot be written, and the workers continue: %v\n", err))
	}
}

// recordFolder creates the folder for records.
func (a *Agent) recordFolder() (err error) {
	if a.cfg.Records != "" {
		return os.MkdirAll(a.cfg.Records, 0o700)
	}
	a.temporary = true
	a.cfg.Records, err = os.MkdirTemp("", recordsPrefix+"*")
	a.guard.add(a.cfg.Records)
	return err
}

// flightRecords reports whether workers have written records of their last collectives, which lockstep doctor
// reads.
func (a *Agent) flightRecords() bool {
	found, _ := filepath.Glob(filepath.Join(a.cfg.Records, "flight-*"))
	return len(found) > 0
}

func codeOf(a *Agent, code int) int {
	if a.userSignal != nil {
		return codeInterrupted
	}
	return code
}

// begin joins the other agents and starts this node's workers.
func (a *Agent) begin(ctx context.Context, number uint32) (*epoch, error) {
	ports, err := reserve(a.cfg.Address, a.cfg.Workers+1)
	if err != nil {
		return nil, fmt.Errorf("reserving ports for the workers: %w", err)
	}
	defer ports.release()
	members, err := a.join(ctx, number, a.registration(ports.numbers()))
	if err != nil {
		return nil, err
	}
	if a.restart != "" {
		a.screen.print(a.restart)
		a.restart = ""
	}
	e := &epoch{
		stoppedSince: map[*worker]time.Time{}, agent: a, number: members.Epoch,
		layout: lay(members.Slots, a.cfg.Node), ends: map[int]nodeEnd{}, losses: map[int]loss{}, began: time.Now(),
	}
	e.memory, e.counted = readMemoryKills(a.root)
	logs, err := a.logFolder(e.number)
	if err != nil {
		return nil, err
	}
	file, folder, err := e.layout.clusterFile()
	if e.clusterFile, e.clusterFolder = file, folder; folder != "" {
		a.guard.add(folder)
	}
	if err != nil {
		e.removeCluster()
		return nil, fmt.Errorf("the cluster of TF_CONFIG, which is too long for the environment: %w", err)
	}
	ports.release()
	e.start(logs)
	e.catchUp(ctx)
	return e, nil
}

func (a *Agent) logFolder(number uint32) (string, error) {
	if a.cfg.Logs == "" {
		return "", nil
	}
	dir := filepath.Join(a.cfg.Logs, fmt.Sprintf("epoch%d", number))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("folder for logs: %w", err)
	}
	return dir, nil
}

// show reports which of a worker's streams are shown.
func (a *Agent) show(rank int) (out [2]bool) {
	for s := Stdout; s <= Stderr; s++ {
		out[s] = a.cfg.Show == nil || a.cfg.Show(rank, s)
	}
	return out
}

// layout is the assignment of ranks to nodes in an epoch.
type layout struct {
	slots []nodeSlot // by node
	node  int        // this one
	first int        // rank of its first worker
	world int
}

func lay(slots []nodeSlot, node int) layout {
	l := layout{slots: slots, node: node}
	l.first = l.firstOf(node)
	l.world = l.firstOf(len(slots))
	return l
}

// assign returns the environment of this node's worker with a local number.
func (l *layout) assign(local int) assignment {
	p := assignment{
		rank: l.first + local, world: l.world, local: local, locals: l.slots[l.node].Workers, node: l.node,
		nodes:      len(l.slots),
		masterAddr: l.slots[0].Address, masterPort: l.slots[0].MasterPort,
	}
	for _, c := range l.slots {
		p.addresses = append(p.addresses, c.workerAddresses()...)
	}
	return p
}

// firstOf returns the rank of a node's first worker.
func (l *layout) firstOf(node int) (rank int) {
	for _, c := range l.slots[:node] {
		rank += c.Workers
	}
	return rank
}

// nodeOf returns the node of a rank.
func (l *layout) nodeOf(rank int) int {
	for i, c := range l.slots {
		if rank < c.Workers {
			return i
		}
		rank -= c.Workers
	}
	return -1
}

// removeCluster removes the file with the cluster: the workers have ended.
func (e *epoch) removeCluster() {
	if e.clusterFolder != "" {
		os.RemoveAll(e.clusterFolder)
		e.agent.guard.remove(e.clusterFolder)
		e.clusterFolder = ""
	}
}

// start starts this node's workers.
func (e *epoch) start(logs string) {
	a, n := e.agent, e.agent.cfg.Workers
	e.ended = make(chan *worker, n)
	cpus, bound := affinity.Read(), make([][]int, n)
	cores := runtime.GOMAXPROCS(0) // GOMAXPROCS respects the CPU limit of the control group
	nodeFile := a.peers.watchWorkers(e.number, e.layout.first, n)
	for local := range n {
		bound[local] = cpus.Of(a.cfg.Bind, n, local)
	}
	share := threads(threadShare(cores, bound))
	for local := range n {
		p := e.layout.assign(local)
		p.id, p.epoch, p.restartsMax = a.cfg.ID, e.number, a.cfg.RestartsMax
		p.store, p.secret, p.record, p.nodeFile = a.cfg.StoreURL, a.cfg.Secret, a.cfg.Records, nodeFile
		p.clusterFile = e.clusterFile
		s := spec{
			command: a.cfg.Command, dir: a.cfg.Dir, cpus: bound[local], logs: logs,
			show:   a.show(p.rank),
			env:    environment(a.cfg.Env, p.variables(), share),
			prefix: fmt.Sprintf("[rank%d] ", p.rank),
			grace:  a.cfg.Grace, unlogged: a.notLogged,
		}
		e.workers = append(e.workers, start(s, p.rank, a.starter, a.guard, &a.screen, &e.patience,
			func(w *worker) { e.ended <- w }))
	}
	e.running = slices.Clone(e.workers)
	if err := e.logBinding(logs, bound); err != nil {
		a.notLogged(err)
	}
}
