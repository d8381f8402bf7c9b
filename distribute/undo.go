package distribute

import (
	"sync"

	"github.com/lockstep-ml/lockstep/tensor"
)

// undoLog holds the values that the Run in progress and its inner Runs have overwritten, in order.
type undoLog struct {
	mu      sync.Mutex
	entries []undoEntry
	last    uint64 // number of the Run that started last
	current uint64 // number of the innermost Run in progress, 0: none
}

type undoEntry struct {
	c      *component
	before *tensor.Tensor
}

// undoMark is the position in the log at which a Run started.
type undoMark struct {
	entries int
	outer   uint64
}

// begin starts a Run.
func (u *undoLog) begin() undoMark {
	u.mu.Lock()
	defer u.mu.Unlock()
	m := undoMark{len(u.entries), u.current}
	u.last++
	u.current = u.last
	return m
}

// end ends a Run. After a failure it restores the values that the Run has overwritten. Otherwise they stay in
// the log for the outer Run, if any.
func (u *undoLog) end(m undoMark, failure error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if failure != nil {
		for i := len(u.entries) - 1; i >= m.entries; i-- {
			u.entries[i].c.value.Store(u.entries[i].before)
		}
	}
	if failure != nil || m.outer == 0 {
		clear(u.entries[m.entries:])
		u.entries = u.entries[:m.entries]
	}
	u.current = m.outer
}

// store sets a component, and logs its old value until the Run in progress succeeds.
func (s *Strategy) store(c *component, t *tensor.Tensor) {
	if s.running.Load() {
		u := &s.undo
		u.mu.Lock()
		if c.saved != u.current {
			c.saved = u.current
			u.entries = append(u.entries, undoEntry{c, c.load()})
		}
		u.mu.Unlock()
	}
	c.value.Store(t)
}
