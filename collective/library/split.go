package library

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
)

// split is a Split of the local ranks: the first one to arrive splits the driver for all of them.
type split struct {
	arrived int
	parts   []collective.Backend // by local rank; nil: in no part
	err     error                // like parts valid once done is closed
	done    chan struct{}
}

func (m *rank) Split(ctx context.Context, p *collective.Partition) (collective.Backend, error) {
	t := m.team
	t.mu.Lock()
	s := t.splits[p.Number]
	if s == nil {
		s = &split{parts: make([]collective.Backend, len(t.members)), done: make(chan struct{})}
		t.splits[p.Number] = s
	}
	s.arrived++
	first := s.arrived == 1
	if s.arrived == len(t.members) {
		delete(t.splits, p.Number)
	}
	t.mu.Unlock()
	if first {
		if s.err = m.split(ctx, s, p); s.err != nil {
			e := &collective.Error{Comm: m.front.Config().Name, Rank: m.rank, Peers: t.others(), Kind: outcome(s.err)}
			e.Err = fmt.Errorf("splitting: %w", s.err)
			s.err = e
		}
		close(s.done)
	}
	select {
	case <-s.done:
		return s.parts[m.local], s.err
	case <-ctx.Done():
		return nil, fmt.Errorf("splitting: %w", context.Cause(ctx))
	}
}

// split splits the driver color by color, as all processes do, and makes the parts with local ranks.
func (m *rank) split(ctx context.Context, s *split, p *collective.Partition) error {
	t := m.team
	ctx, cancel := m.sound(ctx)
	defer cancel()
	for _, members := range p.Ranks {
		var processes []int // in the order of their first ranks
		ranks := map[int][]int{}
		for r, old := range members {
			at := t.at[old].process
			if ranks[at] == nil {
				processes = append(processes, at)
			}
			ranks[at] = append(ranks[at], r)
		}
		own := t.driver.Rank()
		d, err := t.driver.Split(ctx, ranks[own] != nil, slices.Index(processes, own))
		if err != nil {
			return err
		}
		if d == nil {
			continue
		}
		byProcess := make([][]int, len(processes))
		for i, at := range processes {
			byProcess[i] = ranks[at]
		}
		for _, made := range newTeam(d, byProcess, nil).members {
			s.parts[t.at[members[made.rank]].local] = made
		}
	}
	return nil
}
