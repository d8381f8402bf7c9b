package plan

import (
	"iter"
	"time"
)

// Problem is everything about a call that all ranks agree on. An [Algorithm] generates plans for it.
type Problem struct {
	Op     Op
	Reduce ReduceOp // for reductions; a plan only distinguishes Mean from the others
	Size   int      // number of ranks
	Count  int      // elements of the whole vector: the longer one of Src and Dst; Barrier: 0
	// elements of each rank's part (ReduceScatter, AllGather, Gather, Scatter), Count in total; nil: Count /
	// Size each
	Counts []int
	Root   int     // for rooted operations; Send: the sender
	Peer   int     // Send: the receiver
	Places []Place // where each rank is; nil: all in one process
	Order  Order

	// Private reports that peers cannot access the Src and Dst of every rank: memory that a plan shares must
	// be Stage.
	Private bool
	// Stage is the length of each rank's staging buffer, in elements; 0: it has none.
	Stage int
}

// Place is where a rank is. Ranks of one domain access each other's memory: those of one process, or of one
// host with shared memory. Ranks of one worker are always in one domain, and ranks of one domain on one host.
type Place struct{ Worker, Domain, Host int }

// Algorithm is a way to execute collectives: an entry of [Algorithms].
type Algorithm struct {
	Name  string
	Fits  func(Problem) error                      // nil if it can solve the problem, else the reason why not
	Steps func(p Problem, rank int) iter.Seq[Step] // rank's plan; pure
	Cost  func(Problem, Links) time.Duration       // predicted time of the slowest rank
}

// Links describes a cluster to cost functions: latency and bandwidth between ranks.
type Links struct {
	// between ranks of one domain: a synchronisation, and what one rank reads from another's memory
	Memory       Link
	Host         Link    // frames between ranks of one host
	Network      Link    // frames between hosts, of one rank
	Combine      float64 // bytes per second that one rank reads while it reduces
	Copy         float64 // bytes per second that one rank copies in its own memory
	Cores        int     // processors of a host; 0: as many as it has ranks
	ElementBytes int
}

// Link is the link between two ranks, in one direction.
type Link struct {
	Latency   time.Duration // of one frame, or one synchronisation
	Bandwidth float64       // bytes per second
}

// Buffer names one of a rank's buffers.
type Buffer uint8

// The buffers. Src and Dst are the call's. They may be the same memory where they are the same part of the
// vector (NCCL's in-place rule: the Src of an AllGather is the rank's part of Dst, the Dst of a ReduceScatter
// is its part of Src). Those of an AllToAll are disjoint. An element of Src that is not also an element of
// Dst is never written.
//
// Work is a vector of Count elements that the executor provides: the rank's Dst where that is allowed and has
// Count elements (and so also Src, where Dst is Src), else separate memory. Scratch is separate memory of the
// rank, as long as the plan's spans require. Peers access neither of the two.
//
// Stage is the staging buffer: memory of the transport that all ranks of the domain access, of Problem.Stage
// elements. Consecutive calls use different halves of it, and a call begins only when every rank of the
// domain has begun the previous one. So a rank may write to Stage, its own or a peer's, as soon as it has
// begun itself. A peer may read what a plan leaves in Stage until that peer's own call ends. No rank has to
// wait at the end of a plan for peers that read its Stage.
//
// Src and Dst have elements of the call's type; Work, Scratch, Stage and the frames of reductions have
// elements of the partial sums' type. Every step that transfers between the two widens or rounds the values.
// No plan combines or divides rounded values.
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

// The kinds of steps. Exchange works between all ranks, by messages; Signal, Await, Combine, Pull and Push
// need peers of the rank's domain. All spans of a step, and the spans at the two ends of an Exchange, have
// the same length (the two spans of one rank's Exchange may differ); they may begin at different elements.
// Where they overlap in one memory, they must be the same elements; those of a Fold must not overlap.
//
// An empty span is also sent: a frame is transferred even then, so that the ranks can compare their calls.
// Out and In of one Exchange are disjoint, or the same span if Side is not Replace: the data sent are the
// values before the step. The two halves of an Exchange progress together, segment by segment: one may block
// until the other's peer has arrived.
//
// A rank sets its flags in the order 0, 1, 2, …, each once; all ranks of a domain set equally many.
// Everything that it wrote before is visible to a rank that has awaited the flag. A rank whose plan has flags
// does not end before it knows, from flags or frames, that every rank of its domain has begun.
//
// In a Send only Root and Peer take part; the other ranks do not make a call, and their plans are empty. So a
// Send has flags only if there are no other ranks.
const (
	Exchange StepKind = iota + 1 // send Out to To and receive In from From, both at once, without buffering
	Signal                       // set this rank's flag number Flag
	// wait until rank From, or with From -1 every rank of the domain, has set its flag number Flag
	Await
	// combine In of the ranks Ranks along their part of the canonical tree, and write the result to Out of
	// rank To, or with To -1 of every rank of the domain; divide if Mean and Ranks are all; see Own and Keep
	Combine
	Pull  // copy In of rank From to this rank's Out
	Push  // copy this rank's In to Out of rank To
	Copy  // copy In to Out, both of this rank; no operation if they are the same memory
	Fold  // Out = In ⊕ Out (Left) or Out ⊕ In (Right), both of this rank
	Scale // divide Out by the size (Mean)
)

// Side is the position of a received operand in the reduction, relative to this rank's operand.
type Side uint8

// The sides.
const (
	Replace Side = iota // not a reduction: In is overwritten
	Left                // In = received ⊕ In
	Right               // In = In ⊕ received
)

// Ranks is a range of ranks [Lo, Hi): a node of the canonical tree.
type Ranks struct{ Lo, Hi int }

// Step is one step of one rank's plan. The executor cuts spans into segments.
type Step struct {
	Kind StepKind
	To   int // Exchange: the receiver of Out, or -1; Combine, Push: the rank whose memory is written
	// Exchange: the sender of In, or -1; Pull: the rank whose In is read; Await: the rank to wait for, or -1
	From  int
	Out   Span  // what is sent or written
	In    Span  // where received data is stored, or what is read
	Side  Side  // Exchange, Fold: how the operands are combined
	Flag  int   // Signal, Await: the number of the flag
	Ranks Ranks // Combine: the ranks whose In is combined
	// Combine, and after [Fuse] Exchange: what this rank itself contributes in place of its In; empty: its In
	Own  Span
	Keep Span // Combine: where in this rank's memory the result is also stored; empty: nowhere else
}
