package collective_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
)

var collectives = []collective.Op{
	collective.AllReduce, collective.Broadcast, collective.Reduce, collective.ReduceScatter, collective.AllGather,
	collective.Gather, collective.Scatter, collective.AllToAll,
}

// exampleCall is a random call of an operation: what every rank contributes, and the result that it must get, bit for
// bit.
type exampleCall struct {
	op         collective.Op
	reduce     collective.ReduceOp
	dtype      tensor.DType
	accumulate collective.Accumulate
	root       int
	counts     []int // given to the call
	parts      []int // of each rank, in elements
	total      int
	vectors    [][]byte // by rank: the whole vector that it gives, or its part, or the blocks for all
	want       [][]byte // by rank; nil: nothing
	inPlace    bool
}

func (c *exampleCall) String() string {
	return fmt.Sprintf("%v %v %v of %d elements, parts %v, root %d, in place %v, accumulate %d", c.op, c.reduce, c.dtype,
		c.total, c.parts, c.root, c.inPlace, c.accumulate)
}

// newExample draws a call over n ranks.
func newExample(random *rand.Rand, op collective.Op, n, most int) *exampleCall {
	c := &exampleCall{
		op: op, dtype: numeric[random.IntN(len(numeric))], root: random.IntN(n), inPlace: random.IntN(3) == 0,
	}
	c.accumulate = []collective.Accumulate{collective.AccumulateDType, collective.AccumulateFloat32}[random.IntN(2)]
	if c.reduce = collective.ReduceOp(random.IntN(int(collective.Prod) + 1)); c.reduce == collective.Mean &&
		!c.dtype.IsFloat() {
		c.reduce = collective.Sum
	}
	uneven := slices.Contains([]collective.Op{
		collective.ReduceScatter, collective.AllGather, collective.Gather, collective.Scatter,
	}, op)
	each := random.IntN(most/n + 1)
	for range n {
		part := each
		if uneven && random.IntN(4) > 0 {
			part = random.IntN(most/n + 1)
			c.counts = c.parts // not nil
		}
		c.parts = append(c.parts, part)
		c.total += part
	}
	if uneven {
		c.counts = slices.Clone(c.parts)
		if !slices.ContainsFunc(c.parts, func(p int) bool { return p != c.parts[0] }) && random.IntN(2) == 0 {
			c.counts = nil
		}
	} else {
		c.counts = nil
	}
	if op == collective.AllToAll {
		c.inPlace = false
	}
	c.fill(random, n)
	return c
}

// fill draws the contributions of the ranks, and computes their expected results.
func (c *exampleCall) fill(random *rand.Rand, n int) {
	size := c.dtype.Bytes()
	offsets := make([]int, n+1)
	for r, p := range c.parts {
		offsets[r+1] = offsets[r] + p*size
	}
	whole := c.total * size
	c.vectors, c.want = make([][]byte, n), make([][]byte, n)
	for r := range n {
		length := whole
		if c.op == collective.AllGather || c.op == collective.Gather {
			length = c.parts[r] * size
		}
		c.vectors[r] = aligned(length)
		fill(random, c.dtype, c.vectors[r])
	}
	sum := func() []byte {
		return reduced(c.reduce, c.dtype, c.accumulate == collective.AccumulateFloat32, c.vectors)
	}
	for r := range n {
		lo, hi := offsets[r], offsets[r+1]
		switch c.op {
		case collective.AllReduce:
			c.want[r] = sum()
		case collective.Broadcast:
			c.want[r] = c.vectors[c.root]
		case collective.Reduce:
			if r == c.root {
				c.want[r] = sum()
			}
		case collective.ReduceScatter:
			c.want[r] = sum()[lo:hi]
		case collective.AllGather:
			c.want[r] = bytes.Join(c.vectors, nil)
		case collective.Gather:
			if r == c.root {
				c.want[r] = bytes.Join(c.vectors, nil)
			}
		case collective.Scatter:
			c.want[r] = c.vectors[c.root][lo:hi]
		case collective.AllToAll:
			for from := range n {
				c.want[r] = append(c.want[r], c.vectors[from][lo:hi]...)
			}
		}
	}
}

