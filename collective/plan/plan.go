package plan

import (
	"iter"
	"time"
)

// Problem is what a plan solves: everything about a call that all ranks agree on.
type Problem struct {
	Op     Op
	Reduce ReduceOp // for reductions; a plan looks only at whether it is Mean
	Size   int      // number of ranks
	Count  int      // elements of the whole vector: the longer one of Src and Dst; Barrier: 0
	Counts []int    // elements of each rank's part (ReduceScatter, AllGather, Gather, Scatter), Count in all; nil: Count / Size each
	Root   int      // for rooted operations; Send: the rank that gives
	Peer   int      // Send: the rank that gets
	Places []Place  // where each rank is; nil: all in one process
	Order  Order

	// Private says that peers cannot reach the Src and Dst of every rank: memory that a plan shares has to be Stage.
	Private bool
	// Stage is the length of each rank's Stage, in elements; 0: there is none.
	Stage int
}

// Place says where a rank is. Ranks of one domain reach each other's memory: those of one process, or of one host with
// shared memory. Ranks of one worker are always in one domain, and those of a domain on one host.
type Place struct{ Worker, Domain, Host int }

// Algorithm is a way to carry out collectives: a row of [Algorithms].
type Algorithm struct {
	Name  string
	Fits  func(Problem) error                      // nil if it can solve the problem, else why not
	Steps func(p Problem, rank int) iter.Seq[Step] // rank's plan; pure
	Cost  func(Problem, Links) time.Duration       // predicted time of the slowest rank
}

// Links describes a cluster to cost functions: what it takes to move bytes from one rank to another.
type Links struct {
	Memory       Link    // between ranks of one domain: a synchronisation, and what one rank reads from another's memory
	Host         Link    // frames between ranks of one host
	Network      Link    // frames between hosts, of one rank
	Combine      float64 // bytes a second that one rank reads while it reduces
	Copy         float64 // bytes a second that one rank copies in its own memory
	Cores        int     // processors of a host; 0: as many as it has ranks
	ElementBytes int
}

// Link is one way between two ranks, in one direction.
type Link struct {
	Latency   time.Duration // of one frame, or one synchronisation
	Bandwidth float64       // bytes a second
}

// Buffer names one of a rank's buffers.
type Buffer uint8

// The buffers. Src and Dst are the call's; they may be the same memory, as far as they are the same part of the vector
// (NCCL's in-place rule: the Src of an AllGather is the rank's part of Dst, the Dst of a ReduceScatter its part of Src). Those of
// an AllToAll are apart. An element of Src that is not also one of Dst is never written.
//
// Work is a vector of Count elements that the executor provides: the rank's Dst where that is allowed and has Count elements
// (and so Src as well, as far as Dst is Src), else memory of its own. Scratch is memory of the rank's as long as the plan's spans
// reach. No peer reaches the two.
//
// Stage is memory of the transport that all ranks of the domain reach, of Problem.Stage elements. Consecutive calls use
// different halves of it, and a call begins only when every rank of the domain has begun the one before. So a rank may write in
// Stage, its own or a peer's, as soon as it has begun itself; a peer may read what a plan leaves in Stage until it ends itself;
// and nobody has to wait at the end of a plan for peers that read his Stage.
//
// Src and Dst have elements of the call's type; Work, Scratch, Stage and the frames of reductions have those of the partial
// sums' type. Whatever passes from one to the other, in any kind of step, is widened, or rounded, on the way. No plan
// combines or divides what was rounded.
const (
	Src Buffer = iota
	Dst
	Work
	Scratch
	Stage
)

// Span is a range of elements [Lo, Hi) of a buffer.
type Span struct {
	Buffer Buffer
	Lo, Hi int
}

// StepKind is what a step does.
type StepKind uint8

// The kinds of steps. Exchange needs peers reached by messages, which all are; Signal, Await, Combine, Pull and Push are for
// peers of the rank's domain. All spans of a step, and those that two ends of an Exchange name, are of one length (the two of
// one rank's Exchange need not be); they may begin at different elements. Where they meet in one memory, they must be the
// same elements, and those of a Fold must not meet.
//
// An empty span is sent as well: a frame crosses even then, so that the ranks see each other's call. Out and In of one
// Exchange are disjoint, or the same span if Side is not Replace: what is sent is what stood there before the step. The two
// halves of an Exchange go on together, segment by segment: one may be held up until the peer of the other has come.
//
// A rank raises its marks in the order 0, 1, 2, …, each once; all ranks of a domain raise equally many. What it wrote before
// is seen by whoever awaited the mark. A rank whose plan has marks does not end before it knows, from marks or frames, that
// every rank of its domain has begun.
//
// In a Send only Root and Peer take part, the other ranks do not even call: their plans are empty. So it has marks only if
// there are no other ranks.
const (
	Exchange StepKind = iota + 1 // send Out to To and receive into In from From, both at once, without buffering
	Signal                       // raise this rank's mark number Mark
	Await                        // wait until rank From, or with From -1 every rank of the domain, has raised its mark number Mark
	Combine                      // combine In of the ranks Ranks along their part of the canonical tree, write to Out of rank To, or with To -1 of every rank of the domain; divide if Mean and Ranks are all; see Own and Keep
	Pull                         // copy In of rank From to this rank's Out
	Push                         // copy this rank's In to Out of rank To
	Copy                         // copy In to Out, both of this rank; nothing to do if they are the same memory
	Fold                         // Out = In ⊕ Out (Left) or Out ⊕ In (Right), both of this rank
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

// Ranks is a range of ranks [Lo, Hi): a node of the canonical tree.
type Ranks struct{ Lo, Hi int }

// Step is one move of one rank. A plan is a sequence of steps; the executor cuts spans into segments.
type Step struct {
	Kind  StepKind
	To    int   // Exchange: the receiver of Out, or -1; Combine, Push: who is written to
	From  int   // Exchange: the sender of what goes into In, or -1; Pull: whose In is read; Await: who is waited for, or -1
	Out   Span  // what is sent, or written
	In    Span  // where the received part goes, or what is read
	Side  Side  // Exchange, Fold: how the parts meet
	Mark  int   // Signal, Await
	Ranks Ranks // Combine: whose In is combined
	Own   Span  // Combine, and after [Fuse] Exchange: what this rank itself contributes in place of its In; empty: its In
	Keep  Span  // Combine: where in this rank's memory the result goes besides Out; empty: nowhere
}
