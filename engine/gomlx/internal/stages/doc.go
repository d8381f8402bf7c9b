// Package stages runs a GoMLX graph that contains all-reduces, or whose results are handed over in several
// buckets, on any backend. On Lockstep's backend they are points of one plan. For any other one it splits the graph
// into several executables, with collectives on the host and the receiver of the buckets between them.
//
// A [Recorder] is a compute.Backend that wraps another one. While GoMLX builds a graph, the Recorder passes
// every operation to the wrapped backend, and records it. A graph without all-reduces and with one bucket is then
// compiled unchanged. Others are split, unless the backend has plans. An all-reduce ends a stage, and an operation
// belongs to the earliest one that its inputs allow. A stage in which several buckets are complete is split again:
// there an operation belongs to the first bucket that needs it. Each stage becomes a separate graph, built by
// replaying its operations. A value that a later stage needs from an earlier one, such as an activation for the
// backward pass, is an output of the earlier stage and an argument of the later one. So nothing is computed twice,
// except constants and broadcasts: recomputing them is cheaper than passing them on.
//
// Stages, and the order of all-reduces and buckets, depend only on the graph and the buckets. So every replica, in
// every process, executes the same all-reduces in the same order.
package stages