// memories returns a rank's memories for the call: in place as NCCL defines it, or disjoint.
func (c *exampleCall) memories(rank int, allocate func(bytes int) []byte) (src, dst []byte) {
	size := c.dtype.Bytes()
	lo := 0
	for _, p := range c.parts[:rank] {
		lo += p * size
	}
	own := c.parts[rank] * size
	src = allocate(len(c.vectors[rank]))
	dst = allocate(len(c.want[rank]))
	if c.inPlace && c.want[rank] != nil {
		switch {
		case len(src) == len(dst) && c.op != collective.AllGather && c.op != collective.Gather &&
			c.op != collective.Scatter && c.op != collective.ReduceScatter:
			dst = src
		case c.op == collective.AllGather || c.op == collective.Gather:
			src = dst[lo : lo+own]
		case c.op == collective.ReduceScatter || c.op == collective.Scatter && rank == c.root:
			dst = src[lo : lo+own]
		}
	}
	copy(src, c.vectors[rank])
	return src, dst
}

// run executes the call on a rank and compares the result with the oracle.
func (c *exampleCall) run(comm collective.Communicator, row string, allocate func(bytes int) []byte) error {
	src, dst := c.memories(comm.Rank(), allocate)
	call := &collective.Call{
		Op: c.op, Reduce: c.reduce, Type: c.dtype, Counts: c.counts, Root: c.root,
		Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst),
		Options: &collective.Options{Accumulate: c.accumulate, Algorithm: row},
	}
	if err := comm.Do(background, call); err != nil {
		return err
	}
	if want := c.want[comm.Rank()]; want != nil && !bytes.Equal(dst, want) {
		return fmt.Errorf("%w: %s", errWrong, firstDifference(c.dtype, dst, want))
	}
	if given := c.vectors[comm.Rank()]; !c.inPlace && !bytes.Equal(src, given) {
		return fmt.Errorf("%w: the source was changed", errWrong)
	}
	return nil
}

// rowsFor returns the chooser's row, and a random selection of those that implement the operation: over all sizes and
// placements each is selected often enough.
func rowsFor(random *rand.Rand, w *world, op collective.Op) []string {
	const some = 2
	p := plan.Problem{
		Op: op, Size: len(w.comms), Count: 2 * len(w.comms), Places: w.places, Order: collective.Canonical, Stage: 1 << 12,
	}
	var rows []string
	for _, i := range random.Perm(len(plan.Algorithms)) {
		if row := plan.Algorithms[i].Name; len(rows) < some {
			if _, err := chooser.Named(row, p, w.where); err == nil {
				rows = append(rows, row)
			}
		}
	}
	return append(rows, "")
}

// TestEveryOperation checks that every operation returns the bits of the oracle, in every placement, by rows that
// implement it there and by the chooser's row, in place and not, with parts of any length.
func TestEveryOperation(t *testing.T) {
	t.Parallel()
	for _, p := range placements {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			random := seeded(t)
			done := map[string]int{}
			for _, n := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9} {
				if testing.Short() && n > 4 {
					t.Log("-short: only up to 4 ranks, more repeat what these show")
					break
				}
				w := p.world(t, n, collective.Config{})
				for _, op := range collectives {
					for _, row := range rowsFor(random, w, op) {
						examples := 1 + 4/(n+1)
						if testing.Short() {
							examples = 1 // the full run has more of each
						}
						for i := range examples {
							most := 300
							if i == 0 && n == 2+int(op)%2 {
								most = 160_000 // several segments
							}
							c := newExample(random, op, n, most)
							errs := w.each(func(comm collective.Communicator) error { return c.run(comm, row, aligned) })
							if errors.Is(errs[0], collective.ErrInvalid) && row != "" {
								w.close(t)
								w = p.world(t, n, collective.Config{})
								break // the row does not carry it out here
							}
							for r, err := range errs {
								if err != nil {
									t.Fatalf("%d ranks, row %q, %v: rank %d: %v", n, row, c, r, err)
								}
							}
							done[row]++
						}
					}
				}
				w.close(t)
			}
			t.Log(done)
		})
	}
}
