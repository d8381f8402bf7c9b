package collective

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// group is the local ranks of one communicator.
type group struct {
	team    *team
	members []*member
	locals  []Communicator
}

var _ Watchable = (*group)(nil)

// Open makes a communicator over the endpoints of this process's ranks. It takes ownership of them: they are
// closed with the communicators. Every process of the group calls Open, with configurations that agree. Open
// does not wait for the other processes.
func Open(endpoints []transport.Endpoint, cfg Config) (Group, error) {
	return open(endpoints, cfg, &flight.Book[*member]{})
}

func open(endpoints []transport.Endpoint, cfg Config, d *flight.Book[*member]) (Group, error) {
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
			return nil, fmt.Errorf("collective: endpoint %d belongs to a group of %d ranks, endpoint 0 to one of %d", i, e.Size(), size)
		case taken[e.Rank()]:
			return nil, fmt.Errorf("collective: two endpoints of rank %d", e.Rank())
		}
		taken[e.Rank()] = true
	}
	if cfg.Timeout < 0 {
		cfg.Logger.Warn("collective: no deadline: a call may wait for its peers indefinitely", "communicator", cfg.Name)
	}
	t := newTeam(cfg, fingerprint.HashString(fingerprint.Seed, cfg.Name), size, len(endpoints))
	t.book = d
	g := &group{team: t}
	for _, e := range endpoints {
		m := t.join(e)
		g.members = append(g.members, m)
		g.locals = append(g.locals, m)
	}
	return g, nil
}

func (g *group) Local() []Communicator { return g.locals }

func (g *group) Watch(m Monitor) { g.team.monitor, g.team.cfg.Monitor = m, m }

func (g *group) DoAll(ctx context.Context, calls []Call) error {
	if len(calls) != len(g.members) {
		return g.team.fail(&Error{
			Kind: ErrInvalid, Comm: g.team.cfg.Name, Rank: -1,
			Err: fmt.Errorf("%d calls for %d local ranks", len(calls), len(g.members)),
		}, g.members[0].rank)
	}
	if ctx == nil {
		return g.members[0].refuse(ctx)
	}
	var err error
	entered := 0
	for i, m := range g.members {
		t, _, e := m.enter(&calls[i], acting)
		if e != nil {
			g.team.abort(e) // the calls entered so far cannot complete
			err = e
			break
		}
		h := &m.all
		h.ctx, h.call, h.ticket, h.all = ctx, &calls[i], t, true
		entered++
	}
	for _, m := range g.members[:entered] {
		m.enqueue(&m.all)
	}
	for _, m := range g.members[:entered] {
		h := &m.all
		<-h.done
		if h.err != nil && err == nil {
			err = h.err
		}
		m.watchLeave(h.ticket, h.call, h.err)
		h.ctx, h.call = nil, nil
	}
	return err
}

func (g *group) Rebuild(ctx context.Context) (Group, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("collective: rebuilding %q: %w", g.team.cfg.Name, context.Cause(ctx))
	}
	cfg := g.team.cfg
	cfg.Epoch++
	ranks := make([]int, g.team.size)
	for i := range ranks {
		ranks[i] = i
	}
	var ends []transport.Endpoint
	for _, m := range g.members {
		end, err := m.end.Split(fingerprint.Hash(g.team.id, uint64(cfg.Epoch)|1<<63), ranks)
		if err != nil {
			return nil, fmt.Errorf("collective: rebuilding %q: %w", cfg.Name, err)
		}
		ends = append(ends, end)
	}
	if err := g.Close(); err != nil {
		cfg.Logger.Warn("collective: closing a group to rebuild it", "communicator", cfg.Name, "error", err)
	}
	return open(ends, cfg, g.team.book)
}

func (g *group) Close() error {
	var errs []error
	for _, m := range g.members {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
