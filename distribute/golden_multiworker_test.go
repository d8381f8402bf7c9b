package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// workerTimeout bounds the waits of workers for each other in tests. Only a defect makes a
// wait as long.
const workerTimeout = 30 * time.Second

// workerConfigs returns the configurations of workers in this process with the given numbers of replicas. Their groups
// exchange messages like those of processes.
func workerConfigs(t testing.TB, replicas ...int) []distribute.MultiWorkerConfig {
	t.Helper()
	ids, total := make([][]int, len(replicas)), 0
	for w, n := range replicas {
		for range n {
			ids[w] = append(ids[w], total)
			total++
		}
	}
	return workersOf(t, mem.NewPipes(total), ids...)
}

// workersOf is workerConfigs over the ends of one group, with the ids of each worker's replicas.
func workersOf(t testing.TB, ends []transport.Endpoint, ids ...[]int) []distribute.MultiWorkerConfig {
	t.Helper()
	addresses := make([]string, len(ids))
	for w := range addresses {
		addresses[w] = fmt.Sprintf("host%d:1", w)
	}
	configs := make([]distribute.MultiWorkerConfig, len(ids))
	for w, own := range ids {
		var mine []transport.Endpoint
		for _, id := range own {
			mine = append(mine, ends[id])
		}
		n := len(own)
		group, err := collective.Open(mine, collective.Config{Timeout: workerTimeout})
		if err != nil {
			t.Fatal(err)
		}
		configs[w] = distribute.MultiWorkerConfig{
			Resolver: &cluster.Simple{
				Cluster: cluster.NewSpec(map[string][]string{"worker": addresses}),
				This:    &cluster.Task{Type: "worker", Index: w},
			},
			Group:       group,
			LogicalCPUs: max(n, goldenCPUs), Options: distribute.Options{Timeout: workerTimeout},
		}
		for i := range n {
			configs[w].Devices = append(configs[w].Devices, fmt.Sprintf("CPU:%d", i))
		}
	}
	return configs
}

// onWorkers makes a strategy for each configuration and calls f with all of them at the same time, like separate
// processes. A worker that fails leaves the job at once, the others when all have ended.
func onWorkers(configs []distribute.MultiWorkerConfig, f func(s *distribute.Strategy, worker int) error) []error {
	errs := make([]error, len(configs))
	var ended, closed sync.WaitGroup
	ended.Add(len(configs))
	for w, cfg := range configs {
		closed.Go(func() {
			left := sync.OnceFunc(ended.Done)
			defer left()
			s, err := distribute.NewMultiWorkerMirroredStrategy(cfg)
			if err != nil {
				errs[w] = errors.Join(err, cfg.Group.Close())
				return
			}
			if errs[w] = f(s, w); errs[w] == nil {
				left()
				ended.Wait()
			}
			if err := s.Close(); errs[w] == nil {
				errs[w] = err
			}
		})
	}
	closed.Wait()
	return errs
}

// goldenMultiWorker executes a case on all workers of its cluster. A chief is the first of them, before the tasks of
// job worker.
func goldenMultiWorker(g *goldenRun) (map[string]any, error) {
	chief, _ := g.c.Strategy["chief"].(bool)
	workers := intOf(g.c.Strategy, "workers", 2)
	if chief {
		workers++
	}
	replicas := make([]int, workers)
	for w := range replicas {
		replicas[w] = intOf(g.c.Strategy, "devices_per_worker", 1)
	}
	configs := workerConfigs(g, replicas...)
	if chief {
		makeChief(configs)
	}
	answers := make([]any, len(replicas))
	errs := onWorkers(configs, func(s *distribute.Strategy, worker int) error {
		var mine distribute.Value
		if list, ok := g.c.Inputs["per_worker"].([]any); ok {
			var devices []int
			for _, d := range s.EngineDevices() {
				devices = append(devices, d.Index)
			}
			var err error
			if mine, err = decodeValue(list[worker], devices); err != nil {
				return err
			}
		}
		out, err := g.onWorker(s, mine)
		answers[worker] = stepAnswer{out, err}
		return err
	})
	for w, err := range errs {
		if answers[w] == nil || err != nil {
			answers[w] = stepAnswer{nil, err}
		}
	}
	return map[string]any{"per_worker": answers}, nil
}

