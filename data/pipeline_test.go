package data_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// example is element i of the datasets of these tests: several dtypes, shapes and strings, in a custom
// struct.
type example struct {
	ID     *tensor.Tensor
	Pair   *tensor.Tensor
	Word   *tensor.Tensor
	Absent *tensor.Tensor
}

func exampleOf(i int) example {
	return example{
		ID:   tensor.Scalar(int32(i)),
		Pair: tensor.From([]float32{float32(i), -float32(i)}),
		Word: tensor.Strings([]string{fmt.Sprint("w", i)}, []int{}...),
	}
}

// sources makes the same dataset of n examples in every way there is.
func sources(n int) map[string]data.Pipeline {
	ids := make([]int32, n)
	pairs := make([]float32, 0, 2*n)
	words := make([]string, n)
	for i := range n {
		ids[i] = int32(i)
		pairs = append(pairs, float32(i), -float32(i))
		words[i] = fmt.Sprint("w", i)
	}
	return map[string]data.Pipeline{
		"tensors": fromTensors(example{ID: tensor.Of(ids), Pair: tensor.Of(pairs, n, 2), Word: tensor.Strings(words)}),
		"func": data.FromFunc(n, func(_ context.Context, i int) (data.Element, error) {
			return exampleOf(i), nil
		}),
		"seq": data.FromSeq(n, func(context.Context) iter.Seq2[data.Element, error] {
			return func(yield func(data.Element, error) bool) {
				for i := range n {
					if !yield(exampleOf(i), nil) {
						return
					}
				}
			}
		}),
	}
}

// ids returns the numbers of the examples in an element, batched or not, and checks its other tensors against them.
func ids(t interface {
	Helper()
	Fatalf(string, ...any)
}, e data.Element,
) []int {
	t.Helper()
	x, ok := e.(example)
	if !ok {
		t.Fatalf("got a %T", e)
	}
	var out []int
	for i, id := range tensor.Data[int32](x.ID) {
		out = append(out, int(id))
		pair := tensor.Data[float32](x.Pair)[2*i : 2*i+2]
		if pair[0] != float32(id) || pair[1] != -float32(id) || x.Word.StringData()[i] != fmt.Sprint("w", id) ||
			x.Absent != nil {
			t.Fatalf("example %d has pair %v and word %q", id, pair, x.Word.StringData()[i])
		}
	}
	if n := len(x.Pair.Shape()); n != x.ID.Rank()+1 || x.Pair.Len() != 2*len(out) ||
		!slices.Equal(x.Word.Shape(), x.ID.Shape()) {
		t.Fatalf("got shapes %v, %v, %v", x.ID.Shape(), x.Pair.Shape(), x.Word.Shape())
	}
	return out
}

