package tcp

// SetMeshMax sets the number of processes up to which all are linked with each other, for groups created afterwards.
func (n *Node) SetMeshMax(processes int) { n.meshMax = processes }
