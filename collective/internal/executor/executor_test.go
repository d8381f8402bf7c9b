package executor_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// world is the executors of all ranks of a group, in this process.
type world struct {
	ends    []transport.Endpoint
	ranks   []*rank
	places  []plan.Place // nil: one domain
	stage   int          // bytes of one half of a staging buffer
	failed  atomic.Bool
	calls   uint64
	private func(rank int) (*executor.Plan, error)
}

// rank is the layer above one executor.
type rank struct {
	*executor.Executor
	world  *world
	rank   int
	end    transport.Endpoint
	domain []int

	queries int // of Failed
	failAt  int // the query that makes the communicator fail
}

func (r *rank) Failed() bool {
	if r.queries++; r.queries == r.failAt {
		r.world.failed.Store(true)
	}
	return r.world.failed.Load()
}

var errMismatch = errors.New("the calls differ")

func (r *rank) Mismatch() error { return errMismatch }

func (r *rank) PrivatePlan() (*executor.Plan, error) { return r.world.private(r.rank) }

// newWorld makes the executors of a group in which equal numbers are one domain. nil: ranks only exchange frames.
func newWorld(n int, domains []int) *world {
	w := &world{ends: mem.NewPipes(n)}
	if domains != nil {
		w.ends = transporttest.Domains(n, func(_, rank int) int { return domains[rank] })
	}
	group := executor.NewGroup(n)
	for i, end := range w.ends {
		r := &rank{world: w, rank: i, end: end}
		offers := end.Capabilities()
		cfg := executor.Config{End: end, Domain: offers.Domain(i), Group: group, Caller: r}
		r.domain, w.stage = cfg.Domain, offers.StagingBytes/2
		if cfg.OneProcess = len(cfg.Domain) == n; !cfg.OneProcess {
			w.places = append(w.places, plan.Place(offers.Places[i]))
		}
		r.Executor = executor.New(cfg)
		w.ranks = append(w.ranks, r)
	}
	return w
}

// problem completes a problem by what the world knows.
func (w *world) problem(p plan.Problem, elementBytes int) plan.Problem {
	p.Size, p.Places, p.Stage = len(w.ranks), w.places, w.stage/max(1, elementBytes)
	if w.places != nil {
		p.Stage = 32 << 10 / max(1, elementBytes)
	}
	return p
}

// each executes a function on every rank, concurrently, and returns the errors by rank.
func (w *world) each(f func(r *rank) error) []error {
	errs := make([]error, len(w.ranks))
	var all sync.WaitGroup
	for i, r := range w.ranks {
		all.Go(func() { errs[i] = f(r) })
	}
	all.Wait()
	return errs
}

func (w *world) close() {
	for _, e := range w.ends {
		e.Close()
	}
}

// slot identifies the next call.
func (w *world) slot() transport.Slot {
	h := transport.Header{Comm: 1, Seq: w.calls}
	w.calls++
	return transport.Slot{Header: h, Sum: h.Sum()}
}

// topologies are the ways in which ranks reach each other.
var topologies = map[string]func(n int) []int{
	"memory": func(n int) []int { return make([]int, n) },
	"frames": func(int) []int { return nil },
	"domains of two": func(n int) []int {
		of := make([]int, n)
		for r := range of {
			of[r] = r / 2
		}
		return of
	},
}

var reductions = []plan.ReduceOp{plan.Sum, plan.Mean, plan.Min, plan.Max, plan.Prod}

// dtypes are one type of each kind that the executor distinguishes.
var dtypes = []tensor.DType{tensor.Uint8, tensor.Int32, tensor.BFloat16, tensor.Float16, tensor.Float32, tensor.Float64}

// layouts are the ways in which the memories of a call can be the same.
const (
	apart   = "apart"
	inPlace = "in place"
	shared  = "one Dst for all ranks"
)

