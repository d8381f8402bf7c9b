// Package stages runs a GoMLX graph that contains all-reduces, on any backend. It splits the graph into
// several executables, with collectives on the host between them.
//
// A [Recorder] is a compute.Backend that wraps another one. While GoMLX builds a graph, the Recorder passes
// every operation to the wrapped backend, and records it. A graph without all-reduces is then compiled
// unchanged. A graph with all-reduces is split at them. An operation belongs to the earliest stage that its
// inputs allow, and an all-reduce ends a stage. Each stage becomes a separate graph, built by replaying its
// operations. A value that a later stage needs from an earlier one, such as an activation for the backward
// pass, is an output of the earlier stage and an argument of the later one. So nothing is computed twice,
// except constants and broadcasts: recomputing them is cheaper than passing them on.
//
// Stages and the order of all-reduces depend only on the graph. So every replica, in every process, executes
// the same all-reduces in the same order.
package stages

//go:generate go run generate.go
