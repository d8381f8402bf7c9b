package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// SlurmConfig configures [NewSlurm]. The zero value reads everything from the environment of a Slurm step.
type SlurmConfig struct {
	Jobs         map[string]int // number of tasks by job; default all are "worker"
	PortBase     int            // port of a host's first task; the others follow. Default 8888
	TasksPerNode map[string]int // tasks by host; default SLURM_STEP_TASKS_PER_NODE over SLURM_STEP_NODELIST
	// if TasksPerNode is nil: the same number on every host of SLURM_STEP_NODELIST; 0: from the environment
	TasksEach   int
	GPUsPerNode int    // 0: the number in CUDA_VISIBLE_DEVICES; negative: none
	GPUsPerTask int    // 0: GPUsPerNode divided by the largest number of tasks on a host
	LeaveGPUs   bool   // do not set CUDA_VISIBLE_DEVICES to this task's GPUs (TensorFlow's auto_set_gpu=False)
	Layer       string // of [Resolver.RPCLayer]; default "grpc"

	Lookup func(string) (string, bool)   // default os.LookupEnv
	Setenv func(key, value string) error // default os.Setenv
}

// Slurm is a resolver for the tasks of a Slurm step (TensorFlow's SlurmClusterResolver). The hosts are sorted by name,
// the tasks of a host take one port after the other, and the jobs, sorted by name, take the tasks in this order.
type Slurm struct {
	spec        Spec
	this        Task
	layer       string
	gpusPerTask int
	visible     string
}

var _ Resolver = (*Slurm)(nil)

// NewSlurm reads the environment (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST,
// SLURM_STEP_TASKS_PER_NODE) and, if the task has GPUs, sets CUDA_VISIBLE_DEVICES to this task's GPUs.
func NewSlurm(cfg SlurmConfig) (*Slurm, error) {
	if cfg.Lookup == nil {
		cfg.Lookup = os.LookupEnv
	}
	if cfg.Setenv == nil {
		cfg.Setenv = os.Setenv
	}
	rank, err := cfg.number("SLURM_PROCID")
	if err != nil {
		return nil, err
	}
	if cfg.Jobs == nil {
		tasks, err := cfg.number("SLURM_STEP_NUM_TASKS")
		if err != nil {
			return nil, err
		}
		cfg.Jobs = map[string]int{"worker": tasks}
	}
	hosts, err := cfg.hosts()
	if err != nil {
		return nil, err
	}
	if err := cfg.gpus(hosts); err != nil {
		return nil, err
	}
	return cfg.place(rank, hosts)
}

// variable returns an environment variable of a Slurm step.
func (cfg *SlurmConfig) variable(name string) (string, error) {
	value, ok := cfg.Lookup(name)
	if !ok {
		return "", errorf("%s not found in environment. Not running inside a SLURM step?", name)
	}
	return value, nil
}

func (cfg *SlurmConfig) number(name string) (int, error) {
	value, err := cfg.variable(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(value))
	if err != nil || n < 0 {
		return 0, errorf("%s=%s: want a number from 0", name, strconv.Quote(clip(value)))
	}
	return n, nil
}

// hosts returns how many tasks each host has.
func (cfg *SlurmConfig) hosts() (map[string]int, error) {
	if cfg.TasksPerNode != nil {
		return cfg.TasksPerNode, nil
	}
	text, err := cfg.variable("SLURM_STEP_NODELIST")
	if err != nil {
		return nil, err
	}
	names, err := ExpandHostlist(text)
	if err != nil {
		return nil, err
	}
	counts := slices.Repeat([]int{cfg.TasksEach}, len(names))
	if cfg.TasksEach == 0 {
		if text, err = cfg.variable("SLURM_STEP_TASKS_PER_NODE"); err != nil {
			return nil, err
		}
		if counts, err = ExpandTasksPerNode(text); err != nil {
			return nil, err
		}
	}
	out := map[string]int{}
	for i, name := range names[:min(len(names), len(counts))] {
		out[name] = counts[i]
	}
	return out, nil
}

// gpus determines the number of GPUs per node and per task.
func (cfg *SlurmConfig) gpus(hosts map[string]int) error {
	most := 1
	for _, n := range hosts {
		most = max(most, n)
	}
	if cfg.GPUsPerNode == 0 {
		if visible, ok := cfg.Lookup("CUDA_VISIBLE_DEVICES"); ok {
			cfg.GPUsPerNode = len(strings.Split(visible, ","))
		}
	}
	cfg.GPUsPerNode = max(0, cfg.GPUsPerNode)
	if cfg.GPUsPerTask == 0 {
		cfg.GPUsPerTask = cfg.GPUsPerNode / most
	}
	if most*cfg.GPUsPerTask > cfg.GPUsPerNode {
		return errorf("requested more GPUs per node than available: %d tasks with %d each on a node of %d", most,
			cfg.GPUsPerTask, cfg.GPUsPerNode)
	}
	return nil
}

