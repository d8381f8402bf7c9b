// Package plan generates the steps of collectives: which rank sends what to which peer, which memory it reads, and in
// which order. It is pure: no sockets, no clocks, no goroutines.
//
// A [Problem] is what all ranks of a call agree on. For a problem, an [Algorithm] generates the plan of each
// rank, a sequence of [Step]s; [Algorithms] lists all of them. [Check] proves the plans of a problem, [Draw]
// prints them as text or as a picture, and Cost predicts their time. Package collective executes them;
// package simulate executes them in virtual time.
//
// # Layout
//
// The table lists the elements that a rank contributes (Src) and receives (Dst). Parts are the Counts, or Count / Size
// each; then Size must divide Count.
//
//	operation       Src                         Dst
//	AllReduce       the vector                  the reduced vector
//	Reduce          the vector                  root: the reduced vector; others: nothing
//	ReduceScatter   the vector                  the rank's part of the reduced vector
//	Broadcast       root: the vector            the vector
//	AllGather       the rank's part             all parts, by rank
//	Gather          the rank's part             root: all parts, by rank; others: nothing
//	Scatter         root: all parts, by rank    the rank's part
//	AllToAll        a block for every rank      a block of every rank, by rank
//	Barrier         nothing                     nothing
//	Send            Root: the vector            Peer: the vector
package plan
