package backend

import "slices"

// sink moves nodes from the loop of their operands into the one loop that reads them, if that then reads no more memory
// than before. A gradient's factor that depends on the forward pass only is such a node: it would be stored until the
// backward pass, which reads its operands anyway.
func (p *planner) sink(outputs []*node) {
	for _, n := range slices.Backward(slices.Clone(p.nodes)) {
		p.sinkNode(n, outputs)
	}
	p.dropEmpty()
}

// indexReaders lists the nodes that read each node.
func (p *planner) indexReaders() {
	p.readers = map[*node][]*node{}
	for _, n := range p.nodes {
		p.addReader(n)
	}
}

func (p *planner) addReader(n *node) {
	for _, v := range n.in {
		if list := p.readers[v.of]; len(list) == 0 || list[len(list)-1] != n {
			p.readers[v.of] = append(list, n)
		}
	}
}

func (p *planner) sinkNode(n *node, outputs []*node) {
	if n.kind != elementNode || slices.Contains(outputs, n) || len(p.readers[n]) == 0 {
		return
	}
	from, to := n.unit.root(), p.readers[n][0].unit.root()
	if from == to || to.kind != loopUnit || from.constant || from.levelOf(n) != elements || size(n.dims) != to.elements {
		return
	}
	for _, m := range p.readers[n] {
		if m.unit.root() != to || slices.ContainsFunc(m.in, func(v view) bool { return v.of == n && !v.identity() }) {
			return
		}
	}
	s := sinking{p: p, from: from, to: to, outputs: outputs}
	if !s.take(n) || s.loads > 1 {
		return
	}
	from.nodes = slices.DeleteFunc(from.nodes, func(m *node) bool { return slices.Contains(s.moved, m) })
	for _, m := range s.moved {
		for i, v := range m.in {
			if at := slices.Index(s.copied, v.of); at >= 0 {
				p.readers[v.of] = slices.DeleteFunc(p.readers[v.of], func(r *node) bool { return r == m })
				m.in[i].of = s.copies[at]
				p.readers[s.copies[at]] = append(p.readers[s.copies[at]], m)
			}
		}
		m.unit = to
	}
	for i, c := range s.copies {
		p.addReader(c)
		if x := s.copied[i]; len(p.readers[x]) == 0 {
			from.nodes = slices.DeleteFunc(from.nodes, func(m *node) bool { return m == x })
		}
	}
	p.nodes = append(p.nodes, s.copies...)
	s.moved = append(s.moved, s.copies...)
	for _, m := range s.moved {
		m.sunk = true
	}
	to.nodes = append(to.nodes, s.moved...)
	slices.SortStableFunc(to.nodes, func(a, b *node) int { return a.index - b.index })
}

// sinking is what moves with a node.
type sinking struct {
	p        *planner
	from, to *unit
	outputs  []*node
	moved    []*node
	copied   []*node // which the loop where they are needs, too
	copies   []*node
	read     []*node // from memory
	loads    int     // of memory that the other loop does not read yet
}

// take adds a node, and the operands that only it needs.
func (s *sinking) take(n *node) bool {
	s.moved = append(s.moved, n)
	for _, v := range n.in {
		switch x := v.of; {
		case slices.Contains(s.moved, x) || slices.Contains(s.copied, x):
		case s.stored(x):
			s.load(v)
		case !slices.ContainsFunc(s.p.readers[x], func(m *node) bool { return !slices.Contains(s.moved, m) }):
			if x.kind != elementNode || !s.take(x) {
				return false
			}
		case x.kind == elementNode && x.cheap && !slices.ContainsFunc(x.in, func(v view) bool { return !s.stored(v.of) }):
			c := *x
			c.in, c.unit = slices.Clone(x.in), s.to
			s.copied, s.copies = append(s.copied, x), append(s.copies, &c)
			for _, v := range x.in {
				s.load(v)
			}
		default:
			return false
		}
	}
	return true
}

// stored reports whether another loop can read x at little cost.
func (s *sinking) stored(x *node) bool {
	return x.unit == nil || x.unit.root() != s.from || s.from.levelOf(x) == perRow || slices.Contains(s.outputs, x) ||
		slices.ContainsFunc(s.p.readers[x], func(m *node) bool { return m.unit.root() != s.from })
}

func (s *sinking) load(v view) {
	x := v.of
	if size(x.dims) < s.to.elements || slices.Contains(s.read, x) ||
		slices.ContainsFunc(s.p.readers[x], func(m *node) bool { return m.unit.root() == s.to }) {
		return
	}
	s.read = append(s.read, x)
	s.loads++
}
