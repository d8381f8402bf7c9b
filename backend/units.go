package backend

import (
	"container/heap"
	"maps"
	"slices"
)

// unit is what an instruction executes: a loop, a product, a subgraph of the Go backend, …
type unit struct {
	kind   unitKind
	nodes  []*node
	joined *unit          // the unit that has taken its nodes
	needs  map[*unit]bool // units whose results it reads
	users  map[*unit]bool // units that read its results
	rank   int            // larger than those of the units that it needs
	first  int            // the first point that needs it
	point  *point         // of a pointUnit

	constant bool // it reads constants only, and is not a foreignUnit

	// Of a loop: elements of its widest nodes, and of a row; 0 if it has no rows yet.
	elements, columns int
}

type unitKind uint8

const (
	singleUnit unitKind = iota // one node
	loopUnit
	foreignUnit // a subgraph
	pointUnit   // a call of all-reduces, or a bucket
)

func (u *unit) root() *unit {
	for u.joined != nil {
		u = u.joined
	}
	return u
}

// requires lists the units whose results u reads.
func (u *unit) requires() []*unit {
	var list []*unit
	for d := range u.needs {
		if r := d.root(); r != u {
			list = append(list, r)
		}
	}
	return list
}

// raise makes the rank of u at least this, and those of its users larger.
func (u *unit) raise(rank int) {
	if u.rank < rank {
		u.rank = rank
		u.raiseUsers()
	}
}

func (u *unit) raiseUsers() {
	for x := range u.users {
		if r := x.root(); r != u {
			r.raise(u.rank + 1)
		}
	}
}

// need records that u reads results of d.
func (u *unit) need(d *unit) {
	u.needs[d], d.users[u] = true, true
	u.raise(d.rank + 1)
}

// reaches reports whether a unit, or what it depends on, is the target. It visits units of larger ranks only, so that
// the time to plan a graph is not quadratic in the number of its units.
func reaches(from, target *unit, seen map[*unit]bool) bool {
	if from == target {
		return true
	}
	if from.rank <= target.rank || seen[from] {
		return false
	}
	seen[from] = true
	for _, d := range from.requires() {
		if reaches(d, target, seen) {
			return true
		}
	}
	return false
}

// alone gives n a new unit.
func (p *planner) alone(n *node) {
	p.enter(n, newUnit(singleUnit, n))
}

// newUnit returns a unit for n, which is not in it yet.
func newUnit(kind unitKind, n *node) *unit {
	return &unit{kind: kind, needs: map[*unit]bool{}, users: map[*unit]bool{}, constant: n.constant()}
}

// enter puts n into a unit.
func (p *planner) enter(n *node, u *unit) {
	if len(u.nodes) == 0 {
		p.units = append(p.units, u)
	}
	n.unit = u
	u.nodes = append(u.nodes, n)
	for _, v := range n.in {
		if v.of != nil && v.of.unit != nil && v.of.unit.root() != u {
			u.need(v.of.unit.root())
		}
	}
}

// constant reports whether the elements of n depend on no parameter and on no subgraph.
func (n *node) constant() bool {
	switch {
	case n.unit != nil:
		return n.unit.root().constant
	case n.kind == parameterNode || n.kind == foreignNode || n.kind == pointNode:
		return false
	}
	return !slices.ContainsFunc(n.in, func(v view) bool { return !v.of.constant() })
}

// level is how many values a node has in a loop.
type level uint8

const (
	outside  level = iota
	perRow         // one for each row
	elements       // all elements
)

// levelOf returns the level of a node that belongs to the loop u.
func (u *unit) levelOf(n *node) level {
	if n.kind == rowNode {
		return perRow
	}
	if size(n.dims) == u.elements {
		return elements
	}
	return perRow
}

