package packing_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// transports are the transports of these tests: memory, shared memory and messages.
var transports = map[string]func(n int) []transport.Endpoint{
	"memory": mem.New, "shared memory": shared, "messages": mem.NewPipes,
}

// shared connects ranks of this process like ranks of several processes: if the system has shared memory, ordinary
// memory is unreachable for the others.
func shared(n int) []transport.Endpoint {
	ends := make([]transport.Endpoint, n)
	name := fmt.Sprintf("packing-%d-%d", os.Getpid(), groups.Add(1))
	var wait sync.WaitGroup
	for r := range ends {
		wait.Go(func() {
			mine, err := shm.Open(context.Background(), shm.Config{Name: name, Size: n, Ranks: []int{r}})
			if err != nil {
				panic(err)
			}
			ends[r] = mine[0]
		})
	}
	wait.Wait()
	return ends
}

var groups atomic.Int64

func open(t testing.TB, ends []transport.Endpoint) collective.Group {
	t.Helper()
	g, err := collective.Open(ends, collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return g
}

// each runs f on every rank concurrently.
func each(g collective.Group, f func(c collective.Communicator) error) []error {
	errs := make([]error, len(g.Local()))
	var wait sync.WaitGroup
	for i, c := range g.Local() {
		wait.Go(func() { errs[i] = f(c) })
	}
	wait.Wait()
	return errs
}

// memories returns memory for each tensor, filled with random bits: NaNs of any payload, infinities, zeros of both
// signs.
func memories(tensors []packing.Tensor, rng *rand.Rand) []tensor.Memory {
	out := make([]tensor.Memory, len(tensors))
	for i, t := range tensors {
		out[i] = tensor.New(t.Type, t.Count).Memory()
		for j := range out[i].HostBytes() {
			switch b := byte(rng.Uint32()); {
			case b < 64:
				out[i].HostBytes()[j] = 0
			case b < 96:
				out[i].HostBytes()[j] = 0xff
			default:
				out[i].HostBytes()[j] = b
			}
		}
	}
	return out
}

// TestSameBits checks that the results have the same bits for any packs as with a call for each tensor.
func TestSameBits(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	var tensors []packing.Tensor
	for _, d := range []tensor.DType{
		tensor.Float32, tensor.Float16, tensor.BFloat16, tensor.Float64, tensor.Int8, tensor.Int16, tensor.Int32,
		tensor.Int64, tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64, tensor.Float32, tensor.Float16,
	} {
		for range 3 {
			tensors = append(tensors, packing.Tensor{Type: d, Count: rng.IntN(70)})
		}
	}
	tensors = append(tensors, packing.Tensor{Type: tensor.Float32, Count: 9_000})
	rng.Shuffle(len(tensors), func(i, j int) { tensors[i], tensors[j] = tensors[j], tensors[i] })
	for name, ends := range transports {
		for _, n := range []int{1, 2, 5} {
			for _, op := range []collective.ReduceOp{collective.Sum, collective.Mean, collective.Max} {
				src := make([][]tensor.Memory, n)
				for r := range src {
					src[r] = memories(tensors, rng)
				}
				g := open(t, ends(n))
				want := make([][]tensor.Memory, n)
				sizes := []int{0, 1, 100, packing.OnePack}
				for r, err := range each(g, func(c collective.Communicator) error {
					r := c.Rank()
					want[r] = memories(tensors, rand.New(rand.NewPCG(0, 0)))
					for i, one := range tensors {
						reduce := op
						if op == collective.Mean && !one.Type.IsFloat() {
							reduce = collective.Sum
						}
						call := collective.Call{Op: collective.AllReduce, Reduce: reduce, Type: one.Type, Src: src[r][i], Dst: want[r][i]}
						if err := c.Do(t.Context(), &call); err != nil {
							return err
						}
					}
					for _, size := range sizes {
						if err := reduceAndCompare(t.Context(), c, tensors, packing.Config{Reduce: op, BytesPerPack: size}, src[r],
							want[r]); err != nil {
							return fmt.Errorf("packs of %d bytes: %w", size, err)
						}
					}
					return nil
				}) {
					if err != nil {
						t.Fatalf("%s, rank %d of %d, %v: %v", name, r, n, op, err)
					}
				}
			}
		}
	}
}

// reduceAndCompare reduces twice, by Do and by Start and Wait.
func reduceAndCompare(ctx context.Context, c collective.Communicator, tensors []packing.Tensor, cfg packing.Config, src,
	want []tensor.Memory,
) error {
	r, err := packing.NewReducer(c, tensors, cfg)
	if err != nil {
		return err
	}
	for _, blocking := range []bool{true, false} {
		got := memories(tensors, rand.New(rand.NewPCG(7, 7)))
		if blocking {
			if err := r.Do(ctx, got, src); err != nil {
				return err
			}
		} else {
			if err := r.Start(ctx, got, src); err != nil {
				return err
			}
			for k := range r.Packs() {
				if err := r.Wait(ctx, len(r.Packs())-1-k); err != nil { // in any order
					return err
				}
			}
		}
		for i := range tensors {
			if !bytes.Equal(got[i].HostBytes(), want[i].HostBytes()) {
				return fmt.Errorf("tensor %d, %v [%d]: other bits than in a separate call", i, tensors[i].Type, tensors[i].Count)
			}
		}
	}
	return nil
}

func TestReduceDoesNotAllocate(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	const runs = 50
	g := open(t, mem.New(2))
	for r, err := range each(g, func(c collective.Communicator) error {
		tensors := of(tensor.Float32, 10, 1000, 20_000, 7, 300)
		reducer, err := packing.NewReducer(c, tensors, packing.Config{Reduce: collective.Mean, BytesPerPack: 4000})
		if err != nil {
			return err
		}
		src, dst := memories(tensors, rand.New(rand.NewPCG(1, 2))), memories(tensors, rand.New(rand.NewPCG(1, 2)))
		reduce := func() {
			err = errors.Join(err, reducer.Do(t.Context(), dst, src), reducer.Start(t.Context(), dst, src),
				reducer.Finish(t.Context()))
		}
		if c.Rank() > 0 { // testing.AllocsPerRun counts the whole process: one rank measures
			for range runs + 1 {
				reduce()
			}
			return err
		}
		if allocs := testing.AllocsPerRun(runs, reduce); allocs > 0 {
			t.Errorf("%v allocations, want none", allocs)
		}
		return err
	}) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
}

// gate is a communicator that delays its calls until they are released.
type gate struct {
	collective.Communicator
	let chan func() // what to do before the next call; nil: nothing
}

func (g *gate) Start(ctx context.Context, call *collective.Call) (collective.Handle, error) {
	if before := <-g.let; before != nil {
		before()
	}
	return g.Communicator.Start(ctx, call)
}

// TestPacksCompleteOneByOne checks that a pack is complete while a peer has not begun the next one.
func TestPacksCompleteOneByOne(t *testing.T) {
	g := open(t, mem.New(2))
	let := make(chan func())
	errs := each(g, func(c collective.Communicator) error {
		tensors := of(tensor.Float32, 3, 2, 1)
		if c.Rank() == 1 {
			c = &gate{c, let}
		}
		r, err := packing.NewReducer(c, tensors, packing.Config{BytesPerPack: 1})
		if err != nil {
			return err
		}
		x := memories(tensors, rand.New(rand.NewPCG(3, 4)))
		if c.Rank() == 1 {
			return errors.Join(r.Start(t.Context(), x, x), r.Finish(t.Context()))
		}
		if err := r.Start(t.Context(), x, x); err != nil {
			return err
		}
		for k := range r.Packs() {
			let <- nil // only now does the peer make this pack's call; it blocks before the next one
			if err := r.Wait(t.Context(), k); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestFirstCause checks that when a peer ends between two packs, the packs before are complete and all later ones fail
// with one cause.
func TestFirstCause(t *testing.T) {
	g := open(t, mem.New(2))
	cause := errors.New("enough")
	let := make(chan func())
	errs := each(g, func(c collective.Communicator) error {
		tensors := of(tensor.Float32, 4, 3, 2, 1)
		own := c
		if c.Rank() == 1 {
			c = &gate{c, let}
		}
		r, err := packing.NewReducer(c, tensors, packing.Config{BytesPerPack: 1})
		if err != nil {
			return err
		}
		x := memories(tensors, rand.New(rand.NewPCG(3, 4)))
		if c.Rank() == 1 {
			if err := r.Start(t.Context(), x, x); err != nil {
				return err // the calls are in flight; Finish returns their result
			}
			if err := r.Finish(t.Context()); !errors.Is(err, cause) {
				return fmt.Errorf("the rank that gave up: got %w, want %w", err, cause)
			}
			return nil
		}
		if err := r.Start(t.Context(), x, x); err != nil {
			return err
		}
		let <- nil
		let <- nil
		for k := range 2 {
			if err := r.Wait(t.Context(), k); err != nil {
				return err
			}
		}
		let <- func() { own.Abort(cause) }
		let <- nil
		first := r.Wait(t.Context(), 3)
		if !errors.Is(first, cause) {
			return fmt.Errorf("got %w, want %w", first, cause)
		}
		for _, k := range []int{2, 3, 0} {
			if err := r.Wait(t.Context(), k); err != first {
				return fmt.Errorf("pack %d: got %w, want the first cause %w", k, err, first)
			}
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestOtherTensors checks that ranks whose lists differ inside a pack get an error before anything is added.
func TestOtherTensors(t *testing.T) {
	for what, change := range map[string]func(*packing.Tensor){
		"shape": func(t *packing.Tensor) { t.Shape = []int{3, 2} },
		"name":  func(t *packing.Tensor) { t.Name = "v" },
		"dtype": func(t *packing.Tensor) { t.Type = tensor.Int32 },
		"size":  func(t *packing.Tensor) { t.Shape, t.Count = []int{5}, 5 },
	} {
		g := open(t, mem.New(2))
		for r, err := range each(g, func(c collective.Communicator) error {
			tensors := []packing.Tensor{
				{Name: "bias", Type: tensor.Float32, Shape: []int{2}, Count: 2},
				{Name: "w", Type: tensor.Float32, Shape: []int{2, 3}, Count: 6},
				{Name: "scale", Type: tensor.Float32, Shape: []int{}, Count: 1},
			}
			if c.Rank() == 1 {
				change(&tensors[1])
			}
			r, err := packing.NewReducer(c, tensors, packing.Config{BytesPerPack: packing.OnePack})
			if err != nil {
				return err
			}
			x := memories(tensors, rand.New(rand.NewPCG(5, 6)))
			return r.Do(t.Context(), x, x)
		}) {
			if !errors.Is(err, collective.ErrMismatch) || !strings.Contains(err.Error(), "scale") {
				t.Errorf("another %s, rank %d: got %v, want a mismatch that names the tensors", what, r, err)
			}
		}
	}
}

func TestReducerErrors(t *testing.T) {
	g := open(t, mem.New(1))
	c := g.Local()[0]
	for want, tensors := range map[string][]packing.Tensor{
		"tensor 1: a reduction of bool":                   {{Type: tensor.Float32, Count: 1}, {Type: tensor.Bool, Count: 1}},
		"tensor 0 (w): its number of elements is unknown": {{Name: "w", Type: tensor.Float32, Count: -1}},
	} {
		if _, err := packing.NewReducer(c, tensors, packing.Config{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if _, err := packing.NewReducer(c, nil, packing.Config{BytesPerPack: -1}); err == nil {
		t.Error("-1 bytes per pack: no error")
	}
	tensors := of(tensor.Float32, 2, 1)
	r, err := packing.NewReducer(c, tensors, packing.Config{})
	if err != nil {
		t.Fatal(err)
	}
	x := memories(tensors, rand.New(rand.NewPCG(5, 6)))
	if err := r.Start(t.Context(), x, x[:1]); err == nil || !strings.Contains(err.Error(), "1 sources for 2 tensors") {
		t.Errorf("got %v", err)
	}
	if err := r.Do(t.Context(), x, []tensor.Memory{x[0], x[0]}); err == nil ||
		!strings.Contains(err.Error(), "has 4 bytes; its source has 8") {
		t.Errorf("got %v", err)
	}
	if err := r.Start(t.Context(), x, x); err != nil {
		t.Fatal(err)
	}
	if err := r.Do(t.Context(), x, x); err == nil || !strings.Contains(err.Error(), "a reduction is in progress") {
		t.Errorf("got %v", err)
	}
	if err := r.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Do(t.Context(), x, x); err != nil {
		t.Errorf("after Finish: %v", err)
	}
}
