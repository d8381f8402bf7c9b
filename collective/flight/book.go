package flight

import (
	"slices"
	"sync"
)

// keptRanks is how many ranks of failed and closed communicators a [Book] keeps.
const keptRanks = 64

// Keeper is a rank of a communicator that records its last calls.
type Keeper interface {
	comparable
	// Flight returns the rank's record. It may be called at any time, also while the rank is in a call.
	Flight() Rank
}

// Book collects the records of the local ranks of a communicator, and of all communicators that Split and
// Rebuild derive from it. The zero value is empty. It is safe for concurrent use.
type Book[K Keeper] struct {
	mu     sync.Mutex
	ranks  []K
	closed []Rank // of those that failed
}

// Add adds a rank.
func (b *Book[K]) Add(k K) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks = append(b.ranks, k)
}

// Remove removes a closed rank; its record is kept if its communicator has failed.
func (b *Book[K]) Remove(k K, failed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks = slices.DeleteFunc(b.ranks, func(other K) bool { return other == k })
	if !failed {
		return
	}
	if len(b.closed) == keptRanks {
		b.closed = slices.Delete(b.closed, 0, 1)
	}
	b.closed = append(b.closed, k.Flight())
}

// All returns the records of all ranks.
func (b *Book[K]) All() []Rank {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := slices.Clone(b.closed)
	for _, k := range b.ranks {
		out = append(out, k.Flight())
	}
	return out
}
