package distribute_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// goldenCase is one input and TensorFlow's result for it.
type goldenCase struct {
	ID       string
	Op       string
	Strategy map[string]any
	Replicas int
	Inputs   map[string]any
	Options  map[string]any
	Expect   map[string]any
}

// goldenOps lists the operations that the runner knows. Each executes the case with the library and
// returns the fields of the answer, as Go values that [matchAnswer] can compare.
var goldenOps = map[string]func(*goldenRun) (map[string]any, error){
	"reduce":                    goldenReduce,
	"reduce_to":                 goldenReduceTo,
	"batch_reduce_to":           goldenBatchReduceTo,
	"all_reduce":                goldenAllReduce,
	"broadcast":                 goldenBroadcast,
	"run":                       goldenRunStep,
	"local_results":             goldenLocalResults,
	"values_from_function":      goldenValuesFromFunction,
	"regroup":                   goldenRegroup,
	"select_replica":            goldenSelectReplica,
	"train_loop":                goldenTrainLoop,
	"canonicalize_device":       goldenCanonicalizeDevice,
	"var_create":                goldenVarCreate,
	"var_program":               goldenVarProgram,
	"distribute_dataset":        goldenDistributeDataset,
	"distribute_dataset_worker": goldenDistributeDataset,
	"datasets_from_function":    goldenDatasetsFromFunction,
	"input_context":             goldenInputContext,
	"batch_sizes_for_worker":    goldenBatchSizes,
	"dist_dataset_reduce":       goldenDatasetSum,
	"context_query":             goldenContextQuery,
	"scenario":                  goldenScenario,
	"mirrored_init":             goldenMirroredInit,
	"mwms_init":                 goldenMultiWorkerInit,
	"device_list":               goldenDeviceList,
	"all_gather":                goldenAllGather,
	"gather":                    goldenGather,
	"all_gather_gradient":       goldenAllGatherGradient,
	"all_reduce_gradient":       goldenAllReduceGradient,
	"all_reduce_packs":          goldenAllReducePacks,
	"group_by_size":             goldenGroupBySize,
	"concat_split_pack":         goldenConcatSplitPack,
	"cross_device_reduce":       goldenCrossDeviceReduce,
	"cross_device_batch_reduce": goldenCrossDeviceBatchReduce,
	"cross_device_ctor":         goldenCrossDeviceConstructor,
	"select_cross_device_ops":   goldenSelectedOps,
	"collective_timeout":        goldenCollectiveTimeout,
	"collective_keys":           goldenCollectiveKeys,
	"communication_options":     goldenCommunicationOptions,
	"multi_worker":              goldenMultiWorker,

	"tfconfig_resolver":           goldenTFConfigResolver,
	"slurm_resolver":              goldenSlurmResolver,
	"slurm_expand_hostlist":       goldenExpandHostlist,
	"slurm_expand_tasks_per_node": goldenExpandTasksPerNode,
	"simple_resolver":             goldenSimpleResolver,
	"union_resolver":              goldenUnionResolver,
	"multi_worker_util":           goldenMultiWorkerUtil,
	"cluster_spec_to_device_list": goldenClusterDevices,
}

// goldenException is an answer of TensorFlow that differs from ours, with the reason. check compares ours with the
// right one.
type goldenException struct {
	name, reason string
	applies      func(c *goldenCase, message string) bool
	check        func(g *goldenRun, answer map[string]any, err error) error
}

