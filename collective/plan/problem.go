package plan

import "fmt"

// Validate returns an error if a field is out of its range, or if fields contradict each other.
func (p Problem) Validate() error {
	switch {
	case p.Op < AllReduce || p.Op > Send:
		return fmt.Errorf("no plan for %v", p.Op)
	case p.Size < 1:
		return fmt.Errorf("%d ranks", p.Size)
	case p.Count < 0:
		return fmt.Errorf("%d elements", p.Count)
	case p.Op == Barrier && p.Count > 0:
		return fmt.Errorf("%d elements for a barrier, which moves none", p.Count)
	case p.Root < 0 || p.Root >= p.Size:
		return fmt.Errorf("root %d of %d ranks", p.Root, p.Size)
	case p.Op == Send && (p.Peer < 0 || p.Peer >= p.Size):
		return fmt.Errorf("peer %d of %d ranks", p.Peer, p.Size)
	case p.Op == Send && p.Peer == p.Root:
		return fmt.Errorf("rank %d would send to itself", p.Root)
	case p.Stage < 0:
		return fmt.Errorf("a staging buffer of %d elements", p.Stage)
	}
	if err := p.validateParts(); err != nil {
		return err
	}
	return p.validatePlaces()
}

func (p Problem) validateParts() error {
	switch {
	case p.Counts == nil:
		if (p.Op.Parted() || p.Op == AllToAll) && p.Count%p.Size != 0 {
			return fmt.Errorf("%d elements cannot be divided into %d equal parts", p.Count, p.Size)
		}
		return nil
	case !p.Op.Parted():
		return fmt.Errorf("counts by rank given for %v, which has one count", p.Op)
	case len(p.Counts) != p.Size:
		return fmt.Errorf("%d counts for %d ranks", len(p.Counts), p.Size)
	}
	sum := 0
	for rank, n := range p.Counts {
		if n < 0 {
			return fmt.Errorf("%d elements for rank %d", n, rank)
		}
		sum += n
	}
	if sum != p.Count {
		return fmt.Errorf("the counts by rank are %d elements, the vector has %d", sum, p.Count)
	}
	return nil
}

// Lengths returns the number of elements in the Src and the Dst of a rank.
func (p Problem) Lengths(rank int) (src, dst int) {
	role, own := p.Op.Role(rank == p.Root), 0
	switch {
	case p.Op == Send && rank == p.Peer: // its call is a Recv
		role = Recv.Role(false)
	case !p.takesPart(rank):
		role = Role{}
	}
	if p.Op.Parted() {
		lo, hi := p.Part(rank)
		own = hi - lo
	}
	return role.Gives.Of(p.Count, own), role.Gets.Of(p.Count, own)
}

// Part returns the range of a rank's part of the vector; for an AllToAll, of its block.
func (p Problem) Part(rank int) (lo, hi int) {
	if p.Counts == nil {
		n := p.Count / p.Size
		return rank * n, (rank + 1) * n
	}
	for _, n := range p.Counts[:rank] {
		lo += n
	}
	return lo, lo + p.Counts[rank]
}

// offsets returns where each rank's part begins, and where the last one ends.
func (p Problem) offsets() []int {
	at := make([]int, p.Size+1)
	for rank := range p.Size {
		n := p.Count / p.Size
		if p.Counts != nil {
			n = p.Counts[rank]
		}
		at[rank+1] = at[rank] + n
	}
	return at
}

// together returns an error if the ranks are not all in one domain.
func (p Problem) together(algorithm string) error {
	for rank := range p.Places {
		if p.domain(rank) != p.domain(0) {
			return fmt.Errorf("%s needs every rank in one process, or on one host with shared memory: rank %d is in domain "+
				"%d, rank 0 in domain %d",
				algorithm, rank, p.domain(rank), p.domain(0))
		}
	}
	return nil
}

// takesPart reports whether a rank makes a call at all: in a Send, only the sender and the receiver do.
func (p Problem) takesPart(rank int) bool { return p.Op != Send || rank == p.Root || rank == p.Peer }
