package affinity

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Room knows whether the processes of a launcher on this host have a CPU for each of their ranks. It notices when a
// control group, or somebody by taskset, changes this process's CPUs or their time. It is safe for concurrent use.
type Room struct {
	ranks  int
	enough atomic.Bool
	due    atomic.Int64 // Unix nanoseconds: when it looks again

	mu    sync.Mutex
	cpus  []int // of this process, when it last looked
	limit []Limit
}

// Together returns how many CPUs this process and those that its launcher has started from the same executable may use
// together. The CPU time that a control group allows counts as so many CPUs, rounded down, and as at least one.
func Together() int { return max(together(ListMax), 1) }

// roomEvery is the interval at which a [Room] looks whether the CPUs have changed.
const roomEvery = time.Second

// NewRoom returns the room of so many ranks on this host.
func NewRoom(ranks int) *Room {
	r := &Room{ranks: ranks}
	r.look(time.Now(), Allowed(), Limits())
	return r
}

// Enough reports whether there is a CPU for each rank, now or up to a second before. It allocates nothing between two
// looks.
func (r *Room) Enough(now time.Time) bool {
	if due := r.due.Load(); now.UnixNano() >= due && r.due.CompareAndSwap(due, now.Add(roomEvery).UnixNano()) {
		r.look(now, Allowed(), Limits())
	}
	return r.enough.Load()
}

// look decides anew if this process's CPUs, or the limits of its control groups, have changed. The processes of a
// launcher are in the same control groups: they are looked at only then.
func (r *Room) look(now time.Time, cpus []int, limit []Limit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.due.Load() == 0
	if !first && slices.Equal(cpus, r.cpus) && slices.Equal(limit, r.limit) {
		return
	}
	r.cpus, r.limit = cpus, limit
	r.enough.Store(r.ranks <= together(r.ranks))
	if first {
		r.due.Store(now.Add(roomEvery).UnixNano())
	}
}
