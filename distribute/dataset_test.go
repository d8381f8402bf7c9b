package distribute_test

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// elements is a dataset of given elements, the last of which may be an error.
type elements []any

func (e elements) Len() int { return len(e) }

func (e elements) Iter(context.Context) iter.Seq2[data.Element, error] {
	return func(yield func(data.Element, error) bool) {
		for _, x := range e {
			if err, bad := x.(error); bad {
				yield(nil, err)
				return
			}
			if !yield(x, nil) {
				return
			}
		}
	}
}

// counting returns the numbers lo to hi-1.
func counting(lo, hi int) *tensor.Tensor {
	t := tensor.New(tensor.Int64, hi-lo)
	for i := range hi - lo {
		tensor.Data[int64](t)[i] = int64(lo + i)
	}
	return t
}

func TestDatasetIsSplitInOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 8).Draw(rt, "replicas")
		sizes := rapid.SliceOfN(rapid.IntRange(0, 20), 1, 5).Draw(rt, "batches")
		s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: n})
		if err != nil {
			rt.Fatal(err)
		}
		defer s.Close()
		var source elements
		total := 0
		for _, size := range sizes {
			x := counting(total, total+size)
			source = append(source, map[string]any{"x": x, "pair": tensor.Tuple{x}})
			total += size
		}
		set, err := s.DistributeDataset(source)
		if err != nil {
			rt.Fatal(err)
		}
		var seen []int64
		step := 0
		for v, err := range set.Iter(context.Background()) {
			if err != nil {
				rt.Fatal(err)
			}
			per := (sizes[step] + n - 1) / n
			for i, share := range s.Extended().LocalResults(v) {
				x := share.(map[string]any)["x"].(*tensor.Tensor)
				if want := max(0, min(per, sizes[step]-i*per)); x.Len() != want {
					rt.Errorf("replica %d of %d gets %d of %d rows, want %d", i, n, x.Len(), sizes[step], want)
				}
				if x.DType() != tensor.Int64 || !x.Equal(share.(map[string]any)["pair"].(tensor.Tuple)[0].(*tensor.Tensor)) {
					rt.Errorf("the parts of the element are split apart: %v", share)
				}
				seen = append(seen, tensor.Data[int64](x)...)
			}
			step++
		}
		if step != len(sizes) || !slices.Equal(seen, tensor.Data[int64](counting(0, total))) {
			rt.Errorf("%d steps gave %v, want %d and 0 to %d", step, seen, len(sizes), total-1)
		}
	})
}

func TestDatasetErrors(t *testing.T) {
	s := mirrored(t, 2)
	if _, err := s.DistributeDataset(nil); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("nil: got %v", err)
	}
	for _, c := range []struct {
		name    string
		element any
		kind    error
		message string
	}{
		{"unbatched", tensor.Scalar(int64(1)), distribute.ErrInvalid, "call Batch on the dataset"},
		{
			"other lengths",
			[]any{counting(0, 2), counting(0, 3)},
			distribute.ErrMismatch,
			"element[1] has 3 rows, the tensors before it 2",
		},
		{"no tensor", []any{"x"}, distribute.ErrInvalid, "element[0] is a string"},
		{"empty", []any{}, distribute.ErrInvalid, "holds no tensor"},
		{"the source's error", errStep, errStep, ""},
	} {
		set, err := s.DistributeDataset(elements{c.element, counting(0, 2)})
		if err != nil {
			t.Fatal(err)
		}
		pairs := 0
		for v, err := range set.Iter(t.Context()) {
			pairs++
			if v != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%s: got %v, %v, want %v with %q", c.name, v, err, c.kind, c.message)
			}
		}
		if pairs != 1 {
			t.Errorf("%s: %d pairs, want the error as the last one", c.name, pairs)
		}
	}
	set, err := s.DistributeDataset(elements{counting(0, 2)})
	if err != nil {
		t.Fatal(err)
	}
	err = inStep(t, s, func(ctx context.Context, _ *distribute.Replica) error {
		for _, err := range set.Iter(ctx) {
			if !errors.Is(err, distribute.ErrContext) || !strings.Contains(err.Error(), "outside of the step") {
				t.Errorf("inside a step: got %v, want ErrContext", err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestOneDeviceKeepsElements(t *testing.T) {
	s, err := distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	x := counting(0, 3)
	set, err := s.DistributeDataset(elements{x})
	if err != nil {
		t.Fatal(err)
	}
	for v, err := range set.Iter(t.Context()) {
		if err != nil || v[0] != x {
			t.Errorf("got %v, %v, want the element itself", v, err)
		}
	}
}

// TestDistributeDatasetOfAShard: a worker that shards the data itself, as programs for other libraries do, would get
// a shard of its shard.
func TestDistributeDatasetOfAShard(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	rows := fromTensors(counting(0, 16))
	of := func(worker, workers int, policy distribute.AutoShardPolicy) distribute.InputOptions {
		return distribute.InputOptions{AutoShard: policy, Input: &distribute.InputContext{
			NumInputPipelines: workers, InputPipelineID: worker, NumReplicasInSync: 2 * workers,
		}}
	}
	for _, c := range []struct {
		name string
		ds   data.Dataset
		opts distribute.InputOptions
		want string
	}{
		{"this worker's", rows.Shard(1, 2).Batch(4), of(1, 2, distribute.ShardAuto), "the dataset has Shard(1, 2), this " +
			"worker's share, which the strategy would divide again: it gives each of the 2 workers its share itself. Leave " +
			"out Shard; "},
		{"by its data", rows.Shuffle(1).Batch(4).Shard(0, 3).Prefetch(1), of(0, 3, distribute.ShardData), "has Shard(0, 3)"},
		{"the policy is off", rows.Shard(1, 2).Batch(4), of(1, 2, distribute.ShardOff), ""},
		{"a tenth, on all", rows.Shard(0, 10).Batch(4), of(1, 2, distribute.ShardAuto), ""},
		{"one worker", rows.Shard(0, 1).Batch(4), of(0, 1, distribute.ShardAuto), ""},
	} {
		_, err := s.DistributeDataset(c.ds, c.opts)
		if (err != nil) != (c.want != "") || err != nil &&
			!(strings.Contains(err.Error(), c.want) && errors.Is(err, distribute.ErrInvalid)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
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