// TestPlansEqualOracle executes plans of every algorithm and compares the results with those of a slow oracle.
func TestPlansEqualOracle(t *testing.T) {
	executed := map[string]int{}
	for name, domains := range topologies {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				n := rapid.IntRange(1, 6).Draw(t, "ranks")
				w := newWorld(n, domains(n))
				defer w.close()
				for _, algorithm := range plan.Algorithms {
					if c := drawCase(t, w, algorithm); c != nil {
						c.check(t)
						executed[algorithm.Name]++
					}
				}
			})
		})
	}
	for _, a := range plan.Algorithms {
		if executed[a.Name] == 0 {
			t.Errorf("algorithm %s fits no call", a.Name)
		}
	}
}

// testCase is one call on all ranks.
type testCase struct {
	*world
	algorithm  plan.Algorithm
	problem    plan.Problem
	reduce     plan.ReduceOp
	dtype      tensor.DType
	partial    tensor.DType
	layout     string
	srcs, dsts [][]byte
	lists      []lists // by rank
}

// lists are the memories of a rank's call, if they are lists.
type lists struct{ src, dst []tensor.Memory }

var ops = []plan.Op{
	plan.AllReduce, plan.Broadcast, plan.Barrier, plan.Reduce, plan.ReduceScatter, plan.AllGather, plan.Gather,
	plan.Scatter, plan.AllToAll,
}

// drawCase returns a call that the algorithm can execute, or nil.
func drawCase(t *rapid.T, w *world, algorithm plan.Algorithm) *testCase {
	n := len(w.ranks)
	var fits []plan.Op
	for _, op := range ops {
		for _, order := range []plan.Order{plan.Canonical, plan.Any} {
			if algorithm.Fits(w.problem(plan.Problem{Op: op, Order: order}, 1)) == nil && !slices.Contains(fits, op) {
				fits = append(fits, op)
			}
		}
	}
	if len(fits) == 0 {
		return nil
	}
	c := &testCase{world: w, algorithm: algorithm, layout: apart}
	op := rapid.SampledFrom(fits).Draw(t, "op")
	c.dtype = rapid.SampledFrom(dtypes).Draw(t, "dtype")
	if op == plan.Barrier {
		c.dtype = 0
	}
	c.partial = c.dtype
	p := plan.Problem{Op: op, Root: 0, Order: rapid.SampledFrom([]plan.Order{plan.Canonical, plan.Any}).Draw(t, "order")}
	if op.Rooted() {
		p.Root = rapid.IntRange(0, n-1).Draw(t, "root")
	}
	if op.Reduces() {
		c.reduce = rapid.SampledFrom(reductions).Draw(t, "reduction")
		if c.reduce == plan.Mean && !c.dtype.IsFloat() {
			c.reduce = plan.Sum
		}
		if c.reduce == plan.Mean {
			p.Reduce = plan.Mean
		}
		if c.dtype.Bytes() == 2 && rapid.Bool().Draw(t, "accumulate in float32") {
			c.partial = tensor.Float32
		}
	}
	if op != plan.Barrier {
		p.Count = rapid.IntRange(0, 40).Draw(t, "count")
		if rapid.IntRange(0, 19).Draw(t, "in several segments") == 19 {
			p.Count += 300 << 10 / c.dtype.Bytes()
		}
	}
	switch op {
	case plan.ReduceScatter, plan.AllGather, plan.Gather, plan.Scatter:
		if rapid.Bool().Draw(t, "uneven parts") {
			for left := n; left > 0; left-- {
				part := p.Count - sumOf(p.Counts)
				if left > 1 {
					part = rapid.IntRange(0, part).Draw(t, "part")
				}
				p.Counts = append(p.Counts, part)
			}
			break
		}
		fallthrough
	case plan.AllToAll:
		p.Count -= p.Count % n
	}
	c.problem = w.problem(p, c.partial.Bytes())
	if algorithm.Fits(c.problem) != nil {
		return nil
	}
	layouts := []string{apart}
	if op != plan.AllToAll && op != plan.Barrier {
		layouts = append(layouts, inPlace)
	}
	if op == plan.AllReduce || op == plan.Broadcast || op == plan.AllGather {
		layouts = append(layouts, shared)
	}
	c.layout = rapid.SampledFrom(layouts).Draw(t, "layout")
	c.fill(t)
	for r := range c.ranks {
		c.lists = append(c.lists, c.cut(t, r))
		if c.layout == shared {
			c.lists[r].dst = c.lists[0].dst
		}
	}
	return c
}

