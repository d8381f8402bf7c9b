package collective

import (
	"context"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// planBackend is the backend of one rank that executes plans over a transport. Everything that calls need is kept, so
// that a repeated call allocates nothing.
type planBackend struct {
	localRank
	planner   planner
	signer    signer
	diagnosis diagnosis
	waiter    waiter
	call      executor.Call // the current one
	message   executor.Plan // its plan, if it is a call of two ranks
}

var _ Backend = (*planBackend)(nil)

// Open makes a communicator over the endpoints of this process's ranks. It takes ownership of them: they are
// closed with the communicators. Every process of the group calls Open, with configurations that agree. Open
// does not wait for the other processes.
func Open(endpoints []transport.Endpoint, cfg Config) (Group, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	if err := checkLocal("endpoint", endpoints); err != nil {
		return nil, err
	}
	t := newTeam(fingerprint.HashString(fingerprint.Seed, cfg.Name), endpoints[0].Size(), len(endpoints))
	backends := make([]Backend, len(endpoints))
	for i, e := range endpoints {
		backends[i] = newPlanBackend(t, e)
	}
	return openGroup(backends, cfg, &book{}), nil
}

func newPlanBackend(t *team, end transport.Endpoint) *planBackend {
	return &planBackend{localRank: localRank{rank: end.Rank(), team: t, end: end}}
}

func (b *planBackend) Rank() int { return b.rank }

func (b *planBackend) Size() int { return b.team.size }

func (b *planBackend) Attach(f FrontEnd) {
	b.front, b.calls.front, b.calls.rank = f, f, b.rank
	b.team.configure(f)
	b.site = b.team.findSite(b.end)
	// a collective needs every rank of the domain
	near := func(rank int) bool { return b.site.sharesMemory() && b.site.in(rank) }
	b.blocked = fault.NewBlocked(b.rank, near)
	cfg := b.team.cfg
	b.planner = planner{rank: b.rank, size: b.team.size, site: &b.site, table: cfg.Chooser}
	b.planner.prefer, _ = parsePreference(cfg.Algorithm) // validated before
	b.signer = signer{epoch: cfg.Epoch, comm: b.team.id, last: &signature{}}
	b.diagnosis = diagnosis{localRank: &b.localRank, slot: &b.call.Slot}
	b.waiter = waiter{diagnosis: &b.diagnosis}
	b.exec = executor.New(executor.Config{
		End: b.end, Domain: b.site.domain, OneProcess: b.site.oneProcess, Group: b.team.executors, Caller: b,
	})
	b.end.Answer(b.calls.answer)
}

func (b *planBackend) Properties() Properties {
	return Properties{Transport: b.end.Transport(), Encrypted: b.encrypted(), Memory: !b.site.spread()}
}

// encrypted reports whether everything that this rank sends to other ranks is encrypted.
func (b *planBackend) encrypted() bool {
	encrypted := b.end.Capabilities().Encrypted
	for r, ok := range encrypted {
		if r != b.rank && !ok {
			return false
		}
	}
	return len(encrypted) > 1
}

// Fail notifies the peers of this rank why its communicator has failed, and prevents calls of its domain from
// starting.
func (b *planBackend) Fail(cause error) {
	if b.team.local < b.team.size {
		b.end.Fail(encodeFailure(cause, b.team.cfg.Name, b.rank))
	}
	if b.site.sharesMemory() {
		b.end.Memory().Interrupt()
	}
}

// Split derives the id of the new communicator from its parent's id, the number of splits so far, and the
// color.
func (b *planBackend) Split(_ *Running, p *Partition) (Backend, error) {
	if p.Own < 0 {
		return nil, nil
	}
	ranks := p.Ranks[p.Own]
	id := b.team.id
	for _, word := range []uint64{uint64(b.team.cfg.Epoch), p.Number, uint64(p.Colors[p.Own])} {
		id = fingerprint.Hash(id, word)
	}
	end, err := b.end.Split(id, ranks)
	if err != nil {
		return nil, err
	}
	return newPlanBackend(b.team.child(id, ranks), end), nil
}

// Rebuild makes a new endpoint of the same ranks.
func (b *planBackend) Rebuild(context.Context) (Backend, error) {
	ranks := make([]int, b.team.size)
	for i := range ranks {
		ranks[i] = i
	}
	team, end, err := b.team.next(b, func(id uint64) (transport.Endpoint, error) { return b.end.Split(id, ranks) })
	if err != nil {
		return nil, err
	}
	return newPlanBackend(team, end), nil
}

func (b *planBackend) Close() error { return b.end.Close() }

func (b *planBackend) NewBuffer(bytes int) (tensor.Memory, error) {
	if m := b.end.Memory(); m != nil {
		return m.NewBuffer(bytes)
	}
	return tensor.HostMemory(tensor.AlignedBytes(bytes, tensor.CacheLine)), nil
}
