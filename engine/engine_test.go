package engine_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestRole(t *testing.T) {
	got := fmt.Sprint([]engine.Role{engine.Parameter, engine.Slot, engine.Average, engine.Frozen, 9})
	if want := "[parameter optimizer's slot average frozen Role(9)]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func variables(lengths ...int) (list []engine.Variable) {
	for _, n := range lengths {
		list = append(list, engine.Variable{DType: tensor.Float32, Shape: []int{n}})
	}
	return list
}

// TestPieces checks that every element has one owner, that shards are balanced even if one parameter has most elements,
// and that the order among equals is fixed.
func TestPieces(t *testing.T) {
	for _, test := range []struct {
		lengths []int
		shards  int
		want    []int // owners, if nothing is divided
	}{
		{[]int{1, 2, 3}, 1, []int{0, 0, 0}},
		{[]int{5, 5, 5, 5}, 2, []int{0, 1, 0, 1}},
		{[]int{1, 2, 3, 4, 10}, 2, []int{1, 1, 1, 1, 0}},
		{[]int{7, 1}, 4, []int{0, 1}},
		{[]int{0, 1}, 2, []int{1, 0}},
		{nil, 3, nil},
	} {
		for _, divide := range []bool{false, true} { // all are too small
			var got []int
			for i, s := range engine.Pieces(variables(test.lengths...), test.shards, divide) {
				if got = append(got, s.Owner); s.Parameter != i || s.From != 0 || s.To != test.lengths[i] {
					t.Errorf("lengths %v: piece %+v, want parameter %d whole", test.lengths, s, i)
				}
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("parameters of lengths %v in %d shards: owners %v, want %v", test.lengths, test.shards, got, test.want)
			}
		}
	}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 5))
		shards, total := 2+r.IntN(7), 0
		lengths := make([]int, 1+r.IntN(9))
		for i := range lengths {
			lengths[i] = r.IntN(1 << r.IntN(24))
			total += lengths[i]
		}
		if r.IntN(2) == 0 { // one has most elements
			lengths[0] = 2*total + 1
			total += lengths[0]
		}
		list := engine.Pieces(variables(lengths...), shards, true)
		of, at := make([]int, shards), make([]int, len(lengths))
		seen := map[[2]int]bool{}
		for _, s := range list {
			if s.From != at[s.Parameter] || s.To <= s.From && lengths[s.Parameter] > 0 || s.From%engine.PieceElements != 0 ||
				seen[[2]int{s.Parameter, s.Owner}] {
				t.Fatalf("seed %d, lengths %v: piece %+v of %v", seed, lengths, s, list)
			}
			at[s.Parameter], seen[[2]int{s.Parameter, s.Owner}] = s.To, true
			of[s.Owner] += s.To - s.From
		}
		if !slices.Equal(at, lengths) {
			t.Fatalf("seed %d: pieces cover %v of %v", seed, at, lengths)
		}
		if most := slices.Max(of); total >= 16*shards*engine.PieceElements && most > total/shards*17/16+shards {
			t.Errorf("seed %d, lengths %v: shards of %v elements, want at most %d", seed, lengths, of, total/shards*17/16)
		}
	}
}

// TestPlacement checks which device a replica computes on.
func TestPlacement(t *testing.T) {
	s := engine.Spec{Devices: make([]engine.Device, 3)}
	if s.LocalReplicas() != 3 || s.DeviceOf(2) != 2 {
		t.Errorf("%d replicas, the last on device %d: want one per device", s.LocalReplicas(), s.DeviceOf(2))
	}
	s.ReplicaDevices = []int{2, 0, 1, 2}
	if s.LocalReplicas() != 4 || s.DeviceOf(3) != 2 {
		t.Errorf("%d replicas, the last on device %d: want 4, on device 2", s.LocalReplicas(), s.DeviceOf(3))
	}
}

// TestBucketPieces checks that every element has one owner, and that large buckets are balanced one by one, and small
// ones together.
func TestBucketPieces(t *testing.T) {
	list := variables(1<<20, 1<<19, 10, 20, 30, 40)
	buckets := []engine.Bucket{
		{Parameters: []int{1}}, {Parameters: []int{2}}, {Parameters: []int{3}}, {Parameters: []int{0, 4, 5}},
	}
	got := engine.BucketPieces(list, buckets, 2, true)
	for _, b := range buckets {
		owned, bytes := [2]int{}, 0
		for _, i := range b.Parameters {
			next := 0
			for _, s := range got {
				if s.Parameter == i {
					if s.From != next {
						t.Errorf("parameter %d: %v: want a piece from %d on", i, s, next)
					}
					next = s.To
					owned[s.Owner] += (s.To - s.From) * list[i].DType.Bytes()
				}
			}
			if bytes += list[i].Bytes(); next*list[i].DType.Bytes() != list[i].Bytes() {
				t.Errorf("parameter %d has %d elements with an owner", i, next)
			}
		}
		if most := max(owned[0], owned[1]); bytes > 1<<20 && most > bytes*17/32 {
			t.Errorf("bucket %v: shards own %v bytes", b.Parameters, owned)
		}
	}
	small := func(parameter int) int {
		i := slices.IndexFunc(got, func(p engine.Piece) bool { return p.Parameter == parameter })
		return got[i].Owner
	}
	if small(2) == small(3) {
		t.Errorf("%v: one shard owns the parameters of both small buckets", got)
	}
	if all, want := engine.BucketPieces(list, buckets, 2, false), engine.Pieces(list, 2, false); !slices.Equal(all, want) {
		t.Errorf("whole parameters: %v, want %v", all, want)
	}
}
