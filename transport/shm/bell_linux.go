package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A process is woken by its bell, an eventfd, of which every other process has a descriptor. So a group of n processes
// has n bells, and n-1 connections, those of the set-up: the process that listened sees by their end that another
// process has ended, marks its ranks in the control file, and rings all bells.
//
// The listening process may be stopped, or have left. So the others watch each other, too: they poll the locks that all
// processes hold on the control file, by their first ranks, as long as they live. See watch.

// newBell creates the bell of this process.
func (w *world) newBell() error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("shm: creating an eventfd: %w", err)
	}
	w.bell, w.bellFD = bellFile(fd), fd
	return nil
}

// bellFile makes a file of a bell, which Go's poller watches if it has room. It is replaced in tests.
var bellFile = func(fd int) *os.File { return os.NewFile(uintptr(fd), "bell") }

// checkBell returns an error if a file of another process is not a bell: writing to it could block, or raise a signal.
func checkBell(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil || name != "anon_inode:[eventfd]" {
		return fmt.Errorf("shm: the other process sent %q, want an eventfd (%v)", name, err)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_NONBLOCK == 0 {
		return fmt.Errorf("shm: the other process sent an eventfd that blocks (%v)", err)
	}
	return nil
}

// one is what ring adds to a bell; its value does not matter.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// ring wakes a process, so that it checks its ranks. It does nothing for this process.
func (w *world) ring(process int) {
	w.bells.RLock()
	defer w.bells.RUnlock()
	if fd := w.processes[process].bell; fd != noBell && !w.silent {
		unix.Write(fd, one) // if the counter is full, its reader will wake up anyway
	}
}

// listenBell checks the local ranks whenever another process rings, until this process closes the group.
func (w *world) listenBell() {
	polled := w.bell.SetReadDeadline(time.Time{}) == nil // it fails where Go's poller does not watch the file
	var count [8]byte
	for !w.closing() {
		var err error
		if polled {
			_, err = w.bell.Read(count[:])
		} else {
			err = waitBell(w.bellFD)
		}
		if err != nil {
			return
		}
		w.look()
		w.answer()
	}
}

// waitBell blocks a thread until a bell is rung: Go's poller does not watch it, because the system's limit
// (fs.epoll.max_user_watches) is reached. The bell stays non-blocking, since others write to it.
func waitBell(fd int) error {
	for {
		var count [8]byte
		_, err := unix.Read(fd, count[:])
		if err == unix.EAGAIN {
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if err == nil {
				continue
			}
		}
		if err != unix.EINTR {
			return err
		}
	}
}

// noBell is the bell of this process in the list of processes, which it does not ring.
const noBell = -1

// closeBells closes the descriptors of the other processes' bells, and ends listenBell.
func (w *world) closeBells() {
	w.bells.Lock()
	defer w.bells.Unlock()
	w.silent = true
	for i := range w.processes {
		if p := &w.processes[i]; p.bell != noBell {
			unix.Close(p.bell)
			p.bell = noBell
		}
	}
	if w.bell != nil {
		unix.Write(w.bellFD, one)
	}
}

// lock holds a lock on the control file, which others can see, until this process ends or the file is closed. Another
// open file has the lock, since all processes share the one that they received. A process locks before it can become a
// member of the group, so a member without a lock has ended.
func (w *world) lock() (err error) {
	if w.life == nil {
		w.life, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", w.control.Fd()), os.O_RDWR|unix.O_CLOEXEC, 0)
	}
	if err == nil {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(w.cfg.Ranks[0]), Len: 1}
		err = unix.FcntlFlock(w.life.Fd(), unix.F_OFD_SETLK, &l)
	}
	if err != nil {
		return fmt.Errorf("shm: locking the control file for rank %d: %w", w.cfg.Ranks[0], err)
	}
	return nil
}

// lockWithin locks. While another process holds the lock, it tries again, for the given time at most.
func (w *world) lockWithin(most time.Duration) error {
	for end := time.Now().Add(most); ; time.Sleep(time.Millisecond) {
		if err := w.lock(); !errors.Is(err, unix.EAGAIN) || time.Now().After(end) {
			return err
		}
	}
}

