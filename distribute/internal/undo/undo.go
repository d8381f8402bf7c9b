// Package undo restores the values that a failed step has overwritten.
package undo

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Cell holds a tensor that steps replace. It may be read while a step writes it. Make one with [NewCell] or
// [NewCellIn].
type Cell struct {
	value   atomic.Pointer[tensor.Tensor]
	storage Storage // instead of value, if not nil
	saved   uint64  // number of the last Run that wrote it; guarded by the log
}

// Storage is a place outside of a cell for its value. Load and Store copy it, and may be called concurrently.
type Storage interface {
	Load() (*tensor.Tensor, error)
	Store(*tensor.Tensor) error
}

// NewCell returns a cell that holds t.
func NewCell(t *tensor.Tensor) *Cell {
	c := &Cell{}
	c.value.Store(t)
	return c
}

// NewCellIn returns a cell whose value is in storage.
func NewCellIn(storage Storage) *Cell { return &Cell{storage: storage} }

// Load returns the current value; the caller must not change it. Only a storage can fail.
func (c *Cell) Load() (*tensor.Tensor, error) {
	if c.storage != nil {
		return c.storage.Load()
	}
	return c.value.Load(), nil
}

func (c *Cell) set(t *tensor.Tensor) error {
	if c.storage != nil {
		return c.storage.Store(t)
	}
	c.value.Store(t)
	return nil
}

// Log holds the values that the Run in progress and the Runs inside it have overwritten, in order. R identifies a
// Run; its zero value means code outside of all Runs. The zero Log is ready to use. Its methods may be called
// concurrently.
type Log[R comparable] struct {
	mu      sync.Mutex
	entries []entry
	last    uint64     // number of the Run that started last
	open    []begun[R] // the Runs in progress, the innermost last
}

type entry struct {
	cell   *Cell
	before *tensor.Tensor
}

// begun is a Run in progress.
type begun[R comparable] struct {
	run     R
	number  uint64
	entries int // number of entries in the log when it started
}

// Begin starts a Run in a merge function of the outer Run, if there is one. It returns false if the outer Run has
// ended.
func (l *Log[R]) Begin(run, outer R) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.accepts(outer) {
		return false
	}
	l.last++
	l.open = append(l.open, begun[R]{run, l.last, len(l.entries)})
	return true
}

// accepts reports whether code of a Run may write: the Run is in progress, or there is none. The caller holds the
// lock.
func (l *Log[R]) accepts(run R) bool {
	var none R
	return run == none || l.at(run) >= 0
}

// at returns the index of a Run in progress, or -1.
func (l *Log[R]) at(run R) int {
	return slices.IndexFunc(l.open, func(b begun[R]) bool { return b.run == run })
}

// End ends a Run. After a failure it restores the values that the Run has overwritten. Otherwise they stay in the log
// for the outer Run, if any. The end of a Run also ends those inside of it: one whose merge function was abandoned
// ends later, and that End does nothing. The returned error is that of a storage that could not be restored.
func (l *Log[R]) End(run R, failure error) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := l.at(run)
	if at < 0 {
		return nil // a Run around it has ended
	}
	first := l.open[at].entries
	if failure != nil {
		for i := len(l.entries) - 1; i >= first; i-- {
			err = errors.Join(err, l.entries[i].cell.set(l.entries[i].before))
		}
	}
	if failure != nil || at == 0 {
		clear(l.entries[first:])
		l.entries = l.entries[:first]
	}
	clear(l.open[at:])
	l.open = l.open[:at]
	return err
}

// ErrEnded is the error of a write by code of a Run that has ended.
var ErrEnded = errors.New("the Run has ended")

// Store sets the cell's value for code of a Run. If that Run has ended it returns [ErrEnded] and changes nothing.
// While a Run is in progress Store first logs the old value, once per Run. Any other error is that of a storage.
func (l *Log[R]) Store(run R, c *Cell, t *tensor.Tensor) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.accepts(run) {
		return ErrEnded
	}
	if n := len(l.open); n > 0 && c.saved != l.open[n-1].number {
		before, err := c.Load()
		if err != nil {
			return err
		}
		c.saved = l.open[n-1].number
		l.entries = append(l.entries, entry{c, before})
	}
	return c.set(t) // under the lock: End must not restore between the two
}