// relation returns how an operand that the loop u computes can be read within it, if it has rows of so many columns: at
// its own level, or spread from a number per row. outside means that it cannot be read there.
func (u *unit) relation(v view, columns int) level {
	if v.identity() {
		return u.levelOf(v.of)
	}
	if u.levelOf(v.of) != perRow || columns == 0 || v.offset != 0 {
		return outside
	}
	// A prefix of the axes has the rows in their order; the others repeat.
	rows, repeats := u.elements/columns, 1
	at := len(v.dims)
	for at > 0 && (v.strides[at-1] == 0 || v.dims[at-1] == 1) && repeats < columns {
		at--
		repeats *= v.dims[at]
	}
	prefix := view{dims: v.dims[:at], strides: v.strides[:at]}
	if repeats == columns && size(prefix.dims) == rows && size(v.of.dims) == rows && prefix.contiguous() {
		return perRow
	}
	return outside
}

// accepts reports whether n can be computed in the loop u.
func (u *unit) accepts(n *node) bool {
	columns, own := u.columns, elements
	switch {
	case n.kind == rowNode:
		if columns != 0 && n.columns() != columns || n.rows()*n.columns() != u.elements {
			return false
		}
		columns, own = n.columns(), elements
	case size(n.dims) == u.elements:
	case columns != 0 && size(n.dims)*columns == u.elements:
		own = perRow
	default:
		return false
	}
	for _, v := range n.in {
		if v.of.unit == nil || v.of.unit.root() != u {
			continue
		}
		at := u.relation(v, columns)
		if at == outside || own == perRow && !(v.identity() && at == perRow) {
			return false
		}
	}
	for _, v := range n.in { // nothing that n reads from elsewhere may need u
		if v.of.unit != nil && v.of.unit.root() != u && reaches(v.of.unit.root(), u, map[*unit]bool{}) {
			return false
		}
	}
	return true
}

// rows and columns are those of the operand of a rowNode.
func (n *node) rows() int    { return size(n.dims) }
func (n *node) columns() int { return size(n.in[0].dims) / size(n.dims) }

// place puts an element, row or foreign node into the unit of its operands if it can be computed there, and otherwise
// into a new one.
func (p *planner) place(n *node) {
	kind := loopUnit
	if n.kind == foreignNode {
		kind = foreignUnit
	}
	var home *unit
	for _, v := range n.in {
		if v.of == nil || v.of.unit == nil || kind == loopUnit && size(n.dims) == 0 {
			continue
		}
		u := v.of.unit.root()
		if u.kind != kind || u == home || u.constant != n.constant() {
			continue
		}
		if kind == foreignUnit {
			if p.foreignAccepts(u, n) && (home == nil || p.merge(home, u)) {
				home = u.root()
			}
			continue
		}
		if !u.accepts(n) {
			continue
		}
		if home == nil {
			home = u
			continue
		}
		if p.merge(home, u) && !home.accepts(n) {
			panic("backend: merged loops do not accept what each of them does")
		}
	}
	if home == nil {
		home = newUnit(kind, n)
		home.elements = size(n.dims)
		if n.kind == rowNode {
			home.elements = n.rows() * n.columns()
		}
	}
	if n.kind == rowNode {
		home.columns = n.columns()
	}
	p.enter(n, home)
}

// foreignAccepts reports whether n can be computed in the subgraph u.
func (p *planner) foreignAccepts(u *unit, n *node) bool {
	for _, v := range n.in {
		if v.of != nil && v.of.unit != nil && v.of.unit.root() != u && reaches(v.of.unit.root(), u, map[*unit]bool{}) {
			return false
		}
	}
	return true
}

// prune removes the nodes from which no output is computed.
func (p *planner) prune(outputs []*node) {
	used := map[*node]bool{}
	for pending := slices.Clone(outputs); len(pending) > 0; {
		n := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		if n == nil || used[n] {
			continue
		}
		used[n] = true
		for _, v := range n.in {
			pending = append(pending, v.of)
		}
		if n.kind == foreignNode { // the other results of its operation
			pending = append(pending, p.foreign[n.op]...)
		}
	}
	unused := func(n *node) bool { return !used[n] }
	p.nodes = slices.DeleteFunc(p.nodes, unused)
	for _, u := range p.units {
		u.nodes = slices.DeleteFunc(u.nodes, unused)
	}
	p.dropEmpty()
}

