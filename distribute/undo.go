package distribute

import (
	"sync"

	"github.com/lockstep-ml/lockstep/tensor"
)

// undoLog holds what the Run in progress, and those inside it, have overwritten, in that order.
type undoLog struct {
	mu      sync.Mutex
	entries []undoEntry
	last    uint64 // number of the Run that began last
	current uint64 // number of the innermost Run in progress, 0: none
}

type undoEntry struct {
	c      *component
	before *tensor.Tensor
}

// undoMark is where a Run began.
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

// end ends a Run: what it has written stays, for the Run around it to take back if there is one, or is taken back.
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

// store sets a component, keeping its old value until the Run in progress has succeeded.
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