// goldenLimits lists the cases in which TensorFlow's answer is only a limit of its kernels or an accident of Python,
// and the library returns a right answer. A sum is compared with a plain sum.
var goldenLimits = []goldenException{
	{
		"no-keys", "TensorFlow's members agree on keys for their groups and calls; a group of communicators counts its calls",
		func(c *goldenCase, _ string) bool { return c.Op == "collective_keys" }, checkNotInGo,
	},
	{
		"collective-dtypes", "TensorFlow's collective kernels lack the small and the unsigned integers, and bfloat16",
		func(c *goldenCase, message string) bool {
			_, rest, found := strings.Cut(message, "Value for attr 'T' of ")
			if !found {
				_, rest, found = strings.Cut(message, "Value passed to parameter 'input' has DataType ")
			}
			name, _, _ := strings.Cut(rest, " ")
			dtype, err := tensor.ParseDType(name)
			return found && isReduction(c) && err == nil && dtype.IsNumeric()
		},
		checkPlainSum,
	},
	{
		"collective-sparse", "TensorFlow's collectives add no IndexedSlices to dense tensors, nor those with int32 indices " +
			"to those with int64",
		func(c *goldenCase, message string) bool {
			return isBatch(c) && contains(c.Inputs, "indexed_slices") &&
				(c.Expect["error_type"] == "AssertionError" || strings.Contains(message, "expected type"))
		},
		checkPlainSum,
	},
	{
		"graph-pack", "TensorFlow packs tensors of different dtypes into one, and fails",
		func(c *goldenCase, message string) bool {
			return isBatch(c) &&
				(strings.Contains(message, "that don't all match") || strings.Contains(message, "cannot compute ConcatV2"))
		},
		checkPlainSum,
	},
	{
		"nccl-kernel", "TensorFlow has no NCCL kernels for CPUs",
		func(c *goldenCase, message string) bool {
			return isReduction(c) && (strings.Contains(message, "No OpKernel was registered to support Op 'NcclAllReduce'") ||
				strings.Contains(message, "required for nccl collective ops"))
		},
		checkPlainSum,
	},
	{
		"tensor-alone", "TensorFlow's collectives want a component for each device, and crash on a tensor alone or too few",
		func(c *goldenCase, _ string) bool {
			return isBatch(c) && c.Expect["error_type"] == "IndexError" && !isEmpty(c.Inputs["values"])
		},
		checkAlone,
	},
	{
		"host-number", "TensorFlow crashes on the host number 0, whose sum is 0, and on host numbers in a batch",
		func(c *goldenCase, message string) bool {
			return (strings.Contains(message, "has no attribute 'shape'") ||
				strings.Contains(message, "has no attribute 'dtype'") || strings.Contains(message, "has no attribute 'device'") ||
				isBatch(c) &&
					(strings.Contains(message, "destinations must be one of a") ||
						strings.Contains(message, "must be either all on the host"))) && contains(c.Inputs, "scalar") && c.Op != "run"
		},
		checkPlainSum,
	},
	{
		"empty-batch", "TensorFlow crashes on a batch or a nest of nothing",
		func(c *goldenCase, message string) bool {
			return isBatch(c) &&
				(strings.Contains(message, "'NoneType' object has no attribute 'batch_reduce'") ||
					strings.Contains(message, "passed list of length 0") || c.Expect["error_type"] == "IndexError" &&
					isEmpty(c.Inputs["values"]))
		},
		checkPlainSum,
	},
	{
		"empty-batch-of-strategy", "TensorFlow crashes on a batch of nothing",
		isScenario("batch_reduce_to_empty"),
		func(_ *goldenRun, answer map[string]any, err error) error {
			if list, ok := answer["value"].([]any); err != nil || !ok || len(list) != 0 {
				return fmt.Errorf("got %v, %w, want an empty list", answer, err)
			}
			return nil
		},
	},
	{
		"host-zero-assigned", "TensorFlow crashes on writing the host number 0 on each replica, whose sum is 0",
		func(c *goldenCase, _ string) bool {
			steps, _ := c.Expect["steps"].([]any)
			return slices.ContainsFunc(steps, func(st any) bool {
				answer, _ := st.(map[string]any) // a dataset's steps are lists
				message, _ := answer["error_message"].(string)
				return isHostZeroAccident(message)
			})
		},
		checkHostZero,
	},
	{
		"nest-of-values", "TensorFlow's strategies but the mirrored one take a nest for one value: its mean is the first " +
			"replica's part",
		func(c *goldenCase, message string) bool {
			value, _ := c.Inputs["value"].(map[string]any)
			nest := value["kind"] == "list" || value["kind"] == "tuple" || value["kind"] == "dict"
			return (c.Op == "reduce" || c.Op == "reduce_to") && nest && c.Strategy["type"] != "MirroredStrategy" &&
				(c.Strategy["type"] != "OneDeviceStrategy" || c.Options["axis"] == nil) &&
				(!c.fails() || strings.Contains(message, "A non-DistributedValues value") ||
					strings.Contains(message, "Failed to convert elements of"))
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if g.c.Options["destinations"] == "value" && errors.Is(err, distribute.ErrInvalid) &&
				strings.Contains(err.Error(), "destinations") {
				return nil // a nest has no device
			}
			return checkPlainSum(g, answer, err)
		},
	},
	{
		"nest-in-per-replica", "TensorFlow crashes on the components of a distributed value being nests",
		func(c *goldenCase, message string) bool {
			return strings.HasPrefix(c.Op, "reduce") && strings.Contains(message, "object has no attribute 'device'") &&
				contains(c.Inputs, "per_replica")
		},
		checkPlainSum,
	},
}

