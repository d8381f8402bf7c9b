package distribute_test

import (
	"go/types"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// tfNames are the names of tf.distribute that the page must have a row for.
var tfNames = []string{
	"MirroredStrategy", "OneDeviceStrategy", "CentralStorageStrategy", "MultiWorkerMirroredStrategy", "TPUStrategy",
	"the default strategy",
	"experimental_assign_to_logical_device", "rpc.Server", "Strategy.run", "Strategy.reduce", "Strategy.gather",
	"Strategy.scope",
	"num_replicas_in_sync", "experimental_local_results", "experimental_distribute_values_from_function",
	"experimental_distribute_dataset",
	"distribute_datasets_from_function", "cluster_resolver", "experimental_set_strategy", "has_strategy", "get_strategy",
	"in_cross_replica_context", "get_replica_context", "reduce_to", "batch_reduce_to", "update(", "colocate_vars_with",
	"variable_created_in_scope", "value_container", "worker_devices", "parameter_devices", "_default_device",
	"_use_merge_call",
	"_prefer_collective_ops", "replica_id_in_sync_group", "all_reduce", "all_gather", "GradientTape", "merge_call",
	"DistributedValues",
	"PerReplica",
	"Mirrored", "VariableSynchronization", "VariableAggregation", "assign_add", "scatter_add", "read_value", "Checkpoint",
	"CrossDeviceOps", "ReductionToOneDevice", "HierarchicalCopyAllReduce", "NcclAllReduce", "CollectiveAllReduce",
	"CollectiveKeys",
	"select_cross_device_ops", "ReduceOp", "CommunicationOptions", "CollectiveHints", "CommunicationImplementation",
	"IndexedSlices",
	"DistributedDataset", "InputContext", "InputOptions", "InputReplicationMode", "AutoShardPolicy", "SHARD_HINT",
	"batch_sizes_for_worker", "TFConfigClusterResolver", "SlurmClusterResolver", "UnionResolver", "SimpleClusterResolver",
	"ClusterSpec",
	"multi_worker_util", "KubernetesClusterResolver", "MultiProcessRunner", "check_collective_ops_peer_health",
}

// oursAlone are the exported types and functions that the page omits, because TensorFlow has no counterpart.
var oursAlone = []string{
	"Bucket", "CentralStorageConfig", "Context", "Error", "Follower", "Handle",
	"OneDeviceConfig", "PerWorker", "Placement", "ReplicaStats", "Stats", "UpdateFunc",
	"Value",
}

// goNames finds the names in a cell of the page.
var goNames = regexp.MustCompile("`((?:[a-z]+\\.)?[A-Z]\\w*(?:\\.[A-Z]\\w*)*)`")

// TestPageNamesWhatExists checks docs/tf-distribute.md: every name of this package in a second column exists, every row
// has a text, every name of TensorFlow's has a row, and every exported name of the package with a counterpart in
// TensorFlow is on the page.
func TestPageNamesWhatExists(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it may have to compile the package again, without the flags of the test")
	}
	text, err := os.ReadFile("../docs/tf-distribute.md")
	if err != nil {
		t.Fatal(err)
	}
	firsts, columns, body := "", 0, false // the columns of the current table, and whether its head has ended
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "|") {
			columns, body = 0, false
			continue
		}
		cells := strings.Split(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(line), "|"), "|"), " | ")
		switch {
		case columns == 0:
			columns = len(cells)
			continue
		case strings.HasPrefix(line, "|--"):
			body = true
			continue
		case !body || len(cells) != columns:
			t.Errorf("a row of %d cells in a table of %d: %s", len(cells), columns, line)
			continue
		}
		if len(cells) == 2 && !strings.Contains(cells[0], "`") && len(strings.TrimSpace(cells[1])) < 40 {
			t.Errorf("%q: the text is too short", cells[0])
		}
		firsts += cells[0] + "\n"
		found := goNames.FindAllStringSubmatch(cells[1], -1)
		if len(found) == 0 && len(cells) == 3 {
			t.Errorf("%q has no name of this package", cells[0])
		}
		for _, name := range found {
			if err := exists(t, name[1]); err != "" {
				t.Errorf("%s: %s %s", cells[0], name[1], err)
			}
		}
	}
	for _, name := range tfNames {
		if !strings.Contains(firsts, name) {
			t.Errorf("there is no row for %s", name)
		}
	}
	own, err := compiled().Import("github.com/lockstep-ml/lockstep/distribute")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range own.Scope().Names() {
		switch own.Scope().Lookup(name).(type) {
		case *types.TypeName, *types.Func:
		default: // a constant belongs to its type, an error to the call
			continue
		}
		named := regexp.MustCompile(`\b` + name + `\b`).Match(text)
		if listed := slices.Contains(oursAlone, name); own.Scope().Lookup(name).Exported() && named == listed {
			t.Errorf("%s: on the page: %v, in the list of names that it leaves out: %v; want it in one of them",
				name, named, listed)
		}
	}
	for _, name := range oursAlone {
		if err := exists(t, name); err != "" {
			t.Errorf("%s is in the list of names that the page leaves out, and %s", name, err)
		}
	}
}

// TestPyTorchPageNamesWhatExists: every name in a second column of docs/pytorch.md exists.
func TestPyTorchPageNamesWhatExists(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it may have to compile the package again, without the flags of the test")
	}
	text, err := os.ReadFile("../docs/pytorch.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "|---|---|---|\n")
	rows := 0
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 3 {
			t.Errorf("a row of %d cells, want 3: %s", len(cells), line)
			continue
		}
		rows++
		found := goNames.FindAllStringSubmatch(cells[1], -1)
		if len(found) == 0 {
			t.Errorf("%q has no name of this module", cells[0])
		}
		for _, name := range found {
			if err := exists(t, name[1]); err != "" {
				t.Errorf("%s: %s %s", cells[0], name[1], err)
			}
		}
	}
	if rows < 12 {
		t.Errorf("%d rows, want at least 12", rows)
	}
}

// exists looks up a name, in this package if it has no package prefix, and returns what is wrong.
func exists(t *testing.T, name string) string {
	path, parts := "distribute", strings.Split(name, ".")
	if strings.ToLower(parts[0]) == parts[0] {
		path, parts = parts[0], parts[1:]
		switch path {
		case "checkpoint", "tensorboard":
			path = "train/" + path
		case "worker", "launch":
			path = "cluster/" + path
		case "device":
			path = "distribute/device"
		case "gomlx":
			path = "engine/gomlx"
		case "optimizer":
			path = "engine/gomlx/optimizer"
		}
	}
	p, err := compiled().Import("github.com/lockstep-ml/lockstep/" + path)
	if err != nil {
		t.Fatal(err)
	}
	object := p.Scope().Lookup(parts[0])
	if object == nil {
		return "does not exist"
	}
	for _, part := range parts[1:] {
		member, _, _ := types.LookupFieldOrMethod(object.Type(), true, p, part)
		if member == nil {
			return "does not exist"
		}
		object = member
	}
	return ""
}
