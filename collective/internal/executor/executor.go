package executor

import (
	"context"
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
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
	// the call's plan needs.
	PrivatePlan() (*Plan, error)
}

// ErrFailed ends a call because the communicator has failed, or is about to fail.
var ErrFailed = errors.New("executor: the communicator has failed")

// segmentBytes is how much is transferred or combined at once: between two segments a rank checks whether the
// communicator has failed, and the garbage collector can run even if the loops are assembly.
const segmentBytes = 256 << 10

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
	rank, size   int
	local        int  // index in the group
	sharesMemory bool // there are other ranks in the domain
	posts        bool // the endpoint can post exchanges
	current
	frames

	// Read by the other local ranks.
	inside atomic.Bool             // in a call in which local ranks may access each other's memory; see Group.depart
	dsts   [2]atomic.Pointer[byte] // Dst of the even and the odd calls; read once all ranks have entered

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
}

// New makes the executor of a rank. It must be called before the endpoint's first exchange.
func New(cfg Config) *Executor {
	x := &Executor{Config: cfg, rank: cfg.End.Rank(), size: cfg.End.Size()}
	n := len(cfg.Domain)
	x.src, x.dst = make([]unsafe.Pointer, 0, n), make([]unsafe.Pointer, 0, n)
	x.scratch = kernel.NewScratch(n)
	x.sharesMemory = n > 1
	x.posts = cfg.End.Capabilities().Posts
	x.frames.open(x.size)
	cfg.End.Inspect(x.inspect)
	cfg.Group.join(x)
	return x
}

// Execute executes a call. The transport waits by ctx; while it does, [Executor.Missing] returns the ranks that
// it waits for. An error is [ErrFailed], an [*OtherCall], a [*MissingFrame], or one of ctx, of the [Caller] or of
// the transport; after an error the communicator must fail on all ranks, and then [Executor.Leave] be called.
func (x *Executor) Execute(ctx context.Context, call *Call) error {
	p := &call.Plan.Problem
	x.current = current{
		ctx: ctx, call: call, plan: call.Plan,
		op: kernelOp(call.Reduce), mean: p.Reduce == plan.Mean,
		half: int(call.Slot.Seq & 1),
	}
	x.noWait()
	if p.Op == plan.Send {
		x.dstAt = call.Dst.Ptr
		return x.exchange(&x.plan.steps[0])
	}
	x.inside.Store(true)
	if x.Caller.Failed() { // read after inside was set: see Group.depart
		return ErrFailed
	}
	var err error
	if x.sharesMemory {
		err = x.inDomain()
	} else {
		x.assign(x.Group.local > 1)
		err = x.finish(0)
	}
	if err == nil {
		x.entered = false
		x.inside.Store(false)
		if x.Caller.Failed() {
			x.Group.left()
		}
	}
	return err
}

// Entered reports whether all ranks have entered the current call, or the one that has failed, and all are in this
// process. Then only the awaited event ends a wait, and the event needs no help from another goroutine.
func (x *Executor) Entered() bool { return x.entered }

// inDomain executes the plan in a domain of several ranks.
//
// There every call begins with flag 0, whatever its plan: until then a rank may withdraw, and then the call never
// starts. If all ranks are in one process, the call runs to its end on each of them from then on: a rank that
// finds the communicator failed skips the remaining work, and records that before it sets its last flag, so that
// all ranks agree on the outcome. Otherwise every wait can end early, and a rank that leaves then waits until no
// local rank accesses its memory any more.
func (x *Executor) inDomain() error {
	severalLocal := x.Group.local > 1
	if severalLocal {
		x.dsts[x.half].Store((*byte)(x.call.Dst.Ptr))
	}
	x.publish()
	done := 0
	if !x.plan.touchesPeers { // the peers' memory cannot change the plan
		done = x.plan.early
		x.assign(severalLocal && !x.plan.prefixStageOnly)
		if err := x.steps(x.plan.steps[:done]); err != nil {
			return err
		}
	}
	if err := x.enter(); err != nil {
		return err
	}
	shared := severalLocal && x.Group.sharesDst(x)
	switch {
	case x.plan.touchesPeers:
		if x.hidden() || !x.plan.sharedDst && x.aliased() {
			var err error
			if x.plan, err = x.Caller.PrivatePlan(); err != nil {
				return err
			}
			// Flag 0 was for entering the call; the steps before the plan's first flag are executed now.
			x.flagOffset = 1
		}
		x.sharedDst = x.plan.sharedDst
		x.assign(shared && !x.plan.sharedDst)
	case shared && x.plan.prefixStageOnly:
		x.assign(true)
	}
	return x.finish(done)
}

