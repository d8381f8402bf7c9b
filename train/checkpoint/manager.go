package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Config says where and how many snapshots a [Manager] keeps.
type Config struct {
	Dir string // its parent must exist
	// Keep is how many snapshots stay, the newest; default 3, negative: all. (TensorFlow's max_to_keep.)
	Keep int
	// Job and Epoch say who writes here, to others who want to: a later start of the same job takes over. Default: a process of no job.
	Job   string
	Epoch uint32
	// Logger gets what is not as usual, but no error. Default slog.Default().
	Logger *slog.Logger

	watch func(op, path string) error // in tests: called before each step on the disk, which fails with its error
}

// keepDefault leaves one to fall back on, and one more.
const keepDefault = 3

// Manager writes the snapshots of one training into a folder and removes the oldest (TensorFlow's CheckpointManager). A snapshot is
// a folder of its own, named snapshot-NUMBER-step-STEP, and is there whole or not at all, whenever the process or the machine
// dies. One process at a time writes into a folder: it is locked until Close, or the end of the process. A Manager is for one goroutine.
type Manager struct {
	dir     string
	keep    int
	lock    *lock
	logger  *slog.Logger
	disk    disk
	number  int        // of the newest
	pending chan error // of the save in progress; nil: none
	failed  error      // the first save that failed: there will be no other
}

// Open makes the folder if it is not there, locks it, and clears away what a killed process left unfinished. If another process writes
// there the error is a *[LockedError], which says who.
func Open(cfg Config) (*Manager, error) {
	if cfg.Dir == "" {
		return nil, errors.New("checkpoint: Config.Dir is empty: want the folder that holds the snapshots")
	}
	m := &Manager{dir: cfg.Dir, keep: cfg.Keep, disk: disk{cfg.watch}, logger: cfg.Logger}
	if m.keep == 0 {
		m.keep = keepDefault
	}
	if m.logger == nil {
		m.logger = slog.Default()
	}
	if err := os.Mkdir(m.dir, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, wrap(err)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	me := Holder{Host: host, PID: os.Getpid(), Job: cfg.Job, Epoch: cfg.Epoch, Since: time.Now()}
	me.identify()
	if m.lock, err = takeLock(m.dir, me); err != nil {
		return nil, err
	}
	err = m.begin()
	if err != nil {
		m.lock.release()
		return nil, err
	}
	return m, nil
}

// begin finds out what is in the folder, and clears it up.
func (m *Manager) begin() error {
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return wrap(err)
	}
	for _, e := range entries {
		if n, ok := parseName(strings.TrimPrefix(e.Name(), ".")); ok { // one that is taken over may yet give it its name
			m.number = max(m.number, n.number)
		}
		left := strings.HasPrefix(e.Name(), unfinishedPrefix) || strings.HasPrefix(e.Name(), lockName+".")
		if !left {
			continue
		}
		if err := clearAway(filepath.Join(m.dir, e.Name())); err != nil {
			return wrap(err)
		}
	}
	return wrap(m.disk.tryFolder(m.unfinished(name{}))) // better now than after hours of training
}

// clearAway removes what is unfinished. A process whose lock was taken over may be writing there: it must not find the place again, or
// it would put files into the folder that is being removed.
func clearAway(path string) error {
	if aside := path + ".left"; os.Rename(path, aside) == nil {
		path = aside
	}
	if os.RemoveAll(path) == nil {
		return nil
	}
	return os.RemoveAll(path) // one file may have been on its way
}

// Close waits for the save in progress and lets others write into the folder. It returns the first error of all saves.
func (m *Manager) Close() error {
	err := m.Wait()
	if m.lock == nil {
		return err
	}
	if e := m.lock.release(); err == nil {
		err = e
	}
	m.lock = nil
	return err
}

// Dir returns the folder.
func (m *Manager) Dir() string { return m.dir }

// Start saves c in the background, after the save before has ended. It returns that one's error, or an earlier one's: after a
// failure nothing is written any more. Nobody may change c.
func (m *Manager) Start(c *Contents) error {
	if err := m.Wait(); err != nil {
		return err
	}
	if m.lock == nil {
		return fmt.Errorf("checkpoint: no snapshot can be written into %s: the manager is closed", m.dir)
	}
	pending := make(chan error, 1)
	m.pending = pending
	m.number++
	n := name{m.number, c.Step}
	go func() { pending <- m.save(n, c) }()
	return nil
}

