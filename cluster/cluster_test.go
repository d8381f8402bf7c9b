package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// env is an environment that a test makes up.
func env(kv map[string]string) func(string) (string, bool) {
	return func(k string) (string, bool) {
		v, ok := kv[k]
		return v, ok
	}
}

func TestTFConfig(t *testing.T) {
	const two = `"cluster": {"chief": ["c:1"], "worker": {"1": "w:1", "4": "w:4"}}`
	for _, test := range []struct {
		name, text string
		task       Task
		master     string
		want       string // by any of the answers
	}{
		{"nothing", "", NoTask, "", "expecting a JSON object"},
		{"empty", "{}", NoTask, "", ""},
		{"sparse", `{` + two + `, "task": {"type": "worker", "index": 4}}`, Task{"worker", 4}, "w:4", ""},
		{
			"index as text", `{` + two + `, "task": {"type": "worker", "index": "1"}, "rpc_layer": "grpc"}`,
			Task{"worker", 1},
			"grpc://w:1", "",
		},
		{
			"missing index", `{` + two + `, "task": {"type": "worker", "index": 0}}`,
			Task{"worker", 0},
			"",
			"no task with index 0 in job 'worker', which has [1 4]",
		},
		{
			"wrong index", `{` + two + `, "task": {"type": "worker", "index": "x"}}`, NoTask, "",
			"task.index is \"x\": want a whole number from 0",
		},
		{
			"negative index", `{` + two + `, "task": {"type": "worker", "index": -1}}`, NoTask, "",
			"want a whole number from 0",
		},
		{"no type", `{` + two + `}`, NoTask, "", "no such job in cluster"},
		{"session master", `{` + two + `, "session_master": "grpc://m:1"}`, NoTask, "grpc://m:1", ""},
		{"tasks of a wrong type", `{"cluster": {"worker": 7}}`, NoTask, "", "the tasks for job 'worker' must be a list"},
		{"index of a wrong type", `{"cluster": {"worker": {"one": "w:1"}}}`, NoTask, "", `task with index "one"`},
		{
			"index too large", `{"cluster": {"worker": {"2147483648": "w:1"}}}`, NoTask, "",
			"want a whole number from 0 to 2147483647",
		},
		{
			"no address", `{"cluster": {"worker": ["w:1", null]}}`, NoTask, "",
			"the address of task 1 in job 'worker' is null: want a text, host:port",
		},
		{
			"address of a wrong type", `{"cluster": {"worker": {"3": 5}}}`, NoTask, "",
			"the address of task 3 in job 'worker' is 5",
		},
		{
			"address that is not Unicode", `{"cluster": {"worker": ["\ud800:1"]}}`, NoTask, "",
			"the address of task 0 in job 'worker'",
		},
		{
			"two spellings of an index",
			`{"cluster": {"worker": {" +1 ": 5, "01": "w:1", "0": "v:1"}}, "task": {"type": "worker", "index": "1"}}`,
			Task{"worker", 1},
			"w:1", "",
		},
		{
			"digits of another script",
			`{"cluster": {"worker": {"\u0661": "w:1", "1_0": "v:1"}}, "task": {"type": "worker", "index": "\uff11"}}`,
			Task{"worker", 1},
			"w:1", "",
		},
		{"whole fraction", `{` + two + `, "task": {"type": "worker", "index": 4e0}}`, Task{"worker", 4}, "w:4", ""},
		{
			"fraction", `{` + two + `, "task": {"type": "worker", "index": 1.5}}`, NoTask, "",
			"task.index is 1.5: want a whole number from 0",
		},
		{"truth for an index", `{` + two + `, "task": {"type": "worker", "index": true}}`, NoTask, "", "task.index is true"},
		{"huge index", `{` + two + `, "task": {"type": "worker", "index": 1e400}}`, NoTask, "", "task.index is 1e400"},
		{
			"type and index wrong", `{` + two + `, "task": {"type": 5, "index": "x"}}`, NoTask, "",
			"task.type is 5: want a text",
		},
		{"other case", `{"Cluster": {"worker": ["a:1", "b:1"]}, "TASK": {"type": "worker", "index": 1}}`, NoTask, "", ""},
		{
			"other case in the task", `{` + two + `, "task": {"type": "worker", "Type": "chief", "index": 1, "INDEX": 4}}`,
			Task{"worker", 1},
			"w:1", "",
		},
		{
			"no tasks", `{"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}`, NoTask, "",
			"no task with index 0 in job 'worker'",
		},
		{
			"one task, not the first", `{"cluster": {"worker": {"2": "w:1"}}, "task": {"type": "worker", "index": 2}}`,
			Task{"worker", 2},
			"w:1", "",
		},
		{
			"layer of a wrong type", `{` + two + `, "task": {"type": "worker", "index": 1}, "rpc_layer": 5}`, NoTask, "",
			"TF_CONFIG: rpc_layer is 5: want a text",
		},
		{
			"master of a wrong type", `{"session_master": ["m:1"]}`, NoTask, "",
			"TF_CONFIG: session_master is [\"m:1\"]: want a text",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &TFConfig{Lookup: env(map[string]string{"TF_CONFIG": test.text})}
			task, e1 := r.Task()
			master, e2 := r.Master(NoTask, "")
			_, e3 := r.Spec()
			_, e4 := r.Accelerators()
			err := errors.Join(e1, e2, e3, e4)
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) || !errors.Is(err, ErrInvalid) {
					t.Errorf("got %v, want %q", err, test.want)
				}
				return
			}
			if err != nil || task != test.task || master != test.master {
				t.Errorf("task %v, master %q, %v; want %v, %q", task, master, err, test.task, test.master)
			}
		})
	}
	r := &TFConfig{Lookup: env(nil), Accelerating: func() (map[string]int, error) { return map[string]int{"GPU": 3}, nil }}
	if n, err := r.Accelerators(); err != nil || n["GPU"] != 3 {
		t.Errorf("accelerators: %v, %v", n, err)
	}
}

