package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Config says where and how many snapshots a [Manager] keeps.
type Config struct {
	Dir string // its parent must exist
	// Keep is how many snapshots stay, the newest; default 3, negative: all. (TensorFlow's max_to_keep.)
	Keep int

	watch func(op, path string) // in tests: called before each step on the disk
}

// keepDefault leaves one to fall back on, and one more.
const keepDefault = 3

// Manager writes the snapshots of one training into a folder and removes the oldest (TensorFlow's CheckpointManager). A snapshot is
// a folder of its own, named snapshot-NUMBER-step-STEP, and is there whole or not at all, whenever the process or the machine
// dies. One process at a time may write into a folder. A Manager is for one goroutine.
type Manager struct {
	dir     string
	keep    int
	disk    disk
	number  int        // of the newest
	pending chan error // of the save in progress; nil: none
	failed  error      // the first save that failed: there will be no other
}

// Open makes the folder if it is not there, and clears away what a killed process left unfinished.
func Open(cfg Config) (*Manager, error) {
	m := &Manager{dir: cfg.Dir, keep: cfg.Keep, disk: disk{cfg.watch}}
	if m.keep == 0 {
		m.keep = keepDefault
	}
	if err := os.Mkdir(m.dir, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, wrap(err)
	}
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return nil, wrap(err)
	}
	for _, e := range entries {
		if n, ok := parseName(e.Name()); ok {
			m.number = max(m.number, n.number)
		}
		if strings.HasPrefix(e.Name(), unfinishedPrefix) {
			if err := os.RemoveAll(filepath.Join(m.dir, e.Name())); err != nil {
				return nil, wrap(err)
			}
		}
	}
	return m, wrap(m.disk.tryFolder(m.unfinished(name{}))) // better now than after hours of training
}

// Dir returns the folder.
func (m *Manager) Dir() string { return m.dir }

// Start saves c in the background, after the save before has ended. It returns that one's error, or an earlier one's: after a
// failure nothing is written any more. Nobody may change c.
func (m *Manager) Start(c *Contents) error {
	if err := m.Wait(); err != nil {
		return err
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
	if err := m.place(unfinished, path, c); err != nil {
		os.RemoveAll(unfinished)
		return fmt.Errorf("checkpoint: the snapshot %s could not be written (%s): %w", path, m.lastGood(), err)
	}
	return m.removeOld()
}

func (m *Manager) place(unfinished, path string, c *Contents) error {
	m.disk.does("mkdir", unfinished)
	if err := os.Mkdir(unfinished, 0o777); err != nil {
		return wrap(err)
	}
	if err := m.disk.writeSnapshot(unfinished, c); err != nil {
		return err
	}
	m.disk.does("rename", path)
	if err := os.Rename(unfinished, path); err != nil {
		return wrap(err)
	}
	return m.disk.syncFolder(m.dir)
}

// lastGood says what there is to go on from.
func (m *Manager) lastGood() string {
	all, _, err := list(m.dir)
	if err != nil || len(all) == 0 {
		return "there is no earlier one"
	}
	return "the last one before it is " + all[len(all)-1].String()
}

// removeOld removes all snapshots but the newest. They lose their name first, so that nobody takes what is left of them for one.
func (m *Manager) removeOld() error {
	all, _, err := list(m.dir)
	if err != nil || m.keep < 0 {
		return err
	}
	for _, n := range all[:max(len(all)-m.keep, 0)] {
		path, unfinished := filepath.Join(m.dir, n.String()), m.unfinished(n)
		m.disk.does("unname", path)
		if err := os.Rename(path, unfinished); err != nil {
			return fmt.Errorf("checkpoint: removing an old snapshot: %w", err)
		}
		m.disk.does("remove", path)
		if err := os.RemoveAll(unfinished); err != nil {
			return fmt.Errorf("checkpoint: removing an old snapshot: %w", err)
		}
	}
	return nil
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
type disk struct{ watch func(op, path string) }

// does says that a step comes next.
func (d disk) does(op, path string) {
	if d.watch != nil {
		d.watch(op, path)
	}
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
	w.disk.does("write", w.path)
	return w.to.Write(p)
}

// syncFolder makes sure that the entries of a folder are on the disk.
func (d disk) syncFolder(dir string) error {
	d.does("sync", dir)
	return syncFolder(dir)
}

// tryFolder makes a folder and removes it.
func (disk) tryFolder(path string) error {
	return errors.Join(os.Mkdir(path, 0o777), os.Remove(path))
}