// cut returns the memories of a rank's call as lists of scattered copies, or as they are. The same elements of Src and
// Dst are the same memory if they were before.
func (c *testCase) cut(t *rapid.T, r int) (l lists) {
	size := c.dtype.Bytes()
	list := func(b []byte, cuts []int) (list []tensor.Memory) {
		slices.Sort(cuts)
		for i := range len(cuts) - 1 {
			piece := aligned((cuts[i+1] - cuts[i]) * size)
			copy(piece, b[cuts[i]*size:cuts[i+1]*size])
			list = append(list, tensor.HostMemory(piece))
		}
		return list
	}
	draw := func(b []byte, more ...int) []int {
		n := len(b) / max(1, size)
		return append(rapid.SliceOfN(rapid.IntRange(0, n), 0, 6).Draw(t, "cuts"), append(more, 0, n)...)
	}
	src, dst := c.srcs[r], c.dsts[r]
	if c.problem.Op == plan.Barrier || !rapid.Bool().Draw(t, "in lists") {
		return l
	}
	if c.layout != inPlace || len(src) == 0 || len(dst) == 0 {
		l.src = list(src, draw(src))
		l.dst = list(dst, draw(dst))
		return l
	}
	lo, _ := c.problem.Part(r)
	if len(src) == len(dst) {
		l.src = list(src, draw(src))
		l.dst = l.src
		return l
	}
	long, short := &l.src, &l.dst
	whole, part := src, len(dst)/size
	if len(src) < len(dst) {
		long, short, whole, part = &l.dst, &l.src, dst, len(src)/size
	}
	*long = list(whole, draw(whole, lo, lo+part))
	at := 0
	for _, m := range *long {
		if at >= lo && at+m.Bytes/size <= lo+part {
			*short = append(*short, m)
		}
		at += m.Bytes / size
	}
	return l
}

// collect copies the memories of lists back.
func (c *testCase) collect() {
	for r, l := range c.lists {
		for _, side := range []struct {
			list []tensor.Memory
			to   []byte
		}{{l.src, c.srcs[r]}, {l.dst, c.dsts[r]}} {
			for _, m := range side.list {
				side.to = side.to[copy(side.to, m.HostBytes()):]
			}
		}
	}
}

func sumOf(ns []int) (sum int) {
	for _, n := range ns {
		sum += n
	}
	return sum
}

// fill makes the memories. In any order of combination, the values must give the same bits if the problem allows any
// order: then they are powers of two and their negatives.
func (c *testCase) fill(t *rapid.T) {
	seed := rapid.Uint64().Draw(t, "values")
	next := func() float64 {
		seed = seed*6364136223846793005 + 1442695040888963407
		v := float64(seed >> 40)
		switch {
		case !c.dtype.IsFloat():
			return float64(int(v) % 3)
		case c.problem.Order == plan.Any:
			return []float64{-1, 1, 2, 0}[int(v)%4]
		}
		return (v - 1<<23) / (1 << 22)
	}
	one := aligned(c.problem.Count * c.dtype.Bytes())
	for r := range c.ranks {
		src, dst := c.problem.Lengths(r)
		s, d := aligned(src*c.dtype.Bytes()), aligned(dst*c.dtype.Bytes())
		if c.layout == shared && dst > 0 {
			d = one
		}
		if c.layout == inPlace && src > 0 && dst > 0 {
			lo, _ := c.problem.Part(r)
			switch {
			case src == dst:
				d = s
			case src < dst:
				s = d[lo*c.dtype.Bytes():][:len(s):len(s)]
			default:
				d = s[lo*c.dtype.Bytes():][:len(d):len(d)]
			}
		}
		for i := range src {
			put(c.dtype, s, i, next())
		}
		c.srcs, c.dsts = append(c.srcs, s), append(c.dsts, d)
	}
}

