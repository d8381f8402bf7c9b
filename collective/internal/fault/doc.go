// Package fault determines which ranks are responsible for a collective call that does not end, describes
// calls that do not match, and encodes what ranks send to each other about failures.
//
// # Fault attribution
//
// A rank that waits long is rarely waiting for the rank at fault: its neighbour usually waits too. So a rank
// that gives up, or reports a stall, probes the ranks that it waits for, then the ranks that those wait for,
// and so on ([Wait.Probe]). Every rank reports its [State]: its latest call, whether it computes or waits in
// it, and for which ranks. The probed ranks are the suspects; each gets a level of suspicion, from the least
// to the most:
//
//	notSuspected  it waits for others itself, or is past the call
//	computing     it is in a call and does not wait for a peer; usually it soon will
//	failed        its communicator has failed: it reports the reason
//	gone          it is known not to answer: it has left, or has not opened its endpoint
//	silent        it does not report its state
//	absent        it has not entered the call
//
// The ranks with the highest level are blamed ([Finding]). If there is none above notSuspected, the waiting
// ranks may form a cycle; then all of them are blamed.
//
// # Bounds
//
// Ranks continue while they are probed, and a rank that was woken just now may report another state a little
// later. So the rounds of probes are repeated, at growing intervals, for 0.9 s, unless a rank is certainly at
// fault. A rank that does not answer may only be slow, and wait like all others: it is blamed only after two
// probes without an answer, and after every other rank was probed. The whole search ends after 3.6 s, or
// after 0.4 s where the call has to wait for it ([Wait.ProbeBriefly]); a single probe may add half a second.
//
// The package does no communication: [Peers] provides it.
package fault
