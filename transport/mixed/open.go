package mixed

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/transport/composite"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// Exchange distributes the registrations of all processes. It is called once, with that of this process, and returns
// all, this one included, in the same order on every process.
type Exchange func(ctx context.Context, mine []byte) (all [][]byte, err error)

// Config describes the group that a process joins, and the transports.
type Config struct {
	// Ranks holds the ranks of this process, in increasing order, and Size the number of ranks of the group. [Listen]
	// does not use them, nor Exchange.
	Ranks []int
	Size  int
	// Epoch is the epoch of the job. Processes of another epoch are refused.
	Epoch uint32
	// Exchange distributes the registrations. It may be nil, and is not called, if this process has all ranks.
	Exchange Exchange
	// TCP configures the connections between processes, and names the job. Its Authenticate is used to set up shared
	// memory too.
	TCP tcp.Config
	// NoSharedMemory disables shared memory between this process and others.
	NoSharedMemory bool
	// Apart makes processes with different values count as being on different hosts.
	Apart string
	// Advertise is the host that others dial. Default: that of TCP.Listen. It is required if that is a wildcard.
	Advertise string
}

// Settings are what the processes of a group must know about each other, besides their ranks and addresses. Those of
// the processes of a host are mostly equal.
type Settings struct {
	Host  string `json:"host"`            // shm.HostID: equal on one host; empty if unknown
	Apart string `json:"apart,omitempty"` // Config.Apart
	Share bool   `json:"share"`           // it shares memory with the others on its host
	TLS   bool   `json:"tls"`             // it encrypts connections between hosts
	Proof bool   `json:"proof"`           // it authenticates new connections
	// Processors is how many processors the processes of this host share, as far as this one knows; 0: unknown, or it
	// shares memory with them, and so no frames.
	Processors int `json:"processors,omitempty"`
}

// Process is a process of a group.
type Process struct {
	Ranks    []int    `json:"ranks"` // in increasing order
	Addr     string   `json:"addr"`  // "host:port", at which it listens
	Settings Settings `json:"settings"`
}

// Group is a group as all its processes know it.
type Group struct {
	Size      int       // number of ranks
	Processes []Process // in the same order on every process
	Self      int       // the index of this process
	// Nonce is unique to the group, and known to its processes only: addresses are reused.
	Nonce string
}

// registration is what the processes of [Open] exchange.
type registration struct {
	Process
	Size  int    `json:"size"`
	Epoch uint32 `json:"epoch"`
	Job   string `json:"job"`
	Nonce string `json:"nonce"` // the first one's is that of the group
}

// registrationMax bounds the size of a registration, in bytes.
const registrationMax = 1 << 20

// Open joins the group and returns the endpoints of this process's ranks, in the order of Config.Ranks. It waits for
// the other processes until ctx ends. The caller must close every endpoint. Closing the last one, including those split
// from them, releases all resources.
func Open(ctx context.Context, cfg Config) ([]transport.Endpoint, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if len(cfg.Ranks) == cfg.Size {
		return mem.New(cfg.Size), nil
	}
	l, err := Listen(cfg)
	if err != nil {
		return nil, err
	}
	g, err := l.exchange(ctx)
	if err != nil {
		l.Close()
		return nil, err
	}
	return l.Connect(ctx, g)
}

func (c *Config) check() error {
	if c.Size < 1 || len(c.Ranks) == 0 {
		return fmt.Errorf("mixed: ranks %v of a group of %d: want at least one", c.Ranks, c.Size)
	}
	for i, r := range c.Ranks {
		if r < 0 || r >= c.Size || i > 0 && r <= c.Ranks[i-1] {
			return fmt.Errorf("mixed: ranks %v of a group of %d: want increasing numbers from 0 to %d", c.Ranks, c.Size,
				c.Size-1)
		}
	}
	if c.Exchange == nil && len(c.Ranks) < c.Size {
		return errors.New("mixed: Config.Exchange is nil: it is needed to distribute the registrations of several processes")
	}
	return nil
}

