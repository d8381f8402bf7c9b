package executor

import (
	"context"
	"errors"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Call is one rank's part in an operation, validated and planned. The caller must not change it while it is executed.
type Call struct {
	Plan   *Plan
	Reduce plan.ReduceOp // for reductions
	Type   tensor.DType  // of the elements of Src and Dst
	// Partial is the type of partial sums: of the elements of Work, Scratch, Stage and the frames. It is Type,
	// or Float32 for half-precision numbers.
	Partial  tensor.DType
	Src, Dst tensor.Memory // empty if the operation does not use it on this rank
	// SrcList and DstList, if not nil, are memories that together are Src or Dst; Execute sets Src or Dst.
	SrcList, DstList []tensor.Memory
	// Slot identifies the call to the other ranks: its Header is also that of the frames. The executor sets its
	// Src and Dst, as the ranks of the domain see them.
	Slot transport.Slot
}

// Caller is the layer above an executor. The executor calls it on the goroutine that executes the call.
type Caller interface {
	// Failed reports whether the communicator has failed. It is called once per segment, so it must be fast.
	Failed() bool
	// Mismatch is called when the slots of the domain's ranks do not all have the same Sum. It returns an error
	// that describes how the calls differ, or nil if they do not.
	Mismatch() error
	// PrivatePlan returns the plan for the current call in a domain whose ranks cannot access all memories that
	// the call's plan needs. It accesses no Src or Dst of another rank.
	PrivatePlan() (*Plan, error)
}

// ErrFailed ends a call because the communicator has failed, or is about to fail.
var ErrFailed = errors.New("executor: the communicator has failed")

// Config describes a rank to its executor.
type Config struct {
	End transport.Endpoint
	// Domain is the ranks that access each other's memory, in increasing order. A rank that is alone in its domain
	// only exchanges frames.
	Domain []int
	// OneProcess reports that all ranks are in this process and in one domain: a call that all ranks have entered
	// depends on no other process, and runs to its end on all of them.
	OneProcess bool
	Group      *Group
	Caller     Caller
}

// Executor executes one rank's calls. One goroutine at a time uses it. It keeps the memory that calls need, so
// that a repeated call allocates nothing.
type Executor struct {
	Config
	localRank
	size         int
	sharesMemory bool             // there are other ranks in the domain
	posts        transport.Poster // nil: the endpoint cannot post exchanges
	oneReceive   bool             // posted exchanges may receive into the same memory
	lists        bool             // the last call had lists of memories
	inlineBytes  int              // the length of the data beside a slot
	// streamBytes is how much the domain reads and writes in a call whose results are written by streaming stores.
	streamBytes int
	current
	frames

	scratch  *kernel.Scratch
	in, out  []vector         // Combine: the sources by rank, the distinct destinations
	src, dst []unsafe.Pointer // their addresses, or those of their blocks in the type of partial sums
	gather   exchange         // the second of two interleaved exchanges
	memory   memories
}

// current is the state of the current call.
type current struct {
	ctx  context.Context
	call *Call
	plan *Plan // the call's, or the private one
	op   kernel.Op
	mean bool
	half int // of the staging buffers
	// inline reports that the data of the call lies beside the slots, instead of in the staging buffers. All ranks of
	// the domain decide alike, by what they compare.
	inline bool
	// entered reports that all ranks have entered the call, and that all are in this process: the call runs to
	// its end.
	entered bool
	// committed reports that the plan's last Await is done: the rest is executed in any case, because the other
	// ranks may have finished.
	committed  bool
	flagOffset int  // added to the numbers of the plan's flags
	sharedDst  bool // ranks may share one Dst: the lowest of them writes results that are the same for all
	privateDst bool // other local ranks have the same Dst: the result is kept in private memory until the end

	dstAt     unsafe.Pointer // where Dst is for this rank
	workAt    unsafe.Pointer // and Work
	scratchAt unsafe.Pointer // and Scratch

	piece                   plan.Step // of inPieces
	inRegions               bool      // a Src or Dst that this rank accesses lies in several regions
	dstRegions, workRegions *regions  // of Dst and Work for this rank
}

// begin sets the state of a new call. It sets each field by itself: assigning a whole struct takes as long as all the
// rest that precedes a small call, because the processor cannot forward the fields' stores to the wider loads of the
// copy.
func (c *current) begin(ctx context.Context, call *Call) {
	c.ctx, c.call, c.plan = ctx, call, call.Plan
	c.op, c.mean = kernelOp(call.Reduce), call.Plan.Problem.Reduce == plan.Mean
	c.half = int(call.Slot.Seq & 1)
	c.entered, c.committed, c.flagOffset, c.inline = false, false, 0, false
	c.sharedDst, c.privateDst = false, false
	c.dstAt, c.workAt, c.scratchAt = nil, nil, nil
	c.inRegions, c.dstRegions, c.workRegions = false, nil, nil
}

// New makes the executor of a rank. It must be called before the endpoint's first exchange.
func New(cfg Config) *Executor {
	x := &Executor{Config: cfg, localRank: localRank{rank: cfg.End.Rank()}, size: cfg.End.Size()}
	n := len(cfg.Domain)
	x.sharesMemory = n > 1
	x.streamBytes = streamBytes(affinity.LastLevel(), n)
	capabilities := cfg.End.Capabilities()
	x.inlineBytes = capabilities.InlineBytes
	x.posts, x.oneReceive = cfg.End.Posts(), capabilities.SharedReceives
	x.shared = cfg.End.Memory()
	x.noWait()
	cfg.End.Inspect(x.inspect)
	cfg.Group.join(x)
	return x
}

// reduceSources sets the elements [lo, hi) of every dst to the combination of those elements of every src. The memory
// for partial sums is allocated for the first reduction: a rank that is alone in its domain makes none.
func (x *Executor) reduceSources(tree kernel.Tree, lo, hi int) {
	if x.scratch == nil {
		x.scratch = kernel.NewScratch(len(x.Domain))
	}
	tree.Reduce(x.scratch, x.dst, x.src, lo, hi)
}

// await waits for a flag of a rank, or of all. The wait for flag 0 can be interrupted; then one atomic variable in
// the transport decides: either this rank withdraws and the call never starts, or it has started, whatever
// interrupted the wait.
func (x *Executor) await(rank, flag int) error {
	x.wait.flag, x.wait.of = flag, rank
	for {
		err := x.shared.Await(x.ctx, rank, flag)
		switch {
		case err == nil:
			x.entered, x.wait.flag = x.OneProcess, -1
			return nil
		case errors.Is(err, transport.ErrInterrupted) || flag > 0:
			return err
		}
		x.Group.withdrawing.Add(1)
		if x.shared.Withdraw() {
			return err
		}
		x.Group.withdrawing.Add(-1)
		if !x.OneProcess {
			return err
		}
		x.entered = true
	}
}
