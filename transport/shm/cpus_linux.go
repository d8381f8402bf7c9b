package shm

import (
	"math/bits"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// cpuSet is a set of CPUs in shared memory. CPUs from cpusMax on are not in it.
type cpuSet [cpusMax / 64]atomic.Uint64

const cpusMax = 1024

func (s *cpuSet) set(cpus []int) {
	for _, cpu := range cpus {
		if cpu < cpusMax {
			s[cpu/64].Or(1 << (cpu % 64))
		}
	}
}

// countCPUs determines, when all ranks have joined, whether this rank may spin: if there are as many CPUs as ranks, and
// its own CPUs are as many as the ranks that can run nowhere else. Ranks with unknown CPUs count among these.
func (e *endpoint) countCPUs() {
	if e.polls == 0 {
		return
	}
	all, own, here := 0, 0, 0
	for i := range e.mine.cpus {
		var word uint64
		for _, b := range e.blocks {
			word |= b.cpus[i].Load()
		}
		all += bits.OnesCount64(word)
		own += bits.OnesCount64(e.mine.cpus[i].Load())
	}
	for _, b := range e.blocks {
		within := true
		for i := range b.cpus {
			within = within && b.cpus[i].Load()&^e.mine.cpus[i].Load() == 0
		}
		if within {
			here++
		}
	}
	e.polls = pollsEach
	if e.g.ranks <= all && here <= own {
		e.polls = pollsFirst
	}
}

// separate moves this rank to another CPU if it waits on the one on which a rank of another process waits, too,
// although there are enough. The system does not do that by itself as long as both hand the CPU over to each other by
// yielding. Of two ranks the higher one moves.
func (e *endpoint) separate() {
	cpu := affinity.Current()
	e.mine.at.Store(uint32(cpu + 1))
	for r, b := range e.blocks[:e.rank] {
		if b.at.Load() == uint32(cpu+1) && e.g.process[r] != e.g.world.me {
			e.mover.Leave(cpu)
			return
		}
	}
}