// Listener is a process that listens for the others of its group before it knows them. A rendezvous passes its address
// and settings to all others.
type Listener struct {
	cfg      Config
	node     *tcp.Node
	addr     string
	settings Settings
}

// Listen opens the port of a process. The caller must call Connect or Close.
func Listen(cfg Config) (*Listener, error) {
	node, err := tcp.Listen(cfg.TCP)
	if err != nil {
		return nil, err
	}
	l := &Listener{cfg: cfg, node: node, addr: node.Addr(), settings: Settings{
		Host: shm.HostID(), Apart: cfg.Apart, TLS: cfg.TCP.TLS != nil, Proof: cfg.TCP.Authenticate != nil,
	}}
	l.settings.Share = !cfg.NoSharedMemory && l.settings.Host != ""
	if !l.settings.Share {
		l.settings.Processors = affinity.Together()
	}
	if cfg.Advertise != "" {
		_, port, err := net.SplitHostPort(l.addr)
		if err != nil {
			node.Close()
			return nil, fmt.Errorf("mixed: own address: %w", err)
		}
		l.addr = net.JoinHostPort(cfg.Advertise, port)
	}
	return l, nil
}

// Addr returns the address that others dial.
func (l *Listener) Addr() string { return l.addr }

// Settings returns what others must know about this process.
func (l *Listener) Settings() Settings { return l.settings }

// Close closes the port, without having connected.
func (l *Listener) Close() { l.node.Close() }

// Connect joins the group and returns the endpoints of this process's ranks, as [Open] does. It closes the port if it
// fails.
func (l *Listener) Connect(ctx context.Context, g Group) ([]transport.Endpoint, error) {
	at, err := newLayout(&g)
	if err == nil {
		l.cfg.Ranks = g.Processes[g.Self].Ranks
		var ends []transport.Endpoint
		if ends, err = at.open(ctx, &l.cfg, l.node); err == nil {
			l.node.CloseWithGroups()
			return ends, nil
		}
	}
	l.Close()
	return nil, err
}

// exchange exchanges the registrations and returns the group.
func (l *Listener) exchange(ctx context.Context) (g Group, err error) {
	mine := registration{
		Process{l.cfg.Ranks, l.addr, l.settings}, l.cfg.Size, l.cfg.Epoch, l.cfg.TCP.Job, rand.Text(),
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return g, fmt.Errorf("mixed: own registration: %w", err)
	}
	all, err := l.cfg.Exchange(ctx, text)
	if err != nil {
		return g, fmt.Errorf("mixed: exchanging registrations: %w", err)
	}
	g = Group{Size: mine.Size, Self: -1}
	for i, text := range all {
		c, err := parseRegistration(text)
		switch {
		case err != nil:
			return g, fmt.Errorf("mixed: registration of process %d: %w", i, err)
		case c.Job != mine.Job:
			return g, fmt.Errorf("mixed: the process at %s belongs to job %q, this one to job %q", c.Addr, c.Job, mine.Job)
		case c.Epoch != mine.Epoch || c.Size != mine.Size:
			return g, fmt.Errorf("mixed: the process at %s is in epoch %d with %d ranks, this one in epoch %d with %d",
				c.Addr, c.Epoch, c.Size, mine.Epoch, mine.Size)
		case c.Nonce == mine.Nonce:
			g.Self = i
		}
		if i == 0 {
			g.Nonce = c.Nonce
		}
		g.Processes = append(g.Processes, c.Process)
	}
	if g.Self < 0 {
		return g, fmt.Errorf("mixed: the registration of this process is missing among those of all %d processes", len(all))
	}
	return g, nil
}

// parseRegistration decodes a registration. newLayout checks its process.
func parseRegistration(text []byte) (registration, error) {
	var c registration
	if len(text) > registrationMax {
		return c, fmt.Errorf("%d bytes, want at most %d", len(text), registrationMax)
	}
	return c, json.Unmarshal(text, &c)
}

