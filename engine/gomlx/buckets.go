package gomlx

import (
	"slices"

	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
)

// The default buckets are those with which a step over a slow link ends first, by an estimate that depends only on the
// graph, the engine and the number of replicas: cutting the program of the gradients costs time, and what is computed
// after a cut hides the reduction of what was computed before it. The times are in picoseconds, and integers, so every
// processor gets the same buckets.
const (
	byteTime     = 8000    // of a byte on the link: 1 Gbit/s
	callTime     = 100e6   // of a call, until its first byte arrives: 0.1 ms
	leastGain    = 33      // a further cut makes the step shorter by at least this part of it: 3 %
	mostBuckets  = 16      // except with an explicit size
	mostCutTime  = 40      // all cuts take at most this part of the computation: 2.5 %; workers of a host hide nothing
	mostSearched = 1 << 11 // of more parameters, several in a row count as one
)

// buckets groups the parameters in the order in which the backward pass computes their gradients. A single replica has
// one bucket.
func (bl *builder) buckets(gradients *executable) []engine.Bucket {
	order := make([]int, len(bl.trained))
	for i := range order {
		order[i] = i
	}
	if bl.replicas() > 1 {
		at := gradients.positions[firstGradient:]
		slices.SortStableFunc(order, func(a, b int) int { return at[a] - at[b] })
	}
	bytes := make([]int64, len(order))
	for k, i := range order {
		bytes[k] = int64(bl.trained[i].Shape().ByteSize())
	}
	var ends []int
	switch {
	case bl.replicas() == 1:
		ends = []int{len(order)}
	case bl.spec.BucketBytes > 0:
		ends = bucketsOfSize(bytes, int64(bl.spec.BucketBytes))
	default:
		results := make([]int, len(order))
		for k, i := range order {
			results[k] = firstGradient + i
		}
		times := goCosts
		if bl.b.name == "xla" {
			times = xlaCosts
		}
		ends = defaultBuckets(bytes, workOf(gradients.g, results), bl.replicas(), times)
	}
	var list []engine.Bucket
	from := 0
	for _, end := range ends {
		b := engine.Bucket{Parameters: slices.Sorted(slices.Values(order[from:end]))}
		for _, n := range bytes[from:end] {
			b.Bytes += int(n)
		}
		list, from = append(list, b), end
	}
	return list
}

// costs are times of an engine on one core, rounded. BenchmarkCuts measures a cut.
type costs struct {
	operation int64 // a floating-point operation
	cut       int64 // a cut: on XLA it separates what would have been fused
}

var (
	goCosts  = costs{operation: 20, cut: 10e6}
	xlaCosts = costs{operation: 10, cut: 300e6}
)

// workOf estimates the floating-point operations for each of the results of a recorded graph, in their order.
func workOf(g *graph.Graph, results []int) []int64 {
	return g.Executable().(*stages.Deferred).Work(results)
}

// bucketsOfSize returns the end of each bucket of gradients of these sizes. A bucket is closed once it has so many
// bytes. The last one has at least half of them.
func bucketsOfSize(bytes []int64, full int64) (ends []int) {
	size := int64(0)
	for i, n := range bytes {
		if size >= full {
			ends, size = append(ends, i), 0
		}
		size += n
	}
	if len(ends) > 0 && size < full/2 { // too little for a cut
		ends = ends[:len(ends)-1]
	}
	return append(ends, len(bytes))
}

// defaultBuckets returns the end of each bucket of gradients of these sizes, for which the program executes so many
// operations.
func defaultBuckets(bytes, work []int64, replicas int, times costs) (ends []int) {
	bytes, work, last := joined(bytes, work)
	n := len(bytes)
	before, computed := make([]int64, n+1), make([]int64, n+1) // of the first gradients
	for i := range bytes {
		// Each of N replicas sends and receives 2 (N-1)/N of the bytes.
		before[i+1] = before[i] + bytes[i]*byteTime*2*int64(replicas-1)/int64(replicas)
		computed[i+1] = computed[i] + work[i]*times.operation
	}
	most := min(n, mostBuckets, int(1+computed[n]/mostCutTime/times.cut))
	// reduced[k][i] is when the first i gradients are reduced as k+1 buckets, of which the last begins with gradient
	// from[k][i]. An earlier end of one bucket never delays the next ones.
	reduced, from := make([][]int64, most), make([][]int, most)
	best := 0
	for k := range most {
		reduced[k], from[k] = make([]int64, n+1), make([]int, n+1)
		for end := k + 1; end <= n; end++ {
			ready := computed[end] + int64(k)*times.cut
			if k == 0 {
				reduced[k][end] = ready + callTime + before[end]
				continue
			}
			for begin := k; begin < end; begin++ {
				t := max(ready, reduced[k-1][begin]) + callTime + before[end] - before[begin]
				if begin == k || t < reduced[k][end] {
					reduced[k][end], from[k][end] = t, begin
				}
			}
		}
		if t := reduced[best][n]; t-reduced[k][n] > t/leastGain*int64(k-best) {
			best = k
		}
	}
	for end := n; best >= 0; best-- {
		ends = append(ends, last[end-1])
		end = from[best][end]
	}
	slices.Reverse(ends)
	return ends
}

// joined makes few gradients of many, by joining neighbours. It returns also the end of each in the list of all.
func joined(bytes, work []int64) (fewBytes, fewWork []int64, ends []int) {
	each := (len(bytes) + mostSearched - 1) / mostSearched
	for i := 0; i < len(bytes); i += each {
		end := min(len(bytes), i+each)
		b, w := int64(0), int64(0)
		for k := i; k < end; k++ {
			b, w = b+bytes[k], w+work[k]
		}
		fewBytes, fewWork, ends = append(fewBytes, b), append(fewWork, w), append(ends, end)
	}
	return fewBytes, fewWork, ends
}
