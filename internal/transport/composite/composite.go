// Package composite makes one endpoint of two: the ranks of a domain share memory by an endpoint of that domain, and
// all ranks exchange frames by an endpoint of the whole group.
package composite

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Group is the immutable state that the endpoints of one group share.
type Group struct {
	places  []transport.Place
	domains map[int][]int // the ranks of each domain, in increasing order
	index   []int         // number in its domain, by rank
	staging int           // size of each rank's staging buffer, in bytes; the same in all domains
}

// NewGroup returns a group of ranks at these places. A domain of several ranks uses package mem if they are of one
// worker, and package shm if not.
func NewGroup(places []transport.Place) *Group {
	g := &Group{places: places, domains: map[int][]int{}, index: make([]int, len(places))}
	for r, p := range places {
		g.index[r] = len(g.domains[p.Domain])
		g.domains[p.Domain] = append(g.domains[p.Domain], r)
	}
	g.staging = stagingShared
	for _, d := range g.domains {
		if len(d) > 1 && !slices.ContainsFunc(d, func(r int) bool { return places[r].Worker != places[d[0]].Worker }) {
			g.staging = stagingLocal
		}
	}
	return g
}

// The minimum size of a rank's staging buffer in packages shm and mem.
const (
	stagingShared = 512 << 10
	stagingLocal  = 64 << 10
)

// end is one rank's endpoint. The domain's endpoint uses rank numbers of the domain; end converts them to and from
// those of the group.
type end struct {
	transport.Endpoint     // of all ranks: frames, failures, queries
	transport.SharedMemory // of near
	*Group
	domain  []int
	near    transport.Endpoint // of the domain
	staging []byte             // staging buffer, if the rank is the only one of its domain
	wait    outer              // context of a wait in the domain
}

// outer wraps the caller's context for a wait in the domain. It marks the errors of the caller's context, whose rank
// numbers are not those of the domain.
type outer struct{ context.Context }

type fromOutside struct{ error }

// Park implements [transport.Parker].
func (o *outer) Park(ready <-chan struct{}) error {
	if err := transport.Park(o.Context, ready); err != nil {
		return fromOutside{err}
	}
	return nil
}

// Join returns the endpoint of a rank. near is its endpoint in its domain, whose ranks are numbered in the order of
// those of the group; far is its endpoint in a group of all ranks. The caller closes only the result, which closes
// both.
func (g *Group) Join(rank int, near, far transport.Endpoint) transport.Endpoint {
	e := &end{
		Endpoint: far, SharedMemory: near.Memory(), Group: g, domain: g.domains[g.places[rank].Domain], near: near,
	}
	if len(e.domain) == 1 {
		e.staging = tensor.AlignedBytes(g.staging, tensor.CacheLine)
	}
	return e
}

// Transport returns the names of both transports: "mem+tcp", "shm+tcp".
func (e *end) Transport() string { return e.near.Transport() + "+" + e.Endpoint.Transport() }

// Capabilities describes the memory of the domain, which is not encrypted, and the frames of the whole group.
func (e *end) Capabilities() transport.Capabilities {
	c := e.Endpoint.Capabilities()
	c.Places, c.StagingBytes, c.InlineBytes = e.places, e.Group.staging, 0
	if c.Encrypted != nil {
		c.Encrypted = slices.Clone(c.Encrypted)
		for _, r := range e.domain {
			c.Encrypted[r] = false
		}
	}
	return c
}

// shares reports whether a rank is in the domain of this rank.
func (e *end) shares(rank int) bool { return e.places[rank].Domain == e.places[e.Rank()].Domain }

func (e *end) Fail(reason []byte) {
	e.near.Fail(reason)
	e.Endpoint.Fail(reason)
}

func (e *end) Close() error { return errors.Join(e.near.Close(), e.Endpoint.Close()) }

// mapped converts the rank numbers of a domain's error to those of the group.
func (e *end) mapped(err error) error {
	if err == nil {
		return nil
	}
	if outside := (fromOutside{}); errors.As(err, &outside) {
		return outside.error
	}
	if down := (*transport.PeerDown)(nil); errors.As(err, &down) {
		return &transport.PeerDown{Rank: e.domain[down.Rank], Err: down.Err}
	}
	return err
}

func (e *end) Memory() transport.SharedMemory { return e }

func (e *end) Peer(peer int) *transport.Slot {
	if !e.shares(peer) {
		return nil
	}
	return e.SharedMemory.Peer(e.index[peer])
}

func (e *end) StagingBuffer(rank int) []byte {
	if e.staging != nil {
		return e.staging
	}
	return e.SharedMemory.StagingBuffer(e.index[rank])[:e.Group.staging:e.Group.staging]
}

// Inline returns nil: all ranks of a group decide alike where the data of a call is, and those of other domains have no
// such memory.
func (e *end) Inline(int) []byte { return nil }

func (e *end) Await(ctx context.Context, rank, flag int) error {
	if rank >= 0 {
		rank = e.index[rank]
	}
	e.wait.Context = ctx
	return e.mapped(e.SharedMemory.Await(&e.wait, rank, flag))
}

func (e *end) Behind(flag int, ranks []int) []int {
	at := len(ranks)
	ranks = e.SharedMemory.Behind(flag, ranks)
	for i := at; i < len(ranks); i++ {
		ranks[i] = e.domain[ranks[i]]
	}
	return ranks
}

// Split splits the domain's endpoint if the listed ranks are in one domain, the endpoint of all ranks if each is in a
// separate domain, and otherwise both.
func (e *end) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	at, err := transport.RankIn(ranks, e.Rank(), len(e.places))
	if err != nil {
		return nil, fmt.Errorf("composite: %w", err)
	}
	var places []transport.Place
	var mine []int // of the domain, by their numbers there
	for _, r := range ranks {
		places = append(places, e.places[r])
		if e.shares(r) {
			mine = append(mine, e.index[r])
		}
	}
	g := NewGroup(places)
	if len(g.domains) == len(ranks) && len(ranks) > 1 {
		return e.Endpoint.Split(id, ranks)
	}
	near, err := e.near.Split(id, mine)
	if err != nil || len(g.domains) == 1 {
		return near, err
	}
	far, err := e.Endpoint.Split(id, ranks)
	if err != nil {
		near.Close()
		return nil, err
	}
	return g.Join(at, near, far), nil
}
