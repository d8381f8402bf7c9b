package collective

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// member is the backend of one rank that executes plans over a transport. Everything that calls need is kept, so
// that a repeated call allocates nothing.
type member struct {
	localRank
	planner   planner
	signer    signer
	diagnosis diagnosis
	waiter    waiter
	call      executor.Call // the current one
	message   executor.Plan // its plan, if it is a call of two ranks
}

var _ Backend = (*member)(nil)

// Open makes a communicator over the endpoints of this process's ranks. It takes ownership of them: they are
// closed with the communicators. Every process of the group calls Open, with configurations that agree. Open
// does not wait for the other processes.
func Open(endpoints []transport.Endpoint, cfg Config) (Group, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	if len(endpoints) == 0 {
		return nil, errors.New("collective: Open needs at least one endpoint")
	}
	size := endpoints[0].Size()
	taken := make([]bool, size)
	for i, e := range endpoints {
		switch {
		case e.Size() != size:
			return nil, fmt.Errorf("collective: endpoint %d belongs to a group of %d ranks, endpoint 0 to one of %d",
				i, e.Size(), size)
		case taken[e.Rank()]:
			return nil, fmt.Errorf("collective: two endpoints of rank %d", e.Rank())
		}
		taken[e.Rank()] = true
	}
	t := newTeam(fingerprint.HashString(fingerprint.Seed, cfg.Name), size, len(endpoints))
	backends := make([]Backend, len(endpoints))
	for i, e := range endpoints {
		backends[i] = newMember(t, e)
	}
	return open(backends, cfg, newBook()), nil
}

func newMember(t *team, end transport.Endpoint) *member {
	return &member{localRank: localRank{rank: end.Rank(), team: t, end: end}}
}

func (m *member) Rank() int { return m.rank }

func (m *member) Size() int { return m.team.size }

func (m *member) Attach(f FrontEnd) {
	m.front, m.calls.front, m.calls.rank = f, f, m.rank
	m.team.join(&m.calls)
	m.site = findSite(m.end)
	cfg := m.team.cfg
	m.planner = planner{rank: m.rank, size: m.team.size, site: &m.site, table: cfg.Chooser}
	m.planner.prefer, _ = parsePreference(cfg.Algorithm) // validated before
	m.signer = signer{epoch: cfg.Epoch, comm: m.team.id}
	m.diagnosis = diagnosis{localRank: &m.localRank, slot: &m.call.Slot}
	m.waiter = waiter{diagnosis: &m.diagnosis}
	m.exec = executor.New(executor.Config{
		End: m.end, Domain: m.site.domain, OneProcess: m.site.whole, Group: m.team.execs, Caller: m,
	})
	m.end.Answer(m.calls.answer)
}

func (m *member) Properties() Properties {
	return Properties{Transport: m.end.Transport(), Encrypted: m.encrypted(), Memory: !m.site.spread()}
}

// encrypted reports whether everything that this rank sends to other ranks is encrypted.
func (m *member) encrypted() bool {
	encrypted := m.end.Capabilities().Encrypted
	for r, ok := range encrypted {
		if r != m.rank && !ok {
			return false
		}
	}
	return len(encrypted) > 1
}

// Fail notifies the peers of this rank why its communicator has failed, and prevents calls of its domain from
// starting.
func (m *member) Fail(cause error) {
	if m.team.local < m.team.size {
		m.end.Fail(encodeFailure(cause, m.team.cfg.Name, m.rank))
	}
	if m.site.marker != nil {
		m.site.marker.Interrupt()
	}
}

// Split derives the id of the new communicator from its parent's id, the number of splits so far, and the
// color.
func (m *member) Split(_ context.Context, p *Partition) (Backend, error) {
	if p.Own < 0 {
		return nil, nil
	}
	ranks := p.Ranks[p.Own]
	id := m.team.id
	for _, word := range []uint64{uint64(m.team.cfg.Epoch), p.Number, uint64(p.Colors[p.Own])} {
		id = fingerprint.Hash(id, word)
	}
	end, err := m.end.Split(id, ranks)
	if err != nil {
		return nil, err
	}
	return newMember(m.team.child(id, ranks), end), nil
}

// Rebuild makes a new endpoint of the same ranks.
func (m *member) Rebuild(context.Context) (Backend, error) {
	ranks := make([]int, m.team.size)
	for i := range ranks {
		ranks[i] = i
	}
	end, err := m.end.Split(fingerprint.Hash(m.team.id, uint64(m.team.cfg.Epoch+1)|1<<63), ranks)
	if err != nil {
		return nil, err
	}
	return newMember(m.team.next(), end), nil
}

func (m *member) Close() error { return m.end.Close() }

func (m *member) NewBuffer(bytes int) (tensor.Memory, error) {
	if m.end.Capabilities().Memory {
		return m.end.NewBuffer(bytes)
	}
	return HeapBuffer(bytes), nil
}

// bufferAlignment is the size of a cache line.
const bufferAlignment = 64

// HeapBuffer returns zeroed memory of the Go heap that starts at a cache line, for a [Backend] without
// memory that peers access.
func HeapBuffer(bytes int) tensor.Memory {
	b := make([]byte, bytes+bufferAlignment-1)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (bufferAlignment - 1)
	return tensor.HostMemory(b[skip:][:bytes:bytes])
}
