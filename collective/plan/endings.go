package plan

import (
	"fmt"
	"strings"
)

// stuck returns a fault if a rank can never take its next step. It prefers a rank that waits for a rank whose
// plan has ended, because there the plans diverge. If all plans have ended, it returns what is wrong at their
// ends.
func (x *proof) stuck() *Fault {
	var found *Fault
	for rank := range x.ranks {
		r := &x.ranks[rank]
		if r.next == len(r.plan) {
			continue
		}
		why, span, ended := x.waits(rank)
		if len(why) > 0 && (found == nil || ended) {
			found = x.fault(rank, span, "waits forever %s", strings.Join(why, ", and "))
		}
		if ended {
			break
		}
	}
	if found != nil {
		return found
	}
	for rank := range x.ranks {
		if f := x.ending(rank); f != nil {
			return f
		}
	}
	return nil
}

// waits returns what a rank waits for, the span concerned, and whether it waits for a rank that has ended.
func (x *proof) waits(rank int) (why []string, span Span, ended bool) {
	r := &x.ranks[rank]
	s := &r.plan[r.next]
	add := func(format string, peer, arg int) {
		q := &x.ranks[peer]
		text := fmt.Sprintf(format, arg, peer)
		if q.next == len(q.plan) {
			ended = true
			why = append(why, text+", which has ended")
			return
		}
		why = append(why, fmt.Sprintf("%s, which is at step %d (%v)", text, q.next, q.plan[q.next]))
	}
	if s.Kind == Await {
		for _, peer := range x.domains[x.domainOf[rank]].ranks {
			if s.Flag >= len(x.set(peer, r.call)) && (s.From < 0 || s.From == peer) {
				add("for flag %d of rank %d", peer, s.Flag)
				break
			}
		}
		return why, s.Out, ended
	}
	span = s.Out
	if s.From >= 0 {
		if q := &x.ranks[s.From]; !q.at(r.call) || q.plan[q.next].To != rank {
			span = s.In
			add("to receive %d elements from rank %d", s.From, s.In.length())
		}
	}
	if s.To >= 0 {
		if q := &x.ranks[s.To]; !q.at(r.call) || q.plan[q.next].From != rank {
			add("to send %d elements to rank %d", s.To, s.Out.length())
		}
	}
	return why, span, ended
}

// ending returns what is wrong with a rank's memory and knowledge when its plan has ended.
func (x *proof) ending(rank int) *Fault {
	r := &x.ranks[rank]
	if !x.problem(rank).takesPart(rank) {
		return nil
	}
	for b := Src; b <= Scratch; b++ {
		v := r.views[b]
		m := &r.memory[v.memory]
		for i := range m.runs {
			if does, e := m.runs[i].unseen(r.now); does != "" {
				span := Span{b, m.runs[i].lo - v.at, m.end(i) - v.at}
				return x.fault(rank, span, "leaves while rank %d may still use this memory", e.rank)
			}
		}
	}
	if f := x.result(rank); f != nil {
		return f
	}
	for peer := range x.ranks {
		neighbour := len(r.flags[r.call]) > 0 && x.domainOf[peer] == x.domainOf[rank]
		if (neighbour || x.problem(rank).Op == Barrier) && !x.knows(rank, peer) {
			return x.fault(rank, Span{}, "leaves without knowing that rank %d has entered", peer)
		}
	}
	return nil
}

// result compares a rank's destination at the end with the expected result.
func (x *proof) result(rank int) *Fault {
	v := x.ranks[rank].views[Dst]
	if v.length == 0 {
		return nil
	}
	m := &x.ranks[rank].memory[v.memory]
	i, at := m.cut(v.at), 0
	m.cut(v.at + v.length)
	for _, want := range x.want(rank) {
		for end := at + want.length; at < end; {
			got := m.runs[i]
			n := min(m.end(i), v.at+end) - (v.at + at)
			off := v.at + at - got.lo
			if reason := x.wrong(rank, value{got.term, got.at + off}, want.value); reason != "" {
				return x.fault(rank, Span{Dst, at, at + n}, "%s", reason)
			}
			at += n
			want.at += n
			if v.at+at == m.end(i) {
				i++
			}
		}
	}
	return nil
}

// want returns the expected contents of a rank's destination.
func (x *proof) want(rank int) []piece {
	p := x.problem(rank)
	_, n := p.Lengths(rank)
	switch p.Op {
	case Broadcast, Send:
		return []piece{{n, value{x.terms.leaf(p.Root), 0}}}
	case Scatter:
		lo, _ := p.Part(rank)
		return []piece{{n, value{x.terms.leaf(p.Root), lo}}}
	case AllGather, Gather, AllToAll:
		at := p.offsets()
		list := make([]piece, 0, p.Size)
		for owner := range p.Size {
			from := at[owner]
			if p.Op == AllToAll {
				from = at[rank]
			}
			if length := at[owner+1] - at[owner]; length > 0 {
				list = append(list, piece{length, value{x.terms.leaf(owner), from}})
			}
		}
		return list
	case ReduceScatter:
		lo, _ := p.Part(rank)
		return []piece{{n, value{x.whole(rank), lo}}}
	case AllReduce, Reduce:
		return []piece{{n, value{x.whole(rank), 0}}}
	}
	return nil
}

// whole is the reduction of all contributions.
func (x *proof) whole(rank int) term {
	call := x.ranks[rank].call
	for len(x.wholes) <= call {
		x.wholes = append(x.wholes, 0)
	}
	if x.wholes[call] == 0 {
		sum := canonical(0, len(x.ranks), x.terms.leaf, x.terms.node)
		if x.problem(rank).Reduce == Mean {
			sum = x.terms.divided(sum)
		}
		if x.sharing.rounds {
			sum = x.terms.rounded(sum)
		}
		x.wholes[call] = sum
	}
	return x.wholes[call]
}

// wrong returns how the value of elements differs from the expected value.
func (x *proof) wrong(rank int, got, want value) string {
	if got == want {
		return ""
	}
	if got.term == 0 {
		return "ends with memory that was never written"
	}
	p := x.problem(rank)
	if !p.Op.Reduces() {
		return fmt.Sprintf("ends with %s, want %s", x.valueOf(got), x.valueOf(want))
	}
	count := make([]int, p.Size)
	x.terms.count(got.term, count)
	for rank, n := range count {
		switch {
		case n == 0:
			return fmt.Sprintf("ends without the contribution of rank %d: %s", rank, x.terms.format(got.term))
		case n > 1:
			return fmt.Sprintf("ends with the contribution of rank %d %d times: %s", rank, n, x.terms.format(got.term))
		}
	}
	if got.at != want.at {
		return fmt.Sprintf("ends with element %d of the reduction, want %d", got.at, want.at)
	}
	if p.Order == Any && x.terms.divisions(got.term) == x.terms.divisions(want.term) {
		return ""
	}
	return fmt.Sprintf("ends with another tree: %s, want %s", x.terms.format(got.term), x.terms.format(want.term))
}

// valueOf prints the value of a rank's elements.
func (x *proof) valueOf(v value) string {
	if v.at == 0 {
		return x.terms.format(v.term)
	}
	return fmt.Sprintf("%s from element %d on", x.terms.format(v.term), v.at)
}
