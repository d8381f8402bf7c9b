// Package deadlock knows what every replica of this process is doing, and proves from it, without a clock, that a
// collective call will never complete.
//
// A [Detector] belongs to a strategy. Each step is a [Run]: every replica's goroutine runs inside [Run.Do], which tells
// the detector how it ended. The communicators report their calls to a [Monitor], and merge functions meet in
// [Run.Merge]. From that the detector knows for each replica whether it runs, waits (in which call of which
// communicator), merges, or has returned, panicked or called runtime.Goexit. The first failure of a run, whoever found
// it, becomes one [*StepError] that every replica gets: it names the cause and says what each replica was doing, with
// file and line. These are taken from the goroutines' stacks when the failure is found, so that nothing is recorded
// while all is well.
//
// # What is an error at once
//
//  1. Two calls of one sequence differ. The collective layer finds this (it holds every header against its own call)
//     and asks [Monitor.Explain]; a merge call that stands against a collective is found here.
//  2. A waiting call needs a replica that has ended, whether it ended before or after the call began to wait.
//  3. Waiting calls wait for each other in a circle: two communicators taken in opposite order, or one replica that
//     merges while another reduces.
//
// All three are one rule over the graph of waiting: a parked replica waits for every member of its call that has not
// entered it. A path from a parked replica to one that has ended, or back to itself, means that its call cannot
// complete. (So "no local replica runs and no waiting call can complete" is a special case: a circle among some
// replicas is found while others still compute.) What is not in the graph, such as a replica that waits for a
// channel of the user's, counts as running; there the deadline of the calls that wait for it decides.
//
// # Why the verdict is right, though entering takes no lock
//
// Entering a call is one atomic store that only grows a number (the calls that this rank has entered). Parking and
// ending take the detector's lock, and the graph is searched under that lock. Let a search that holds the lock from L to
// U find a circle of parked replicas r1, r2, … where each r[i] waits in call w[i], which r[i+1] had not entered when
// the search looked at it, at a time t[i] between L and U.
//
// No false alarm: all of them set their mark of being parked before L, since that needs the lock. Assume that some of
// them had left their wait before U, and let r[j] be the first. It left because w[j] had all its members, so r[j+1] had
// entered w[j]; r[j+1] itself was parked from before L until after r[j] left, and a parked replica enters nothing, so
// it had entered before L, and the search at t[j] would have seen it. So at U all are still parked, each needs the
// next one to act first, and none ever will. The same holds for a path that ends at an ended replica, because ending
// needs the lock and is final. A replica that is parked in a call that all have entered has no edges and counts as
// running, also while it has not yet cleared its mark; this is why clearing it needs no lock.
//
// None missed: a circle or a path to an ended replica becomes complete when its last member parks or ends, for
// entering only takes edges away. That replica then holds the lock and searches. The others' marks were set under
// the lock before, and what they had entered they had entered before they parked, so the search sees exactly the truth.
//
// The argument needs four things of those who report: a rank enters before its peers can see it; only the goroutine
// that its replica blocks in parks; a call that all have entered completes without further help from a replica; and one
// replica makes one call at a time. [Run.Acquire] turns the breach of the last into an error.
//
// Calls outside a run, and those that a merge function makes for all replicas, are noted but not judged: one
// goroutine acts for all ranks there, so they cannot miss each other.
package deadlock
