package rendezvous

import (
	"bytes"
	"context"
	"strings"
	"sync"
)

// Memory is a store in this process's memory: for jobs of one process, and for tests.
type Memory struct {
	ctx context.Context // ends with the store; the cause is the store's error
	end context.CancelCauseFunc

	mu      sync.Mutex
	table   table
	waiters map[string]map[*waiter]struct{} // by prefix: in large jobs most wait for the same
}

// NewMemory returns a new, empty store.
func NewMemory() *Memory {
	m := &Memory{table: newTable(), waiters: map[string]map[*waiter]struct{}{}}
	m.ctx, m.end = context.WithCancelCause(context.Background())
	return m
}

// Open returns a handle on the store, which shares its content with all other handles. Its Close closes this
// handle only.
func (m *Memory) Open() Store {
	l := &local{memory: m}
	l.ctx, l.end = context.WithCancelCause(m.ctx)
	return l
}

// waiter waits for a change.
type waiter struct {
	wake chan struct{} // buffer of one
}

// change calls f with the table, and wakes the waiters of the key if f reports that it changed.
func (m *Memory) change(key string, f func(t *table) (changed bool, err error)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	changed, err := f(&m.table)
	if changed {
		for prefix, waiters := range m.waiters {
			if !strings.HasPrefix(key, prefix) {
				continue
			}
			for w := range waiters {
				select {
				case w.wake <- struct{}{}:
				default:
				}
			}
		}
	}
	return err
}

// wait calls look at once and after changes of keys with a prefix, until it reports that the wait is over. It returns
// the entries that look returned, and the revision.
func (m *Memory) wait(
	ctx context.Context, prefix string, look func(t *table) (entries []Entry, over bool, err error),
) ([]Entry, uint64, error) {
	w := &waiter{wake: make(chan struct{}, 1)}
	m.mu.Lock()
	if m.waiters[prefix] == nil {
		m.waiters[prefix] = map[*waiter]struct{}{}
	}
	m.waiters[prefix][w] = struct{}{}
	defer func() {
		if delete(m.waiters[prefix], w); len(m.waiters[prefix]) == 0 {
			delete(m.waiters, prefix)
		}
		m.mu.Unlock()
	}()
	for {
		entries, over, err := look(&m.table)
		if over || err != nil {
			return entries, m.table.revision, err
		}
		m.mu.Unlock()
		select {
		case <-w.wake:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		m.mu.Lock()
		if err != nil {
			return nil, 0, err
		}
	}
}

// The operations that change something. They keep the value.

func (t *table) doSet(key string, value []byte) (bool, error) {
	err := t.set(Entry{Key: key, Value: value})
	return err == nil, err
}

func (t *table) doCreate(key string, value []byte) (current []byte, created bool, err error) {
	if e, ok := t.get(key); ok {
		return e.Value, false, nil
	}
	err = t.set(Entry{Key: key, Value: value})
	return nil, err == nil, err
}

func (t *table) doSwap(key string, revision uint64, value []byte) (bool, error) {
	if e, ok := t.get(key); !ok || e.Revision != revision {
		return false, nil
	}
	return t.doSet(key, value)
}

// local is a handle on a Memory.
type local struct {
	memory *Memory
	ctx    context.Context // ends with Close, or with the store
	end    context.CancelCauseFunc
}

// check returns the error that prevents a call.
func (l *local) check(ctx context.Context, err error) error {
	switch {
	case err != nil:
		return err
	case l.ctx.Err() != nil:
		return context.Cause(l.ctx)
	}
	return context.Cause(ctx)
}

// change makes a change if the token of ctx permits it.
func (l *local) change(ctx context.Context, key string, f func(t *table) (bool, error)) error {
	token := tokenOf(ctx)
	return l.memory.change(key, func(t *table) (bool, error) {
		if err := t.permits(token); err != nil {
			return false, err
		}
		return f(t)
	})
}

// Get implements [Store].
func (l *local) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	if err := l.check(ctx, CheckPrefix(key)); err != nil {
		return nil, 0, err
	}
	l.memory.mu.Lock()
	defer l.memory.mu.Unlock()
	e, ok := l.memory.table.get(key)
	if !ok {
		return nil, 0, ErrNotFound
	}
	return bytes.Clone(e.Value), e.Revision, nil
}

// Set implements [Store].
func (l *local) Set(ctx context.Context, key string, value []byte) error {
	if err := l.check(ctx, checkPair(key, value)); err != nil {
		return err
	}
	return l.change(ctx, key, func(t *table) (bool, error) { return t.doSet(key, bytes.Clone(value)) })
}

// Create implements [Store].
func (l *local) Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error) {
	if err := l.check(ctx, checkPair(key, value)); err != nil {
		return nil, false, err
	}
	err = l.change(ctx, key, func(t *table) (bool, error) {
		var err error
		current, created, err = t.doCreate(key, bytes.Clone(value))
		return created, err
	})
	return bytes.Clone(current), created, err
}

// Swap implements [Store].
func (l *local) Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error) {
	if err := l.check(ctx, checkPair(key, value)); err != nil {
		return false, err
	}
	err = l.change(ctx, key, func(t *table) (bool, error) {
		var err error
		swapped, err = t.doSwap(key, revision, bytes.Clone(value))
		return swapped, err
	})
	return swapped, err
}

// Delete implements [Store].
func (l *local) Delete(ctx context.Context, key string) error {
	if err := l.check(ctx, CheckKey(key)); err != nil {
		return err
	}
	return l.change(ctx, key, func(t *table) (bool, error) { return t.remove(key), nil })
}

// List implements [Store].
func (l *local) List(ctx context.Context, prefix string) ([]Entry, uint64, error) {
	if err := l.check(ctx, CheckPrefix(prefix)); err != nil {
		return nil, 0, err
	}
	l.memory.mu.Lock()
	entries, revision := l.memory.table.list(prefix), l.memory.table.revision
	l.memory.mu.Unlock()
	return cloned(entries), revision, nil
}

// Changes implements [Store].
func (l *local) Changes(ctx context.Context, prefix string, after uint64) ([]Entry, uint64, error) {
	return l.wait(ctx, prefix, changed(prefix, after))
}

// Wait implements [Store].
func (l *local) Wait(ctx context.Context, prefix string, n int) ([]Entry, error) {
	entries, _, err := l.wait(ctx, prefix, awaited(prefix, n))
	return entries, err
}

func (l *local) wait(
	ctx context.Context, prefix string, look func(t *table) ([]Entry, bool, error),
) ([]Entry, uint64, error) {
	if err := l.check(ctx, CheckPrefix(prefix)); err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(l.ctx, func() { cancel(context.Cause(l.ctx)) })()
	entries, revision, err := l.memory.wait(ctx, prefix, look)
	return cloned(entries), revision, err
}

// Close implements [Store].
func (l *local) Close() error {
	l.end(ErrClosed) // no effect if the store has ended
	return nil
}

// cloned returns entries whose values belong to the caller.
func cloned(entries []Entry) []Entry {
	for i := range entries {
		entries[i].Value = bytes.Clone(entries[i].Value)
	}
	return entries
}

func checkPair(key string, value []byte) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	return CheckValue(key, value)
}
