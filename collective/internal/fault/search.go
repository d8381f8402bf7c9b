package fault

import (
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
)

// suspicion is how likely a rank is the reason that a call does not end, from the least to the most. The
// package's documentation describes the levels.
type suspicion uint8

const (
	notSuspected suspicion = iota
	computing
	failed
	gone
	silent
	absent
)

// suspect is a rank that was probed.
type suspect struct {
	State
	rank     int
	by       *suspect // the rank that waits for it; nil: none of those that were probed
	level    suspicion
	lastSeen string // its last known state, if it does not report its state itself
}

// search is the search for the ranks that are the reason that a rank waits.
type search struct {
	*Wait
	begun   time.Time
	most    time.Duration
	limit   time.Duration
	waited  time.Duration // time spent on probes that were not answered
	self    suspect
	round   int // number of the current round of probes
	probed  map[int]*suspect
	order   []*suspect   // in the order of probing
	silence map[int]int  // by process: consecutive probes of this call that were not answered
	mute    map[int]bool // the processes that have not answered in this round
}

// Bounds of the search. A probe of a rank that does not answer takes half a second; one that is answered may
// take as long where processes get little CPU time.
const (
	// unanswered time, once some rank is certainly at fault, and time for repeated rounds; after that the
	// search stops
	roundsMost = 900 * time.Millisecond
	// total time: enough to distinguish a peer that was slow once from one that must be reported
	searchMost = 4 * roundsMost
	// total time for a stall report, for which the call has to wait: at most one more probe
	briefMost = 400 * time.Millisecond
	silences  = 2                     // probes that a process must leave unanswered to be at fault
	quick     = 50 * time.Millisecond // a probe that fails sooner was not sent: the rank is known to be gone
)

// search probes the ranks until some rank is found to be at fault or the time is over. Ranks continue
// meanwhile, and a rank that was woken just now may report another state a little later, so the rounds are
// repeated. A rank that does not answer may just be slow, and wait like all others: it is probed twice, and
// every other rank is probed too.
func (w *Wait) search(most, limit time.Duration) *search {
	q := &search{Wait: w, begun: time.Now(), most: most, limit: limit, silence: map[int]int{}}
	if w.Silent >= 0 {
		q.silence[w.Peers.Process(w.Silent)] = 1
	}
	q.self = suspect{State: State{Call: w.Call}, rank: w.Rank}
	for pause := time.Millisecond; ; pause *= 2 {
		q.probeAll()
		if q.clear() || w.Peers.Failed() || q.over() || time.Since(q.begun)-q.waited+pause >= most {
			return q
		}
		time.Sleep(pause)
	}
}

// clear reports whether some rank is at fault, and no rank would be blamed that may only be slow.
func (q *search) clear() bool {
	if len(q.with(absent)) > 0 {
		return true
	}
	found := false
	for _, s := range q.order {
		if s.level == silent && !q.stopped(s) {
			return false
		}
		found = found || s.level > computing
	}
	return found
}

// stopped reports whether a rank has not answered often enough to be blamed.
func (q *search) stopped(s *suspect) bool { return q.silence[q.Peers.Process(s.rank)] >= silences }

// over reports whether probing can stop. A peer that did not answer is blamed only after every other peer has
// been probed.
func (q *search) over() bool {
	certain := func(s *suspect) bool {
		switch s.level {
		case absent, failed, gone:
			return true
		case silent:
			return q.round > 1 && q.stopped(s)
		}
		return false
	}
	return time.Since(q.begun) >= q.limit || q.waited >= q.most && slices.ContainsFunc(q.order, certain)
}

// probeAll follows the waits, starting with those of this rank, and probes each rank once. If the call needs
// all ranks, those that no other rank waits for are probed last: a rank waits for one of several missing
// ranks first.
func (q *search) probeAll() {
	q.round++
	q.probed, q.order, q.mute = map[int]*suspect{q.Rank: &q.self}, nil, map[int]bool{}
	q.follow(&q.self, q.Peers.Missing())
	for i := 0; i < len(q.order); i++ {
		q.follow(q.order[i], q.order[i].Waits)
	}
	if q.Call.Pair != 0 || q.Call.Op().Rooted() {
		return
	}
	for r := range q.Size {
		q.suspect(r, nil)
	}
}

