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

// Config configures a [Manager].
type Config struct {
	Dir string // the folder of the snapshots; created if missing, its parent must exist
	// Keep is the number of newest snapshots to keep (TensorFlow's max_to_keep). Default: 3. Negative: all.
	Keep int
	// Job and Epoch identify the writer to other processes. A later epoch of the same job takes over the
	// lock. Default: the process belongs to no job.
	Job   string
	Epoch uint32
	// Logger receives warnings. Default: slog.Default().
	Logger *slog.Logger

	// watch, for tests, is called before each disk operation. Its error makes the operation fail.
	watch func(op, path string) error
}

// keepDefault keeps the newest snapshot and two older ones to fall back on.
const keepDefault = 3

// Manager writes the snapshots of one training to a folder and removes the oldest (TensorFlow's
// CheckpointManager). Each snapshot is a subfolder named snapshot-NUMBER-step-STEP. Snapshots are atomic,
// even if the process or the machine crashes. Only one process at a time can write to a folder: it is locked
// until Close or the end of the process. A Manager must not be used by several goroutines at once.
type Manager struct {
	dir     string
	keep    int
	lock    *lock
	logger  *slog.Logger
	disk    disk
	number  int        // of the newest snapshot
	pending chan error // of the save in progress; nil: none
	begun   name       // the snapshot that Begin has begun; its number is 0 if there is none
	failed  error      // the first save error; no further snapshot is written
}

// Open creates the folder if it does not exist, locks it, and removes incomplete snapshots of killed
// processes. If another process has locked the folder, the error is a *[LockedError] that names it. The
// caller must call Close.
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

