// Package librarytest is the conformance suite of the drivers of package library, and of the communicators on them.
package librarytest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

var ops = []collective.Op{
	collective.AllReduce, collective.Broadcast, collective.Barrier, collective.Reduce, collective.ReduceScatter,
	collective.AllGather,
	collective.Gather, collective.Scatter, collective.AllToAll,
}

// Exercise makes random calls of every operation, dtype and reduction on all local ranks of a group, and verifies the
// results. Every process must call it with the same seed. Sums add small integers, so they are exact in any order. At
// the end each rank sends a message to the next one, and the group is split. Exercise returns the number of calls of
// each operation.
func Exercise(ctx context.Context, g collective.Group, seed uint64, calls int, dtypes []tensor.DType) (map[string]int,
	error,
) {
	random := rand.New(rand.NewPCG(seed, 1))
	size := g.Local()[0].Size()
	done := map[string]int{}
	for i := range calls {
		e := draw(random, ops[i%len(ops)], dtypes[(i/len(ops))%len(dtypes)], size)
		if err := e.carryOut(ctx, g, i%3); err != nil {
			return done, fmt.Errorf("seed %d, call %d, %v: %w", seed, i, e, err)
		}
		done[e.op.String()]++
		done[e.dtype.String()]++
	}
	if err := each(g, func(c collective.Communicator) error { return passOn(ctx, c) }); err != nil {
		return done, fmt.Errorf("seed %d, messages: %w", seed, err)
	}
	if err := each(g, func(c collective.Communicator) error { return splitUp(ctx, c) }); err != nil {
		return done, fmt.Errorf("seed %d, Split: %w", seed, err)
	}
	return done, nil
}

// example is a call: the input of every rank, and its expected output.
type example struct {
	op     collective.Op
	reduce collective.ReduceOp
	dtype  tensor.DType
	root   int
	counts []int // given to the call
	parts  []int // of each rank, in elements
	total  int
	gives  [][]byte
	wants  [][]byte // nil: nothing
}

func (e *example) String() string {
	return fmt.Sprintf("%v %v of %d %v, parts %v, root %d", e.op, e.reduce, e.total, e.dtype, e.parts, e.root)
}

func draw(random *rand.Rand, op collective.Op, d tensor.DType, n int) *example {
	e := &example{
		op: op, dtype: d, root: random.IntN(n),
		reduce: collective.ReduceOp(random.IntN(int(collective.Prod) + 1)),
	}
	if e.reduce == collective.Mean && !d.IsFloat() {
		e.reduce = collective.Sum
	}
	uneven := op.Parted()
	most := []int{3, 50, 3000}[random.IntN(3)]
	part := random.IntN(most)
	for range n {
		if uneven && most == 50 {
			part = random.IntN(most)
		}
		e.parts = append(e.parts, part)
		e.total += part
	}
	if uneven && (most == 50 || random.IntN(2) == 0) {
		e.counts = e.parts
	}
	if op == collective.Barrier {
		e.total = 0
	}
	e.fill(random, n)
	return e
}

// fill draws the inputs of the ranks, and computes their outputs.
func (e *example) fill(random *rand.Rand, n int) {
	size := e.dtype.Bytes()
	values := make([][]int, n)
	for r := range n {
		length := e.total
		if e.op == collective.AllGather || e.op == collective.Gather {
			length = e.parts[r]
		}
		for range length {
			values[r] = append(values[r], random.IntN(3)+1)
		}
		e.gives = append(e.gives, encode(e.dtype, values[r], 1))
	}
	e.wants = make([][]byte, n)
	lo := 0
	for r := range n {
		from, to := lo*size, (lo+e.parts[r])*size
		lo += e.parts[r]
		switch e.op {
		case collective.AllReduce:
			e.wants[r] = e.reduced(values)
		case collective.Broadcast:
			e.wants[r] = e.gives[e.root]
		case collective.Reduce:
			if r == e.root {
				e.wants[r] = e.reduced(values)
			}
		case collective.ReduceScatter:
			e.wants[r] = e.reduced(values)[from:to]
		case collective.AllGather:
			e.wants[r] = bytes.Join(e.gives, nil)
		case collective.Gather:
			if r == e.root {
				e.wants[r] = bytes.Join(e.gives, nil)
			}
		case collective.Scatter:
			e.wants[r] = e.gives[e.root][from:to]
		case collective.AllToAll:
			for _, g := range e.gives {
				e.wants[r] = append(e.wants[r], g[from:to]...)
			}
		}
	}
}

