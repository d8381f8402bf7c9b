package collective

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/transport"
)

// Fault attribution: which ranks are responsible for a call that does not end. Rarely the direct neighbour
// is, because it is usually waiting too. A rank that gives up, or reports a stall, probes the ranks that it
// waits for, then the ranks that those wait for, and so on.

// peerState is the state of a rank at one moment, as the rank reports it.
type peerState struct {
	call    fingerprint.Call // its latest call, or the call that was requested; none: it has made none
	state   doing
	entered uint64 // number of collectives that it has entered
	waits   []int  // waiting: the ranks that it waits for
}

// doing is what a rank does in its latest call.
type doing uint8

const (
	idle    doing = iota // it has made no call, or the latest one has ended
	busy                 // it is in the call, and does not wait for a peer
	waiting              // it is in the call, and waits
	broken               // its communicator has failed
)

// inCollective reports whether the rank is in a collective now.
func (s *peerState) inCollective() bool {
	return (s.state == busy || s.state == waiting) && s.call.Collective()
}

// past reports whether a rank has done everything that a rank in the given call can wait for. For a message
// that is unknown.
func (s *peerState) past(call *fingerprint.Call) bool {
	seq := call.Header.Seq
	return call.Pair == 0 && (s.entered > seq+1 || s.entered == seq+1 && !s.inCollective())
}

// peerState returns this rank's state, with the description of collective seq, or of its latest call if
// collective seq is not recorded. Any goroutine may call it at any time.
func (m *member) peerState(seq uint64) (s peerState) {
	m.textMu.Lock()
	d := &m.callLog
	used, waits := d.used, d.waits
	s.entered, s.waits = d.entered, slices.Clone(d.of)
	if n := m.current; n != nil {
		if other := &m.notes[seq&1]; other.sig != nil && other.seq == seq {
			n = other
		}
		s.call = n.call()
	}
	m.textMu.Unlock()
	m.mu.Lock() // read after the call: if the call has ended by now, the state says so
	over := m.turn
	m.mu.Unlock()
	switch {
	case m.team.fate.Load() != sound:
		s.state = broken
	case used <= over:
		s.state = idle
	case waits == used && len(s.waits) > 0:
		s.state = waiting
	default:
		s.state = busy
	}
	if s.state != waiting {
		s.waits = nil
	}
	return s
}

// answer returns this rank's encoded state, for a peer.
func (x *executor) answer(seq uint64) []byte {
	s := x.m.peerState(seq)
	return encodeAnswer(&s)
}

// peerStateOf returns another rank's state, if it can be determined.
func (m *member) peerStateOf(rank int) (s peerState, ok bool) {
	for _, mate := range *m.team.mates.Load() {
		if mate.rank == rank {
			return mate.peerState(latestCall), true
		}
	}
	asker, ok := m.end.(transport.Asker)
	if !ok {
		return s, false
	}
	s, ok = decodeAnswer(asker.Ask(rank, latestCall))
	s.waits = slices.DeleteFunc(s.waits, func(r int) bool { return r < 0 || r >= m.team.size || r == rank })
	if s.state == waiting && len(s.waits) == 0 {
		s.state = busy
	}
	return s, ok
}

// faultLevel is how likely a rank is the reason that a call does not end, from the least to the most.
type faultLevel uint8

const (
	notAtFault faultLevel = iota // it waits for others itself, or is past the call
	computing                    // it is in a call and does not wait for a peer; usually it soon will
	fails                        // its communicator has failed: it reports the reason
	gone                         // it is known not to answer: it has left, or has not opened its endpoint
	unanswered                   // it does not report its state
	absent                       // it has not entered the call
)

// probedPeer is a rank that was probed.
type probedPeer struct {
	peerState
	rank     int
	by       *probedPeer // the rank that waits for it; nil: none of those that were probed
	level    faultLevel
	lastSeen string // its last known state, if it does not report its state itself
}

// probing is the search for the ranks that are the reason that this one waits.
type probing struct {
	m       *member
	begun   time.Time
	most    time.Duration
	limit   time.Duration
	silent  time.Duration // time spent on probes that were not answered
	self    probedPeer
	round   int // number of the current round of probes
	asked   map[int]*probedPeer
	order   []*probedPeer // in the order of probing
	silence map[int]int   // by process: consecutive probes of this call that were not answered
	mute    map[int]bool  // the processes that have not answered in this round
}

