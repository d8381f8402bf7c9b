package shm

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// cpuSet is a set of CPUs in shared memory. CPUs from cpusMax on are not in it.
type cpuSet [cpusMax / 64]atomic.Uint64

// cpusMax is the most CPUs that Linux can be built for without changes to its source, on amd64.
const cpusMax = 8192

// store makes s these CPUs. Other ranks may see a part of the change for a moment: they decide by it only how to wait.
func (s *cpuSet) store(cpus []int) {
	var words [len(s)]uint64
	for _, cpu := range cpus {
		if cpu < cpusMax {
			words[cpu/64] |= 1 << (cpu % 64)
		}
	}
	for i := range s {
		if s[i].Load() != words[i] {
			s[i].Store(words[i])
		}
	}
}

// The ways in which a rank waits; see spin.
const (
	pollsNot   = 0   // it blocks at once
	pollsEach  = 32  // checks before it yields its processor, each time
	pollsFirst = 200 // before the first time, if there is a processor for every rank
)

// pollsWith returns how a rank waits that knows the CPUs of all, its own being sets[rank], and how many CPUs' time the
// control groups allow (0: no limit). It polls long if there are as many CPUs as ranks, and its own CPUs are as many as
// the ranks that can run nowhere else; ranks with unknown CPUs count among these. With too little time it blocks, since
// what it polls would be missing for the ranks that it waits for.
func pollsWith(sets []*cpuSet, rank, quota int) int {
	if quota > 0 && quota < len(sets) {
		return pollsNot
	}
	all, own, here := 0, 0, 0
	mine := sets[rank]
	for i := range mine {
		var word uint64
		for _, s := range sets {
			word |= s[i].Load()
		}
		all += bits.OnesCount64(word)
		own += bits.OnesCount64(mine[i].Load())
	}
	for _, s := range sets {
		within := true
		for i := range s {
			within = within && s[i].Load()&^mine[i].Load() == 0
		}
		if within {
			here++
		}
	}
	if len(sets) <= all && here <= own {
		return pollsFirst
	}
	return pollsEach
}

// countEvery is the interval at which a rank that polls checks which CPUs the ranks have: a control group (cpuset), or
// somebody by taskset, can change them.
const countEvery = time.Second

// countCPUs determines how this rank waits, when all ranks have joined and then now and then.
func (e *endpoint) countCPUs(now time.Time) {
	if e.g.polls == pollsNot {
		return
	}
	if !e.counted.IsZero() {
		e.mine.cpus.store(affinity.Allowed())
	}
	e.counted = now
	sets := make([]*cpuSet, len(e.blocks))
	for r, b := range e.blocks {
		sets[r] = &b.cpus
	}
	e.polls = pollsWith(sets, e.rank, affinity.Quota())
}

// separate moves this rank's thread to a CPU on which no other rank waits, if it waits on the one on which another rank
// waits, too. The system does not do that by itself as long as both hand the CPU over to each other by yielding. Of two
// ranks the higher one moves.
func (e *endpoint) separate() {
	cpu := affinity.Current()
	e.mine.at.Store(uint32(cpu + 1))
	shared := false
	e.taken = e.taken[:0]
	for r, b := range e.blocks {
		if at := int(b.at.Load()) - 1; r != e.rank && at >= 0 {
			e.taken = append(e.taken, at)
			shared = shared || at == cpu && r < e.rank
		}
	}
	if shared {
		e.mover.Leave(cpu, e.taken)
	}
}
