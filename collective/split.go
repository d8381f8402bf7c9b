package collective

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Split gathers every rank's color and key in one all-reduce (each rank adds its two numbers to zeros), so
// every rank knows all groups. The backends are split as a part of that call.
func (c *communicator) Split(ctx context.Context, color, key int) (Communicator, error) {
	all := make([]int64, 2*c.group.size)
	all[2*c.rank], all[2*c.rank+1] = int64(color), int64(key)
	mem := tensor.HostMemory(all)
	call := &Call{Op: AllReduce, Reduce: Sum, Type: tensor.Int64, Src: mem, Dst: mem, Manifest: &Manifest{Name: "split"}}
	var made *communicator
	err := c.do(ctx, call, func() (err error) {
		made, err = c.splitOff(all, color)
		return err
	})
	if err != nil || made == nil {
		return nil, err
	}
	return made, nil
}

// splitOff makes this rank's new communicator, or returns nil if its color is negative. An error has failed the
// group.
func (c *communicator) splitOff(all []int64, color int) (*communicator, error) {
	c.splits++
	p := newPartition(c.splits, all, color)
	backend, err := c.backend.Split(&c.run, p)
	if err != nil {
		if e := (*Error)(nil); !errors.As(err, &e) {
			err = c.failure(ErrInvalid, err)
		}
		return nil, c.group.fail(err, c.rank)
	}
	if backend == nil {
		return nil, nil
	}
	g, err := c.group.split(p)
	if err != nil {
		_ = backend.Close() // the cause of the failure is more useful
		return nil, err
	}
	return g.join(backend), nil
}

// newPartition returns the parts of the ranks whose colors and keys are given in turns.
func newPartition(number uint64, all []int64, color int) *Partition {
	p := &Partition{Number: number, Own: -1}
	var ranks []int // by color, then by key, then by rank
	for r := range len(all) / 2 {
		if all[2*r] >= 0 {
			ranks = append(ranks, r)
		}
	}
	slices.SortFunc(ranks, func(a, b int) int {
		return cmp.Or(cmp.Compare(all[2*a], all[2*b]), cmp.Compare(all[2*a+1], all[2*b+1]), cmp.Compare(a, b))
	})
	for begin, end := 0, 0; begin < len(ranks); begin = end {
		c := all[2*ranks[begin]]
		for end < len(ranks) && all[2*ranks[end]] == c {
			end++
		}
		if int(c) == color {
			p.Own = len(p.Colors)
		}
		p.Colors = append(p.Colors, int(c))
		p.Ranks = append(p.Ranks, ranks[begin:end:end])
	}
	return p
}

// split returns the group of this rank's part. The first local rank to arrive makes it. Ranks may fail in a
// Split that has succeeded on other ranks; so a failure of g also fails the new groups that not all their local
// ranks have joined.
func (g *group) split(p *Partition) (*group, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	key := splitKey{p.Number, p.Colors[p.Own]}
	s := g.splits[key]
	if s == nil {
		if err := g.cause(); err != nil {
			return nil, err
		}
		s = g.child(fmt.Sprintf("%s/%d.%d", g.cfg.Name, key.number, key.color), p.Ranks[p.Own])
		g.splits[key] = s
	}
	if s.taken++; s.taken == s.local {
		delete(g.splits, key)
	}
	return s, nil
}

// child makes the group of the given ranks of g, whose mu is held.
func (g *group) child(name string, ranks []int) *group {
	cfg := g.cfg
	cfg.Name, cfg.Monitor = name, nil
	if describe := g.cfg.Describe; describe != nil {
		cfg.Describe = func(e *Error) string { return describe(e.within(ranks)) }
	}
	local := 0
	for _, c := range g.members {
		if slices.Contains(ranks, c.rank) {
			local++
		}
	}
	s := newGroup(cfg, len(ranks), local, g.book)
	s.world = g.within(ranks)
	if m := g.cfg.Monitor; m != nil {
		s.cfg.Monitor, s.release = m.Split(name, ranks, s.abort)
	}
	return s
}
