// Package collective implements collective communication (all-reduce, broadcast, barrier, …) and
// point-to-point messages between the ranks of a group. It plays the role of MPI, NCCL and Gloo for Go
// programs.
//
// # Terms
//
// A rank is one member of a communicator; the size is the number of members. A [Communicator] is one rank's
// view of a set of ranks; a [Group] is one process's view of all its ranks. A plan is the sequence of [Step]s
// that one rank executes in one collective. An [Algorithm] generates plans; [plan.Algorithms] lists all of
// them. A segment is the unit that is transferred or combined at once.
//
// # Use
//
//	group, err := collective.Open(mem.New(2), collective.Config{}) // two ranks in this process
//	for _, c := range group.Local() {
//		go func() {
//			src, dst := []float32{1, 2, 3}, make([]float32, 3)
//			err := c.Do(ctx, &collective.Call{
//				Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32,
//				Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst),
//			})
//			…
//		}()
//	}
//
// Package typed has these calls in one line for slices, and gathers values of any type. cluster/worker opens the group
// of several processes.
//
// Every rank makes the same calls in the same order. A repeated call allocates nothing and starts no
// goroutine. Package plan documents which elements each operation reads and writes; [Call] documents when Src
// and Dst may be the same memory. Send and Recv involve two ranks only: the other ranks do not take part, and
// these calls are numbered separately.
//
// The endpoints determine where the ranks are ([transport.Capabilities]). Ranks of one process, or of one host with
// shared memory, form a domain: they access each other's memory directly. Between domains they exchange
// frames. One plan can use both. All ranks of the domain access memory from [Communicator.NewBuffer] in
// place; other memory of processes that share memory is copied through the transport's staging buffer.
//
// The table of package chooser selects the algorithm of a call. The call ([Options.Algorithm]), the communicator
// ([Config.Algorithm]) or the environment (LOCKSTEP_ALGORITHM) can override it.
//
// # Guarantees
//
// Results are bitwise reproducible. A reduction adds along one tree over the ranks, level by level:
// neighbours 2j and 2j+1 are combined, the lower rank is the left operand, and an odd last one moves up
// unchanged. Half-precision numbers are added in float32 and rounded to their type at every node, or only
// once at the end with [AccumulateFloat32]. A mean is the sum followed by one true division. The result
// depends only on the ranks' vectors, not on the algorithm, the transport, the timing or the placement of
// ranks. That includes the signs of zeros and the bits of NaNs: of two NaNs the left one is kept. (An
// algorithm that cannot keep the tree runs only where [Options.Order] is Any.)
//
// Calls that differ are never combined. Every frame and every peer's memory carries a header that identifies
// its call, and a rank compares it with its own call before it touches any data. A different order,
// operation, reduction, dtype, count, shape or name is [ErrMismatch] on every rank, and the error lists which
// ranks make which call.
//
// No call blocks forever. The end of its context, its deadline ([Config.Timeout]), Abort and Close end every
// wait; a [Monitor] can prove that a wait would never end; and the loss of a peer is an error. The first
// failure is the cause that every rank returns, immediately and in later calls; other processes receive it as
// text. [Group.Rebuild] makes a new group. Unless all ranks are in one process, a rank that had already
// finished its part of the failed call may report the failure only in its next call.
//
// A caller's memory is never accessed after its call has returned: a rank returns, with or without an error,
// only when no rank of its process reads or writes its memory any more. If all ranks are in one process, one
// atomic variable decides: a call that not all ranks have entered can be left, and then it never starts; a
// call that all ranks have entered runs to its end on all ranks, or fails on all. Between processes a dead
// peer cannot be awaited, so a [Communicator.NewBuffer] buffer that took part in a failed call must not be
// used again.
//
// # Limits
//
// The package does not recover from failures by itself: a failed communicator stays failed. A mean of integers is an
// error, because it would have to round.
package collective