// TestPipelineAgainstSlices draws pipelines and compares them with the same operations on slices.
func TestPipelineAgainstSlices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 20).Draw(t, "examples")
		epoch := rapid.IntRange(0, 3).Draw(t, "epoch")
		got := sources(n)
		want := make([][]int, n) // elements, each the ids in it
		for i := range want {
			want[i] = []int{i}
		}
		batched := false
		for range rapid.IntRange(0, 5).Draw(t, "operations") {
			k := rapid.IntRange(0, 6).Draw(t, "argument")
			var op func(data.Pipeline) data.Pipeline
			switch name := rapid.SampledFrom([]string{
				"Take", "Skip", "Shard", "Repeat", "Map", "Batch", "BatchFull", "Prefetch",
				"Workers", "Of",
			}).Draw(t, "operation"); name {
			case "Take":
				op = func(p data.Pipeline) data.Pipeline { return p.Take(k) }
				want = want[:min(k, len(want))]
			case "Skip":
				op = func(p data.Pipeline) data.Pipeline { return p.Skip(k) }
				want = want[min(k, len(want)):]
			case "Shard":
				op = func(p data.Pipeline) data.Pipeline { return p.Shard(k/2, k/2+2) }
				var mine [][]int
				for i := range want {
					if i%(k/2+2) == k/2 {
						mine = append(mine, want[i])
					}
				}
				want = mine
			case "Repeat":
				op = func(p data.Pipeline) data.Pipeline { return p.Repeat(k % 4) }
				want = slices.Repeat(want, k%4)
			case "Map":
				op = func(p data.Pipeline) data.Pipeline {
					return p.Map(func(ctx context.Context, e data.Element) (data.Element, error) {
						if data.Epoch(ctx) < epoch {
							return nil, fmt.Errorf("epoch %d", data.Epoch(ctx))
						}
						return tensor.Map(e, func(leaf any) (any, error) { return leaf, nil })
					})
				}
			case "Batch", "BatchFull":
				if batched {
					continue
				}
				batched = true
				var joined [][]int
				for b := range slices.Chunk(want, k+1) {
					if len(b) == k+1 || name == "Batch" {
						joined = append(joined, slices.Concat(b...))
					}
				}
				want = joined
				op = func(p data.Pipeline) data.Pipeline {
					if name == "Batch" {
						return p.Batch(k + 1)
					}
					return p.BatchFull(k + 1)
				}
			case "Prefetch":
				op = func(p data.Pipeline) data.Pipeline { return p.Prefetch(k + 1) }
			case "Workers":
				op = func(p data.Pipeline) data.Pipeline { return p.Workers(k + 1) }
			case "Of":
				op = func(p data.Pipeline) data.Pipeline { return data.Of(p) }
			}
			for name := range got {
				got[name] = op(got[name])
			}
		}
		for name, p := range got {
			if p.Len() != len(want) {
				t.Fatalf("%s: Len is %d, want %d", name, p.Len(), len(want))
			}
			i := 0
			for e, err := range p.Iter(data.WithEpoch(context.Background(), epoch)) {
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if i == len(want) || !slices.Equal(ids(t, e), want[i]) {
					t.Fatalf("%s: element %d is %v, want of %v", name, i, ids(t, e), want)
				}
				i++
			}
			if i != len(want) {
				t.Fatalf("%s: %d elements, want %d", name, i, len(want))
			}
			checkReader(t, name, p, epoch, want)
		}
	})
}

// checkReader checks that a pipeline can be read from any position, unless it is that of a sequence.
func checkReader(t *rapid.T, name string, p data.Pipeline, epoch int, want [][]int) {
	ctx := data.WithEpoch(context.Background(), epoch)
	from := rapid.IntRange(0, len(want)).Draw(t, "from")
	i := from
	for e, err := range data.IterFrom(ctx, p, from) {
		if err != nil || !slices.Equal(ids(t, e), want[i]) {
			t.Fatalf("%s: element %d from %d is %v, %v, want %v", name, i, from, e, err, want[i])
		}
		i++
	}
	if i != len(want) {
		t.Fatalf("%s: from %d to %d, want %d", name, from, i, len(want))
	}
	r, err := data.Open(ctx, p)
	if err != nil || (r == nil) != (name == "seq") {
		t.Fatalf("%s: the reader is %v, %v", name, r, err)
	}
	if r == nil {
		return
	}
	if r.Len() != len(want) {
		t.Fatalf("%s: the reader has %d elements, want %d", name, r.Len(), len(want))
	}
	if len(want) == 0 {
		return
	}
	at := rapid.IntRange(0, len(want)-1).Draw(t, "at")
	if e, err := r.At(ctx, at); err != nil || !slices.Equal(ids(t, e), want[at]) ||
		len(want[at]) == 1 && int(r.ID(at)) != want[at][0] {
		t.Fatalf("%s: element %d is %v, %v, ID %d, want %v", name, at, e, err, r.ID(at), want[at])
	}
	for other := range want { // Cache finds a batch by its identity
		if (r.ID(other) == r.ID(at)) != slices.Equal(want[other], want[at]) {
			t.Fatalf("%s: element %d of %v and %d of %v have the identities %d and %d", name, at, want[at], other, want[other],
				r.ID(at), r.ID(other))
		}
	}
	rows, ok := r.(data.RowReader)
	if !ok {
		return
	}
	list := rapid.SliceOfN(rapid.IntRange(0, len(want[at])-1), 1, 4).Draw(t, "rows")
	e, read, err := rows.ReadRows(ctx, at, list)
	if err != nil || rows.Rows(at) != len(want[at]) {
		t.Fatalf("%s: %v, %d rows, want %d", name, err, rows.Rows(at), len(want[at]))
	}
	for i, id := range ids(t, e) {
		if row := list[i]; id != want[at][row] || int(read[i]) != id || int(rows.RowID(at, row)) != id {
			t.Fatalf("%s: row %d is of example %d, read %d, predicted %d, want %d", name, row, id, read[i],
				rows.RowID(at, row), want[at][row])
		}
	}
}

