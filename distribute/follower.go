package distribute

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Follower starts a call that follows another one of the replica: see [Handle.Then].
type Follower struct {
	handle  Handle
	compute func()
}

// Then returns what starts a call that follows this one, such as the second round of a compressed exchange. The second
// call may be started at once. When the first one has ended, compute is called on a goroutine of the library, and then
// the second call begins; neither needs the replica's goroutine. compute may read what the first call has received and
// write what the second one sends. It must not use the replica. A Follower starts one call.
//
// Calls that follow others neither wait for other started calls nor delay them: they are made on a communicator of
// their own. All replicas start them in the same order. The first one opens the communicator. With custom
// [CrossDeviceOps] the Wait of the second call makes both, unless the first one was awaited, and calls compute.
//
//	first, err := r.StartAllToAll(ctx, received, encoded, name)
//	second, err := first.Then(add).StartAllGather(ctx, sums, own, name)
//	… // compute and start the next buckets
//	err = errors.Join(first.Wait(ctx), second.Wait(ctx))
func (h Handle) Then(compute func()) Follower { return Follower{h, compute} }

// StartAllReduce is [Replica.StartAllReduce] for a call that follows another one.
func (f Follower) StartAllReduce(ctx context.Context, op ReduceOp, b Bucket, opts ...Options) (Handle, error) {
	r, err := f.replica("Follower.StartAllReduce")
	if err != nil {
		return Handle{}, err
	}
	return r.start(ctx, "Follower.StartAllReduce", reduction{Bucket: b, op: op}, opts, &f)
}

// StartAllGather is [Replica.StartAllGather] for a call that follows another one.
func (f Follower) StartAllGather(
	ctx context.Context, dst, src *tensor.Tensor, name string, opts ...Options,
) (Handle, error) {
	r, err := f.replica("Follower.StartAllGather")
	if err != nil {
		return Handle{}, err
	}
	return r.startMove(ctx, "Follower.StartAllGather", collective.Call{Op: collective.AllGather}, dst, src, name, opts, &f)
}

// replica returns the replica of the call that is followed.
func (f *Follower) replica(name string) (*Replica, error) {
	if f.handle.call == nil || f.compute == nil {
		return nil, located(errorf(name, ErrInvalid, "the handle refers to no call, or the function to compute is nil"))
	}
	if f.awaits() && f.handle.call.followed.Load() {
		return nil, located(errorf(name, ErrInvalid, "another call follows the call of the handle: start one"))
	}
	return f.handle.replica, nil
}

// awaits reports whether the call that is followed was not awaited.
func (f *Follower) awaits() bool { return f.handle.call.number.Load() == f.handle.number }

// set makes c follow the call.
func (f *Follower) set(c *startedCall) {
	c.compute = f.compute
	if f.awaits() {
		f.handle.call.followed.Store(true)
		c.follows = f.handle.call
	}
}

// unfollow is called when the call that follows another one has ended.
func (c *startedCall) unfollow() {
	if first := c.follows; first != nil {
		first.followed.Store(false)
		c.follows = nil
	}
}

// follow waits for the call that c follows, and computes what c sends. The goroutine that executes c's call calls it.
func (c *startedCall) follow(ctx context.Context) (err error) {
	if first := c.follows; first != nil {
		select {
		case <-first.over:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-c.run.Context().Done():
			return context.Cause(c.run.Context())
		}
	}
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the function of Handle.Then panicked: %v\n%s", v, debug.Stack())
		}
	}()
	c.compute()
	return nil
}

// computeAlone computes what c, if it follows another call, would send to other replicas. The only replica of a
// strategy calls it: its calls end at once.
func (c *startedCall) computeAlone() {
	if c.compute != nil {
		c.compute()
		c.compute = nil
		c.unfollow()
	}
}

// followByOps waits for the call that c follows, unless it was awaited, and computes what c sends. It is follow for
// custom CrossDeviceOps.
func (c *startedCall) followByOps(ctx context.Context) error {
	if c.compute == nil {
		return nil
	}
	if first := c.follows; first != nil {
		c.unfollow()
		if first.number.Swap(0) > 0 {
			if err := first.wait(ctx); err != nil {
				return err
			}
		}
	}
	c.compute()
	return nil
}
