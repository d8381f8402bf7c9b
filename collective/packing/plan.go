package packing

import (
	"math"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Tensor describes one tensor of a pack.
type Tensor struct {
	Name  string // in errors; may be empty
	Type  tensor.DType
	Shape []int // nil: a vector of Count elements
	Count int   // elements; negative: unknown, which only GroupBySize accepts
}

// bytes returns the size, or -1 if it is unknown.
func (t *Tensor) bytes() int {
	if t.Count < 0 {
		return -1
	}
	return t.Count * t.Type.Bytes()
}

// OnePack is a pack size that no list of tensors exceeds.
const OnePack = math.MaxInt

// GroupBySize groups tensors in their order, as tf.distribute's group_by_size does, and returns their
// indices. A group is closed once it has more than bytesPerPack bytes, so every group but the last is larger
// than that. If bytesPerPack is 0 or the size of a tensor is unknown, all tensors are one group. Without
// tensors the result has no groups.
func GroupBySize(tensors []Tensor, bytesPerPack int) [][]int {
	all := make([]int, len(tensors))
	known := true
	for i := range tensors {
		all[i] = i
		known = known && tensors[i].Count >= 0
	}
	if bytesPerPack == 0 || !known {
		return [][]int{all}
	}
	groups := [][]int{}
	lo, last := 0, 0
	for i := range tensors {
		if i > lo && last > bytesPerPack {
			groups = append(groups, all[lo:i:i])
			lo, last = i, 0
		}
		last += tensors[i].bytes()
	}
	if lo < len(all) {
		groups = append(groups, all[lo:])
	}
	return groups
}

// Pack is tensors of one dtype that are reduced as one vector.
type Pack struct {
	Type    tensor.DType
	Count   int   // elements
	Tensors []int // the indices of the tensors in the caller's list, in the order of their elements in the vector
}

// Plan returns the packs of the tensors in the order in which they are started: the list is reversed, grouped
// by [GroupBySize], and each group is split by dtype, in the order in which the dtypes appear. Without
// tensors the result has no packs.
func Plan(tensors []Tensor, bytesPerPack int) []Pack {
	reversed := make([]Tensor, len(tensors))
	for i := range tensors {
		reversed[len(tensors)-1-i] = tensors[i]
	}
	var packs []Pack
	for _, group := range GroupBySize(reversed, bytesPerPack) {
		packs = append(packs, cutByType(group, tensors)...)
	}
	return packs
}

// cutByType makes one pack of each dtype in a group of the reversed list.
func cutByType(group []int, tensors []Tensor) []Pack {
	var packs []Pack
	at := map[tensor.DType]int{}
	for _, i := range group {
		i = len(tensors) - 1 - i
		t := &tensors[i]
		k, seen := at[t.Type]
		if !seen {
			k = len(packs)
			at[t.Type] = k
			packs = append(packs, Pack{Type: t.Type})
		}
		packs[k].Tensors = append(packs[k].Tensors, i)
		packs[k].Count += t.Count
	}
	return packs
}

// Costs are the inputs of the choice of pack sizes. They must be equal on all ranks; measurements on
// different machines are not, so do not pass them unchanged.
type Costs struct {
	Latency        time.Duration // of one call, whatever its size
	BytesPerSecond float64       // bandwidth of a large call
}

// Approximate costs between goroutines, between processes that share memory, and between ranks that exchange
// messages over a fast local network. They only determine pack sizes, which are not sensitive: twice the best
// size loses a tenth of what packs gain.
var (
	MemoryCosts  = Costs{Latency: 2 * time.Microsecond, BytesPerSecond: 10e9}
	SharedCosts  = Costs{Latency: 5 * time.Microsecond, BytesPerSecond: 5e9}
	MessageCosts = Costs{Latency: 30 * time.Microsecond, BytesPerSecond: 2e9}
)

// BytesPerPack returns the pack size for tensors with this many bytes in total: never 0, and [OnePack] where
// packs cannot gain anything.
//
// With k packs of b bytes, of a total of S, the step waits for k latencies L and, at the end, for the last
// pack's b bytes at rate R: the work that follows, applying the gradients, cannot overlap with them. S/b·L +
// b/R is least at b = sqrt(S·L·R).
func (c Costs) BytesPerPack(total int) int {
	best := math.Sqrt(float64(total) * c.Latency.Seconds() * c.BytesPerSecond)
	if best >= float64(total)/2 {
		return OnePack
	}
	return int(best)
}