func flatIDs(t *testing.T, ds data.Dataset, epoch int) []int {
	t.Helper()
	var out []int
	for _, e := range collect(t, ds, epoch) {
		out = append(out, ids(t, e)...)
	}
	return out
}

func upTo(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

func TestShuffle(t *testing.T) {
	const n = 100
	src := sources(n)
	tests := map[string]func(seed int64) data.Pipeline{
		"tensors": func(seed int64) data.Pipeline { return src["tensors"].Shuffle(seed) },
		"func":    func(seed int64) data.Pipeline { return src["func"].Shuffle(seed) },
		"batches": func(seed int64) data.Pipeline { return src["tensors"].Shuffle(seed).Batch(7).Prefetch(2) },
		"buffer":  func(seed int64) data.Pipeline { return src["seq"].ShuffleBuffer(seed, 30) },
	}
	for name, shuffled := range tests {
		t.Run(name, func(t *testing.T) {
			seen := map[string]string{}
			for seed := range int64(3) {
				for epoch := range 3 {
					p := shuffled(seed)
					order := flatIDs(t, p, epoch)
					if again := flatIDs(t, p, epoch); !slices.Equal(again, order) {
						t.Errorf("seed %d, epoch %d: another order when read again:\n%v\n%v", seed, epoch, order, again)
					}
					which := fmt.Sprintf("seed %d, epoch %d", seed, epoch)
					if other, ok := seen[fmt.Sprint(order)]; ok {
						t.Errorf("%s and %s have one order", which, other)
					}
					seen[fmt.Sprint(order)] = which
					slices.Sort(order)
					if !slices.Equal(order, upTo(n)) {
						t.Errorf("%s: no permutation: %v", which, order)
					}
				}
			}
		})
	}
	t.Run("same for all", func(t *testing.T) {
		want := flatIDs(t, tests["func"](1), 2)
		for _, name := range []string{"tensors", "batches"} {
			if got := flatIDs(t, tests[name](1), 2); !slices.Equal(got, want) {
				t.Errorf("%s: got %v, want %v", name, got, want)
			}
		}
	})
	// Weights depend on this order: it must not change from release to release.
	t.Run("kept", func(t *testing.T) {
		got := flatIDs(t, sources(10)["tensors"].Shuffle(1), 0)
		if want := []int{6, 5, 2, 7, 9, 0, 1, 8, 4, 3}; !slices.Equal(got, want) {
			t.Errorf("seed 1, epoch 0: got %v, want %v", got, want)
		}
	})
	t.Run("window", func(t *testing.T) {
		for at, id := range flatIDs(t, tests["buffer"](1), 0) {
			if id > at+30 {
				t.Errorf("example %d at %d: it is beyond the window", id, at)
			}
		}
		if got := flatIDs(t, src["seq"].ShuffleBuffer(1, 1), 0); !slices.Equal(got, upTo(n)) {
			t.Errorf("a window of 1: got %v", got)
		}
	})
}

// TestShuffleUniform looks for positions that some examples prefer, by a chi-squared test with fixed seeds.
func TestShuffleUniform(t *testing.T) {
	const n, epochs = 8, 8000
	var count [n][n]float64
	p := sources(n)["tensors"].Shuffle(3)
	for epoch := range epochs {
		for at, id := range flatIDs(t, p, epoch) {
			count[id][at]++
		}
	}
	chi := 0.0
	for _, row := range count {
		for _, c := range row {
			chi += (c - epochs/n) * (c - epochs/n) / (epochs / n)
		}
	}
	if chi > 95 { // 49 degrees of freedom: 1 in 10,000
		t.Errorf("chi squared is %.1f for %v", chi, count)
	}
}

func TestRepeatNumbersEpochs(t *testing.T) {
	epochs := data.FromSeq(1, func(ctx context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) { yield(exampleOf(data.Epoch(ctx)), nil) }
	})
	if got := flatIDs(t, epochs.Repeat(3), 2); !slices.Equal(got, []int{6, 7, 8}) {
		t.Errorf("Repeat(3) of epoch 2: got %v", got)
	}
	if got := flatIDs(t, epochs.Repeat(2).Repeat(2), 1); !slices.Equal(got, []int{4, 5, 6, 7}) {
		t.Errorf("Repeat(2).Repeat(2) of epoch 1: got %v", got)
	}
	endless := epochs.Repeat(-1)
	if endless.Len() != -1 || endless.Take(2).Len() != -1 {
		t.Errorf("Len of an endless dataset: %d, its start %d", endless.Len(), endless.Take(2).Len())
	}
	if got := flatIDs(t, endless.Take(4), 0); !slices.Equal(got, []int{0, 1, 2, 3}) {
		t.Errorf("Repeat(-1): got %v", got)
	}
	if got := collect(t, sources(0)["seq"].Repeat(-1), 0); len(got) != 0 {
		t.Errorf("an empty dataset repeated: got %v", got)
	}
}

