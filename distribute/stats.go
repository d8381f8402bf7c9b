package distribute

import (
	"sync/atomic"
	"time"
)

// Stats says where the time of a strategy's Runs went, summed since it was made.
type Stats struct {
	Runs     int           // Runs that have ended
	Elapsed  time.Duration // from the start to the end of each
	Replicas []ReplicaStats
}

// ReplicaStats says where one replica's time went.
type ReplicaStats struct {
	Step   time.Duration // in the step function, Reduce and the waits inside it included
	Reduce time.Duration // in reductions and merge calls, from the moment when all replicas had come
	Wait   time.Duration // for other replicas: to come to a reduction or a merge call, and to end their step
}

// Stats returns the times so far. Those of a Run in progress may be counted in part.
func (s *Strategy) Stats() Stats {
	out := Stats{Runs: int(s.stats.runs.Load()), Elapsed: time.Duration(s.stats.elapsed.Load())}
	for i := range s.stats.replicas {
		r := &s.stats.replicas[i]
		out.Replicas = append(out.Replicas, ReplicaStats{
			Step: time.Duration(r.stepTime.Load()), Reduce: time.Duration(r.reduceTime.Load()), Wait: time.Duration(r.waitTime.Load()),
		})
	}
	return out
}

type runStats struct {
	epoch         time.Time // all times are counted from here, on the monotonic clock
	runs, elapsed atomic.Int64
	replicas      []counters
}

// counters are one replica's times, on cache lines of their own: a strategy's replicas write theirs at the same time.
type counters struct {
	stepTime, reduceTime, waitTime atomic.Int64
	// arrived holds when the replica came to its call, by the call's parity. Two places are enough: a peer that reads
	// the time of call k has not begun k+1, so no replica has finished k+1 and come to k+2.
	arrived [2]atomic.Int64
	ended   atomic.Int64

	_ [64]byte
}

func (s *runStats) open(replicas int) {
	s.epoch = time.Now()
	s.replicas = make([]counters, replicas)
}

func (s *runStats) now() int64 { return int64(time.Since(s.epoch)) }

// ended counts a Run and the waits for its last replica.
func (s *runStats) ended(start int64) {
	end := s.now()
	s.runs.Add(1)
	s.elapsed.Add(end - start)
	last := int64(0)
	for i := range s.replicas {
		last = max(last, s.replicas[i].ended.Load())
	}
	for i := range s.replicas {
		if at := s.replicas[i].ended.Load(); at >= start {
			s.replicas[i].waitTime.Add(last - at)
		}
	}
}

// replicaStats is what a replica needs to count its times.
type replicaStats struct{ calls atomic.Uint64 }

// step counts the time of a step function.
func (p *replicaStats) step(r *Replica, start, end int64) {
	c := &r.home.stats.replicas[r.local]
	c.stepTime.Add(end - start)
	c.ended.Store(end)
}

// arrive notes that the replica comes to a call that all of them make, and returns when.
func (p *replicaStats) arrive(r *Replica) int64 {
	now := r.home.stats.now()
	r.home.stats.replicas[r.local].arrived[p.calls.Load()%2].Store(now)
	return now
}

// leave counts the time of a call that began then: waiting until the last replica came, reducing from there on.
func (p *replicaStats) leave(r *Replica, begin int64) {
	s := &r.home.stats
	last := begin
	for i := range s.replicas {
		last = max(last, s.replicas[i].arrived[p.calls.Load()%2].Load())
	}
	p.calls.Add(1)
	c := &s.replicas[r.local]
	c.waitTime.Add(last - begin)
	c.reduceTime.Add(s.now() - last)
}
