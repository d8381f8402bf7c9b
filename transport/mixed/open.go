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
	// Ranks holds the ranks of this process, in increasing order.
	Ranks []int
	// Size is the number of ranks of the group.
	Size int
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

// registration holds the location and the settings of a process.
type registration struct {
	Ranks []int  `json:"ranks"`
	Size  int    `json:"size"`
	Epoch uint32 `json:"epoch"`
	Job   string `json:"job"`
	Addr  string `json:"addr"`  // address of its node
	Nonce string `json:"nonce"` // unique to this Open, since addresses are reused
	Host  string `json:"host"`  // shm.HostID: equal on one host; empty if unknown
	Share bool   `json:"share"` // it shares memory with the others on its host
	TLS   bool   `json:"tls"`   // it encrypts connections between hosts
	Proof bool   `json:"proof"` // it authenticates new connections
	Apart string `json:"apart,omitempty"`
	// Processors is how many processors the processes of this host share, as far as this one knows; 0: unknown, or it
	// shares memory with them, and so no frames.
	Processors int `json:"processors,omitempty"`
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
	node, err := tcp.Listen(cfg.TCP)
	if err != nil {
		return nil, err
	}
	l, err := cfg.exchange(ctx, node)
	if err == nil {
		var ends []transport.Endpoint
		if ends, err = l.open(ctx, &cfg, node); err == nil {
			node.CloseWithGroups()
			return ends, nil
		}
	}
	node.Close()
	return nil, err
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

// exchange exchanges the registrations and returns the layout of the group.
func (c *Config) exchange(ctx context.Context, node *tcp.Node) (*layout, error) {
	mine := registration{
		Ranks: c.Ranks, Size: c.Size, Epoch: c.Epoch, Job: c.TCP.Job, Addr: node.Addr(), Nonce: rand.Text(), Apart: c.Apart,
		Host: shm.HostID(),
	}
	mine.TLS, mine.Proof = c.TCP.TLS != nil, c.TCP.Authenticate != nil
	mine.Share = !c.NoSharedMemory && mine.Host != ""
	if !mine.Share {
		mine.Processors = affinity.Together()
	}
	if c.Advertise != "" {
		_, port, err := net.SplitHostPort(mine.Addr)
		if err != nil {
			return nil, fmt.Errorf("mixed: own address: %w", err)
		}
		mine.Addr = net.JoinHostPort(c.Advertise, port)
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, fmt.Errorf("mixed: own registration: %w", err)
	}
	all, err := c.Exchange(ctx, text)
	if err != nil {
		return nil, fmt.Errorf("mixed: exchanging registrations: %w", err)
	}
	registrations := make([]registration, len(all))
	for i, text := range all {
		if registrations[i], err = parseRegistration(text); err != nil {
			return nil, fmt.Errorf("mixed: registration of process %d: %w", i, err)
		}
	}
	return newLayout(&mine, registrations)
}

// parseRegistration decodes a registration. newLayout checks its ranks.
func parseRegistration(text []byte) (registration, error) {
	var c registration
	if len(text) > registrationMax {
		return c, fmt.Errorf("%d bytes, want at most %d", len(text), registrationMax)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return c, err
	}
	if _, _, err := net.SplitHostPort(c.Addr); err != nil {
		return c, err
	}
	return c, nil
}

// layout holds the locations of all ranks.
type layout struct {
	addrs   []string // by rank
	nonces  []string // by rank
	places  []transport.Place
	domains [][]int // the ranks of each domain, in increasing order
	host    []int   // the ranks that claim to be on this process's host, if that can be verified
	// processors of the host that has the fewest; 0: unknown
	processors int
}

// newLayout checks the registrations of all processes, which include mine, and returns the layout.
func newLayout(mine *registration, registrations []registration) (*layout, error) {
	l := &layout{
		addrs: make([]string, mine.Size), nonces: make([]string, mine.Size),
		places: make([]transport.Place, mine.Size),
	}
	host := numbering{}
	sharers := map[string]int{}    // number of ranks that share memory, by host
	processors := map[string]int{} // by host
	for p := range registrations {
		c := &registrations[p]
		switch {
		case c.Job != mine.Job:
			return nil, fmt.Errorf("mixed: the process at %s belongs to job %q, this one to job %q", c.Addr, c.Job, mine.Job)
		case c.Epoch != mine.Epoch || c.Size != mine.Size:
			return nil, fmt.Errorf("mixed: the process at %s is in epoch %d with %d ranks, this one in epoch %d with %d",
				c.Addr, c.Epoch, c.Size, mine.Epoch, mine.Size)
		case c.Proof != mine.Proof:
			return nil, fmt.Errorf("mixed: the process at %s %s, this one %s: all need the same secret", c.Addr, asked(c.Proof),
				asked(mine.Proof))
		case c.TLS != mine.TLS:
			return nil, fmt.Errorf("mixed: the process at %s %s, this one %s: all must agree on that", c.Addr, encrypted(c.TLS),
				encrypted(mine.TLS))
		}
		name := c.host()
		if c.Share {
			sharers[name] += len(c.Ranks)
		}
		// a process that started early did not know the processors of those that were bound to others later
		processors[name] = max(processors[name], c.Processors)
		for _, r := range c.Ranks {
			switch {
			case r < 0 || r >= mine.Size:
				return nil, fmt.Errorf("mixed: the process at %s claims rank %d of %d", c.Addr, r, mine.Size)
			case l.addrs[r] != "":
				return nil, fmt.Errorf("mixed: the processes at %s and %s both claim rank %d", l.addrs[r], c.Addr, r)
			}
			l.addrs[r], l.nonces[r] = c.Addr, c.Nonce
			l.places[r] = transport.Place{Worker: p, Host: host.of(name)}
		}
	}
	for r, addr := range l.addrs {
		if addr == "" {
			return nil, fmt.Errorf("mixed: no process has rank %d of %d", r, mine.Size)
		}
	}
	for _, r := range mine.Ranks {
		if l.addrs[r] != mine.Addr {
			return nil, fmt.Errorf("mixed: the registration of this process is missing among those of all processes: "+
				"rank %d is at %s", r, l.addrs[r])
		}
	}
	l.processors = slices.Min(slices.Collect(maps.Values(processors)))
	domain := numbering{}
	for r := range l.places {
		p := &l.places[r]
		c := &registrations[p.Worker]
		name := c.host()
		if mine.Host != "" && name == mine.host() {
			l.host = append(l.host, r)
		}
		if c.Share && c.Host != "" && sharers[name] <= shm.SizeMax {
			p.Domain = domain.of("host " + name)
		} else {
			p.Domain = domain.of("process " + c.Addr)
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

// host returns a name that identifies the host of the process, if the registration is truthful.
func (c *registration) host() string {
	if c.Host != "" {
		return c.Host + " " + c.Apart
	}
	host, _, _ := net.SplitHostPort(c.Addr)
	return host + " " + c.Apart
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

// shmConfig returns the configuration with which processes of this host open shared memory. Only processes that have
// the registration of the process of rank first know its name.
func (l *layout) shmConfig(cfg *Config, what string, first, size int, ranks []int) shm.Config {
	return shm.Config{
		Name: fmt.Sprintf("%s/%d/%s%s", cfg.TCP.Job, cfg.Epoch, l.nonces[first], what),
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