// makeChief makes the first worker the chief of the cluster, and the others the tasks of job worker.
func makeChief(configs []distribute.MultiWorkerConfig) {
	for w := range configs {
		r := configs[w].Resolver.(*cluster.Simple)
		addresses := r.Cluster.Tasks(cluster.Worker)
		r.Cluster = cluster.NewSpec(map[string][]string{cluster.Chief: addresses[:1], cluster.Worker: addresses[1:]})
		r.This = &cluster.Task{Type: cluster.Worker, Index: w - 1}
		if w == 0 {
			r.This = &cluster.Task{Type: cluster.Chief}
		}
	}
}

// onWorker executes a case on one worker. Each replica gets its part of the worker's value if that is distributed, else
// all of it.
func (g *goldenRun) onWorker(s *distribute.Strategy, mine distribute.Value) (any, error) {
	ctx := g.Context()
	axis := intOf(g.c.Options, "axis", 0)
	each := func(f replicaFunc) (distribute.Value, error) {
		if _, ok := mine.(*distribute.Components); ok {
			return distribute.RunNest(ctx, s,
				func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
					return f(ctx, r, args[0])
				}, mine)
		}
		return distribute.RunNest(ctx, s,
			func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
				return f(ctx, r, mine)
			})
	}
	own := func(_ context.Context, _ *distribute.Replica, mine distribute.Value) (distribute.Value, error) {
		return tensor.Map(mine, func(leaf any) (any, error) { // separate tensors for each replica, as after tf.identity
			if t, ok := leaf.(*tensor.Tensor); ok {
				return t.Clone(), nil
			}
			return leaf, nil
		})
	}
	switch action := g.c.Options["action"]; action {
	case "reduce", "reduce_host":
		return g.reduceOnWorker(s, mine, each, own)
	case "all_reduce":
		op, err := g.reduceOp()
		if err != nil {
			return nil, err
		}
		return each(func(ctx context.Context, r *distribute.Replica, mine distribute.Value) (distribute.Value, error) {
			return distribute.AllReduce(ctx, r, op, mine)
		})
	case "gather":
		v, err := each(own)
		if err != nil {
			return nil, err
		}
		return s.Extended().Gather(ctx, v, axis)
	case "gather_host":
		return s.Extended().Gather(ctx, mine, axis)
	case "reduce_to_host", "batch_reduce_host":
		return g.reduceHostTo(s, mine)
	case "all_gather":
		return each(func(ctx context.Context, r *distribute.Replica, mine distribute.Value) (distribute.Value, error) {
			return distribute.AllGather(ctx, r, mine, axis)
		})
	case "replica_id":
		return each(func(_ context.Context, r *distribute.Replica, _ distribute.Value) (distribute.Value, error) {
			return tensor.Scalar(int32(r.ID())), nil
		})
	case "values_from_function":
		v, err := s.Extended().DistributeValues(ctx, func(c distribute.ValueContext) (distribute.Value, error) {
			return tensor.From([]int32{int32(c.ReplicaID), int32(c.NumReplicas)}), nil
		})
		if err != nil {
			return nil, err
		}
		return distribute.Nested(s, v)
	case "var_init":
		v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: mine})
		if err != nil {
			return nil, err
		}
		return s.Extended().LocalResults(v), nil
	case "var_assign":
		return g.assignOnWorker(s, mine, each)
	case "dataset", "dataset_from_function":
		return g.drainOnWorker(s, action == "dataset")
	case "properties":
		return propertiesOnWorker(s)
	case "train_loop":
		return g.trainLoop(s)
	default:
		return nil, fmt.Errorf("the runner does not know the action %v", action)
	}
}

// replicaFunc is a step of one replica, with its part of its worker's value.
type replicaFunc = func(ctx context.Context, r *distribute.Replica, mine distribute.Value) (distribute.Value, error)

