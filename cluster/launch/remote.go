package launch

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// orderVersion is the version of the protocol between a launcher and its agents on other hosts.
const orderVersion = 3

// order is the configuration of an agent on another host, on one line of its standard input; never on a
// command line, which every user of that host can read. Further lines are the user's signals. The end of the
// input means that the launcher has ended.
type order struct {
	Version int
	Store   string // host:port
	Config  Config // without the parts that belong to the launcher's own host
}

// orderMax bounds an order, in bytes.
const orderMax = 8 << 20

// Remote starts one agent on each of several hosts, and serves the agents' rendezvous store. It is not an
// agent itself.
type Remote struct {
	// Config configures all agents. The workers get Env in addition to their host's environment. These fields are set for
	// each agent: Workers, Node, Nodes, Address, Store, StoreHolder, StoreURL, Secret, Records, Guard and Quiet.
	Config Config
	Hosts  []Host
	// SSH is the command that runs a command on a host. Two arguments are appended: the host, and a line for
	// its shell.
	SSH []string
	// Agent is the command that calls [Follow] on its standard input: here, and at the same path on the other
	// hosts.
	Agent []string
	// Address is this machine's address, host:port, by which the hosts reach it; port 0: any. Default: that
	// of the route to the first other host.
	Address string
	Secret  secret.Secret
	Logger  *slog.Logger
	// Watch is called with the job's store on a goroutine, and must return soon after its context ends, before the store
	// is closed; nil: nothing.
	Watch func(context.Context, rendezvous.Store)

	screen screen

	mu         sync.Mutex // guards the fields below
	links      []*link
	interrupts int
}

// link is the connection to the agent on one host.
type link struct {
	host  Host
	cmd   *exec.Cmd
	input io.WriteCloser
	send  chan []byte   // queue of writes to the agent's input
	over  chan struct{} // closed when the agent has ended
	tail  tail
	done  bool // the agent has carried out its order
	code  int  // then the job's exit code, else the agent's
}

// Interrupt forwards the user's signal, like [Agent.Interrupt].
func (r *Remote) Interrupt(sig os.Signal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.interrupts++
	r.screen.hurry()
	for i, l := range r.links {
		if r.interrupts == 1 && i > 0 {
			break // the first agent forwards it to the others
		}
		name := "INT\n"
		if sig == sigTerminate {
			name = "TERM\n"
		}
		select {
		case l.send <- []byte(name):
		default: // further signals add nothing
		}
	}
}

// interrupted reports whether the user has ended the job.
func (r *Remote) interrupted() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.interrupts > 0
}

// Run starts the agents and returns the job's exit code when all have ended. The error names the host whose
// agent failed, or is that of a write to standard output, as [Agent.Run] returns it. When ctx ends, the workers are
// killed.
func (r *Remote) Run(ctx context.Context) (int, error) {
	r.mu.Lock()
	if r.screen.open(r.Config.Stdout, r.Config.Stderr); r.interrupts > 0 {
		r.screen.hurry()
	}
	r.mu.Unlock()
	code, err := r.run(ctx)
	if lost := r.screen.close(ctx); lost != nil {
		err, code = errors.Join(err, lost), max(code, 1)
	}
	return code, err
}

func (r *Remote) run(ctx context.Context) (int, error) {
	address, err := r.address(ctx)
	if err != nil {
		return 1, fmt.Errorf("launch: %w", err)
	}
	clients := len(r.Hosts)
	for _, h := range r.Hosts {
		clients += h.Workers
	}
	opened, err := StoreConfig{
		Backend: "tcp", Endpoint: address, ID: r.Config.ID, Secret: r.Secret, Serve: true, Clients: clients,
		Logger: r.Logger,
	}.Open(ctx)
	if err != nil {
		return 1, err
	}
	defer opened.Close()
	if r.Watch != nil {
		var work sync.WaitGroup
		watching, stop := context.WithCancel(ctx)
		work.Go(func() { r.Watch(watching, opened.Store) })
		defer func() { stop(); work.Wait() }()
	}
	ended := make(chan *link)
	for node, h := range r.Hosts {
		if err := r.start(node, h, strings.TrimPrefix(opened.URL, "tcp://"), ended); err != nil {
			r.hangUp()
			for range node {
				<-ended
			}
			return 1, fmt.Errorf("launch: host %s: %w", h.Name, err)
		}
	}
	return r.wait(ctx, ended)
}

