package shm

import (
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/internal/memlimit"
)

// A page of a shared file gets memory when it is first touched. If none is available then, the process is killed by
// SIGBUS. So memory is requested at points that can return an error.

// checkedBytes is the minimum size of a request that is compared with the available memory. The check takes about 50
// µs.
const checkedBytes = 4 << 20

// enough returns an error if the system certainly cannot provide so many bytes. The check must precede the request: a
// memory control group, and a host without swap, do not refuse memory but kill a process.
func enough(bytes int) error {
	if bytes < checkedBytes {
		return nil
	}
	if left, ok := memlimit.Available(); ok && int64(bytes) > left {
		return fmt.Errorf("only %d bytes of memory are left here "+
			"(of the host, or of the limit of this container or memory control group): %w; "+
			"take smaller buffers or fewer processes, or raise the limit", left, unix.ENOMEM)
	}
	return nil
}

// backedAtOnce is how much memory one system call requests: a signal aborts the whole call.
const backedAtOnce = 16 << 20

// How often, and after what pause, a call that reports a busy system is repeated, before another call is used.
const (
	busyTries = 50
	busyPause = time.Millisecond
)

var madvise = unix.Madvise // replaced in tests

// back makes the system provide the memory of b, which is mapped from file at offset; both are multiples of a page. New
// memory is zero.
func back(file *os.File, offset int64, b []byte) error {
	busy := 0
	for again := true; again; {
		switch err := madvise(b, unix.MADV_POPULATE_WRITE); err {
		case nil:
			return nil
		case unix.EINTR:
		case unix.EAGAIN:
			busy++
			again = busy < busyTries
			time.Sleep(busyPause)
		default:
			again = false // before Linux 5.14 (EINVAL), or not all is available: the next call reports why
		}
	}
	for len(b) > 0 {
		n := min(len(b), backedAtOnce)
		switch err := unix.Fallocate(int(file.Fd()), 0, offset, int64(n)); err {
		case nil:
			b, offset = b[n:], offset+int64(n)
		case unix.EINTR:
		default:
			return fmt.Errorf("the system has no memory for it "+
				"(a memory control group, the limit of vm.overcommit_memory=2, or the host): %w; "+
				"take smaller buffers or fewer processes, or raise the limit", err)
		}
	}
	return nil
}

// provide is [back] for a part of the group's region.
func (g *group) provide(lo, hi int) error {
	lo, hi = lo/page*page, min(up(hi, page), len(g.mem))
	if err := back(g.world.control, g.offset+int64(lo), g.mem[lo:hi]); err != nil {
		return fmt.Errorf("shm: %d bytes of shared memory between the ranks: %w", hi-lo, err)
	}
	return nil
}

// How much of a pipe is backed by memory, as known by this rank.
const (
	pipeNone  = iota
	pipeFront // the part before the ring
	pipeWhole
)

// providePipe makes the system provide memory for the given part of a pipe, whose end is p.
func (e *endpoint) providePipe(p *pipeEnd, from, to, part int) error {
	if p.provided >= part {
		return nil
	}
	lo := e.g.pipes + (from*e.g.ranks+to)*e.g.piped
	hi := lo + e.g.piped
	if part == pipeFront {
		hi -= e.g.ring
	}
	if err := e.g.provide(lo, hi); err != nil {
		return err
	}
	p.provided = part
	return nil
}

// StagingBuffer returns the staging buffer of a rank. If the system has no memory for it, or the endpoint is closed,
// the rank's next Signal and Await return the error, and the result is ordinary memory that no rank reads.
func (e *endpoint) StagingBuffer(rank int) []byte {
	if e.late {
		return make([]byte, stagingBytes)
	}
	if !e.staged[rank] {
		at := e.g.staging + rank*stagingBytes
		if err := e.g.provide(at, at+stagingBytes); err != nil {
			e.unstaged = err
			return make([]byte, stagingBytes)
		}
		e.staged[rank] = true
	}
	return e.g.stagingBuffer(rank)
}

// Inline returns the memory beside a rank's slot, or like StagingBuffer ordinary memory if the endpoint is closed: no
// slot is this call's then.
func (e *endpoint) Inline(rank int) []byte {
	if e.late {
		return make([]byte, inlineBytes)
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&e.blocks[rank].slots[e.calls&1].data)), inlineBytes)
}