// layout holds the locations of all ranks.
type layout struct {
	nonce   string
	addrs   []string // by rank
	places  []transport.Place
	domains [][]int // the ranks of each domain, in increasing order
	host    []int   // the ranks that claim to be on this process's host, if that can be verified
	// processors of the host that has the fewest; 0: unknown
	processors int
}

// newLayout checks the processes of a group and returns the layout.
func newLayout(g *Group) (*layout, error) {
	l := &layout{nonce: g.Nonce, addrs: make([]string, g.Size), places: make([]transport.Place, g.Size)}
	mine := &g.Processes[g.Self]
	host := numbering{}
	sharers := map[string]int{}    // number of ranks that share memory, by host
	processors := map[string]int{} // by host
	for i := range g.Processes {
		p := &g.Processes[i]
		c := &p.Settings
		if _, _, err := net.SplitHostPort(p.Addr); err != nil {
			return nil, fmt.Errorf("mixed: the address of process %d: %w", i, err)
		}
		switch {
		case c.Proof != mine.Settings.Proof:
			return nil, fmt.Errorf("mixed: the process at %s %s, this one %s: all need the same secret", p.Addr, asked(c.Proof),
				asked(mine.Settings.Proof))
		case c.TLS != mine.Settings.TLS:
			return nil, fmt.Errorf("mixed: the process at %s %s, this one %s: all must agree on that", p.Addr, encrypted(c.TLS),
				encrypted(mine.Settings.TLS))
		}
		name := p.host()
		if c.Share {
			sharers[name] += len(p.Ranks)
		}
		// a process that started early did not know the processors of those that were bound to others later
		processors[name] = max(processors[name], c.Processors)
		for _, r := range p.Ranks {
			switch {
			case r < 0 || r >= g.Size:
				return nil, fmt.Errorf("mixed: the process at %s claims rank %d of %d", p.Addr, r, g.Size)
			case l.addrs[r] != "":
				return nil, fmt.Errorf("mixed: the processes at %s and %s both claim rank %d", l.addrs[r], p.Addr, r)
			}
			l.addrs[r] = p.Addr
			l.places[r] = transport.Place{Worker: i, Host: host.of(name)}
		}
	}
	for r, addr := range l.addrs {
		if addr == "" {
			return nil, fmt.Errorf("mixed: no process has rank %d of %d", r, g.Size)
		}
	}
	l.processors = slices.Min(slices.Collect(maps.Values(processors)))
	domain := numbering{}
	for r := range l.places {
		at := &l.places[r]
		p := &g.Processes[at.Worker]
		name := p.host()
		if mine.Settings.Host != "" && name == mine.host() {
			l.host = append(l.host, r)
		}
		if p.Settings.Share && p.Settings.Host != "" && sharers[name] <= shm.SizeMax {
			at.Domain = domain.of("host " + name)
		} else {
			at.Domain = domain.of("process " + p.Addr)
		}
	}
	l.domains = make([][]int, len(domain))
	for r, p := range l.places {
		l.domains[p.Domain] = append(l.domains[p.Domain], r)
	}
	return l, nil
}

func asked(proof bool) string {
	if proof {
		return "requires authentication by a secret"
	}
	return "has no secret"
}

func encrypted(tls bool) string {
	if tls {
		return "encrypts connections to other hosts"
	}
	return "sends data in plain text"
}

// host returns a name that identifies the host of the process, if its settings are truthful.
func (p *Process) host() string {
	if p.Settings.Host != "" {
		return p.Settings.Host + " " + p.Settings.Apart
	}
	host, _, _ := net.SplitHostPort(p.Addr)
	return host + " " + p.Settings.Apart
}

// numbering numbers names, from 0.
type numbering map[string]int

func (n numbering) of(name string) int {
	if _, ok := n[name]; !ok {
		n[name] = len(n)
	}
	return n[name]
}

