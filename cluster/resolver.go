package cluster

// Resolver finds out what cluster this process belongs to (TensorFlow's ClusterResolver). Its answers may change from call
// to call if what it looks at does.
type Resolver interface {
	// Spec returns the tasks of the cluster; an empty spec is a process by itself.
	Spec() (Spec, error)
	// Task returns which task this process is; what is not known is [NoTask]'s.
	Task() (Task, error)
	// Master returns the address of the session master as TensorFlow forms it, "grpc://host:port", or nothing for a
	// process by itself. What is left open in of is taken from [Resolver.Task], an empty layer from [Resolver.RPCLayer].
	Master(of Task, layer string) (string, error)
	// Accelerators returns the number of accelerators of this task, by kind ("GPU").
	Accelerators() (map[string]int, error)
	// Environment returns where the process runs, in the resolver's words; mostly "".
	Environment() string
	// RPCLayer returns the protocol that addresses are written with, "grpc", or "".
	RPCLayer() (string, error)
}

// masterURL writes an address with the protocol before it.
func masterURL(address, layer string) string {
	if layer == "" {
		return address
	}
	return layer + "://" + address
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// Simple is a resolver that answers what it was given (TensorFlow's SimpleClusterResolver). Nothing is checked against the
// spec but what [Simple.Master] is asked for.
type Simple struct {
	Cluster         Spec
	MasterAddress   string
	This            *Task // nil: not known
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

// Master returns the address of the task asked for, or, if it is not known wholly, the master given.
func (s *Simple) Master(of Task, layer string) (string, error) {
	address := s.MasterAddress
	if of.Known() {
		var err error
		if address, err = s.Cluster.Address(of); err != nil {
			return "", err
		}
	}
	return masterURL(address, or(layer, s.Layer)), nil
}

// Accelerators returns the numbers given.
func (s *Simple) Accelerators() (map[string]int, error) { return s.NumAccelerators, nil }

// Environment returns the one given.
func (s *Simple) Environment() string { return s.Where }

// RPCLayer returns the one given.
func (s *Simple) RPCLayer() (string, error) { return s.Layer, nil }
