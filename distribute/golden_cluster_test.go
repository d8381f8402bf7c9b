package distribute_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/distribute"
)

// The operations of the golden cases on the job's members.

// clusterError converts an error of package cluster to one that the runner can match.
func clusterError(err error) error {
	if errors.Is(err, cluster.ErrInvalid) {
		return fmt.Errorf("%w: %w", distribute.ErrInvalid, err)
	}
	return err
}

// clusterSpec reads the spec of a case.
func clusterSpec(v any) (cluster.Spec, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return cluster.ParseSpec(text)
}

// plain converts a value to the types that encoding/json decodes, as in the cases.
func plain(v any) any {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	var out any
	if err := d.Decode(&out); err != nil {
		return err
	}
	return unnumbered(out)
}

// unnumbered converts JSON numbers to Go numbers.
func unnumbered(v any) any {
	switch v := v.(type) {
	case json.Number:
		n, _ := v.Int64()
		return int(n)
	case map[string]any:
		for k, x := range v {
			v[k] = unnumbered(x)
		}
	case []any:
		for i, x := range v {
			v[i] = unnumbered(x)
		}
	}
	return v
}

// orNil returns nil, for Python's None, if the string is empty.
func orNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func indexOrNil(i int) any {
	if i < 0 {
		return nil
	}
	return i
}

// caseTask reads a task from arguments named as TensorFlow's.
func caseTask(args map[string]any) cluster.Task {
	t := cluster.NoTask
	t.Type, _ = args["task_type"].(string)
	if n, ok := args["task_id"].(json.Number); ok {
		i, _ := n.Int64()
		t.Index = int(i)
	}
	return t
}

func options(g *goldenRun, name string) map[string]any {
	m, _ := g.c.Options[name].(map[string]any)
	return m
}

func text(m map[string]any, name string) string {
	s, _ := m[name].(string)
	return s
}

func number(m map[string]any, name string) int {
	n, _ := m[name].(json.Number)
	i, _ := n.Int64()
	return int(i)
}

func numbers(v any) map[string]int {
	m, ok := v.(map[string]any)
	if !ok {
		return nil
	}
	out := map[string]int{}
	for k := range m {
		out[k] = number(m, k)
	}
	return out
}

// simpleResolver makes the resolver of constructor arguments. Arguments that Go's types rule out are errors.
func simpleResolver(spec any, ctor map[string]any) (*cluster.Simple, error) {
	for _, name := range []string{"master", "environment", "rpc_layer", "task_type"} {
		if _, isText := ctor[name].(string); ctor[name] != nil && !isText {
			return nil, errNotInGo
		}
	}
	if master, given := ctor["master"]; spec == nil || given && master == nil {
		return nil, errNotInGo
	}
	s, err := clusterSpec(spec)
	task := caseTask(ctor)
	return &cluster.Simple{
		Cluster: s, MasterAddress: text(ctor, "master"), This: &task, Where: text(ctor, "environment"),
		Layer: text(ctor, "rpc_layer"), NumAccelerators: numbers(ctor["num_accelerators"]),
	}, err
}

// resolverFields returns the fields of TensorFlow's resolvers, by TensorFlow's names.
func resolverFields(r cluster.Resolver, masterArgs map[string]any) map[string]func() (any, error) {
	return map[string]func() (any, error){
		"cluster_spec": func() (any, error) {
			s, err := r.Spec()
			return plain(s), err
		},
		"task_type": func() (any, error) {
			t, err := r.Task()
			if t.Type != "" || concernsOnly(err, "task.index") {
				err = nil
			}
			return orNil(t.Type), err
		},
		"task_id": func() (any, error) {
			t, err := r.Task()
			if t.Index >= 0 || concernsOnly(err, "task.type") {
				err = nil
			}
			return indexOrNil(t.Index), err
		},
		"rpc_layer": func() (any, error) {
			l, err := r.RPCLayer()
			return orNil(l), err
		},
		"environment": func() (any, error) { return r.Environment(), nil },
		"num_accelerators": func() (any, error) {
			n, err := r.Accelerators()
			if n == nil {
				n = map[string]int{}
			}
			return plain(n), err
		},
		"master": func() (any, error) { return r.Master(caseTask(masterArgs), text(masterArgs, "rpc_layer")) },
	}
}

