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
// When the listening process itself leaves, its connections end, and each other process watches the rest by itself: it
// polls the locks that all processes hold on the control file, by their numbers, as long as they live.

// newBell creates the bell of this process.
func (w *world) newBell() error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("shm: creating an eventfd: %w", err)
	}
	w.bell, w.bellFD = os.NewFile(uintptr(fd), "bell"), fd
	return nil
}

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
	if fd := w.processes[process].bell; fd > 0 && !w.silent {
		unix.Write(fd, one) // if the counter is full, its reader will wake up anyway
	}
}

// listenBell checks the local ranks whenever another process rings, until the bell is closed.
func (w *world) listenBell() {
	var count [8]byte
	for {
		if _, err := w.bell.Read(count[:]); err != nil {
			return
		}
		w.look()
		w.answer()
	}
}

// closeBells closes the descriptors of all bells.
func (w *world) closeBells() {
	w.bells.Lock()
	defer w.bells.Unlock()
	w.silent = true
	for i := range w.processes {
		if p := &w.processes[i]; p.bell > 0 {
			unix.Close(p.bell)
			p.bell = 0
		}
	}
	if w.bell != nil {
		w.bell.Close()
	}
}

// lock holds a lock on the control file, which others can see, until this process ends or the file is closed. Another
// open file has the lock, since all processes share the one that they received.
func (w *world) lock() (err error) {
	w.life, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", w.control.Fd()), os.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(w.me), Len: 1}
		err = unix.FcntlFlock(w.life.Fd(), unix.F_OFD_SETLK, &l)
	}
	if err != nil {
		return fmt.Errorf("shm: locking the control file: %w", err)
	}
	return nil
}

// locked reports whether a process holds its lock.
func (w *world) locked(process int) bool {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(process), Len: 1}
	err := unix.FcntlFlock(w.life.Fd(), unix.F_OFD_GETLK, &l)
	return err != nil || l.Type != unix.F_UNLCK
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
	w.end(process)
	if w.me == 0 {
		w.root.head.news.Add(1)
		for other := range w.processes {
			w.ring(other)
		}
		return
	}
	w.readers.Go(w.watch)
}

// watchEvery is the interval at which the processes watch each other when the process that listened has left. A process
// whose ranks never opened has startTime to do so.
const (
	watchEvery = 50 * time.Millisecond
	startTime  = 10 * time.Second
)

// watch polls the locks of the other processes.
func (w *world) watch() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	since := time.Now()
	for {
		select {
		case <-w.over:
			return
		case <-tick.C:
		}
		for p := range w.processes {
			opened := w.root.block(w.processes[p].ranks[0]).state.Load() != 0
			if p == w.me || w.processes[p].dead.Load() != nil || !opened && time.Since(since) < startTime || w.locked(p) {
				continue
			}
			w.end(p)
		}
	}
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

// end handles that a process has ended, or has closed all its ends.
func (w *world) end(process int) {
	p := &w.processes[process]
	w.mu.Lock()
	defer w.mu.Unlock()
	down := errClosed
	for _, r := range p.ranks {
		if b := w.root.block(r); b.state.Load()&stateClosed == 0 {
			b.state.Or(stateEnded)
			down = p.ended()
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
