package worker

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/timeline"
)

// session is this worker's part in one epoch of its job: the members, its connections to them, and what has failed. It
// ends with the epoch: a worker takes part in another epoch with another session.
type session struct {
	registration  rendezvous.Registration
	registrations []rendezvous.Registration // of all, by worker
	infos         []decodedInfo             // their Data
	members       []Member                  // by worker
	links         string                    // the transports to the others
	store         rendezvous.Store          // nil: a job of one worker
	member        *membership.Member        // nil: a job of one worker
	tracker       *status.Tracker           // of worker 0 in a job of several
	straggler     atomic.Pointer[timeline.Straggler]
	silentAt      atomic.Pointer[time.Time] // when the store last did not answer this worker, which fails; nil: never

	life     context.Context // ends with Close, or with the end of the job; the cause is the reason
	endLife  context.CancelCauseFunc
	stopWork context.CancelFunc // ends the goroutines
	work     sync.WaitGroup

	reporting sync.Mutex  // guards failure, and is held while it is reported or withdrawn
	failure   *ownFailure // of this worker; nil: none, or it is withdrawn

	mu    sync.Mutex       // guards group
	group collective.Group // the communicators in use; nil: none yet
}

// ownFailure is a failure that this worker has reported.
type ownFailure struct {
	at     uint64 // the progress then
	blames []int  // the workers that caused it
}

func newSession() *session {
	s := &session{}
	s.life, s.endLife = context.WithCancelCause(context.Background())
	return s
}

// group holds the communicators of this worker's replicas. New ones, of a rebuild, are watched too.
type group struct {
	collective.Group
	of *session
}

// Rebuild implements [collective.Group]: the new group takes the place of this one in the session. If the session has
// ended, since a worker is lost, Rebuild waits for nothing and returns the reason.
func (g *group) Rebuild(ctx context.Context) (collective.Group, error) {
	if cause := g.of.ended(); cause != nil {
		return nil, fmt.Errorf("worker: cannot rebuild the group without the lost worker, restart the job: %w", cause)
	}
	next, err := g.Group.Rebuild(ctx)
	if err != nil {
		return nil, err
	}
	return g.of.use(next), nil
}

// use makes a group the one in use: it is aborted when the session ends.
func (s *session) use(g collective.Group) *group {
	s.mu.Lock()
	s.group = g
	s.mu.Unlock()
	if cause := s.ended(); cause != nil {
		abort(g.Local(), cause)
	}
	return &group{g, s}
}

// communicators returns the communicators in use.
func (s *session) communicators() []collective.Communicator {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.group == nil {
		return nil
	}
	return s.group.Local()
}

// flights returns the flight records of the group in use, if it keeps any.
func (s *session) flights() []flight.Rank {
	s.mu.Lock()
	g := s.group
	s.mu.Unlock()
	if g == nil {
		return nil
	}
	return g.Flights()
}

// ended returns why no group of this session can work any more; nil: it can, or the worker was closed before.
func (s *session) ended() error {
	if cause := context.Cause(s.life); cause != context.Canceled {
		return cause
	}
	return nil
}

// end ends the session and all its waits, and aborts the group in use and all later ones. It reports whether it has
// ended by this cause.
func (s *session) end(cause error) bool {
	s.mu.Lock()
	first := s.life.Err() == nil
	s.endLife(cause)
	s.mu.Unlock()
	if first {
		abort(s.communicators(), cause)
	}
	return first
}

func abort(comms []collective.Communicator, cause error) {
	for _, c := range comms {
		c.Abort(cause)
	}
}
