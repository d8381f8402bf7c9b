package rendezvous

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
)

const (
	logName      = "lockstep-store.log"
	newName      = logName + ".new" // until it is complete
	lockName     = "lockstep-store.lock"
	usersName    = "lockstep-store.users" // every user of the store holds a shared lock on it
	lockEvery    = 3 * time.Millisecond   // between attempts to acquire the lock
	pollMin      = 2 * time.Millisecond   // initial interval of polling for a change
	pollMax      = 200 * time.Millisecond // and the longest one, when nothing changes
	compactAbove = 1 << 20                // bytes of the log, besides four times its live content
	readBytes    = 8 << 20                // of the log at once; an entry is smaller
	staleMost    = 5                      // attempts to open a log that other processes replace meanwhile
)

// file is a store in a folder that all its users share: a log of changes, which each of them reads as it
// grows, and a lock for writers. It requires only close-to-open consistency, locks and renaming, so a network
// file system is sufficient. The log is rewritten when most of it is out of date.
type file struct {
	folder string
	ctx    context.Context // ends with Close
	end    context.CancelCauseFunc
	users  *flock.Flock  // held until Close: the store is in use
	turn   chan struct{} // holds one token; its holder may use the fields below

	table table
	log   logHeader // of the log that was read
	at    int64     // offset read so far
}