// goldenDefects lists the cases in which TensorFlow's answer is wrong, or has no meaning here.
var goldenDefects = []goldenException{
	{
		"hierarchical-odd", "TensorFlow's HierarchicalCopyAllReduce leaves out the last of an odd number of devices",
		func(c *goldenCase, _ string) bool {
			return opsType(c) == "HierarchicalCopyAllReduce" && c.Replicas%2 == 1 && c.Replicas > 1 &&
				(isBatch(c) || c.Op == "all_reduce_gradient") && !c.fails()
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if errors.Is(err, distribute.ErrMismatch) {
				return nil // TensorFlow does not detect it, see below
			}
			return checkPlainSum(g, answer, err)
		},
	},
	{
		"hierarchical-odd-gradient", "its gradient of a gather leaves them out, too",
		func(c *goldenCase, _ string) bool {
			return opsType(c) == "HierarchicalCopyAllReduce" && c.Replicas%2 == 1 && c.Replicas > 1 &&
				c.Op == "all_gather_gradient" && !c.fails()
		},
		checkPlainGather,
	},
	{
		"hierarchical-shapes", "TensorFlow's HierarchicalCopyAllReduce adds tensors of one size whatever their shapes",
		func(c *goldenCase, _ string) bool {
			return opsType(c) == "HierarchicalCopyAllReduce" && isBatch(c) && !c.fails()
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrMismatch) {
				return fmt.Errorf("got %v, %w, want a mismatch", answer, err)
			}
			return nil
		},
	},
	{
		"collective-order", "TensorFlow's collectives gather IndexedSlices in the order of the devices' names, not of the " +
			"replicas",
		func(c *goldenCase, _ string) bool {
			return isBatch(c) && contains(c.Inputs, "indexed_slices") && outOfOrder(c)
		},
		checkPlainSum,
	},
	{
		"collective-gather-order", "TensorFlow's collectives gather in the order of the devices' names, not of the replicas",
		func(c *goldenCase, _ string) bool { return isGather(c) && outOfOrder(c) },
		checkPlainGather,
	},
	{
		"tf-config-parts", "TensorFlow takes whatever Python makes of a part of TF_CONFIG; [tfConfigParts] has the reasons " +
			"one by one",
		func(c *goldenCase, _ string) bool { return c.Op == "tfconfig_resolver" && !c.fails() },
		checkTFConfigParts,
	},
	{
		"empty-layer", "TensorFlow tells an empty RPC layer from one that is not given, and leaves it out of the address",
		func(c *goldenCase, _ string) bool {
			args, _ := c.Options["master_args"].(map[string]any)
			ctor, _ := c.Options["ctor"].(map[string]any)
			return c.Op != "tfconfig_resolver" && strings.HasSuffix(c.Op, "_resolver") &&
				(args["rpc_layer"] == "" || ctor["rpc_layer"] == "") && !c.fails()
		},
		checkButForLayer,
	},
	{
		"foreign-variable", "TensorFlow's strategies but the mirrored ones make variables that know no strategy, and can " +
			"be used in every other one",
		func(c *goldenCase, _ string) bool {
			name, _ := c.Options["scenario"].(string)
			return c.Op == "scenario" && !c.fails() &&
				(strings.HasPrefix(name, "var_from_other_strategy") || strings.Contains(name, "plain_var") ||
					strings.HasPrefix(name, "colocate_vars"))
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrContext) && !errors.Is(err, distribute.ErrInvalid) ||
				!strings.Contains(err.Error(), "mixing different strategies") &&
					!strings.Contains(err.Error(), "must only be passed a variable") {
				return fmt.Errorf("got %v, %w, want a variable of another strategy", answer, err)
			}
			return nil
		},
	},
	{
		"cut-elsewhere", "TensorFlow knows how many rows unbatch and padded_batch make; here they are functions of the " +
			"user's own, whose rows are cut into equal parts",
		func(c *goldenCase, _ string) bool {
			return strings.HasPrefix(c.Op, "distribute_dataset") && !c.fails() && hasOwnFunction(c)
		},
		checkCutElsewhere,
	},
	{
		"unequal-rows", "TensorFlow cuts the tensors of an element each by itself, and loses which rows belong together",
		func(c *goldenCase, _ string) bool {
			return strings.HasPrefix(c.Op, "distribute_dataset") && !c.fails() && !hasOwnFunction(c)
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrMismatch) || !strings.Contains(err.Error(), "the first dimension counts examples") {
				return fmt.Errorf("got %v, %w, want tensors of different lengths", answer, err)
			}
			return nil
		},
	},
	{
		"empty-type", "TensorFlow tells an empty task type from none, and refuses it",
		func(c *goldenCase, _ string) bool {
			return c.Op == "multi_worker_util" && c.Options["task_type"] == "" && c.fails()
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			without := *g.c
			without.Options = maps.Clone(g.c.Options)
			delete(without.Options, "task_type")
			want, e := goldenOps[g.c.Op](&goldenRun{T: g.T, c: &without})
			if bitsOf(answer) != bitsOf(want) || (err == nil) != (e == nil) {
				return fmt.Errorf("got %v, %w, without a type %v, %w", answer, err, want, e)
			}
			return nil
		},
	},
	{
		"negative-device", "TensorFlow takes any number for a device's index",
		func(c *goldenCase, _ string) bool {
			name, _ := c.Expect["value"].(string)
			return c.Op == "canonicalize_device" && strings.Contains(name, ":-")
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "is not an index") {
				return fmt.Errorf("got %v, %w, want no index", answer, err)
			}
			return nil
		},
	},
	{
		"first-structure", "TensorFlow looks at the structure of the first replica's nest only, if that is a leaf",
		func(c *goldenCase, _ string) bool { return c.Op == "regroup" && !c.fails() },
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrMismatch) {
				return fmt.Errorf("got %v, %w, want structures that differ", answer, err)
			}
			return nil
		},
	},
	{
		"steps-of-nothing", "where a worker's turn begins with a part without rows, TensorFlow makes a step of it also if " +
			"there is no data at all",
		func(c *goldenCase, _ string) bool {
			steps, _ := c.Expect["steps"].([]any)
			return c.Op == "distribute_dataset_worker" && len(steps) > 0 && !hasRows(steps)
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if steps, _ := answer["steps"].([]any); err != nil || len(steps) > 0 || answer["ended"] != true {
				return fmt.Errorf("got %v, %w, want no steps", answer, err)
			}
			return nil
		},
	},
	{
		"negative-replica", "TensorFlow counts a negative replica from the end, as Python does",
		func(c *goldenCase, _ string) bool {
			n, err := wholeNumber(c.Options["replica"])
			return c.Op == "select_replica" && err == nil && n < 0
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "there is no replica") {
				return fmt.Errorf("got %v, %w, want no such replica", answer, err)
			}
			return nil
		},
	},
	{
		"axis-of-truth", "Python's True is the axis 1 to TensorFlow",
		func(c *goldenCase, _ string) bool {
			_, truth := c.Options["axis"].(bool)
			return truth && !c.fails()
		},
		checkNotInGo,
	},
	{
		"ruled-out", "what cannot be written here has a meaning in some of TensorFlow's strategies by the way they are " +
			"written",
		func(c *goldenCase, _ string) bool {
			name, _ := c.Options["scenario"].(string)
			_, out := ruledOut[name]
			return c.Op == "scenario" && out && !c.fails()
		},
		checkNotInGo,
	},
	{
		"shared-variable-once", "TensorFlow's CentralStorageStrategy counts a variable once in the sum over the replicas, " +
			"each of which has it",
		func(c *goldenCase, _ string) bool {
			return isScenario("all_reduce_mirrored_variable")(c, "") && c.Strategy["type"] == "CentralStorageStrategy" &&
				!c.fails()
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			sum, ok := answer["value"].(*distribute.Components)
			if err != nil || !ok || sum.Len() != g.c.Replicas {
				return fmt.Errorf("got %v, %w, want a sum on each replica", answer, err)
			}
			for _, v := range sum.Values() {
				if x := v.(*tensor.Tensor).Float64s()[0]; x != 2*float64(g.c.Replicas) {
					return fmt.Errorf("got %v, want %d times 2", x, g.c.Replicas)
				}
			}
			return nil
		},
	},
	{
		"destination-of-one", "TensorFlow's MultiWorkerMirroredStrategy of one replica leaves a mean where it is, whatever " +
			"its destination",
		func(c *goldenCase, _ string) bool {
			op, _ := c.Options["reduce_op"].(string)
			return c.Op == "reduce_to" && c.Strategy["type"] == "MultiWorkerMirroredStrategy" && c.Replicas == 1 &&
				strings.EqualFold(op, "MEAN") && !c.fails()
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if errors.Is(err, distribute.ErrInvalid) && strings.Contains(err.Error(), "is not in the list of allowed values") {
				return nil // a bool has no mean
			}
			return checkPlainSum(g, answer, err)
		},
	},
	{
		"placement-unused", "TensorFlow does not look at where datasets are placed but for functions and MirroredStrategy",
		func(c *goldenCase, _ string) bool {
			o, _ := c.Options["input_options"].(map[string]any)
			return !c.fails() && o["experimental_place_dataset_on_device"] == true &&
				(c.Op == "distribute_dataset" || c.Op == "datasets_from_function" && c.Strategy["type"] != "MirroredStrategy")
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "PlaceOnDevice") {
				return fmt.Errorf("got %v, %w, want options that do not go together", answer, err)
			}
			return nil
		},
	},
	{
		"too-few-components", "TensorFlow's operations but the collectives add what components there are of a value that " +
			"has not one for each replica",
		func(c *goldenCase, _ string) bool {
			return strings.Contains(c.Op, "reduce") && c.Strategy["type"] != "Default" && !c.fails() &&
				hasWrongCount(c.Inputs, c.Replicas)
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "components") {
				return fmt.Errorf("got %v, %w, want a value that does not suit the strategy", answer, err)
			}
			return nil
		},
	},
	{
		"one-device-distributed", "TensorFlow's OneDeviceStrategy has no distributed values, and takes them for the user's " +
			"own objects",
		func(c *goldenCase, _ string) bool {
			return c.Op != "var_program" && c.Strategy["type"] == "OneDeviceStrategy" &&
				(contains(c.Inputs, "per_replica") || contains(c.Inputs, "mirrored"))
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			alone := *g.c
			alone.Inputs, _ = undistributed(g.c.Inputs).(map[string]any)
			want, e := goldenOps[alone.Op](&goldenRun{T: g.T, c: &alone})
			got := answer
			if v, ok := answer["value"]; ok {
				first, e := tf.SelectReplica(0, v)
				if e != nil {
					return e
				}
				got, want = map[string]any{"value": first}, map[string]any{"value": want["value"]}
			}
			if g.c.Op == "local_results" {
				return err // the value itself, which has its component
			}
			if fmt.Sprint(got) != fmt.Sprint(want) || (err == nil) != (e == nil) {
				return fmt.Errorf("got %v, %w, with the component alone %v, %w", answer, err, want, e)
			}
			return nil
		},
	},
	{
		"step-half-done", "TensorFlow keeps what a step or an update that fails has written before; here it has written " +
			"nothing",
		func(c *goldenCase, _ string) bool { return c.Op == "var_program" && failedWrite(c) >= 0 },
		checkNothingWritten,
	},
	{
		"part-of-a-byte", "TensorFlow takes packs of a byte and a half",
		func(c *goldenCase, _ string) bool {
			value, _ := c.Expect["value"].(map[string]any)
			bytes, _ := value["bytes_per_pack"].(json.Number)
			_, err := bytes.Int64()
			return c.Op == "communication_options" && bytes != "" && err != nil
		},
		checkNotInGo,
	},
	{
		"destination-unused", "TensorFlow does not look at a destination that it turns out not to need",
		func(c *goldenCase, message string) bool {
			return c.Op == "reduce_to" && (!c.fails() || strings.Contains(message, "cannot be reduced"))
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "destinations") {
				return fmt.Errorf("got %v, %w, want a wrong destination", answer, err)
			}
			return nil
		},
	},
	{
		"mode-unused", "TensorFlow's CentralStorageStrategy does not look at the replication mode, and makes one dataset " +
			"for all",
		func(c *goldenCase, _ string) bool {
			o, _ := c.Options["input_options"].(map[string]any)
			return c.Op == "datasets_from_function" && c.Strategy["type"] == "CentralStorageStrategy" &&
				o["experimental_replication_mode"] == "PER_REPLICA"
		},
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrUnsupported) {
				return fmt.Errorf("got %v, %w, want a mode that is not supported", answer, err)
			}
			return nil
		},
	},
	{
		"variable-of-one-replica", "TensorFlow makes a variable with no component on the replicas that do not make it",
		isScenario("create_var_only_replica0"),
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrDesync) {
				return fmt.Errorf("got %v, %w, want a step whose replicas' calls can never match", answer, err)
			}
			return nil
		},
	},
	{
		"worker-without-file", "with fewer files than workers TensorFlow fails on worker 0 only, and gives the others " +
			"nothing",
		tooFewFiles, checkTooFewFiles,
	},
	{
		"no-such-device", "TensorFlow makes strategies of devices that are not there",
		func(c *goldenCase, _ string) bool { return c.Op == "mirrored_init" && !c.fails() },
		func(_ *goldenRun, answer map[string]any, err error) error {
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "does not exist") {
				return fmt.Errorf("got %v, %w, want a device that is not there", answer, err)
			}
			return nil
		},
	},
	{
		"two-names-of-one-worker", "TensorFlow takes the full name of a device of this process and a short one for two " +
			"workers",
		func(c *goldenCase, message string) bool {
			return c.Op == "mirrored_init" && strings.Contains(message, "In-graph multi-worker") &&
				!slices.ContainsFunc(names(c.Inputs["devices"]), func(name string) bool {
					d, err := device.Canonical(name)
					return err != nil || d.Job != "localhost" || d.Task != 0
				})
		},
		func(g *goldenRun, answer map[string]any, err error) error {
			if err != nil {
				return err
			}
			devices := []any{}
			for _, name := range names(g.c.Inputs["devices"]) {
				d, _ := device.Canonical(name)
				devices = append(devices, d.String())
			}
			return match("value.worker_devices", devices, answer["value"].(map[string]any)["worker_devices"], exact)
		},
	},
}

