package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
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
	// RestartDelay is the pause before a restart if the workers failed before their first step, or no later than in an
	// attempt before. It doubles each time, up to a minute. Default 1 second; negative: none.
	RestartDelay time.Duration
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
	// workers' output that is written there; nil: all.
	Stdout, Stderr io.Writer
	Show           *Shown
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
	if c.RestartDelay == 0 {
		c.RestartDelay = time.Second
	}
	return c, nil
}

// Agent starts the workers of one node and watches them.
type Agent struct {
	cfg       Config
	host      string
	root      fs.FS
	screen    screen
	starter   *starter
	guard     *guard
	peers     *peers
	signals   chan os.Signal // the user's
	ports     *reserved      // for the workers of the next epoch; nil: none
	processes *processes     // nil: none
	temporary bool           // the folder for records

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
// after that. If a write to Stdout fails, the workers continue, and Run returns the error at the end, unless its
// reader is gone.
func (a *Agent) Run(ctx context.Context) (Outcome, error) {
	o, err := a.runJob(ctx)
	if lost := a.screen.close(ctx); lost != nil {
		err, o.Code = errors.Join(err, lost), max(o.Code, 1)
	}
	return o, err
}

func (a *Agent) runJob(ctx context.Context) (Outcome, error) {
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
	s := a.run(ctx, a.newState(), begin{})
	defer a.peers.close(s.cutOff != nil)
	if a.ports != nil {
		defer a.ports.release()
	}
	o, err := s.result.Outcome, s.result.err
	if a.unlogged != nil {
		a.screen.print(fmt.Sprintf("lockstep run: the logs in %s are incomplete: %v\n", a.cfg.Logs, a.unlogged))
	}
	if a.temporary {
		if o.Code == 0 || o.Interrupted && o.Report == nil || !a.flightRecords() {
			os.RemoveAll(a.cfg.Records)
		}
		a.guard.remove(a.cfg.Records)
	}
	if err != nil {
		return o, fmt.Errorf("launch: %w", err)
	}
	return o, nil
}

// newState returns the state of an agent that has not begun.
func (a *Agent) newState() state {
	return state{
		cfg: &a.cfg, mine: a.registration(make([]int, a.cfg.Workers+1)), nonce: a.peers.nonce,
		delays: restartDelays{first: a.cfg.RestartDelay, furthest: -1},
	}
}

// run is the I/O around decide: it performs the actions, and feeds their results, the messages of the other agents and
// what happens on this node back, until the agent has ended.
func (a *Agent) run(ctx context.Context, s state, in input) state {
	look := time.NewTicker(a.cfg.HeartbeatTimeout / missedMax)
	defer look.Stop()
	for actions := []action(nil); ; {
		if in != nil {
			var more []action
			s, more = decide(s, time.Now(), in)
			actions = append(actions, more...)
		}
		switch {
		case len(actions) > 0:
			in = a.perform(ctx, &s, actions[0])
			actions = actions[1:]
		case s.result != nil:
			return s
		default:
			in = a.await(ctx, &s, look.C)
		}
	}
}

// await returns the next input.
func (a *Agent) await(ctx context.Context, s *state, look <-chan time.Time) input {
	var due <-chan time.Time
	if at := s.deadline(); !at.IsZero() {
		timer := time.NewTimer(time.Until(at))
		defer timer.Stop()
		due = timer.C
	}
	done := ctx.Done()
	if s.canceled {
		done = nil
	}
	var ended <-chan *worker
	if a.processes == nil {
		look = nil
	} else {
		ended = a.processes.ended
	}
	select {
	case w := <-ended:
		return exited{a.processes.exit(w)}
	case in := <-a.peers.inputs:
		return in
	case sig := <-a.signals:
		return signalled{sig}
	case <-look:
		return a.processes.suspended()
	case <-due:
		return tick{}
	case <-done:
		return canceled{context.Cause(ctx)}
	}
}

// perform performs an action, and returns its result; nil: it has none.
func (a *Agent) perform(ctx context.Context, s *state, act action) input {
	p := a.peers
	switch act := act.(type) {
	case printText:
		a.screen.print(string(act))
	case readMessages:
		var in found
		in.stoppable = a.unlessStopped(ctx, func(ctx context.Context) (err error) {
			in.messages, _, err = p.readMessages(ctx)
			return err
		})
		return in
	case clearEnds:
		return cleared{a.unlessStopped(ctx, func(ctx context.Context) (err error) {
			for i := 0; i < len(act.held) && err == nil; i++ {
				err = p.clear(ctx, act.held[i])
			}
			return err
		})}
	case checkHolder:
		var in contest
		in.stoppable = a.unlessStopped(ctx, func(ctx context.Context) (err error) {
			in.alive, err = p.reporter.Contested(ctx)
			return err
		})
		return in
	case writeSlot:
		var in written
		in.stoppable = a.unlessStopped(ctx, func(ctx context.Context) (err error) {
			if err = rendezvous.AnnounceJob(ctx, p.store, p.job); err == nil {
				in.done, err = p.writeSlot(ctx, act.slot, act.old)
			}
			return err
		})
		return in
	case takeReports:
		in := reporting{a.unlessStopped(ctx, p.takeReports)}
		if a.cfg.Nodes == 1 && a.cfg.StoreURL != "" && in.err == nil {
			p.startReporting()
		}
		return in
	case startPeers:
		p.start()
	case joinEpoch:
		return a.joinEpoch(ctx, s.number, act.by)
	case propose:
		p.propose(act.message)
	case publish:
		p.publish(act.message)
	case startWorkers:
		var err error
		a.processes, err = a.launch(s.number, &s.epoch.layout)
		return launched{err}
	case readSlots:
		ctx, cancel := context.WithTimeout(ctx, storeTime)
		defer cancel()
		if slots, _, _, err := p.read(ctx); err == nil { // else an input reports a lost store
			return listed{slots}
		}
	case signalWorkers:
		a.processes.signal(act.sig)
	case stopWorkers:
		a.processes.stop()
	case killWorkers:
		a.processes.kill()
	case haltWorker:
		w := a.processes.of(act.rank)
		w.halt()
		return halted{a.processes.exit(w)}
	case publishFailure:
		p.record(act.Record)
	case gatherRecords:
		return a.processes.gather()
	case releaseWorkers:
		p.unwatchWorkers()
		a.processes.release()
		a.processes = nil
	case printFailure:
		records := ""
		if a.flightRecords() {
			records = a.cfg.Records
		}
		a.screen.print(act.of.failureText(act.report, a.cfg.Logs, records))
	case probeStore:
		in := probed{err: p.reach(context.WithoutCancel(ctx))}
		if in.err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
			defer cancel()
			in.unrelated = rendezvous.UnrelatedProcesses(ctx, p.store, p.job)
		}
		return in
	case pauseFor:
		return waited{a.unlessStopped(ctx, func(ctx context.Context) error { return pause.For(ctx, act.Duration) })}
	case awaitStore:
		return waited{a.unlessStopped(ctx, p.awaitStore)}
	case withdraw:
		p.withdraw(ctx, &act.Outcome, act.err)
	case endJob:
		p.endJob(ctx, act.code, act.why)
	}
	return nil
}

