package collective_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// scattered returns a copy of b in pieces at random cuts between elements, each in separate memory.
func scattered(random *rand.Rand, b []byte, size int) (list []tensor.Memory) {
	cuts := []int{0, len(b) / size}
	for range random.IntN(9) {
		cuts = append(cuts, random.IntN(len(b)/size+1))
	}
	slices.Sort(cuts)
	for i := range len(cuts) - 1 {
		piece := aligned((cuts[i+1] - cuts[i]) * size)
		copy(piece, b[cuts[i]*size:cuts[i+1]*size])
		list = append(list, tensor.HostMemory(piece))
	}
	return list
}

func gathered(list []tensor.Memory) (b []byte) {
	for _, m := range list {
		b = append(b, m.HostBytes()...)
	}
	return b
}

// TestListsEqualOneMemory: a call whose memories are lists, cut differently on every rank, has the bits of the same
// call with contiguous memory, for every operation, in every placement.
func TestListsEqualOneMemory(t *testing.T) {
	t.Parallel()
	ops := []collective.Op{
		collective.AllReduce, collective.Broadcast, collective.Reduce, collective.ReduceScatter, collective.AllGather,
		collective.Gather, collective.Scatter, collective.AllToAll,
	}
	const n = 4
	eachPlacement(t, n, func(t *testing.T, w *world) {
		random := seeded(t)
		rounds := 5 * len(ops)
		if race.Enabled {
			rounds = 2 * len(ops)
		}
		for round := range rounds {
			op := ops[round%len(ops)]
			dtype := []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float64, tensor.Uint8}[random.IntN(4)]
			count := n * random.IntN(80)
			if round < len(ops) {
				count = n * (70_000/dtype.Bytes() + random.IntN(9)) // several segments
			} else if op == collective.AllReduce && round/len(ops)%2 == 1 {
				count = n * (1 + random.IntN(3)) // also beside the slots
			}
			call := collective.Call{Op: op, Type: dtype, Root: random.IntN(n)}
			if count > 0 && (op == collective.ReduceScatter || op == collective.AllGather) && random.IntN(2) == 0 {
				a, b := random.IntN(count+1), random.IntN(count+1)
				call.Counts = []int{min(a, b), 0, max(a, b) - min(a, b), count - max(a, b)}
			}
			options := collective.Options{Accumulate: collective.AccumulateFloat32}
			inPlace := op == collective.AllReduce && random.IntN(2) == 0
			seed := random.Uint64()
			for rank, err := range w.each(func(c collective.Communicator) error {
				random := rand.New(rand.NewPCG(seed, uint64(c.Rank())))
				part := count / n
				if call.Counts != nil {
					part = call.Counts[c.Rank()]
				}
				gives, gets := count, count
				switch op {
				case collective.AllGather, collective.Gather:
					gives = part
				case collective.ReduceScatter, collective.Scatter:
					gets = part
				}
				src, dst := aligned(gives*dtype.Bytes()), aligned(gets*dtype.Bytes())
				fill(random, dtype, src)
				one, cut := call, call
				one.Src, one.Dst, one.Options = tensor.HostMemory(src), tensor.HostMemory(dst), &options
				cut.SrcList, cut.Options = scattered(random, src, dtype.Bytes()), &options
				if cut.DstList = scattered(random, dst, dtype.Bytes()); inPlace {
					cut.DstList = cut.SrcList
				} else if random.IntN(4) == 0 {
					cut.SrcList, cut.Src = nil, one.Src
				}
				if err := errors.Join(c.Do(background, &one), c.Do(background, &cut)); err != nil {
					return err
				}
				if got := gathered(cut.DstList); !bytes.Equal(got, dst) {
					return fmt.Errorf("other bits: %s", firstDifference(dtype, got, dst))
				}
				if got := gathered(cut.SrcList); cut.SrcList != nil && !inPlace && !bytes.Equal(got, src) {
					return errors.New("a source was changed")
				}
				return nil
			}) {
				if err != nil {
					t.Fatalf("%v of %v [%d] %v, rank %d: %v", op, dtype, count, call.Counts, rank, err)
				}
			}
		}
	})
}

// TestInvalidLists checks the errors for lists that are not valid memory of a call.
func TestInvalidLists(t *testing.T) {
	x := tensor.New(tensor.Float32, 4).Memory()
	half := tensor.Memory{Ptr: x.Ptr, Bytes: 8}
	overlapping := tensor.Memory{Ptr: tensor.New(tensor.Float32, 4).Memory().Ptr, Bytes: 8}
	for _, c := range []struct {
		name     string
		src, dst []tensor.Memory
		want     string
	}{
		{"different lengths", []tensor.Memory{x, half}, []tensor.Memory{x}, "24 bytes in Src and 16 in Dst"},
		{"no whole element", []tensor.Memory{{Ptr: x.Ptr, Bytes: 7}}, []tensor.Memory{x}, "memory 0 of a list: 7 bytes"},
		{"no pointer", []tensor.Memory{x, {Bytes: 8}}, []tensor.Memory{x, half}, "memory 1 of a list"},
		{"overlap", []tensor.Memory{x, half}, []tensor.Memory{half, x}, "memories 0 of SrcList and DstList overlap"},
		{"device", []tensor.Memory{{Kind: tensor.Device, Bytes: 8}}, []tensor.Memory{overlapping}, "memory of a device"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := placements[0].world(t, 2, collective.Config{})
			defer w.close(t)
			for _, err := range w.each(func(comm collective.Communicator) error {
				return comm.Do(background, &collective.Call{
					Op: collective.AllReduce, Type: tensor.Float32, SrcList: c.src, DstList: c.dst,
				})
			}) {
				if !errors.Is(err, collective.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want ErrInvalid with %q", err, c.want)
				}
			}
		})
	}
}

func TestListsDoNotAllocate(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	const runs, tries = 50, 5
	for _, p := range placements {
		if p.name != "mem" && p.name != "shm alone" && p.name != "pipes" {
			continue // sockets of several connections allocate in the system's goroutines
		}
		w := p.world(t, 2, collective.Config{})
		for _, err := range w.each(func(c collective.Communicator) error {
			var list []tensor.Memory
			for _, n := range []int{10, 300_000, 1, 5000} {
				list = append(list, tensor.New(tensor.Float32, n).Memory())
			}
			call := &collective.Call{Op: collective.AllReduce, Type: tensor.Float32, SrcList: list, DstList: list}
			var err error
			reduce := func() { err = errors.Join(err, c.Do(background, call)) }
			for range 3 {
				reduce()
			}
			if c.Rank() != 0 {
				for range tries * (runs + 1) {
					reduce()
				}
				return err
			}
			allocs := math.Inf(1) // the least: on a busy machine a rank that has waited long probes the other
			for range tries {
				allocs = min(allocs, testing.AllocsPerRun(runs, reduce))
			}
			if allocs > 0 {
				err = errors.Join(err, fmt.Errorf("%v allocations, want none", allocs))
			}
			return err
		}) {
			if err != nil {
				t.Errorf("%s: %v", p.name, err)
			}
		}
		w.close(t)
	}
}
