// Package undo restores the values that a failed step has overwritten.
package undo

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Cell holds a tensor that steps replace. It may be read while a step writes it. Make one with [NewCell].
type Cell struct {
	value atomic.Pointer[tensor.Tensor]
	saved uint64 // number of the last Run that wrote it; guarded by the log
}

// NewCell returns a cell that holds t.
func NewCell(t *tensor.Tensor) *Cell {
	c := &Cell{}
	c.value.Store(t)
	return c
}

// Load returns the current value; the caller must not change it.
func (c *Cell) Load() *tensor.Tensor { return c.value.Load() }

// Log holds the values that the Run in progress and the Runs inside it have overwritten, in order. The zero
// value is ready to use. Its methods may be called concurrently.
type Log struct {
	mu      sync.Mutex
	entries []entry
	last    uint64 // number of the Run that started last
	current uint64 // number of the innermost Run in progress, 0: none
	open    []Mark // of the Runs in progress, the innermost last
}

type entry struct {
	cell   *Cell
	before *tensor.Tensor
}

// Mark is the position in the log at which a Run started.
type Mark struct {
	entries int
	run     uint64
}

// Begin starts a Run, inside of the Run in progress if there is one.
func (l *Log) Begin() Mark {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	m := Mark{len(l.entries), l.last}
	l.current, l.open = m.run, append(l.open, m)
	return m
}

// End ends the Run that started at m. After a failure it restores the values that the Run has overwritten.
// Otherwise they stay in the log for the outer Run, if any. The end of a Run also ends those inside of it: one whose
// merge function was abandoned ends later, and that End does nothing.
func (l *Log) End(m Mark, failure error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := slices.Index(l.open, m)
	if at < 0 {
		return // a Run around it has ended
	}
	if failure != nil {
		for i := len(l.entries) - 1; i >= m.entries; i-- {
			l.entries[i].cell.value.Store(l.entries[i].before)
		}
	}
	if failure != nil || at == 0 {
		clear(l.entries[m.entries:])
		l.entries = l.entries[:m.entries]
	}
	l.open, l.current = l.open[:at], 0
	if at > 0 {
		l.current = l.open[at-1].run
	}
}

// Store sets the cell's value. During a Run it first logs the old value, once per Run.
func (l *Log) Store(c *Cell, t *tensor.Tensor) {
	l.mu.Lock()
	if l.current != 0 && c.saved != l.current {
		c.saved = l.current
		l.entries = append(l.entries, entry{c, c.Load()})
	}
	c.value.Store(t) // under the lock: End must not restore between the two
	l.mu.Unlock()
}
