// Package stages runs a GoMLX graph that has all-reduces inside, on any backend, as several executables with the host's
// collectives in between.
//
// A [Recorder] is a compute.Backend in front of another one. While GoMLX builds a graph, every operation goes to the
// backend behind, as always, and is also written down. A graph without all-reduces is then compiled as it is. One with
// all-reduces is cut at them: an operation belongs to the earliest stage that its inputs allow, an all-reduce ends a
// stage, and each stage becomes a graph of its own by replaying its operations. What a later stage needs of an earlier
// one (activations for the backward pass, say) is an output of the one and an argument of the other, so nothing is
// computed twice, except that constants and broadcasts, which cost less than to carry, are repeated where they are used.
//
// Stages and the order of all-reduces depend on the graph alone: every replica, in every process, comes to the same
// all-reduces in the same order.
package stages

//go:generate go run generate.go