// TestTFConfigFile: the parts of LOCKSTEP_TF_CONFIG_FILE and of TF_CONFIG are one object.
func TestTFConfigFile(t *testing.T) {
	const (
		spec   = `"cluster": {"worker": ["a:1", "b:1"]}`
		task   = `"task": {"type": "worker", "index": 1}`
		inFile = `"cluster": "` + TFConfigClusterInFile + `"`
	)
	for name, test := range map[string]struct{ variable, file, want string }{
		"all in the file":    {"", "{" + spec + "," + task + "}", ""},
		"the cluster":        {"{" + task + "}", "{" + spec + "}", ""},
		"the cluster, noted": {"{" + task + "," + inFile + "}", "{" + spec + "}", ""},
		"the same":           {"{" + task + "," + spec + "}", `{"cluster":{"worker":["a:1","b:1"]}}`, ""},
		"no file":            {"{" + task + "," + inFile + "}", "", "LOCKSTEP_TF_CONFIG_FILE, which names it, is not set"},
		"missing":            {"", "missing", "LOCKSTEP_TF_CONFIG_FILE: open"},
		"no JSON":            {"", "worker: a:1", `begins with "worker: a:1": expecting a JSON object`},
		"no cluster":         {"{" + inFile + "}", "{" + task + "}", `has no "cluster"`},
		"different": {
			"{" + task + "," + spec + "}", `{"task": {"type": "worker", "index": 0}}`,
			`TF_CONFIG has "task": {"type": "worker",`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			variables := map[string]string{}
			if test.variable != "" {
				variables["TF_CONFIG"] = test.variable
			}
			if test.file != "" {
				file := filepath.Join(t.TempDir(), "tf_config.json")
				variables[EnvTFConfigFile] = file
				if test.file != "missing" {
					if err := os.WriteFile(file, []byte(test.file), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			job, err := Discover(Discovery{Getenv: env(variables)})
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) || !errors.Is(err, ErrInvalid) {
					t.Errorf("got %v, want %q", err, test.want)
				}
				return
			}
			if err != nil || job.Worker != 1 || job.Workers != 2 || job.Store != "tcp://a:1" {
				t.Errorf("got %v, %v", job, err)
			}
		})
	}
}