// checkNotInGo checks cases that do not compile.
func checkNotInGo(_ *goldenRun, answer map[string]any, err error) error {
	if !errors.Is(err, errNotInGo) {
		return fmt.Errorf("got %v, %w, want what does not compile", answer, err)
	}
	return nil
}

// hasWrongCount reports whether a distributed value in v has another number of components than n.
func hasWrongCount(v any, n int) bool {
	switch v := v.(type) {
	case map[string]any:
		if values, ok := v["values"].([]any); ok && (v["kind"] == "per_replica" || v["kind"] == "mirrored") &&
			len(values) != n {
			return true
		}
		for _, x := range v {
			if hasWrongCount(x, n) {
				return true
			}
		}
	case []any:
		for _, x := range v {
			if hasWrongCount(x, n) {
				return true
			}
		}
	}
	return false
}

// hasRows reports whether a tensor in v has elements.
func hasRows(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		if list, ok := v["data"].([]any); ok && len(list) > 0 {
			return true
		}
		for _, x := range v {
			if hasRows(x) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, hasRows)
	}
	return false
}

// undistributed replaces each distributed value of a case by its first component.
func undistributed(v any) any {
	switch v := v.(type) {
	case map[string]any:
		if values, ok := v["values"].([]any); ok && (v["kind"] == "per_replica" || v["kind"] == "mirrored") &&
			len(values) > 0 {
			return values[0]
		}
		out := map[string]any{}
		for k, x := range v {
			out[k] = undistributed(x)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = undistributed(x)
		}
		return out
	}
	return v
}