// concernsOnly reports whether an error concerns one part of TF_CONFIG only.
func concernsOnly(err error, part string) bool {
	if err == nil {
		return false
	}
	for line := range strings.Lines(err.Error()) { // of joined errors
		if !strings.Contains(line, "TF_CONFIG: "+part+" is ") {
			return false
		}
	}
	return true
}

// allFields reads all fields; the first error is the answer.
func allFields(fields map[string]func() (any, error)) (map[string]any, error) {
	out := map[string]any{}
	for name, ask := range fields {
		v, err := ask()
		if err != nil {
			return nil, clusterError(err)
		}
		out[name] = v
	}
	return map[string]any{"value": out}, nil
}

// goldenTFConfigResolver reads each field separately, since each may be an error.
func goldenTFConfigResolver(g *goldenRun) (map[string]any, error) {
	ctor := options(g, "ctor")
	r := &cluster.TFConfig{
		Layer: text(ctor, "rpc_layer"), Where: text(ctor, "environment"),
		Lookup: func(name string) (string, bool) {
			s, ok := g.c.Inputs[name].(string)
			return s, ok && name == "TF_CONFIG"
		},
	}
	if task := caseTask(ctor); task != cluster.NoTask {
		r.Overrides = &task
	}
	out := map[string]any{}
	for name, ask := range resolverFields(r, options(g, "master_args")) {
		v, err := ask()
		switch {
		case err != nil:
			out[name] = clusterError(err)
		case name == "environment":
			out[name] = orNil(r.Environment())
		default:
			out[name] = v
		}
	}
	return map[string]any{"value": out}, nil
}

func goldenSimpleResolver(g *goldenRun) (map[string]any, error) {
	if raw, _ := g.c.Options["raw_spec"].(bool); raw {
		return nil, errNotInGo // a map is not a ClusterSpec
	}
	r, err := simpleResolver(g.c.Inputs["cluster_spec"], options(g, "ctor"))
	if err != nil {
		return nil, clusterError(err)
	}
	return allFields(resolverFields(r, options(g, "master_args")))
}

func goldenUnionResolver(g *goldenRun) (map[string]any, error) {
	var all []cluster.Resolver
	items, _ := g.c.Inputs["resolvers"].([]any)
	for _, item := range items {
		m, _ := item.(map[string]any)
		ctor, _ := m["ctor"].(map[string]any)
		r, err := simpleResolver(m["cluster_spec"], ctor)
		if err != nil {
			return nil, clusterError(err)
		}
		all = append(all, r)
	}
	u, err := cluster.NewUnion(all...)
	if err != nil {
		return nil, clusterError(err)
	}
	ctor := options(g, "ctor")
	for name := range ctor {
		if name != "task_type" && name != "task_id" && name != "rpc_layer" {
			return nil, errNotInGo // a Union has no such field
		}
	}
	u.This, u.Layer = caseTask(ctor), text(ctor, "rpc_layer")
	return allFields(resolverFields(u, options(g, "master_args")))
}