// TestTFConfigParts holds that an error in one part of TF_CONFIG does not keep the others from being read.
func TestTFConfigParts(t *testing.T) {
	r := &TFConfig{Lookup: env(map[string]string{
		"TF_CONFIG": `{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "x"}, "rpc_layer": 5}`,
	})}
	if s, err := r.Spec(); err != nil || s.Count("worker") != 2 {
		t.Errorf("spec %v, %v; want two workers", s, err)
	}
	if task, err := r.Task(); task != (Task{"worker", -1}) || !errors.Is(err, ErrInvalid) {
		t.Errorf("task %v, %v; want the type, and an error", task, err)
	}
	if m, err := r.Master(Task{"worker", 1}, "grpc"); err != nil || m != "grpc://b:1" {
		t.Errorf("master %q, %v; want that of the task and the layer that are given", m, err)
	}
	if _, err := r.RPCLayer(); !errors.Is(err, ErrInvalid) {
		t.Errorf("layer: %v", err)
	}
	if text, err := json.Marshal(Spec{"worker": {}, "ps": nil, "chief": {0: "c:1"}}); err != nil ||
		string(text) != `{"chief":["c:1"],"ps":{},"worker":{}}` {
		t.Errorf("jobs without tasks are written %s, %v; want {}, as in TensorFlow", text, err)
	}
}

