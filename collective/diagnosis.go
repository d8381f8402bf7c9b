package collective

import (
	"errors"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// localRank is one rank of a communicator over a transport.
type localRank struct {
	rank    int
	front   FrontEnd
	team    *team
	end     transport.Endpoint
	site    site
	exec    *executor.Executor
	calls   recent
	blocked fault.Blocked // guarded by the team's blocking
}

// diagnosis determines why a rank's call does not end or has failed, and makes the call's error.
type diagnosis struct {
	*localRank

	// The current call.
	run    *Running
	slot   *transport.Slot     // identifies it to the other ranks
	begun  fingerprint.Numbers // the calls that the rank has begun, including this one
	silent int                 // the rank that did not answer the last probe, or -1
	behind []int               // compareEarly: the ranks that have not entered

	// departed is a departure that was reported while the rank waited. The wait may have ended for another reason,
	// so it is kept for later.
	departed *departure
}

// failure returns an error of the current call.
func (d *diagnosis) failure(kind, err error) *Error {
	e := d.front.Error(d.run, kind, err)
	e.Peers = d.missing()
	return e
}

// conflict returns the error that this rank's call and one of a peer conflict.
func (d *diagnosis) conflict(c *fault.Conflict) *Error {
	kind := ErrMismatch
	if c.Deadlock {
		kind = ErrDesync
	}
	err := d.failure(kind, errors.New(c.Text))
	err.Peers = []int{c.Peer}
	return err
}

// missing returns the ranks that the current wait is for.
func (d *diagnosis) missing() []int { return d.exec.Missing(nil) }

// departure is the loss of a peer that ends a call, as the endpoint reported it. It is not a PeerDown,
// because a transport on top of others may translate the ranks of PeerDown errors that pass through it.
type departure struct{ down transport.PeerDown }

func (d *departure) Error() string { return d.down.Error() }

// lost returns the error of a departure: the reason that the peer reported, or that the peer is lost.
func (d *diagnosis) lost(down *transport.PeerDown) *Error {
	if failure := (*transport.Failure)(nil); errors.As(down.Err, &failure) {
		if reported, ok := decodeFailure(failure.Reason); ok {
			return reported
		}
	}
	e := d.failure(ErrPeerLost, down)
	e.Peers = []int{down.Rank}
	return e
}

// awaitReason waits until a peer has reported that it failed, and why; it returns nil if none has. With no
// patience it only checks.
func (d *diagnosis) awaitReason(patience time.Duration) *departure {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		var down transport.PeerDown
		select {
		case down = <-d.end.Down():
		default:
			select {
			case down = <-d.end.Down():
			case <-timer.C:
				return nil
			}
		}
		if !errors.Is(down.Err, transport.ErrClosed) {
			return &departure{down}
		}
	}
}