func goldenSlurmResolver(g *goldenRun) (map[string]any, error) {
	env := map[string]string{}
	if m, ok := g.c.Inputs["env"].(map[string]any); ok {
		for k := range m {
			env[k] = text(m, k)
		}
	}
	ctor := options(g, "ctor")
	cfg := cluster.SlurmConfig{
		Jobs: numbers(ctor["jobs"]), PortBase: number(ctor, "port_base"), TasksPerNode: numbers(ctor["tasks_per_node"]),
		TasksEach: number(ctor, "tasks_per_node"), GPUsPerNode: number(ctor, "gpus_per_node"), GPUsPerTask: number(ctor,
			"gpus_per_task"),
		Layer: text(ctor, "rpc_layer"),
		Lookup: func(k string) (string, bool) {
			v, ok := env[k]
			return v, ok
		},
		Setenv: func(k, v string) error {
			env[k] = v
			return nil
		},
	}
	if set, given := ctor["auto_set_gpu"].(bool); given {
		cfg.LeaveGPUs = !set
	}
	r, err := cluster.NewSlurm(cfg)
	if err != nil {
		return nil, clusterError(err)
	}
	fields := resolverFields(r, nil)
	delete(fields, "environment")
	fields["cuda_visible_devices"] = func() (any, error) { return orNil(env["CUDA_VISIBLE_DEVICES"]), nil }
	fields["master_first"] = func() (any, error) {
		args, ok := g.c.Options["master_args"].([]any)
		if !ok || len(args) == 0 {
			return nil, nil
		}
		task := cluster.NoTask
		task.Type, _ = args[0].(string)
		if len(args) > 1 {
			n, _ := args[1].(json.Number)
			i, _ := n.Int64()
			task.Index = int(i)
		}
		layer := ""
		if len(args) > 2 {
			layer, _ = args[2].(string)
		}
		return r.Master(task, layer)
	}
	return allFields(fields)
}

func goldenExpandHostlist(g *goldenRun) (map[string]any, error) {
	hosts, err := cluster.ExpandHostlist(text(g.c.Inputs, "hostlist"))
	return map[string]any{"value": plain(append([]string{}, hosts...))}, clusterError(err)
}

func goldenExpandTasksPerNode(g *goldenRun) (map[string]any, error) {
	tasks, err := cluster.ExpandTasksPerNode(text(g.c.Inputs, "tasks_per_node"))
	return map[string]any{"value": plain(append([]int{}, tasks...))}, clusterError(err)
}

func goldenMultiWorkerUtil(g *goldenRun) (map[string]any, error) {
	spec, err := clusterSpec(g.c.Inputs["cluster_spec"])
	if err != nil {
		return nil, clusterError(err)
	}
	task := caseTask(g.c.Options)
	var v any
	switch fn := text(g.c.Options, "fn"); fn {
	case "is_chief":
		v, err = cluster.IsChief(spec, task)
	case "id_in_cluster":
		v, err = cluster.IDInCluster(spec, task)
	case "worker_count":
		v, err = cluster.WorkerCount(spec, task.Type)
	case "collective_leader":
		v, err = cluster.CollectiveLeader(spec, task)
	case "coordination_leader":
		v, err = cluster.CoordinationLeader(spec)
	case "normalize":
		v = plain(spec)
	default:
		return nil, fmt.Errorf("the runner does not know the function %q", fn)
	}
	return map[string]any{"value": v}, clusterError(err)
}

func goldenClusterDevices(g *goldenRun) (map[string]any, error) {
	spec, err := clusterSpec(g.c.Inputs["cluster_spec"])
	if err != nil {
		return nil, clusterError(err)
	}
	devices := cluster.Devices(spec, number(g.c.Options, "num_gpus_per_worker"))
	return map[string]any{"value": plain(append([]string{}, devices...))}, nil
}

// checkButForLayer compares an answer with TensorFlow's, except for the protocol: the address may begin with that of
// the resolver.
func checkButForLayer(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	want, _ := g.c.Expect["value"].(map[string]any)
	got, _ := answer["value"].(map[string]any)
	expect := maps.Clone(want)
	if layer := got["rpc_layer"]; layer != nil && want["rpc_layer"] == "" {
		expect["rpc_layer"] = layer
	}
	if address, ok := want["master"].(string); ok {
		if master, _ := got["master"].(string); !strings.HasSuffix(master, address) {
			return fmt.Errorf("got the address %q, want %q", master, address)
		}
		expect["master"] = got["master"]
	}
	return match("value", expect, got, exact)
}

