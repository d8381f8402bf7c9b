package affinity

import (
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Read returns the CPUs that the calling thread may use.
func Read() CPUs { return read(os.DirFS("/"), Allowed()) }

// Allowed returns the CPUs that the calling thread may use, in increasing order; nil: unknown.
func Allowed() []int { return allowed(0) }

// allowed returns the CPUs of a process.
func allowed(pid int) (out []int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(pid, &set) != nil {
		return nil
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			out = append(out, cpu)
		}
	}
	return out
}

// Together returns how many CPUs this process and the others that its parent has started may use together. A process
// that was bound to a part of its parent's CPUs, by a launcher, counts those of the parent.
func Together() int { return max(len(allowed(0)), len(allowed(os.Getppid())), 1) }

// Run calls f with the calling thread bound to these CPUs: a process that f starts stays on them. Without CPUs, or if
// the system refuses, f runs as it is.
func Run(cpus []int, f func()) {
	var before, set unix.CPUSet
	if len(cpus) == 0 || unix.SchedGetaffinity(0, &before) != nil {
		f()
		return
	}
	for _, c := range cpus {
		set.Set(c)
	}
	runtime.LockOSThread()
	if unix.SchedSetaffinity(0, &set) != nil {
		runtime.UnlockOSThread()
		f()
		return
	}
	defer func() {
		if unix.SchedSetaffinity(0, &before) == nil {
			runtime.UnlockOSThread() // else the thread ends with its goroutine, or serves it alone
		}
	}()
	f()
}

// Current returns the CPU on which the calling thread runs; -1: unknown.
func Current() int {
	var cpu uint32
	if _, _, err := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); err != 0 {
		return -1
	}
	return int(cpu)
}

// Mover moves a thread that should not share a CPU. The zero value is ready. One goroutine at a time may use it.
type Mover struct{ moved time.Time }

// movePause is the least time between two moves: a move takes about 10 microseconds.
const movePause = 4 * time.Millisecond

// Leave moves the calling thread to another CPU than this one, unless it has no other or has moved shortly before. The
// thread may return to the CPU later.
func (m *Mover) Leave(cpu int) {
	if time.Since(m.moved) < movePause {
		return
	}
	m.moved = time.Now()
	var before, others unix.CPUSet
	runtime.LockOSThread()
	if unix.SchedGetaffinity(0, &before) == nil {
		others = before
		others.Clear(cpu)
		if others.Count() > 0 && unix.SchedSetaffinity(0, &others) == nil && unix.SchedSetaffinity(0, &before) != nil {
			return // the thread stays this goroutine's, and bound
		}
	}
	runtime.UnlockOSThread()
}
