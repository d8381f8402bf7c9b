package collective

import (
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// team is what the local ranks of one communicator over a transport share.
type team struct {
	cfg       *Config // set when the first rank joins
	id        uint64  // in headers; the same on all ranks
	size      int
	local     int             // number of local ranks
	executors *executor.Group // the local ranks: each Caller is a planBackend

	blocking sync.Mutex // guards their fields blocked

	// closed when a rank has left a call that all ranks had entered: no frame of that call can be received
	broken   chan struct{}
	breaking sync.Once

	finding sync.Once
	memory  string // the transport of the domains' memory, if there are several domains; see whereabouts

	mu       sync.Mutex
	domains  map[int][]int    // the ranks of the local ranks' domains, by their numbers
	parts    map[uint64]*team // being split off: not all local ranks have arrived yet
	taken    int              // of a team that is split off: how many have; guarded by its parent's mu
	rebuilt  *team            // the team of the same ranks in the next epoch, made by the latest Rebuild
	rebuilds uint64           // how many teams Rebuild has made
}

func newTeam(id uint64, size, local int) *team {
	t := &team{id: id, size: size, local: local, broken: make(chan struct{})}
	t.domains, t.parts = map[int][]int{}, map[uint64]*team{}
	t.executors = executor.NewGroup(local)
	return t
}

// breakOff ends waits of local ranks that nothing else would end, because a rank that they need leaves its
// call.
func (t *team) breakOff() { t.breaking.Do(func() { close(t.broken) }) }

// configure sets the configuration, when the first local rank joins.
func (t *team) configure(front FrontEnd) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cfg == nil {
		t.cfg = front.Config()
	}
}

// block records the call in which a local rank blocks. It returns how the call conflicts with one in which another
// local rank has blocked, or nil.
func (t *team) block(own *localRank, begun *fingerprint.Numbers) (c *fault.Conflict) {
	t.blocking.Lock()
	defer t.blocking.Unlock()
	own.blocked.Block(own.calls.latest, begun)
	for _, x := range t.executors.Ranks() {
		if c = own.blocked.Conflict(&x.Caller.(*planBackend).blocked); c != nil {
			return c
		}
	}
	return nil
}

// callsOf returns the calls of a local rank; nil: the rank is in another process.
func (t *team) callsOf(rank int) *recent {
	for _, x := range t.executors.Ranks() {
		if b := x.Caller.(*planBackend); b.rank == rank {
			return &b.calls
		}
	}
	return nil
}

// callOf returns the call of a local rank with this header; ok is false if the rank is in another process or
// in another call. The rank is waiting for its frame to be received, so the call does not change meanwhile.
func (t *team) callOf(rank int, h transport.Header) (c fingerprint.Call, ok bool) {
	if calls := t.callsOf(rank); calls != nil {
		return calls.find(h)
	}
	return c, false
}

// child returns the team of the communicator of these ranks that is split off under id. The first local rank to
// arrive makes it.
func (t *team) child(id uint64, ranks []int) *team {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.parts[id]
	if s == nil {
		local := 0
		for _, x := range t.executors.Ranks() {
			if slices.Contains(ranks, x.Caller.(*planBackend).rank) {
				local++
			}
		}
		s = newTeam(id, len(ranks), local)
		t.parts[id] = s
	}
	if s.taken++; s.taken == s.local {
		delete(t.parts, id)
	}
	return s
}

// next returns the team of the same ranks in the next epoch, and the rank's endpoint, which split makes under an id.
// The first local rank makes the team, with which every Rebuild begins; so no team is left from a Rebuild that has
// failed. That Rebuild has used up its id if the first rank had an endpoint.
func (t *team) next(b *planBackend, split func(id uint64) (transport.Endpoint, error)) (
	*team, transport.Endpoint, error,
) {
	t.mu.Lock()
	defer t.mu.Unlock()
	first := b.exec == t.executors.Ranks()[0]
	attempt := t.rebuilds
	if !first {
		attempt--
	}
	id := fingerprint.Hash(t.id, uint64(t.cfg.Epoch+1)|1<<63)
	end, err := split(fingerprint.Hash(id, attempt))
	if err != nil {
		return nil, nil, err
	}
	if first {
		t.rebuilt = newTeam(fingerprint.HashString(fingerprint.Seed, t.cfg.Name), t.size, t.local)
		t.rebuilds++
	}
	return t.rebuilt, end, nil
}