// tfConfigParts lists what TensorFlow accepts in a TF_CONFIG and is an error here, with the error's text.
// docs/tf-distribute.md has the reasons.
var tfConfigParts = []struct {
	name, reason, message string
	applies               func(*tfConfigCase) bool
}{
	{
		"broken-tf-config", "TensorFlow reads what it needs of a TF_CONFIG that is not a JSON object when some of it is " +
			"given otherwise, and takes NaN for JSON",
		"expecting a JSON object", func(c *tfConfigCase) bool { return c.parts == nil },
	},
	{
		"task-not-object", "TensorFlow looks for names in a list or a text as in an object, and finds none",
		"want an object with the type and the index", func(c *tfConfigCase) bool {
			_, isObject := c.parts["task"].(map[string]any)
			return c.parts["task"] != nil && !isObject
		},
	},
	{
		"type-not-text", "TensorFlow takes Python's text of any value for the type of the task",
		"task.type is ", func(c *tfConfigCase) bool { return isOther(c.task["type"]) },
	},
	{
		"type-null", `and of null, which is "None"; here null is not given, nor is the empty text`,
		"none was given", func(c *tfConfigCase) bool {
			t, there := c.task["type"]
			return there && (t == nil || t == "")
		},
	},
	{
		"index-not-whole", "TensorFlow cuts fractions off, and takes true for 1",
		"want a whole number from 0", func(c *tfConfigCase) bool {
			n, isNumber := c.task["index"].(json.Number)
			f, _ := n.Float64()
			_, isBool := c.task["index"].(bool)
			return isBool || isNumber && f != math.Trunc(f)
		},
	},
	{
		"no-index", "TensorFlow takes any number for a task's index, negative ones and those that no int holds",
		"want a whole number from 0", func(c *tfConfigCase) bool { return isNoIndex(c.value["task_id"]) },
	},
	{
		"no-index-in-cluster", "and for those in the cluster",
		"want a whole number from 0", func(c *tfConfigCase) bool {
			jobs, _ := c.parts["cluster"].(map[string]any)
			for _, tasks := range jobs {
				sparse, _ := tasks.(map[string]any)
				for index := range sparse {
					if strings.HasPrefix(strings.TrimSpace(index), "-") {
						return true
					}
				}
			}
			return false
		},
	},
	{
		"layer-not-text", "TensorFlow hands on whatever rpc_layer is",
		"rpc_layer is ", func(c *tfConfigCase) bool { return isOther(c.parts["rpc_layer"]) },
	},
	{
		"master-not-text", "TensorFlow hands on whatever session_master is",
		"session_master is ", func(c *tfConfigCase) bool { return isOther(c.parts["session_master"]) },
	},
}

// tfConfigCase is a parsed case of a TF_CONFIG.
type tfConfigCase struct {
	parts, task map[string]any // of TF_CONFIG; nil if it is not an object
	value       map[string]any // TensorFlow's answer
	ctor        map[string]any
	master      map[string]any
}

func parseTFConfigCase(c *goldenCase) *tfConfigCase {
	out := &tfConfigCase{}
	text, _ := c.Inputs["TF_CONFIG"].(string)
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	if d.Decode(&out.parts) != nil || d.More() {
		out.parts = nil
	}
	out.task, _ = out.parts["task"].(map[string]any)
	out.value, _ = c.Expect["value"].(map[string]any)
	out.ctor, _ = c.Options["ctor"].(map[string]any)
	out.master, _ = c.Options["master_args"].(map[string]any)
	return out
}

// isOther reports whether a part of TF_CONFIG is given, but is not a string.
func isOther(v any) bool {
	_, isText := v.(string)
	return v != nil && !isText
}

// isNoIndex reports whether a number cannot be an index here.
func isNoIndex(v any) bool {
	n, isNumber := v.(json.Number)
	i, err := strconv.Atoi(n.String())
	return isNumber && (err != nil || i < 0)
}

