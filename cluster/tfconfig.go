package cluster

import (
	"cmp"
	"encoding/json"
	"errors"
	"math"
	"os"
	"reflect"
	"strconv"
)

// TFConfig is a resolver that reads the environment variable TF_CONFIG (TensorFlow's
// TFConfigClusterResolver), which Keras, Vertex AI, Ray and Kubeflow set:
//
//	{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]},
//	 "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}
//
// A job may also be an object from index to address, and the index a string. Names are case-sensitive,
// unknown ones are ignored. Each call reads the variable again, and each method reads only the parts that it
// needs, so that an error in one part does not affect the others. A variable that is not set means an empty
// object: a single-process job.
//
// Linux limits a variable to 128 KiB, some thousand workers. LOCKSTEP_TF_CONFIG_FILE names a file with an object of the
// same form, whose parts are added to those of TF_CONFIG, or replace it. A part in both must have the same value, but
// TF_CONFIG's cluster may be the string [TFConfigClusterInFile]: TensorFlow itself then refuses it, instead of
// training alone.
type TFConfig struct {
	Overrides    *Task                          // replaces the known parts of TF_CONFIG's task
	Layer        string                         // replaces rpc_layer
	Where        string                         // the environment; never in TF_CONFIG
	Lookup       func(string) (string, bool)    // default os.LookupEnv
	ReadFile     func(string) ([]byte, error)   // default [ReadFile]
	Accelerating func() (map[string]int, error) // counts this machine's accelerators; default none
}

var _ Resolver = (*TFConfig)(nil)

// tfConfig holds TF_CONFIG's parts by name, undecoded. A missing part is nil.
type tfConfig map[string]json.RawMessage

func (c *TFConfig) read() (tfConfig, error) {
	lookup := c.Lookup
	if lookup == nil {
		lookup = os.LookupEnv
	}
	text, ok := lookup("TF_CONFIG")
	if !ok {
		text = "{}"
	}
	out, err := parseObject([]byte(text))
	if err != nil {
		return nil, errorf("TF_CONFIG=%s: expecting a JSON object: %w", strconv.Quote(clip(text)), err)
	}
	var in string
	deferred := json.Unmarshal(out["cluster"], &in) == nil && in == TFConfigClusterInFile
	name, _ := lookup(EnvTFConfigFile)
	switch {
	case name != "":
		return out, c.add(out, name, deferred)
	case deferred:
		return nil, errorf("the cluster of TF_CONFIG is in a file, but %s, which names it, is not set: pass it on "+
			"to the process", EnvTFConfigFile)
	}
	return out, nil
}

// TFConfigClusterInFile is the value of "cluster" in a TF_CONFIG whose cluster is in the file that
// LOCKSTEP_TF_CONFIG_FILE names.
const TFConfigClusterInFile = "in the file of " + EnvTFConfigFile

// add adds the parts of a file. The cluster of TF_CONFIG may be deferred to it.
func (c *TFConfig) add(parts tfConfig, name string, deferred bool) error {
	read := c.ReadFile
	if read == nil {
		read = ReadFile
	}
	text, err := read(name)
	if err != nil {
		return errorf("%s: %w", EnvTFConfigFile, err)
	}
	filed, err := parseObject(text)
	if err != nil {
		return errorf("%s: file %s begins with %s: expecting a JSON object: %w", EnvTFConfigFile, name,
			strconv.Quote(clip(string(text))), err)
	}
	if deferred {
		if filed["cluster"] == nil {
			return errorf("%s: file %s has no \"cluster\", which TF_CONFIG expects there", EnvTFConfigFile, name)
		}
		delete(parts, "cluster")
	}
	for part, value := range filed {
		if own, both := parts[part]; both && !sameJSON(own, value) {
			return errorf("TF_CONFIG has %q: %s, but the file %s that %s names has %s: remove one of them", part,
				clip(string(own)), name, EnvTFConfigFile, clip(string(value)))
		}
		parts[part] = value
	}
	return nil
}

// sameJSON reports whether two JSON texts have the same value.
func sameJSON(a, b json.RawMessage) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// parseObject decodes a JSON object one level deep. The names of its members are case-sensitive, unlike those of a
// struct.
func parseObject(text []byte) (map[string]json.RawMessage, error) {
	var out map[string]json.RawMessage
	err := json.Unmarshal(text, &out)
	if err == nil && out == nil {
		err = errors.New("it is null")
	}
	return out, err
}

// text returns a part that is a string; "" if it is missing or null. given reports whether it is neither.
func (t tfConfig) text(name string) (s string, given bool, err error) {
	if !isGiven(t[name]) {
		return "", false, nil
	}
	if err := json.Unmarshal(t[name], &s); err != nil {
		return "", true, errorf("TF_CONFIG: %s is %s: want a text", name, clip(string(t[name])))
	}
	return s, true, nil
}

