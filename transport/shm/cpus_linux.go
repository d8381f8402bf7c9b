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
	pollsLong  = 800 // in its place, unless the last wait has ended as the rank yielded its processor
)

// limitSet is the control groups that limit the CPU time of a rank, in shared memory. Limits beyond its length are
// ignored: groups are seldom nested so deep.
type limitSet [8]atomic.Uint64

// store makes s the groups of these limits.
func (s *limitSet) store(limits []affinity.Limit) {
	for i := range s {
		group := uint64(0)
		if i < len(limits) {
			group = groupOf(limits[i])
		}
		if s[i].Load() != group {
			s[i].Store(group)
		}
	}
}

// groupOf returns the group of a limit as it is in a [limitSet], where 0 is none.
func groupOf(l affinity.Limit) uint64 { return max(l.Group, 1) }

// has reports whether a control group is in the set.
func (s *limitSet) has(group uint64) bool {
	for i := range s {
		if s[i].Load() == group {
			return true
		}
	}
	return false
}

// lacksTime reports whether one of a rank's control groups has less CPU time than ranks, of these. Then they block:
// what they poll would be missing for the ranks that they wait for.
func lacksTime(limits []affinity.Limit, sets []*limitSet) bool {
	for _, l := range limits {
		ranks := 0
		for _, s := range sets {
			if s.has(groupOf(l)) {
				ranks++
			}
		}
		if l.CPUs < ranks {
			return true
		}
	}
	return false
}

// pollsWith returns how a rank waits that knows the CPUs of all, its own being sets[rank]. It polls long if there are
// as many CPUs as ranks, and its own CPUs are as many as the ranks that can run nowhere else; ranks with unknown CPUs
// count among these.
func pollsWith(sets []*cpuSet, rank int) int {
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

// countEvery is the least interval at which a rank that waits checks which CPUs the ranks have, and how much of their
// time: a control group, or somebody by taskset, can change both.
const countEvery = time.Second

// countCPUs determines how this rank waits, when all ranks have joined and then now and then.
func (e *endpoint) countCPUs(now time.Time) {
	if e.g.polls == pollsNot {
		return
	}
	limits := affinity.Limits()
	if !e.counted.IsZero() {
		e.mine.cpus.store(affinity.Allowed())
		e.mine.limits.store(limits)
	}
	e.counted = now
	cpus, groups := make([]*cpuSet, len(e.blocks)), make([]*limitSet, len(e.blocks))
	for r, b := range e.blocks {
		cpus[r], groups[r] = &b.cpus, &b.limits
	}
	if lacksTime(limits, groups) {
		e.polls = pollsNot
	} else {
		e.polls = pollsWith(cpus, e.rank)
	}
}

// countNow calls countCPUs if that was not done for a while.
func (e *endpoint) countNow(now time.Time) {
	if now.Sub(e.counted) > countEvery {
		e.countCPUs(now)
	}
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