// follow probes the ranks that a rank waits for.
func (q *search) follow(by *suspect, waits []int) {
	for _, r := range waits {
		q.suspect(r, by)
	}
}

// suspect probes a rank, unless that was done or the time is over. It rates the rank by the call of the rank
// that waits for it.
func (q *search) suspect(rank int, by *suspect) {
	s := q.probed[rank]
	if s == &q.self || s == nil && q.over() {
		return
	}
	if s == nil {
		s = &suspect{rank: rank, by: by}
		q.probed[rank], q.order = s, append(q.order, s)
		q.probe(s)
	}
	call := &q.Call
	if by != nil {
		call = &by.Call
	}
	switch {
	case s.level >= failed || s.Activity == Waiting || s.past(call):
	case s.Activity == Broken:
		s.level = failed
	case s.Activity == Busy:
		s.level = computing
	default:
		s.level = absent
	}
}

// probe requests a rank's state. A process answers for all its ranks, or for none: a process that has just
// not answered, or not answered often enough, is not probed again.
func (q *search) probe(s *suspect) {
	process, began := q.Peers.Process(s.rank), time.Now()
	sent := q.silence[process] < silences && !q.mute[process]
	if sent {
		var ok bool
		if s.State, ok = q.Peers.State(s.rank); ok {
			s.validate(s.rank, q.Size)
			delete(q.silence, process)
			return
		}
		s.State = State{}
	}
	took := time.Since(began)
	s.level, s.lastSeen = q.Peers.LastSeen(s.rank).rate()
	switch {
	case !sent:
	case took < quick:
		if s.level == silent {
			s.level = gone
		}
	default:
		q.waited += took
		q.silence[process]++
		q.mute[process] = true
	}
}

// rate returns the level of suspicion of a rank that does not answer, and what is known of it.
func (l LastSeen) rate() (level suspicion, lastSeen string) {
	switch {
	case l.Entered:
		return silent, "is in this call, and does not answer"
	case !l.Previous.None():
		return absent, lastEntered(&l.Previous)
	case l.Frame > 0:
		return silent, fmt.Sprintf("was last seen in call %d, and does not answer", l.Frame-1)
	}
	return silent, "does not answer"
}

// lastEntered describes the last call that a rank entered.
func lastEntered(c *fingerprint.Call) string {
	if c.None() {
		return "has made no call"
	}
	return fmt.Sprintf("last entered call %d, %v", c.Header.Seq, c)
}

// with returns the suspects of a level, in the order of probing.
func (q *search) with(level suspicion) (out []*suspect) {
	for _, s := range q.order {
		if s.level == level {
			out = append(out, s)
		}
	}
	return out
}

// atFault returns the ranks that have not entered the call. If there are none, it returns those that do not
// answer: such a rank may be slow and waiting too, so it must have been probed twice if there was time.
// Otherwise it returns the ranks that compute in their call, or else those that wait for each other; then
// cycle is true.
func (q *search) atFault() (out []*suspect, cycle bool) {
	var stopped, slow []*suspect
	for _, s := range q.with(silent) {
		if q.stopped(s) {
			stopped = append(stopped, s)
		} else if q.most < q.limit { // else there was no time to find out
			slow = append(slow, s)
		}
	}
	for _, them := range [][]*suspect{q.with(absent), stopped, q.with(failed), q.with(gone), slow, q.with(computing)} {
		if len(them) > 0 {
			return them, false
		}
	}
	out = q.cycle()
	return out, len(out) > 0
}

// cycle returns ranks that wait for each other, starting with one that this rank waits for, in this order; or
// nil. This rank may be one of them.
func (q *search) cycle() []*suspect {
	s := &q.self
	waits := q.Peers.Missing()
	for at := map[*suspect]int{}; ; {
		if first, again := at[s]; again {
			out := make([]*suspect, len(at))
			for s, i := range at {
				out[i] = s
			}
			return out[first:]
		}
		at[s] = len(at)
		i := slices.IndexFunc(waits, func(r int) bool {
			p := q.probed[r]
			return p != nil && (p == &q.self || p.Activity == Waiting)
		})
		if i < 0 {
			return nil
		}
		if s = q.probed[waits[i]]; s != &q.self {
			waits = s.Waits
		}
	}
}