// eachReplica runs a function on every replica.
type eachReplica = func(replicaFunc) (distribute.Value, error)

func (g *goldenRun) reduceOnWorker(
	s *distribute.Strategy, mine distribute.Value, each eachReplica, own replicaFunc,
) (any, error) {
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	axes, err := g.axis()
	if err != nil {
		return nil, err
	}
	if g.c.Options["action"] == "reduce" {
		if mine, err = each(own); err != nil {
			return nil, err
		}
	}
	return s.Extended().Reduce(g.Context(), op, mine, distribute.ReduceOptions{Axis: axes})
}

// reduceHostTo reduces a value of each worker to a device, or each of a list of them in one batch.
func (g *goldenRun) reduceHostTo(s *distribute.Strategy, mine distribute.Value) (any, error) {
	op, err := g.reduceOp()
	if err != nil {
		return nil, err
	}
	list, ok := mine.([]any)
	if !ok {
		return s.Extended().ReduceTo(g.Context(), op, mine, "CPU:0")
	}
	var batch reductions
	for _, v := range list {
		batch.add(v, "CPU:0")
	}
	out, err := s.Extended().BatchReduceTo(g.Context(), op, batch.values, batch.to)
	return []any(out), err
}

func (g *goldenRun) assignOnWorker(s *distribute.Strategy, mine distribute.Value, each eachReplica) (any, error) {
	spec, _ := g.c.Options["variable"].(map[string]any)
	v, err := g.variable(s, spec)
	if err != nil {
		return nil, err
	}
	change, ok := variableMutations[fmt.Sprint(g.c.Options["do"])]
	if !ok {
		return nil, fmt.Errorf("the runner does not know the step %v", g.c.Options["do"])
	}
	result, err := each(func(_ context.Context, r *distribute.Replica, mine distribute.Value) (distribute.Value, error) {
		if err := change(v, r, mine); err != nil {
			return nil, err
		}
		return v.Read(r)
	})
	if err != nil {
		return nil, err
	}
	out := map[string]any{"result": result, "components": v.Values()}
	cross, err := s.Cross(g.Context())
	if err != nil {
		return nil, err
	}
	if out["cross_read"], err = v.Read(cross); err != nil {
		out["cross_read"] = err
	}
	return out, nil
}

