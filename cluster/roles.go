package cluster

import (
	"fmt"
	"slices"
	"strings"
)

// The jobs that a cluster may have.
const (
	Chief     = "chief"     // the worker that also saves and reports
	Worker    = "worker"    // trains
	PS        = "ps"        // a parameter server
	Evaluator = "evaluator" // evaluates in parallel with the training; may be missing in the spec
)

var jobs = []string{Chief, Worker, Evaluator, PS}

// check returns an error if a task cannot belong to the cluster (TensorFlow's _validate_cluster_spec).
func (s Spec) check(t Task) error {
	for _, job := range s.Jobs() {
		if !slices.Contains(jobs, job) {
			return errorf("disallowed task type '%s' found in the cluster spec: allowed are %s", job, strings.Join(jobs, ", "))
		}
	}
	_, there := s[t.Type]
	switch {
	case t.Type != "" && !slices.Contains(jobs, t.Type):
		return errorf("unrecognized task type '%s': valid are %s", t.Type, strings.Join(jobs, ", "))
	case t.Type != "" && !there && t.Type != Evaluator:
		return errorf("task type '%s' is not in the cluster spec, which has %s", t.Type, s.jobsText())
	case s.Count(Chief) > 1:
		return errorf("there must be at most one 'chief' task: there are %d", s.Count(Chief))
	case s.Count(Evaluator) > 1:
		return errorf("there must be at most one 'evaluator' task: there are %d", s.Count(Evaluator))
	case there && t.Index < 0:
		return errorf("the task of type %s has no index: want one from 0 to %d", t.Type, s.Count(t.Type)-1)
	case there && t.Index >= s.Count(t.Type):
		return errorf("the task id %d exceeds the maximum id of %s, which is %d", t.Index, t.Type, s.Count(t.Type)-1)
	}
	return nil
}

// IsChief reports whether a task has the duties of the chief, such as saving: the chief, the evaluator among
// themselves, and worker 0 if there is no chief (TensorFlow's multi_worker_util.is_chief).
func IsChief(s Spec, t Task) (bool, error) {
	if err := s.check(t); err != nil {
		return false, err
	}
	return t.Type == Chief || t.Type == Evaluator || t.Type == Worker && t.Index == 0 && s.Count(Chief) == 0, nil
}

// IDInCluster returns the index of a task among those that train together: the chief first, then the workers;
// an evaluator's own index (TensorFlow's id_in_cluster).
func IDInCluster(s Spec, t Task) (int, error) {
	if err := s.check(t); err != nil {
		return 0, err
	}
	switch t.Type {
	case Chief:
		return 0, nil
	case Worker:
		return t.Index + s.Count(Chief), nil
	case Evaluator:
		return t.Index, nil
	}
	return 0, errorf("there is no id for task type %s", t.typeText())
}

// WorkerCount returns how many tasks train together with one of that type (TensorFlow's worker_count).
func WorkerCount(s Spec, taskType string) (int, error) {
	if err := s.check(Task{Type: taskType}); err != nil {
		return 0, err
	}
	switch taskType {
	case Chief, Worker:
		return s.Count(Chief) + s.Count(Worker), nil
	case Evaluator:
		if s.Count(Evaluator) > 0 {
			return s.Count(Evaluator), nil
		}
		return 0, errorf("there is no 'evaluator' in the cluster spec, which has %s", s.jobsText())
	}
	return 0, errorf("unexpected task type %s: want chief, worker or evaluator", Task{Type: taskType}.typeText())
}

// CollectiveLeader returns the device string of the task that leads the collectives: the chief, else worker
// 0; "" for a cluster without tasks and for an evaluator (TensorFlow's collective_leader).
func CollectiveLeader(s Spec, t Task) (string, error) {
	if len(s) == 0 {
		return "", nil
	}
	if err := s.check(t); err != nil {
		return "", err
	}
	if t.Type == Evaluator {
		return "", nil
	}
	return s.leader(Chief, Worker)
}

// CoordinationLeader returns the device string of the task that hosts the coordination service: parameter server 0,
// else the chief, else worker 0 (TensorFlow's coordination_leader).
func CoordinationLeader(s Spec) (string, error) {
	if len(s) == 0 {
		return "", nil
	}
	return s.leader(PS, Chief, Worker)
}

func (s Spec) leader(types ...string) (string, error) {
	for _, t := range types {
		if _, ok := s[t]; ok {
			return "/job:" + t + "/replica:0/task:0", nil
		}
	}
	return "", errorf("no task can lead: want one of %s, there is %s", strings.Join(types, ", "), s.jobsText())
}

// Devices returns the device strings of all tasks that train: the chief's, then the workers', each with
// gpusPerWorker GPUs, or with its CPU if that is 0 (TensorFlow's cluster_spec_to_device_list). Parameter
// servers are not included.
func Devices(s Spec, gpusPerWorker int) []string {
	var out []string
	for _, job := range []string{Chief, Worker} {
		for task := range s.Count(job) {
			if gpusPerWorker == 0 {
				out = append(out, fmt.Sprintf("/job:%s/task:%d/device:CPU:0", job, task))
			}
			for gpu := range gpusPerWorker {
				out = append(out, fmt.Sprintf("/job:%s/task:%d/device:GPU:%d", job, task, gpu))
			}
		}
	}
	return out
}
