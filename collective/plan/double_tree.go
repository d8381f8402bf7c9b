package plan

import (
	"math/bits"
	"time"
)

// doubleTree sends the two halves of a vector along two trees concurrently, in segments, so that all ranks
// are busy in both directions (P. Sanders, J. Speck, J. Träff, 2009, do so with trees of ranks; here the
// reduce tree is the canonical one).
//
// Reduce: each node of the canonical tree is between two neighbours: its left operand ends with rank x-1, its
// right one begins with rank x. No two nodes have the same x. For the first half of the vector rank x-1
// combines node x, for the second half rank x does. Of two nodes x and x+1, one is a pair of ranks, whose sum
// costs one frame, so every rank has much work in one tree only: it receives both operands of a node there,
// and in the other tree only its neighbour's contribution.
//
// Broadcast: in-order binary trees over the ranks, numbered from the rank that has the sum; a rank that
// forwards segments in one tree is a leaf of the other.
//
// Segments are sent by a fixed schedule. A period has five time slots (for an all-reduce: three to reduce,
// two to broadcast); in each slot a rank sends at most one frame and receives at most one. Neighbours
// exchange in the first; the remaining frames of each phase have two slots, coloured so that no rank sends
// twice, or receives twice, in one slot. Each level of a tree is one period behind the level below. So every
// slot is a matching of all ranks, and there are no cyclic waits.
var doubleTree = Algorithm{
	Name:  "double_tree",
	Fits:  func(p Problem) error { return fitsOps("double_tree", p, AllReduce, Reduce, Broadcast) },
	Steps: generator(doubleTreeSteps),
	Cost:  doubleTreeCost,
}

func doubleTreeSteps(p Problem, rank int, w *writer) {
	d := schedule{p: p, rank: rank, own: rank % 2, result: Work}
	d.segments, d.base = doubleTreeSegments(p)
	if p.Op == Broadcast {
		d.result = Dst
		d.slots = make([]timeSlot, 2)
		d.down(broadcastTree{p.Size, [2]int{p.Root, p.Root}}, 0)
		d.run(w)
		if rank == p.Root {
			w.put(duplicate(p.all(Src), p.all(Dst)))
		}
		return
	}
	t := reduceTree{p.Size}
	d.slots = make([]timeSlot, 5)
	d.up(t)
	if p.Op == AllReduce {
		d.down(broadcastTree{p.Size, [2]int{t.host(leftTree, t.top()), t.host(rightTree, t.top())}}, 3)
	} else {
		d.home(t)
	}
	d.contribute(w)
	d.run(w)
	if p.Op == AllReduce || rank == p.Root {
		w.put(duplicate(p.all(Work), p.all(Dst)))
	}
}

// doubleTreeSegments returns the number of segments of a half, and the number of levels of the reduce trees.
func doubleTreeSegments(p Problem) (segments, base int) {
	levels := bits.Len(uint(p.Size - 1))
	if p.Op == Broadcast {
		return segmentsOf(p.Count/2, levels), 0
	}
	base = max(0, levels-1)
	if p.Op == AllReduce {
		levels *= 2
	}
	return segmentsOf(p.Count/2, levels), base
}

// schedule is a rank's part in the two trees.
type schedule struct {
	p        Problem
	rank     int
	own      int    // the tree in which its own contribution is an operand of what it combines itself
	result   Buffer // where received data is stored
	segments int
	base     int // the level of the sum
	slots    []timeSlot
}

// timeSlot is what a rank does in one time slot of each period: it sends, and receives, at most one segment.
type timeSlot struct{ out, in move }

// move sends a segment of a tree to a peer, or receives one, in each of as many periods as there are
// segments, starting at period level.
type move struct {
	on     bool
	peer   int
	tree   int
	level  int
	side   Side // in
	source bool // out: the rank's own contribution, in Src
	whole  bool // in: completes the sum
}