func TestSplit(t *testing.T) {
	for _, name := range []string{"tensors", "func"} {
		p := sources(50)[name]
		for _, c := range []struct {
			fraction float64
			held     int
		}{{0, 0}, {0.1, 5}, {0.3, 15}, {0.011, 1}, {1, 50}} {
			t.Run(fmt.Sprint(name, " ", c.fraction), func(t *testing.T) {
				kept, held := p.Split(c.fraction, 1)
				k, h := flatIDs(t, kept, 0), flatIDs(t, held, 0)
				if len(h) != c.held || held.Len() != c.held || kept.Len() != 50-c.held {
					t.Errorf("held %d of %d", held.Len(), kept.Len())
				}
				if !slices.IsSorted(k) || !slices.IsSorted(h) {
					t.Errorf("the dataset's order is lost: %v, %v", k, h)
				}
				all := slices.Concat(k, h)
				slices.Sort(all)
				if !slices.Equal(all, upTo(50)) {
					t.Errorf("the parts are not the whole: %v, %v", k, h)
				}
				if again := flatIDs(t, kept.Shuffle(1).Batch(3), 7); len(again) == len(k) {
					slices.Sort(again)
					if !slices.Equal(again, k) {
						t.Errorf("another part in epoch 7: %v, want %v", again, k)
					}
				} else {
					t.Errorf("%d examples in epoch 7, want %d", len(again), len(k))
				}
			})
		}
		_, one := p.Split(0.5, 1)
		_, two := p.Split(0.5, 2)
		if slices.Equal(flatIDs(t, one, 0), flatIDs(t, two, 0)) {
			t.Error("two seeds chose one part")
		}
		kept, held := p.Skip(10).Split(0.25, 1)
		if all := slices.Concat(flatIDs(t, kept, 0), flatIDs(t, held, 0)); len(all) != 40 || slices.Min(all) != 10 {
			t.Errorf("Skip before Split: got %v", all)
		}
	}
}

func TestShardsOfShuffledAreDisjoint(t *testing.T) {
	var all []int
	for i := range 3 {
		all = append(all, flatIDs(t, sources(20)["tensors"].Shuffle(4).Shard(i, 3), 5)...)
	}
	slices.Sort(all)
	if !slices.Equal(all, upTo(20)) {
		t.Errorf("got %v", all)
	}
}

func TestMapRandom(t *testing.T) {
	draw := func(_ context.Context, r *rand.Rand, e data.Element) (data.Element, error) {
		return []*tensor.Tensor{e.(example).ID, tensor.Scalar(r.Uint64())}, nil
	}
	drawn := func(p data.Pipeline, epoch int) map[int32]uint64 {
		out := map[int32]uint64{}
		for _, e := range collect(t, p, epoch) {
			ts := e.([]*tensor.Tensor)
			out[tensor.Data[int32](ts[0])[0]] = tensor.Data[uint64](ts[1])[0]
		}
		return out
	}
	for name, p := range sources(30) {
		want := drawn(p.MapRandom(1, draw), 0)
		values := map[uint64]bool{}
		for _, v := range want {
			values[v] = true
		}
		if len(values) != 30 {
			t.Errorf("%s: %d different numbers for 30 examples", name, len(values))
		}
		if got := drawn(p.MapRandom(1, draw), 0); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: other numbers when read again", name)
		}
		for what, got := range map[string]map[int32]uint64{
			"epoch": drawn(p.MapRandom(1, draw), 1),
			"seed":  drawn(p.MapRandom(2, draw), 0),
		} {
			for id, v := range got {
				if v == want[id] {
					t.Errorf("%s: another %s gives the same number", name, what)
				}
			}
		}
		if name == "seq" {
			continue
		}
		for order, q := range map[string]data.Pipeline{
			"before Shuffle": p.MapRandom(1, draw).Shuffle(5),
			"after Shuffle":  p.Shuffle(5).MapRandom(1, draw),
		} {
			if got := drawn(q, 0); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %s an example has other numbers", name, order)
			}
		}
	}
}