func (g *goldenRun) drainOnWorker(s *distribute.Strategy, whole bool) (any, error) {
	o, err := g.inputOptions()
	if err != nil {
		return nil, err
	}
	if whole {
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
	contexts := []any{}
	set, err := s.DistributeDatasetsFromFunction(g.Context(), func(c distribute.InputContext) (data.Dataset, error) {
		contexts = append(contexts, []any{c.NumInputPipelines, c.InputPipelineID, c.NumReplicasInSync})
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

func propertiesOnWorker(s *distribute.Strategy) (any, error) {
	p := s.Properties()
	task, err := s.Properties().ClusterResolver.Task()
	return map[string]any{
		"num_replicas_in_sync": p.NumReplicasInSync, "worker_devices": anys(p.WorkerDevices),
		"should_checkpoint":   p.ShouldCheckpoint,
		"should_save_summary": p.ShouldSaveSummary, "experimental_should_init": p.ShouldInit,
		"in_multi_worker_mode": p.InMultiWorkerMode,
		"task_type":            task.Type, "task_id": task.Index,
	}, err
}

// goldenWorkerLimits lists the limits of TensorFlow's kernels that cases of several workers reach, like goldenLimits.
var goldenWorkerLimits = []goldenException{
	{
		"workers-dtypes", "TensorFlow's collective kernels lack some dtypes, and its gather axes that are counted from the " +
			"end",
		func(c *goldenCase, _ string) bool {
			list, _ := c.Expect["per_worker"].([]any)
			if c.Op != "multi_worker" || len(list) == 0 {
				return false
			}
			for _, of := range list {
				message, _ := of.(map[string]any)["error_message"].(string)
				if !slices.ContainsFunc(kernelLimits, func(limit string) bool { return strings.Contains(message, limit) }) {
					return false
				}
			}
			return true
		},
		checkWorkersPlainly,
	},
}

// goldenWorkerDefects lists TensorFlow's defects with several workers, like goldenDefects.
var goldenWorkerDefects = []goldenException{
	{
		"shared-tensor", "TensorFlow takes a tensor object that all replicas of a worker give in a step for one value of " +
			"the worker, and counts it once",
		func(c *goldenCase, _ string) bool {
			list, _ := c.Inputs["per_worker"].([]any)
			action := fmt.Sprint(c.Options["action"])
			return c.Op == "multi_worker" && slices.Contains([]string{"all_reduce", "all_gather", "var_assign"}, action) &&
				intOf(c.Strategy, "devices_per_worker", 1) > 1 && len(list) > 0 && !contains(list, "per_replica")
		},
		checkSharedTensor,
	},
}

// checkSharedTensor checks the answer for replicas that return separate tensors with the same elements.
func checkSharedTensor(g *goldenRun, answer map[string]any, err error) error {
	own := *g.c
	own.Inputs = maps.Clone(g.c.Inputs)
	var spread []any
	for _, v := range g.c.Inputs["per_worker"].([]any) {
		values := slices.Repeat([]any{v}, intOf(g.c.Strategy, "devices_per_worker", 1))
		spread = append(spread, map[string]any{"kind": "per_replica", "values": values})
	}
	own.Inputs["per_worker"] = spread
	want, e := goldenMultiWorker(&goldenRun{T: g.T, c: &own})
	if err = errors.Join(err, e); err != nil {
		return err
	}
	for w, a := range want["per_worker"].([]any) {
		want, got := a.(stepAnswer), answer["per_worker"].([]any)[w].(stepAnswer)
		if want.err != nil || got.err != nil || fmt.Sprint(got.result) != fmt.Sprint(want.result) {
			return fmt.Errorf("worker %d: got %v, %w, with tensors of the replicas' own %v, %w",
				w, got.result, got.err, want.result, want.err)
		}
	}
	return nil
}

// kernelLimits are phrases in the messages of TensorFlow's kernels for values that only ours can reduce.
var kernelLimits = []string{
	"Value for attr 'T' of ", "Value passed to parameter 'input' has DataType ",
	"Requires start <= limit",
}

// checkWorkersPlainly compares every worker's result with a plain sum, or with the concatenation of the workers'
// tensors.
func checkWorkersPlainly(g *goldenRun, answer map[string]any, err error) error {
	inputs, e := decodeList(g.c.Inputs["per_worker"], nil, false)
	if err = errors.Join(err, e); err != nil {
		return err
	}
	for w, a := range answer["per_worker"].([]any) {
		got := a.(stepAnswer)
		if got.err != nil {
			return fmt.Errorf("worker %d: %w", w, got.err)
		}
		switch action := g.c.Options["action"]; {
		case action == "gather" || action == "all_gather":
			want, err := tf.GatherWith(g.Context(), distribute.NewReductionToOneDevice("", nil),
				distribute.NewComponents(inputs...), "CPU:0", intOf(g.c.Options, "axis", 0))
			if t, ok := got.result.(*tensor.Tensor); err != nil || !ok || !t.Equal(want.(*tensor.Tensor)) {
				return fmt.Errorf("worker %d: got %v, want %v, %w", w, got.result, want, err)
			}
		case action == "all_reduce" || action == "reduce_host" || action == "reduce" && g.c.Options["axis"] == nil:
			op, err := g.reduceOp()
			if err != nil {
				return err
			}
			if _, err := tensor.Zip(func(path string, leaves []any) (any, error) {
				return nil, plainSum(fmt.Sprintf("worker %d%s", w, path), op, leaves[0], leaves[1:])
			}, nil, append([]any{got.result}, inputs...)...); err != nil {
				return err
			}
		default:
			return fmt.Errorf("no plain answer of %v is known: got %v", action, got.result)
		}
	}
	return nil
}