// reduced is the reduction of whole numbers.
func (e *example) reduced(values [][]int) []byte {
	out := make([]int, e.total)
	for i := range out {
		out[i] = values[0][i]
		for _, v := range values[1:] {
			switch e.reduce {
			case collective.Min:
				out[i] = min(out[i], v[i])
			case collective.Max:
				out[i] = max(out[i], v[i])
			case collective.Prod:
				out[i] *= v[i]
			default:
				out[i] += v[i]
			}
		}
	}
	by := 1
	if e.reduce == collective.Mean {
		by = len(values)
	}
	return encode(e.dtype, out, by)
}

// encode writes whole numbers, divided.
func encode(d tensor.DType, values []int, by int) []byte {
	out := make([]byte, 0, len(values)*d.Bytes())
	for _, v := range values {
		switch d {
		case tensor.Float64:
			out = append(out, tensor.HostMemory([]float64{float64(v) / float64(by)}).HostBytes()...)
		case tensor.Float32:
			out = append(out, tensor.HostMemory([]float32{float32(v) / float32(by)}).HostBytes()...)
		case tensor.Float16:
			out = append(out, tensor.HostMemory([]uint16{uint16(tensor.F16From(float32(v) / float32(by)))}).HostBytes()...)
		case tensor.BFloat16:
			out = append(out, tensor.HostMemory([]uint16{uint16(tensor.BF16From(float32(v) / float32(by)))}).HostBytes()...)
		default:
			for range d.Bytes() {
				out = append(out, byte(v))
				v >>= 8
			}
		}
	}
	return out
}

// halves returns a memory as a list of two.
func halves(m tensor.Memory, d tensor.DType) []tensor.Memory {
	b := m.HostBytes()
	n := len(b) / d.Bytes() / 2 * d.Bytes()
	return []tensor.Memory{tensor.HostMemory(b[:n]), tensor.HostMemory(b[n:])}
}

// carryOut makes the call on all local ranks: each by Do, each by Start, or one caller for all of them.
func (e *example) carryOut(ctx context.Context, g collective.Group, manner int) error {
	locals := g.Local()
	calls := make([]collective.Call, len(locals))
	dsts := make([][]byte, len(locals))
	name := &collective.Manifest{Name: "example"}
	for i, c := range locals {
		r := c.Rank()
		src := bytes.Clone(e.gives[r])
		dsts[i] = make([]byte, len(e.wants[r]))
		if (e.op == collective.AllReduce || e.op == collective.Broadcast) && e.total%2 == 0 { // in place
			dsts[i] = src
		}
		calls[i] = collective.Call{
			Op: e.op, Reduce: e.reduce, Type: e.dtype, Root: e.root, Counts: e.counts, Src: tensor.HostMemory(src),
			Dst: tensor.HostMemory(dsts[i]), Manifest: name,
		}
		if call := &calls[i]; (e.total+r)%3 == 0 {
			call.SrcList, call.DstList = halves(call.Src, e.dtype), halves(call.Dst, e.dtype)
			call.Src, call.Dst = tensor.Memory{}, tensor.Memory{}
		}
	}
	var err error
	if manner == 2 {
		err = g.DoAll(ctx, calls)
	} else {
		at := map[int]int{}
		for i, c := range locals {
			at[c.Rank()] = i
		}
		err = each(g, func(c collective.Communicator) error {
			call := &calls[at[c.Rank()]]
			if manner == 0 {
				return c.Do(ctx, call)
			}
			h, err := c.Start(ctx, call)
			if err != nil {
				return err
			}
			return h.Wait(ctx)
		})
	}
	if err != nil {
		return err
	}
	for i, c := range locals {
		if want := e.wants[c.Rank()]; want != nil && !bytes.Equal(dsts[i], want) {
			return fmt.Errorf("rank %d got %x, want %x", c.Rank(), dsts[i], want)
		}
	}
	return nil
}

