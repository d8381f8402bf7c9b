package executor

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Execute executes a call. The transport waits by ctx; while it does, [Executor.Missing] returns the ranks that
// it waits for. An error is [ErrFailed], an [*OtherCall], a [*MissingFrame], or one of ctx, of the [Caller] or of
// the transport; after an error the communicator must fail on all ranks, and then [Executor.Leave] be called.
func (x *Executor) Execute(ctx context.Context, call *Call) error {
	p := &call.Plan.Problem
	x.current.begin(ctx, call)
	if x.lists || call.SrcList != nil || call.DstList != nil {
		x.layOut(call)
	}
	message := p.Op == plan.Send
	x.frames.begin(&call.Slot.Header, message)
	if message {
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
		if dst := &x.dsts[x.half]; dst.Load() != (*byte)(x.call.Dst.Ptr) { // a store takes the cache line from the others
			dst.Store((*byte)(x.call.Dst.Ptr))
		}
		if cut := &x.cut[x.half]; cut.Load() != x.inRegions {
			cut.Store(x.inRegions)
		}
	}
	private := x.publish()
	if private {
		if err := x.usePrivatePlan(); err != nil {
			return err
		}
	} else if x.plan.atOnce && x.call.Partial == x.call.Type {
		x.inline = x.plan.Problem.Count*x.call.Type.Bytes() <= x.inlineBytes
		if !x.inRegions { // ranks may differ in this
			return x.atOnce(severalLocal)
		}
	}
	done := 0
	if !x.plan.touchesPeers { // the peers' memory cannot change the plan
		x.assign(severalLocal && !x.plan.prefixStageOnly)
		if !private || !x.plan.exchanges { // a rank with another plan receives frames only after its flag 0
			done = x.plan.early
		}
		if err := x.steps(x.plan.steps[:done]); err != nil {
			return err
		}
	}
	if err := x.enter(); err != nil {
		return err
	}
	shared := severalLocal && x.Group.sharesDst(x, x.half, x.Domain)
	switch {
	case x.plan.touchesPeers:
		x.peerRegions()
		if x.hidden() > 0 || !x.plan.sharedDst && x.aliased() {
			if err := x.usePrivatePlan(); err != nil {
				return err
			}
			// Flag 0 was for entering the call; the steps before the plan's first flag are executed now.
			x.flagOffset = 1
		} else {
			x.sharedDst = x.plan.sharedDst
		}
		x.assign(shared && !x.sharedDst)
	case shared && x.plan.prefixStageOnly:
		x.assign(true)
	}
	if private && (x.plan.exchanges || x.hidden() < len(x.Domain)) {
		x.flagOffset = 1 // for all: the others have changed to the private plan only now
		if slices.ContainsFunc(x.plan.steps[:done], func(s plan.Step) bool { return s.Kind == plan.Signal }) {
			if err := x.shared.Signal(1); err != nil {
				return err
			}
		}
	}
	return x.finish(done)
}

// usePrivatePlan replaces the call's plan by the one for ranks that cannot access each other's memory.
func (x *Executor) usePrivatePlan() (err error) {
	x.plan, err = x.Caller.PrivatePlan()
	return err
}

