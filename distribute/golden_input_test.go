package distribute_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/internal/pieces"
	"github.com/lockstep-ml/lockstep/tensor"
)

// intOf returns a whole number of a case, or the given default.
func intOf(m map[string]any, name string, otherwise int) int {
	n, ok := m[name].(json.Number)
	if !ok {
		return otherwise
	}
	i, err := n.Int64()
	if err != nil {
		return otherwise
	}
	return int(i)
}

// dataset returns the dataset that a case describes.
func (g *goldenRun) dataset(spec map[string]any) (data.Dataset, error) {
	source, _ := spec["source"].(map[string]any)
	var p data.Pipeline
	switch kind := source["kind"]; kind {
	case "range":
		p = fromTensors(counting(0, intOf(source, "n", 0)))
	case "tensor_slices":
		v, err := decodeValue(source["tensor"], nil)
		if list, ok := v.([]any); ok && err == nil {
			v, err = packed(list) // TensorFlow stacks a list of tensors
		}
		if err != nil {
			return nil, err
		}
		p = fromTensors(v)
	case "files":
		files, err := g.recordFiles(source["files"])
		if err != nil {
			return nil, err
		}
		p = data.TFRecords(files...)
	default:
		return nil, fmt.Errorf("the runner does not know the source %v", kind)
	}
	ops, _ := spec["ops"].([]any)
	for _, o := range ops {
		var err error
		if p, err = datasetOp(p, o.(map[string]any)); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// packed stacks the tensors of a list.
func packed(list []any) (*tensor.Tensor, error) {
	rows := make([]distribute.Value, len(list))
	for i, x := range list {
		t, ok := x.(*tensor.Tensor)
		if !ok {
			return nil, fmt.Errorf("%v in a list of tensors: %w", x, distribute.ErrInvalid)
		}
		rows[i] = t.Reshape(append([]int{1}, t.Shape()...)...)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("an empty list: %w", distribute.ErrInvalid)
	}
	out, err := tf.GatherWith(context.Background(), distribute.NewReductionToOneDevice("", nil),
		distribute.NewComponents(rows...), "CPU:0", 0)
	if err != nil {
		return nil, err
	}
	return out.(*tensor.Tensor), nil
}

// recordFiles writes TFRecord files.
func (g *goldenRun) recordFiles(v any) ([]string, error) {
	lists, _ := v.([]any)
	dir := g.TempDir()
	var files []string
	for i, list := range lists {
		var text []byte
		for _, record := range names(list) {
			text = data.AppendTFRecord(text, []byte(record))
		}
		file := filepath.Join(dir, fmt.Sprintf("f%02d.tfrecord", i))
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	return files, nil
}

// datasetOp applies an operation that a case names.
func datasetOp(p data.Pipeline, o map[string]any) (data.Pipeline, error) {
	perTensor := func(f func(*tensor.Tensor) (data.Element, error)) data.Pipeline {
		return p.Map(func(_ context.Context, e data.Element) (data.Element, error) {
			t, ok := e.(*tensor.Tensor)
			if !ok {
				return nil, fmt.Errorf("%w: %v is not a tensor", distribute.ErrInvalid, e)
			}
			return f(t)
		})
	}
	switch op := o["op"]; op {
	case "batch":
		if o["drop_remainder"] == true {
			return p.BatchFull(intOf(o, "size", 1)), nil
		}
		return p.Batch(intOf(o, "size", 1)), nil
	case "repeat":
		return p.Repeat(intOf(o, "count", -1)), nil
	case "take":
		return p.Take(intOf(o, "n", 0)), nil
	case "skip":
		return p.Skip(intOf(o, "n", 0)), nil
	case "prefetch":
		return p.Prefetch(max(intOf(o, "n", 1), 1)), nil // -1: TensorFlow chooses
	case "shard":
		return p.Shard(intOf(o, "index", 0), intOf(o, "num", 1)), nil
	case "map_double":
		return perTensor(func(t *tensor.Tensor) (data.Element, error) { return times(t, 2) }), nil
	case "map_pair":
		return perTensor(func(t *tensor.Tensor) (data.Element, error) {
			half := tensor.New(tensor.Float32, t.Shape()...)
			for i, x := range t.Float64s() {
				setNumber(half, i, float64(float32(x)*0.5))
			}
			return tensor.Tuple{t, half}, nil
		}), nil
	case "map_dict":
		return perTensor(func(t *tensor.Tensor) (data.Element, error) {
			ten, err := times(t, 10)
			return map[string]any{"x": t, "y": ten}, err
		}), nil
	case "map_ragged_range":
		return perTensor(func(t *tensor.Tensor) (data.Element, error) { return counting(0, int(t.Float64s()[0])), nil }), nil
	case "filter_even":
		return filtered(p), nil
	case "unbatch":
		return unbatched(p), nil
	case "padded_batch":
		return paddedBatch(p, intOf(o, "size", 1)), nil
	default:
		return p, fmt.Errorf("the runner does not know the dataset operation %v", op)
	}
}

// times returns a tensor of numbers, multiplied by a whole number; integers wrap around.
func times(t *tensor.Tensor, by int64) (distribute.Value, error) {
	if !t.DType().IsInteger() {
		return mapNumbers(t, func(x float64) float64 { return float64(by) * x })
	}
	out := tensor.New(t.DType(), t.Shape()...)
	for i := range out.Len() {
		setInteger(out, i, integerAt(t, i)*by)
	}
	return out, nil
}

// filtered keeps even scalars.
func filtered(p data.Pipeline) data.Pipeline {
	return p.Through(func(_ context.Context, elements iter.Seq2[data.Element, error]) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for e, err := range elements {
				if err == nil && int64(e.(*tensor.Tensor).Float64s()[0])%2 != 0 {
					continue
				}
				if !yield(e, err) || err != nil {
					return
				}
			}
		}
	})
}

// unbatched yields the rows of batches.
func unbatched(p data.Pipeline) data.Pipeline {
	return p.Through(func(ctx context.Context, elements iter.Seq2[data.Element, error]) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for batch, err := range elements {
				if err != nil {
					yield(nil, err)
					return
				}
				for _, leaf := range tensor.Flatten(batch) {
					if t, ok := leaf.(*tensor.Tensor); !ok || t.Rank() == 0 {
						yield(nil, fmt.Errorf("unbatch of %v, which has no rows: %w", leaf, distribute.ErrInvalid))
						return
					}
				}
				rows := fromTensors(batch)
				for e, err := range rows.Iter(ctx) {
					if !yield(e, err) || err != nil {
						return
					}
				}
			}
		}
	})
}

