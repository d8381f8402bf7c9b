package checkpoint

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Holder identifies the process that has locked a folder of snapshots.
type Holder struct {
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Job   string    `json:"job,omitempty"` // "": no job
	Epoch uint32    `json:"epoch"`         // of the job; increases with each restart
	Since time.Time `json:"since"`
	// Boot is the boot id of the kernel, PIDs the PID namespace of the process (each container has one), and
	// Started its start time in the kernel's ticks since boot. They are needed because host names and PIDs
	// are not unique. They are "" and 0 if unknown.
	Boot    string `json:"boot,omitempty"`
	PIDs    string `json:"pids,omitempty"`
	Started uint64 `json:"started,omitempty"`
}

// String describes the process: "host a, pid 17, job "digits", since 2026-01-31 17:00:01".
func (h *Holder) String() string {
	text := fmt.Sprintf("host %s, pid %d", h.Host, h.PID)
	if h.Job != "" {
		text += fmt.Sprintf(", job %q", h.Job)
	}
	return text + ", since " + h.Since.Local().Format(time.DateTime)
}

// LockedError reports that another process has locked the folder.
type LockedError struct {
	Dir    string // the locked folder
	Holder Holder // zero: not known yet
	why    string
}

// Error implements error.
func (e *LockedError) Error() string {
	who := "another process"
	if e.Holder.PID != 0 {
		who = "another process (" + e.Holder.String() + ")"
	}
	return fmt.Sprintf("checkpoint: %s writes its snapshots into %s: want a folder for each training%s", who, e.Dir, e.why)
}

// lockName is the file that names the process that writes to the folder. The process keeps it locked, so that
// the operating system releases the lock when the process ends in any way. On file systems without locks, the
// existence of the file is the lock.
const lockName = ".lock"

// lock is a lock on a folder, held by this process.
type lock struct {
	dir  string
	me   Holder
	file *os.File
	try  func(*os.File) (free bool, err error) // tryLock, or a test's replacement
}

func (l *lock) path() string { return filepath.Join(l.dir, lockName) }

// takeLock locks a folder for a process. It takes over the lock of a process that has ended, of an earlier
// epoch of the same job (which may be on an unreachable host), and of this process itself. If any other
// process holds the lock, it returns a *LockedError.
func takeLock(dir string, me Holder) (*lock, error) {
	l := &lock{dir: dir, me: me, try: tryLock}
	if err := l.take(); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *lock) take() error {
	me := &l.me
	for range takeMost {
		f, err := os.OpenFile(l.path(), os.O_RDWR|os.O_CREATE, 0o666)
		if err != nil {
			return wrap(err)
		}
		free, err := l.try(f)
		if err == nil && free && !isAt(f, l.path()) {
			f.Close() // its holder removed it meanwhile
			continue
		}
		lockless := errors.Is(err, errors.ErrUnsupported)
		if err != nil && !lockless {
			f.Close()
			return wrap(err)
		}
		holder, _ := readHolder(l.path()) // unknown if the file is incomplete
		switch {
		case free, lockless && holder.PID == 0:
			l.file = f
			return l.sign(f)
		case holder.yieldsTo(me), lockless && holder.isGone(me):
			f.Close()
			return l.takeOver()
		}
		f.Close()
		e := &LockedError{Dir: l.dir, Holder: holder}
		if lockless && !holder.seenBy(me) {
			e.why = fmt.Sprintf(". This file system has no locks: if that process no longer runs, remove %s", l.path())
		}
		return e
	}
	return fmt.Errorf("checkpoint: locking the folder: %s is a different file each time it is opened", l.path())
}

// takeMost is how often takeLock retries if other processes release the lock meanwhile.
const takeMost = 1000

// yieldsTo reports whether me takes the lock over from h, even if h still runs.
func (h *Holder) yieldsTo(me *Holder) bool {
	return h.Job != "" && h.Job == me.Job && h.Epoch < me.Epoch || h.is(me)
}