// plan makes the plan of a rank.
func (c *testCase) plan(r *rank, a plan.Algorithm, p plan.Problem) *executor.Plan {
	return executor.NewPlan(a, p, r.rank, r.domain)
}

// call makes a rank's call.
func (c *testCase) call(r *rank, slot transport.Slot) *executor.Call {
	var l lists
	if c.lists != nil {
		l = c.lists[r.rank]
	}
	return &executor.Call{
		Plan: c.plan(r, c.algorithm, c.problem), Reduce: c.reduce, Type: c.dtype, Partial: c.partial, Slot: slot,
		Src: tensor.HostMemory(c.srcs[r.rank]), Dst: tensor.HostMemory(c.dsts[r.rank]),
		SrcList: l.src, DstList: l.dst,
	}
}

// check executes the call, and compares the results with the oracle's.
func (c *testCase) check(t *rapid.T) {
	want := c.oracle()
	before := make([][]byte, len(c.srcs))
	for r, s := range c.srcs {
		before[r] = bytes.Clone(s)
	}
	what := fmt.Sprintf("%d ranks, %s, %v %v %v, partial sums of %v, root %d, [%d] %v, %s", len(c.ranks), c.algorithm.Name,
		c.problem.Op, c.reduce, c.dtype, c.partial, c.problem.Root, c.problem.Count, c.problem.Counts, c.layout)
	hidden := c.problem
	hidden.Private = true
	c.private = func(rank int) (*executor.Plan, error) {
		for _, a := range append([]plan.Algorithm{c.algorithm}, plan.Algorithms...) {
			if a.Fits(hidden) == nil {
				return c.plan(c.ranks[rank], a, hidden), nil
			}
		}
		return nil, errors.New("no algorithm for private memory")
	}
	slot := c.slot()
	errs := c.each(func(r *rank) error { return r.Execute(context.Background(), c.call(r, slot)) })
	c.collect()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("%s: rank %d: %v", what, r, err)
		}
		if !bytes.Equal(c.dsts[r], want[r]) {
			t.Fatalf("%s: rank %d has other bits than the oracle", what, r)
		}
		if c.layout == apart && !bytes.Equal(c.srcs[r], before[r]) {
			t.Fatalf("%s: the source of rank %d was changed", what, r)
		}
	}
}

// oracle returns every rank's result, computed in the obvious way.
func (c *testCase) oracle() [][]byte {
	p, size := c.problem, c.dtype.Bytes()
	out := make([][]byte, len(c.ranks))
	for r := range out {
		_, dst := p.Lengths(r)
		lo, hi := p.Part(r)
		out[r] = make([]byte, dst*size)
		switch p.Op {
		case plan.AllReduce, plan.Reduce:
			if r > 0 && len(out[0]) == len(out[r]) {
				copy(out[r], out[0])
			} else {
				c.reduceTo(out[r], 0)
			}
		case plan.ReduceScatter:
			c.reduceTo(out[r], lo)
		case plan.Broadcast:
			copy(out[r], c.srcs[p.Root])
		case plan.AllGather, plan.Gather:
			if dst > 0 {
				copy(out[r], bytes.Join(c.srcs, nil))
			}
		case plan.Scatter:
			copy(out[r], c.srcs[p.Root][lo*size:hi*size])
		case plan.AllToAll:
			for from, src := range c.srcs {
				at, _ := p.Part(from)
				copy(out[r][at*size:], src[lo*size:hi*size])
			}
		}
	}
	return out
}

// reduceTo reduces the elements of all sources from lo on, along the canonical tree.
func (c *testCase) reduceTo(out []byte, lo int) {
	values := make([]float64, len(c.srcs))
	for i := range len(out) / c.dtype.Bytes() {
		for r, src := range c.srcs {
			values[r] = get(c.dtype, src, lo+i)
		}
		for n := len(values); n > 1; n = (n + 1) / 2 {
			for j := 0; j < n; j += 2 {
				if j+1 < n {
					values[j/2] = round(c.partial, combine(c.reduce, values[j], values[j+1]))
				} else {
					values[j/2] = values[j]
				}
			}
		}
		if c.reduce == plan.Mean && len(c.srcs) > 1 {
			values[0] = round(c.partial, values[0]/float64(len(c.srcs)))
		}
		put(c.dtype, out, i, values[0])
	}
}

