package distribute_test

import (
	"go/types"
	"os"
	"regexp"
	"strings"
	"testing"
)

// tfNames are the names of tf.distribute that the page must have a row for.
var tfNames = []string{
	"MirroredStrategy", "OneDeviceStrategy", "CentralStorageStrategy", "MultiWorkerMirroredStrategy", "TPUStrategy", "the default strategy",
	"experimental_assign_to_logical_device", "rpc.Server", "Strategy.run", "Strategy.reduce", "Strategy.gather", "Strategy.scope",
	"num_replicas_in_sync", "experimental_local_results", "experimental_distribute_values_from_function", "experimental_distribute_dataset",
	"distribute_datasets_from_function", "cluster_resolver", "experimental_set_strategy", "has_strategy", "get_strategy",
	"in_cross_replica_context", "get_replica_context", "reduce_to", "batch_reduce_to", "update(", "colocate_vars_with",
	"variable_created_in_scope", "value_container", "worker_devices", "parameter_devices", "_default_device", "_use_merge_call",
	"_prefer_collective_ops", "replica_id_in_sync_group", "all_reduce", "all_gather", "merge_call", "DistributedValues", "PerReplica",
	"Mirrored", "VariableSynchronization", "VariableAggregation", "assign_add", "scatter_add", "read_value", "Checkpoint",
	"CrossDeviceOps", "ReductionToOneDevice", "HierarchicalCopyAllReduce", "NcclAllReduce", "CollectiveAllReduce", "CollectiveKeys",
	"select_cross_device_ops", "ReduceOp", "CommunicationOptions", "CollectiveHints", "CommunicationImplementation", "IndexedSlices",
	"DistributedDataset", "InputContext", "InputOptions", "InputReplicationMode", "AutoShardPolicy", "SHARD_HINT",
	"batch_sizes_for_worker", "TFConfigClusterResolver", "SlurmClusterResolver", "UnionResolver", "SimpleClusterResolver", "ClusterSpec",
	"multi_worker_util", "KubernetesClusterResolver", "MultiProcessRunner", "check_collective_ops_peer_health",
}

// goNames finds the names in a cell of the page.
var goNames = regexp.MustCompile("`((?:[a-z]+\\.)?[A-Z]\\w*(?:\\.[A-Z]\\w*)*)`")

// TestPageNamesWhatExists holds docs/tf-distribute.md: every name of ours that it has in a second column exists, every row says
// something, and every name of TensorFlow's has a row.
func TestPageNamesWhatExists(t *testing.T) {
	if testing.Short() {
		t.Skip("type-checks the package and all that it imports from source: a few seconds")
	}
	text, err := os.ReadFile("../docs/tf-distribute.md")
	if err != nil {
		t.Fatal(err)
	}
	rows, complaints, firsts := 0, 0, ""
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|--") || strings.Contains(line, "| here |") {
			continue
		}
		if len(cells) == 2 && !strings.Contains(cells[0], "`") {
			complaints++
			if len(strings.TrimSpace(cells[1])) < 40 {
				t.Errorf("%q says too little", cells[0])
			}
		}
		rows++
		firsts += cells[0] + "\n"
		found := goNames.FindAllStringSubmatch(cells[1], -1)
		if len(found) == 0 && len(cells) == 3 {
			t.Errorf("%q names nothing of ours", cells[0])
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
	if complaints != 18 {
		t.Errorf("%d complaints, want 18", complaints)
	}
	if rows < 80 {
		t.Errorf("only %d rows were read", rows)
	}
}

// exists looks for a name, of this package if it has no other one's before it, and says what is wrong with it.
func exists(t *testing.T, name string) string {
	path, parts := "distribute", strings.Split(name, ".")
	if strings.ToLower(parts[0]) == parts[0] {
		path, parts = parts[0], parts[1:]
		switch path {
		case "checkpoint":
			path = "train/checkpoint"
		case "worker", "launch":
			path = "cluster/" + path
		}
	}
	p, err := fromSource().Import("github.com/lockstep-ml/lockstep/" + path)
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