func TestErrorsEndAnIteration(t *testing.T) {
	cause := errors.New("cause")
	failing := func(context.Context, data.Element) (data.Element, error) { return nil, cause }
	at3 := func(n int) func(context.Context, data.Element) (data.Element, error) {
		return func(_ context.Context, e data.Element) (data.Element, error) {
			if tensor.Data[int32](e.(example).ID)[0] == 3 {
				return nil, cause
			}
			return e, nil
		}
	}(3)
	for name, p := range sources(10) {
		for what, c := range map[string]struct {
			p        data.Pipeline
			elements int
		}{
			"Map":           {p.Map(at3), 3},
			"Map of Map":    {p.Map(at3).Map(failing), 0},
			"Batch":         {p.Map(at3).Batch(2), 1},
			"Take":          {p.Map(at3).Take(5), 3},
			"Skip":          {p.Map(at3).Skip(5), -1},
			"Skip stream":   {p.Map(at3).Repeat(1).Skip(5), 0},
			"Shard stream":  {p.Map(at3).Repeat(1).Shard(0, 2), 2},
			"Take stream":   {p.Map(at3).Repeat(1).Take(5), 3},
			"Repeat":        {p.Map(at3).Repeat(2), 3},
			"Prefetch":      {p.Map(at3).Prefetch(2), 3},
			"ShuffleBuffer": {p.Map(at3).ShuffleBuffer(1, 2), 1},
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				n, err := firstError(t.Context(), c.p)
				if c.elements < 0 { // with random access what is skipped is not read
					if name != "seq" {
						if n != 5 || err != nil {
							t.Errorf("got %d elements and %v", n, err)
						}
						return
					}
					c.elements = 0
				}
				if n != c.elements || !errors.Is(err, cause) {
					t.Errorf("got %d elements and %v, want %d and the cause", n, err, c.elements)
				}
			})
		}
	}
}

func TestContextEndsAnIteration(t *testing.T) {
	for range 20 { // goroutines may notice the end in any order
		testContextEndsAnIteration(t)
	}
}

func testContextEndsAnIteration(t *testing.T) {
	t.Helper()
	cause := errors.New("cause")
	for name, p := range sources(10) {
		for what, p := range map[string]data.Pipeline{
			"plain": p, "Batch": p.Batch(1), "Repeat": p.Repeat(-1), "Prefetch": p.Prefetch(1), "Map": p.Map(
				func(_ context.Context, e data.Element) (data.Element, error) { return e, nil }),
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				n := 0
				var last error
				for _, err := range p.Iter(ctx) {
					if last = err; err != nil {
						break
					}
					if n++; n == 3 {
						cancel(cause)
					}
				}
				if !errors.Is(last, cause) || n > 5 {
					t.Errorf("%d elements, then %v; want the cause soon after 3", n, last)
				}
			})
		}
	}
}

// TestBatchLeavesOut checks that an incomplete batch that is dropped may contain elements that do not fit together.
func TestBatchLeavesOut(t *testing.T) {
	ds := fromTensors(tensor.New(tensor.Float32, 8)).Batch(3).BatchFull(2) // of 3, 3 and 2 rows
	n := 0
	for _, err := range data.FromSeq(-1, ds.Repeat(2).Iter).Iter(t.Context()) {
		if n++; err != nil {
			t.Fatal(err)
		}
	}
	if n != 2 {
		t.Errorf("got %d batches of batches in two rounds, want 2", n)
	}
	ds = fromTensors(tensor.New(tensor.Float32, 8)).Batch(3).Skip(1).BatchFull(2) // of 3 and 2 rows
	for _, err := range ds.Iter(t.Context()) {
		if err == nil || !strings.Contains(err.Error(), "tensor 0 of element 1 is float32(2,)") {
			t.Errorf("got %v, want that element 1 does not fit", err)
		}
	}
}

