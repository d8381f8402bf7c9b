// Package plan knows how collectives are carried out: which rank sends what to whom, reads whose memory, and in which
// order. It is pure: no sockets, no clocks, no goroutines.
//
// A [Problem] is what all ranks of a call agree on. An [Algorithm] generates the plan of each rank for it, a sequence of
// [Step]s; the rows of [Algorithms] are all there are. [Check] proves the plans of a problem, [Draw] makes them a text or a picture,
// and Cost predicts their time. Package collective carries them out; package simulate does so in virtual time.
//
// # Layout
//
// Which elements a rank gives (Src) and gets (Dst); parts are the Counts, or Count / Size each, which must divide:
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