// Bounds of the probing. A probe of a rank that does not answer takes half a second; one that is answered may
// take as long where processes get little CPU time.
const (
	// unanswered time, once some rank is certainly at fault, and time for repeated rounds; after that probing
	// stops
	probingMost = 900 * time.Millisecond
	// total time: enough to distinguish a peer that was slow once from one that must be reported
	probingEnd = 4 * probingMost
	// total time for a stall report, for which the call has to wait: at most one more probe
	stallEnd = 400 * time.Millisecond
	silences = 2                     // probes that a process must leave unanswered to be at fault
	quick    = 50 * time.Millisecond // a probe that fails sooner was not sent: the rank is known to be gone
	lastMost = 4                     // ranks at fault whose last calls are reported
	viaMost  = 3                     // ranks between this one and a rank at fault that are reported
)

// probePeers probes the peers until some rank is found to be at fault or the time is over. Ranks continue
// meanwhile, and a rank that was woken just now may report another state a little later, so the rounds are
// repeated. A rank that does not answer may just be slow, and wait like all others: it is probed twice, and
// every other rank is probed too.
func (m *member) probePeers(most, limit time.Duration) *probing {
	q := &probing{m: m, begun: time.Now(), most: most, limit: limit, silence: map[int]int{}}
	if m.wait.silent >= 0 {
		q.silence[m.site.process(m.wait.silent)] = 1
	}
	q.self = probedPeer{peerState: m.peerState(latestCall), rank: m.rank}
	for pause := time.Millisecond; ; pause *= 2 {
		q.ask()
		if q.clear() || m.team.fate.Load() != sound || q.over() || time.Since(q.begun)-q.silent+pause >= most {
			return q
		}
		time.Sleep(pause)
	}
}

// clear reports whether some rank is at fault, and no rank would be blamed that may only be slow.
func (q *probing) clear() bool {
	if len(q.are(absent)) > 0 {
		return true
	}
	found := false
	for _, w := range q.order {
		if w.level == unanswered && q.silence[q.m.site.process(w.rank)] < silences {
			return false
		}
		found = found || w.level > computing
	}
	return found
}

// over reports whether probing can stop. A peer that did not answer is blamed only after every other peer has
// been probed.
func (q *probing) over() bool {
	certain := func(w *probedPeer) bool {
		return w.level == absent || w.level == fails || w.level == gone || q.round > 1 && w.level == unanswered && q.silence[q.m.site.process(w.rank)] >= silences
	}
	return time.Since(q.begun) >= q.limit || q.silent >= q.most && slices.ContainsFunc(q.order, certain)
}

// ask follows the waits, starting with those of this rank, and probes each rank once. If the call needs all
// ranks, those that no other rank waits for are probed last: a rank waits for one of several missing ranks
// first.
func (q *probing) ask() {
	q.round++
	q.asked, q.order, q.mute = map[int]*probedPeer{q.m.rank: &q.self}, nil, map[int]bool{}
	q.follow(&q.self, q.m.missing())
	for i := 0; i < len(q.order); i++ {
		q.follow(q.order[i], q.order[i].waits)
	}
	if call := q.m.wait.call; call.pairwise() || call.Op.Rooted() {
		return
	}
	for r := range q.m.team.size {
		q.probeRank(r, nil)
	}
}

// follow probes the ranks that a rank waits for.
func (q *probing) follow(by *probedPeer, waits []int) {
	for _, r := range waits {
		q.probeRank(r, by)
	}
}

// probeRank probes a rank, unless that was done or the time is over. It rates the rank by the call of the
// rank that waits for it.
func (q *probing) probeRank(rank int, by *probedPeer) {
	w := q.asked[rank]
	if w == &q.self || w == nil && q.over() {
		return
	}
	if w == nil {
		w = &probedPeer{rank: rank, by: by}
		q.asked[rank], q.order = w, append(q.order, w)
		q.probe(w)
	}
	call := &q.self.call
	if by != nil {
		call = &by.call
	}
	switch {
	case w.level >= fails || w.state == waiting || w.past(call):
	case w.state == broken:
		w.level = fails
	case w.state == busy:
		w.level = computing
	default:
		w.level = absent
	}
}

