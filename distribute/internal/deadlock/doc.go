// Package deadlock implements the deadlock detector. It tracks the state of every replica of this process, and proves
// from the states, without timeouts, that a collective call can never complete.
//
// A [Detector] belongs to a strategy. Each step is a [Run]: every replica's goroutine runs inside [Run.Do], which
// reports to the detector how it ended. The communicators report their calls to a [Monitor]. Merge calls go through
// [Run.Merge]. So the detector knows for each replica whether it runs, waits (in which call of which communicator),
// merges, or has returned, panicked or called runtime.Goexit. The first failure of a run becomes one [*StepError]
// that every replica gets. It names the cause and describes what each replica was doing, with file and line. These
// come from the goroutines' stacks at the time of the failure, so nothing is recorded before.
//
// # Immediate errors
//
//  1. Two calls of one sequence differ. The collective layer detects this, because it compares every header with its
//     current call, and calls [Monitor.Explain]. This package detects a merge call where another replica makes a
//     collective call.
//  2. A waiting call needs a replica that has ended, before or after the call started to wait.
//  3. Waiting calls wait for each other in a cycle: two communicators used in opposite order, or one replica that
//     merges while another reduces.
//
// All three follow from one rule over the wait-for graph: a parked replica waits for every member of its call that
// has not entered the call. A path from a parked replica to an ended one, or back to itself, means that its call
// cannot complete. (So "no local replica runs and no waiting call can complete" is a special case: a cycle among some
// replicas is detected while others still compute.) A replica that waits outside the graph, for example for a channel
// of the user's code, counts as running. The deadline of the calls that wait for it then ends them.
//
// # Why the verdict is correct, although entering takes no lock
//
// Entering a call is one atomic store, which increases the number of calls that the rank has entered. Parking and
// ending take the detector's lock, and the graph is searched under that lock. Let a search that holds the lock from
// time L to time U find a cycle of parked replicas r1, r2, …, where each r[i] waits in call w[i], which r[i+1] had
// not entered when the search read its count, at a time t[i] between L and U.
//
// No false positives: all of them set their parked flag before L, since that needs the lock. Assume that some of them
// had left their wait before U, and let r[j] be the first. It left because all members had entered w[j], so r[j+1]
// had entered w[j]. r[j+1] was parked from before L until after r[j] left, and a parked replica enters no call, so it
// had entered w[j] before L, and the search would have seen that at t[j]. So at U all are still parked. Each needs
// the next one to act first, so none ever will. The same holds for a path that ends at an ended replica, because
// ending needs the lock and is final. A replica that is parked in a call that all have entered has no edges and
// counts as running, even before it clears its flag; therefore clearing it needs no lock.
//
// No false negatives: a cycle, or a path to an ended replica, becomes complete when its last member parks or ends,
// because entering only removes edges. That replica then holds the lock and searches. The others set their flags
// under the lock before, and entered their calls before they parked, so the search sees the exact state.
//
// The proof needs four guarantees of the callers: a rank enters a call before its peers can see it; only the
// goroutine that its replica blocks in parks; a call that all have entered completes without further action of a
// replica; and one replica makes one call at a time. [Run.Acquire] turns a violation of the last into an error. A call
// that a replica has started and does not await yet is one that it has entered; it parks only when it awaits the call.
//
// Calls outside a run, and calls that a merge function makes for all replicas, are recorded but not checked: one
// goroutine acts for all ranks there, so they cannot diverge.
package deadlock