// address returns the address that the store listens on.
func (r *Remote) address(ctx context.Context) (string, error) {
	if r.Address != "" {
		return r.Address, nil
	}
	for _, h := range r.Hosts {
		if h.local() {
			continue
		}
		_, name, found := strings.Cut(h.Name, "@")
		if !found {
			name = h.Name
		}
		if strings.Contains(name, ":") {
			name = "[" + name + "]"
		}
		a, err := rendezvous.RouteTo(ctx, name+":22")
		if unknown := (*net.DNSError)(nil); errors.As(err, &unknown) {
			return "", fmt.Errorf("host %s of -H: its address cannot be looked up (%w): "+
				"correct the name, or, if only ssh's configuration knows it, set "+
				"--rdzv-endpoint to the address by which the hosts reach this machine", h.Name, unknown)
		}
		if err != nil {
			return "", fmt.Errorf("%w: set --rdzv-endpoint to the address by which the hosts reach this machine", err)
		}
		if strings.Contains(a.String(), ":") {
			return "[" + a.String() + "]:0", nil
		}
		return a.String() + ":0", nil
	}
	return "127.0.0.1:0", nil
}

func (r *Remote) start(node int, h Host, store string, ended chan<- *link) error {
	c := r.Config
	c.Node, c.Nodes, c.Workers, c.Secret = node, len(r.Hosts), h.Workers, r.Secret.Text()
	c.Store, c.Stdout, c.Stderr, c.Guard, c.Records = nil, nil, nil, nil, ""
	text, err := json.Marshal(order{orderVersion, store, c})
	if err != nil {
		return err
	}
	l := &link{host: h, cmd: r.command(h), send: make(chan []byte, 4), over: make(chan struct{})}
	l.send <- append(text, '\n')
	separate(l.cmd, false)
	var pipes [2]io.ReadCloser
	if l.input, err = l.cmd.StdinPipe(); err == nil {
		if pipes[Stdout], err = l.cmd.StdoutPipe(); err == nil {
			pipes[Stderr], err = l.cmd.StderrPipe()
		}
	}
	if err == nil {
		err = l.cmd.Start()
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.links = append(r.links, l)
	r.mu.Unlock()
	go r.serve(l, pipes, ended)
	return nil
}

// command returns the command that runs the agent on a host. The line for the shell is the same for all hosts
// and contains no secret.
func (r *Remote) command(h Host) *exec.Cmd {
	if h.local() {
		return exec.Command(r.Agent[0], r.Agent[1:]...)
	}
	words := make([]string, len(r.Agent))
	for i, w := range r.Agent {
		words[i] = quote(w)
	}
	args := append(append([]string(nil), r.SSH[1:]...), h.Name, "exec "+strings.Join(words, " "))
	return exec.Command(r.SSH[0], args...)
}

// quote quotes a word for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// serve sends an agent its order and forwards its output, until it ends.
func (r *Remote) serve(l *link, pipes [2]io.ReadCloser, ended chan<- *link) {
	go l.write()
	var work sync.WaitGroup
	for s := Stdout; s <= Stderr; s++ {
		work.Go(func() {
			out := &lines{emit: func(line []byte) {
				if code, ok := bytes.CutPrefix(line, []byte(endedLine)); ok && s == Stdout {
					l.done = true
					l.code, _ = strconv.Atoi(string(code))
					return
				}
				if s == Stderr {
					l.tail.add(line)
				}
				r.screen.line(s, "", line)
			}}
			_, _ = io.Copy(out, pipes[s])
			out.flush()
		})
	}
	work.Wait()
	_ = l.cmd.Wait()
	close(l.over)
	if !l.done {
		l.code = endingOf(l.cmd.ProcessState).code
	}
	ended <- l
}

// write writes to an agent's input, until the agent or its input ends.
func (l *link) write() {
	for {
		select {
		case text := <-l.send:
			if _, err := l.input.Write(text); err != nil {
				return // the agent's exit code gives the reason
			}
		case <-l.over:
			return
		}
	}
}

// hangUp closes the agents' inputs: they kill their workers and exit.
func (r *Remote) hangUp() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.links {
		l.input.Close()
	}
}

// kill ends the processes that still run here: for example, an ssh that cannot connect. The agents' inputs
// are closed already.
func (r *Remote) kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.links {
		select {
		case <-l.over:
		default:
			killGroup(l.cmd.Process.Pid)
		}
	}
}