// isGiven reports whether a part is present and not null.
func isGiven(part json.RawMessage) bool { return part != nil && string(part) != "null" }

// Spec returns the cluster of TF_CONFIG.
func (c *TFConfig) Spec() (Spec, error) {
	t, err := c.read()
	if err != nil {
		return nil, err
	}
	cluster, there := t["cluster"]
	if !there {
		return Spec{}, nil
	}
	return ParseSpec(cluster)
}

// Task returns the task of TF_CONFIG, with the overrides. With an error it returns the known parts of the
// task.
func (c *TFConfig) Task() (Task, error) {
	return c.complete(c.override(NoTask))
}

// override fills unknown parts of a task from Overrides.
func (c *TFConfig) override(task Task) Task {
	if c.Overrides == nil {
		return task
	}
	task.Type = cmp.Or(task.Type, c.Overrides.Type)
	if task.Index < 0 {
		task.Index = c.Overrides.Index
	}
	return task
}

// complete fills unknown parts of a task from TF_CONFIG. It reads no part that it does not need.
func (c *TFConfig) complete(task Task) (Task, error) {
	if task.Known() {
		return task, nil
	}
	t, err := c.read()
	if err != nil || t["task"] == nil {
		return task, err
	}
	own, err := parseObject(t["task"])
	if err != nil {
		return task, errorf("TF_CONFIG: task=%s: want an object with the type and the index: %w",
			clip(string(t["task"])), err)
	}
	var typeErr, indexErr error
	if task.Type == "" && isGiven(own["type"]) {
		if json.Unmarshal(own["type"], &task.Type) != nil {
			typeErr = errorf("TF_CONFIG: task.type is %s: want a text, such as \"worker\"", clip(string(own["type"])))
		}
	}
	if task.Index < 0 && own["index"] != nil {
		task.Index, indexErr = taskIndex(own["index"])
	}
	return task, errors.Join(typeErr, indexErr)
}

// taskIndex reads a task's index: a whole number, or a text with one.
func taskIndex(raw json.RawMessage) (int, error) {
	var text string
	var number float64
	i, err := strconv.Atoi(string(raw))
	switch {
	case err == nil:
	case json.Unmarshal(raw, &text) == nil && isGiven(raw):
		i, err = parseIndex(text)
	case json.Unmarshal(raw, &number) == nil && isGiven(raw):
		if i, err = int(number), nil; float64(i) != number || i == math.MaxInt {
			err = strconv.ErrRange // a fraction, or more than an int holds
		}
	}
	if err != nil || i < 0 {
		return NoTask.Index, errorf("TF_CONFIG: task.index is %s: want a whole number from 0", clip(string(raw)))
	}
	return i, nil
}

// Master returns TF_CONFIG's session_master if it is present; "" if the cluster has no job, or only one task,
// with index 0; else the address of the task.
func (c *TFConfig) Master(of Task, layer string) (string, error) {
	t, err := c.read()
	if err != nil {
		return "", err
	}
	if master, given, err := t.text("session_master"); given {
		return master, err
	}
	spec, err := c.Spec()
	if err != nil {
		return "", err
	}
	if jobs := spec.Jobs(); len(jobs) == 0 || len(jobs) == 1 && spec.Count(jobs[0]) == 1 && spec.Dense(jobs[0]) {
		return "", nil
	}
	if of, err = c.complete(c.override(of)); err != nil {
		return "", err
	}
	if layer == "" {
		if layer, err = c.RPCLayer(); err != nil {
			return "", err
		}
	}
	address, err := spec.Address(of)
	if err != nil {
		return "", err
	}
	return masterURL(address, layer), nil
}

// Accelerators returns what Accelerating counts. As in TensorFlow it needs a task and a master.
func (c *TFConfig) Accelerators() (map[string]int, error) {
	if _, err := c.Task(); err != nil {
		return nil, err
	}
	if _, err := c.Master(NoTask, ""); err != nil {
		return nil, err
	}
	if c.Accelerating == nil {
		return map[string]int{}, nil
	}
	return c.Accelerating()
}

// Environment returns the one given.
func (c *TFConfig) Environment() string { return c.Where }

// RPCLayer returns the one given, else TF_CONFIG's.
func (c *TFConfig) RPCLayer() (string, error) {
	if c.Layer != "" {
		return c.Layer, nil
	}
	t, err := c.read()
	if err != nil {
		return "", err
	}
	layer, _, err := t.text("rpc_layer")
	return layer, err
}