func combine(op plan.ReduceOp, a, b float64) float64 {
	switch op {
	case plan.Min:
		return min(a, b)
	case plan.Max:
		return max(a, b)
	case plan.Prod:
		return a * b
	}
	return a + b
}

// round rounds a result to a type.
func round(t tensor.DType, x float64) float64 {
	var word uint64
	b := unsafe.Slice((*byte)(unsafe.Pointer(&word)), 8)
	put(t, b, 0, x)
	return get(t, b, 0)
}

func put(t tensor.DType, b []byte, i int, x float64) {
	p := unsafe.Pointer(&b[i*t.Bytes()])
	switch t {
	case tensor.Uint8:
		*(*uint8)(p) = uint8(int64(x))
	case tensor.Int32:
		*(*int32)(p) = int32(int64(x))
	case tensor.BFloat16:
		*(*tensor.BF16)(p) = tensor.BF16From(float32(x))
	case tensor.Float16:
		*(*tensor.F16)(p) = tensor.F16From(float32(x))
	case tensor.Float32:
		*(*float32)(p) = float32(x)
	case tensor.Float64:
		*(*float64)(p) = x
	default:
		panic(t)
	}
}

func get(t tensor.DType, b []byte, i int) float64 {
	p := unsafe.Pointer(&b[i*t.Bytes()])
	switch t {
	case tensor.Uint8:
		return float64(*(*uint8)(p))
	case tensor.Int32:
		return float64(*(*int32)(p))
	case tensor.BFloat16:
		return float64((*(*tensor.BF16)(p)).Float32())
	case tensor.Float16:
		return float64((*(*tensor.F16)(p)).Float32())
	case tensor.Float32:
		return float64(*(*float32)(p))
	case tensor.Float64:
		return *(*float64)(p)
	}
	panic(t)
}

// aligned returns bytes at an address that suits every type.
func aligned(n int) []byte {
	words := make([]uint64, n/8+1)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), n)
}

// find returns the algorithm with a name.
func find(t testing.TB, name string) plan.Algorithm {
	a, ok := plan.FindAlgorithm(name)
	if !ok {
		t.Fatalf("no algorithm %q", name)
	}
	return a
}

// sum returns an all-reduce.
func (w *world) sum(t testing.TB, algorithm string, count int) *testCase {
	c := &testCase{world: w, algorithm: find(t, algorithm), dtype: tensor.Float32, partial: tensor.Float32}
	c.problem = w.problem(plan.Problem{Op: plan.AllReduce, Count: count, Order: plan.Canonical}, 4)
	for range w.ranks {
		c.srcs, c.dsts = append(c.srcs, aligned(4*count)), append(c.dsts, aligned(4*count))
	}
	return c
}

// TestOtherCall checks that a frame of another call, and a slot of one, are rejected.
func TestOtherCall(t *testing.T) {
	for name, algorithm := range map[string]string{"frames": "recursive_doubling", "memory": "direct"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(2, topologies[name](2))
			defer w.close()
			c := w.sum(t, algorithm, 8)
			errs := w.each(func(r *rank) error {
				slot := transport.Slot{Header: transport.Header{Names: uint64(r.rank)}}
				slot.Sum = slot.Header.Sum()
				err := r.Execute(context.Background(), c.call(r, slot))
				w.failed.Store(true)
				r.end.Fail(nil)
				r.Leave(c.call(r, slot))
				return err
			})
			rejected := 0
			for rank, err := range errs {
				var other *executor.OtherCall
				down := (*transport.PeerDown)(nil)
				switch {
				case errors.As(err, &other):
					if other.Peer != 1-rank || other.Header.Names != uint64(1-rank) {
						t.Errorf("rank %d rejects %+v", rank, other)
					}
					rejected++
				case errors.Is(err, errMismatch):
					rejected++
				case !errors.As(err, &down):
					t.Errorf("rank %d: %v", rank, err)
				}
			}
			if rejected == 0 {
				t.Errorf("no rank rejects the other's call: %v", errs)
			}
		})
	}
}