// Save saves c and waits until it is on the disk.
func (m *Manager) Save(c *Contents) error {
	if err := m.Start(c); err != nil {
		return err
	}
	return m.Wait()
}

// Wait waits for the save in progress. It returns the first error of all saves.
func (m *Manager) Wait() error {
	if m.pending != nil {
		m.ended(<-m.pending)
	}
	return m.failed
}

// Err is Wait that does not wait: a save in progress counts as no error.
func (m *Manager) Err() error {
	if m.pending != nil {
		select {
		case err := <-m.pending:
			m.ended(err)
		default:
		}
	}
	return m.failed
}

func (m *Manager) ended(err error) {
	m.pending = nil
	if m.failed == nil {
		m.failed = err
	}
}

// unfinishedPrefix begins the names of folders that are not snapshots yet, or no longer.
const unfinishedPrefix = "." + namePrefix

func (m *Manager) unfinished(n name) string { return filepath.Join(m.dir, "."+n.String()) }

// save writes one snapshot under another name, gives it its own, and removes old ones.
func (m *Manager) save(n name, c *Contents) error {
	path, unfinished := filepath.Join(m.dir, n.String()), m.unfinished(n)
	err := m.place(unfinished, path, c)
	if noSpace(err) && !exists(path) && m.makeRoom() {
		err = os.RemoveAll(unfinished)
		if err == nil {
			err = m.place(unfinished, path, c)
		}
	}
	if err != nil {
		if lost := m.lock.held(); lost != nil { // then the one who has it has cleared up
			err = lost
		}
		os.RemoveAll(unfinished)
		return fmt.Errorf("checkpoint: the snapshot %s could not be written (%s): %w", path, m.lastGood(n), err)
	}
	if err := m.removeOld(m.keep); err != nil {
		return fmt.Errorf("checkpoint: the snapshot %s was written, and old ones could not be removed: %w", path, err)
	}
	return nil
}

// place writes a snapshot. The folder may be another's by now: of what that has written nothing is touched, for numbers rise.
func (m *Manager) place(unfinished, path string, c *Contents) error {
	if err := m.lock.held(); err != nil {
		return err
	}
	if err := m.disk.does("mkdir", unfinished); err != nil {
		return wrap(err)
	}
	if err := os.Mkdir(unfinished, 0o777); err != nil {
		return wrap(err)
	}
	if err := m.disk.writeSnapshot(unfinished, c); err != nil {
		return err
	}
	if err := m.lock.held(); err != nil {
		return err
	}
	if err := m.disk.does("rename", path); err != nil {
		return wrap(err)
	}
	if err := os.Rename(unfinished, path); err != nil {
		return wrap(err)
	}
	return m.disk.syncFolder(m.dir)
}

// makeRoom removes on a full disk those snapshots that would be removed after the save in progress, if a newer one can be read. It
// reports whether there is more room now.
func (m *Manager) makeRoom() bool {
	all, _, err := list(m.dir)
	if err != nil || m.keep < 2 || len(all) < m.keep {
		return false
	}
	newest := filepath.Join(m.dir, all[len(all)-1].String())
	if _, err := ReadSnapshot(newest); err != nil {
		return false
	}
	err = m.removeOld(m.keep - 1)
	m.logger.Warn("checkpoint: the disk is full: old snapshots are removed before the next one is written", "folder", m.dir, "removed", len(all)-m.keep+1, "newest", newest, "error", err)
	return err == nil
}

// lastGood says what there is to go on from besides a snapshot.
func (m *Manager) lastGood(but name) string {
	all, _, err := list(m.dir)
	all = slices.DeleteFunc(all, func(n name) bool { return n == but })
	if err != nil || len(all) == 0 {
		return "there is no earlier one"
	}
	return "the last one before it is " + all[len(all)-1].String()
}

// removeOld removes all snapshots but so many, the newest. They lose their name first, so that nobody takes what is left of them for one.
func (m *Manager) removeOld(keep int) error {
	all, _, err := list(m.dir)
	if err != nil || keep < 0 {
		return err
	}
	for _, n := range all[:max(len(all)-keep, 0)] {
		if err := m.remove(n); err != nil {
			return fmt.Errorf("checkpoint: removing an old snapshot: %w", err)
		}
	}
	return nil
}

