// Package library makes communicators on a third-party library, such as MPI or NCCL: the library's
// collectives between processes become a [collective.Group] of all replicas of these processes.
//
// A [Driver] connects processes, each of which is one rank of the library. If a process has several replicas, a
// reduction first adds their operands locally, along the canonical tree, and then the library adds the
// processes' sums; a result is copied to all local replicas. The communicators have the front end of package
// collective; this package is a [collective.Backend] behind it.
//
// Differences from the built-in collectives:
//
//   - Sums are in the library's order: Properties().Canonical is false, and a request for Order: Canonical is
//     an error. float16 and bfloat16 are added in float32, and rounded once.
//   - The library works in memory of the communicator, never in the caller's. So a call can end at its
//     deadline, at the end of its context or by Abort, although the library may still write. Such memory is
//     never reused.
//   - Before a collective the processes compare their calls by one small all-reduce of the library: a mismatch
//     is an error on all of them, and the error describes every call. A Send without a Recv, or without a
//     matching collective, ends at the deadline.
//   - Other processes are not notified of a failure: their calls end at their own deadline, or earlier if
//     something else watches the processes, as package cluster/worker does.
//   - A Split makes one all-reduce of int64, so the driver must reduce int64; then it splits the driver. As with
//     the built-in collectives, the parts are named after the number of the Split and their color: world/1.0.
package library

import (
	"context"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Driver is a library's communicator between processes, each of which is one rank. One goroutine at a time
// calls its methods, except Start, which several may call concurrently.
type Driver interface {
	// Transport returns the library's short name: "mpi".
	Transport() string
	// Rank and Size return this process's rank, and the number of processes.
	Rank() int
	Size() int
	// Reduces reports whether the library can reduce elements of the type.
	Reduces(t tensor.DType) bool
	// Start begins an operation. All processes start the same collectives in the same order, but Send and
	// Recv in any order. The channel receives the result, once; until then the library may use the
	// operation's memory. The library retains the operation's Keep until then.
	Start(o Operation) <-chan error
	// Split makes a driver of the processes that are members, ordered by key; other processes receive nil.
	// All processes call it.
	Split(ctx context.Context, member bool, key int) (Driver, error)
	// Close frees the driver. If sound is false, operations were abandoned that may never end. If sound is
	// true, all processes close their drivers, and Close may wait for them until ctx ends.
	Close(ctx context.Context, sound bool) error
}

// Operation is one operation of a driver. Counts are in elements.
type Operation struct {
	Op     collective.Op
	Reduce collective.ReduceOp // Sum, Min, Max or Prod
	Type   tensor.DType        // for reductions a type that the library can reduce, else an unsigned integer
	// Src is what this process contributes, Dst what it receives. They are disjoint; Broadcast has only Dst.
	Src, Dst unsafe.Pointer
	// Count is the length of a vector that has the same length on all processes: AllReduce, Reduce,
	// Broadcast, Send, Recv.
	Count int
	// Out and In are the lengths of the contiguous parts in Src and Dst for each process: Out for
	// ReduceScatter, Scatter and AllToAll, In for AllGather, Gather and AllToAll.
	Out, In []int
	Root    int // Broadcast, Reduce, Gather, Scatter
	Peer    int // Send, Recv
	Tag     int // Send, Recv: below 1<<14
	Keep    any // keeps the memory alive
}