func TestBatchRefusesWhatDiffers(t *testing.T) {
	pair := func(a, b data.Element) data.Pipeline {
		return data.FromFunc(2, func(_ context.Context, i int) (data.Element, error) { return []data.Element{a, b}[i], nil })
	}
	f, g := tensor.From([]float32{1}), tensor.From([]float32{1, 2})
	tests := []struct {
		name string
		a, b data.Element
		want string
	}{
		{"shape", f, g, "data: Batch: tensor 0 of element 1 is float32(2,), of element 0 float32(1,): they must agree"},
		{"dtype", f, tensor.From([]int32{1}), "data: Batch: tensor 0 of element 1 is int32(1,), of element 0 float32(1,): " +
			"they must agree"},
		{"structure", f, []any{f}, "the structures of element"},
		{"more tensors", []any{f}, []any{f, f}, "the structures of element"},
		{"keys", map[string]any{"a": f}, map[string]any{"b": f}, "the structures of element"},
		{
			"optional",
			data.Batch{Inputs: []*tensor.Tensor{f}},
			data.Batch{Inputs: []*tensor.Tensor{f}, Weights: f},
			"the structures of element",
		},
		{
			"optional moved",
			data.Batch{Inputs: []*tensor.Tensor{nil, f}},
			data.Batch{Inputs: []*tensor.Tensor{f, nil}},
			"the structures of element",
		},
		{"no tensor", []any{}, []any{}, "data: Batch: element 0 contains no tensor"},
		{"number", 1, 2, "data: an element of type int contains a int: want *tensor.Tensor, data.Batch, or a nest of " +
			"tensors"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			if n, err := firstError(t.Context(), pair(c.a, c.b).Batch(2)); n != 0 || err == nil ||
				!strings.Contains(err.Error(), c.want) {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
		})
	}
}

func TestBatchOfRowsShares(t *testing.T) {
	x := tensor.From([]int32{0, 1, 2, 3, 4})
	for i, e := range collect(t, fromTensors(x).Skip(1).Batch(2), 0) {
		if got := e.(*tensor.Tensor); &tensor.Data[int32](got)[0] != &tensor.Data[int32](x)[1+2*i] {
			t.Errorf("batch %d is a copy", i)
		}
	}
}

func TestZeroPipeline(t *testing.T) {
	var p data.Pipeline
	for name, q := range map[string]data.Pipeline{
		"zero": p, "Of(nil)": data.Of(nil), "Shuffle": p.Shuffle(1), "Batch": p.Batch(2), "Repeat": p.Repeat(-1),
		"Prefetch": p.Prefetch(1),
	} {
		if q.Len() != 0 || len(collect(t, q, 0)) != 0 {
			t.Errorf("%s: Len is %d", name, q.Len())
		}
	}
}

func TestFromTensorsErrors(t *testing.T) {
	for want, e := range map[string]data.Element{
		"data: tensor 0 is a scalar: rows are along the first dimension": tensor.Scalar(1.0),
		"data: tensor 1 has 3 rows, the first one 2": []any{
			tensor.New(tensor.Int8, 2), tensor.New(tensor.Int8, 3),
		},
		"data: an element without tensors has no rows": []any{},
		"data: an element of type int contains a int":  3,
	} {
		p, err := data.FromTensors(e)
		if err == nil || !strings.HasPrefix(err.Error(), want) || p.Len() != 0 {
			t.Errorf("got %d elements, error %v, want %s", p.Len(), err, want)
		}
	}
}

