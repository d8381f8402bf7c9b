package shm

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Open joins the group and returns the endpoints of this process's ranks, in increasing order. It waits until all
// processes have joined. It returns an error if ctx ends, or if this process is refused; the error then names the value
// that differs, on both sides, or if [HostID] is empty. The caller must close every endpoint.
func Open(ctx context.Context, cfg Config) ([]transport.Endpoint, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	cfg.Ranks = slices.Clone(cfg.Ranks)
	if HostID() == "" {
		return nil, errNoSharedMemory
	}
	w, err := join(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return w.start()
}

// world is this process's part of a group that Open created, with all groups split from it.
type world struct {
	cfg        Config
	me         int // number of this process
	processes  []process
	processOf  []int // by rank
	control    *os.File
	life       *os.File // the control file, opened again: has the lock of this process
	arena      *arena
	bell       *os.File // of this process; its Fd must not be called, which would make it block
	bellFD     int
	rendezvous *rendezvous // nil unless this process listens
	root       *group
	table      []byte        // of the split groups
	over       chan struct{} // closed by close
	leaderless chan struct{} // closed when the connection with the process that listened has ended

	bells  sync.RWMutex // read-locked while one is rung
	silent bool         // they are closed

	mu      sync.Mutex
	groups  []*group // with open local ranks
	open    int      // number of open endpoints
	readers sync.WaitGroup
}

// process is a process of the group.
type process struct {
	pid   int
	ranks []int
	mem   []byte        // its arena
	conn  *net.UnixConn // with the process that listened, or in that one; else nil
	bell  int           // descriptor of its bell, or noBell

	dead atomic.Pointer[error]
}

// start creates the endpoints after the set-up.
func (w *world) start() ([]transport.Endpoint, error) {
	fail := func(err error) ([]transport.Endpoint, error) {
		w.close()
		return nil, err
	}
	var err error
	if w.table, err = mapFile(w.control, 0, tableBytes); err != nil {
		return fail(err)
	}
	if err := w.lockWithin(helloTime); err != nil { // usually it has the lock already
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
	w.readers.Go(w.listenBell)
	for i := range w.processes {
		if w.processes[i].conn != nil {
			w.readers.Go(func() { w.readConn(i) })
		}
	}
	if w.me != 0 {
		w.readers.Go(w.watch)
	}
	return out, nil
}

// look wakes the local ranks whose parked flag was cleared, and reports lost peers to them.
func (w *world) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.groups {
		// A rank whose process has ended is marked in the world's group only. One that has closed its end there will not
		// join groups split from it, whose ranks are not woken for that.
		gone := g.home != w.root.head.news.Load()
		if gone || g.seen != g.head.news.Load() {
			g.reportLocked()
		}
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil && e.waiting.Load() && (gone || e.mine.parked.Load() == parkedNot) {
				e.token()
			}
		}
	}
}

// close releases the resources of this process.
func (w *world) close() {
	close(w.over)
	if w.rendezvous != nil {
		w.rendezvous.close()
	}
	for i := range w.processes {
		if p := &w.processes[i]; p.conn != nil {
			p.conn.Close()
		}
	}
	w.closeBells()
	w.readers.Wait()
	if w.bell != nil {
		w.bell.Close()
	}
	if w.life != nil {
		w.life.Close()
	}
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

// place returns the location of memory of this process; without a process if others cannot reach it.
func (w *world) place(m tensor.Memory) place {
	at, ok := w.arena.offset(m)
	if !ok {
		return place{bytes: uint64(m.Bytes)}
	}
	return place{process: uint64(w.me) + 1, offset: uint64(at), bytes: uint64(m.Bytes)}
}

// memory returns the memory at a place; its Ptr is nil if it cannot be reached. It returns false if the place is
// invalid.
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

// split creates this rank's endpoint of a split group.
func (w *world) split(e *endpoint, id uint64, ranks []int) (transport.Endpoint, error) {
	if id+1 == 0 {
		return nil, fmt.Errorf("shm: group id %#x is reserved", id)
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
	taken := fmt.Errorf("shm: group %#x of ranks %v exists already, with other ranks or with an end of rank %d", id,
		ranks, e.rank)
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
	g.reportLocked()
	return end, nil
}

// entry returns the index of a group in the table, and adds the group if it is missing.
func (w *world) entry(id uint64) (int, error) {
	key := id + 1
	for i := range splitsMax {
		at := int((key*0x9E3779B97F4A7C15>>32 + uint64(i)) % splitsMax)
		word := (*atomic.Uint64)(unsafe.Pointer(&w.table[8*at]))
		if word.CompareAndSwap(0, key) || word.Load() == key {
			return at, nil
		}
	}
	return 0, fmt.Errorf("shm: %d groups were split already, which is the maximum", splitsMax)
}
