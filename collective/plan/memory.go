package plan

import "slices"

// value is what elements hold, symbolically: element i of a run holds element at+i of the vectors that the term is made of.
type value struct {
	term term
	at   int
}

// piece is a run of values.
type piece struct {
	length int
	value
}

// join appends a piece to a list, to its last if they are one.
func join(list []piece, p piece) []piece {
	if n := len(list) - 1; n >= 0 && list[n].term == p.term && list[n].at+list[n].length == p.at {
		list[n].length += p.length
		return list
	}
	return append(list, p)
}

// run is elements of a memory that have the same history, from lo to the next run.
type run struct {
	lo int
	value
	writer event   // the last write, or the owner's entry
	reads  []event // since then
}

// memory is what one buffer of a rank lies in, or several.
type memory struct {
	length int
	runs   []run // in order; they cover it
}

func newMemory(length int, writer event) memory {
	m := memory{length: length}
	if length > 0 {
		m.runs = []run{{writer: writer}}
	}
	return m
}

// cut lets a run begin at an element and returns its index, or at the end how many runs there are.
func (m *memory) cut(at int) int {
	i, found := slices.BinarySearchFunc(m.runs, at, func(r run, at int) int { return r.lo - at })
	if found || at == m.length {
		return i
	}
	r := m.runs[i-1]
	r.at += at - r.lo
	r.lo, r.reads = at, slices.Clone(r.reads)
	m.runs = slices.Insert(m.runs, i, r)
	return i
}

// end returns where the run of an index ends.
func (m *memory) end(i int) int {
	if i+1 < len(m.runs) {
		return m.runs[i+1].lo
	}
	return m.length
}

// put replaces the runs of [lo, hi), which were cut, by values of one write.
func (m *memory) put(first, last, lo int, values []piece, writer event) {
	if last-first == len(values) {
		for i, p := range values {
			r := &m.runs[first+i]
			r.lo, r.value, r.writer, r.reads = lo, p.value, writer, r.reads[:0]
			lo += p.length
		}
		return
	}
	runs := make([]run, len(values))
	for i, p := range values {
		runs[i] = run{lo: lo, value: p.value, writer: writer}
		lo += p.length
	}
	m.runs = slices.Replace(m.runs, first, last, runs...)
}

// seen notes a read, and forgets those that its reader knows of.
func (r *run) seen(e event, now clock) {
	kept := r.reads[:0]
	for _, other := range r.reads {
		if !now.after(other) {
			kept = append(kept, other)
		}
	}
	r.reads = append(kept, e)
}
