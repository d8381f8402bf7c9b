package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Open joins the group and returns the ends of this process's ranks, in their order. It returns when all processes of the
// group are there, or with an error when ctx ends or this process is refused: then the error says which value differs, and
// what both sides have. Each endpoint has to be closed.
func Open(ctx context.Context, cfg Config) ([]transport.Endpoint, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	cfg.Ranks = slices.Clone(cfg.Ranks)
	if HostID() == "" {
		return openFrames(ctx, cfg)
	}
	w, err := meet(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return w.start()
}

// world is this process's part of a group that was opened, with all that were split off.
type world struct {
	cfg       Config
	me        int // number of this process
	processes []process
	processOf []int // by rank
	control   *os.File
	arena     *arena
	porch     *porch // of the process that listens, else nil
	root      *group
	table     []byte // of the groups that were split off

	mu      sync.Mutex
	groups  []*group // that have local ranks which are not closed
	open    int      // endpoints that are not closed
	readers sync.WaitGroup
}

// process is a process of the group.
type process struct {
	pid   int
	ranks []int
	mem   []byte        // its arena
	conn  *net.UnixConn // to it; nil: this process

	raw  syscall.RawConn
	bell func(fd uintptr) bool
	dead atomic.Pointer[error]
}

// start makes the ends once everything is there.
func (w *world) start() ([]transport.Endpoint, error) {
	fail := func(err error) ([]transport.Endpoint, error) {
		w.close()
		return nil, err
	}
	var err error
	if w.table, err = mapFile(w.control, 0, tableBytes); err != nil {
		return fail(err)
	}
	if err := back(w.control, 0, w.table); err != nil {
		return fail(fmt.Errorf("shm: the table of groups: %w", err))
	}
	all := make([]int, w.cfg.Size)
	for r := range all {
		all[r] = r
	}
	if w.root, err = newGroup(w, tableBytes, all); err != nil {
		return fail(err)
	}
	w.groups = []*group{w.root}
	var out []transport.Endpoint
	for _, r := range w.cfg.Ranks {
		w.root.block(r).state.Or(stateOpen)
		out = append(out, w.root.join(r))
		w.root.open++
		w.open++
	}
	for i := range w.processes {
		p := &w.processes[i]
		if p.conn == nil {
			continue
		}
		if p.raw, err = p.conn.SyscallConn(); err != nil {
			return fail(err)
		}
		p.bell = func(fd uintptr) bool {
			unix.Write(int(fd), bell[:]) // if it is full, its reader has something to read anyway
			return true
		}
		w.readers.Go(func() { w.read(p) })
	}
	return out, nil
}

// bell is what rings: any byte.
var bell [1]byte

// ring makes the process look at its ranks.
func (p *process) ring() {
	if p.raw != nil {
		p.raw.Write(p.bell)
	}
}

// lost returns why the process is lost, or nil.
func (p *process) lost() error {
	if err := p.dead.Load(); err != nil {
		return *err
	}
	return nil
}

// read looks at the local ranks whenever the process rings, until its end.
func (w *world) read(p *process) {
	var bells [256]byte
	for {
		n, err := p.conn.Read(bells[:])
		if n == 0 || err != nil {
			w.end(p, err)
			return
		}
		w.look()
		w.answer()
	}
}

// look wakes the local ranks that were rung, and tells them of peers that are lost.
func (w *world) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.groups {
		// One that has left the world's group will not come to those split from it, whose ranks nobody has woken for that.
		gone := g.first && g.home != w.root.head.news.Load()
		if gone || g.seen != g.head.news.Load() {
			g.tellLocked()
		}
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil && e.waiting.Load() && (gone || e.mine.parked.Load() == 0) {
				e.token()
			}
		}
	}
}

// end notes that the connection to a process has ended.
func (w *world) end(p *process, err error) {
	if errors.Is(err, net.ErrClosed) {
		return // by this process
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	down := errClosed
	for _, r := range p.ranks {
		if w.root.block(r).state.Load()&stateClosed == 0 {
			down = fmt.Errorf("process %d has ended", p.pid)
		}
	}
	p.dead.Store(&down)
	for _, g := range w.groups {
		g.tellLocked()
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil {
				e.token()
			}
		}
	}
}