// paddedBatch makes batches of vectors of different lengths, filled up by zeros.
func paddedBatch(p data.Pipeline, size int) data.Pipeline {
	return p.Through(func(_ context.Context, elements iter.Seq2[data.Element, error]) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			var rows []*tensor.Tensor
			emit := func() bool {
				longest := 0
				for _, r := range rows {
					longest = max(longest, r.Len())
				}
				out := tensor.New(rows[0].DType(), len(rows), longest)
				for i, r := range rows {
					for j, x := range r.Float64s() {
						setNumber(out, i*longest+j, x)
					}
				}
				rows = nil
				return yield(out, nil)
			}
			for e, err := range elements {
				if err != nil {
					yield(nil, err)
					return
				}
				if rows = append(rows, e.(*tensor.Tensor)); len(rows) == size && !emit() {
					return
				}
			}
			if len(rows) > 0 {
				emit()
			}
		}
	})
}

// inputOptions returns the options that a case describes.
func (g *goldenRun) inputOptions() (distribute.InputOptions, error) {
	var o distribute.InputOptions
	spec, _ := g.c.Options["input_options"].(map[string]any)
	o.KeepOnHost = spec["experimental_fetch_to_device"] == false
	o.PlaceOnDevice = spec["experimental_place_dataset_on_device"] == true
	o.Prefetch = intOf(spec, "experimental_per_replica_buffer_size", 0)
	if spec["experimental_replication_mode"] == "PER_REPLICA" {
		o.ReplicationMode = distribute.PerReplicaInput
	}
	set, _ := g.c.Inputs["dataset"].(map[string]any)
	if policy, ok := set["auto_shard_policy"]; ok {
		var err error
		o.AutoShard, err = parseEnum("auto_shard_policy", policy, distribute.ShardAuto, distribute.ShardOff,
			distribute.ShardFile, distribute.ShardData, distribute.ShardHint)
		if err != nil {
			return o, err
		}
	}
	return o, nil
}

// dataError converts an error of the dataset to one that the runner can match.
func dataError(err error) error {
	if strings.HasPrefix(err.Error(), "data: ") {
		return fmt.Errorf("%w: %w", distribute.ErrInvalid, err)
	}
	return err
}

