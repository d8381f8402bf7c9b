package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Average is how the times of a call on the ranks of a group become one time (nccl-tests: --average). The median and
// the percentiles of a [Result] are those of these times: over the calls, not over the ranks.
type Average string

// The averages.
const (
	AverageRank0 Average = "rank0" // the time on rank 0
	AverageAvg   Average = "avg"   // the arithmetic mean over the ranks
	AverageMin   Average = "min"   // the time on the rank with the shortest
	AverageMax   Average = "max"   // the time on the rank with the longest
)

// Averages are all averages. The index of each is its number in nccl-tests.
var Averages = []Average{AverageRank0, AverageAvg, AverageMin, AverageMax}

// ParseAverage returns the average with this name, or with this number in nccl-tests.
func ParseAverage(text string) (Average, error) {
	if slices.Contains(Averages, Average(text)) {
		return Average(text), nil
	}
	if i, err := strconv.Atoi(text); err == nil && i >= 0 && i < len(Averages) {
		return Averages[i], nil
	}
	return "", fmt.Errorf("%q is not an average over the ranks: want %s, or its number in nccl-tests, 0 to %d", text,
		averageNames(), len(Averages)-1)
}

// averageNames returns the names of all averages.
func averageNames() string {
	var names []string
	for _, a := range Averages {
		names = append(names, string(a))
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}

// text describes the time of a call.
func (a Average) text() string {
	switch a {
	case AverageRank0:
		return "on rank 0"
	case AverageMin:
		return "on the fastest rank of each call"
	case AverageMax:
		return "on the slowest rank of each call"
	}
	return "the average of each call over the ranks"
}

// Medians are the median times of some calls by each [Average].
type Medians struct {
	Rank0 time.Duration `json:"rank0_ns"`
	Avg   time.Duration `json:"avg_ns"`
	Min   time.Duration `json:"min_ns"`
	Max   time.Duration `json:"max_ns"`
}

// callTimes are the times of some calls, in their order, by each [Average].
type callTimes struct{ rank0, avg, min, max []time.Duration }

// by returns the times by one average.
func (t *callTimes) by(a Average) []time.Duration {
	switch a {
	case AverageRank0:
		return t.rank0
	case AverageMin:
		return t.min
	case AverageMax:
		return t.max
	}
	return t.avg
}

func (t *callTimes) medians() Medians {
	return Medians{Rank0: median(t.rank0), Avg: median(t.avg), Min: median(t.min), Max: median(t.max)}
}

// averageTimes combines the times of each call on the ranks of comm. All ranks call it after the calls, each with its
// own times of them. Rank 0 gets the result, and the other ranks get none. counted is false on a rank that took no part
// in the calls. It passes as many times, which do not count. ranks is the number of those that count.
func averageTimes(ctx context.Context, comm collective.Communicator, own []time.Duration, counted bool, ranks int) (
	t callTimes, err error,
) {
	reduce := func(by collective.ReduceOp, neutral int64) ([]time.Duration, error) {
		values := make([]int64, len(own))
		for i, d := range own {
			if values[i] = neutral; counted {
				values[i] = int64(d)
			}
		}
		call := collective.Call{Op: collective.Reduce, Reduce: by, Type: tensor.Int64, Src: tensor.HostMemory(values)}
		if comm.Rank() != 0 {
			return nil, comm.Do(ctx, &call)
		}
		call.Dst = call.Src
		err := comm.Do(ctx, &call)
		times := make([]time.Duration, len(values))
		for i, v := range values {
			times[i] = time.Duration(v)
		}
		return times, err
	}
	if t.avg, err = reduce(collective.Sum, 0); err != nil {
		return t, err
	}
	for i, sum := range t.avg {
		t.avg[i] = (sum + time.Duration(ranks)/2) / time.Duration(ranks) // rounded
	}
	if t.min, err = reduce(collective.Min, math.MaxInt64); err != nil {
		return t, err
	}
	if t.max, err = reduce(collective.Max, 0); err == nil && comm.Rank() == 0 {
		t.rank0 = slices.Clone(own)
	}
	return t, err
}

// average combines the times of calls on the ranks of this one's group that take part in them.
func (m *member) average(ctx context.Context, p *part, own []time.Duration) (callTimes, error) {
	ranks := m.comm.Size()
	if m.opts.Op == collective.Send {
		ranks -= ranks % 2
	}
	return averageTimes(ctx, m.comm, own, !p.idle, ranks)
}
