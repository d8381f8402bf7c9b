// Package rendezvous is where the workers of a job meet: a small store that all of them reach, and what is built on it.
package rendezvous

import (
	"context"
	"errors"
)

// Store is a small map from keys to values that all workers of a job share. A key is a path such as "job/3/worker/1". Every change
// has a revision, one more than the change before it. All methods may be called at once by several goroutines; they wait
// no longer than ctx.
type Store interface {
	// Get returns the value of a key and the revision of its last change, or [ErrNotFound].
	Get(ctx context.Context, key string) (value []byte, revision uint64, err error)
	// Set sets a key.
	Set(ctx context.Context, key string, value []byte) error
	// Create sets a key that is not there yet. If it is, it returns what it holds, and false.
	Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error)
	// Swap sets a key if its last change has that revision. If not, it returns false.
	Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error)
	// Delete removes a key; one that is not there is no error.
	Delete(ctx context.Context, key string) error
	// List returns all entries whose keys begin with prefix, by key, and the store's revision then.
	List(ctx context.Context, prefix string) (entries []Entry, revision uint64, err error)
	// Changes waits until a key that begins with prefix was set or deleted after a revision, and returns the latest state of each
	// such key, in the order of their changes, and the revision to go on from. Deleted says that a key is gone.
	Changes(ctx context.Context, prefix string, after uint64) (entries []Entry, revision uint64, err error)
	// Close ends the use of the store, not the store.
	Close() error
}

// Entry is a key and what it holds.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Deleted  bool
}

// ErrNotFound says that the store has no such key.
var ErrNotFound = errors.New("rendezvous: no such key")

// Bounds of what a store takes. Larger ones are refused with an error.
const (
	KeyMax   = 512     // bytes
	ValueMax = 4 << 20 // bytes
)