// close gives back what the process has of the group.
func (w *world) close() {
	if w.porch != nil {
		w.porch.close()
	}
	for i := range w.processes {
		if p := &w.processes[i]; p.conn != nil {
			p.conn.Close()
		}
	}
	w.readers.Wait()
	if w.root != nil {
		w.root.unmap()
	}
	for i := range w.processes {
		if p := &w.processes[i]; i != w.me && p.mem != nil {
			unmapAligned(p.mem)
		}
	}
	if w.table != nil {
		unix.Munmap(w.table)
	}
	w.arena.close()
	w.control.Close()
}

// place says where memory of this process lies, if others can reach it.
func (w *world) place(m tensor.Memory) (place, bool) {
	at, ok := w.arena.offset(m)
	if !ok {
		return place{bytes: uint64(m.Bytes)}, false
	}
	return place{process: uint64(w.me) + 1, offset: uint64(at), bytes: uint64(m.Bytes)}, true
}

// memory returns the memory at a place, as far as it can be reached, or false if there cannot be such a place.
func (w *world) memory(at *place) (tensor.Memory, bool) {
	if at.process == 0 {
		m := tensor.Memory{Bytes: int(at.bytes)}
		return m, m.Bytes >= 0 && uint64(m.Bytes) == at.bytes
	}
	if at.process > uint64(len(w.processes)) {
		return tensor.Memory{}, false
	}
	mem := w.processes[at.process-1].mem
	if size := uint64(len(mem)); at.bytes == 0 || at.bytes > size || at.offset > size-at.bytes {
		return tensor.Memory{}, false
	}
	return tensor.Memory{Ptr: unsafe.Pointer(&mem[at.offset]), Bytes: int(at.bytes), Kind: tensor.Shared}, true
}

// split makes this rank's end of the group with the id.
func (w *world) split(e *endpoint, id uint64, ranks []int) (transport.Endpoint, error) {
	if id+1 == 0 {
		return nil, fmt.Errorf("shm: group %#x: the highest id is not for use", id)
	}
	worldly := make([]int, len(ranks))
	hash := uint64(14695981039346656037) // FNV-1a, over ranks
	for i, r := range ranks {
		worldly[i] = e.g.worldly[r]
		hash = (hash ^ uint64(worldly[i])) * 1099511628211
	}
	entry, err := w.entry(id)
	if err != nil {
		return nil, err
	}
	at := slices.Index(ranks, e.rank)
	taken := fmt.Errorf("shm: group %#x of ranks %v exists already, of other ranks or with rank %d in it", id, ranks, e.rank)
	w.mu.Lock()
	defer w.mu.Unlock()
	offset := tableBytes + int64(layoutOf(w.cfg.Size).bytes)*int64(1+entry)
	i := slices.IndexFunc(w.groups, func(g *group) bool { return g.offset == offset })
	var g *group
	if i >= 0 {
		g = w.groups[i]
		if !slices.Equal(g.worldly, worldly) {
			return nil, taken
		}
	} else if g, err = newGroup(w, offset, worldly); err != nil {
		return nil, err
	} else {
		g.first = e.g == w.root
	}
	if !g.head.list.CompareAndSwap(0, hash) && g.head.list.Load() != hash || g.block(at).state.Or(stateOpen) != 0 {
		if i < 0 {
			g.unmap()
		}
		return nil, taken
	}
	if i < 0 {
		w.groups = append(w.groups, g)
	}
	g.open++
	w.open++
	end := g.join(at)
	g.tellLocked()
	return end, nil
}

// entry returns the index of the group with the id in the table, entered now if it was not there.
func (w *world) entry(id uint64) (int, error) {
	key := id + 1
	for i := range splitsMax {
		at := int((key*0x9E3779B97F4A7C15>>32 + uint64(i)) % splitsMax)
		word := (*atomic.Uint64)(unsafe.Pointer(&w.table[8*at]))
		if word.CompareAndSwap(0, key) || word.Load() == key {
			return at, nil
		}
	}
	return 0, fmt.Errorf("shm: %d groups were split off already, which is all that is possible", splitsMax)
}
