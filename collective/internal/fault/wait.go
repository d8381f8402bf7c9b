package fault

import "github.com/lockstep-ml/lockstep/collective/internal/fingerprint"

// Wait is a call in which a rank waits for other ranks.
type Wait struct {
	Rank   int              // the rank that waits
	Size   int              // of the communicator
	Call   fingerprint.Call // the call of Rank
	Silent int              // a rank that has just not answered a query, or -1
	Peers  Peers
}

// Peers is what the waiting rank knows, and can find out, of the other ranks. Its methods are called on the
// goroutine that calls the methods of [Wait].
type Peers interface {
	// Missing returns the ranks that the waiting rank waits for now.
	Missing() []int
	// State queries the state of another rank; ok is false if it does not answer, for which State may wait
	// about half a second. The state may come from another process: it need not be consistent. The caller
	// may modify Waits.
	State(rank int) (s State, ok bool)
	// LastSeen returns what is known of another rank without a query.
	LastSeen(rank int) LastSeen
	// Process identifies the process of a rank. A process answers for all its ranks, or for none.
	Process(rank int) int
	// Failed reports whether the communicator has failed, which ends the search.
	Failed() bool
}

// LastSeen is what a rank knows of another one that does not report its state.
type LastSeen struct {
	Entered  bool             // it has entered the call
	Previous fingerprint.Call // if it is known not to have entered the call: the last one that it entered; else none
	Frame    uint64           // number of the last call of which a frame of it was received, plus 1; 0: none
}
