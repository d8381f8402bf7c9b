package cluster

import (
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"strings"
)

// TFConfig is a resolver that reads the environment variable TF_CONFIG (TensorFlow's TFConfigClusterResolver), which Keras,
// Vertex AI, Ray and Kubeflow set:
//
//	{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]},
//	 "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}
//
// A job may also be an object from index to address, and the index a string. The variable is read anew by each call. Not
// set is an empty object: a process by itself.
type TFConfig struct {
	Overrides    *Task                          // replaces the task of TF_CONFIG, as far as it is known
	Layer        string                         // replaces rpc_layer
	Where        string                         // the environment; never in TF_CONFIG
	Lookup       func(string) (string, bool)    // default os.LookupEnv
	Accelerating func() (map[string]int, error) // counts this machine's accelerators; default none
}

var _ Resolver = (*TFConfig)(nil)

// tfConfig is TF_CONFIG's text. A field that is left out is nil.
type tfConfig struct {
	Cluster json.RawMessage `json:"cluster"`
	Task    json.RawMessage `json:"task"`
	Layer   *string         `json:"rpc_layer"`
	Master  *string         `json:"session_master"`
}

// tfConfigTask is its task.
type tfConfigTask struct {
	Type  *string         `json:"type"`
	Index json.RawMessage `json:"index"`
}

func (c *TFConfig) read() (*tfConfig, error) {
	lookup := c.Lookup
	if lookup == nil {
		lookup = os.LookupEnv
	}
	text, ok := lookup("TF_CONFIG")
	if !ok {
		text = "{}"
	}
	out := &tfConfig{}
	if err := unmarshalObject([]byte(text), out); err != nil {
		return nil, errorf("TF_CONFIG=%s: expecting a JSON object: %w", strconv.Quote(clip(text)), err)
	}
	return out, nil
}

// unmarshalObject is json.Unmarshal that takes null for no object.
func unmarshalObject(text []byte, v any) error {
	if strings.TrimSpace(string(text)) == "null" {
		return errors.New("it is null")
	}
	return json.Unmarshal(text, v)
}

// Spec returns the cluster of TF_CONFIG.
func (c *TFConfig) Spec() (Spec, error) {
	t, err := c.read()
	if err != nil {
		return nil, err
	}
	switch {
	case t.Cluster == nil:
		return Spec{}, nil
	case string(t.Cluster) == "null":
		return nil, errorf("TF_CONFIG: cluster is null: want an object from each job to its addresses")
	}
	return ParseSpec(t.Cluster)
}

// Task returns the task of TF_CONFIG, or what overrides it. With an error comes what is known of the task.
func (c *TFConfig) Task() (Task, error) {
	task := NoTask
	if c.Overrides != nil {
		task = *c.Overrides
	}
	if task.Known() {
		return task, nil
	}
	t, err := c.read()
	if err != nil || t.Task == nil {
		return task, err
	}
	var own tfConfigTask
	if err := unmarshalObject(t.Task, &own); err != nil {
		return task, errorf("TF_CONFIG: task=%s: want an object with the type and the index: %w", clip(string(t.Task)), err)
	}
	if task.Type == "" && own.Type != nil {
		task.Type = *own.Type
	}
	if task.Index < 0 && own.Index != nil {
		if task.Index, err = taskIndex(own.Index); err != nil {
			return Task{task.Type, NoTask.Index}, err
		}
	}
	return task, nil
}

// taskIndex reads a task's index: a number, perhaps with zeros after the point, or a text with one.
func taskIndex(text json.RawMessage) (int, error) {
	digits := strings.TrimSpace(strings.Trim(strings.TrimSpace(string(text)), `"`))
	if whole, zeros, point := strings.Cut(digits, "."); point && text[0] != '"' && strings.Trim(zeros, "0") == "" {
		digits = whole
	}
	i, err := strconv.Atoi(digits)
	if err != nil || i < 0 {
		return 0, errorf("TF_CONFIG: task.index is %s: want a number from 0", clip(string(text)))
	}
	return i, nil
}

// Master returns TF_CONFIG's session_master if it is there; nothing if the cluster has at most one task; else the address
// of the task.
func (c *TFConfig) Master(of Task, layer string) (string, error) {
	t, err := c.read()
	if err != nil {
		return "", err
	}
	if t.Master != nil {
		return *t.Master, nil
	}
	spec, err := c.Spec()
	if err != nil {
		return "", err
	}
	if jobs := spec.Jobs(); len(jobs) == 0 || len(jobs) == 1 && spec.Count(jobs[0]) == 1 {
		return "", nil
	}
	own, err := c.Task()
	if err != nil {
		return "", err
	}
	of.Type = or(of.Type, own.Type)
	if of.Index < 0 {
		of.Index = own.Index
	}
	address, err := spec.Address(of)
	if err != nil {
		return "", err
	}
	if layer == "" {
		if layer, err = c.RPCLayer(); err != nil {
			return "", err
		}
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
	if err != nil || t.Layer == nil {
		return "", err
	}
	return *t.Layer, nil
}
