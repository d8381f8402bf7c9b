package library

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Split gathers every rank's color and key, and then splits the backend color by color.
func (m *member) Split(ctx context.Context, color, key int) (collective.Communicator, error) {
	t := m.team
	mine, all := []int64{int64(color), int64(key)}, make([]int64, 2*t.size)
	name := &collective.Manifest{Name: "Split"}
	gather := &collective.Call{Op: collective.AllGather, Type: tensor.Int64, Src: tensor.HostMemory(mine), Dst: tensor.HostMemory(all), Manifest: name}
	if err := m.Do(ctx, gather); err != nil {
		return nil, err
	}
	call := &collective.Call{Op: collective.Barrier, Manifest: name}
	tk, err := m.enter(call, true)
	if err != nil {
		return nil, err
	}
	w := &wait{m: m, ctx: ctx, call: call, ticket: tk, own: true}
	m.keep(call, tk, 0)
	r, err := m.together(w, func(r *round) error { return t.split(w, r, all) }, 0)
	w.stop()
	m.ended(tk, err)
	m.leave(tk)
	t.watchLeave(m.rank, tk, call, err)
	if err != nil || r.made[m.local] == nil {
		return nil, err
	}
	return r.made[m.local], nil
}

// split makes the communicators of all colors; those with local ranks are teams here.
func (t *team) split(w *wait, r *round, wanted []int64) error {
	ctx, cancel := t.sound(w.ctx)
	defer cancel()
	r.made = make([]*member, len(t.members))
	var colors []int64
	for rank := range t.size {
		if c := wanted[2*rank]; c >= 0 && !slices.Contains(colors, c) {
			colors = append(colors, c)
		}
	}
	slices.Sort(colors)
	for _, color := range colors {
		var members []int // ranks of this team, by new rank
		for rank := range t.size {
			if wanted[2*rank] == color {
				members = append(members, rank)
			}
		}
		slices.SortStableFunc(members, func(a, b int) int { return cmp.Compare(wanted[2*a+1], wanted[2*b+1]) })
		if err := t.splitOff(ctx, r, color, members); err != nil {
			return w.outcome(err)
		}
	}
	return nil
}

// splitOff makes the communicator of one color.
func (t *team) splitOff(ctx context.Context, r *round, color int64, members []int) error {
	var processes []int // in the order of their first ranks
	ranks := map[int][]int{}
	for rank, old := range members {
		p := t.at[old].process
		if ranks[p] == nil {
			processes = append(processes, p)
		}
		ranks[p] = append(ranks[p], rank)
	}
	b, err := t.backend.Split(ctx, ranks[t.backend.Rank()] != nil, slices.Index(processes, t.backend.Rank()))
	if err != nil || b == nil {
		return err
	}
	cfg := t.cfg
	cfg.Name = fmt.Sprintf("%s/%d", cfg.Name, color)
	cfg.Monitor = nil
	byProcess := make([][]int, len(processes))
	for i, p := range processes {
		byProcess[i] = ranks[p]
	}
	team := newTeam(b, byProcess, cfg, t.within(members), t.book)
	if m, ok := t.watcher().(collective.SplitMonitor); ok {
		team.monitor, team.release = m.Split(cfg.Name, members, team.abort)
	}
	for _, m := range team.members {
		r.made[t.at[members[m.rank]].local] = m
	}
	return nil
}
