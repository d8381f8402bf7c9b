package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// ErrInvalid is matched by every error of this package about an invalid specification, argument or
// environment.
var ErrInvalid = errors.New("invalid cluster")

func errorf(format string, args ...any) error {
	return fmt.Errorf("cluster: %w: %w", ErrInvalid, fmt.Errorf(format, args...))
}

// Spec lists the tasks of a cluster: job → index → address ("host:port"). It is TensorFlow's ClusterSpec; a job may be
// sparse, that is, lack some indices. Methods do not change it.
type Spec map[string]map[int]string

// NewSpec builds a spec of jobs whose tasks are numbered from 0.
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

// ParseSpec builds a spec from the JSON value of TF_CONFIG's "cluster": an object whose values are arrays of
// addresses, or objects from index to address. An index is parsed like Python's int; of two spellings of one
// index the last counts. A job may have no tasks, and an address may be any text.
func ParseSpec(text []byte) (Spec, error) {
	jobs, err := parseObject(text)
	if err != nil {
		return nil, errorf("a cluster is an object from job to tasks, not %s: %w", clip(string(text)), err)
	}
	s := Spec{}
	for _, job := range slices.Sorted(maps.Keys(jobs)) { // makes the returned error deterministic
		if !isText(job) {
			return nil, errorf("the name of the job %q is not valid Unicode", job)
		}
		if s[job], err = parseTasks(job, jobs[job]); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// parseTasks reads the tasks of a job: a list of addresses, or an object from index to address.
func parseTasks(job string, raw json.RawMessage) (map[int]string, error) {
	items := map[int]json.RawMessage{}
	switch raw[0] {
	case '[':
		var list []json.RawMessage
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, err
		}
		for i, item := range list {
			items[i] = item
		}
	case '{':
		names, values, err := members(raw)
		if err != nil {
			return nil, err
		}
		for i, name := range names {
			index, err := parseIndex(name)
			if err != nil || index < 0 || index > math.MaxInt32 {
				return nil, errorf("job '%s' has a task with index %q: want a whole number from 0 to %d",
					job, name, math.MaxInt32)
			}
			items[index] = values[i]
		}
	default:
		return nil, errorf("the tasks for job '%s' must be a list of addresses, or an object from index to address: %s",
			job, clip(string(raw)))
	}
	tasks := map[int]string{}
	for _, index := range slices.Sorted(maps.Keys(items)) {
		var address string
		if item := items[index]; json.Unmarshal(item, &address) != nil || !isGiven(item) || !isText(address) {
			return nil, errorf("the address of task %d in job '%s' is %s: want a text, host:port",
				index, job, clip(string(item)))
		}
		tasks[index] = address
	}
	return tasks, nil
}

// members returns the names and the values of a JSON object, in order. A repeated name has its first position
// and its last value, as in Python.
func members(object []byte) (names []string, values []json.RawMessage, err error) {
	d := json.NewDecoder(bytes.NewReader(object))
	if _, err := d.Token(); err != nil {
		return nil, nil, err
	}
	at := map[string]int{}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, nil, err
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, nil, err
		}
		name, _ := token.(string)
		if i, twice := at[name]; twice {
			values[i] = value
			continue
		}
		at[name] = len(names)
		names, values = append(names, name), append(values, value)
	}
	return names, values, nil
}

// parseIndex parses a whole number like Python's int, which TensorFlow uses for indices: digits of any
// script, single underscores between them, a leading sign, surrounding white space.
func parseIndex(text string) (int, error) {
	text = strings.TrimSpace(text)
	var ascii []byte
	last := rune('_') // the previous character; no underscore may follow another, a sign or nothing
	for i, r := range text {
		switch {
		case unicode.IsDigit(r):
			ascii = append(ascii, '0'+digitValue(r))
		case i == 0 && (r == '+' || r == '-'):
			ascii, r = append(ascii, byte(r)), '_'
		case r != '_' || last == '_':
			return 0, strconv.ErrSyntax
		}
		last = r
	}
	if last == '_' {
		return 0, strconv.ErrSyntax
	}
	return strconv.Atoi(string(ascii))
}

// digitValue returns the value of a decimal digit of any script: Unicode has them in runs from 0 to 9.
func digitValue(r rune) byte {
	for _, run := range unicode.Nd.R16 {
		if rune(run.Lo) <= r && r <= rune(run.Hi) {
			return byte((r - rune(run.Lo)) % 10)
		}
	}
	for _, run := range unicode.Nd.R32 {
		if rune(run.Lo) <= r && r <= rune(run.Hi) {
			return byte((r - rune(run.Lo)) % 10)
		}
	}
	return 0
}

// isText reports whether a decoded JSON string is valid Unicode: the decoder replaces what is not.
func isText(s string) bool { return !strings.ContainsRune(s, unicode.ReplacementChar) }

// clip shortens the input shown in an error.
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

// Tasks returns the addresses of a job by index, the order of TensorFlow's job_tasks. Indices that a sparse job lacks
// are left out.
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
	if !ok || t.Type == "" {
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

// MarshalJSON writes the spec as TF_CONFIG has it: a job that is [Spec.Dense] as an array; a sparse one, and one
// without tasks, as an object.
func (s Spec) MarshalJSON() ([]byte, error) {
	out := map[string]any{}
	for job, tasks := range s {
		switch {
		case len(tasks) == 0:
			out[job] = struct{}{}
		case s.Dense(job):
			out[job] = s.Tasks(job)
		default:
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

// Task identifies one task of a cluster. The zero value is the first task of no job; [NoTask] is none.
type Task struct {
	Type  string // the job: "worker"; "": unknown
	Index int    // in the job, from 0; negative: unknown
}

// NoTask is an unknown task.
var NoTask = Task{Index: -1}

// Known reports whether both the job and the index are known.
func (t Task) Known() bool { return t.Type != "" && t.Index >= 0 }

// String returns "/job:worker/task:1", with a question mark for an unknown part.
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