func (m *Manager) remove(n name) error {
	path, unfinished := filepath.Join(m.dir, n.String()), m.unfinished(n)
	if err := m.disk.does("unname", path); err != nil {
		return err
	}
	if err := os.Rename(path, unfinished); errors.Is(err, fs.ErrNotExist) {
		return nil // somebody else has removed it
	} else if err != nil {
		return err
	}
	if err := m.disk.does("remove", path); err != nil {
		return err
	}
	return os.RemoveAll(unfinished)
}

// Latest returns the newest snapshot of a folder that can be read, and why newer ones were refused. Without any snapshot, or
// without the folder, it returns nil; if there are some and none can be read, an error.
func Latest(dir string) (s *Snapshot, refused []error, err error) {
	all, refused, err := list(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, n := range slices.Backward(all) {
		s, err := ReadSnapshot(filepath.Join(dir, n.String()))
		if err == nil {
			return s, refused, nil
		}
		refused = append(refused, err)
	}
	if len(refused) > 0 {
		return nil, nil, fmt.Errorf("checkpoint: no snapshot in %s can be read:\n%w", dir, errors.Join(refused...))
	}
	return nil, nil, nil
}

// Find is [ReadSnapshot] of path if that is a snapshot, and else [Latest] of it. There must be one.
func Find(path string) (s *Snapshot, refused []error, err error) {
	if _, ok := parseName(filepath.Base(path)); ok || exists(filepath.Join(path, manifestFile)) {
		s, err = ReadSnapshot(path)
		return s, nil, err
	}
	if info, err := os.Stat(path); err != nil {
		return nil, nil, wrap(err)
	} else if !info.IsDir() {
		return nil, nil, fmt.Errorf("checkpoint: %s is no folder: want a snapshot (%sNUMBER-step-STEP), or a folder of them", path, namePrefix)
	}
	if s, refused, err = Latest(path); err == nil && s == nil {
		err = fmt.Errorf("checkpoint: there is no snapshot in %s: want a folder %sNUMBER-step-STEP, or one that holds such", path, namePrefix)
	}
	return s, refused, err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// List returns the paths of a folder's snapshots, the oldest first, without looking inside.
func List(dir string) ([]string, error) {
	all, _, err := list(dir)
	paths := make([]string, len(all))
	for i, n := range all {
		paths[i] = filepath.Join(dir, n.String())
	}
	return paths, err
}

// list returns the names of a folder's snapshots by their numbers, and what is named almost like one.
func list(dir string) (all []name, strange []error, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, wrap(err)
	}
	for _, e := range entries {
		if n, ok := parseName(e.Name()); ok {
			all = append(all, n)
		} else if strings.HasPrefix(e.Name(), namePrefix) {
			strange = append(strange, fmt.Errorf("checkpoint: the snapshot %s is refused: its name is not %sNUMBER-step-STEP", filepath.Join(dir, e.Name()), namePrefix))
		}
	}
	slices.SortFunc(all, func(a, b name) int { return a.number - b.number })
	return all, strange, nil
}

// disk makes the steps on the disk that tests want to see.
type disk struct {
	watch func(op, path string) error
}

// does says that a step comes next, which is not to be made if it returns an error.
func (d disk) does(op, path string) error {
	if d.watch == nil {
		return nil
	}
	return d.watch(op, path)
}

// watched says of each Write to w that it comes next.
func (d disk) watched(w io.Writer, path string) io.Writer {
	if d.watch == nil {
		return w
	}
	return watchedWriter{d, w, path}
}

type watchedWriter struct {
	disk disk
	to   io.Writer
	path string
}

func (w watchedWriter) Write(p []byte) (int, error) {
	if err := w.disk.does("write", w.path); err != nil {
		return 0, err
	}
	return w.to.Write(p)
}

// syncFolder makes sure that the entries of a folder are on the disk.
func (d disk) syncFolder(dir string) error {
	if err := d.does("sync", dir); err != nil {
		return wrap(err)
	}
	return syncFolder(dir)
}

// tryFolder makes a folder and removes it.
func (disk) tryFolder(path string) error {
	return errors.Join(os.Mkdir(path, 0o777), os.Remove(path))
}