// begin finds the newest number in the folder, and removes incomplete snapshots.
func (m *Manager) begin() error {
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return wrap(err)
	}
	for _, e := range entries {
		if n, ok := parseName(strings.TrimPrefix(e.Name(), ".")); ok { // the previous lock holder may still rename it
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
	return wrap(m.disk.tryFolder(m.unfinished(name{}))) // fail now rather than after hours of training
}

// clearAway removes an incomplete snapshot. A process whose lock was taken over may still be writing to it.
// The folder is renamed first, so that this process cannot create files in a folder that is being removed.
func clearAway(path string) error {
	if renamed := path + ".left"; os.Rename(path, renamed) == nil {
		path = renamed
	}
	if os.RemoveAll(path) == nil {
		return nil
	}
	return os.RemoveAll(path) // a file may have been created meanwhile
}

// Close waits for the save in progress and unlocks the folder. It returns the first error of all saves.
func (m *Manager) Close() error {
	m.Abandon()
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

// Dir returns the folder of the snapshots.
func (m *Manager) Dir() string { return m.dir }

// Start waits for the previous save and then saves c in the background. It returns the first error of the
// saves before it; after a failure it writes nothing. The caller must not modify c until the save has ended.
func (m *Manager) Start(c *Contents) error {
	if err := m.Wait(); err != nil {
		return err
	}
	if m.lock == nil {
		return fmt.Errorf("checkpoint: writing a snapshot to %s: the manager is closed", m.dir)
	}
	pending := make(chan error, 1)
	m.pending = pending
	m.number++
	n := name{m.number, c.Step}
	go func() { pending <- m.save(n, c) }()
	return nil
}

// Begin waits for the previous save, and then creates the folder of a snapshot whose parts several processes write by
// [WritePart], part 0 among them. [Manager.Finish] or [Manager.Abandon] must follow. It returns the name of the
// folder within Dir, and the first error of the saves before it.
func (m *Manager) Begin(step int64) (folder string, err error) {
	m.Abandon()
	if err := m.Wait(); err != nil {
		return "", err
	}
	if m.lock == nil {
		return "", fmt.Errorf("checkpoint: writing a snapshot to %s: the manager is closed", m.dir)
	}
	m.number++
	n := name{m.number, step}
	if err := m.makeFolder(m.unfinished(n)); err != nil {
		return "", fmt.Errorf("checkpoint: the snapshot %s could not be written (%s): %w", filepath.Join(m.dir, n.String()),
			m.lastGood(n), err)
	}
	m.begun = n
	return filepath.Base(m.unfinished(n)), nil
}

// Finish completes the begun snapshot in the background, once all parts are written: in the order of their numbers. c
// has no tensors. Errors are those of Start.
func (m *Manager) Finish(c *Contents, parts []Part) {
	n, pending := m.begun, make(chan error, 1)
	m.begun, m.pending = name{}, pending
	go func() {
		path, unfinished := filepath.Join(m.dir, n.String()), m.unfinished(n)
		err := m.disk.writeManifest(unfinished, c, parts)
		if err == nil {
			err = m.publish(unfinished, path)
		}
		pending <- m.saved(n, err)
	}()
}

// Abandon removes the begun snapshot, if there is one. No process may be writing a part of it.
func (m *Manager) Abandon() {
	if m.begun.number > 0 {
		_ = clearAway(m.unfinished(m.begun)) // the next Open tries again
		m.begun = name{}
	}
}

// Save saves c and waits until it is synced to disk.
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

// Err returns the first error of all saves that have ended, without waiting.
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

// unfinishedPrefix is the prefix of folders that are incomplete: being written, or being removed.
const unfinishedPrefix = "." + namePrefix

func (m *Manager) unfinished(n name) string { return filepath.Join(m.dir, "."+n.String()) }

// save writes one snapshot under a temporary name, renames it, and removes old ones.
func (m *Manager) save(n name, c *Contents) error {
	path, unfinished := filepath.Join(m.dir, n.String()), m.unfinished(n)
	err := m.write(unfinished, path, c)
	if noSpace(err) && !exists(path) && m.makeRoom() {
		err = os.RemoveAll(unfinished)
		if err == nil {
			err = m.write(unfinished, path, c)
		}
	}
	return m.saved(n, err)
}

// saved ends a save: it removes old snapshots or, after an error, what is unfinished.
func (m *Manager) saved(n name, err error) error {
	path := filepath.Join(m.dir, n.String())
	if err != nil {
		if lost := m.lock.held(); lost != nil { // then the new lock holder has removed the folder
			err = lost
		}
		os.RemoveAll(m.unfinished(n))
		return fmt.Errorf("checkpoint: the snapshot %s could not be written (%s): %w", path, m.lastGood(n), err)
	}
	if err := m.removeOld(m.keep); err != nil {
		return fmt.Errorf("checkpoint: the snapshot %s was written, but old ones could not be removed: %w", path, err)
	}
	return nil
}

// write writes a snapshot. Another process may have taken over the folder meanwhile. Its snapshots are not
// touched, because their numbers are higher.
func (m *Manager) write(unfinished, path string, c *Contents) error {
	if err := m.makeFolder(unfinished); err != nil {
		return err
	}
	if err := m.disk.writeSnapshot(unfinished, c); err != nil {
		return err
	}
	return m.publish(unfinished, path)
}

func (m *Manager) makeFolder(unfinished string) error {
	if err := m.lock.held(); err != nil {
		return err
	}
	if err := m.disk.does("mkdir", unfinished); err != nil {
		return wrap(err)
	}
	return wrap(os.Mkdir(unfinished, 0o777))
}

// publish gives a complete snapshot its name.
func (m *Manager) publish(unfinished, path string) error {
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

// makeRoom is called when the disk is full. It removes the snapshots that the save in progress would remove
// later, if a newer one is readable. It reports whether it freed space.
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
	m.logger.Warn("checkpoint: the disk is full: old snapshots are removed before the next one is written", "folder",
		m.dir, "removed", len(all)-m.keep+1, "newest", newest, "error", err)
	return err == nil
}

// lastGood describes the newest snapshot other than the given one.
func (m *Manager) lastGood(but name) string {
	all, _, err := list(m.dir)
	all = slices.DeleteFunc(all, func(n name) bool { return n == but })
	if err != nil || len(all) == 0 {
		return "no earlier snapshot exists"
	}
	return "the last one before it is " + all[len(all)-1].String()
}

// removeOld removes all but the newest snapshots. It renames each before removing it, so that a partly
// removed folder is not taken for a snapshot.
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
		return nil // already removed by another process
	} else if err != nil {
		return err
	}
	if err := m.disk.does("remove", path); err != nil {
		return err
	}
	return os.RemoveAll(unfinished)
}