// wait waits for all agents. When the job has failed, all end by themselves. An agent that ends without
// having carried out its order, such as one that ssh did not reach, ends the job.
func (r *Remote) wait(ctx context.Context, ended <-chan *link) (int, error) {
	var late, tooLate <-chan time.Time
	var failed *link
	hangUp := func() {
		r.hangUp()
		late, tooLate = nil, time.After(killedWithin+answerTime)
	}
	done := ctx.Done()
	for running := len(r.Hosts); running > 0; {
		select {
		case l := <-ended:
			running--
			if l.done && l.code == 0 || failed != nil {
				continue
			}
			if failed = l; l.done {
				late = time.After(r.Config.Grace + answerTime + leaveTime)
			} else {
				hangUp()
			}
		case <-late:
			hangUp()
		case <-tooLate:
			r.kill()
		case <-done:
			done = nil
			hangUp()
		}
	}
	switch {
	case failed == nil:
		return 0, nil
	case failed.done:
		return failed.code, nil
	case r.interrupted():
		return codeInterrupted, nil
	}
	last, _ := failed.tail.lines()
	text := strings.Join(last, " / ")
	if failed.code == 127 { // of a shell that found no program
		text += ": install the same lockstep at this path on all hosts"
	}
	return 1, fmt.Errorf("launch: host %s: the agent ended with exit code %d: %s", failed.host.Name, failed.code, text)
}

// endedLine is the line on an agent's standard output when it has carried out its order, before the job's
// exit code. No worker's line is equal to it: these begin with a prefix.
const endedLine = "lockstep agent: the job ended with code "

// Follow is the main function of the agent on a host: it reads its order from input, carries it out and
// returns the exit code. guard is as in [Config]. A goroutine reads the input until its end, and may outlive
// the call.
func Follow(ctx context.Context, input io.Reader, stdout, stderr io.Writer, guard []string,
	logger *slog.Logger,
) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	in := bufio.NewReader(io.LimitReader(input, orderMax))
	o, err := readOrder(in)
	if err != nil {
		return 1, fmt.Errorf("launch: %w", err)
	}
	cfg, opened, err := o.prepare(ctx, logger)
	if err != nil {
		return 1, err
	}
	defer opened.Close()
	cfg.Stdout, cfg.Stderr, cfg.Guard = stdout, stderr, guard
	agent, err := New(cfg)
	if err != nil {
		return 1, err
	}
	go obey(in, agent, cancel)
	outcome, err := agent.Run(ctx)
	if err != nil && outcome.Report == nil {
		return outcome.Code, err
	}
	if err != nil {
		fmt.Fprintf(stderr, "lockstep: %v\n", err)
	}
	fmt.Fprintf(stdout, "%s%d\n", endedLine, outcome.Code)
	return outcome.Code, nil
}

// prepare builds an agent's configuration from an order, and opens the store.
func (o *order) prepare(ctx context.Context, logger *slog.Logger) (Config, *JobStore, error) {
	cfg := o.Config
	cfg.Env, cfg.Quiet = append(os.Environ(), cfg.Env...), cfg.Node != 0
	if info, err := os.Stat(cfg.Dir); err != nil || !info.IsDir() {
		return cfg, nil, fmt.Errorf("launch: the working directory of the job, %s, does not exist on this host: "+
			"create it, or start the job in a folder that exists on all hosts", cfg.Dir)
	}
	key, err := secret.Parse(cfg.Secret)
	if err != nil {
		return cfg, nil, fmt.Errorf("launch: %w", err)
	}
	address, err := rendezvous.RouteTo(ctx, o.Store)
	if err != nil {
		return cfg, nil, fmt.Errorf("launch: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.RendezvousTimeout)
	defer cancel()
	opened, err := StoreConfig{Backend: "tcp", Endpoint: o.Store, ID: cfg.ID, Secret: key, Logger: logger}.Open(ctx)
	if err != nil {
		return cfg, nil, err
	}
	cfg.Address, cfg.StoreHolder = address.String(), "the lockstep run that started this"
	cfg.Store, cfg.StoreURL = opened.Store, opened.URL
	return cfg, opened, nil
}

// obey forwards the launcher's signals to the agent, until the launcher has ended.
func obey(in *bufio.Reader, agent *Agent, cancel context.CancelCauseFunc) {
	for {
		line, err := in.ReadString('\n')
		switch {
		case err != nil:
			cancel(errors.New("the launcher has ended"))
			return
		case line == "TERM\n":
			agent.Interrupt(sigTerminate)
		default:
			agent.Interrupt(sigInterrupt)
		}
	}
}

func readOrder(in *bufio.Reader) (*order, error) {
	text, err := in.ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("reading the order from the launcher: %w", err)
	}
	o := &order{}
	if err := json.Unmarshal(text, o); err != nil {
		return nil, fmt.Errorf("reading the order from the launcher: %w", err)
	}
	if o.Version != orderVersion {
		return nil, fmt.Errorf("the launcher has protocol version %d, this host's lockstep version %d: install the same "+
			"one everywhere", o.Version, orderVersion)
	}
	return o, nil
}