// probe requests a rank's state. A process answers for all its ranks, or for none: a process that has just
// not answered, or not answered often enough, is not probed again.
func (q *probing) probe(w *probedPeer) {
	process, began, asked := q.m.site.process(w.rank), time.Now(), false
	if q.silence[process] < silences && !q.mute[process] {
		asked = true
		var ok bool
		if w.peerState, ok = q.m.peerStateOf(w.rank); ok {
			delete(q.silence, process)
			return
		}
	}
	took := time.Since(began)
	w.level, w.lastSeen = q.m.guess(w.rank)
	switch {
	case !asked:
	case took < quick:
		if w.level == unanswered {
			w.level = gone
		}
	default:
		q.silent += took
		q.silence[process]++
		q.mute[process] = true
	}
}

// guess returns what this rank knows of a rank that does not answer.
func (m *member) guess(rank int) (level faultLevel, lastSeen string) {
	if m.site.marker != nil && m.site.in(rank) && !m.wait.call.pairwise() {
		if !slices.Contains(m.site.marker.Behind(0, nil), rank) {
			return unanswered, "is in this call, and does not answer"
		}
		if before := &m.notes[(m.header.Seq+1)&1]; before.sig != nil && before.seq+1 == m.header.Seq {
			last := before.call()
			return absent, lastEntered(&last)
		}
	}
	if last := m.lastFrom[rank]; last > 0 {
		return unanswered, fmt.Sprintf("was last seen in call %d, and does not answer", last-1)
	}
	return unanswered, "does not answer"
}

// lastEntered describes the last call that a rank entered.
func lastEntered(c *fingerprint.Call) string {
	if c.None() {
		return "has made no call"
	}
	return fmt.Sprintf("last entered call %d, %s", c.Header.Seq, c)
}

// are returns the ranks with a fault level, in the order of probing.
func (q *probing) are(level faultLevel) (out []*probedPeer) {
	for _, w := range q.order {
		if w.level == level {
			out = append(out, w)
		}
	}
	return out
}

// atFault returns the ranks that have not entered the call. If there are none, it returns those that do not
// answer: such a rank may be slow and waiting too, so it must have been probed twice if there was time.
// Otherwise it returns the ranks that compute in their call, or else those that wait for each other; then
// cycle is true.
func (q *probing) atFault() (out []*probedPeer, cycle bool) {
	var stopped, slow []*probedPeer
	for _, w := range q.are(unanswered) {
		if q.silence[q.m.site.process(w.rank)] >= silences {
			stopped = append(stopped, w)
		} else if q.most < q.limit { // else there was no time to find out
			slow = append(slow, w)
		}
	}
	for _, them := range [][]*probedPeer{q.are(absent), stopped, q.are(fails), q.are(gone), slow, q.are(computing)} {
		if len(them) > 0 {
			return them, false
		}
	}
	out = q.cycle()
	return out, len(out) > 0
}

// cycle returns ranks that wait for each other, starting with one that this rank waits for, in this order; or
// nil. This rank may be one of them.
func (q *probing) cycle() []*probedPeer {
	w := &q.self
	waits := q.m.missing()
	for at := map[*probedPeer]int{}; ; {
		if first, again := at[w]; again {
			out := make([]*probedPeer, len(at))
			for w, i := range at {
				out[i] = w
			}
			return out[first:]
		}
		at[w] = len(at)
		i := slices.IndexFunc(waits, func(r int) bool { return q.asked[r] != nil && (q.asked[r] == &q.self || q.asked[r].state == waiting) })
		if i < 0 {
			return nil
		}
		if w = q.asked[waits[i]]; w != &q.self {
			waits = w.waits
		}
	}
}

// finding is the result of the probing.
type finding struct {
	peers    []int  // the ranks at fault; nil: unknown
	via      string // the chain of waits from this rank to them, printed after the ranks that it waits for
	lastSeen string // their last reported states; begins with a comma or a colon
}

