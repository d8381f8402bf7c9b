package affinity

import (
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
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
	set := maskOf(pid)
	for cpu := range len(set) * bits.UintSize {
		if set.IsSet(cpu) {
			out = append(out, cpu)
		}
	}
	return out
}

// maskOf returns the CPUs of a process as a mask that is as long as the kernel's; nil: unknown.
func maskOf(pid int) unix.CPUSetDynamic {
	for cpus := 1024; cpus <= ListMax; cpus *= 2 {
		set := unix.NewCPUSet(cpus)
		switch err := unix.SchedGetaffinityDynamic(pid, set); err {
		case nil:
			return set
		case unix.EINVAL: // the kernel's is longer
		default:
			return nil
		}
	}
	return nil
}

// together returns how many CPUs this process and those that its parent has started from the same executable may use
// together: the processes of a launcher, each of which it may have bound to a part of its CPUs. The CPU time that a
// control group allows counts as so many CPUs. It looks at no more processes than it takes to find enough CPUs.
func together(enough int) int {
	most := ListMax
	if limit, ok := least(Limits()); ok {
		most = limit
	}
	set := map[int]bool{}
	add := func(pid int) (more bool) {
		for _, cpu := range allowed(pid) {
			set[cpu] = true
		}
		return len(set) < min(enough, most)
	}
	if add(0) {
		siblings(add)
	}
	return min(max(len(set), 1), most)
}

// siblings calls visit with the processes that the parent of this one has started from the same executable, until it
// returns false; or with the parent where the system does not list them: then a process that was started with fewer
// CPUs than its parent has counts as bound by a launcher.
func siblings(visit func(pid int) (more bool)) {
	parent := os.Getppid()
	own, err := os.Stat("/proc/self/exe")
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	if err != nil || len(lists) == 0 {
		visit(parent)
		return
	}
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for field := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				continue
			}
			if exe, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && os.SameFile(exe, own) && !visit(pid) {
				return
			}
		}
	}
}

// Limits returns the limits that the control groups of this process have on the CPU time of their processes.
func Limits() []Limit { return limits(os.DirFS("/"), fileID) }

// fileID identifies a file by its device and inode: a control group has the same in all containers.
func fileID(info fs.FileInfo) uint64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(s.Dev)<<32 ^ s.Ino
	}
	return 0
}

// Run calls f with the calling thread bound to these CPUs: a process that f starts stays on them. Without CPUs, or if
// the system refuses, f runs unbound.
func Run(cpus []int, f func()) {
	runtime.LockOSThread()
	before := maskOf(0)
	if len(cpus) == 0 || before == nil {
		runtime.UnlockOSThread()
		f()
		return
	}
	set := slices.Clone(before)
	set.Zero()
	for _, c := range cpus {
		set.Set(c)
	}
	if unix.SchedSetaffinityDynamic(0, set) != nil {
		runtime.UnlockOSThread()
		f()
		return
	}
	defer func() {
		if restore(before, set, slices.Clone(set), slices.Clone(set)) {
			runtime.UnlockOSThread() // else the thread ends with its goroutine, or serves it alone
		}
	}()
	f()
}

// restore gives the calling thread, which was bound to these CPUs, its CPUs of before back. If somebody else, such as
// taskset, has bound the thread meanwhile, it keeps those CPUs. If before is all that its control group (cpuset) has,
// the thread allows itself all CPUs instead: the kernel keeps a thread to what it has once requested, also when the
// group gets more CPUs later. now and all are masks of the same length, which it overwrites.
func restore(before, bound, now, all unix.CPUSetDynamic) bool {
	now.Zero() // the kernel writes only as many bytes as its masks have
	all.Fill()
	if unix.SchedGetaffinityDynamic(0, now) == nil && unix.SchedSetaffinityDynamic(0, all) == nil {
		all.Zero()
		if unix.SchedGetaffinityDynamic(0, all) == nil {
			if !isBound(now, bound, all) {
				before = now
			}
			if slices.Equal(before, all) {
				return true
			}
		}
	}
	return unix.SchedSetaffinityDynamic(0, before) == nil
}

// isBound reports whether now is those CPUs of bound that the control group has.
func isBound(now, bound, all unix.CPUSetDynamic) bool {
	for i := range now {
		if now[i] != bound[i]&all[i] {
			return false
		}
	}
	return true
}

// CanYield reports that Yield has an effect.
const CanYield = true

// Yield lets another thread that waits for this CPU run, if there is any.
func Yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// Mover moves a thread that should not share a CPU. The zero value is ready. One goroutine at a time may use it.
type Mover struct {
	moved                    time.Time
	pause                    time.Duration      // until the next move
	before, others, now, all unix.CPUSetDynamic // for reuse
}

// Between two moves is a pause, since a move takes 10 to 100 microseconds. The first one is short, in case the system
// has moved the thread back at once. It doubles with each move, and is short again after a time without any.
const (
	pauseFirst = 250 * time.Microsecond
	pauseMost  = 4 * time.Millisecond
	pauseReset = 100 * time.Millisecond
)

// Leave moves the calling thread from the CPU on which it runs to another one, if it may use one. It does nothing
// if it has moved shortly before. The thread may return to the CPU later.
func (m *Mover) Leave() {
	since := time.Since(m.moved)
	if since < m.pause {
		return
	}
	if m.pause = min(2*m.pause, pauseMost); since > pauseReset {
		m.pause = pauseFirst
	}
	m.moved = time.Now()
	runtime.LockOSThread()
	if m.leave() {
		runtime.UnlockOSThread() // else the thread stays this goroutine's, and bound
	}
}

// leave is [Mover.Leave] for a locked thread. It reports whether the thread may use its CPUs of before again.
func (m *Mover) leave() bool {
	if m.before == nil || unix.SchedGetaffinityDynamic(0, m.before) != nil {
		m.before = maskOf(0)
		n := len(m.before)
		three := make(unix.CPUSetDynamic, 3*n)
		m.others, m.now, m.all = three[:n:n], three[n:2*n:2*n], three[2*n:]
	}
	copy(m.others, m.before)
	if cpu := current(); cpu >= 0 {
		m.others.Clear(cpu)
	}
	if m.others.Count() == 0 || unix.SchedSetaffinityDynamic(0, m.others) != nil {
		return true
	}
	return restore(m.before, m.others, m.now, m.all)
}

// current returns the CPU on which the calling thread runs; -1: unknown.
func current() int {
	var cpu uint32
	if _, _, err := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); err != 0 {
		return -1
	}
	return int(cpu)
}
