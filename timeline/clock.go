package timeline

import (
	"math"
	"time"
)

// Visit is a worker's part of a call that no worker leaves before all have entered it, such as a barrier: by the
// worker's clock, when it entered and when it left.
type Visit struct{ Enter, Leave time.Duration }

// Offset is the difference of two clocks: what to add to times of one to get times of the other. It is wrong by at most
// Error.
type Offset struct{ Add, Error time.Duration }

// OffsetOf returns the offset of a worker's clock to another one's, from their visits of the same calls. A worker
// leaves a call after all have entered it. So each call bounds the offset from both sides, as a ping does, and the
// error is half of the narrowest interval: half the best round trip. ok is false if there are no calls, or the visits
// contradict each other, as they do if a clock ran differently.
func OffsetOf(worker, other []Visit) (o Offset, ok bool) {
	low, high := time.Duration(math.MinInt64), time.Duration(math.MaxInt64)
	for i := range min(len(worker), len(other)) {
		low = max(low, other[i].Enter-worker[i].Leave)
		high = min(high, other[i].Leave-worker[i].Enter)
	}
	if len(worker) == 0 || len(other) == 0 || low > high {
		return Offset{}, false
	}
	return Offset{Add: low + (high-low)/2, Error: (high - low + 1) / 2}, true
}

// Clock converts the times of a worker to those of another one, by offsets measured at two moments: clocks drift by
// some millionths. Between them it interpolates, outside of them it uses the nearer one.
type Clock struct {
	First, Last     Offset
	FirstAt, LastAt time.Duration // by the worker's clock
}

// Convert returns a worker's time by the other clock.
func (c Clock) Convert(at time.Duration) time.Duration {
	switch {
	case c.LastAt <= c.FirstAt || at <= c.FirstAt:
		return at + c.First.Add
	case at >= c.LastAt:
		return at + c.Last.Add
	}
	part := float64(at-c.FirstAt) / float64(c.LastAt-c.FirstAt)
	return at + c.First.Add + time.Duration(part*float64(c.Last.Add-c.First.Add))
}

// Error returns the largest error of a converted time, if the clocks drift evenly.
func (c Clock) Error() time.Duration { return max(c.First.Error, c.Last.Error) }
