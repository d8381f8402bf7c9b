package packing_test

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// of returns tensors of one dtype with the given numbers of elements.
func of(d tensor.DType, counts ...int) []packing.Tensor {
	out := make([]packing.Tensor, len(counts))
	for i, n := range counts {
		out[i] = packing.Tensor{Type: d, Count: n}
	}
	return out
}

// TestGroupBySize compares the grouping with the results of TensorFlow 2.21's group_by_size.
func TestGroupBySize(t *testing.T) {
	for _, c := range []struct {
		tensors []packing.Tensor
		bytes   int
		want    [][]int
	}{
		{of(tensor.Float32, 2, 3, 4), 0, [][]int{{0, 1, 2}}},
		{of(tensor.Float32, 2, 3, 4), 1, [][]int{{0}, {1}, {2}}},
		{of(tensor.Float32, 2, 3, 4), 12, [][]int{{0, 1}, {2}}},
		// a group of exactly 20 bytes gets another tensor
		{of(tensor.Float32, 2, 3, 4), 20, [][]int{{0, 1, 2}}},
		{of(tensor.Float32, 0, 0, 5, 0, 1), 19, [][]int{{0, 1, 2}, {3, 4}}}, // an empty tensor has 0 bytes
		{append(of(tensor.Float64, 4), of(tensor.Float32, 4, 4)...), 32, [][]int{{0, 1}, {2}}},
		{of(tensor.Float32, 1, -1, 1), 4, [][]int{{0, 1, 2}}}, // an unknown size
		{nil, 8, [][]int{}},
		{nil, 0, [][]int{{}}},
		{of(tensor.Float32, 100, 100), packing.OnePack, [][]int{{0, 1}}},
	} {
		got := packing.GroupBySize(c.tensors, c.bytes)
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%v by %d: got %v, want %v", c.tensors, c.bytes, got, c.want)
		}
	}
}

func drawTensors(rt *rapid.T) []packing.Tensor {
	return rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) packing.Tensor {
		return packing.Tensor{
			Type: rapid.SampledFrom([]tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float64, tensor.Int8}).Draw(rt,
				"dtype"),
			Count: rapid.IntRange(0, 40).Draw(rt, "count"),
		}
	}), 0, 20).Draw(rt, "tensors")
}

// TestGroupBySizeOfAny checks that every group except the last is larger than the size, and is not without its last
// tensor.
func TestGroupBySizeOfAny(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tensors := drawTensors(rt)
		bytes := rapid.IntRange(1, 200).Draw(rt, "bytes")
		next := 0
		groups := packing.GroupBySize(tensors, bytes)
		for k, g := range groups {
			size, last := 0, 0
			for _, i := range g {
				if i != next {
					rt.Fatalf("group %d of %v is %v: want tensor %d next", k, groups, g, next)
				}
				next++
				last = tensors[i].Count * tensors[i].Type.Bytes()
				size += last
			}
			if k < len(groups)-1 && (size <= bytes || size-last > bytes) {
				rt.Fatalf("group %d of %v has %d bytes, %d without its last tensor: want it closed right after it exceeds %d", k,
					groups, size, size-last, bytes)
			}
		}
		if next != len(tensors) {
			rt.Fatalf("%v holds %d of %d tensors", groups, next, len(tensors))
		}
	})
}

// TestPlan checks that packs contain every tensor once, that each has one dtype, and that the last tensor of the list
// is first.
func TestPlan(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tensors := drawTensors(rt)
		bytes := rapid.IntRange(0, 200).Draw(rt, "bytes")
		seen := map[int]bool{}
		last := map[tensor.DType]int{}
		for _, p := range packing.Plan(tensors, bytes) {
			count := 0
			for _, i := range p.Tensors {
				if before, ok := last[p.Type]; seen[i] || tensors[i].Type != p.Type || ok && before < i {
					rt.Fatalf("pack %+v of %v: tensor %d is of another dtype, doubled, or out of order", p, tensors, i)
				}
				seen[i], last[p.Type] = true, i
				count += tensors[i].Count
			}
			if count != p.Count || len(p.Tensors) == 0 {
				rt.Fatalf("pack %+v has %d elements", p, count)
			}
		}
		if len(seen) != len(tensors) {
			rt.Fatalf("%d of %d tensors are in packs", len(seen), len(tensors))
		}
	})
}

func TestPlanOrder(t *testing.T) {
	mixed := []packing.Tensor{
		{Type: tensor.Float32, Count: 1},
		{Type: tensor.Float16, Count: 1},
		{Type: tensor.Float32, Count: 2},
		{Type: tensor.Float16, Count: 3},
	}
	var got [][]int
	for _, p := range packing.Plan(mixed, packing.OnePack) {
		got = append(got, p.Tensors)
	}
	if fmt.Sprint(got) != "[[3 1] [2 0]]" {
		t.Errorf("one pack: got %v", got)
	}
	got = nil
	for _, p := range packing.Plan(mixed, 8) { // groups 3,2 and 1,0: split by dtype inside
		got = append(got, p.Tensors)
	}
	if fmt.Sprint(got) != "[[3] [2] [1] [0]]" {
		t.Errorf("8 bytes: got %v", got)
	}
}

// TestChosenSize checks that the size of packs is never 0, grows with the total, and is at most half of it unless there
// is one pack only.
func TestChosenSize(t *testing.T) {
	for _, c := range []packing.Costs{
		packing.MemoryCosts, packing.SharedCosts, packing.MessageCosts,
		{Latency: time.Second, BytesPerSecond: 2e9},
	} {
		before := 0
		for total := 1; total < math.MaxInt/8; total *= 4 {
			n := c.BytesPerPack(total)
			switch {
			case n == packing.OnePack && before > 0:
				t.Errorf("%+v: %d bytes are one pack, a quarter of them was not", c, total)
			case n != packing.OnePack && (n < before || n <= 0 || n > total/2):
				t.Errorf("%+v: %d bytes in packs of %d, after %d", c, total, n, before)
			case n != packing.OnePack:
				before = n
			}
		}
		if n := c.BytesPerPack(0); n != packing.OnePack {
			t.Errorf("%+v: nothing in packs of %d", c, n)
		}
	}
	if n := packing.MessageCosts.BytesPerPack(100 << 20); n < 1<<20 || n > 16<<20 {
		t.Errorf("100 MiB over a network in packs of %d bytes", n)
	}
}

func TestPlanIsPure(t *testing.T) {
	tensors := of(tensor.Float32, 3, 1, 2)
	before := slices.Clone(tensors)
	packing.Plan(tensors, 1)
	for i := range tensors {
		if tensors[i].Count != before[i].Count {
			t.Fatalf("Plan changed its tensors: %v, before %v", tensors, before)
		}
	}
}
