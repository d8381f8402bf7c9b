package collective

import (
	"iter"
	"time"
)

// Problem is what a plan solves: everything about a call that all ranks agree on.
type Problem struct {
	Op     Op
	Reduce ReduceOp // for reductions; a plan looks only at whether it is Mean
	Size   int      // number of ranks
	Count  int      // elements of the vector (operations with one count)
	Counts []int    // elements by rank (operations whose counts may differ)
	Root   int      // for rooted operations
	Places []Place  // where each rank is; nil: all in one process
	Order  Order
}

// Place says where a rank is.
type Place struct{ Worker, Host int }

// Algorithm is a way to carry out collectives: a row of [Algorithms].
type Algorithm struct {
	Name  string
	Fits  func(Problem) error                      // nil if it can solve the problem, else why not
	Steps func(p Problem, rank int) iter.Seq[Step] // rank's plan; pure
	Cost  func(Problem, Links) time.Duration       // predicted time of the slowest rank
}

// Links describes a cluster to cost functions, per direction and pair of ranks.
type Links struct {
	Latency      time.Duration // of one frame, or one synchronisation in memory
	Bandwidth    float64       // bytes a second of one link
	Combine      float64       // bytes a second that one rank reads while it reduces
	ElementBytes int
}

// Buffer names one of a rank's buffers.
type Buffer uint8

// The buffers. Src and Dst are the call's; they may be the same memory. Work is a vector of Count elements that the
// executor provides: the rank's Dst where that is allowed (and so Src as well if Dst is Src), else memory of its own,
// in the type of the partial sums. The checker proves every plan for each of these cases.
const (
	Src Buffer = iota
	Dst
	Work
)

// Span is a range of elements [Lo, Hi) of a buffer.
type Span struct {
	Buffer Buffer
	Lo, Hi int
}

// StepKind is what a step does.
type StepKind uint8

// The kinds of steps. Exchange needs peers reached by messages; Signal, Await, Combine and Pull need peers whose memory
// can be reached.
//
// Both ends of an Exchange name the same elements, an empty span included: a frame crosses even then, so that the ranks
// see each other's call. Out and In of one Exchange are disjoint, or the same span if Side is not Replace: what is sent
// is what stood there before the step.
//
// A rank raises its marks in the order 0, 1, 2, …, each once. What it wrote before is seen by whoever awaited the mark.
const (
	Exchange StepKind = iota + 1 // send Out to To and receive into In from From, both at once, without buffering
	Signal                       // raise this rank's mark number Mark
	Await                        // wait until every rank has raised its mark number Mark
	Combine                      // read In of every rank, combine along the canonical tree, divide if Mean, write to Out of every rank
	Pull                         // copy In of rank From to this rank's Out
	Copy                         // copy In to Out, both of this rank; nothing to do if they are the same memory
	Scale                        // divide Out by the size (Mean)
)

// Side says where a received part stands in the reduction, seen from what this rank holds.
type Side uint8

// The sides.
const (
	Replace Side = iota // not a reduction: it overwrites In
	Left                // In = received ⊕ In
	Right               // In = In ⊕ received
)

// Step is one move of one rank. A plan is a sequence of steps; the executor cuts spans into segments.
type Step struct {
	Kind StepKind
	To   int  // Exchange: the receiver of Out, or -1
	From int  // Exchange: the sender of what goes into In, or -1; Pull: whose In is read
	Out  Span // what is sent, or written
	In   Span // where the received part goes, or what is read
	Side Side // Exchange: how the received part meets In
	Mark int  // Signal, Await
}
