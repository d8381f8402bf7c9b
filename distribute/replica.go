package distribute

import (
	"context"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// Replica is one copy of the model on one device, as the step function sees it (TensorFlow's ReplicaContext).
// It is valid during one Run, and only one goroutine at a time may use it.
//
// All replicas must make the same calls in the same order. If they do not, all of them get an error.
type Replica struct {
	*replicaState
	strategy *Strategy
	home     *Strategy // strategy that executes this Run: strategy, or the inner one
	id       int       // among all workers' replicas
	local    int       // among this worker's replicas
	all      []Replica // of this worker, in this Run
	device   *device.Spec
	run      *deadlock.Run
	over     atomic.Bool // the Run has ended
	frame    frame
	ctx      stepContext // context of the step function
}

// replicaState is kept from one Run's replica to the next one's, so that calls do not allocate.
type replicaState struct {
	stats replicaStats
	reducers
	dense   knownDense
	started []*startedCall // in progress, and awaited ones for reuse
	starts  uint64         // the number of calls that were ever started

	// Of the call in progress:
	call     collective.Call
	manifest collective.Manifest
	options  collective.Options

	merging atomic.Pointer[mergeCall] // the merge call in progress; read by the replica that executes it
}

func newReplicaState() *replicaState {
	r := &replicaState{}
	r.call.Manifest, r.call.Options = &r.manifest, &r.options
	return r
}

// begin initializes a replica for a Run.
func (r *Replica) begin(s *Strategy, local int, all []Replica, run *deadlock.Run, state *replicaState) {
	r.replicaState, r.strategy, r.home, r.device, r.run = state, s.self, s, &s.devices[local], run
	r.id, r.local, r.all = s.ids[local], local, all
	r.frame = frame{strategy: s.self, replica: r}
	r.ctx = stepContext{run.Context(), &r.frame}
}

// arrive records and returns the time at which the replica joins a call that all replicas make.
func (r *Replica) arrive() int64 { return r.stats.arrive(r.home.stats, r.local) }

// leave counts the time of a call that the replica has joined at begin.
func (r *Replica) leave(begin int64) { r.stats.leave(r.home.stats, r.local, begin) }

// ID returns the replica's id, from 0 to NumReplicas()-1 (TensorFlow's replica_id_in_sync_group).
func (r *Replica) ID() int { return r.id }

// LocalID returns the replica's index among its worker's replicas, from 0. It is the index of its component in
// distributed values. With one worker it equals [Replica.ID].
func (r *Replica) LocalID() int { return r.local }

// NumReplicas returns the number of replicas of all workers (TensorFlow's num_replicas_in_sync).
func (r *Replica) NumReplicas() int { return r.strategy.size }

// Device returns the replica's device in TensorFlow's full form.
func (r *Replica) Device() string { return r.strategy.deviceName(*r.device) }

// Strategy returns the strategy that the replica belongs to.
func (r *Replica) Strategy() *Strategy { return r.strategy }

// enter checks the preconditions of calls in replica context.
func (r *Replica) enter(ctx context.Context, name string, op ReduceOp, opts []Options) (*deadlock.Run, Options, error) {
	if err := checkReduceOp(name, op); err != nil {
		return nil, Options{}, err
	}
	o, err := r.strategy.options.over(opts)
	if err != nil {
		return nil, Options{}, err
	}
	r.strategy.warnImplementation(o)
	run, err := r.inRun(ctx, name)
	return run, o, err
}

// inRun returns the Run in progress, or nil for the replica of [Default] outside of a Run. ctx must belong to
// this replica's step, or to no strategy.
func (r *Replica) inRun(ctx context.Context, name string) (*deadlock.Run, error) {
	if err := r.current(name); err != nil {
		return nil, err
	}
	switch f := innermost(ctx); {
	case f == nil || f.replica == r:
		return r.run, nil
	case f.strategy != r.strategy:
		return nil, errorf(name, ErrContext, "mixing different strategies: %v is not %v", f.strategy, r.strategy)
	case f.replica != nil && f.replica.id == r.id:
		return nil, errorf(name, ErrContext, "replica %d was used with the context of another Run", r.id)
	case f.replica != nil:
		return nil, errorf(name, ErrContext, "mismatching replica: replica %d was used in the step of replica %d", r.id,
			f.replica.id)
	}
	return nil, errorf(name, ErrContext, "need to be inside the step function of distribute.Run: replica %d was used in "+
		"a merge or update function, whose *CrossReplica acts for all replicas", r.id)
}

// current returns an error if the replica's Run has ended: the Run's failure if it failed.
func (r *Replica) current(name string) error {
	if !r.over.Load() {
		return nil
	}
	if err := r.run.Err(); err != nil {
		return err
	}
	return errorf(name, ErrContext, "replica %d is used outside of the Run that it belongs to; need to be inside the "+
		"step function of distribute.Run", r.id)
}

func (*Replica) sealed() {}