// noSharing reports whether every domain has a single rank.
func (l *layout) noSharing() bool { return len(l.domains) == len(l.addrs) }

// open creates the endpoints of this process's ranks.
func (l *layout) open(ctx context.Context, cfg *Config, node *tcp.Node) (ends []transport.Endpoint, err error) {
	var near, far []transport.Endpoint
	defer func() {
		if err != nil {
			closeAll(near)
			closeAll(far)
		}
	}()
	if !l.noSharing() {
		if near, err = l.near(ctx, cfg); err != nil {
			return nil, err
		}
	}
	if len(l.domains) == 1 {
		return near, nil
	}
	group := tcp.GroupConfig{Epoch: cfg.Epoch, Addrs: l.addrs, Local: cfg.Ranks, Processors: l.processors}
	if group.SameHost, err = l.verifyHost(ctx, cfg); err != nil {
		return nil, err
	}
	if far, err = node.Group(ctx, group); err != nil {
		return nil, err
	}
	if near == nil {
		return far, nil
	}
	g := composite.NewGroup(l.places)
	for i, r := range cfg.Ranks {
		ends = append(ends, g.Join(r, near[i], far[i]))
	}
	return ends, nil
}

// near creates the endpoints of this process's ranks in their domain.
func (l *layout) near(ctx context.Context, cfg *Config) ([]transport.Endpoint, error) {
	domain := l.domain(cfg)
	if len(domain) == len(cfg.Ranks) {
		return mem.New(len(domain)), nil
	}
	var mine []int
	for _, r := range cfg.Ranks {
		mine = append(mine, slices.Index(domain, r))
	}
	ends, err := shm.Open(ctx, l.shmConfig(cfg, "", domain[0], len(domain), mine))
	if err != nil {
		return nil, fmt.Errorf("mixed: sharing memory among ranks %v: %w", domain, err)
	}
	return ends, nil
}

// domain returns the ranks of this process's domain.
func (l *layout) domain(cfg *Config) []int { return l.domains[l.places[cfg.Ranks[0]].Domain] }

// shmConfig returns the configuration with which processes of this host open shared memory. Only processes of the group
// know its name.
func (l *layout) shmConfig(cfg *Config, what string, first, size int, ranks []int) shm.Config {
	return shm.Config{
		Name: fmt.Sprintf("%s/%d/%s/%d%s", cfg.TCP.Job, cfg.Epoch, l.nonce, first, what),
		Job:  cfg.TCP.Job, Epoch: cfg.Epoch, Size: size, Ranks: ranks,
		Authenticate: cfg.TCP.Authenticate,
	}
}

// verifyHost returns the ranks that are verified to be on this host: their processes have connected with this one by a
// unix socket, where the system identifies the peer, and both have authenticated each other (Config.TCP.Authenticate).
// Processes that share memory have done so before; others do it now, if it is needed. Registrations are not trusted for
// this.
func (l *layout) verifyHost(ctx context.Context, cfg *Config) ([]int, error) {
	if cfg.TCP.TLS == nil || cfg.TCP.Authenticate == nil || len(l.host) <= len(cfg.Ranks) {
		return nil, nil
	}
	if len(l.domain(cfg)) == len(l.host) {
		return l.host, nil
	}
	var workers []int
	for _, r := range l.host {
		if w := l.places[r].Worker; !slices.Contains(workers, w) {
			workers = append(workers, w)
		}
	}
	if len(workers) > shm.SizeMax {
		return nil, nil
	}
	me := slices.Index(workers, l.places[cfg.Ranks[0]].Worker)
	config := l.shmConfig(cfg, "/host", l.host[0], len(workers), []int{me})
	config.ArenaBytes = 1 // nothing is shared
	ends, err := shm.Open(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("mixed: verifying that the processes of ranks %v are on this host, as they claim: %w", l.host,
			err)
	}
	closeAll(ends)
	return l.host, nil
}

func closeAll(ends []transport.Endpoint) {
	for _, e := range ends {
		e.Close()
	}
}