// is reports whether h is this process.
func (h *Holder) is(me *Holder) bool {
	if h.known() && me.known() {
		return h.Boot == me.Boot && h.PIDs == me.PIDs && h.PID == me.PID && h.Started == me.Started
	}
	return h.Host == me.Host && h.PID == me.PID
}

// known reports whether h has more than a host name and a PID.
func (h *Holder) known() bool { return h.Boot != "" && h.PIDs != "" && h.Started != 0 }

// seenBy reports whether me can find out if h still runs. A process in another container cannot.
func (h *Holder) seenBy(me *Holder) bool {
	switch {
	case !h.known() || !me.known():
		return h.Host == me.Host
	case h.Boot == me.Boot:
		return h.PIDs == me.PIDs
	}
	return h.Host == me.Host && h.PIDs == firstPIDs && me.PIDs == firstPIDs // the host was rebooted
}

// isGone reports whether h has certainly ended.
func (h *Holder) isGone(me *Holder) bool {
	if !h.seenBy(me) {
		return false
	}
	known := h.known() && me.known()
	if known && h.Boot != me.Boot {
		return true
	}
	p, err := os.FindProcess(h.PID)
	if err != nil || errors.Is(p.Signal(syscall.Signal(0)), os.ErrProcessDone) {
		return true
	}
	other := Holder{PID: h.PID}
	return known && other.identify() && other.Started != h.Started // another process has its PID now
}

// sign writes the holder to the lock file.
func (l *lock) sign(f *os.File) error {
	text, err := json.Marshal(&l.me)
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(text, '\n'), 0)
	}
	if err != nil && !noSpace(err) { // on a full disk, the folder is locked without a holder in the file
		f.Close()
		return fmt.Errorf("checkpoint: locking the folder: %w", err)
	}
	return nil
}

// takeOver replaces another process's lock file by one of this process.
func (l *lock) takeOver() (err error) {
	temporary := l.path() + "." + rand.Text()
	if l.file, err = os.OpenFile(temporary, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666); err != nil {
		return wrap(err)
	}
	if _, err := l.try(l.file); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		l.file.Close()
		return wrap(err)
	}
	if err := l.sign(l.file); err != nil {
		return err
	}
	err = os.Rename(temporary, l.path())
	if err != nil { // some systems cannot rename an open file
		l.file.Close()
		if err = os.Rename(temporary, l.path()); err == nil {
			l.file, err = os.OpenFile(l.path(), os.O_RDWR, 0)
		}
	}
	return wrap(err)
}

// held returns an error if another process has taken over the lock. If the lock file was removed, held takes
// the lock again.
func (l *lock) held() error {
	if isAt(l.file, l.path()) {
		return nil
	}
	holder, err := readHolder(l.path())
	if errors.Is(err, fs.ErrNotExist) {
		l.file.Close()
		return l.take()
	}
	if err != nil {
		return fmt.Errorf("checkpoint: this process no longer holds the lock of %s: %w", l.dir, err)
	}
	return fmt.Errorf("checkpoint: another start of this training (%v) has taken over %s: this one must not write to it "+
		"any more", &holder, l.dir)
}

// release releases the lock.
func (l *lock) release() error {
	if !isAt(l.file, l.path()) {
		return wrap(l.file.Close())
	}
	err := os.Remove(l.path()) // before closing: no other process can have taken it
	closed := l.file.Close()
	if err != nil { // some systems do not remove what is open
		err = os.Remove(l.path())
	}
	return errors.Join(wrap(err), wrap(closed))
}

// isAt reports whether path currently names the open file f.
func isAt(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(mine, now)
}

// ReadHolder returns the process that has locked a folder of snapshots. Processes that read the same one see the same
// folder.
func ReadHolder(dir string) (Holder, error) { return readHolder(filepath.Join(dir, lockName)) }

func readHolder(path string) (h Holder, err error) {
	text, err := readWhole(path, 1<<12)
	if err == nil {
		err = json.Unmarshal(text, &h)
	}
	if err != nil {
		return Holder{}, err
	}
	return h, nil
}
