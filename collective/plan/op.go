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
