package rendezvous

import (
	"cmp"
	"slices"
	"strings"
)

// table is the content of a store: entries, including those of deleted keys, and the order of their changes.
// It has no lock, clock or protocol; the stores in memory, behind a server and in a file are built on it.
type table struct {
	revision uint64
	entries  map[string]Entry // of a deleted key: the deletion
	order    []changeRecord   // of all changes, the oldest first; superseded ones are removed periodically
	deleted  int              // how many entries are deletions
	floor    uint64           // deletions up to this revision are discarded
	bytes    int              // of all keys and values, with entryBytes for each
	limit    int              // of bytes; 0: TotalMax
}

// changeRecord is a change.
type changeRecord struct {
	revision uint64
	key      string
}

const (
	entryBytes = 128     // accounted for each entry in addition to its key and value
	deletedMax = 1 << 16 // deletions that are remembered
)

func newTable() table { return table{entries: map[string]Entry{}} }

// get returns the entry of an existing key.
func (t *table) get(key string) (Entry, bool) {
	e, ok := t.entries[key]
	return e, ok && !e.Deleted
}

// set makes a change: at the next revision, or at the given one, which must be higher than all before. It
// keeps the value.
func (t *table) set(e Entry) error {
	if err := t.fits(&e); err != nil {
		return err
	}
	if e.Revision == 0 {
		e.Revision = t.revision + 1
	}
	t.revision = e.Revision
	old, had := t.entries[e.Key]
	t.bytes += cost(&e)
	if had {
		t.bytes -= cost(&old)
	}
	t.deleted += count(e.Deleted) - count(had && old.Deleted)
	t.entries[e.Key] = e
	t.order = append(t.order, changeRecord{e.Revision, e.Key})
	if len(t.order) > 2*len(t.entries)+1024 {
		t.order = slices.DeleteFunc(t.order, t.superseded)
	}
	if t.deleted > deletedMax {
		t.discard(t.deleted / 2)
	}
	return nil
}

// fits returns [ErrFull] if there is no room for an entry. A deletion always fits.
func (t *table) fits(e *Entry) error {
	grows := cost(e)
	if old, had := t.entries[e.Key]; had {
		grows -= cost(&old)
	}
	limit := t.limit
	if limit == 0 {
		limit = TotalMax
	}
	if !e.Deleted && t.bytes+grows > limit {
		return ErrFull
	}
	return nil
}

// remove deletes a key. It reports whether the key existed.
func (t *table) remove(key string) bool {
	if _, ok := t.get(key); !ok {
		return false
	}
	t.set(Entry{Key: key, Deleted: true})
	return true
}

// discard removes the oldest n deletions.
func (t *table) discard(n int) {
	t.order = slices.DeleteFunc(t.order, func(m changeRecord) bool {
		e := t.entries[m.key]
		if n == 0 || e.Revision != m.revision || !e.Deleted {
			return e.Revision != m.revision
		}
		n--
		t.floor = m.revision
		t.bytes -= cost(&e)
		t.deleted--
		delete(t.entries, m.key)
		return true
	})
}

// superseded reports that the key has a later change.
func (t *table) superseded(m changeRecord) bool { return t.entries[m.key].Revision != m.revision }

// list returns the existing entries, ordered by key.
func (t *table) list(prefix string) []Entry {
	var out []Entry
	for key, e := range t.entries {
		if !e.Deleted && strings.HasPrefix(key, prefix) {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b Entry) int { return cmp.Compare(a.Key, b.Key) })
	return out
}

// count returns the number of existing keys.
func (t *table) count(prefix string) (n int) {
	for key, e := range t.entries {
		if !e.Deleted && strings.HasPrefix(key, prefix) {
			n++
		}
	}
	return n
}

// awaited returns a function that looks for n keys, for a wait: it returns them once they exist.
func awaited(prefix string, n int) func(t *table) ([]Entry, bool, error) {
	next := uint64(0) // fewer exist up to this revision: a change adds one key at most
	return func(t *table) ([]Entry, bool, error) {
		if t.revision < next {
			return nil, false, nil
		}
		if found := t.count(prefix); found < n {
			next = t.revision + uint64(n-found)
			return nil, false, nil
		}
		return t.list(prefix), true, nil
	}
}

// changed returns a function that looks for changes after a revision, for a wait.
func changed(prefix string, after uint64) func(t *table) ([]Entry, bool, error) {
	return func(t *table) ([]Entry, bool, error) {
		entries, err := t.changes(prefix, after)
		return entries, len(entries) > 0, err
	}
}

// changes returns the latest states of the keys that changed after a revision, in the order of their changes.
func (t *table) changes(prefix string, after uint64) ([]Entry, error) {
	if after != 0 && after < t.floor {
		return nil, ErrCompacted
	}
	var out []Entry
	for _, m := range slices.Backward(t.order) {
		if m.revision <= after {
			break
		}
		if !strings.HasPrefix(m.key, prefix) {
			continue
		}
		if e := t.entries[m.key]; e.Revision == m.revision {
			out = append(out, e)
		}
	}
	slices.Reverse(out)
	return out, nil
}

func cost(e *Entry) int { return len(e.Key) + len(e.Value) + entryBytes }

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
