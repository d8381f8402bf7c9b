package shm

import (
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/transport"
)

// The control file holds a table of the split groups, then one region per group, first that of all ranks. A new file
// reads as zeros. Zero is the initial state of every part, so no initialisation is needed.
//
// A region holds its head, a block per rank, the pipes by sender and receiver, and the staging buffers by rank.

// splitsMax bounds the groups that can be split from a group. Regions are not reused, so a process that was stopped in
// one and continues cannot write into memory that others use.
const splitsMax = 1 << 16

// tableBytes is the size of the table of split groups: an entry is the group's id + 1.
const tableBytes = 8 * splitsMax

// stagingBytes is the size of a rank's staging buffer.
const stagingBytes = 4 << 20 >> (bits.UintSize % 64 / 32 * 3) // 512 KiB with 32 bits

// head is the beginning of a region. See flags_linux.go for the words that decide whether a call starts.
type head struct {
	stop    atomic.Uint32 // calls that have not started never start
	news    atomic.Uint32 // number of changes of any rank's state
	contest [2]atomic.Uint64
	verdict [2]atomic.Uint64
	list    atomic.Uint64 // hash of the list of the group's ranks
	left    atomic.Uint32 // number of ranks that have closed
	asked   atomic.Uint32 // number of queries
	_       [64 - 56]byte

	parkers atomic.Uint32 // number of ranks that are parked or about to park; too high if a rank was killed meanwhile
	_       [60]byte
}

// block is the part of the region that a rank writes for the others.
type block struct {
	slots [2]slot // of the even and the odd calls

	parked atomic.Uint32 // how the rank is parked, or parkedNot
	_      [4]byte
	target atomic.Uint64 // the rank waits for this progress …
	whose  atomic.Int32  // … of this rank, or -1: of all; whoseFrames: for a change of a pipe
	slot   atomic.Uint32 // … in its slot of this index
	_      [64 - 24]byte

	state     atomic.Uint32 // stateOpen and so on
	reasonLen atomic.Uint32
	_         [64 - 8]byte
	reason    [reasonBytes]byte

	cpus   cpuSet // that the rank may use, if known
	limits limitSet

	query query
}

// The bits of a rank's state.
const (
	stateOpen = 1 << iota
	stateFailed
	stateClosed
	stateEnded // in the group of all ranks: its process has ended before it closed its end
)

const reasonBytes = transport.ReasonMax

// pipe carries frames from one rank to another; see frames_linux.go.
type pipe struct {
	state atomic.Uint64
	header
	length uint64        // of the frame
	sent   atomic.Uint64 // number of bytes of the frame written to the ring
	_      [64 - 16]byte
	got    atomic.Uint64 // number of bytes read from the ring
	_      [64 - 8]byte
}

// layout holds the offsets of the parts of a region.
type layout struct {
	ranks            int
	ring             int // bytes of a pipe's ring
	blocks, pipes    int
	staging, bytes   int
	blockStep, piped int // distances between consecutive ones
}

const page = 4096

// pageMax is the largest page of a system for which Lockstep is built (arm64): the regions of groups, which are mapped
// one by one, begin at multiples of it.
const pageMax = 64 << 10

func up(n, to int) int { return (n + to - 1) / to * to }

// ringMax and ringMin bound the ring of a pipe; ringsMax the rings of a region.
const (
	ringMax  = 256 << 10 >> (bits.UintSize % 64 / 32 * 2)
	ringMin  = 16 << 10
	ringsMax = 1 << 30 >> (bits.UintSize % 64 / 32 * 5)
)

func layoutOf(ranks int) layout {
	l := layout{ranks: ranks, ring: ringMax}
	for l.ring > ringMin && ranks*ranks*l.ring > ringsMax {
		l.ring /= 2
	}
	l.blockStep = up(int(unsafe.Sizeof(block{})), page)
	l.piped = up(int(unsafe.Sizeof(pipe{})), 64) + l.ring
	l.blocks = page
	l.pipes = l.blocks + ranks*l.blockStep
	l.staging = up(l.pipes+ranks*ranks*l.piped, page)
	l.bytes = up(l.staging+ranks*stagingBytes, pageMax)
	return l
}