// finish executes the rest of the plan and delivers the result.
func (x *Executor) finish(done int) error {
	steps := x.plan.steps
	committed := len(steps) - x.plan.committed
	if err := x.steps(steps[done:committed]); err != nil {
		return err
	}
	x.committed = true
	if err := x.steps(steps[committed:]); err != nil {
		return err
	}
	if x.OneProcess && x.Group.torn.Load() {
		return ErrFailed
	}
	x.deliver()
	return nil
}

// publish shows the call to the peers of the domain.
func (x *Executor) publish() {
	s := &x.call.Slot
	s.Src, s.Dst = x.visible(x.call.Src), x.visible(x.call.Dst)
	x.End.Publish(*s)
}

// visible returns a memory as the peers see it.
func (x *Executor) visible(m tensor.Memory) tensor.Memory {
	if m.Bytes > 0 && !x.End.Reachable(m) {
		m.Ptr = nil
	}
	return m
}

// hidden reports whether a rank of the domain uses memory in the call that not all ranks of the domain can
// access.
func (x *Executor) hidden() bool {
	for _, r := range x.Domain {
		if s := x.End.Peer(r); s.Src.Ptr == nil && s.Src.Bytes > 0 || s.Dst.Ptr == nil && s.Dst.Bytes > 0 {
			return true
		}
	}
	return false
}

// aliased reports whether two ranks of the domain have one Dst.
func (x *Executor) aliased() bool {
	for i, r := range x.Domain {
		dst := x.End.Peer(r).Dst.Ptr
		for _, other := range x.Domain[:i] {
			if dst != nil && x.End.Peer(other).Dst.Ptr == dst {
				return true
			}
		}
	}
	return false
}

// enter waits until all ranks of the domain have entered the call, and compares their calls.
func (x *Executor) enter() error {
	if err := x.End.Signal(0); err != nil {
		return err
	}
	if err := x.await(-1, 0); err != nil {
		return err
	}
	for _, peer := range x.Domain {
		if peer != x.rank && x.End.Peer(peer).Sum != x.call.Slot.Sum {
			return x.Caller.Mismatch()
		}
	}
	return nil
}

// await waits for a flag of a rank, or of all. The wait for flag 0 can be interrupted; then one atomic variable in
// the transport decides: either this rank withdraws and the call never starts, or it has started, whatever
// interrupted the wait.
func (x *Executor) await(rank, flag int) error {
	x.wait.flag, x.wait.of = flag, rank
	for {
		err := x.End.Await(x.ctx, rank, flag)
		switch {
		case err == nil:
			x.entered, x.wait.flag = x.OneProcess, -1
			return nil
		case errors.Is(err, transport.ErrInterrupted) || flag > 0:
			return err
		}
		x.Group.withdrawing.Add(1)
		if x.End.Withdraw() {
			return err
		}
		x.Group.withdrawing.Add(-1)
		if !x.OneProcess {
			return err
		}
		x.entered = true
	}
}

// stop checks whether the communicator has failed. Then a call that this rank has not entered yet ends with an
// error. If all ranks are in one process and one group, the rest of the call is skipped up to its last flag; a
// call of several processes ends with an error. If all ranks are in one process but in several groups, or past
// the last flag, the call continues: the others would not learn of the failure.
func (x *Executor) stop() (skip bool, err error) {
	switch {
	case !x.Caller.Failed():
		return false, nil
	case !x.OneProcess:
		return true, ErrFailed
	case x.Group.local < x.size || x.committed:
		return false, nil
	case !x.entered:
		return true, ErrFailed // the call is not torn: the others may still be in the previous call
	}
	x.Group.torn.Store(true)
	return true, nil
}

// Leave leaves a failed call. When it returns, no local rank accesses this rank's memory any more, and memory that
// ranks of other processes may still access is retired.
func (x *Executor) Leave(call *Call) {
	x.Group.depart(x)
	if !x.OneProcess {
		x.End.Retire(call.Src)
		x.End.Retire(call.Dst)
	}
}