// atOnce executes a plan with [Plan.atOnce], as its steps say, without their generality: a small call takes as long as
// executing steps.
func (x *Executor) atOnce(severalLocal bool) error {
	call, n := x.call, x.plan.Problem.Count
	copy(bytesAt(x.stage(x.rank), call.Src.Bytes), bytesAt(call.Src.Ptr, call.Src.Bytes))
	x.dstAt = call.Dst.Ptr
	if err := x.enter(); err != nil {
		return err
	}
	if severalLocal && x.Group.sharesDst(x, x.half, x.Domain) {
		x.assign(true)
	}
	x.committed = true
	if skip, err := x.stop(); skip {
		return err
	}
	switch {
	case call.Dst.Bytes == 0:
	case len(x.Domain) == 2: // the tree over two ranks
		kernel.Reduce(x.op, call.Type, x.dstAt, x.stage(x.Domain[0]), x.stage(x.Domain[1]), n)
		if x.mean {
			kernel.Scale(call.Type, x.dstAt, x.dstAt, n, x.size)
		}
	default:
		x.src, x.dst = x.src[:0], append(x.dst[:0], x.dstAt)
		for _, r := range x.Domain {
			x.src = append(x.src, x.stage(r))
		}
		tree := kernel.Tree{Op: x.op, Type: call.Type}
		if x.mean {
			tree.Divide = x.size
		}
		x.reduceSources(tree, 0, n)
		clear(x.dst)
	}
	if x.OneProcess && x.Group.torn.Load() {
		return ErrFailed
	}
	if x.privateDst {
		x.deliver()
	}
	return nil
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
	if x.privateDst {
		x.deliver()
	}
	return nil
}

// publish shows the call to the peers of the domain, with its memories if the plan accesses those of peers. It reports
// whether peers cannot access one of these.
func (x *Executor) publish() (private bool) {
	s := &x.call.Slot
	if x.plan.touchesPeers {
		s.Src, s.Dst = x.visible(x.call.Src, x.call.SrcList), x.visible(x.call.Dst, x.call.DstList)
		private = isHidden(s)
	} else if s.Src.Bytes|s.Dst.Bytes != 0 { // of the call before
		s.Src, s.Dst = tensor.Memory{}, tensor.Memory{}
	}
	x.shared.Publish(s)
	return private
}

// visible returns a memory, or one that is a list of memories, as the peers see it.
func (x *Executor) visible(m tensor.Memory, list []tensor.Memory) tensor.Memory {
	if m.Bytes > 0 && (list == nil && !x.shared.Reachable(m) || list != nil && !x.reachable(list)) {
		m.Ptr = nil
	}
	return m
}

// hidden returns how many ranks of the domain use memory in the call that not all ranks of the domain can access.
func (x *Executor) hidden() (ranks int) {
	for _, r := range x.Domain {
		if isHidden(x.shared.Peer(r)) {
			ranks++
		}
	}
	return ranks
}

func isHidden(s *transport.Slot) bool {
	return s.Src.Ptr == nil && s.Src.Bytes > 0 || s.Dst.Ptr == nil && s.Dst.Bytes > 0
}

// aliased reports whether two ranks of the domain have one Dst.
func (x *Executor) aliased() bool {
	for i, r := range x.Domain {
		dst := x.shared.Peer(r).Dst.Ptr
		for _, other := range x.Domain[:i] {
			if dst != nil && x.shared.Peer(other).Dst.Ptr == dst {
				return true
			}
		}
	}
	return false
}

// enter waits until all ranks of the domain have entered the call, and compares their calls.
func (x *Executor) enter() error {
	if err := x.shared.Signal(0); err != nil {
		return err
	}
	if err := x.await(-1, 0); err != nil {
		return err
	}
	for _, peer := range x.Domain {
		if peer != x.rank && x.shared.Peer(peer).Sum != x.call.Slot.Sum {
			return x.Caller.Mismatch()
		}
	}
	return nil
}

// Leave leaves a failed call. When it returns, no local rank accesses this rank's memory any more, and memory that
// ranks of other processes may still access is retired.
func (x *Executor) Leave(call *Call) {
	x.Group.depart(x)
	if !x.OneProcess && x.shared != nil {
		for _, list := range [...][]tensor.Memory{{call.Src, call.Dst}, call.SrcList, call.DstList} {
			for _, m := range list {
				x.shared.Retire(m)
			}
		}
	}
}

func kernelOp(r plan.ReduceOp) kernel.Op {
	switch r {
	case plan.Min:
		return kernel.Min
	case plan.Max:
		return kernel.Max
	case plan.Prod:
		return kernel.Prod
	}
	return kernel.Sum
}
