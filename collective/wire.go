package collective

import (
	"errors"

	"github.com/lockstep-ml/lockstep/collective/internal/fault"
)

// failureKinds are the kinds of failure by their number in what processes send to each other.
var failureKinds = [...]error{
	fault.KindTimeout:  ErrTimeout,
	fault.KindPeerLost: ErrPeerLost,
	fault.KindMismatch: ErrMismatch,
	fault.KindDesync:   ErrDesync,
	fault.KindInvalid:  ErrInvalid,
	fault.KindClosed:   ErrClosed,
	fault.KindBusy:     ErrBusy,
	fault.KindAborted:  ErrAborted,
}

// encodeFailure encodes why a communicator has failed, for the other processes. comm and rank are those of an
// error that is not an *Error.
func encodeFailure(err error, comm string, rank int) []byte {
	e := (*Error)(nil)
	if !errors.As(err, &e) {
		e = &Error{Kind: ErrAborted, Comm: comm, Rank: rank, Err: err}
	}
	f := fault.Failure{Comm: e.Comm, Rank: e.Rank, Op: e.Op, Seq: e.Seq, Name: e.Name, Peers: e.Peers, Who: e.Who}
	for i, k := range failureKinds {
		if e.Kind == k {
			f.Kind = fault.Kind(i)
		}
	}
	if e.Err != nil {
		f.Cause = e.Err.Error()
	}
	return f.Encode()
}

// decodeFailure decodes it. The error has the rank that detected the failure; ok is false if the encoding is
// invalid.
func decodeFailure(b []byte) (e *Error, ok bool) {
	f, ok := fault.DecodeFailure(b)
	if !ok {
		return nil, false
	}
	e = &Error{
		Kind: failureKinds[f.Kind], Comm: f.Comm, Rank: f.Rank, Op: f.Op, Seq: f.Seq, Name: f.Name, Peers: f.Peers,
		Who: f.Who,
	}
	if f.Cause != "" {
		e.Err = errors.New(f.Cause)
	}
	if e.Kind == ErrClosed { // to the other ranks it is lost
		e.Kind = ErrPeerLost
		e.Peers = []int{e.Rank}
	}
	return e, true
}