// drain reads up to a case's number of steps, as lists of the replicas' elements.
func (g *goldenRun) drain(s *distribute.Strategy, set *distribute.DistributedDataset) (map[string]any, error) {
	steps, most := []any{}, intOf(g.c.Options, "max_steps", 20)
	ended := true
	for element, err := range set.Iter(g.Context()) {
		if err != nil {
			return nil, dataError(err)
		}
		if len(steps) == most {
			ended = false
			break
		}
		steps = append(steps, []any(s.Extended().LocalResults(element)))
	}
	if len(steps) == most {
		ended = false // TensorFlow has not requested more
	}
	return map[string]any{"steps": steps, "ended": ended}, nil
}

func goldenDistributeDataset(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	o, err := g.inputOptions()
	if err != nil {
		return nil, err
	}
	if g.c.Op == "distribute_dataset_worker" {
		o.Input = g.inputContext()
	}
	spec, _ := g.c.Inputs["dataset"].(map[string]any)
	ds, err := g.dataset(spec)
	if err != nil {
		return nil, err
	}
	set, err := s.DistributeDataset(ds, o)
	if err != nil {
		return nil, err
	}
	return g.drain(s, set)
}

func (g *goldenRun) inputContext() *distribute.InputContext {
	return &distribute.InputContext{
		NumInputPipelines: intOf(g.c.Options, "num_input_pipelines", 1), InputPipelineID: intOf(g.c.Options,
			"input_pipeline_id", 0),
		NumReplicasInSync: intOf(g.c.Options, "num_replicas_in_sync", 1),
	}
}

// datasetFunction is the dataset function that a case names.
func (g *goldenRun) datasetFunction(c distribute.InputContext) (data.Dataset, error) {
	source := fromTensors(counting(0, intOf(g.c.Options, "n", 0)))
	switch fn := g.c.Options["fn"]; fn {
	case "per_replica_batch", "sharded":
		size, err := c.PerReplicaBatchSize(intOf(g.c.Options, "global_batch_size", 0))
		if err != nil {
			return nil, err
		}
		if fn == "sharded" {
			source = source.Shard(c.InputPipelineID, c.NumInputPipelines)
		}
		return source.Batch(size), nil
	case "unbatched":
		return source, nil
	case "fixed_batch":
		return source.Batch(intOf(g.c.Options, "batch", 1)), nil
	case "drop_remainder":
		return source.BatchFull(intOf(g.c.Options, "batch", 1)), nil
	default:
		return nil, fmt.Errorf("the runner does not know the dataset function %v", fn)
	}
}

func goldenDatasetsFromFunction(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	o, err := g.inputOptions()
	if err != nil {
		return nil, err
	}
	contexts := []any{}
	set, err := s.DistributeDatasetsFromFunction(g.Context(), func(c distribute.InputContext) (data.Dataset, error) {
		contexts = append(contexts, map[string]any{
			"num_input_pipelines": c.NumInputPipelines, "input_pipeline_id": c.InputPipelineID,
			"num_replicas_in_sync": c.NumReplicasInSync, "str": c.String(),
		})
		return g.datasetFunction(c)
	}, o)
	if err != nil {
		return nil, err
	}
	out, err := g.drain(s, set)
	if err == nil {
		out["contexts"] = contexts
	}
	return out, err
}

func goldenInputContext(g *goldenRun) (map[string]any, error) {
	c := g.inputContext()
	size, err := c.PerReplicaBatchSize(intOf(g.c.Options, "global_batch_size", 0))
	return map[string]any{"value": map[string]any{"per_replica_batch_size": size, "str": c.String()}}, err
}

func goldenBatchSizes(g *goldenRun) (map[string]any, error) {
	o := g.c.Options
	replicas, out := intOf(o, "num_replicas_per_worker", 1), []any{}
	ids := make([]int, intOf(o, "num_workers", 1)*replicas)
	for i := range ids {
		ids[i] = (intOf(o, "worker_index", 0)*replicas + i) % len(ids)
	}
	for _, n := range pieces.Sizes(intOf(o, "global_batch_size", 0), ids) {
		out = append(out, n)
	}
	return map[string]any{"value": out}, nil
}

