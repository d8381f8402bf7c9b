package library

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

// group is the local ranks of one communicator.
type group struct {
	team   *team
	locals []collective.Communicator
	again  func(ctx context.Context) (Backend, error)
}

var _ collective.Watchable = (*group)(nil)

// Open makes the communicators of this process's ranks. Every process calls it, with setups that agree; it
// does not wait for the others.
func Open(s Setup) (collective.Group, error) { return open(s, &flight.Book[*member]{}) }

func open(s Setup, d *flight.Book[*member]) (collective.Group, error) {
	cfg, err := s.Config.Fill()
	if err != nil {
		return nil, err
	}
	if err := checkRanks(s.Ranks, s.Backend); err != nil {
		return nil, fmt.Errorf("collective: %s: %w", s.Backend.Transport(), err)
	}
	if s.Config.Order == collective.Canonical {
		return nil, fmt.Errorf("collective: configuration of %q: %s does not keep the canonical order of sums: want Order: Any, or the built-in collectives, which keep it",
			cfg.Name, s.Backend.Transport())
	}
	if cfg.Timeout < 0 {
		cfg.Logger.Warn("collective: no deadline: a call may wait for its peers indefinitely", "communicator", cfg.Name)
	}
	t := newTeam(s.Backend, s.Ranks, cfg, nil, d)
	g := &group{team: t, again: s.Again}
	for _, m := range t.members {
		g.locals = append(g.locals, m)
	}
	return g, nil
}

func checkRanks(ranks [][]int, b Backend) error {
	if len(ranks) != b.Size() {
		return fmt.Errorf("ranks of %d processes for %d", len(ranks), b.Size())
	}
	all := slices.Sorted(slices.Values(slices.Concat(ranks...)))
	for i, r := range all {
		if r != i {
			return fmt.Errorf("ranks %v: want all from 0 to %d", ranks, len(all)-1)
		}
	}
	for p, own := range ranks {
		if len(own) == 0 || len(own) > localMax || !slices.IsSorted(own) {
			return fmt.Errorf("ranks %v in process %d: want 1 to %d of them, in their order", own, p, localMax)
		}
	}
	return nil
}

// localMax bounds the ranks of a process: a message's tag holds the local indices of two ranks.
const localMax = 1 << 7

func (g *group) Local() []collective.Communicator { return g.locals }

func (g *group) Watch(m collective.Monitor) { g.team.watch(m) }

func (g *group) DoAll(ctx context.Context, calls []collective.Call) error {
	t := g.team
	if len(calls) != len(t.members) {
		return t.fail(&collective.Error{
			Kind: collective.ErrInvalid, Comm: t.cfg.Name, Rank: -1, Err: fmt.Errorf("%d calls for %d local ranks", len(calls), len(t.members)),
		}, t.members[0].rank)
	}
	if ctx == nil {
		return t.members[0].refuse(ctx)
	}
	var first error
	var entered []*handle
	for i, m := range t.members {
		tk, err := m.enter(&calls[i], true)
		if err != nil {
			t.abort(err) // the calls entered so far cannot complete
			first = err
			break
		}
		h := &handle{m: m, call: &calls[i], ticket: tk, done: make(chan struct{})}
		go h.run(ctx)
		entered = append(entered, h)
	}
	for _, h := range entered {
		<-h.done
		if h.err != nil && first == nil {
			first = h.err
		}
		t.watchLeave(h.m.rank, h.ticket, h.call, h.err)
	}
	return first
}

func (g *group) Rebuild(ctx context.Context) (collective.Group, error) {
	cfg := g.team.cfg
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("collective: rebuilding %q: %w", cfg.Name, context.Cause(ctx))
	}
	ctx, cancel := g.team.bounded(ctx)
	defer cancel()
	b, err := g.again(ctx)
	if err != nil {
		return nil, fmt.Errorf("collective: rebuilding %q: %w", cfg.Name, err)
	}
	if err := g.Close(); err != nil {
		cfg.Logger.Warn("collective: closing a group to rebuild it", "communicator", cfg.Name, "error", err)
	}
	cfg.Epoch++
	cfg.Order = collective.OrderInherit
	return open(Setup{Backend: b, Ranks: g.team.ranks, Again: g.again, Config: cfg}, g.team.book)
}

func (g *group) Close() error {
	var errs []error
	for _, m := range g.team.members {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
