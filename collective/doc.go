// Package collective lets a set of ranks do things together: sum vectors, broadcast one, meet at a barrier. It is what
// MPI, NCCL and Gloo are to other languages.
//
// # Terms
//
// A rank is one member; a size the number of members. A [Communicator] is one rank's view of a set of ranks, a [Group]
// one process's view of all its ranks. A plan is the sequence of [Step]s by which one rank takes part in one collective;
// an [Algorithm] generates plans, and the rows of [plan.Algorithms] are all there are. A segment is how much is moved or
// combined at a time.
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
// Every rank makes the same calls in the same order. A call like an earlier one allocates nothing and starts no
// goroutine. Package plan says which elements each operation gives and gets; [Call] when Src and Dst may be the same. Send and
// Recv are calls of two ranks: the others need not know of them, and they are counted by themselves.
//
// The endpoints say where the ranks are ([transport.Placer]). Ranks of one process, or of one host with shared memory, work in each
// other's memory; between these domains frames travel; one plan may do both. Memory from [Communicator.NewBuffer] is reached
// by all of the domain in place; other memory of processes that share memory passes through the transport's stage.
//
// Which row of [plan.Algorithms] carries out a call, the table of package chooser decides, unless the call
// ([Options.Algorithm]), the communicator ([Config.Algorithm]) or the environment (LOCKSTEP_ALGORITHM) does.
//
// # What is promised
//
// The same bits: a reduction adds along one tree over the ranks, level by level, neighbours 2j and 2j+1, the lower on the
// left, an odd one out passing up. Half-width numbers are added in float32 and rounded to their type at every node, or
// once at the end with [AccumulateFloat32]. A mean is the sum and one true division. So the result depends on the
// ranks' vectors only, not on the algorithm, the transport, the timing, or where a rank runs. That includes the signs of
// zeros and the bits of NaNs: of two NaNs the left one stays. (An algorithm that cannot keep the tree runs only where
// [Options.Order] is Any.)
//
// No mistake is summed: every frame and every peer's memory comes with a header that says which call it belongs to, and
// a rank holds it against its own call before it touches a byte. Another order, operation, reduction, dtype, count,
// shape or name is [ErrMismatch] on every rank, and says which ranks call what.
//
// No call waits for ever: the end of its context, its deadline ([Config.Timeout]), Abort and Close end every wait, a
// [Monitor] can prove that a wait would never end, and a peer that is gone is an error. The first failure is the cause that
// every rank returns, then and later, in every process, where it comes in words; [Group.Rebuild] makes a new group. A rank whose
// part in the failed call was done before may learn of it only in its next call, as far as not all ranks are of one process.
//
// No memory is touched behind its owner's back: a rank returns, with an error or without, only when no rank of its
// process reads or writes its memory any more. If all ranks are in one process, one atomic decides: a call that not all ranks have
// entered can be left, and then it never starts; a call that all have entered runs to its end on all, or fails on all.
// Processes that share memory cannot wait for each other when one has died: a buffer of the transport's that took part in a failed
// call must not be used again.
//
// # What it does not do
//
// It has no failure recovery by itself: a failed communicator stays failed. A mean of integers is an error, since it
// would have to round.
package collective
