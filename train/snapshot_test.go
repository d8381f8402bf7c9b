package train

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// stateOfVersion1 is the state in the manifest of a snapshot, with every field that version 1 has.
const stateOfVersion1 = `{
	"step": 4, "passes": 1, "seed": 3, "global_batch": 7, "replicas": 3, "buckets": ["1cfd4b1fb6ac92ff"],
	"compress": "int8", "compression": ["kept"],
	"facts": [{"Name": "data", "Value": "digits"}], "build": [{"Name": "engine", "Value": "go"}],
	"job": "j", "metadata": {"classes": "cat, dog"}, "compute": "float16", "loss_scale": {"scale": 8, "good": 1, "overflows": 2},
	"diloco": {"inner_steps": 2, "learning_rate": 0.7, "momentum": 0.9, "workers": 2, "replicas": [1, 2],
		"outer_steps": 2, "momentum_tensors": ["outer"]},
	"fit": {"batches": 3, "epoch": 1, "step": 1, "pass": 1, "batch": 1,
		"mean": {"loss": 1, "sums": [2], "weight": 7, "examples": 7},
		"epochs": [{"epoch": 1, "steps": 1, "nanoseconds": 5, "result": {"loss": 1, "metrics": {}, "examples": 7}}],
		"steps": 4, "skipped": 0, "callbacks": ["own"]}
}`

// TestSnapshotState checks that the state of a snapshot is read and written as before, and that its tensors are divided
// by it, also those in pieces.
func TestSnapshotState(t *testing.T) {
	var state map[string]any
	if err := json.Unmarshal([]byte(stateOfVersion1), &state); err != nil {
		t.Fatal(err)
	}
	state["divided"] = map[string][]int{"slot": {2}, "kept": {3, 1}}
	text, err := json.Marshal(state)
	if err != nil {
		t.Fatal(err)
	}
	c := &checkpoint.Contents{State: text}
	for _, name := range []string{
		"weight", "slot[1:2]", "slot[0:1]", "kept[0:1]", "kept[1:2]", "kept[2:3]", "outer", "callback own/x",
	} {
		c.Tensors = append(c.Tensors, checkpoint.Tensor{Name: name, Value: tensor.Of([]float32{1}, 1)})
	}
	s, err := SnapshotOf(c)
	if err != nil {
		t.Fatal(err)
	}
	if epoch, step := s.Epoch(); s.Step != 4 || s.Workers != 2 || s.DiLoCo.InnerSteps != 2 || epoch != 1 || step != 1 {
		t.Errorf("got %+v", s)
	}
	again, err := s.Contents()
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	delete(state, "divided")
	if err := json.Unmarshal(again.State, &got); err != nil || !reflect.DeepEqual(got, state) {
		t.Errorf("the state is\n%v, %v, want\n%v", got, err, state)
	}
	var names []string
	for _, x := range again.Tensors {
		names = append(names, x.Name)
	}
	if want := []string{"weight", "slot", "kept", "outer", "callback own/x"}; !reflect.DeepEqual(names, want) {
		t.Errorf("tensors %v, want %v", names, want)
	}
}
