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

// Holder is the process that writes into a folder of snapshots.
type Holder struct {
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Job   string    `json:"job,omitempty"` // "": of none
	Epoch uint32    `json:"epoch"`         // of the job: higher after each restart
	Since time.Time `json:"since"`
	// Boot is of the kernel that runs it, PIDs the namespace that its PID is of, which each container has for itself, and Started when it
	// was started, in the kernel's ticks since boot: host names and PIDs may be those of others as well. "" and 0 where that is not known.
	Boot    string `json:"boot,omitempty"`
	PIDs    string `json:"pids,omitempty"`
	Started uint64 `json:"started,omitempty"`
}

// String says who it is: "host a, pid 17, job "digits", since 2026-01-31 17:00:01".
func (h *Holder) String() string {
	text := fmt.Sprintf("host %s, pid %d", h.Host, h.PID)
	if h.Job != "" {
		text += fmt.Sprintf(", job %q", h.Job)
	}
	return text + ", since " + h.Since.Local().Format(time.DateTime)
}

// LockedError is the error of a folder that another process writes into.
type LockedError struct {
	Dir    string
	Holder Holder // zero: it has not said yet who it is
	why    string
}

func (e *LockedError) Error() string {
	who := "another process"
	if e.Holder.PID != 0 {
		who = "another process (" + e.Holder.String() + ")"
	}
	return fmt.Sprintf("checkpoint: %s writes its snapshots into %s: want a folder for each training%s", who, e.Dir, e.why)
}

// lockName is the file that says who writes into a folder. Its holder has locked it, so that the system takes the lock back when the process
// ends, however it does. Where the disk knows no locks the file alone must do.
const lockName = ".lock"

// lock is a folder's lock that this process has.
type lock struct {
	dir  string
	me   Holder
	file *os.File
	try  func(*os.File) (free bool, err error) // tryLock, or a test's
}

func (l *lock) path() string { return filepath.Join(l.dir, lockName) }

// takeLock takes the lock of a folder for a process. It takes over that of a process that has ended, of an earlier start of the same job,
// which may be on a host that cannot be reached any more, and of this same process. Of anybody else it is a *LockedError.
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
			f.Close() // its holder has removed it in between
			continue
		}
		lockless := errors.Is(err, errors.ErrUnsupported)
		if err != nil && !lockless {
			f.Close()
			return wrap(err)
		}
		holder, _ := readHolder(l.path()) // of a file that is torn nobody is known
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
			e.why = fmt.Sprintf(". The disk cannot tell whether that one still runs: if it does not, remove %s", l.path())
		}
		return e
	}
	return fmt.Errorf("checkpoint: locking the folder: %s is another file each time that it is opened", l.path())
}

// takeMost is how often a process opens the file of a lock that others give back meanwhile.
const takeMost = 1000

// yieldsTo reports whether a process takes the lock from h though that may still run.
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

// known reports whether h says more of itself than its host's name and its PID.
func (h *Holder) known() bool { return h.Boot != "" && h.PIDs != "" && h.Started != 0 }

// seenBy reports whether a process can find out whether h still runs. In another container it cannot.
func (h *Holder) seenBy(me *Holder) bool {
	switch {
	case !h.known() || !me.known():
		return h.Host == me.Host
	case h.Boot == me.Boot:
		return h.PIDs == me.PIDs
	}
	return h.Host == me.Host && h.PIDs == firstPIDs && me.PIDs == firstPIDs // the host has been started anew
}

// isGone reports whether h has ended for certain.
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
	return known && other.identify() && other.Started != h.Started // another has its PID now
}

// sign writes into the file of the lock who has it.
func (l *lock) sign(f *os.File) error {
	text, err := json.Marshal(&l.me)
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(text, '\n'), 0)
	}
	if err != nil && !noSpace(err) { // on a full disk it is locked all the same, by a process that cannot say who it is
		f.Close()
		return fmt.Errorf("checkpoint: locking the folder: %w", err)
	}
	return nil
}

// takeOver puts a lock of this process in the place of another's.
func (l *lock) takeOver() (err error) {
	beside := l.path() + "." + rand.Text()
	if l.file, err = os.OpenFile(beside, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666); err != nil {
		return wrap(err)
	}
	if _, err := l.try(l.file); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		l.file.Close()
		return wrap(err)
	}
	if err := l.sign(l.file); err != nil {
		return err
	}
	err = os.Rename(beside, l.path())
	if err != nil { // some systems do not rename what is open
		l.file.Close()
		if err = os.Rename(beside, l.path()); err == nil {
			l.file, err = os.OpenFile(l.path(), os.O_RDWR, 0)
		}
	}
	return wrap(err)
}

// held returns an error if another process has taken the lock over. One that somebody has removed is taken again.
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
		return fmt.Errorf("checkpoint: the lock of %s is not this process' any more: %w", l.dir, err)
	}
	return fmt.Errorf("checkpoint: another start of this training (%v) has taken over %s: this one may not write there any more", &holder, l.dir)
}

// release gives the lock back.
func (l *lock) release() error {
	if !isAt(l.file, l.path()) {
		return wrap(l.file.Close())
	}
	err := os.Remove(l.path()) // while it is locked: nobody can have taken it
	closed := l.file.Close()
	if err != nil { // some systems do not remove what is open
		err = os.Remove(l.path())
	}
	return errors.Join(wrap(err), wrap(closed))
}

// isAt reports whether an open file is the one that has a name now.
func isAt(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(mine, now)
}

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
