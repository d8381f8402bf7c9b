package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// ErrInvalid is what every error of this package about a wrong specification, argument or environment matches.
var ErrInvalid = errors.New("invalid cluster")

func errorf(format string, args ...any) error {
	return fmt.Errorf("cluster: %w: %w", ErrInvalid, fmt.Errorf(format, args...))
}

// Spec lists the tasks of a cluster: job → index → address ("host:port"). It is TensorFlow's ClusterSpec; a job may be
// sparse, that is, lack some indices. Methods do not change it.
type Spec map[string]map[int]string

// NewSpec makes a spec of jobs whose tasks are numbered from 0.
func NewSpec(jobs map[string][]string) Spec {
	s := Spec{}
	for job, addresses := range jobs {
		s[job] = numbered(addresses)
	}
	return s
}

func numbered(addresses []string) map[int]string {
	tasks := map[int]string{}
	for i, a := range addresses {
		tasks[i] = a
	}
	return tasks
}

// ParseSpec makes a spec of a JSON value as TF_CONFIG's "cluster" has it: an object whose values are arrays of addresses,
// or objects from index to address.
func ParseSpec(text []byte) (Spec, error) {
	var jobs map[string]json.RawMessage
	if err := json.Unmarshal(text, &jobs); err != nil {
		return nil, errorf("a cluster is an object from job to tasks: %w", err)
	}
	s := Spec{}
	for job, raw := range jobs {
		var list []string
		if json.Unmarshal(raw, &list) == nil && list != nil {
			s[job] = numbered(list)
			continue
		}
		var sparse map[string]string
		if err := json.Unmarshal(raw, &sparse); err != nil || sparse == nil {
			return nil, errorf("the tasks for job '%s' must be a list of addresses, or an object from index to address: %s", job, clip(string(raw)))
		}
		s[job] = map[int]string{}
		for key, address := range sparse {
			index, err := strconv.Atoi(key)
			if err != nil || index < 0 {
				return nil, errorf("job '%s' has a task with index %q: want a number from 0", job, key)
			}
			s[job][index] = address
		}
	}
	return s, nil
}

// clip shortens what an error shows of its input.
func clip(s string) string {
	const bytesMax = 80
	if len(s) > bytesMax {
		return s[:bytesMax] + "…"
	}
	return s
}

// Jobs returns the names of the jobs, sorted.
func (s Spec) Jobs() []string { return slices.Sorted(maps.Keys(s)) }

// Indices returns the task indices of a job, sorted; nil if there is no such job.
func (s Spec) Indices(job string) []int { return slices.Sorted(maps.Keys(s[job])) }

// Count returns the number of tasks in a job; 0 if there is no such job.
func (s Spec) Count(job string) int { return len(s[job]) }

// Tasks returns the addresses of a job by index, the order of TensorFlow's job_tasks. Indices that a sparse job lacks are
// left out.
func (s Spec) Tasks(job string) []string {
	var out []string
	for _, index := range s.Indices(job) {
		out = append(out, s[job][index])
	}
	return out
}

// Dense reports whether the job's tasks are numbered from 0 without a gap.
func (s Spec) Dense(job string) bool {
	for i := range len(s[job]) {
		if _, ok := s[job][i]; !ok {
			return false
		}
	}
	return true
}

// Address returns the address of a task.
func (s Spec) Address(t Task) (string, error) {
	tasks, ok := s[t.Type]
	if !ok {
		return "", errorf("no such job in cluster: %s; it has %s", t.typeText(), s.jobsText())
	}
	address, ok := tasks[t.Index]
	if !ok || t.Index < 0 {
		return "", errorf("no task with index %s in job '%s', which has %v", t.indexText(), t.Type, s.Indices(t.Type))
	}
	return address, nil
}

func (s Spec) jobsText() string {
	if len(s) == 0 {
		return "none"
	}
	return "'" + strings.Join(s.Jobs(), "', '") + "'"
}

// MarshalJSON writes the spec as TF_CONFIG has it: a job that is [Spec.Dense] as an array, a sparse one as an object.
func (s Spec) MarshalJSON() ([]byte, error) {
	out := map[string]any{}
	for job, tasks := range s {
		if s.Dense(job) {
			out[job] = append([]string{}, s.Tasks(job)...)
		} else {
			out[job] = tasks
		}
	}
	return json.Marshal(out)
}

// UnmarshalJSON is [ParseSpec].
func (s *Spec) UnmarshalJSON(text []byte) error {
	parsed, err := ParseSpec(text)
	*s = parsed
	return err
}

// Task names one task of a cluster. The zero value is the first task of no job; [NoTask] is none.
type Task struct {
	Type  string // the job: "worker"; "": not known
	Index int    // in the job, from 0; negative: not known
}

// NoTask is a task of which nothing is known.
var NoTask = Task{Index: -1}

// Known reports whether both the job and the index are known.
func (t Task) Known() bool { return t.Type != "" && t.Index >= 0 }

// String returns "/job:worker/task:1", with a question mark for what is not known.
func (t Task) String() string {
	s := Task{Type: "?", Index: t.Index}
	if t.Type != "" {
		s.Type = t.Type
	}
	if t.Index < 0 {
		return "/job:" + s.Type + "/task:?"
	}
	return fmt.Sprintf("/job:%s/task:%d", s.Type, s.Index)
}

func (t Task) typeText() string {
	if t.Type == "" {
		return "none was given"
	}
	return "'" + t.Type + "'"
}

func (t Task) indexText() string {
	if t.Index < 0 {
		return "(none was given)"
	}
	return strconv.Itoa(t.Index)
}
