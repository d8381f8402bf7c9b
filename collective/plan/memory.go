package plan

import "slices"

// value is the symbolic value of elements: element i of a run holds element at+i of the vectors that the term
// consists of.
type value struct {
	term term
	at   int
}

// piece is a run of values.
type piece struct {
	length int
	value
}

// join appends a piece to a list, or extends the last piece if they are contiguous.
func join(list []piece, p piece) []piece {
	if n := len(list) - 1; n >= 0 && list[n].term == p.term && list[n].at+list[n].length == p.at {
		list[n].length += p.length
		return list
	}
	return append(list, p)
}

// run is elements of a memory with the same history, from lo to the start of the next run.
type run struct {
	lo int
	value
	writer event // the last write, or the owner's entry
	reader event // a read since then, if any
	others []event
}

// memory is the memory that holds one or several buffers of a rank.
type memory struct {
	length int
	runs   []run // in order; they cover the memory
}

// reset makes it new memory of this length.
func (m *memory) reset(length int, writer event) {
	m.length, m.runs = length, m.runs[:0]
	if length > 0 {
		m.runs = append(m.runs, run{writer: writer})
	}
}

// cut splits the runs so that one begins at the element, and returns its index, or the number of runs at the
// end.
func (m *memory) cut(at int) int {
	if at == m.length {
		return len(m.runs)
	}
	i, j := 0, len(m.runs) // the last run that begins at or before the element
	for j-i > 1 {
		if middle := int(uint(i+j) >> 1); m.runs[middle].lo <= at {
			i = middle
		} else {
			j = middle
		}
	}
	if m.runs[i].lo == at {
		return i
	}
	r := m.runs[i]
	r.at += at - r.lo
	r.lo, r.others = at, slices.Clone(r.others)
	m.runs = slices.Insert(m.runs, i+1, r)
	return i + 1
}

// end returns where the run with this index ends.
func (m *memory) end(i int) int {
	if i+1 < len(m.runs) {
		return m.runs[i+1].lo
	}
	return m.length
}

// put replaces the runs of [lo, hi), already cut, by the values of one write.
func (m *memory) put(first, last, lo int, values []piece, writer event) {
	if n := len(values); n <= last-first {
		m.runs = slices.Delete(m.runs, first+n, last)
	} else {
		m.runs = slices.Insert(m.runs, last, make([]run, n-(last-first))...)
	}
	for i, p := range values {
		m.runs[first+i] = run{lo: lo, value: p.value, writer: writer}
		lo += p.length
	}
}

// seen records a read, and drops the earlier reads that its reader knows of.
func (r *run) seen(e event, now clock) {
	kept := r.others[:0]
	for _, other := range r.others {
		if !now.after(other) {
			kept = append(kept, other)
		}
	}
	if !now.after(r.reader) {
		kept = append(kept, r.reader)
	}
	r.reader, r.others = e, kept
}

// unseen returns an access to the run that a prospective writer does not know of, and its kind.
func (r *run) unseen(now clock) (does string, e event) {
	if !now.after(r.writer) {
		return "writes", r.writer
	}
	if !now.after(r.reader) {
		return "reads", r.reader
	}
	for _, e := range r.others {
		if !now.after(e) {
			return "reads", e
		}
	}
	return "", event{}
}
