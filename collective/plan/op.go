package plan

import (
	"fmt"
	"strings"
)

// Op is the operation of a collective call (MPI's and NCCL's names).
type Op uint8

// The operations. [Problem] and the package's table document what each rank contributes and receives.
const (
	AllReduce     Op = iota + 1 // every rank receives the reduction of all ranks' vectors
	Broadcast                   // every rank receives the root's vector
	Barrier                     // no rank leaves before every rank has entered
	Reduce                      // the root receives the reduction of all ranks' vectors
	ReduceScatter               // every rank receives its part of the reduction of all ranks' vectors
	AllGather                   // every rank receives all ranks' parts; with Counts MPI's Allgatherv
	Gather                      // the root receives all ranks' parts; with Counts MPI's Gatherv
	Scatter                     // every rank receives its part of the root's vector; with Counts MPI's Scatterv
	AllToAll                    // every rank receives its block of every rank's vector
	Send                        // one rank sends a vector to another; the other ranks take no part
	Recv                        // the receiving end of a Send; in a Problem both ends are a Send
)

var opNames = [...]string{
	AllReduce: "all_reduce", Broadcast: "broadcast", Barrier: "barrier", Reduce: "reduce", ReduceScatter: "reduce_scatter",
	AllGather: "all_gather", Gather: "gather", Scatter: "scatter", AllToAll: "all_to_all", Send: "send", Recv: "recv",
}

// String returns the operation's name in lower case with underscores, as TensorFlow writes it: "all_reduce".
func (o Op) String() string {
	if o > 0 && int(o) < len(opNames) {
		return opNames[o]
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// ParseOp returns the operation with this name, in upper or lower case. Underscores may be hyphens, or omitted:
// "all_reduce", "all-reduce", "allreduce".
func ParseOp(name string) (Op, error) {
	separators := strings.NewReplacer("_", "", "-", "")
	for o := AllReduce; o <= Recv; o++ {
		if strings.EqualFold(separators.Replace(name), separators.Replace(o.String())) {
			return o, nil
		}
	}
	return 0, fmt.Errorf("collective: %q is not an operation: want one such as %q", name, AllReduce)
}

// Reduces reports whether the operation combines elements.
func (o Op) Reduces() bool { return o == AllReduce || o == Reduce || o == ReduceScatter }

// Rooted reports whether the operation has a root.
func (o Op) Rooted() bool {
	return o == Broadcast || o == Reduce || o == Gather || o == Scatter || o == Send
}

// Pairwise reports whether the operation involves two ranks, not all.
func (o Op) Pairwise() bool { return o == Send || o == Recv }

// Portion is how much of the whole vector a memory of a call holds.
type Portion uint8

// The portions.
const (
	Nothing Portion = iota
	Part            // the rank's part
	Whole
)

// Of returns how many elements the portion has, of a vector of count and a rank's part of own elements.
func (p Portion) Of(count, own int) int {
	switch p {
	case Part:
		return own
	case Whole:
		return count
	}
	return 0
}

// Role is what a rank contributes to an operation (Src) and receives (Dst).
type Role struct{ Gives, Gets Portion }

// roles is the package's table of what each rank contributes and receives, by operation.
var roles = [...]struct{ root, others Role }{
	AllReduce:     {Role{Whole, Whole}, Role{Whole, Whole}},
	Broadcast:     {Role{Whole, Whole}, Role{Nothing, Whole}},
	Barrier:       {},
	Reduce:        {Role{Whole, Whole}, Role{Whole, Nothing}},
	ReduceScatter: {Role{Whole, Part}, Role{Whole, Part}},
	AllGather:     {Role{Part, Whole}, Role{Part, Whole}},
	Gather:        {Role{Part, Whole}, Role{Part, Nothing}},
	Scatter:       {Role{Whole, Part}, Role{Nothing, Part}},
	AllToAll:      {Role{Whole, Whole}, Role{Whole, Whole}},
	Send:          {Role{Whole, Nothing}, Role{Whole, Nothing}},
	Recv:          {Role{Nothing, Whole}, Role{Nothing, Whole}},
}

// Valid reports whether o is one of the operations.
func (o Op) Valid() bool { return o > 0 && int(o) < len(roles) }

// Role returns the role of a rank in a valid operation. root reports whether it is the root; operations without a root
// have one role.
func (o Op) Role(root bool) Role {
	if root {
		return roles[o].root
	}
	return roles[o].others
}

// Parted reports whether each rank has a part of the vector as its source or destination. Only the parts of these
// operations may differ in length.
func (o Op) Parted() bool { return roles[o].root.Gives == Part || roles[o].root.Gets == Part }

// ReduceOp is how elements are combined (TensorFlow's tf.distribute.ReduceOp, and MPI's other usual ones).
type ReduceOp uint8

// The reductions. Mean is the sum along the tree, followed by one true division by the number of ranks.
const (
	Sum ReduceOp = iota
	Mean
	Min
	Max
	Prod
)

// String returns the reduction's name in upper case, as TensorFlow prints it: "SUM".
func (r ReduceOp) String() string {
	names := [...]string{"SUM", "MEAN", "MIN", "MAX", "PROD"}
	if int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("ReduceOp(%d)", uint8(r))
}

// ParseReduceOp returns the reduction with this name, in upper or lower case.
func ParseReduceOp(name string) (ReduceOp, error) {
	for r := Sum; r <= Prod; r++ {
		if strings.EqualFold(name, r.String()) {
			return r, nil
		}
	}
	return 0, fmt.Errorf("collective: %q is not a reduction: want SUM, MEAN, MIN, MAX or PROD", name)
}

// Order states whether a reduction must follow the canonical tree.
type Order uint8

// The orders. The zero value inherits: the communicator's configuration, then Canonical.
const (
	OrderInherit Order = iota
	Canonical          // along one tree over the ranks: the same bits for every algorithm and placement
	Any                // any order that is fixed per plan: the same bits only for the same plan
)