// isScenario returns a function that reports whether a case is one of the scenario.
func isScenario(name string) func(*goldenCase, string) bool {
	return func(c *goldenCase, _ string) bool { return c.Op == "scenario" && c.Options["scenario"] == name }
}

// outOfOrder reports whether the case's collectives are TensorFlow's own, between devices that are not in the
// order of their names, and gave an answer.
func outOfOrder(c *goldenCase) bool {
	devices, _ := c.Strategy["devices"].([]any)
	ascending := slices.IsSortedFunc(devices, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	return opsType(c) == "" && !c.fails() && !ascending
}

// fails reports whether TensorFlow returned an error.
func (c *goldenCase) fails() bool { return c.Expect["error_type"] != nil }

// isBatch reports whether the case's operation reduces a batch.
func isBatch(c *goldenCase) bool {
	return c.Op == "all_reduce" || c.Op == "batch_reduce_to" || strings.HasPrefix(c.Op, "cross_device_") &&
		c.Op != "cross_device_ctor"
}

// isReduction reports whether the case's operation is a reduction of any kind.
func isReduction(c *goldenCase) bool {
	return isBatch(c) || c.Op == "reduce" && c.Options["axis"] == nil || c.Op == "reduce_to" ||
		c.Op == "all_reduce_gradient"
}

// isEmpty reports whether v is an empty list.
func isEmpty(v any) bool {
	list, ok := v.([]any)
	return ok && len(list) == 0
}

// contains reports whether a value of the kind is in a value of a case.
func contains(v any, kind string) bool {
	switch v := v.(type) {
	case map[string]any:
		if v["kind"] == kind {
			return true
		}
		for _, x := range v {
			if contains(x, kind) {
				return true
			}
		}
	case []any:
		for _, x := range v {
			if contains(x, kind) {
				return true
			}
		}
	}
	return false
}

// goldenExceptionsMax is the share of the cases that may be exceptions of one kind: limits of
// TensorFlow, where the library's answer is right and compared with a plain computation; and defects, where the answers
// must differ.
const goldenExceptionsMax = 0.03

// goldenFiles are the cases with TensorFlow 2.21's answers. Those of golden-more.json are a choice of random
// ones in the same schema: new data, dtypes, numbers of replicas, axes and destinations, one of each kind.
// Those of golden-workers.json ran on real clusters of three workers, a chief and workers, and workers with two
// devices. Those of golden-tfconfig.json are malformed and unusual TF_CONFIGs. testdata/golden.md describes how they
// were made.
var goldenFiles = []string{
	"testdata/golden.json", "testdata/golden-more.json", "testdata/golden-workers.json", "testdata/golden-tfconfig.json",
}

// TestGolden compares the library with TensorFlow's answers. LOCKSTEP_GOLDEN names another file of cases to run
// instead.
func TestGolden(t *testing.T) {
	files := goldenFiles
	another := os.Getenv("LOCKSTEP_GOLDEN")
	if another != "" {
		files = []string{another}
	}
	total, exceptions := 0, map[exceptionKind]int{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		cases, err := parseGolden(text)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		total += len(cases)
		for _, c := range cases {
			t.Run(c.ID, func(t *testing.T) {
				exceptions[testGoldenCase(t, c)]++
			})
		}
	}
	for _, kind := range []exceptionKind{limit, defect} {
		if most := int(goldenExceptionsMax * float64(total)); another == "" && exceptions[kind] > most {
			t.Errorf("%d of %d cases are exceptions for TensorFlow's %ss: want at most %d", exceptions[kind], total, kind, most)
		}
	}
}

// parseGolden reads a file of cases.
func parseGolden(text []byte) ([]*goldenCase, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var cases []*goldenCase
	if err := d.Decode(&cases); err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, c := range cases {
		switch {
		case c == nil || c.ID == "" || c.Op == "":
			return nil, errors.New("a case without id or op")
		case seen[c.ID]:
			return nil, fmt.Errorf("two cases %s", c.ID)
		}
		seen[c.ID] = true
	}
	return cases, nil
}

// exceptionKind is the list of exceptions that a case is in, if any.
type exceptionKind string

const (
	none   exceptionKind = ""
	limit  exceptionKind = "limit"
	defect exceptionKind = "defect"
)

// testGoldenCase executes a case, compares the answers, and returns the case's kind of exception. A panic fails this
// case only.
func testGoldenCase(t *testing.T, c *goldenCase) exceptionKind {
	defer func() {
		if v := recover(); v != nil {
			t.Errorf("panic: %v\n%s", v, debug.Stack())
		}
	}()
	do, known := goldenOps[c.Op]
	if !known {
		t.Fatalf("the runner does not know the operation %q", c.Op)
	}
	g := &goldenRun{T: t, c: c}
	answer, err := do(g)
	notGiven(c.Expect["value"], answer["value"])
	differs := matchAnswer(c.Expect, answer, err, g.tolerance())
	if differs == nil {
		return none
	}
	message, _ := c.Expect["error_message"].(string)
	for _, list := range []struct {
		kind exceptionKind
		of   []goldenException
	}{{limit, goldenLimits}, {limit, goldenGatherLimits}, {limit, goldenWorkerLimits}, {limit, goldenInputLimits}, {
		limit,
		goldenClusterLimits,
	}, {defect, goldenDefects}, {defect, goldenWorkerDefects}, {defect, goldenClusterDefects}} {
		for _, e := range list.of {
			if !e.applies(c, message) {
				continue
			}
			if err := e.check(g, answer, err); err != nil {
				differs = fmt.Errorf("%w\nno exception %s (%s): %w", differs, e.name, e.reason, err)
				continue
			}
			t.Logf("exception %s: %s", e.name, e.reason)
			return list.kind
		}
	}
	t.Fatal(differs)
	return none
}

// notGiven converts absent fields of an answer to TensorFlow's form: None, its text or the empty text.
func notGiven(want, got any) {
	expect, _ := want.(map[string]any)
	answer, _ := got.(map[string]any)
	for field, text := range expect {
		if v, there := answer[field]; there && v == nil && (text == "" || text == "None") {
			answer[field] = text
		}
	}
}

// matchAnswer compares an answer with TensorFlow's.
func matchAnswer(expect, answer map[string]any, err error, tol tolerance) error {
	if want, isError := expect["error_type"].(string); isError {
		message, _ := expect["error_message"].(string)
		return matchError(want, message, answer, err)
	}
	if err != nil {
		return fmt.Errorf("got the error: %w", err)
	}
	for field, want := range expect {
		if field == "tolerance" {
			continue
		}
		got, ok := answer[field]
		if !ok {
			return fmt.Errorf("the answer has no field %s", field)
		}
		if steps, ok := got.([]any); ok && len(steps) > 0 && isStepAnswer(steps[0]) {
			list, _ := want.([]any)
			if err := matchSteps(list, steps, tol, func(string) bool { return false }); err != nil {
				return err
			}
			continue
		}
		if err := match(field, want, got, tol); err != nil {
			return err
		}
	}
	return nil
}

func isStepAnswer(v any) bool {
	_, ok := v.(stepAnswer)
	return ok
}

// errNotInGo marks cases that Go's types rule out: they do not compile.
var errNotInGo = errors.New("does not compile in Go")

// errorKinds maps TensorFlow's exceptions to this package's kinds of errors. Exceptions from unguarded Python match any
// error.
var errorKinds = map[string][]error{
	"ValueError":           {distribute.ErrInvalid, distribute.ErrMismatch, distribute.ErrContext, errNotInGo},
	"TypeError":            {distribute.ErrInvalid, distribute.ErrMismatch, errNotInGo},
	"InvalidArgumentError": {distribute.ErrInvalid, distribute.ErrMismatch, errNotInGo},
	"KeyError":             {distribute.ErrInvalid, errNotInGo},
	"JSONDecodeError":      {distribute.ErrInvalid},
	"OverflowError":        {distribute.ErrInvalid},
	"UnicodeEncodeError":   {distribute.ErrInvalid},
	"RuntimeError": {
		distribute.ErrContext, distribute.ErrDesync, distribute.ErrMismatch, distribute.ErrInvalid,
		errNotInGo,
	},
	"InternalError":         {distribute.ErrInvalid, distribute.ErrMismatch},
	"NotFoundError":         {distribute.ErrInvalid},
	"FileNotFoundError":     {distribute.ErrInvalid},
	"NotImplementedError":   {distribute.ErrUnsupported},
	"UnimplementedError":    {distribute.ErrInvalid, distribute.ErrUnsupported},
	"DeadlineExceededError": {distribute.ErrTimeout},
	"AssertionError":        nil,
	"AttributeError":        nil,
	"IndexError":            nil,
	"StagingError":          nil, // any of these, inside of a function
}

// keyPhrases lists the essential phrases of TensorFlow's messages, in lower case, and the corresponding phrases of this
// package's messages if they differ.
var keyPhrases = []struct {
	tf   string
	ours []string
}{
	{"cannot be reduced with the given reduce op", nil},
	{"is not in the list of allowed values", nil},
	{"must have the same size and shape", []string{"must have the same size and shape", callsDiffer}},
	{"shape mismatch in the collective instance", []string{"must have the same size and shape", callsDiffer}},
	{"was expected to be a", []string{"expected to be a", callsDiffer}},
	{"invalid reduction dimension", nil},
	{"duplicate dimension", nil},
	{"is not a valid reduceop", nil},
	{"destinations can not be empty", nil},
	{"destinations must be one of a", nil},
	{"must be either all on the host or all on the compute devices", nil},
	{"requires being in cross-replica context", nil},
	{"mixing different tf.distribute.strategy objects", []string{"mixing different strategies"}},
	{"must be >=0, received", nil},
	{"is not a valid communicationimplementation", nil},
	{
		"`none` variable synchronization mode is not supported",
		[]string{"none variable synchronization mode is not supported"},
	},
	{"invalid variable synchronization mode", nil},
	{"invalid variable aggregation mode", nil},
	{"with aggregation=mean and a non-floating dtype is not supported", nil},
	{"unknown attribute", nil},
	{"no duplicates allowed", nil},
	{"could not convert from `tf.variableaggregation`", []string{"could not convert from `variableaggregation"}},
	{"does not support `assign_", []string{"does not support assign"}},
	{"doesn't support `scatter_", []string{"don't support `scatter_"}},
	{"is only supported for mirrored variable", nil},
	{"shape mismatch", []string{"shape mismatch", "must have the same size and shape", callsDiffer}},
	{"you must specify an aggregation method", nil},
	{"need to be inside `call_for_each_replica()`", []string{"need to be inside the step function"}},
	{"need to be inside \"with strategy.scope()\"", []string{"need to be inside a scope"}},
	{"mismatching replicacontext", []string{"mismatching replica", "outside of the run"}},
	{"made a different number of", []string{"replica"}},
	{"`colocate_vars_with` must only be passed", []string{"colocatevariableswith must only be passed"}},
	{"must not be called inside a", nil},
	{"mismatching name on device", nil},
	{"boom from", nil},
	{"should be called from outside of replica_fn", []string{"outside of the step"}},
	{"in-graph multi-worker training", nil},
	{"is not divisible by `num_replicas_in_sync`", []string{"is not divisible by the number of replicas in sync"}},
	{"found an unshardable source dataset", nil},
	{"could not apply file based sharding", nil},
	{"every worker to have the same number of replicas", []string{"every worker must have the same number of replicas"}},
	{"can not be set", nil},
	{"is only supported in `experimental_distribute_datasets_from_function`", []string{"is only supported"}},
	{"local device should have only 'localhost'", nil},
	{"remote device string must have task specified", nil},
	{"all workers should have the same number of gpus", nil},
	{"should be consecutive and start from 0", nil},
	{"you must also specify `task_type` and `task_id`", []string{"you must also specify the task's type and index"}},
}

// callsDiffer is a phrase of every error about a mismatch between replicas.
const callsDiffer = "differ"

// matchError compares an error with TensorFlow's: its kind, and the essential phrases of its message.
func matchError(want, message string, answer map[string]any, err error) error {
	if err == nil {
		return fmt.Errorf("got %v, want a %s: %s", answer, want, message)
	}
	kinds, known := errorKinds[want]
	if !known {
		return fmt.Errorf("the runner does not know the exception %s: %s", want, message)
	}
	if kinds == nil {
		return nil
	}
	ok := false
	for _, k := range kinds {
		ok = ok || errors.Is(err, k)
	}
	if !ok {
		return fmt.Errorf("got an error of another kind than %s: %w", want, err)
	}
	if errors.Is(err, errNotInGo) {
		return nil
	}
	text := strings.ToLower(err.Error())
	for _, p := range keyPhrases {
		if !strings.Contains(strings.ToLower(message), p.tf) {
			continue
		}
		ours := p.ours
		if ours == nil {
			ours = []string{p.tf}
		}
		if !slices.ContainsFunc(ours, func(phrase string) bool { return strings.Contains(text, phrase) }) {
			return fmt.Errorf("got the error %q, which does not say %q as TensorFlow's does: %s", err, ours, message)
		}
	}
	return nil
}

// tolerance is the largest difference between equal numbers.
type tolerance struct {
	exact bool
	float float64 // relative, of float32; 0: the schema's
	// pieces: in a piece without rows, TensorFlow sets unknown dimensions to 0 until it has read an element
	pieces bool
}

var exact = tolerance{exact: true}

// tolerance returns the schema's tolerance: sums of two and copies are exact.
func (g *goldenRun) tolerance() tolerance {
	op, _ := g.c.Options["reduce_op"].(string)
	fn, _ := g.c.Options["fn"].(string)
	tol := tolerance{exact: g.c.Replicas <= 2 && !strings.EqualFold(strings.TrimPrefix(op, "$"), distribute.Mean.String())}
	if fn == "mean_loss" || fn == "sum_args" {
		tol.exact = false
	}
	tol.pieces = strings.HasPrefix(g.c.Op, "distribute_dataset") || g.c.Op == "datasets_from_function"
	if g.c.Op == "train_loop" || g.c.Options["action"] == "train_loop" {
		tol = tolerance{float: 1e-5}
	}
	return tol
}

func opsType(c *goldenCase) string {
	ops, direct := c.Options["cross_device_ops"].(map[string]any)
	if !direct {
		ops, _ = c.Strategy["cross_device_ops"].(map[string]any)
	}
	kind, _ := ops["type"].(string)
	return kind
}