// finding returns the result of the probing.
func (q *probing) finding() finding {
	atFault, cycle := q.atFault()
	if cycle {
		return q.findingOfCycle(atFault)
	}
	var r finding
	for i, w := range atFault {
		r.peers = append(r.peers, w.rank)
		switch lastSeen := w.lastSeen; {
		case i >= lastMost:
		case lastSeen != "":
			r.lastSeen += fmt.Sprintf(", rank %d %s", w.rank, lastSeen)
		case w.level == fails:
			r.lastSeen += fmt.Sprintf(", rank %d has failed", w.rank)
		case w.level == computing && w.inCollective() && w.call.Header.Seq == q.self.call.Header.Seq:
			r.lastSeen += fmt.Sprintf(", rank %d is in this call, and waits for no peer", w.rank)
		default:
			r.lastSeen += fmt.Sprintf(", rank %d %s", w.rank, lastEntered(&w.call))
		}
	}
	slices.Sort(r.peers)
	for i, w := range q.are(unanswered) {
		if i < lastMost && !slices.Contains(atFault, w) {
			r.lastSeen += fmt.Sprintf(", rank %d %s", w.rank, w.lastSeen)
		}
	}
	if i := slices.IndexFunc(atFault, func(w *probedPeer) bool { return w.by != nil }); i >= 0 {
		var path []*probedPeer
		for w := atFault[i]; w != nil; w = w.by {
			path = append(path, w)
		}
		slices.Reverse(path)
		r.via = q.way(path)
	}
	if len(atFault) == 0 {
		for _, w := range q.order {
			if w.by == &q.self && w.level != unanswered {
				r.lastSeen += fmt.Sprintf(", rank %d is past this call", w.rank)
			}
		}
	}
	return r
}

func (q *probing) findingOfCycle(cycle []*probedPeer) (r finding) {
	for _, w := range cycle {
		if w != &q.self {
			r.peers = append(r.peers, w.rank)
		}
	}
	slices.Sort(r.peers)
	path := []*probedPeer{&q.self}
	if cycle[0] != &q.self {
		for w := cycle[0]; w != &q.self; w = w.by {
			path = slices.Insert(path, 1, w)
		}
	}
	r.via = q.way(append(append(path, cycle[1:]...), cycle[0]))
	r.lastSeen = ": they wait for each other"
	return r
}

// way describes the chain of waits from this rank: ", which waits for rank 4, which waits for rank 2".
func (q *probing) way(path []*probedPeer) string {
	if len(path) < 3 {
		return ""
	}
	var b strings.Builder
	for i, w := range path[2:] {
		if left := len(path) - 2 - i; i == viaMost-1 && left > 2 {
			fmt.Fprintf(&b, ", which waits through %d more for rank %d", left-1, path[len(path)-1].rank)
			break
		}
		fmt.Fprintf(&b, ", which waits for rank %d", w.rank)
	}
	if missing := q.m.missing(); len(missing) > 1 {
		return fmt.Sprintf(" (rank %d%s)", path[1].rank, strings.TrimPrefix(b.String(), ", which"))
	}
	return b.String()
}

// overdue returns the error of a wait that took too long: it names the ranks at fault. cause is what ended
// the wait; nil: the call's own deadline.
func (w *waiter) overdue(cause *ended) error {
	m := w.m
	waited := time.Since(w.since)
	q := m.probePeers(probingMost, probingEnd)
	if m.team.fate.Load() != sound {
		return errFailed
	}
	patience := time.Duration(0) // others may have given up meanwhile, and have left
	if atFault, _ := q.atFault(); len(atFault) > 0 && atFault[0].level == fails {
		patience = failsMost
	}
	if told := m.awaitReason(patience); told != nil {
		w.told = told // the wait may have ended for another reason, as in Park
		return told
	}
	r := q.finding()
	text := w.why(waited, r.via) + r.lastSeen
	var err *Error
	if cause == nil {
		err = m.failure(ErrTimeout, errors.New(text))
	} else {
		err = m.failure(cause.kind(), fmt.Errorf("%s: %w", text, cause))
	}
	if len(r.peers) > 0 {
		err.Peers = r.peers
	}
	return err
}

// failsMost is how long a rank waits to receive the reason why another rank has failed.
const failsMost = 500 * time.Millisecond

// why describes the wait: "rank 0 waited 10m0s for ranks 1, 2 in all_reduce …". via describes which ranks
// those wait for, or is empty.
func (w *waiter) why(waited time.Duration, via string) string {
	return fmt.Sprintf("rank %d waited %v for %s%s in %s",
		w.m.rank, waited.Round(time.Microsecond), ranges.Text("rank", w.m.missing()), via, w.m.describe())
}

// stall logs that the call has waited long, and for which ranks.
func (w *waiter) stall(waited time.Duration) {
	m := w.m
	r := m.probePeers(stallEnd, stallEnd).finding()
	if r.peers == nil {
		r.peers = m.missing()
	}
	m.team.cfg.Logger.Warn("collective: a call is stalled", "communicator", m.team.cfg.Name, "rank", m.rank,
		"call", w.seq, "operation", m.describe(), "waited", waited, "waits_for", ranges.Text("rank", r.peers), "because", w.why(waited, r.via)+r.lastSeen)
}
