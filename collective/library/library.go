// Package library makes communicators out of a library of another maker, such as MPI or NCCL: what such a library does between
// processes becomes a [collective.Group] of all replicas of these processes.
//
// A [Backend] joins processes, one rank each. If a process has several replicas, a reduction first adds theirs up here, along the canonical
// tree, and then lets the backend add up the processes' sums; a result is copied to all of them.
//
// What holds of the library's own collectives and what does not:
//
//   - Sums are in the backend's order: Properties().Canonical is false, and asking for Order: Canonical is an error. float16 and
//     bfloat16 are added in float32, and rounded once.
//   - The backend works in memory of the communicator's own, never in the caller's: so a call can end at its deadline, at the end of its
//     context or by Abort, though the backend may still write. Such memory is never used again.
//   - Before a collective the processes compare what they call, by one small all-reduce of the backend's: a mismatch is an error
//     on all of them, with what each calls. A Send that meets no Recv, or a collective, ends at the deadline.
//   - A failure is not told to other processes: they end at their own deadline, or earlier where something else watches the
//     processes, as package cluster/worker does.
package library

import (
	"context"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Backend is a library's communicator between processes, of which each is one rank. Its methods are called by one goroutine at a time,
// but for Start, which several may call.
type Backend interface {
	// Transport is the library's short name: "mpi".
	Transport() string
	// Rank and Size are this process' number, and how many there are.
	Rank() int
	Size() int
	// Reduces reports whether the library adds up elements of the type.
	Reduces(t tensor.DType) bool
	// Start begins an operation. All processes start the same collectives in the same order, though Send and Recv in any. The
	// channel gets its outcome, once; until then the library may use the operation's memory. What holds the memory
	// is kept by the backend.
	Start(o Operation) <-chan error
	// Split makes a backend of the processes that are members, ordered by key; others get nil. All processes call it.
	Split(ctx context.Context, member bool, key int) (Backend, error)
	// Close frees the backend. With sound false, operations have been given up, which may never end. With sound true all processes
	// close it, and it may wait for them until ctx ends.
	Close(ctx context.Context, sound bool) error
}

// Operation is what a backend is asked to do. Counts are of elements.
type Operation struct {
	Op     collective.Op
	Reduce collective.ReduceOp // Sum, Min, Max or Prod
	Type   tensor.DType        // of reductions one that the library adds up, else an unsigned integer
	// Src is what this process gives, Dst what it gets; they are disjoint, but for Broadcast, which has one, Dst.
	Src, Dst unsafe.Pointer
	// Count is the length of a vector that is the same on all: AllReduce, Reduce, Broadcast, Send, Recv.
	Count int
	// Out and In are the lengths of the parts for, and of, each process, one behind the other in Src and Dst: Out of ReduceScatter, Scatter and
	// AllToAll, In of AllGather, Gather and AllToAll.
	Out, In []int
	Root    int // Broadcast, Reduce, Gather, Scatter
	Peer    int // Send, Recv
	Tag     int // Send, Recv: below 1<<14
	Keep    any // what holds the memory
}

// Setup describes a group.
type Setup struct {
	// Backend joins the processes. The group closes it.
	Backend Backend
	// Ranks are those of each process, by the backend's rank: all from 0 on, each once. Every process has one at least, and its
	// own in ascending order.
	Ranks [][]int
	// Again makes a new backend of the same processes, all of which call it: for Rebuild.
	Again func(ctx context.Context) (Backend, error)
	// Config sets up the communicator. Algorithm and Chooser have no meaning here.
	Config collective.Config
}