// Latest is [Reader.Latest] of a zero Reader.
func Latest(dir string) (s *Snapshot, refused []error, err error) { return Reader{}.Latest(dir) }

// Latest returns the newest readable snapshot of a folder, and the reasons why newer ones were rejected. If
// the folder does not exist or has no snapshots, it returns nil without an error. If it has snapshots but
// none is readable, it returns an error.
func (r Reader) Latest(dir string) (s *Snapshot, refused []error, err error) {
	all, refused, err := list(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, n := range slices.Backward(all) {
		s, err := r.ReadSnapshot(filepath.Join(dir, n.String()))
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

// Find is [Reader.Find] of a zero Reader.
func Find(path string) (s *Snapshot, refused []error, err error) { return Reader{}.Find(path) }

// Find reads the snapshot at path if path is a snapshot ([ReadSnapshot]), and otherwise the newest one in the
// folder path ([Latest]). It returns an error if there is none.
func (r Reader) Find(path string) (s *Snapshot, refused []error, err error) {
	if IsSnapshot(path) {
		s, err = r.ReadSnapshot(path)
		return s, nil, err
	}
	if info, err := os.Stat(path); err != nil {
		return nil, nil, wrap(err)
	} else if !info.IsDir() {
		return nil, nil, fmt.Errorf("checkpoint: %s is not a folder: want a snapshot (%sNUMBER-step-STEP), "+
			"or a folder of them", path, namePrefix)
	}
	if s, refused, err = r.Latest(path); err == nil && s == nil {
		err = fmt.Errorf("checkpoint: %s contains no snapshot: want a folder %sNUMBER-step-STEP, or a folder of them", path,
			namePrefix)
	}
	return s, refused, err
}

// IsSnapshot reports whether path is one snapshot, by its name or its manifest. It reads nothing else.
func IsSnapshot(path string) bool {
	_, ok := parseName(filepath.Base(path))
	return ok || exists(filepath.Join(path, manifestFile))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// List returns the paths of a folder's snapshots, oldest first, without reading them.
func List(dir string) ([]string, error) {
	all, _, err := list(dir)
	paths := make([]string, len(all))
	for i, n := range all {
		paths[i] = filepath.Join(dir, n.String())
	}
	return paths, err
}

// list returns the names of a folder's snapshots, by number, and an error for each malformed name.
func list(dir string) (all []name, strange []error, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, wrap(err)
	}
	for _, e := range entries {
		if n, ok := parseName(e.Name()); ok {
			all = append(all, n)
		} else if strings.HasPrefix(e.Name(), namePrefix) {
			strange = append(strange, fmt.Errorf("checkpoint: the snapshot %s is refused: its name is not %sNUMBER-step-STEP",
				filepath.Join(dir, e.Name()), namePrefix))
		}
	}
	slices.SortFunc(all, func(a, b name) int { return a.number - b.number })
	return all, strange, nil
}

// disk performs the disk operations that tests can observe and fail.
type disk struct {
	watch func(op, path string) error
}

// does announces an operation to the test. The operation must not run if does returns an error.
func (d disk) does(op, path string) error {
	if d.watch == nil {
		return nil
	}
	return d.watch(op, path)
}

// watched returns a writer that announces each Write to w.
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

// syncFolder syncs the entries of a folder to disk.
func (d disk) syncFolder(dir string) error {
	if err := d.does("sync", dir); err != nil {
		return wrap(err)
	}
	return syncFolder(dir)
}

// tryFolder checks that a folder can be created, and removes it.
func (disk) tryFolder(path string) error {
	return errors.Join(os.Mkdir(path, 0o777), os.Remove(path))
}