// up adds the moves of the reduce tree: time slot 0 to exchange with a neighbour, 1 and 2 for the nodes of
// higher levels.
func (d *schedule) up(t reduceTree) {
	if peer := d.rank ^ 1; peer < d.p.Size {
		d.slots[0] = timeSlot{
			out: move{on: true, peer: peer, tree: 1 - d.own, source: true},
			in:  move{on: true, peer: peer, tree: d.own, side: Right - Side(d.own), whole: t.hosted(d.own, d.rank) == t.top()},
		}
	} else {
		d.own = rightTree // the last rank without a neighbour is a right operand
	}
	for tree := range 2 {
		if x := t.hosted(tree, d.rank); t.level(x) > 0 && x > 0 {
			d.combine(t, tree, x)
		}
		if a, ok := t.out(tree, d.rank); ok {
			above := t.parent(a.child)
			d.slots[1+colour(a, t.atSender, t.atReceiver)].out = move{
				on: true, peer: t.host(tree, above), tree: tree, level: t.level(above), source: a.child == t.size,
			}
		}
	}
}

// combine adds the moves by which a host receives the operands of a node: the first one replaces the buffer's
// contents, which were already sent; the second is combined with it.
func (d *schedule) combine(t reduceTree, tree, x int) {
	have := tree == d.own && x == d.p.Size-1 && d.p.Size%2 == 1 // the right operand is its own contribution
	left, right := t.children(x)
	var slots [2]move
	for _, child := range []int{left, right} {
		if a := (arc{tree, child}); t.climbs(a) {
			side := Left
			if child == right {
				side = Right
			}
			slots[colour(a, t.atSender, t.atReceiver)] = move{
				on: true, peer: t.host(tree, child), tree: tree, level: t.level(x),
				side: side,
			}
		}
	}
	for i := range slots {
		if m := &slots[i]; m.on {
			if !have {
				m.side = Replace
			}
			m.whole = have && x == t.top()
			have = true
			d.slots[1+i].in = *m
		}
	}
}

// down adds the moves from the roots to all ranks, starting at a time slot.
func (d *schedule) down(t broadcastTree, first int) {
	for tree := range 2 {
		if u := t.number(tree, d.rank); u > 0 {
			above := t.parent(u)
			d.slots[first+colour(arc{tree, u}, t.atSender, t.atReceiver)].in = move{
				on: true, peer: t.rank(tree, above), tree: tree, level: d.base + t.depth(above),
			}
		}
	}
	for _, a := range t.sent(d.rank) {
		d.slots[first+colour(a, t.atSender, t.atReceiver)].out = move{
			on: true, peer: t.rank(a.tree, a.child), tree: a.tree, level: d.base + t.depth(t.number(a.tree, d.rank)),
			source: d.p.Op == Broadcast && d.rank == d.p.Root,
		}
	}
}

// home adds the moves from the ranks that have the sums to the root of a Reduce.
func (d *schedule) home(t reduceTree) {
	for tree := range 2 {
		host := t.host(tree, t.top())
		if t.size == 1 || host == d.p.Root {
			continue
		}
		if d.rank == host {
			d.slots[3+tree].out = move{on: true, peer: d.p.Root, tree: tree, level: d.base}
		}
		if d.rank == d.p.Root {
			d.slots[3+tree].in = move{on: true, peer: host, tree: tree, level: d.base}
		}
	}
}

// contribute copies the contribution to where the rank combines it.
func (d *schedule) contribute(w *writer) {
	if d.p.Size > 1 {
		w.put(duplicate(d.half(Src, d.own), d.half(Work, d.own)))
		return
	}
	w.put(duplicate(d.p.all(Src), d.p.all(Work)))
	if d.p.Reduce == Mean {
		w.put(scale(d.p.all(Work)))
	}
}

