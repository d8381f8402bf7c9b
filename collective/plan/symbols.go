package plan

import (
	"strconv"
	"strings"
)

// term is a symbolic value of the checker: equal values are equal terms. 0 is the value of memory that was
// never written.
type term int32

// terms creates and stores symbolic values. The zero value is ready to use.
type terms struct {
	of    []symbol // by term; of[0] is unused
	index map[symbol]term
}

// symbol is how a value was made: a rank's contribution (kind leafSymbol, left is its rank), the combination
// of two values, a value divided by the number of ranks, or a value rounded to the type of the call.
type symbol struct {
	kind        symbolKind
	left, right term
}

type symbolKind uint8

const (
	leafSymbol symbolKind = iota + 1
	nodeSymbol
	dividedSymbol
	roundedSymbol
)

func (t *terms) leaf(rank int) term         { return t.make(symbol{kind: leafSymbol, left: term(rank)}) }
func (t *terms) node(left, right term) term { return t.make(symbol{nodeSymbol, left, right}) }
func (t *terms) divided(sum term) term      { return t.make(symbol{kind: dividedSymbol, left: sum}) }

// rounded returns a value rounded to the type of the call: contributions already have that type.
func (t *terms) rounded(v term) term {
	if k := t.of[v].kind; k == leafSymbol || k == roundedSymbol {
		return v
	}
	return t.make(symbol{kind: roundedSymbol, left: v})
}

func (t *terms) isRounded(v term) bool { return t.of[v].kind == roundedSymbol }

func (t *terms) make(s symbol) term {
	if v, ok := t.index[s]; ok {
		return v
	}
	if t.index == nil {
		t.index, t.of = map[symbol]term{}, make([]symbol, 1)
	}
	v := term(len(t.of))
	t.of = append(t.of, s)
	t.index[s] = v
	return v
}

// count adds how often each rank contributed to a value.
func (t *terms) count(v term, by []int) {
	switch s := t.of[v]; s.kind {
	case leafSymbol:
		by[s.left]++
	case nodeSymbol:
		t.count(s.left, by)
		t.count(s.right, by)
	case dividedSymbol, roundedSymbol:
		t.count(s.left, by)
	}
}

// divisions returns how often a value was divided as a whole, or -1 if a part of it was.
func (t *terms) divisions(v term) int {
	n := 0
	for ; t.of[v].kind == dividedSymbol || t.of[v].kind == roundedSymbol; v = t.of[v].left {
		if t.of[v].kind == dividedSymbol {
			n++
		}
	}
	if t.divides(v) {
		return -1
	}
	return n
}

func (t *terms) divides(v term) bool {
	switch s := t.of[v]; s.kind {
	case nodeSymbol:
		return t.divides(s.left) || t.divides(s.right)
	case dividedSymbol, roundedSymbol:
		return true
	}
	return false
}

// format prints a value in terms of the ranks that contributed: ((0+1)+2)/n.
func (t *terms) format(v term) string {
	var b strings.Builder
	t.print(&b, v)
	if text := b.String(); len(text) <= formatMax {
		return text
	}
	return b.String()[:formatMax] + "…"
}

const formatMax = 600

func (t *terms) print(b *strings.Builder, v term) {
	if b.Len() > formatMax {
		return
	}
	if v == 0 {
		b.WriteByte('?')
		return
	}
	switch s := t.of[v]; s.kind {
	case leafSymbol:
		b.WriteString(strconv.Itoa(int(s.left)))
	case nodeSymbol:
		b.WriteByte('(')
		t.print(b, s.left)
		b.WriteByte('+')
		t.print(b, s.right)
		b.WriteByte(')')
	case dividedSymbol:
		t.print(b, s.left)
		b.WriteString("/n")
	case roundedSymbol:
		t.print(b, s.left)
	}
}

// clock is a vector clock: how far a rank knows that each rank has progressed.
type clock []int32

// event is a point in time of one rank. The zero event is before all others.
type event struct{ rank, at int32 }

// after reports whether e is known to be in the past.
func (c clock) after(e event) bool { return c[e.rank] >= e.at }

func (c clock) join(other clock) {
	for i, at := range other {
		c[i] = max(c[i], at)
	}
}
