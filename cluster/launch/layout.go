package launch

// layout is the assignment of ranks to nodes in an epoch.
type layout struct {
	slots []nodeSlot // by node
	node  int        // this one
	first int        // rank of its first worker
	world int
}

func lay(slots []nodeSlot, node int) layout {
	l := layout{slots: slots, node: node}
	l.first = l.firstOf(node)
	l.world = l.firstOf(len(slots))
	return l
}

// assign returns the environment of this node's worker with a local number.
func (l *layout) assign(local int) assignment {
	p := assignment{
		rank: l.first + local, world: l.world, local: local, locals: l.slots[l.node].Workers, node: l.node,
		nodes:      len(l.slots),
		masterAddr: l.slots[0].Address, masterPort: l.slots[0].MasterPort,
	}
	for _, c := range l.slots {
		p.addresses = append(p.addresses, c.workerAddresses()...)
	}
	return p
}

// firstOf returns the rank of a node's first worker.
func (l *layout) firstOf(node int) (rank int) {
	for _, c := range l.slots[:node] {
		rank += c.Workers
	}
	return rank
}

// nodeOf returns the node of a rank.
func (l *layout) nodeOf(rank int) int {
	for i, c := range l.slots {
		if rank < c.Workers {
			return i
		}
		rank -= c.Workers
	}
	return -1
}