// TestSlurm asks every task of a step for its place: together they are the cluster.
func TestSlurm(t *testing.T) {
	base := map[string]string{
		"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "b[9-10],a1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
		"CUDA_VISIBLE_DEVICES": "0,1,2,3",
	}
	want := []string{"a1:8888", "a1:8889", "b10:8888", "b10:8889", "b9:8888", "b9:8889"}
	for rank := range 6 {
		kv := maps.Clone(base)
		kv["SLURM_PROCID"] = fmt.Sprint(rank)
		s, err := NewSlurm(SlurmConfig{
			Jobs: map[string]int{"ps": 2, "chief": 1, "worker": 3}, Lookup: env(kv),
			Setenv: func(k, v string) error {
				kv[k] = v
				return nil
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		spec, _ := s.Spec()
		all := slices.Concat(spec.Tasks("chief"), spec.Tasks("ps"), spec.Tasks("worker"))
		if !slices.Equal(all, want) {
			t.Fatalf("rank %d: %v, want %v", rank, all, want)
		}
		task, _ := s.Task()
		if address, err := spec.Address(task); err != nil || address != want[rank] {
			t.Errorf("rank %d is %v at %s, %v; want %s", rank, task, address, err, want[rank])
		}
		if gpus := []string{"0,1", "2,3"}[rank%2]; kv["CUDA_VISIBLE_DEVICES"] != gpus || s.VisibleDevices() != gpus {
			t.Errorf("rank %d has the GPUs %s, want %s", rank, kv["CUDA_VISIBLE_DEVICES"], gpus)
		}
	}
	for _, test := range []struct {
		variable, value, want string
		cfg                   SlurmConfig
	}{
		{"SLURM_PROCID", "6", "SLURM_PROCID=6: the step has 6 tasks", SlurmConfig{}},
		{"SLURM_PROCID", "first", "want a number from 0", SlurmConfig{}},
		{"SLURM_STEP_NODELIST", "b[9-", "invalid hostlist format", SlurmConfig{}},
		{"SLURM_STEP_TASKS_PER_NODE", "2(y3)", "invalid tasks-per-node list", SlurmConfig{}},
		{"SLURM_STEP_NUM_TASKS", "5", "requested 5 tasks but only 6 were assigned", SlurmConfig{}},
		{"", "", "requested more GPUs per node than available", SlurmConfig{GPUsPerTask: 3}},
		{"", "", "requested 0 tasks", SlurmConfig{Jobs: map[string]int{}}},
		{"", "", "-1 tasks", SlurmConfig{Jobs: map[string]int{"worker": -1}}},
	} {
		kv := maps.Clone(base)
		kv["SLURM_PROCID"] = "0"
		kv[test.variable] = test.value
		test.cfg.Lookup, test.cfg.LeaveGPUs = env(kv), true
		if _, err := NewSlurm(test.cfg); err == nil || !strings.Contains(err.Error(), test.want) ||
			!errors.Is(err, ErrInvalid) {
			t.Errorf("%s=%s: %v, want %q", test.variable, test.value, err, test.want)
		}
	}
	if _, err := NewSlurm(SlurmConfig{Lookup: env(nil)}); err == nil ||
		!strings.Contains(err.Error(), "Not running inside a SLURM step?") {
		t.Errorf("outside of a step: %v", err)
	}
}

// compress is a slow way back: it writes hosts of one prefix and width as ranges.
func compress(prefix string, width int, numbers []int) string {
	var parts []string
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		if i == j {
			parts = append(parts, fmt.Sprintf("%0*d", width, numbers[i]))
		} else {
			parts = append(parts, fmt.Sprintf("%0*d-%0*d", width, numbers[i], width, numbers[j]))
		}
		i = j + 1
	}
	return prefix + "[" + strings.Join(parts, ",") + "]"
}

func TestExpandHostlist(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		var list, want []string
		for part := range 1 + random.IntN(4) {
			prefix, width := fmt.Sprintf("n%c", 'a'+part), 1+random.IntN(4)
			var numbers []int
			for n := random.IntN(20); len(numbers) < 1+random.IntN(6); n += 1 + random.IntN(2) {
				numbers = append(numbers, n)
				want = append(want, fmt.Sprintf("%s%0*d", prefix, width, n))
			}
			list = append(list, compress(prefix, width, numbers))
		}
		text := strings.Join(list, ",")
		if got, err := ExpandHostlist(text); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%s: %v, %v; want %v", text, got, err, want)
		}
	}
	for text, want := range map[string][]string{
		"": nil, "m": {"m"}, "n[3-1]": nil,
		"n[08-10],m1,": {"n08", "n09", "n10", "m1"},
	} {
		if got, err := ExpandHostlist(text); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{",n", "n,,m", "n]", "n[1]]", "n[[1]", "n[1-2-3]", "n[]", "n[1-99999999]", "n[1-2]z[3]"} {
		if got, err := ExpandHostlist(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v, %v; want an error", text, got, err)
		}
	}
}

func FuzzExpandHostlist(f *testing.F) {
	f.Add("n[01-03,7],m1")
	f.Fuzz(func(t *testing.T, list string) {
		if hosts, err := ExpandHostlist(list); err == nil && len(hosts) > hostsMax {
			t.Errorf("%q: %d hosts", list, len(hosts))
		}
	})
}

func FuzzExpandTasksPerNode(f *testing.F) {
	f.Add("2(x3),1")
	f.Fuzz(func(t *testing.T, list string) {
		if tasks, err := ExpandTasksPerNode(list); err == nil && len(tasks) > hostsMax+len(list) {
			t.Errorf("%q: %d hosts", list, len(tasks))
		}
	})
}

func FuzzTFConfig(f *testing.F) {
	f.Add(`{"cluster": {"worker": ["a:1", "b:1"], "ps": {"3": "c:1"}}, "task": {"type": "worker", "index": "1"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		r := &TFConfig{Lookup: env(map[string]string{"TF_CONFIG": text})}
		spec, err := r.Spec()
		if err != nil {
			return
		}
		// A spec that was read can be written and read again.
		out, err := json.Marshal(spec)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseSpec(out); err != nil || !reflect.DeepEqual(spec, again) {
			t.Errorf("%s: read %v, wrote %s, read %v, %v", text, spec, out, again, err)
		}
		_, _ = r.Task()
		_, _ = r.Master(NoTask, "")
	})
}

func TestUnion(t *testing.T) {
	a := &Simple{Cluster: Spec{"worker": {1: "a:1"}}, This: &Task{"worker", 1}, Layer: "grpc", Where: "here"}
	b := &Simple{Cluster: NewSpec(map[string][]string{"worker": {"b:0"}})}
	u, err := NewUnion(a, b)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := u.Spec()
	if want := NewSpec(map[string][]string{"worker": {"b:0", "a:1"}}); err != nil || !reflect.DeepEqual(spec, want) {
		t.Errorf("%v, %v; want %v", spec, err, want)
	}
	if task, _ := u.Task(); task != (Task{"worker", 1}) || u.Environment() != "here" {
		t.Errorf("%v in %q: want the first resolver's", task, u.Environment())
	}
	if m, err := u.Master(Task{"worker", 0}, ""); err != nil || m != "b:0" {
		t.Errorf("master %q, %v", m, err)
	}
	u.This, u.Layer = Task{"", 0}, "x"
	if task, _ := u.Task(); task.Index != 1 {
		t.Errorf("an index of 0 counts as not given, as in TensorFlow; got %v", task)
	}
	if _, err := NewUnion(); err == nil {
		t.Error("a union of nothing")
	}
	if _, err := NewUnion(a, nil); err == nil {
		t.Error("a union with nil")
	}
	twice, _ := NewUnion(a, a)
	if _, err := twice.Spec(); err == nil || !strings.Contains(err.Error(), "duplicate keys") {
		t.Errorf("one index twice: %v", err)
	}
}

// TestRoles numbers all tasks of clusters: those that train together have the ids 0, 1, 2, …, and one of them is the
// chief.
func TestRoles(t *testing.T) {
	for chiefs := range 2 {
		for workers := range 4 {
			s := Spec{}
			if chiefs > 0 {
				s[Chief] = numbered([]string{"c:1"})
			}
			if workers > 0 {
				s[Worker] = numbered([]string{"a:1", "b:1", "d:1"}[:workers])
			}
			if len(s) == 0 {
				continue
			}
			var ids []int
			leads := 0
			for _, job := range []string{Chief, Worker} {
				for i := range s.Count(job) {
					task := Task{job, i}
					id, e1 := IDInCluster(s, task)
					chief, e2 := IsChief(s, task)
					count, e3 := WorkerCount(s, job)
					if err := errors.Join(e1, e2, e3); err != nil || count != chiefs+workers {
						t.Fatalf("%v of %v: count %d, %v", task, s, count, err)
					}
					ids = append(ids, id)
					if chief {
						leads++
						if id != 0 {
							t.Errorf("%v of %v is the chief with id %d", task, s, id)
						}
					}
				}
			}
			if leads != 1 || !slices.IsSorted(ids) || ids[len(ids)-1] != len(ids)-1 {
				t.Errorf("%v: ids %v, %d chiefs", s, ids, leads)
			}
			if n := len(Devices(s, 2)); n != 2*len(ids) {
				t.Errorf("%v: %d devices", s, n)
			}
		}
	}
	if _, err := CollectiveLeader(Spec{PS: numbered([]string{"p:1"})}, Task{PS, 0}); err == nil {
		t.Error("a parameter server leads the collectives")
	}
	if _, err := WorkerCount(NewSpec(map[string][]string{"worker": {"a:1"}}), Evaluator); err == nil {
		t.Error("evaluators were counted where there are none")
	}
}

func TestTaskText(t *testing.T) {
	for task, want := range map[Task]string{
		{"worker", 3}: "/job:worker/task:3", {"", -1}: "/job:?/task:?",
		{"ps", -1}: "/job:ps/task:?",
	} {
		if got := task.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
