package collective

import (
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/collective/flight"
)

// keptRanks is how many ranks of failed and closed communicators a [book] keeps.
const keptRanks = 64

// book collects the flight records of the local ranks of a communicator, and of all communicators that Split and
// Rebuild derive from it. The zero value is empty. It is safe for concurrent use.
type book struct {
	mu     sync.Mutex
	ranks  []*communicator
	closed []flight.Rank // of those that failed
}

// add adds a rank.
func (b *book) add(c *communicator) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks = append(b.ranks, c)
}

// remove removes a closed rank; its record is kept if its communicator has failed.
func (b *book) remove(c *communicator, failed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks = slices.DeleteFunc(b.ranks, func(other *communicator) bool { return other == c })
	if !failed {
		return
	}
	if len(b.closed) == keptRanks {
		b.closed = slices.Delete(b.closed, 0, 1)
	}
	b.closed = append(b.closed, c.flight())
}

// all returns the records of all ranks.
func (b *book) all() []flight.Rank {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := slices.Clone(b.closed)
	for _, c := range b.ranks {
		out = append(out, c.flight())
	}
	return out
}