// goldenDatasetSum sums all elements of a dataset over the replicas.
func goldenDatasetSum(g *goldenRun) (map[string]any, error) {
	s, err := g.strategy()
	if err != nil {
		return nil, err
	}
	spec, _ := g.c.Inputs["dataset"].(map[string]any)
	ds, err := g.dataset(spec)
	if err != nil {
		return nil, err
	}
	set, err := s.DistributeDataset(ds)
	if err != nil {
		return nil, err
	}
	total := 0
	for element, err := range set.Iter(g.Context()) {
		if err != nil {
			return nil, err
		}
		sums, err := distribute.RunNest(g.Context(), s,
			func(_ context.Context, _ *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
				sum := int64(0)
				for i := range args[0].(*tensor.Tensor).Len() {
					sum += integerAt(args[0].(*tensor.Tensor), i)
				}
				return tensor.Scalar(sum), nil
			}, element)
		if err != nil {
			return nil, err
		}
		step, err := s.Extended().Reduce(g.Context(), distribute.Sum, sums, distribute.ReduceOptions{})
		if err != nil {
			return nil, err
		}
		total += int(integerAt(step.(*tensor.Tensor), 0))
	}
	return map[string]any{"value": total}, nil
}

// tooFewFiles is the exception for workers without a file.
func tooFewFiles(c *goldenCase, _ string) bool {
	return c.Op == "distribute_dataset_worker" && !c.fails() && contains(c.Inputs, "files")
}

func checkTooFewFiles(_ *goldenRun, answer map[string]any, err error) error {
	if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "not enough for the required") {
		return fmt.Errorf("got %v, %w, want too few files", answer, err)
	}
	return nil
}

// hasOwnFunction reports whether an operation of the case's dataset is a user function here.
func hasOwnFunction(c *goldenCase) bool {
	set, _ := c.Inputs["dataset"].(map[string]any)
	ops, _ := set["ops"].([]any)
	return slices.ContainsFunc(ops, func(o any) bool {
		op, _ := o.(map[string]any)
		return op["op"] == "unbatch" || op["op"] == "padded_batch"
	})
}

// checkCutElsewhere compares all rows of each step with TensorFlow's.
func checkCutElsewhere(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	want, _ := g.c.Expect["steps"].([]any)
	got, _ := answer["steps"].([]any)
	if len(got) != len(want) {
		return fmt.Errorf("got %d steps, want %d", len(got), len(want))
	}
	for i := range want {
		parts, err := decodeList(want[i], nil, false)
		if err != nil {
			return err
		}
		all, err := allRows(parts)
		if err != nil {
			return err
		}
		ours, err := allRows(got[i].([]any))
		if err != nil {
			return err
		}
		if fmt.Sprint(ours) != fmt.Sprint(all) {
			return fmt.Errorf("step %d: got %v, want %v", i, ours, all)
		}
	}
	return nil
}

// allRows joins the rows of elements of one structure that have rows.
func allRows(parts []any) (distribute.Value, error) {
	return tensor.Zip(func(_ string, leaves []any) (any, error) {
		leaves = slices.DeleteFunc(slices.Clone(leaves), func(leaf any) bool { return leaf.(*tensor.Tensor).Len() == 0 })
		if len(leaves) == 0 {
			return nil, nil
		}
		return tf.GatherWith(context.Background(), distribute.NewReductionToOneDevice("", nil),
			distribute.NewComponents(leaves...), "CPU:0", 0)
	}, nil, parts...)
}

// goldenInputLimits lists the limits of TensorFlow's distributed datasets.
var goldenInputLimits = []goldenException{
	{
		"central-options", "TensorFlow's CentralStorageStrategy mistypes the name of an option",
		func(c *goldenCase, message string) bool {
			return c.Op == "distribute_dataset" && strings.Contains(message, "has no attribute 'experimental_replication_moden'")
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if err != nil {
				return err
			}
			without := *g.c // the options change the elements' devices, not the elements
			without.Options = map[string]any{"max_steps": g.c.Options["max_steps"]}
			want, err := goldenDistributeDataset(&goldenRun{T: g.T, c: &without})
			if err == nil && fmt.Sprint(want) != fmt.Sprint(answer) {
				err = fmt.Errorf("got %v, without the options %v", answer, want)
			}
			return err
		},
	},
	{
		"nothing-to-batch", "TensorFlow crashes on a dataset of scalars that has none",
		func(c *goldenCase, _ string) bool {
			return strings.HasPrefix(c.Op, "distribute_dataset") && c.Expect["error_type"] == "IndexError"
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if steps, _ := answer["steps"].([]any); err != nil || len(steps) > 0 {
				return fmt.Errorf("got %v, %w, want no steps", answer, err)
			}
			return nil
		},
	},
}
