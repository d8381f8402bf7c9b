package library

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
)

// split is a Split of the local ranks: the first one to arrive splits the driver for all of them.
type split struct {
	taken int                  // local ranks that have their result
	parts []collective.Backend // by local rank; nil: in no part, or taken
	err   error                // like parts valid once done is closed
	done  chan struct{}
}

// close closes the parts that no rank has taken.
func (s *split) close() {
	for _, part := range s.parts {
		if part != nil {
			_ = part.Close() // the cause of the failure is more useful
		}
	}
	clear(s.parts)
}

func (m *rank) Split(r *collective.Running, p *collective.Partition) (collective.Backend, error) {
	t := m.team
	t.mu.Lock()
	s := t.splits[p.Number]
	first := s == nil
	if first {
		s = &split{parts: make([]collective.Backend, len(t.members)), done: make(chan struct{})}
		t.splits[p.Number] = s
	}
	t.mu.Unlock()
	if first {
		if err := m.split(r.Ctx, s, p); err != nil {
			s.err = m.front.Fail(m.splitError(r, err)) // before the others return it
			s.close()
		}
		close(s.done)
	}
	select {
	case <-s.done:
		return m.take(s, p.Number), s.err
	case <-r.Ctx.Done():
		return nil, m.splitError(r, context.Cause(r.Ctx))
	}
}

// take returns this rank's part. The team closes the parts that are not taken.
func (m *rank) take(s *split, number uint64) collective.Backend {
	m.team.mu.Lock()
	defer m.team.mu.Unlock()
	part := s.parts[m.local]
	s.parts[m.local] = nil
	if s.taken++; s.taken == len(s.parts) {
		delete(m.team.splits, number)
	}
	return part
}

// splitError returns the error of a Split that the driver could not execute, or that the end of the caller's
// context has ended.
func (m *rank) splitError(r *collective.Running, err error) error {
	e := m.front.Error(r, outcome(err), fmt.Errorf("splitting: %w", err))
	if r.Ctx.Err() != nil {
		e = m.front.ContextError(r, "splitting")
	}
	e.Peers = m.team.others()
	return e
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
