package cluster

import "cmp"

// Resolver determines the cluster that this process belongs to (TensorFlow's ClusterResolver). Its results
// may change from call to call if its sources do.
type Resolver interface {
	// Spec returns the tasks of the cluster; an empty spec means a single-process job.
	Spec() (Spec, error)
	// Task returns this process's task; unknown parts are those of [NoTask].
	Task() (Task, error)
	// Master returns the address of the session master in TensorFlow's form, "grpc://host:port", or "" for a
	// single-process job. Unset parts of of default to [Resolver.Task], an empty layer to
	// [Resolver.RPCLayer].
	Master(of Task, layer string) (string, error)
	// Accelerators returns the number of accelerators of this task, by kind ("GPU").
	Accelerators() (map[string]int, error)
	// Environment returns the resolver's name for the place where the process runs; mostly "".
	Environment() string
	// RPCLayer returns the protocol of the addresses, "grpc", or "".
	RPCLayer() (string, error)
}

// masterURL prefixes an address with the protocol.
func masterURL(address, layer string) string {
	if layer == "" {
		return address
	}
	return layer + "://" + address
}

// Simple is a resolver that returns fixed values (TensorFlow's SimpleClusterResolver). Only the task passed
// to [Simple.Master] is checked against the spec.
type Simple struct {
	Cluster         Spec
	MasterAddress   string
	This            *Task // nil: unknown
	Where           string
	Layer           string
	NumAccelerators map[string]int
}

var _ Resolver = (*Simple)(nil)

// Spec returns the spec given.
func (s *Simple) Spec() (Spec, error) { return s.Cluster, nil }

// Task returns the task given.
func (s *Simple) Task() (Task, error) {
	if s.This == nil {
		return NoTask, nil
	}
	return *s.This, nil
}

// Master returns the address of the given task, or, if the task is not fully known, the given master.
func (s *Simple) Master(of Task, layer string) (string, error) {
	address := s.MasterAddress
	if of.Known() {
		var err error
		if address, err = s.Cluster.Address(of); err != nil {
			return "", err
		}
	}
	return masterURL(address, cmp.Or(layer, s.Layer)), nil
}

// Accelerators returns the numbers given.
func (s *Simple) Accelerators() (map[string]int, error) { return s.NumAccelerators, nil }

// Environment returns the one given.
func (s *Simple) Environment() string { return s.Where }

// RPCLayer returns the one given.
func (s *Simple) RPCLayer() (string, error) { return s.Layer, nil }