// place numbers the tasks and finds this one.
func (cfg *SlurmConfig) place(rank int, hosts map[string]int) (*Slurm, error) {
	port := cfg.PortBase
	if port == 0 {
		port = 8888
	}
	var addresses, visible []string
	for _, host := range slices.Sorted(maps.Keys(hosts)) {
		for k := range hosts[host] {
			addresses = append(addresses, fmt.Sprintf("%s:%d", host, port+k))
			visible = append(visible, gpuList(k*cfg.GPUsPerTask, cfg.GPUsPerTask))
		}
	}
	wanted := 0
	for job, n := range cfg.Jobs {
		if n < 0 {
			return nil, errorf("job '%s' has %d tasks", job, n)
		}
		wanted += n
	}
	if wanted != len(addresses) {
		return nil, errorf("requested %d tasks but only %d were assigned", wanted, len(addresses))
	}
	if rank >= len(addresses) {
		return nil, errorf("SLURM_PROCID=%d: the step has %d tasks", rank, len(addresses))
	}
	s := &Slurm{spec: Spec{}, layer: cmp.Or(cfg.Layer, "grpc"), gpusPerTask: cfg.GPUsPerTask, visible: visible[rank]}
	first := 0
	for _, job := range slices.Sorted(maps.Keys(cfg.Jobs)) {
		n := cfg.Jobs[job]
		s.spec[job] = numbered(addresses[first : first+n])
		if rank >= first && rank < first+n {
			s.this = Task{job, rank - first}
		}
		first += n
	}
	if !cfg.LeaveGPUs && s.gpusPerTask > 0 {
		if err := cfg.Setenv("CUDA_VISIBLE_DEVICES", s.visible); err != nil {
			return nil, fmt.Errorf("cluster: setting CUDA_VISIBLE_DEVICES: %w", err)
		}
	}
	return s, nil
}

// gpuList returns n GPU numbers from first on: "2,3".
func gpuList(first, n int) string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = strconv.Itoa(first + i)
	}
	return strings.Join(ids, ",")
}

// Spec returns the tasks of the step.
func (s *Slurm) Spec() (Spec, error) { return s.spec, nil }

// Task returns which of them this process is.
func (s *Slurm) Task() (Task, error) { return s.this, nil }

// Master returns the address of the task.
func (s *Slurm) Master(of Task, layer string) (string, error) {
	of.Type = cmp.Or(of.Type, s.this.Type)
	if of.Index < 0 {
		of.Index = s.this.Index
	}
	address, err := s.spec.Address(of)
	if err != nil {
		return "", err
	}
	return masterURL(address, cmp.Or(layer, s.layer)), nil
}

// Accelerators returns the GPUs of a task.
func (s *Slurm) Accelerators() (map[string]int, error) {
	return map[string]int{"GPU": s.gpusPerTask}, nil
}

// Environment returns "".
func (s *Slurm) Environment() string { return "" }

// RPCLayer returns the one given, "grpc" by default.
func (s *Slurm) RPCLayer() (string, error) { return s.layer, nil }

// VisibleDevices returns the GPUs of this task in the format of CUDA_VISIBLE_DEVICES: "0,1".
func (s *Slurm) VisibleDevices() string { return s.visible }

// hostsMax bounds the number of hosts in an expanded hostlist.
const hostsMax = 1 << 20

var hostlistPart = regexp.MustCompile(`^([^,\[\]]*)(?:\[([^\]]+)\])?$`)

// ExpandHostlist expands Slurm's compressed host names, "n[01-03,7],m1", to "n01", "n02", "n03", "n7", "m1".
// Leading zeros are kept; a descending range is empty.
func ExpandHostlist(list string) ([]string, error) {
	var hosts []string
	bad := func(format string, args ...any) ([]string, error) {
		return nil, errorf("invalid hostlist format %s: %w", strconv.Quote(clip(list)), fmt.Errorf(format, args...))
	}
	for _, part := range splitOutside(list) {
		m := hostlistPart.FindStringSubmatch(part)
		if m == nil || part == "" {
			return bad("invalid part: %s", clip(part))
		}
		if m[2] == "" {
			hosts = append(hosts, m[1])
			continue
		}
		for _, r := range strings.Split(m[2], ",") {
			from, to, isRange := strings.Cut(r, "-")
			if !isRange {
				to = from
			}
			lo, err := strconv.Atoi(from)
			if err != nil {
				return bad("%q is not a number", clip(from))
			}
			hi, err := strconv.Atoi(to)
			if err != nil {
				return bad("%q is not a number", clip(to))
			}
			if hi-lo >= hostsMax-len(hosts) {
				return bad("more than %d hosts", hostsMax)
			}
			for i := lo; i <= hi; i++ {
				hosts = append(hosts, fmt.Sprintf("%s%0*d", m[1], len(from), i))
			}
		}
	}
	return hosts, nil
}

// splitOutside splits at commas that are not in brackets; a comma at the end is not followed by a part.
func splitOutside(list string) []string {
	var parts []string
	start, inside := 0, false
	for i, c := range list {
		switch {
		case c == '[':
			inside = true
		case c == ']':
			inside = false
		case c == ',' && !inside:
			parts = append(parts, list[start:i])
			start = i + 1
		}
	}
	if start < len(list) {
		parts = append(parts, list[start:])
	}
	return parts
}

var tasksPart = regexp.MustCompile(`^(\d+)(?:\(x(\d+)\))?$`)

// ExpandTasksPerNode expands Slurm's compressed numbers of tasks, "2(x3),1", to 2, 2, 2, 1.
func ExpandTasksPerNode(list string) ([]int, error) {
	var out []int
	bad := errorf("invalid tasks-per-node list format %s: want a form such as 2(x3),1", strconv.Quote(clip(list)))
	for _, part := range strings.Split(list, ",") {
		m := tasksPart.FindStringSubmatch(part)
		if m == nil {
			return nil, bad
		}
		tasks, err := strconv.Atoi(m[1])
		if err != nil {
			return nil, bad
		}
		times := 1
		if m[2] != "" {
			if times, err = strconv.Atoi(m[2]); err != nil || times > hostsMax-len(out) {
				return nil, bad
			}
		}
		out = append(out, slices.Repeat([]int{tasks}, times)...)
	}
	return out, nil
}