// run executes the time slots, period after period.
func (d *schedule) run(w *writer) {
	periods := 0
	for _, b := range d.slots {
		for _, m := range []move{b.out, b.in} {
			if m.on {
				periods = max(periods, m.level+d.segments)
			}
		}
	}
	for period := range periods {
		for _, b := range d.slots {
			s := Step{Kind: Exchange, To: -1, From: -1}
			if i := period - b.out.level; b.out.on && i >= 0 && i < d.segments {
				s.To, s.Out = b.out.peer, d.segment(d.result, b.out.tree, i)
				if b.out.source {
					s.Out.Buffer = Src
				}
			}
			i := period - b.in.level
			arrives := b.in.on && i >= 0 && i < d.segments
			if arrives {
				s.From, s.In, s.Side = b.in.peer, d.segment(d.result, b.in.tree, i), b.in.side
			}
			if s.To >= 0 || s.From >= 0 {
				w.put(s)
			}
			if arrives && b.in.whole && d.p.Reduce == Mean {
				w.put(scale(s.In))
			}
		}
	}
}

// half returns the half of the vector that uses a tree.
func (d *schedule) half(b Buffer, tree int) Span {
	lo, hi := slice(d.p.Count, 2, tree)
	return Span{b, lo, hi}
}

// segment returns one segment of a half.
func (d *schedule) segment(b Buffer, tree, i int) Span {
	whole := d.half(b, tree)
	lo, hi := slice(whole.length(), d.segments, i)
	return Span{b, whole.Lo + lo, whole.Lo + hi}
}

// The two trees, by the rank that combines node x: rank x-1 or rank x.
const (
	leftTree = iota
	rightTree
)

// arc is a transfer from one rank to another in a tree. Reduce: the sum of node child of the canonical tree,
// to its parent's host. Broadcast: to the rank numbered child.
type arc struct{ tree, child int }

func (a arc) before(b arc) bool { return a.tree < b.tree || a.tree == b.tree && a.child < b.child }

// reduceTree is the canonical tree over size ranks as nodes 1 to size-1: the right operand of node x begins
// with rank x. Node size is the last rank without a neighbour, where it is the right operand of a node of a
// higher level.
type reduceTree struct{ size int }

func (t reduceTree) top() int { return 1 << bits.Len(uint(t.size-1)) >> 1 }

// level returns the level of a node: its left operand has 2^level ranks.
func (t reduceTree) level(x int) int { return bits.TrailingZeros(uint(x)) }

// children returns the nodes that are a node's operands; 0: a rank.
func (t reduceTree) children(x int) (left, right int) {
	c := t.level(x)
	if c > 0 {
		left = x - 1<<(c-1)
	}
	if length := min(1<<c, t.size-x); length > 1 {
		right = x + 1<<bits.Len(uint(length-1))>>1
	} else if c > 0 {
		right = t.size
	}
	return left, right
}

// parent returns the node that a node is an operand of, or 0 for the root.
func (t reduceTree) parent(x int) int {
	switch {
	case x == t.size:
		return t.size - 1
	case x == t.top():
		return 0
	}
	return inOrderParent(x, t.size)
}

// inOrderParent returns the parent of number x in the in-order binary tree over the numbers 1 to size-1; 0 for the top.
func inOrderParent(x, size int) int {
	bit := x & -x
	if up := x&^bit | bit<<1; x&(bit<<1) == 0 && up < size {
		return up
	}
	return x &^ bit
}

// host returns the rank that combines a node.
func (t reduceTree) host(tree, x int) int { return x - 1 + tree }

// hosted returns the node that a rank combines, or 0.
func (t reduceTree) hosted(tree, rank int) int {
	if x := rank + 1 - tree; x > 0 && x < t.size {
		return x
	}
	return 0
}

// climbs reports whether an arc of the reduce tree exists: from a node that is not the root to the host of a
// node of a higher level. No rank combines node size; in the right tree its rank is the host of the parent.
func (t reduceTree) climbs(a arc) bool {
	if a.child == t.size {
		return a.tree == leftTree && t.size%2 == 1 && t.size > 1
	}
	return a.child > 0 && a.child != t.top()
}

// out returns the arc of the reduce tree that a rank sends in a tree.
func (t reduceTree) out(tree, rank int) (arc, bool) {
	a := arc{tree, rank + 1 - tree}
	return a, t.climbs(a)
}

