package gomlx

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// linkTime is the estimated end of a step over the slow link, with buckets that end there.
func linkTime(bytes, work []int64, ends []int, replicas int, times costs) int64 {
	computed, reduced, from := int64(0), int64(0), 0
	for k, end := range ends {
		before, n := int64(0), int64(0)
		for i := range bytes {
			if i >= from && i < end {
				n += bytes[i] * byteTime * 2 * int64(replicas-1) / int64(replicas)
			}
			if i < end {
				before += work[i]
			}
		}
		computed, from = before*times.operation+int64(k)*times.cut, end
		reduced = max(reduced, computed) + callTime + n
	}
	return reduced
}

// TestDefaultBuckets compares the default buckets with the best of all possible ones, and checks that each cut is worth
// its time and that all together are cheap.
func TestDefaultBuckets(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		n, replicas := 1+r.IntN(9), 2+r.IntN(7)
		times := []costs{goCosts, xlaCosts, {5, 1e9}}[r.IntN(3)]
		bytes, work, total := make([]int64, n), make([]int64, n), int64(0)
		for i := range bytes {
			bytes[i] = r.Int64N(1 << r.IntN(24))
			work[i] = r.Int64N(1 << r.IntN(34))
			total += work[i] * times.operation
		}
		got := defaultBuckets(bytes, work, replicas, times)
		best := make([]int64, n+1) // by number of buckets
		for set := range 1 << (n - 1) {
			var ends []int
			for i := range n - 1 {
				if set>>i&1 != 0 {
					ends = append(ends, i+1)
				}
			}
			k := bits.OnesCount(uint(set)) + 1
			if time := linkTime(bytes, work, append(ends, n), replicas, times); best[k] == 0 || time < best[k] {
				best[k] = time
			}
		}
		k := len(got)
		if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != k || got[k-1] != n {
			t.Fatalf("seed %d: ends %v of %d gradients", seed, got, n)
		}
		if time := linkTime(bytes, work, got, replicas, times); time != best[k] {
			t.Errorf("seed %d: ends %v take %d ps, and the best of %d buckets %d", seed, got, time, k, best[k])
		}
		if all := int64(k-1) * times.cut; k > 1 && all > total/mostCutTime || k > mostBuckets {
			t.Errorf("seed %d: %d buckets, whose cuts take %d of %d ps", seed, k, all, total)
		}
		if k > 1 && best[1]-best[k] < best[1]/leastGain*int64(k-1) {
			t.Errorf("seed %d: %d buckets take %d ps, and one %d", seed, k, best[k], best[1])
		}
	}
}

// TestBucketsOfManyParameters checks that more gradients than are searched give every gradient a bucket, in order.
func TestBucketsOfManyParameters(t *testing.T) {
	n := 2*mostSearched + 3
	bytes, work := make([]int64, n), make([]int64, n)
	for i := range bytes {
		bytes[i], work[i] = 1<<16, 1<<26
	}
	ends := defaultBuckets(bytes, work, 2, goCosts)
	if !slices.IsSorted(ends) || ends[len(ends)-1] != n || len(ends) < 2 || len(ends) > mostBuckets {
		t.Errorf("%d gradients: ends %v", n, ends)
	}
	if got := defaultBuckets([]int64{0}, []int64{0}, 2, goCosts); !slices.Equal(got, []int{1}) {
		t.Errorf("one gradient: ends %v", got)
	}
}
