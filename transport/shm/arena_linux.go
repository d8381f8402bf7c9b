package shm

import (
	"fmt"
	"math/bits"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/tensor"
)

// arena is the memory that a process shares: a file of which only used pages take memory. It stays mapped until the
// group is closed and its last buffer is released.
type arena struct {
	file *os.File
	base unsafe.Pointer
	size int

	mu     sync.Mutex
	mem    []byte   // nil after unmapping
	free   []extent // by offset; no two are adjacent
	live   map[int]*buffer
	closed bool
}

// extent is a range of an arena.
type extent struct{ lo, hi int }

// buffer is the owner of allocated memory.
type buffer struct {
	arena   *arena
	extent  extent
	refs    atomic.Int64
	retired bool // guarded by the arena's mu
}

var _ tensor.Owner = (*buffer)(nil)

// arenaBytes returns the default size of an arena in a group of so many processes: the memory size of the host, if all
// arenas fit into an address space.
func arenaBytes(processes int) (int64, error) {
	if bits.UintSize == 32 {
		return int64(max(256<<20/processes/page*page, 8<<20)), nil
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("shm: determining the size of the memory: %w", err)
	}
	memory := uint64(info.Totalram) * uint64(info.Unit)
	return int64(min(max(memory, 1<<30), 1<<45/uint64(processes)) / hugePage * hugePage), nil
}

// hugePage is the size of huge pages, and the alignment of buffers of at least that size.
const hugePage = 2 << 20

func newArena(bytes int64) (*arena, error) {
	f, err := newFile("lockstep-arena", bytes)
	if err != nil {
		return nil, err
	}
	return arenaOf(f, bytes)
}

// arenaOf creates an arena from a file of that length. The arena closes the file.
func arenaOf(f *os.File, bytes int64) (*arena, error) {
	mem, err := mapAligned(f, int(bytes))
	if err != nil {
		f.Close()
		return nil, err
	}
	return &arena{
		file: f, base: unsafe.Pointer(&mem[0]), size: len(mem), mem: mem, free: []extent{{0, len(mem)}},
		live: map[int]*buffer{},
	}, nil
}

// allocate returns zeroed memory, backed by the system: if the system has too little, allocate returns an error,
// instead of SIGBUS at a later write. Large memory uses huge pages, if the system provides them.
func (a *arena) allocate(bytes int) (tensor.Memory, error) {
	m, err := a.take(bytes)
	if err != nil || bytes == 0 {
		return m, err
	}
	b := m.Owner.(*buffer)
	err = enough(bytes)
	if err == nil {
		if bytes >= hugePage {
			// Without huge pages the memory is only slower.
			_ = unix.Madvise(a.bytes(b.extent, hugePage), unix.MADV_HUGEPAGE)
		}
		err = back(a.file, int64(b.extent.lo), a.bytes(b.extent, page))
	}
	if err != nil {
		b.Release()
		return tensor.Memory{}, fmt.Errorf("shm: a buffer of %d bytes of shared memory: %w", bytes, err)
	}
	if bytes >= hugePage {
		collapse(a.bytes(b.extent, hugePage))
	}
	return m, nil
}

// bytes returns the memory of an extent, rounded down to pages of that size.
func (a *arena) bytes(e extent, pageBytes int) []byte {
	return a.mem[e.lo : e.lo+(e.hi-e.lo)/pageBytes*pageBytes]
}

// madvCollapse is MADV_COLLAPSE, of Linux 6.1.
const madvCollapse = 25

// collapse moves memory into huge pages: one address translation replaces 512, and hardware prefetching continues
// across small pages. Most systems do not use huge pages when shared memory is first touched, but collapse it on
// request. Without them the memory is only slower.
func collapse(b []byte) { _ = unix.Madvise(b, madvCollapse) }

// take finds memory in the first hole that is long enough.
func (a *arena) take(bytes int) (tensor.Memory, error) {
	if bytes < 0 {
		return tensor.Memory{}, fmt.Errorf("shm: a buffer of %d bytes", bytes)
	}
	if bytes == 0 {
		return tensor.Memory{Kind: tensor.Shared}, nil
	}
	align := page
	if bytes >= hugePage {
		align = hugePage
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return tensor.Memory{}, errClosed
	}
	if bytes <= len(a.mem) {
		for i, hole := range a.free {
			lo, length := up(hole.lo, align), up(bytes, page)
			if lo > hole.hi-length {
				continue
			}
			b := &buffer{arena: a, extent: extent{lo, lo + length}}
			b.refs.Store(1)
			a.live[lo] = b
			a.free = slices.Replace(a.free, i, i+1, rest(hole, b.extent)...)
			return tensor.Memory{Ptr: unsafe.Pointer(&a.mem[lo]), Bytes: bytes, Kind: tensor.Shared, Owner: b}, nil
		}
	}
	return tensor.Memory{}, fmt.Errorf("shm: no %d bytes in a row are left of the %d that this process shares "+
		"(Config.ArenaBytes)", bytes, len(a.mem))
}

// rest returns what is left of a hole when a part of it is taken.
func rest(hole, taken extent) []extent {
	out := make([]extent, 0, 2)
	if hole.lo < taken.lo {
		out = append(out, extent{hole.lo, taken.lo})
	}
	if taken.hi < hole.hi {
		out = append(out, extent{taken.hi, hole.hi})
	}
	return out
}

func (b *buffer) Retain() { b.refs.Add(1) }

func (b *buffer) Release() {
	switch n := b.refs.Add(-1); {
	case n == 0:
		b.arena.release(b)
	case n < 0:
		panic("shm: a buffer was released more often than retained")
	}
}

// release returns the pages of a buffer to the system, then makes its range available: new buffers there read as zeros.
func (a *arena) release(b *buffer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.live, b.extent.lo)
	if !b.retired && !a.closed {
		if unix.Fallocate(int(a.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(b.extent.lo),
			int64(b.extent.hi-b.extent.lo)) != nil {
			clear(a.mem[b.extent.lo:b.extent.hi])
		}
		a.insert(b.extent)
	}
	a.unmapLocked()
}

// insert adds a hole, joined with those that it touches.
func (a *arena) insert(e extent) {
	i, _ := slices.BinarySearchFunc(a.free, e.lo, func(h extent, lo int) int { return h.lo - lo })
	j := i
	if i > 0 && a.free[i-1].hi == e.lo {
		i--
		e.lo = a.free[i].lo
	}
	if j < len(a.free) && a.free[j].lo == e.hi {
		e.hi = a.free[j].hi
		j++
	}
	a.free = slices.Replace(a.free, i, j, e)
}

// retire prevents the reuse of the buffers that m overlaps.
func (a *arena) retire(m tensor.Memory) {
	lo, ok := a.offset(m)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, b := range a.live {
		if b.extent.lo < lo+m.Bytes && lo < b.extent.hi {
			b.retired = true
		}
	}
}

// offset returns the offset of m in the arena, and whether m is in it.
func (a *arena) offset(m tensor.Memory) (int, bool) {
	at := uintptr(m.Ptr) - uintptr(a.base)
	ok := m.Bytes > 0 && at < uintptr(a.size) && m.Bytes <= a.size-int(at)
	return int(at), ok
}

// close ends allocation. Buffers in use stay valid.
func (a *arena) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	a.file.Close()
	a.unmapLocked()
}

func (a *arena) unmapLocked() {
	if a.closed && len(a.live) == 0 && a.mem != nil {
		unmapAligned(a.mem)
		a.mem = nil
	}
}