func TestMisusePanics(t *testing.T) {
	p, stream := sources(4)["tensors"], sources(4)["seq"]
	tests := []struct {
		name string
		f    func()
		want string
	}{
		{"Batch", func() { p.Batch(0) }, "data: Batch of 0 elements: want at least 1"},
		{"BatchFull", func() { p.BatchFull(-1) }, "data: Batch of -1 elements: want at least 1"},
		{"Prefetch", func() { p.Prefetch(0) }, "data: Prefetch of 0 elements: want at least 1"},
		{"Take", func() { p.Take(-1) }, "data: Take of -1 elements"},
		{"Skip", func() { p.Skip(-1) }, "data: Skip of -1 elements"},
		{"Shard", func() { p.Shard(2, 2) }, "data: Shard(2, 2): want an index from 0 to count-1"},
		{"Split fraction", func() { p.Split(1.5, 0) }, "data: Split of 1.5: want a fraction from 0 to 1"},
		{
			"Split after Shuffle", func() { p.Shuffle(1).Split(0.5, 1) },
			"data: Split after Shuffle would mix the parts between epochs: split first, then shuffle the parts",
		},
		{"Split stream", func() { stream.Split(0.5, 1) }, "data: Split without random access"},
		{
			"Shuffle stream", func() { stream.Shuffle(1) },
			"data: Shuffle without random access: put it before Batch, Repeat and Prefetch, and shuffle streams by " +
				"ShuffleBuffer",
		},
		{"Shuffle batches", func() { p.Batch(2).Shuffle(1) }, "data: Shuffle without random access"},
		{"ShuffleBuffer", func() { p.ShuffleBuffer(1, 0) }, "data: ShuffleBuffer of 0 elements: want at least 1"},
		{"FromFunc", func() { data.FromFunc(-1, nil) }, "data: FromFunc of -1 elements, function given: false"},
		{"FromSeq", func() { data.FromSeq(-2, nil) }, "data: FromSeq of -2 elements, function given: false"},
		{"RandomShift", func() { data.RandomShift(-1) }, "data: RandomShift by -1 pixels"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasPrefix(got, c.want) {
					t.Errorf("got %q, want %q", got, c.want)
				}
			}()
			c.f()
		})
	}
}

// TestBatchAllocates checks that a shuffled batch of rows in memory costs allocations per batch, not per row.
func TestBatchAllocates(t *testing.T) {
	x := fromTensors(data.Batch{
		Inputs: []*tensor.Tensor{tensor.New(tensor.Float32, 4096, 8)},
		Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 4096)},
	}).Shuffle(1)
	perEpoch := func(rows int) float64 {
		p := x.Batch(rows)
		return testing.AllocsPerRun(5, func() {
			for _, err := range p.Iter(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
			}
		})
	}
	few, many := perEpoch(4096), perEpoch(64)
	if perBatch := (many - few) / 63; perBatch > 16 {
		t.Errorf("%.1f allocations a batch", perBatch)
	}
	if few > 40 {
		t.Errorf("%.0f allocations for one batch of 4096 rows", few)
	}
}

func BenchmarkShuffleBatch(b *testing.B) {
	const n, rows = 60000, 256
	images, labels := tensor.New(tensor.Uint8, n, 28, 28), tensor.New(tensor.Uint8, n)
	mnist, err := data.FromImages(images, labels, 255)
	if err != nil {
		b.Fatal(err)
	}
	floats := fromTensors(data.Batch{
		Inputs: []*tensor.Tensor{tensor.New(tensor.Float32, n, 28, 28, 1)},
		Labels: []*tensor.Tensor{tensor.New(tensor.Int32, n)},
	})
	same := func(_ context.Context, e data.Element) (data.Element, error) { return e, nil }
	for _, c := range []struct {
		name string
		p    data.Pipeline
	}{
		{"uint8 to float32", mnist.Shuffle(1).Batch(rows)},
		{"uint8 to float32, prefetched", mnist.Shuffle(1).Batch(rows).Prefetch(2)},
		{"float32", floats.Shuffle(1).Batch(rows)},
		{"float32 in order", floats.Batch(rows)},
		{"float32 by element", floats.Map(same).Shuffle(1).Batch(rows)},
		{"uint8 shifted", mnist.Shuffle(1).Batch(rows).MapRandom(1, data.RandomShift(2))},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			total, epoch := 0, 0
			for total < b.N {
				for e, err := range c.p.Iter(data.WithEpoch(b.Context(), epoch)) {
					if err != nil {
						b.Fatal(err)
					}
					if total += e.(data.Batch).Rows(); total >= b.N {
						break
					}
				}
				epoch++
			}
			b.ReportMetric(float64(total)/b.Elapsed().Seconds(), "rows/s")
		})
	}
}

// fromTensors is data.FromTensors for tensors that have equally many rows. It panics at an error.
func fromTensors(e data.Element) data.Pipeline {
	p, err := data.FromTensors(e)
	if err != nil {
		panic(err)
	}
	return p
}
