package distribute

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// Run calls step once per replica, each on its own goroutine, all at the same time, and returns their results by
// replica (TensorFlow's Strategy.run). A replica gets its element of in. If in is nil, every replica gets the zero
// value; what all replicas share, step reads from its closure.
//
// Runs of one strategy are serialized. A Run inside a step is an error. A merge function may start one with its
// context: it has the same replica ids and devices, while the replicas of the outer Run wait. If a replica
// returns an error, panics or calls runtime.Goexit, or if ctx ends, the contexts and the waiting calls of all
// replicas end with that cause. Variables then keep the values that they had before the Run, and Run returns a
// *[StepError], as the calls of all replicas did. The strategy can run again.
//
// Run waits at most 10 seconds for a replica that does not return after the failure; [StepError.Wait] waits for all of
// them.
//
// step's context ends with the Run. step's replica must not be used after the Run.
func Run[I, O any](
	ctx context.Context, s *Strategy, step func(context.Context, *Replica, I) (O, error), in PerReplica[I],
) (PerReplica[O], error) {
	if err := s.requireNoStep(ctx, "Run"); err != nil {
		return nil, err
	}
	if in != nil && len(in) != len(s.devices) {
		return nil, errorf("Run", ErrInvalid, "%d inputs given for %d replicas: want one each, or nil", len(in),
			len(s.devices))
	}
	if step == nil {
		return nil, errorf("Run", ErrInvalid, "the step function is nil")
	}
	host, err := s.host(ctx)
	if err != nil {
		return nil, err
	}
	out := make(PerReplica[O], len(s.devices))
	err = host.run(ctx, step, func(ctx context.Context, r *Replica) error {
		var mine I
		if in != nil {
			mine = in[r.local]
		}
		result, err := step(ctx, r, mine)
		out[r.local] = result
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// requireNoStep returns an error if ctx is that of a step: Runs do not nest.
func (s *Strategy) requireNoStep(ctx context.Context, op string) error {
	if f := frameOf(ctx); f != nil && f.strategy == s && f.replica != nil {
		return located(errorf(op, ErrContext, "%w", &nested{f.replica}))
	}
	return s.requireCross(ctx, op)
}

// nested is the reason why a Run must not start in a step.
type nested struct{ replica *Replica }

func (e *nested) Error() string {
	return fmt.Sprintf("called inside a step function, on replica %d of %v: Run requires being in cross-replica "+
		"context, and Runs do not nest. Call it after that Run, or make the computation part of it", e.replica.id,
		e.replica.strategy)
}

func (*nested) Unwrap() error { return ErrNested }

// host returns the strategy that executes a Run of s: s itself or, in a merge function, the inner strategy of
// the one that merges.
func (s *Strategy) host(ctx context.Context) (*Strategy, error) {
	f := innermost(ctx)
	if f == nil || f.strategy != s || f.merge == nil {
		return s, nil
	}
	outer := f.merge
	outer.mu.Lock()
	defer outer.mu.Unlock()
	if outer.inner == nil {
		var shared *replicaGroup
		if s.workersInSync > 1 {
			shared = outer.group // opening another group would need an agreement of all workers
		}
		inner, err := (&Strategy{
			placement: placement{
				devices: s.devices, params: s.params, ids: s.ids, workersInSync: s.workersInSync, workerID: s.workerID,
				chief: s.chief, group: shared,
			},
			self: s, kind: s.kind, task: s.task, oneDevice: s.oneDevice, engine: s.engine, ops: s.ops, size: s.size,
			options: s.options, stall: s.stall, logger: s.logger,
		}).open("Run")
		if err != nil {
			return nil, err
		}
		outer.detector.Nest(inner.detector)
		outer.inner = inner
	}
	return outer.inner, nil
}

// run calls body for every replica at the same time and settles the outcome. step is the user's function that
// body calls.
func (s *Strategy) run(ctx context.Context, step any, body func(context.Context, *Replica) error) error {
	if err := s.requireOpen("Run"); err != nil {
		return err
	}
	run, err := s.detector.Begin(ctx, step)
	switch {
	case errors.Is(err, deadlock.ErrNested):
		return errorf("Run", ErrContext, "%w", err)
	case err != nil:
		return errorf("Run", nil, "%w", err)
	}
	defer run.Close()
	if err := s.requireOpen("Run"); err != nil {
		return err // closed while this Run waited
	}
	outer := s.self.runOf(ctx)
	if !s.self.undo.Begin(run, outer) {
		return endedRun("Run", outer)
	}
	start := s.stats.now()
	s.countCalls(false)
	if s.member != nil {
		s.member.Running(true)
		defer s.member.Running(false)
	}
	if s.workers == nil {
		s.startWorkers()
	}
	replicas := make([]Replica, len(s.devices))
	for i, w := range s.workers {
		replicas[i].begin(s, i, replicas, run, w.state)
	}
	for i, w := range s.workers {
		w.jobs <- job{&replicas[i], body}
	}
	abandoned, err := run.Wait()
	for i := range replicas {
		replicas[i].over.Store(true)
	}
	s.countCalls(true)
	s.stats.ended(start)
	return s.settle(ctx, run, abandoned, err)
}

// countCalls counts the calls that each replica's communicators begin in a Run: at the Run's start, then at its end.
func (s *Strategy) countCalls(end bool) {
	if s.group == nil {
		return
	}
	for i := range s.group.comms {
		begun := uint64(0)
		for l := range s.group.more {
			comm := s.group.comms[i]
			if lane(l) != laneMain {
				comm = s.group.more[l][i]
			}
			if comm != nil { // opened at its first use
				n, _, _ := comm.Progress()
				begun += n
			}
		}
		c := &s.stats.replicas[i]
		if end {
			c.calls.Add(begun - c.begun)
		}
		c.begun = begun
	}
}

// settle commits a Run's writes or rolls them back. After a failure it also makes the strategy able to run
// again. The goroutines of abandoned replicas are blocked in the user's code; they and their replicas' state
// are replaced.
func (s *Strategy) settle(ctx context.Context, run *deadlock.Run, abandoned []int, err error) error {
	if e := s.self.undo.End(run, err); e != nil {
		s.logger.Error("distribute: a variable could not be restored after a failed step", "error", e)
	}
	if err != nil || s.kind == defaultKind {
		s.stopWorkers(abandoned)
	}
	if err == nil {
		if s.member != nil {
			if e := s.member.Recovered(); e != nil {
				s.logger.Warn("distribute: this worker continues, but its failed step is still reported", "error", e)
			}
		}
		return nil
	}
	if s.member != nil {
		if e := s.member.Fail(err); e != nil {
			s.logger.Warn("distribute: could not report this worker's failed step to the other workers", "error", e)
		}
	}
	if s.group != nil && !s.self.elastic {
		if e := s.group.rebuild(context.WithoutCancel(ctx)); e != nil {
			s.closed.Store(true)
			if s.member != nil && s.member.Err() != nil {
				return err // the worker has logged the reason
			}
			s.logger.Error("lockstep: the strategy cannot go on after a failed step", "strategy", s.String(), "error", e)
		}
	}
	if !s.closed.Load() && s.kind != defaultKind {
		s.startWorkers()
	}
	return err
}