// openFile is the [Opener] of "file". The text after "file://" is a path, taken literally.
func openFile(ctx context.Context, url string, cfg Config) (Store, error) {
	folder := filepath.FromSlash(strings.TrimPrefix(url, "file://"))
	if os.PathSeparator == '\\' { // file:///C:/folder
		folder = strings.TrimPrefix(folder, `\`)
	}
	if !filepath.IsAbs(folder) {
		return nil, fmt.Errorf("want file:// and an absolute path")
	}
	f := &file{folder: folder, table: newTable(), turn: make(chan struct{}, 1)}
	if err := f.enter(ctx); err != nil {
		return nil, err
	}
	f.ctx, f.end = context.WithCancelCause(context.WithoutCancel(ctx))
	f.turn <- struct{}{}
	err := f.locked(ctx, func() error {
		// Left by a writer that was killed; no other process writes now.
		if err := os.Remove(f.path(newName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if _, err := os.Stat(f.path(logName)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f.log.store = rand.Uint64N(1<<64-1) + 1
		err := f.rewrite()
		f.log.store = 0
		return err
	})
	if err == nil {
		err = f.use(ctx, func() error { return f.refresh() })
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// enter creates the folder, if necessary, and marks the store in it as used, so that it is not removed.
func (f *file) enter(ctx context.Context) error {
	for {
		if err := makeFolder(f.folder); err != nil {
			return err
		}
		if err := checkOwner(f.folder); err != nil {
			return err
		}
		users := flock.New(f.path(usersName))
		_, err := users.TryRLockContext(ctx, lockEvery)
		switch {
		case err != nil && ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, fs.ErrNotExist): // it was removed after it was created
			continue
		case err != nil:
			return err
		}
		locked, err := users.Stat()
		if there, failed := os.Stat(f.path(usersName)); err == nil && failed == nil && os.SameFile(there, locked) {
			f.users = users
			return nil
		}
		if err := users.Close(); err != nil { // it was removed after it was opened
			return err
		}
	}
}

// RemoveUnused removes those folders below parent whose names are given up, and that hold a store which no
// process uses, or nothing. Stores of processes in other containers count as used.
func RemoveUnused(parent string, givenUp func(name string) bool) error {
	entries, err := os.ReadDir(parent)
	var errs []error
	for _, e := range entries {
		if e.IsDir() && givenUp(e.Name()) {
			errs = append(errs, removeUnused(filepath.Join(parent, e.Name())))
		}
	}
	return errors.Join(append(errs, err)...)
}

func removeUnused(folder string) error {
	users := flock.New(filepath.Join(folder, usersName))
	free, err := users.TryLock()
	switch {
	case errors.Is(err, fs.ErrNotExist): // another process was faster
		return nil
	case err != nil || !free:
		return err
	}
	files, err := os.ReadDir(folder)
	ours := !slices.ContainsFunc(files, func(e fs.DirEntry) bool { return !slices.Contains(storeFiles, e.Name()) })
	if err == nil && ours {
		err = os.RemoveAll(folder)
	}
	return errors.Join(err, users.Close())
}

// storeFiles are all files of a store.
var storeFiles = []string{logName, newName, lockName, usersName}

// makeFolder makes the store's folder if only that is missing. Where the folder above it is missing too, the path is
// wrong, or a file system is not mounted here, and a folder made instead would be on this host only, where no other
// host finds it.
func makeFolder(folder string) error {
	err := os.Mkdir(folder, 0o700)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the folder %s does not exist, in which the store's folder %s would be made: is the path right, "+
			"and is it mounted on this host? Otherwise make it first",
			filepath.Dir(folder), filepath.Base(folder))
	}
	info, e := os.Stat(folder)
	if e == nil && info.IsDir() {
		return nil
	}
	return err
}

func (f *file) path(name string) string { return filepath.Join(f.folder, name) }

// use calls do while holding the token.
func (f *file) use(ctx context.Context, do func() error) error {
	select {
	case <-f.turn:
		defer func() { f.turn <- struct{}{} }()
	case <-ctx.Done():
	case <-f.ctx.Done():
	}
	switch {
	case f.ctx.Err() != nil:
		return context.Cause(f.ctx)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return do()
}

// locked calls do while holding the token and the lock for writers.
func (f *file) locked(ctx context.Context, do func() error) error {
	return f.use(ctx, func() error {
		short, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		defer context.AfterFunc(f.ctx, func() { cancel(context.Cause(f.ctx)) })()
		lock := flock.New(f.path(lockName))
		if _, err := lock.TryLockContext(short, lockEvery); err != nil {
			if short.Err() != nil {
				err = context.Cause(short)
			}
			return f.explained(err)
		}
		err := do()
		return errors.Join(err, lock.Unlock())
	})
}

// explained adds to an error of the file system that the store is lost without its files.
func (f *file) explained(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: its files are gone: %w", ErrLost, err)
	}
	return err
}

// refresh reads new entries of the log.
func (f *file) refresh() error {
	for attempt := 1; ; attempt++ {
		log, err := os.Open(f.path(logName))
		if err != nil {
			return f.explained(err)
		}
		err = f.read(log)
		log.Close()
		// A network file system reports this for a file that was replaced while it was open here.
		if !errors.Is(err, syscall.ESTALE) || attempt == staleMost {
			return err
		}
	}
}

// read reads new entries of the open log.
func (f *file) read(log *os.File) error {
	var head [logHeaderBytes]byte
	if _, err := log.ReadAt(head[:], 0); err != nil {
		return fmt.Errorf("%s: %w", log.Name(), err)
	}
	header, err := decodeLogHeader(head[:])
	if err != nil {
		return fmt.Errorf("%s: %w", log.Name(), err)
	}
	info, err := log.Stat()
	if err != nil {
		return err
	}
	table, at := f.table, f.at
	switch {
	case f.log.store != 0 && header.store != f.log.store:
		return fmt.Errorf("%w: %s belongs to another store now", ErrEnded, log.Name())
	case header.id == f.log.id && info.Size() < f.at:
		return fmt.Errorf("%w: %s was cut short from %d to %d bytes", ErrEnded, log.Name(), f.at, info.Size())
	case header.id != f.log.id && header.revision < f.table.revision:
		return fmt.Errorf("%w: %s was replaced by an older one", ErrEnded, log.Name())
	case header.id != f.log.id: // it was rewritten
		table, at = newTable(), logHeaderBytes
		table.floor = header.floor
	}
	for more := true; more; {
		tail, err := io.ReadAll(io.NewSectionReader(log, at, readBytes))
		if err != nil {
			return err
		}
		n, err := replay(&table, tail)
		if err != nil {
			return fmt.Errorf("%s: %w", log.Name(), err)
		}
		at += int64(n)
		more = n > 0 && len(tail) == readBytes
	}
	table.revision = max(table.revision, header.revision)
	f.table, f.log, f.at = table, header, at
	return nil
}

// change makes a change: it calls decide with the current table, and appends the entry that decide returns.
func (f *file) change(ctx context.Context, decide func() (Entry, bool)) error {
	return f.locked(ctx, func() error {
		log, err := os.OpenFile(f.path(logName), os.O_RDWR, 0)
		if err != nil {
			return f.explained(err)
		}
		err = f.add(log, tokenOf(ctx), decide)
		if failed := log.Close(); failed != nil {
			// A network file system may report a failed write only at close: the log must be read again.
			f.table, f.log, f.at = newTable(), logHeader{store: f.log.store}, 0
			return errors.Join(err, failed)
		}
		if err == nil && f.at > compactAbove+4*int64(f.table.bytes) {
			// A failure here is repeated by the next change; until then the log is only long.
			if err := f.rewrite(); err == nil {
				return f.refresh()
			}
		}
		return err
	})
}

// add appends decide's entry to the log, if the token permits it.
func (f *file) add(log *os.File, token *Token, decide func() (Entry, bool)) error {
	if err := f.read(log); err != nil {
		return err
	}
	if err := f.table.permits(token); err != nil {
		return err
	}
	e, wanted := decide()
	if !wanted {
		return nil
	}
	e.Revision = f.table.revision + 1
	if err := f.table.fits(&e); err != nil {
		return err
	}
	if err := f.append(log, &e); err != nil {
		return err
	}
	return f.read(log)
}

// append writes an entry at the offset read so far, over a partial one of a writer that was killed.
func (f *file) append(log *os.File, e *Entry) error {
	if err := log.Truncate(f.at); err != nil {
		return err
	}
	if _, err := log.WriteAt(encodeLogEntry(e), f.at); err != nil {
		return errors.Join(err, log.Truncate(f.at))
	}
	return nil
}

// rewrite replaces the log by one with the table's content only. The caller holds the lock.
func (f *file) rewrite() error {
	b := (&logHeader{id: rand.Uint64(), store: f.log.store, revision: f.table.revision, floor: f.table.floor}).encode()
	for _, m := range f.table.order {
		if !f.table.superseded(m) {
			e := f.table.entries[m.key]
			b = append(b, encodeLogEntry(&e)...)
		}
	}
	temporary := f.path(newName)
	out, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(b)
	err = errors.Join(err, out.Sync(), out.Close())
	if err == nil {
		err = os.Rename(temporary, f.path(logName))
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return nil
}

// Get implements [Store].
func (f *file) Get(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	if err := CheckPrefix(key); err != nil {
		return nil, 0, err
	}
	err = f.look(ctx, func(t *table) error {
		e, ok := t.get(key)
		if !ok {
			return ErrNotFound
		}
		value, revision = e.Value, e.Revision
		return nil
	})
	return cloned([]Entry{{Value: value}})[0].Value, revision, err
}

// look calls do with the current table.
func (f *file) look(ctx context.Context, do func(t *table) error) error {
	return f.use(ctx, func() error {
		if err := f.refresh(); err != nil {
			return err
		}
		return do(&f.table)
	})
}

// Set implements [Store].
func (f *file) Set(ctx context.Context, key string, value []byte) error {
	if err := checkPair(key, value); err != nil {
		return err
	}
	return f.change(ctx, func() (Entry, bool) { return Entry{Key: key, Value: value}, true })
}

// Create implements [Store].
func (f *file) Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error) {
	if err := checkPair(key, value); err != nil {
		return nil, false, err
	}
	err = f.change(ctx, func() (Entry, bool) {
		e, there := f.table.get(key)
		current, created = cloned([]Entry{e})[0].Value, !there
		return Entry{Key: key, Value: value}, created
	})
	return current, created && err == nil, err
}

// Swap implements [Store].
func (f *file) Swap(ctx context.Context, key string, revision uint64, value []byte) (swapped bool, err error) {
	if err := checkPair(key, value); err != nil {
		return false, err
	}
	err = f.change(ctx, func() (Entry, bool) {
		e, there := f.table.get(key)
		swapped = there && e.Revision == revision
		return Entry{Key: key, Value: value}, swapped
	})
	return swapped && err == nil, err
}

// Delete implements [Store].
func (f *file) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	return f.change(ctx, func() (Entry, bool) {
		_, there := f.table.get(key)
		return Entry{Key: key, Deleted: true}, there
	})
}

// List implements [Store].
func (f *file) List(ctx context.Context, prefix string) (entries []Entry, revision uint64, err error) {
	if err := CheckPrefix(prefix); err != nil {
		return nil, 0, err
	}
	err = f.look(ctx, func(t *table) error {
		entries, revision = cloned(t.list(prefix)), t.revision
		return nil
	})
	return entries, revision, err
}

// Changes implements [Store].
func (f *file) Changes(ctx context.Context, prefix string, after uint64) (entries []Entry, revision uint64, err error) {
	return f.poll(ctx, prefix, changed(prefix, after))
}

// Wait implements [Store].
func (f *file) Wait(ctx context.Context, prefix string, n int) ([]Entry, error) {
	entries, _, err := f.poll(ctx, prefix, awaited(prefix, n))
	return entries, err
}

// poll calls find with the table until it reports that the wait is over.
func (f *file) poll(
	ctx context.Context, prefix string, find func(t *table) (entries []Entry, over bool, err error),
) (entries []Entry, revision uint64, err error) {
	if err := CheckPrefix(prefix); err != nil {
		return nil, 0, err
	}
	for pause := pollMin; ; pause = min(pause+pause/2, pollMax) {
		over := false
		err := f.look(ctx, func(t *table) error {
			var found []Entry
			var err error
			found, over, err = find(t)
			entries, revision = cloned(found), t.revision
			return err
		})
		if over || err != nil {
			return entries, revision, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		case <-f.ctx.Done():
		}
	}
}

// Close implements [Store].
func (f *file) Close() error {
	f.end(ErrClosed)
	return f.users.Close() // it may be called again
}

// logHeader is the header of a log.
type logHeader struct {
	id       uint64 // of this log: random
	store    uint64 // of the store, through all its logs: random, not 0
	revision uint64 // of the store when the log was written
	floor    uint64 // deletions up to it were discarded
}

const (
	logMagic       = "LOCKSLOG"
	logHeaderBytes = 48
	logEntryBytes  = 20 // before the key
)

func (h *logHeader) encode() []byte {
	le := binary.LittleEndian
	b := append(make([]byte, 0, logHeaderBytes), logMagic...)
	b = le.AppendUint16(b, Version)
	b = append(b, 0, 0)
	b = le.AppendUint64(b, h.id)
	b = le.AppendUint64(b, h.store)
	b = le.AppendUint64(b, h.revision)
	b = le.AppendUint64(b, h.floor)
	return le.AppendUint32(b, checksum(b))
}

func decodeLogHeader(b []byte) (h logHeader, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) != logHeaderBytes || string(b[:8]) != logMagic:
		return h, errors.New("not the log of a store")
	case le.Uint16(b[8:]) != Version:
		return h, fmt.Errorf("a log of version %d of the rendezvous, this program has version %d: run the same version of "+
			"Lockstep on all hosts, or use another folder", le.Uint16(b[8:]), Version)
	case checksum(b[:44]) != le.Uint32(b[44:]):
		return h, errors.New("its header is corrupt")
	}
	return logHeader{le.Uint64(b[12:]), le.Uint64(b[20:]), le.Uint64(b[28:]), le.Uint64(b[36:])}, nil
}

func encodeLogEntry(e *Entry) []byte {
	le := binary.LittleEndian
	b := make([]byte, 8, logEntryBytes+len(e.Key)+len(e.Value))
	b = le.AppendUint64(b, e.Revision)
	b = le.AppendUint16(b, uint16(len(e.Key)))
	b = append(b, byte(count(e.Deleted)), 0)
	b = append(b, e.Key...)
	b = append(b, e.Value...)
	le.PutUint32(b, uint32(len(b)-8))
	le.PutUint32(b[4:], checksum(b[8:]))
	return b
}

// replay applies a log's entries to the table, and returns the number of bytes read. It stops, without an
// error, at an incomplete entry: it is being written, or its writer was killed.
func replay(t *table, b []byte) (n int, err error) {
	le := binary.LittleEndian
	for len(b)-n >= logEntryBytes {
		size := int64(le.Uint32(b[n:]))
		if size > int64(len(b)-n-8) || size < logEntryBytes-8 {
			return n, nil
		}
		body := b[n+8 : n+8+int(size)]
		if checksum(body) != le.Uint32(b[n+4:]) {
			return n, nil
		}
		k := int(le.Uint16(body[8:]))
		if logEntryBytes-8+k > len(body) || body[10] > 1 {
			return n, fmt.Errorf("invalid entry at byte %d", n)
		}
		key, value := string(body[12:12+k]), body[12+k:]
		e := Entry{Key: key, Value: bytes.Clone(value), Revision: le.Uint64(body), Deleted: body[10] == 1}
		if e.Revision <= t.revision || checkPair(e.Key, e.Value) != nil {
			return n, fmt.Errorf("entry at byte %d: key %.40q with revision %d, after revision %d", n, e.Key, e.Revision,
				t.revision)
		}
		if err := t.set(e); err != nil {
			return n, err
		}
		n += 8 + int(size)
	}
	return n, nil
}
