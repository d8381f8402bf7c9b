// Package executor executes the plans of collectives over a transport.
//
// A plan is a list of [plan.Step]s for one rank: send this span, wait for that flag, combine these operands. Package
// plan generates it without knowing where anything is. The executor knows the rest: an endpoint, memory, and kernels
// that combine elements. It does not know why a call is made, which calls should match, how long a call may take, or
// what an error means. The layer above decides all that: it makes a [Call], passes a context that ends waits, and
// implements [Caller].
//
// # Objects
//
// A [Group] is what the ranks of one process share in one communicator. An [Executor] executes the calls of one rank,
// one after the other. A [Plan] is a rank's plan with the properties that the executor must know before it begins; it
// is made once and executed any number of times. A [Call] joins a plan with memory, types and a header.
//
// # Frames
//
// A step of kind Exchange sends a span to one rank while it receives a span from another. Spans are cut into segments
// of 256 KiB; one segment is one frame. If the endpoint can post exchanges, up to [transport.PostsMax] segments are
// in flight, so that some are transferred while another is combined. A reduce-scatter between two ranks and the all-
// gather after it are interleaved ([plan.InTurns]): each combined segment is sent on while it is still in the caches.
//
// Every frame carries the header of its call. Frames between two ranks arrive in the order in which they were sent,
// so the header of the next frame must be that of the current call. If it is not, the call ends with an [*OtherCall],
// and the layer above finds out what the ranks disagree about.
//
// # Memory of other ranks
//
// The ranks of a domain access each other's memory: those of one process, or those of one host by shared memory. Each
// publishes a slot with the addresses of its Src and Dst. Then it sets flag 0 and waits for flag 0 of all others: now
// all have entered the call, and their slots are compared. From then on the steps Combine, Pull and Push access the
// memory of peers; further flags order the accesses. What peers cannot access directly goes through the staging
// buffers of the transport. Consecutive calls use different halves of them, so a rank may begin a call while its
// peers still read what the previous one left.
//
// Src or Dst may lie in several regions: a list of memories, as for a bucket of tensors. A step whose spans reach over
// the end of a region is executed piece by piece; a segment that does is gathered into a buffer before it is sent, and
// scattered after it was received. Ranks of one process read each other's lists. If a rank of another process is in the
// domain, a memory in regions counts as one that peers cannot access.
//
// A plan that touches no peer's Src or Dst may do its steps before the first Await early, before all ranks have
// entered. Other plans depend on what the slots say. If some rank's memory is not accessible to all, or ranks have
// the same Dst, all ranks of the domain execute the private plan ([Caller.PrivatePlan]) in place of the call's. A rank
// with such memory begins with that plan at once, unless ranks exchange frames in it. If all ranks of the domain do, as
// for gradients in the memory of an engine, they go on. Else the others change to it after flag 0, and its first flag
// is flag 1 for all. All see the same slots, so all decide alike.
//
// # Results that several ranks share
//
// Local ranks may pass the same Dst to an AllReduce, a Broadcast or an AllGather. Some plans allow that as they are:
// what they write is final, and the lowest of the ranks writes it. In all other cases each rank computes in private
// memory, and the first one to finish copies its result to Dst.
//
// # The end of a call
//
// Between two segments a rank checks whether the communicator has failed. What it may do then depends on how far the
// call is, and on whether all ranks are in one process:
//
//   - Before all ranks have entered, a rank may withdraw. An atomic variable in the transport decides between that
//     and the start of the call, so that either all ranks enter or none.
//   - In one process, a call that all have entered runs to its end on every rank. If the communicator fails
//     meanwhile, ranks skip the remaining work but still set their flags. They record that the call is torn, and
//     return ErrFailed on all ranks.
//   - Past its last Await a rank cannot learn any more what the others did, so it always finishes: the call is
//     committed.
//   - If ranks are in several processes, every wait and every step may end with an error.
//
// After an error the layer above makes the communicator fail on all ranks, and calls [Executor.Leave]. It returns
// once no local rank is in a call any more, so the caller of the failed call may then free its memory. Memory that
// other processes may still access is retired: the transport does not reuse it.
//
// # Allocation
//
// An executor keeps the memory that calls need. A call like a previous one allocates nothing, starts no goroutine and
// takes no lock, unless local ranks share a Dst.
package executor
