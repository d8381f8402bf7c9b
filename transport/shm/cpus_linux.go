package shm

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
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

// pollsBatch is the number of polls for flags that take about half a microsecond.
const pollsBatch = 32

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

// roomOf returns the room of a rank that knows the CPUs of all, its own being sets[rank]. It has a CPU if there are
// as many CPUs as ranks, and its own CPUs are as many as the ranks that can run nowhere else; ranks with unknown
// CPUs count among these.
func roomOf(sets []*cpuSet, rank int) waiting.Room {
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
		return waiting.Own
	}
	return waiting.Shared
}

// countEvery is the least interval at which a rank that waits checks which CPUs the ranks have, and how much of their
// time: a control group, or somebody by taskset, can change both.
const countEvery = time.Second

// room returns the room of the ranks, which it determines anew if it has not for a while.
func (e *endpoint) room(now time.Time) waiting.Room {
	if now.Sub(e.counted) > countEvery {
		e.counted, e.counts = now, e.compare()
	}
	if e.g.crowded {
		return waiting.None
	}
	return e.counts
}

// compare publishes which CPUs this rank has, and how much of their time, and compares them with those of all ranks.
func (e *endpoint) compare() waiting.Room {
	limits := affinity.Limits()
	e.mine.cpus.store(affinity.Allowed())
	e.mine.limits.store(limits)
	cpus, groups := make([]*cpuSet, len(e.blocks)), make([]*limitSet, len(e.blocks))
	for r, b := range e.blocks {
		cpus[r], groups[r] = &b.cpus, &b.limits
	}
	if lacksTime(limits, groups) {
		return waiting.None
	}
	return roomOf(cpus, e.rank)
}
