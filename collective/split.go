package collective

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Split gathers every rank's color and key in one all-reduce (each rank adds its two numbers to zeros), so
// every rank knows all groups. A group's id is derived from the parent's id, the number of splits so far, and
// the color.
func (m *member) Split(ctx context.Context, color, key int) (Communicator, error) {
	all := make([]int64, 2*m.team.size)
	all[2*m.rank], all[2*m.rank+1] = int64(color), int64(key)
	mem := tensor.HostMemory(all)
	call := &Call{Op: AllReduce, Reduce: Sum, Type: tensor.Int64, Src: mem, Dst: mem, Manifest: &Manifest{Name: "split"}}
	if err := m.Do(ctx, call); err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.splits++
	nth := m.splits
	m.mu.Unlock()
	if color < 0 {
		return nil, nil
	}
	ranks := groupOf(all, color)
	id := fingerprint.Hash(fingerprint.Hash(fingerprint.Hash(m.team.id, uint64(m.team.cfg.Epoch)), nth), uint64(color))
	end, err := m.end.Split(id, ranks)
	if err != nil {
		return nil, m.team.fail(&Error{Kind: ErrInvalid, Comm: m.team.cfg.Name, Rank: m.rank, Err: err}, m.rank)
	}
	part, err := m.team.split(id, fmt.Sprintf("%s/%d.%d", m.team.cfg.Name, nth, color), ranks)
	if err != nil {
		end.Close()
		return nil, err
	}
	return part.join(end), nil
}

// groupOf returns the ranks of a color, ordered by key, then by rank.
func groupOf(all []int64, color int) []int {
	var ranks []int
	for r := range len(all) / 2 {
		if all[2*r] == int64(color) {
			ranks = append(ranks, r)
		}
	}
	slices.SortStableFunc(ranks, func(a, b int) int { return cmp.Compare(all[2*a+1], all[2*b+1]) })
	return ranks
}

// split returns the team of the communicator that is split off under id. The first local rank to arrive makes
// it. Ranks that exchange messages may fail in a Split that has succeeded on other ranks; so a failure of t
// also fails the new teams that not all their local ranks have reached.
func (t *team) split(id uint64, name string, ranks []int) (*team, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.splits[id]
	if s == nil {
		if err := t.cause(); err != nil {
			return nil, err
		}
		s = t.child(id, name, ranks)
		t.splits[id] = s
	}
	if s.taken++; s.taken == s.local {
		delete(t.splits, id)
	}
	return s, nil
}

// child makes the team of the given ranks of t, whose mu is held.
func (t *team) child(id uint64, name string, ranks []int) *team {
	cfg := t.cfg
	cfg.Name, cfg.Monitor = name, nil
	if describe := t.cfg.Describe; describe != nil {
		cfg.Describe = func(e *Error) string { return describe(e.within(ranks)) }
	}
	local := 0
	for _, m := range t.members {
		if slices.Contains(ranks, m.rank) {
			local++
		}
	}
	s := newTeam(cfg, id, len(ranks), local)
	s.world, s.book = t.within(ranks), t.book
	if m, ok := t.monitor.(SplitMonitor); ok {
		s.monitor, s.release = m.Split(name, ranks, s.abort)
		s.pairs, _ = s.monitor.(PairMonitor)
	}
	return s
}