// locked reports whether a process holds its lock.
func (w *world) locked(process int) bool {
	locked, err := isLocked(w.life, w.processes[process].ranks[0])
	return err != nil || locked
}

// isLocked reports whether another open file holds the lock of a process, by its first rank, on f.
func isLocked(f *os.File, rank int) (bool, error) {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(rank), Len: 1}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l)
	return err == nil && l.Type != unix.F_UNLCK, err
}

// readConn waits for the end of the connection with a process, and handles it.
func (w *world) readConn(process int) {
	var b [1]byte
	_, err := w.processes[process].conn.Read(b[:]) // nothing is sent after the set-up
	for err == nil {
		_, err = w.processes[process].conn.Read(b[:])
	}
	if errors.Is(err, net.ErrClosed) || w.closing() {
		return // closed by this process
	}
	lost := w.end(process)
	if w.me != 0 {
		close(w.leaderless)
	} else if lost {
		w.notify()
	}
}

// notify makes all other processes look at the states of the ranks.
func (w *world) notify() {
	w.root.head.news.Add(1)
	for other := range w.processes {
		w.ring(other)
	}
}

// The intervals at which a process that did not listen watches others: while the one that listened has not left, and
// afterwards.
const (
	watchSlowly = time.Second
	watchEvery  = 50 * time.Millisecond
)

// watch polls the locks of other processes, and notifies all of the end of one. Of the processes that are not known to
// have ended it polls those that follow this one at distances of 1, 2, 4 and so on. So each is watched by several, in a
// large group not by all, and the end of one is noticed as long as one of its watchers is not stopped.
func (w *world) watch() {
	tick := time.NewTicker(watchSlowly)
	defer tick.Stop()
	leaderless := w.leaderless
	for {
		select {
		case <-w.over:
			return
		case <-leaderless:
			leaderless = nil
			tick.Reset(watchEvery)
			continue
		case <-tick.C:
		}
		lost := false
		for more := true; more; {
			more = w.watchOnce(&lost)
		}
		if lost {
			w.notify()
		}
	}
}

// watchOnce polls the locks once, and reports whether it found an end. It sets lost if ranks were lost by that.
func (w *world) watchOnce(lost *bool) (found bool) {
	others := make([]int, 0, len(w.processes))
	for i := 1; i < len(w.processes); i++ {
		if p := (w.me + i) % len(w.processes); w.processes[p].dead.Load() == nil {
			others = append(others, p)
		}
	}
	for at := 1; at <= len(others); at *= 2 {
		if p := others[at-1]; !w.locked(p) {
			found = true
			*lost = w.end(p) || *lost
		}
	}
	return found
}

// closing reports whether this process closes the group.
func (w *world) closing() bool {
	select {
	case <-w.over:
		return true
	default:
		return false
	}
}

// end handles that a process has ended, or has closed all its ends. It reports whether the process had open ends.
func (w *world) end(process int) (lost bool) {
	p := &w.processes[process]
	w.mu.Lock()
	defer w.mu.Unlock()
	down := errClosed
	for _, r := range p.ranks {
		if b := w.root.block(r); b.state.Load()&stateClosed == 0 {
			b.state.Or(stateEnded)
			down, lost = p.ended(), true
		}
	}
	p.dead.Store(&down)
	for _, g := range w.groups {
		g.reportLocked()
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil {
				e.token()
			}
		}
	}
	return lost
}

// ended returns the error of a process that has ended before it closed its ends.
func (p *process) ended() error { return fmt.Errorf("process %d has ended", p.pid) }

// lost returns why the process of a rank of the world is lost, or nil.
func (w *world) lost(rank int) error {
	p := &w.processes[w.processOf[rank]]
	if err := p.dead.Load(); err != nil {
		return *err
	}
	if w.root.block(rank).state.Load()&stateEnded != 0 {
		return p.ended()
	}
	return nil
}