// region is the mapped part of the control file of a group.
type region struct {
	layout
	mem  []byte
	head *head
}

func mapRegion(control *os.File, offset int64, l layout) (region, error) {
	mem, err := mapFile(control, offset, l.bytes)
	if err != nil {
		return region{}, err
	}
	return region{layout: l, mem: mem, head: (*head)(unsafe.Pointer(&mem[0]))}, nil
}

func (r *region) block(rank int) *block {
	return (*block)(unsafe.Pointer(&r.mem[r.blocks+rank*r.blockStep]))
}

func (r *region) pipe(from, to int) (*pipe, []byte) {
	at := r.pipes + (from*r.ranks+to)*r.piped
	ring := at + r.piped - r.ring
	return (*pipe)(unsafe.Pointer(&r.mem[at])), r.mem[ring : ring+r.ring : ring+r.ring]
}

func (r *region) stagingBuffer(rank int) []byte {
	at := r.staging + rank*stagingBytes
	return r.mem[at : at+stagingBytes : at+stagingBytes]
}

// newFile creates a sealed file of the given size, which reads as zeros and takes no memory until it is written.
func newFile(name string, bytes int64) (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	var limit unix.Rlimit // exceeding it would raise a signal
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err == nil && uint64(bytes) > limit.Cur {
		return nil, fmt.Errorf("shm: shared memory needs a sparse file of %d bytes, files are limited to %d (ulimit -f)",
			bytes, limit.Cur)
	}
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("shm: making shared memory (memfd_create): %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(bytes); err != nil {
		f.Close()
		return nil, fmt.Errorf("shm: making shared memory of %d bytes: %w", bytes, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		f.Close()
		return nil, fmt.Errorf("shm: sealing shared memory: %w", err)
	}
	return f, nil
}

// seals fix the length of the file: a process that accesses removed memory is killed.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// checkFile returns the length of a file of another process, after verifying that it cannot shrink.
func checkFile(f *os.File) (int64, error) {
	has, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || has&unix.F_SEAL_SHRINK == 0 {
		return 0, fmt.Errorf("shm: the other process sent a file that is not sealed shared memory (seals %#x, %v)", has, err)
	}
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("shm: shared memory of the other process: %w", err)
	}
	return info.Size(), nil
}

func mapFile(f *os.File, offset int64, bytes int) ([]byte, error) {
	mem, err := unix.Mmap(int(f.Fd()), offset, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("shm: mapping %d bytes of shared memory "+
			"(is there a limit on the address space, ulimit -v?): %w", bytes, err)
	}
	return mem, nil
}

// mapAligned maps a whole file at an address aligned to huge pages, as offsets in the file are. It reserves a longer
// address range and releases the rest. unmapAligned unmaps it.
func mapAligned(f *os.File, bytes int) ([]byte, error) {
	fail := func(err error) ([]byte, error) {
		return nil, fmt.Errorf("shm: mapping %d bytes of shared memory "+
			"(is there a limit on the address space, ulimit -v?): %w", bytes, err)
	}
	long := uintptr(up(bytes, page)) + hugePage
	start, err := unix.MmapPtr(-1, 0, nil, long, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return fail(err)
	}
	before := -uintptr(start) & (hugePage - 1)
	at := unsafe.Add(start, before)
	if _, err := unix.MmapPtr(int(f.Fd()), 0, at, uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_NORESERVE|unix.MAP_FIXED); err != nil {
		unix.MunmapPtr(start, long)
		return fail(err)
	}
	if before > 0 {
		unix.MunmapPtr(start, before)
	}
	end := uintptr(up(bytes, page))
	unix.MunmapPtr(unsafe.Add(at, end), long-before-end)
	return unsafe.Slice((*byte)(at), bytes), nil
}

func unmapAligned(mem []byte) { unix.MunmapPtr(unsafe.Pointer(&mem[0]), uintptr(len(mem))) }
