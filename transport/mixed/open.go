package mixed

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// Exchange gives every process's card to every process: it is called once, with this process's, and returns all, this one
// among them, in the same order everywhere.
type Exchange func(ctx context.Context, mine []byte) (all [][]byte, err error)

// Config says which group a process joins, and how.
type Config struct {
	// Ranks are this process's, in increasing order.
	Ranks []int
	// Size is the number of ranks of the group.
	Size int
	// Epoch is the membership of the job. Processes of another one are refused.
	Epoch uint32
	// Exchange tells the processes of each other. It is not needed, and not called, if this process has all ranks.
	Exchange Exchange
	// TCP sets up the connections between processes, and names the job.
	TCP tcp.Config
	// Token is a secret of all processes, by which those of one host prove to each other that they belong together. Empty:
	// none is asked for.
	Token []byte
	// NoSharedMemory keeps this process's ranks from sharing memory with those of other processes.
	NoSharedMemory bool
	// Apart keeps processes apart that give different texts: they are taken for being on different hosts.
	Apart string
	// Advertise is the host that others dial, if it is not what TCP.Listen says: needed if that is a wildcard.
	Advertise string
}

// card says where a process is.
type card struct {
	Ranks []int  `json:"ranks"`
	Size  int    `json:"size"`
	Epoch uint32 `json:"epoch"`
	Job   string `json:"job"`
	Addr  string `json:"addr"`  // of its node
	Nonce string `json:"nonce"` // of this Open alone: addresses are used again
	Host  string `json:"host"`  // shm.HostID: equal says that it is one host, empty that there is no telling
	Share bool   `json:"share"` // memory, with the others there
	TLS   bool   `json:"tls"`   // between hosts
	Proof bool   `json:"proof"` // of new connections
	Apart string `json:"apart,omitempty"`
}

// cardMax bounds a card, in bytes.
const cardMax = 1 << 20

// Open joins the group and returns the ends of this process's ranks, in the order of Config.Ranks. It waits for the other
// processes until ctx ends. All that it opens ends with the last of the ends, and of those split from them.
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
	l, err := cfg.meet(ctx, node)
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
			return fmt.Errorf("mixed: ranks %v of a group of %d: want increasing numbers from 0 to %d", c.Ranks, c.Size, c.Size-1)
		}
	}
	if c.Exchange == nil && len(c.Ranks) < c.Size {
		return errors.New("mixed: Config.Exchange is nil: the processes need a way to learn of each other")
	}
	return nil
}

// meet exchanges cards and returns what they say.
func (c *Config) meet(ctx context.Context, node *tcp.Node) (*layout, error) {
	mine := card{
		Ranks: c.Ranks, Size: c.Size, Epoch: c.Epoch, Job: c.TCP.Job, Addr: node.Addr(), Nonce: rand.Text(), Apart: c.Apart,
		Host: shm.HostID(),
	}
	mine.TLS, mine.Proof = c.TCP.TLS != nil, c.TCP.Authenticate != nil
	mine.Share = !c.NoSharedMemory && mine.Host != ""
	if c.Advertise != "" {
		_, port, err := net.SplitHostPort(mine.Addr)
		if err != nil {
			return nil, fmt.Errorf("mixed: own address: %w", err)
		}
		mine.Addr = net.JoinHostPort(c.Advertise, port)
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, fmt.Errorf("mixed: own card: %w", err)
	}
	all, err := c.Exchange(ctx, text)
	if err != nil {
		return nil, fmt.Errorf("mixed: learning of the other processes: %w", err)
	}
	cards := make([]card, len(all))
	for i, text := range all {
		if cards[i], err = parseCard(text); err != nil {
			return nil, fmt.Errorf("mixed: card of process %d: %w", i, err)
		}
	}
	return newLayout(&mine, cards)
}

// parseCard reads a card. What it says of ranks is checked by newLayout.
func parseCard(text []byte) (card, error) {
	var c card
	if len(text) > cardMax {
		return c, fmt.Errorf("%d bytes, want at most %d", len(text), cardMax)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return c, err
	}
	if _, _, err := net.SplitHostPort(c.Addr); err != nil {
		return c, err
	}
	return c, nil
}

// layout says where all ranks are.
type layout struct {
	addrs   []string // by rank
	nonces  []string // by rank
	places  []transport.Place
	domains [][]int // the ranks of each domain, in order
	host    []int   // the ranks that are said to be on this process's host, if that can be proven
}