// checkTFConfigParts compares each field with TensorFlow's answer, and those that differ against [tfConfigParts].
// TensorFlow distinguishes an empty argument or a negative index from an absent one; here both must give the same
// result.
func checkTFConfigParts(g *goldenRun, answer map[string]any, err error) error {
	if err != nil {
		return err
	}
	c := parseTFConfigCase(g.c)
	got, _ := answer["value"].(map[string]any)
	without, err := withoutEmpty(g)
	if err != nil {
		return err
	}
	for field, want := range c.value {
		v := got[field]
		differs := match(field, want, v, exact)
		if differs == nil {
			continue
		}
		failed, isError := v.(error)
		excused := false
		for _, part := range tfConfigParts {
			if isError && errors.Is(failed, distribute.ErrInvalid) &&
				strings.Contains(failed.Error(), part.message) && part.applies(c) {
				g.Logf("%s: %s: %s", field, part.name, part.reason)
				excused = true
			}
		}
		if without != nil && field != "cluster_spec" && field != "environment" {
			excused = excused || fmt.Sprint(v) == fmt.Sprint(without[field])
		}
		if !excused {
			return fmt.Errorf("%w; no part of TF_CONFIG explains it", differs)
		}
	}
	return nil
}

// withoutEmpty returns a case without the arguments that count as absent here, or nil if it has none.
func withoutEmpty(g *goldenRun) (map[string]any, error) {
	c, found := *g.c, false
	c.Options = maps.Clone(g.c.Options)
	for _, name := range []string{"ctor", "master_args"} {
		args := maps.Clone(options(g, name))
		maps.DeleteFunc(args, func(_ string, v any) bool { return v == "" || isNoIndex(v) })
		found = found || len(args) < len(options(g, name))
		c.Options[name] = args
	}
	if !found {
		return nil, nil
	}
	answer, err := goldenTFConfigResolver(&goldenRun{T: g.T, c: &c})
	value, _ := answer["value"].(map[string]any)
	notGiven(c.Expect["value"], value)
	return value, err
}

// goldenClusterDefects lists TensorFlow's defects with clusters, like goldenDefects.
var goldenClusterDefects = []goldenException{{
	"chief-without-tasks", "in a cluster whose job chief has no tasks, no task is TensorFlow's chief, so none saves; " +
		"here worker 0 is the chief",
	func(c *goldenCase, _ string) bool {
		spec, _ := c.Inputs["cluster_spec"].(map[string]any)
		chiefs, there := spec[cluster.Chief]
		none := isEmpty(chiefs)
		if sparse, ok := chiefs.(map[string]any); ok {
			none = len(sparse) == 0
		}
		return c.Op == "multi_worker_util" && c.Options["fn"] == "is_chief" && there && none && !c.fails()
	},
	func(g *goldenRun, answer map[string]any, err error) error {
		if task := caseTask(g.c.Options); err != nil || answer["value"] != (task == cluster.Task{Type: cluster.Worker}) {
			return fmt.Errorf("got %v, %w for %v, want worker 0 alone to be the chief", answer, err, task)
		}
		return nil
	},
}}

// goldenClusterLimits lists the limits of TensorFlow's resolvers.
var goldenClusterLimits = []goldenException{{
	"tasks-without-gpus", "TensorFlow's Slurm resolver crashes on tasks that want no GPU, and on machines without " +
		"NVIDIA's programs",
	func(c *goldenCase, message string) bool {
		return c.Op == "slurm_resolver" &&
			(strings.Contains(message, "range() arg 3 must not be zero") || strings.Contains(message, "nvidia-smi"))
	},
	func(g *goldenRun, answer map[string]any, err error) error {
		if err != nil {
			return err
		}
		env, _ := g.c.Inputs["env"].(map[string]any)
		value, _ := answer["value"].(map[string]any)
		spec, _ := value["cluster_spec"].(map[string]any)
		tasks := 0
		for _, addresses := range spec {
			tasks += len(addresses.([]any))
		}
		want := env["SLURM_STEP_NUM_TASKS"]
		if jobs := numbers(options(g, "ctor")["jobs"]); jobs != nil {
			sum := 0
			for _, n := range jobs {
				sum += n
			}
			want = fmt.Sprint(sum)
		}
		if fmt.Sprint(tasks) != want {
			return fmt.Errorf("got %d tasks in %v, want %v", tasks, spec, want)
		}
		return nil
	},
}}