// passOn sends a vector to the next rank and receives that of the one before.
func passOn(ctx context.Context, c collective.Communicator) error {
	n, r := c.Size(), c.Rank()
	if n == 1 {
		return nil
	}
	for count := range 5 {
		mine, theirs := make([]float32, 100*count), make([]float32, 100*count)
		for i := range mine {
			mine[i] = float32(1000*r + i)
		}
		send := &collective.Call{Op: collective.Send, Type: tensor.Float32, Peer: (r + 1) % n, Src: tensor.HostMemory(mine)}
		recv := &collective.Call{
			Op: collective.Recv, Type: tensor.Float32, Peer: (r + n - 1) % n,
			Dst: tensor.HostMemory(theirs),
		}
		first, second := send, recv
		if r%2 == 1 || r == n-1 { // no side relies on buffers
			first, second = recv, send
		}
		if err := c.Do(ctx, first); err != nil {
			return err
		}
		if err := c.Do(ctx, second); err != nil {
			return err
		}
		for i, v := range theirs {
			if v != float32(1000*recv.Peer+i) {
				return fmt.Errorf("rank %d got %v of rank %d at %d", r, v, recv.Peer, i)
			}
		}
	}
	return nil
}

// splitUp splits into the even and the odd ranks, in reverse order, and adds up in each.
func splitUp(ctx context.Context, c collective.Communicator) error {
	s, err := c.Split(ctx, c.Rank()%2, -c.Rank())
	if err != nil {
		return err
	}
	want := float64(0)
	var order []int
	for r := c.Size() - 1; r >= 0; r-- {
		if r%2 == c.Rank()%2 {
			want += float64(r)
			order = append(order, r)
		}
	}
	if s.Size() != len(order) || order[s.Rank()] != c.Rank() {
		return fmt.Errorf("rank %d is %d of %d, want the order %v", c.Rank(), s.Rank(), s.Size(), order)
	}
	mine, sum := []float64{float64(c.Rank())}, []float64{0}
	call := &collective.Call{
		Op: collective.AllReduce, Type: tensor.Float64, Src: tensor.HostMemory(mine),
		Dst: tensor.HostMemory(sum),
	}
	if err := s.Do(ctx, call); err != nil {
		return err
	}
	if sum[0] != want {
		return fmt.Errorf("rank %d: the sum over %v is %v", c.Rank(), order, sum[0])
	}
	all := make([]float64, s.Size())
	gather := &collective.Call{
		Op: collective.AllGather, Type: tensor.Float64, Src: tensor.HostMemory(mine),
		Dst: tensor.HostMemory(all),
	}
	if err := s.Do(ctx, gather); err != nil {
		return err
	}
	for i, r := range order {
		if all[i] != float64(r) {
			return fmt.Errorf("rank %d: gathered %v of ranks %v", c.Rank(), all, order)
		}
	}
	none, err := c.Split(ctx, -1, 0)
	if err != nil || none != nil {
		return fmt.Errorf("a Split without a color: %v, %w", none, err)
	}
	return s.Close()
}

// each runs f for each local rank concurrently.
func each(g collective.Group, f func(collective.Communicator) error) error {
	var wg sync.WaitGroup
	locals := g.Local()
	errs := make([]error, len(locals))
	for i, c := range locals {
		wg.Go(func() { errs[i] = f(c) })
	}
	wg.Wait()
	return cmp.Or(errs...)
}