// TestTornCall checks that a call that all ranks have entered ends on all of them alike if the communicator fails.
func TestTornCall(t *testing.T) {
	w := newWorld(3, topologies["memory"](3))
	defer w.close()
	c := w.sum(t, "direct", 1<<20)
	slot := w.slot()
	w.ranks[1].failAt = 2 // its first query is before the call, its second in the call's first segment
	errs := w.each(func(r *rank) error {
		call := c.call(r, slot)
		err := r.Execute(context.Background(), call)
		r.Leave(call)
		return err
	})
	for rank, err := range errs {
		if !errors.Is(err, executor.ErrFailed) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

// TestWithdraw checks that a rank whose context ends before all have entered leaves, and that the call then never
// starts.
func TestWithdraw(t *testing.T) {
	w := newWorld(2, topologies["memory"](2))
	defer w.close()
	c := w.sum(t, "direct", 8)
	slot := w.slot()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := w.ranks[0].Execute(ctx, c.call(w.ranks[0], slot)); !errors.Is(err, context.Canceled) {
		t.Errorf("rank 0: %v", err)
	}
	if got := w.ranks[0].Missing(nil); !slices.Equal(got, []int{1}) {
		t.Errorf("rank 0 waited for ranks %v", got)
	}
	err := w.ranks[1].Execute(context.Background(), c.call(w.ranks[1], slot))
	if !errors.Is(err, transport.ErrInterrupted) {
		t.Errorf("rank 1: %v", err)
	}
}

// TestMessage sends vectors of several lengths with one reused plan.
func TestMessage(t *testing.T) {
	w := newWorld(2, nil)
	defer w.close()
	plans := make([]executor.Plan, 2)
	for i, count := range []int{3, 0, 200 << 10} {
		data := [2][]byte{aligned(4 * count), aligned(4 * count)}
		for j := range data[0] {
			data[0][j] = byte(i + j)
		}
		slot := w.slot()
		for rank, err := range w.each(func(r *rank) error {
			p := &plans[r.rank]
			p.Message(1-r.rank, count, r.rank == 0)
			m := tensor.HostMemory(data[r.rank])
			return r.Execute(context.Background(), &executor.Call{
				Plan: p, Type: tensor.Float32, Partial: tensor.Float32, Src: m, Dst: m, Slot: slot,
			})
		}) {
			if err != nil {
				t.Fatalf("rank %d: %v", rank, err)
			}
		}
		if !bytes.Equal(data[0], data[1]) {
			t.Errorf("%d elements: other bytes", count)
		}
	}
}

// TestAllocations checks that repeated calls allocate nothing.
func TestAllocations(t *testing.T) {
	for _, test := range [][2]string{
		{"frames", "recursive_doubling"},
		{"frames", "ring"},
		{"memory", "recursive_doubling"},
		{"memory", "direct"},
		{"memory", "staged"},
	} {
		name, algorithm := test[0], test[1]
		for _, count := range []int{8, 200 << 10} {
			w := newWorld(2, topologies[name](2))
			c := w.sum(t, algorithm, count)
			calls := []*executor.Call{c.call(w.ranks[0], w.slot()), c.call(w.ranks[1], transport.Slot{})}
			calls[1].Slot = calls[0].Slot
			next, done := make(chan struct{}), make(chan error)
			execute := func(rank int) error {
				h := &calls[rank].Slot
				h.Seq++
				h.Sum += transport.SumStep
				return w.ranks[rank].Execute(context.Background(), calls[rank])
			}
			go func() {
				for range next {
					done <- execute(1)
				}
			}()
			got := testing.AllocsPerRun(20, func() {
				next <- struct{}{}
				if err := errors.Join(execute(0), <-done); err != nil {
					t.Error(err)
				}
			})
			close(next)
			if got > 0 {
				t.Errorf("%s, %s, %d elements: %v allocations per call", name, algorithm, count, got)
			}
			w.close()
		}
	}
}