// newLayout reads the cards of all processes, of which mine is one.
func newLayout(mine *card, cards []card) (*layout, error) {
	l := &layout{addrs: make([]string, mine.Size), nonces: make([]string, mine.Size), places: make([]transport.Place, mine.Size)}
	host := numbering{}
	sharers := map[string]int{} // ranks by host
	for p := range cards {
		c := &cards[p]
		switch {
		case c.Job != mine.Job:
			return nil, fmt.Errorf("mixed: the process at %s is of job %q, this one of job %q", c.Addr, c.Job, mine.Job)
		case c.Epoch != mine.Epoch || c.Size != mine.Size:
			return nil, fmt.Errorf("mixed: the process at %s is in epoch %d with %d ranks, this one in epoch %d with %d", c.Addr, c.Epoch, c.Size, mine.Epoch, mine.Size)
		case c.Proof != mine.Proof:
			return nil, fmt.Errorf("mixed: the process at %s %s, this one %s: all need the same secret", c.Addr, asked(c.Proof), asked(mine.Proof))
		case c.TLS != mine.TLS:
			return nil, fmt.Errorf("mixed: the process at %s %s, this one %s: all must agree on that", c.Addr, encrypted(c.TLS), encrypted(mine.TLS))
		}
		name := c.host()
		if c.Share {
			sharers[name] += len(c.Ranks)
		}
		for _, r := range c.Ranks {
			switch {
			case r < 0 || r >= mine.Size:
				return nil, fmt.Errorf("mixed: the process at %s says that it has rank %d of %d", c.Addr, r, mine.Size)
			case l.addrs[r] != "":
				return nil, fmt.Errorf("mixed: the processes at %s and %s both say that they have rank %d", l.addrs[r], c.Addr, r)
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
			return nil, fmt.Errorf("mixed: this process's card is not among those of all processes: rank %d is at %s", r, l.addrs[r])
		}
	}
	domain := numbering{}
	for r := range l.places {
		p := &l.places[r]
		c := &cards[p.Worker]
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
		return "asks others for a proof that they have its secret"
	}
	return "has no secret"
}

func encrypted(tls bool) string {
	if tls {
		return "encrypts what goes to other hosts"
	}
	return "sends data in plain text"
}

// host returns what tells the card's host from others, if it tells the truth.
func (c *card) host() string {
	if c.Host != "" {
		return c.Host + " " + c.Apart
	}
	host, _, _ := net.SplitHostPort(c.Addr)
	return host + " " + c.Apart
}

// numbering gives names numbers, from 0 on.
type numbering map[string]int

func (n numbering) of(name string) int {
	if _, ok := n[name]; !ok {
		n[name] = len(n)
	}
	return n[name]
}

// alone reports whether every rank is a domain of its own.
func (l *layout) alone() bool { return len(l.domains) == len(l.addrs) }

// open makes the ends of this process's ranks.
func (l *layout) open(ctx context.Context, cfg *Config, node *tcp.Node) (ends []transport.Endpoint, err error) {
	var near, far []transport.Endpoint
	defer func() {
		if err != nil {
			closeAll(near)
			closeAll(far)
		}
	}()
	if !l.alone() {
		if near, err = l.near(ctx, cfg); err != nil {
			return nil, err
		}
	}
	if len(l.domains) == 1 {
		return near, nil
	}
	group := tcp.GroupConfig{Epoch: cfg.Epoch, Addrs: l.addrs, Local: cfg.Ranks}
	if group.SameHost, err = l.proven(ctx, cfg); err != nil {
		return nil, err
	}
	if far, err = node.Group(ctx, group); err != nil {
		return nil, err
	}
	if near == nil {
		return far, nil
	}
	g := newGroup(l.places)
	for i, r := range cfg.Ranks {
		ends = append(ends, newEnd(g, r, near[i], far[i]))
	}
	return ends, nil
}

// near makes the ends of this process's ranks in their domain.
func (l *layout) near(ctx context.Context, cfg *Config) ([]transport.Endpoint, error) {
	domain := l.domain(cfg)
	if len(domain) == len(cfg.Ranks) {
		return mem.New(len(domain)), nil
	}
	var mine []int
	for _, r := range cfg.Ranks {
		mine = append(mine, slices.Index(domain, r))
	}
	ends, err := shm.Open(ctx, l.meeting(cfg, "", domain[0], len(domain), mine))
	if err != nil {
		return nil, fmt.Errorf("mixed: sharing memory among ranks %v: %w", domain, err)
	}
	return ends, nil
}

// domain returns the ranks of this process's domain.
func (l *layout) domain(cfg *Config) []int { return l.domains[l.places[cfg.Ranks[0]].Domain] }

// meeting says how processes of this host meet, at a name that only those know who have the card of the process of first.
func (l *layout) meeting(cfg *Config, what string, first, size int, ranks []int) shm.Config {
	return shm.Config{
		Name: fmt.Sprintf("%s/%d/%s%s", cfg.TCP.Job, cfg.Epoch, l.nonces[first], what),
		Job:  cfg.TCP.Job, Epoch: cfg.Epoch, Size: size, Ranks: ranks, Token: cfg.Token,
	}
}

// proven returns the ranks that are on this host for certain: their processes have met this one at a unix socket, where the
// system says who is at the other end, and have proven that they know the token. Those who share memory have done that for
// it; others do it now, if anything depends on it. What cards say is no proof.
func (l *layout) proven(ctx context.Context, cfg *Config) ([]int, error) {
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
	meeting := l.meeting(cfg, "/host", l.host[0], len(workers), []int{me})
	meeting.ArenaBytes = 1 // nothing is shared
	ends, err := shm.Open(ctx, meeting)
	if err != nil {
		return nil, fmt.Errorf("mixed: meeting the processes of ranks %v, which say that they are on this host: %w", l.host, err)
	}
	closeAll(ends)
	return l.host, nil
}

func closeAll(ends []transport.Endpoint) {
	for _, e := range ends {
		e.Close()
	}
}