// atSender returns the other arc of an arc's sender in the reduce trees, and atReceiver that of its receiver.
func (t reduceTree) atSender(a arc) (arc, bool) { return t.out(1-a.tree, t.host(a.tree, a.child)) }

func (t reduceTree) atReceiver(a arc) (arc, bool) {
	left, right := t.children(t.parent(a.child))
	other := arc{a.tree, left}
	if a.child == left {
		other.child = right
	}
	return other, t.climbs(other)
}

// broadcastTree is the two broadcast trees: numbers from the root, 0; numbers 1 to size-1 are an in-order
// tree, and the root sends to its top.
type broadcastTree struct {
	size  int
	roots [2]int // the ranks that have the halves
}

// number returns a rank's number in a tree. In the second tree the numbers are shifted by one, or mirrored
// where that swaps odd and even: odd numbers are leaves.
func (t broadcastTree) number(tree, rank int) int {
	u := (rank - t.roots[tree] + t.size) % t.size
	if tree == leftTree || t.roots[0] != t.roots[1] || u == 0 {
		return u // if the roots are neighbours, the shift is already there
	}
	if t.size%2 == 1 {
		return t.size - u
	}
	return (u+t.size-3)%(t.size-1) + 1
}

func (t broadcastTree) rank(tree, number int) int {
	u := number
	if tree == rightTree && t.roots[0] == t.roots[1] && number > 0 {
		if u = t.size - number; t.size%2 == 0 {
			u = number%(t.size-1) + 1
		}
	}
	return (u + t.roots[tree]) % t.size
}

// parent returns the sender for a number above 0.
func (t broadcastTree) parent(u int) int { return inOrderParent(u, t.size) }

// children returns the numbers that a number sends to; 0: none.
func (t broadcastTree) children(u int) (left, right int) {
	if u == 0 {
		return 1 << bits.Len(uint(t.size-1)) >> 1, 0
	}
	below := u & -u / 2
	if left = u - below; below == 0 {
		return 0, 0
	}
	for u+below >= t.size {
		below /= 2
	}
	if below > 0 {
		right = u + below
	}
	return left, right
}

// depth returns how many arcs are between the root and a number.
func (t broadcastTree) depth(u int) int {
	d := 0
	for ; u > 0; u = t.parent(u) {
		d++
	}
	return d
}

// sent returns the arcs of the broadcast trees that a rank sends, at most two in both trees together.
func (t broadcastTree) sent(rank int) (arcs []arc) {
	for tree := range 2 {
		left, right := t.children(t.number(tree, rank))
		for _, u := range []int{left, right} {
			if u > 0 {
				arcs = append(arcs, arc{tree, u})
			}
		}
	}
	return arcs
}

func (t broadcastTree) atSender(a arc) (arc, bool) {
	for _, b := range t.sent(t.rank(a.tree, t.parent(a.child))) {
		if b != a {
			return b, true
		}
	}
	return arc{}, false
}

func (t broadcastTree) atReceiver(a arc) (arc, bool) {
	b := arc{1 - a.tree, t.number(1-a.tree, t.rank(a.tree, a.child))}
	return b, b.child > 0
}

// colour returns 0 or 1 for an arc, such that the two arcs that a rank sends have different colours, and so
// have the two that it receives. Alternating between senders and receivers, the arcs form paths and cycles.
// The colours alternate along them, starting at the lower end of a path, or at the lowest arc of a cycle.
func colour(a arc, atSender, atReceiver func(arc) (arc, bool)) int {
	walk := func(first, second func(arc) (arc, bool)) (end arc, steps int, closed bool) {
		lowest, at := a, 0
		for end = a; ; steps++ {
			next, ok := first(end)
			switch {
			case !ok:
				return end, steps, false
			case next == a:
				return lowest, at, true
			case next.before(lowest):
				lowest, at = next, steps+1
			}
			end = next
			first, second = second, first
		}
	}
	end, steps, closed := walk(atReceiver, atSender)
	if closed {
		return steps % 2
	}
	other, more, _ := walk(atSender, atReceiver)
	if other.before(end) {
		steps = more
	}
	return steps % 2
}