// dropEmpty removes the units without nodes, and finds what the others need.
func (p *planner) dropEmpty() {
	p.units = slices.DeleteFunc(p.units, func(u *unit) bool { return len(u.nodes) == 0 })
	for _, u := range p.units {
		u.needs = map[*unit]bool{}
		for _, n := range u.nodes {
			for _, v := range n.in {
				if v.of != nil && v.of.unit != nil && v.of.unit.root() != u {
					u.needs[v.of.unit.root()] = true
				}
			}
		}
	}
}

// merge lets one unit take the nodes of another one, unless a unit between them would have to run within it, or they
// have different rows.
func (p *planner) merge(to, from *unit) bool {
	if to.kind == loopUnit && (to.elements != from.elements ||
		to.columns != 0 && from.columns != 0 && to.columns != from.columns) {
		return false
	}
	for _, pair := range [][2]*unit{{to, from}, {from, to}} {
		for _, d := range pair[0].requires() {
			if d != pair[1] && reaches(d, pair[1], map[*unit]bool{}) {
				return false
			}
		}
	}
	if to.kind == loopUnit { // what one reads of the other must be readable in a loop
		columns := max(to.columns, from.columns)
		for _, pair := range [][2]*unit{{to, from}, {from, to}} {
			for _, n := range pair[0].nodes {
				for _, v := range n.in {
					if v.of.unit == nil || v.of.unit.root() != pair[1] {
						continue
					}
					at := pair[1].relation(v, columns)
					if at == outside || n.kind != rowNode && pair[0].levelOf(n) == perRow && !(v.identity() && at == perRow) {
						return false
					}
				}
			}
		}
	}
	to.columns = max(to.columns, from.columns)
	to.nodes = append(to.nodes, from.nodes...)
	slices.SortFunc(to.nodes, func(a, b *node) int { return a.index - b.index })
	maps.Copy(to.needs, from.needs)
	maps.Copy(to.users, from.users)
	from.joined, from.nodes = to, nil
	to.rank = max(to.rank, from.rank)
	to.raiseUsers()
	return true
}

// ordered returns the units in an order in which they can run: those that the first points need are first, and near the
// order of recording.
func (p *planner) ordered() []*unit {
	waiting, users := map[*unit]int{}, map[*unit][]*unit{}
	var ready unitHeap
	for _, u := range p.units {
		if u.joined != nil {
			continue
		}
		list := u.requires()
		slices.SortFunc(list, func(a, b *unit) int { return a.nodes[0].index - b.nodes[0].index })
		list = slices.Compact(list)
		waiting[u] = len(list)
		for _, d := range list {
			users[d] = append(users[d], u)
		}
		if len(list) == 0 {
			heap.Push(&ready, u)
		}
	}
	var order []*unit
	for len(ready) > 0 {
		u := heap.Pop(&ready).(*unit)
		order = append(order, u)
		for _, x := range users[u] {
			if waiting[x]--; waiting[x] == 0 {
				heap.Push(&ready, x)
			}
		}
	}
	if len(order) != len(waiting) {
		panic("backend: the units of a plan depend on each other")
	}
	return order
}

// recorded returns the index of the first node that another loop has not left to u.
func (u *unit) recorded() int {
	return u.nodes[max(0, slices.IndexFunc(u.nodes, func(n *node) bool { return !n.sunk }))].index
}

type unitHeap []*unit

func (h unitHeap) Len() int { return len(h) }

func (h unitHeap) Less(i, j int) bool {
	return h[i].first < h[j].first || h[i].first == h[j].first && h[i].recorded() < h[j].recorded()
}

func (h unitHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *unitHeap) Push(x any) { *h = append(*h, x.(*unit)) }

// Pop implements heap.Interface.
func (h *unitHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
