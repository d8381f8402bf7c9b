package distribute_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/devicelist"
	"github.com/lockstep-ml/lockstep/tensor"
)

// The behaviour that TensorFlow's documentation describes and no golden case covers.

func TestDestinations(t *testing.T) {
	s := mirrored(t, 3)
	v := distribute.NewComponents(scalar(1), scalar(2), scalar(4))
	plain, err := newVariable(t.Context(), distribute.Default(), 9, distribute.VariableConfig{})
	if err != nil {
		t.Fatal(err)
	}
	cpu2, err := device.Parse("CPU:2")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		to   distribute.Value
		want string
	}{
		"a tensor, its device":       {scalar(0).OnDevice(1), "CPU:1"},
		"a variable of no strategy":  {plain, "CPU:0"},
		"the name of a device":       {"/device:CPU:1", "CPU:1"},
		"a device":                   {cpu2, "CPU:2"},
		"a number has no device":     {3, ""},
		"a device of another worker": {"/job:worker/task:1/device:CPU:0", ""},
		"not a device":               {"nothing", ""},
	} {
		got, err := s.Extended().ReduceTo(t.Context(), distribute.Sum, v, c.to)
		if c.want == "" {
			if !errors.Is(err, distribute.ErrInvalid) {
				t.Errorf("%s: got %v, %v, want ErrInvalid", name, got, err)
			}
			continue
		}
		if d, _ := device.Of(got); err != nil || d.Short() != c.want || !got.(*tensor.Tensor).Equal(scalar(7)) {
			t.Errorf("%s: got %v on %v, %v, want 7 on %s", name, got, d, err, c.want)
		}
	}
	if got := plain.Values()[0]; !got.(*tensor.Tensor).Equal(scalar(9)) {
		t.Errorf("a variable that is a destination became %v", got)
	}
}

func TestCurrentDevice(t *testing.T) {
	at := func(names ...string) context.Context {
		ctx := t.Context()
		for _, name := range names {
			d, err := device.Parse(name)
			if err != nil {
				t.Fatal(err)
			}
			ctx = device.With(ctx, d)
		}
		return ctx
	}
	for _, c := range []struct {
		scopes     []string
		name, want string
	}{
		{nil, "", "/job:localhost/replica:0/task:0/device:CPU:0"},
		{nil, "gpu", "/job:localhost/replica:0/task:0/device:GPU:0"},
		{[]string{"/job:worker/task:1"}, "/gpu:2", "/job:worker/replica:0/task:1/device:GPU:2"},
		{[]string{"/job:worker/task:1/device:CPU:3"}, "", "/job:worker/replica:0/task:1/device:CPU:3"},
		{[]string{"/job:worker/task:1", "/device:CPU:3"}, "", "/job:worker/replica:0/task:1/device:CPU:3"},
		{[]string{"/device:CPU:3"}, "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1"},
	} {
		if got, err := device.Resolve(at(c.scopes...), c.name); err != nil || got.String() != c.want {
			t.Errorf("%q in %q: got %v, %v, want %s", c.name, c.scopes, got, err, c.want)
		}
	}
	if _, err := device.Resolve(at("CPU:1"), "FOO:0"); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("not a device: got %v", err)
	}
	s := mirrored(t, 3)
	v := distribute.NewComponents(scalar(1), scalar(2), scalar(4))
	sum, err := s.Extended().Reduce(at("CPU:2"), distribute.Sum, v, distribute.ReduceOptions{})
	if d, _ := device.Of(sum); err != nil || d.Short() != "CPU:2" {
		t.Errorf("Reduce on CPU:2: got %v, %v", d, err)
	}
	x, err := newVariable(t.Context(), s, 0, distribute.VariableConfig{})
	if err != nil {
		t.Fatal(err)
	}
	cross, err := s.Cross(at("CPU:1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := x.Assign(cross, v); err != nil {
		t.Fatal(err)
	}
	if got, err := x.Read(cross); err != nil || !got.Equal(scalar(2)) {
		t.Errorf("read on CPU:1: got %v, %v, want that replica's 2", got, err)
	}
	if got := mirroredOf(v.Values()[0],
		scalar(8).OnDevice(1)).Get(at("CPU:1")); !got.(*tensor.Tensor).Equal(scalar(8)) {
		t.Errorf("a mirrored value on CPU:1: got %v, want 8", got)
	}
}

