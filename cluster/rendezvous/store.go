package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Store is a small map from keys to values that all workers of a job share. A key is a path such as
// "job/3/worker/1". Every change has a revision, higher than that of the change before it. Operations are
// linearizable: each takes effect at one moment between its call and its return, in the same order for all
// users. An operation that returns an error that is not about its arguments may or may not have taken effect.
// All methods are safe for concurrent use, and wait no longer than ctx. Values passed or returned belong to
// the caller.
type Store interface {
	// Get returns the value of a key and the revision of its last change, or [ErrNotFound].
	Get(ctx context.Context, key string) (value []byte, revision uint64, err error)
	// Set sets a key.
	Set(ctx context.Context, key string, value []byte) error
	// Create sets a key that does not exist. If it exists, Create returns its value, and false.
	Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error)
	// Swap sets a key if its last change has that revision. If not, or if the key does not exist, it returns
	// false.
	Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error)
	// Delete removes a key. Deleting a key that does not exist is not an error, and not a change.
	Delete(ctx context.Context, key string) error
	// List returns all entries whose keys begin with prefix, ordered by key, and the store's revision at that
	// moment.
	List(ctx context.Context, prefix string) (entries []Entry, revision uint64, err error)
	// Changes waits until a key that begins with prefix was set or deleted after a revision. It returns the
	// latest state of each such key, in the order of their changes, and the revision up to which it has read:
	// pass that to the next call. Deleted marks keys that were deleted. It returns [ErrCompacted] if
	// deletions after the given revision may have been discarded: call List, then continue from its revision.
	Changes(ctx context.Context, prefix string, after uint64) (entries []Entry, revision uint64, err error)
	// Wait waits until n keys, or more, begin with prefix. It returns their entries, as List does. If ctx ends before,
	// List returns those that are there.
	Wait(ctx context.Context, prefix string, n int) (entries []Entry, err error)
	// Close closes this handle, not the store. Current and later calls return [ErrClosed].
	Close() error
}

// Entry is a key and its value.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Deleted  bool
}

// The errors of calls, besides those of arguments and contexts.
var (
	// ErrNotFound: the store has no such key.
	ErrNotFound = errors.New("rendezvous: no such key")
	// ErrClosed: the store was closed on this side.
	ErrClosed = errors.New("rendezvous: the store is closed")
	// ErrLost: the store cannot be reached any more, has ended, or has lost its content.
	ErrLost = errors.New("rendezvous: the store is lost")
	// ErrEnded is an [ErrLost] that is final: the store has ended, or refuses this process. No later call can
	// succeed. An ErrLost that is not ErrEnded may be temporary: the link was cut, or the store was stopped
	// for a while.
	ErrEnded = fmt.Errorf("%w for good", ErrLost)
	// ErrCompacted: deletions after the given revision may have been discarded.
	ErrCompacted = errors.New("rendezvous: the revision is too old, deletions since then may be forgotten")
	// ErrFull: the store has reached its size limit.
	ErrFull = errors.New("rendezvous: the store is full")
)

// Size limits of a store. Larger values are refused with an error.
const (
	KeyMax   = 512     // bytes
	ValueMax = 4 << 20 // bytes
	TotalMax = 1 << 30 // bytes of all keys and values together, plus 128 for each
)

// CheckKey returns an error for an invalid key. A key has 1 to [KeyMax] bytes of printable UTF-8, and does
// not begin with "@", which is reserved for servers. Implementations of Store call it.
func CheckKey(key string) error {
	if strings.HasPrefix(key, "@") {
		return fmt.Errorf("rendezvous: key %.40q: keys that begin with @ cannot be changed", key)
	}
	return checkName(key, 1)
}

// CheckPrefix returns an error for an invalid prefix. A prefix may be empty and may begin with "@"; otherwise
// the rules of CheckKey hold.
func CheckPrefix(prefix string) error { return checkName(prefix, 0) }

// CheckValue returns an error if a value has more than [ValueMax] bytes.
func CheckValue(key string, value []byte) error {
	if len(value) > ValueMax {
		return fmt.Errorf("rendezvous: the value of key %q has %d bytes, want at most %d", key, len(value), ValueMax)
	}
	return nil
}

func checkName(name string, least int) error {
	switch {
	case len(name) < least || len(name) > KeyMax:
		return fmt.Errorf("rendezvous: key %.40q has %d bytes, want %d to %d", name, len(name), least, KeyMax)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("rendezvous: key %.40q: want UTF-8 without control characters", name)
	}
	return nil
}
