package tcp

import "github.com/lockstep-ml/lockstep/transport"

// SetMeshMax sets the number of processes up to which all are linked with each other, for groups created afterwards.
func (n *Node) SetMeshMax(processes int) { n.meshMax = processes }

// Parked reports whether the rank of an endpoint blocks in a long wait.
func Parked(e transport.Endpoint) bool { return e.(*endpoint).parked.Load() }