func TestDevicesOfSeveralWorkers(t *testing.T) {
	gpu := func(task string, index string) string { return "/job:worker/task:" + task + "/device:GPU:" + index }
	for _, c := range []struct {
		devices []string
		message string
	}{
		{[]string{gpu("0", "0"), gpu("1", "0")}, "in-graph multi-worker training"},
		{[]string{gpu("0", "0"), "CPU:0"}, "local device should have only 'localhost'"},
		{[]string{"/job:worker/device:GPU:0"}, "must have task specified"},
	} {
		_, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Devices: c.devices})
		if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%q: got %v, want ErrInvalid with %q", c.devices, err, c.message)
		}
	}
	if _, err := devicelist.GPUsPerWorker([]string{gpu("0", "0"), gpu("0", "1"), gpu("1", "0")}); err == nil ||
		!strings.Contains(err.Error(), "same number of GPUs") {
		t.Errorf("workers with unequal devices: got %v", err)
	}
	if _, err := devicelist.ByTask([]string{"CPU:0", "CPU:1"}); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("the devices of one worker, by worker: got %v", err)
	}
}

func TestHostAndDeviceBatches(t *testing.T) {
	ints := distribute.NewComponents(tensor.Scalar(int32(1)), tensor.Scalar(int32(2)))
	floats := distribute.NewComponents(scalar(1), scalar(2))
	batch := []distribute.Value{ints, floats}
	central, err := distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{ComputeDevices: []string{
		"CPU:0",
		"CPU:1",
	}, LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer central.Close()
	for _, s := range []*distribute.Strategy{mirrored(t, 2), central} {
		out, err := s.Extended().BatchReduceTo(t.Context(), distribute.Sum, batch[:1], batch[:1])
		if m, ok := out[0].(*distribute.Mirrored); err != nil || !ok ||
			!m.Values[0].(*tensor.Tensor).Equal(tensor.Scalar(int32(3))) {
			t.Errorf("%v: int32 alone: got %v, %v", s, out, err)
		}
		if _, err := s.Extended().BatchReduceTo(t.Context(), distribute.Sum, batch, batch); (err == nil) != (s == central) {
			t.Errorf("%v: int32 beside float32: got %v", s, err)
		}
	}
}

func TestUpdateByKeyword(t *testing.T) {
	s := mirrored(t, 2)
	v, err := newVariable(t.Context(), s, 1, distribute.VariableConfig{})
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]any{"by": mirroredOf(scalar(10), scalar(20)), "often": 2}
	scale := func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
		by := args[0].(map[string]any)
		for range by["often"].(int) {
			if err := c.Variable().AssignAdd(c, by["by"]); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
	if got, err := s.Extended().Update(t.Context(), v, scale, named); err != nil || got != nil {
		t.Errorf("a function that returns nothing: got %v, %v", got, err)
	}
	got, err := s.Extended().UpdateUngrouped(t.Context(), v, scale, named)
	if err != nil || len(got.(tensor.Tuple)) != 2 || got.(tensor.Tuple)[1] != nil {
		t.Errorf("ungrouped: got %v, %v, want a tuple of nothing for each component", got, err)
	}
	if got := v.Values(); !got[0].(*tensor.Tensor).Equal(scalar(41)) || !got[1].(*tensor.Tensor).Equal(scalar(81)) {
		t.Errorf("got %v, want 41 and 81", got)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		return v.Update(r, func(ctx context.Context, c *distribute.Component) error {
			if now := distribute.CurrentComponent(ctx); now != c || c.Device() != v.Devices()[c.Replica()] {
				t.Errorf("component %d is updated in the context of %v, on %q", c.Replica(), now, c.Device())
			}
			return c.Variable().Assign(c, float64(c.Replica()))
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := v.Values(); !got[0].(*tensor.Tensor).Equal(scalar(0)) || !got[1].(*tensor.Tensor).Equal(scalar(1)) {
		t.Errorf("updated in a step: got %v, want 0 and 1", got)
	}
	failure := errors.New("failed")
	in, err := s.Cross(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = v.Update(in, func(_ context.Context, c *distribute.Component) error {
		return errors.Join(c.Variable().Assign(c, 7.0), failure)
	})
	if got := v.Values(); !errors.Is(err, failure) || !got[0].(*tensor.Tensor).Equal(scalar(0)) {
		t.Errorf("a failed update: got %v, %v, want the old value", got, err)
	}
}

func TestPrintedForms(t *testing.T) {
	s := mirrored(t, 2)
	central, err := distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{ComputeDevices: []string{
		"CPU:0",
		"CPU:1",
	}, LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer central.Close()
	make := func(s *distribute.Strategy, cfg distribute.VariableConfig) *distribute.Variable {
		v, err := s.NewVariable(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	matrix := tensor.From([]float32{1, -20.5, 3, 4}, 2, 2)
	for _, c := range []struct {
		got  any
		want string
	}{
		{make(s, distribute.VariableConfig{Initial: matrix, Name: "w"}), `MirroredVariable:{
  0: <tf.Variable 'w:0' shape=(2, 2) dtype=float32, numpy=
array([[  1. , -20.5],
       [  3. ,   4. ]], dtype=float32)>,
  1: <tf.Variable 'w/replica_1:0' shape=(2, 2) dtype=float32, numpy=
array([[  1. , -20.5],
       [  3. ,   4. ]], dtype=float32)>
}`},
		{make(s, distribute.VariableConfig{Initial: tensor.From([]int64{7, 10}), Synchronization: distribute.OnRead}), `SyncOnReadVariable:{
  0: <tf.Variable 'Variable:0' shape=(2,) dtype=int64, numpy=array([ 7, 10])>,
  1: <tf.Variable 'Variable/replica_1:0' shape=(2,) dtype=int64, numpy=array([ 7, 10])>
}`},
		{make(s, distribute.VariableConfig{Initial: true}), `MirroredVariable:{
  0: <tf.Variable 'Variable:0' shape=() dtype=bool, numpy=True>,
  1: <tf.Variable 'Variable/replica_1:0' shape=() dtype=bool, numpy=True>
}`},
		{
			make(central, distribute.VariableConfig{Initial: tensor.From([]float64{0.5})}),
			`<tf.Variable 'Variable:0' shape=(1,) dtype=float64, numpy=array([0.5])>`,
		},
		{
			make(distribute.Default(), distribute.VariableConfig{Initial: 3}),
			`<tf.Variable 'Variable:0' shape=() dtype=int32, numpy=3>`,
		},
		{distribute.NewComponents(matrix, 2), "PerReplica:{\n  0: tf.Tensor(\n[[  1.  -20.5]\n [  3.    4. ]], shape=(2, " +
			"2), dtype=float32),\n  1: 2\n}"},
		{mirroredOf(scalar(1)), "Mirrored:{\n  0: tf.Tensor(1.0, shape=(), dtype=float32)\n}"},
		{
			distribute.InputContext{NumInputPipelines: 2, InputPipelineID: 1, NumReplicasInSync: 4},
			"tf.distribute.InputContext(input pipeline id 1, total: 2)",
		},
		{
			distribute.ValueContext{ReplicaID: 1, NumReplicas: 2},
			"tf.distribute.ValueContext(replica id 1,  total replicas in sync: 2)",
		},
	} {
		if got := strings.TrimSpace(stringOf(c.got)); got != c.want {
			t.Errorf("got\n%s\nwant\n%s", got, c.want)
		}
	}
}

func stringOf(v any) string { return v.(interface{ String() string }).String() }

func TestNestsThatDifferBetweenReplicas(t *testing.T) {
	s := mirrored(t, 2)
	nests := []distribute.Value{[]any{scalar(1)}, map[string]any{"x": scalar(1)}}
	if _, err := distribute.Run(t.Context(), s,
		func(ctx context.Context, r *distribute.Replica, v distribute.Value) (distribute.Value, error) {
			return distribute.MergeNests(ctx, r, nothing, v)
		}, nests); !errors.Is(err, distribute.ErrMismatch) {
		t.Errorf("arguments of a merge call: got %v, want ErrMismatch", err)
	}
	if _, err := distribute.Reduce(t.Context(), s, distribute.Sum, nests, distribute.ReduceOptions{}); !errors.Is(err,
		distribute.ErrMismatch) {
		t.Errorf("values to reduce: got %v, want ErrMismatch", err)
	}
	if _, err := distribute.Gather(t.Context(), s, nests, 0); !errors.Is(err, distribute.ErrMismatch) {
		t.Errorf("values to gather: got %v, want ErrMismatch", err)
	}
}

func TestVariableMadeInAFunctionUnderScope(t *testing.T) {
	s := mirrored(t, 2)
	layer := func(ctx context.Context) (*distribute.Variable, error) {
		return distribute.CurrentStrategy(ctx).NewVariable(ctx, distribute.VariableConfig{Initial: 2.0})
	}
	v, err := layer(s.Scope(t.Context()))
	if err != nil || v.Strategy() != s || v.Kind() != "MirroredVariable" {
		t.Errorf("in the scope: got %v, %v", v, err)
	}
	v, err = layer(t.Context())
	if err != nil || v.Strategy() == s || v.Kind() != "ResourceVariable" {
		t.Errorf("outside of it: got %v, %v", v, err)
	}
	err = inStep(t, s, func(ctx context.Context, _ *distribute.Replica) error {
		v, err := layer(ctx)
		if err != nil || v.Strategy() != s || len(v.Values()) != 2 {
			t.Errorf("in a step: got %v, %v, want one variable for both replicas", v, err)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestSingleWorker(t *testing.T) {
	for _, c := range []struct {
		resolver cluster.Resolver
		kind     error
		device   string
	}{
		{&cluster.Simple{}, nil, "/job:localhost/replica:0/task:0/device:CPU:0"},
		{&cluster.Simple{
			Cluster: cluster.NewSpec(map[string][]string{"worker": {"a:1"}}),
			This:    &cluster.Task{Type: "worker"},
		}, nil, "/job:worker/replica:0/task:0/device:CPU:0"},
		{&cluster.Simple{Cluster: cluster.NewSpec(map[string][]string{"worker": {"a:1"}})}, distribute.ErrInvalid, ""},
		{&cluster.Simple{
			Cluster: cluster.NewSpec(map[string][]string{"worker": {"a:1", "b:1"}}),
			This:    &cluster.Task{Type: "worker"},
		}, worker.ErrNoSecret, ""},
		{&cluster.Simple{
			Cluster: cluster.NewSpec(map[string][]string{"worker": {"a", "a"}}),
			This:    &cluster.Task{Type: "worker"},
		}, distribute.ErrInvalid, ""},
	} {
		s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
			Resolver:    c.resolver,
			LogicalCPUs: 2,
		})
		if !errors.Is(err, c.kind) {
			t.Errorf("%+v: got %v, want %v", c.resolver, err, c.kind)
		}
		if err != nil {
			continue
		}
		defer s.Close()
		if got := s.Devices(); len(got) != 1 || got[0] != c.device || s.Properties().ClusterResolver != c.resolver {
			t.Errorf("%+v: got %q, want %s", c.resolver, got, c.device)
		}
		v, err := newVariable(t.Context(), s, 1, distribute.VariableConfig{})
		if err != nil || v.Devices()[0] != c.device || v.Kind() != "MirroredVariable" {
			t.Errorf("a variable: got %v, %v", v, err)
		}
	}
}

func TestRunInsideAMerge(t *testing.T) {
	s := mirrored(t, 3)
	v, err := newVariable(t.Context(), s, 0,
		distribute.VariableConfig{Synchronization: distribute.OnRead, Aggregation: distribute.AggregateSum})
	if err != nil {
		t.Fatal(err)
	}
	nested := func(fail error) func(context.Context, *distribute.Replica) error {
		return func(ctx context.Context, r *distribute.Replica) error {
			if err := v.Assign(r, 1.0); err != nil {
				return err
			}
			_, err := distribute.MergeCall(ctx, r,
				func(ctx context.Context, c *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
					out, err := distribute.Run(ctx, c.Strategy(),
						func(ctx context.Context, r *distribute.Replica, _ int) (distribute.Value, error) {
							if err := v.Assign(r, 5.0); err != nil {
								return nil, err
							}
							if fail != nil && r.ID() == 1 {
								return nil, fail
							}
							return distribute.AllReduce(ctx, r, distribute.Sum, scalar(float64(r.ID())))
						}, nil)
					if err == nil && !out[2].(*tensor.Tensor).Equal(scalar(3)) {
						t.Errorf("the sum inside: got %v, want 3", out)
					}
					if fail != nil {
						if !errors.Is(err, fail) {
							t.Errorf("the Run inside: got %v, want its failure", err)
						}
						if got := v.Values()[0]; !got.(*tensor.Tensor).Equal(scalar(1)) {
							t.Errorf("after the failed Run inside the variable is %v, want the 1 from before it", got)
						}
						return nil, nil // the outer Run continues
					}
					return nil, err
				}, 0)
			return err
		}
	}
	for range 2 {
		for _, fail := range []error{nil, errStep} {
			if err := inStep(t, s, nested(fail)); err != nil {
				t.Fatal(err)
			}
			want := 5.0
			if fail != nil {
				want = 1
			}
			if got := v.Values()[2]; !got.(*tensor.Tensor).Equal(scalar(want)) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
	}
	// A failure of the outer Run also rolls back the writes of the inner one.
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if err := nested(nil)(ctx, r); err != nil {
			return err
		}
		return errStep
	})
	if got := v.Values()[0]; !errors.Is(err, errStep) || !got.(*tensor.Tensor).Equal(scalar(1)) {
		t.Errorf("got %v and %v, want the 1 from before", err, got)
	}
}

func TestRebatchedRowsGoOnIntoTheNextBatch(t *testing.T) {
	s := mirrored(t, 2)
	source := fromTensors(counting(0, 3)).Batch(2).Repeat(2) // 0 1, 2, 0 1, 2
	set, err := s.DistributeDataset(source, distribute.InputOptions{AutoShard: distribute.ShardOff})
	if err != nil {
		t.Fatal(err)
	}
	var rows []int64
	for v, err := range set.Iter(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range s.Extended().LocalResults(v) {
			if x.(*tensor.Tensor).Len() != 1 {
				t.Errorf("a share of %v, want one row", x)
			}
			rows = append(rows, tensor.Data[int64](x.(*tensor.Tensor))...)
		}
	}
	if !slices.Equal(rows, []int64{0, 1, 2, 0, 1, 2}) {
		t.Errorf("got %v", rows)
	}
}

func TestScatterErrors(t *testing.T) {
	s := mirrored(t, 2)
	v, err := s.NewVariable(t.Context(), distribute.VariableConfig{Initial: tensor.From([]int32{1, 2, 3, 4}, 2, 2)})
	if err != nil {
		t.Fatal(err)
	}
	cross, err := s.Cross(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices := func(values, indices *tensor.Tensor) *tensor.IndexedSlices {
		return &tensor.IndexedSlices{Values: values, Indices: indices}
	}
	row, zero := tensor.From([]int32{1, 0}, 1, 2), tensor.From([]int64{0})
	for name, err := range map[string]error{
		"no slices":          v.Scatter(cross, distribute.ScatterAdd, row),
		"nothing":            v.Scatter(cross, distribute.ScatterAdd, &tensor.IndexedSlices{}),
		"another dtype":      v.Scatter(cross, distribute.ScatterAdd, slices(tensor.From([]float32{1, 2}, 1, 2), zero)),
		"rows too short":     v.Scatter(cross, distribute.ScatterAdd, slices(tensor.From([]int32{1}, 1, 1), zero)),
		"more rows":          v.Scatter(cross, distribute.ScatterAdd, slices(row, tensor.From([]int64{0, 1}))),
		"an index too large": v.Scatter(cross, distribute.ScatterAdd, slices(row, tensor.From([]int64{2}))),
		"an index below 0":   v.Scatter(cross, distribute.ScatterAdd, slices(row, tensor.From([]int32{-1}))),
		"indices of floats":  v.Scatter(cross, distribute.ScatterAdd, slices(row, tensor.From([]float32{0}))),
		"division by zero":   v.Scatter(cross, distribute.ScatterDiv, slices(row, zero)),
	} {
		if !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	if err := v.Scatter(nil, distribute.ScatterAdd, slices(row, zero)); !errors.Is(err, distribute.ErrContext) {
		t.Errorf("without a context: got %v", err)
	}
	twice := slices(tensor.From([]int32{1, 1, 2, 2}, 2, 2), tensor.From([]int32{1, 1}))
	if err := v.Scatter(cross, distribute.ScatterAdd, twice); err != nil {
		t.Fatal(err)
	}
	if got := v.Values()[1]; !got.(*tensor.Tensor).Equal(tensor.From([]int32{1, 2, 6, 7}, 2, 2)) {
		t.Errorf("two rows of one index: got %v", got)
	}
}
