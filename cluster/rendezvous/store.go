package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Store is a small map from keys to values that all workers of a job share. A key is a path such as "job/3/worker/1". Every change
// has a revision, higher than that of the change before it. Each operation takes effect at one moment between its call and its
// return, and for all users in the same order (it is linearizable). One that returns an error that is not about its arguments
// may have taken effect or not. All methods may be called at once by several goroutines; they wait no longer than ctx. Values that
// are given or returned belong to the caller.
type Store interface {
	// Get returns the value of a key and the revision of its last change, or [ErrNotFound].
	Get(ctx context.Context, key string) (value []byte, revision uint64, err error)
	// Set sets a key.
	Set(ctx context.Context, key string, value []byte) error
	// Create sets a key that is not there yet. If it is, it returns what it holds, and false.
	Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error)
	// Swap sets a key if its last change has that revision. If not, or if it is not there, it returns false.
	Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error)
	// Delete removes a key; one that is not there is no error, and no change.
	Delete(ctx context.Context, key string) error
	// List returns all entries whose keys begin with prefix, by key, and the store's revision then.
	List(ctx context.Context, prefix string) (entries []Entry, revision uint64, err error)
	// Changes waits until a key that begins with prefix was set or deleted after a revision, and returns for each
	// such key its latest state up to some later revision, in the order of their changes, and that revision, to go on from. Deleted says that a key is gone. It returns
	// [ErrCompacted] if deletions after that revision may have been forgotten: List, then go on from there.
	Changes(ctx context.Context, prefix string, after uint64) (entries []Entry, revision uint64, err error)
	// Close ends the use of the store, not the store. Calls under way, and later ones, return [ErrClosed].
	Close() error
}

// Entry is a key and what it holds.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Deleted  bool
}

// What can be wrong with a call, besides its arguments and its context.
var (
	// ErrNotFound says that the store has no such key.
	ErrNotFound = errors.New("rendezvous: no such key")
	// ErrClosed says that the store was closed on this side.
	ErrClosed = errors.New("rendezvous: the store is closed")
	// ErrLost says that the store cannot be reached any more, has ended, or has lost what it held.
	ErrLost = errors.New("rendezvous: the store is lost")
	// ErrEnded is an [ErrLost] that is final: the store has ended, or refuses this process. No later call can succeed.
	// Without it a lost store may be back: its link was cut, or it was stopped for a while.
	ErrEnded = fmt.Errorf("%w for good", ErrLost)
	// ErrCompacted says that deletions after the given revision may have been forgotten.
	ErrCompacted = errors.New("rendezvous: the revision is too old, deletions since then may be forgotten")
	// ErrFull says that the store holds as much as it may.
	ErrFull = errors.New("rendezvous: the store is full")
)

// Bounds of what a store takes. Larger ones are refused with an error.
const (
	KeyMax   = 512     // bytes
	ValueMax = 4 << 20 // bytes
	TotalMax = 1 << 30 // bytes of all keys and values together, each with 128 more
)

// CheckKey returns what is wrong with a key: it must have 1 to [KeyMax] bytes of printable UTF-8, and not begin with "@",
// which is for what a server says itself. Implementations of Store use it.
func CheckKey(key string) error {
	if strings.HasPrefix(key, "@") {
		return fmt.Errorf("rendezvous: key %.40q: keys that begin with @ cannot be changed", key)
	}
	return checkName(key, 1)
}

// CheckPrefix returns what is wrong with a prefix: it may be empty and begin with "@", else it is as a key is.
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