// stoppable is the result of an action that the user's signal ends.
type stoppable struct {
	err error
	sig os.Signal // the user's; nil: none
}

func (s stoppable) ended() stoppable { return s }

// unlessStopped calls f with a context that ends when the user stops this node.
func (a *Agent) unlessStopped(ctx context.Context, f func(context.Context) error) (out stoppable) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	for {
		select {
		case out.err = <-done:
			return out
		case sig := <-a.signals:
			if out.sig == nil {
				out.sig = sig
			}
			cancel()
		}
	}
}

// joinEpoch reserves the ports of this node's workers, and reports in its slot that it is ready for an epoch.
func (a *Agent) joinEpoch(ctx context.Context, number uint32, by time.Time) (in ready) {
	if a.ports == nil {
		ports, err := reserve(a.cfg.Address, a.cfg.Workers+1)
		if err != nil {
			in.err = fmt.Errorf("reserving ports for the workers: %w", err)
			return in
		}
		a.ports = ports
	}
	mine := a.registration(a.ports.numbers())
	if a.cfg.Nodes == 1 {
		in.slot = &nodeSlot{
			registration: mine, Nodes: 1, Nonce: a.peers.nonce, State: present, Epoch: number, Ready: true,
		}
		return in
	}
	ctx, cancel := context.WithDeadline(ctx, by)
	defer cancel()
	in.stoppable = a.unlessStopped(ctx, func(ctx context.Context) error { return a.peers.renewed(ctx, number, mine) })
	slot := a.peers.mine
	in.slot = &slot
	return in
}

// signalText formats a signal for display.
func signalText(sig os.Signal) string {
	if sig == sigInterrupt {
		return signalName(sig) + " (Ctrl-C)"
	}
	return signalName(sig)
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