// doubleTreeCost: the first segments go up and down; then one more segment of each half arrives in each
// period.
func doubleTreeCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	segments, _ := doubleTreeSegments(p)
	half := longestSlice(p.Count, 2)
	d := &scheduleCost{costs: c, size: p.Size, length: longestSlice(half, segments), slow: make([][2]int, p.Size)}
	more, frame := time.Duration(segments-1), c.frame(longestSlice(half, segments))
	if p.Op == Broadcast {
		first := d.allDown(broadcastTree{p.Size, [2]int{p.Root, p.Root}})
		root := 2 * (1 + more) * frame // it still has to copy
		return max(first+frame+d.over(d.Host, d.length)+more*d.period(2), root+c.copying(p.Count))
	}
	t := reduceTree{p.Size}
	if p.Size <= 2 { // exchange, and exchange back
		return c.copying(half) + time.Duration(p.Size-1)*(1+more)*(2*frame+c.combining(2*d.length))
	}
	first := max(d.up(t, leftTree, t.top()), d.up(t, rightTree, t.top()))
	if p.Op == AllReduce {
		// a rank of both trees has to wait for the other
		first += d.allDown(broadcastTree{p.Size, [2]int{t.top() - 1, t.top()}}) + 2*frame
	} else {
		for tree := range 2 {
			if host := t.host(tree, t.top()); host != p.Root {
				first += d.send(host, p.Root)
			}
		}
	}
	return c.copying(half) + first + more*(d.period(5)+3*c.combining(2*d.length))
}

// scheduleCost adds up the time of the frames of a period.
type scheduleCost struct {
	costs
	size, length int
	slow         [][2]int // by rank: how many frames it sends over the network, and receives
}

func (d *scheduleCost) send(from, to int) time.Duration {
	link := d.link(from, to)
	if link != d.Host {
		d.slow[from][0]++
		d.slow[to][1]++
	}
	return d.over(link, d.length)
}

// up returns when a node of a tree has the first segment.
func (d *scheduleCost) up(t reduceTree, tree, x int) (ready time.Duration) {
	if t.level(x) == 0 {
		return d.send(x-tree, t.host(tree, x)) + d.combining(2*d.length)
	}
	left, right := t.children(x)
	took := d.combining(2 * d.length)
	for _, child := range []int{left, right} {
		if child > 0 && child < d.size {
			ready = max(ready, d.up(t, tree, child))
		}
		if t.climbs(arc{tree, child}) {
			took += d.send(t.host(tree, child), t.host(tree, x))
		}
	}
	return ready + took
}

// allDown returns when all ranks have the first segments of both trees.
func (d *scheduleCost) allDown(t broadcastTree) (last time.Duration) {
	for tree := range 2 {
		last = max(last, d.down(t, tree, 0))
	}
	return last
}

// down returns how long the subtree of a number waits after that number has received the first segment.
func (d *scheduleCost) down(t broadcastTree, tree, u int) (last time.Duration) {
	left, right := t.children(u)
	took := time.Duration(0)
	for _, child := range []int{left, right} {
		if child > 0 {
			took += d.send(t.rank(tree, u), t.rank(tree, child))
			last = max(last, d.down(t, tree, child))
		}
	}
	return took + last
}

// period returns how long a period with this many time slots is: the busiest rank has some over the network,
// where a send and a receive may coincide or not; and where it has other slots, ranks wait for each other.
func (d *scheduleCost) period(slots int) time.Duration {
	slow := 0
	for _, n := range d.slow {
		slow = max(slow, min(slots, (n[0]+n[1]+max(n[0], n[1])+1)/2))
	}
	took := time.Duration(slow)*d.over(d.Network, d.length) + time.Duration(slots-slow)*d.over(d.Host, d.length)
	if slow > 0 && slow < slots {
		took += took / 6
	}
	return took
}
