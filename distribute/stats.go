package distribute

import (
	"sync/atomic"
	"time"
)

// Stats has the times of a strategy's Runs, summed since the strategy was made or placed by [Strategy.Reform].
type Stats struct {
	Runs     int            // number of Runs that have ended
	Elapsed  time.Duration  // from the start to the end of each
	Replicas []ReplicaStats // of this worker, by replica
}

// ReplicaStats has the times of one replica.
type ReplicaStats struct {
	Step   time.Duration // in the step function, including Reduce and the waits inside it
	Reduce time.Duration // in reductions and merge calls, after the last replica has joined
	Wait   time.Duration // waiting for other replicas to join a reduction or a merge call, or to end their step
	Calls  uint64        // calls of the collective library in Runs
}

type runStats struct {
	epoch         time.Time // origin of all times, on the monotonic clock
	runs, elapsed atomic.Int64
	replicas      []counters
}

// counters are one replica's times. They are padded to cache lines, because all replicas write at the same
// time.
type counters struct {
	stepTime, reduceTime, waitTime atomic.Int64
	calls                          atomic.Uint64
	begun                          uint64 // calls of the communicator before the Run in progress
	// arrived is the time at which the replica joined its call, by the call's parity. Two entries suffice: a
	// peer that reads the time of call k has not started k+1, so no replica has finished k+1 and joined k+2.
	arrived [2]atomic.Int64
	ended   atomic.Int64

	_ [64]byte
}

func newRunStats(replicas int) *runStats {
	return &runStats{epoch: time.Now(), replicas: make([]counters, replicas)}
}

func (s *runStats) now() int64 { return int64(time.Since(s.epoch)) }

// ended counts a Run and the replicas' waits for the last one.
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

// replicaStats is the state that a replica needs to count its times.
type replicaStats struct{ calls atomic.Uint64 }

// step counts the time of a replica's step function.
func (s *runStats) step(replica int, start, end int64) {
	c := &s.replicas[replica]
	c.stepTime.Add(end - start)
	c.ended.Store(end)
}

// arrive records and returns the time at which the replica joins a call that all replicas make.
func (p *replicaStats) arrive(s *runStats, replica int) int64 {
	now := s.now()
	s.replicas[replica].arrived[p.calls.Load()%2].Store(now)
	return now
}

// leave counts the time of a call that started at begin: waiting until the last replica joined, then reducing.
func (p *replicaStats) leave(s *runStats, replica int, begin int64) {
	last := begin
	for i := range s.replicas {
		last = max(last, s.replicas[i].arrived[p.calls.Load()%2].Load())
	}
	p.calls.Add(1)
	now := s.now()
	last = min(last, now) // after a started call a peer may have joined a later one
	c := &s.replicas[replica]
	c.waitTime.Add(last - begin)
	c.reduceTime.Add(now - last)
}
