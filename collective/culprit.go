package collective

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/transport"
)

// Whose fault it is that a call does not end: rarely the neighbour's, which as a rule waits as well. A rank that gives up, or
// reports a stall, asks those that it waits for what they do, and those that these wait for, and so on.

// stance is what a rank does at a moment, as it says itself.
type stance struct {
	text  text // its latest call, or another that it was asked for; operation 0: it has made none
	state doing
	come  uint64 // to how many collectives it has come
	waits []int  // waiting: for whom
}

// doing is what a rank does with its latest call.
type doing uint8

const (
	idle    doing = iota // it has none, or that is over
	busy                 // it is in it, and waits for nobody
	waiting              // it is in it, and waits
	broken               // its communicator has failed
)

// inCollective reports whether the rank is in a collective now.
func (s *stance) inCollective() bool {
	return (s.state == busy || s.state == waiting) && s.text.header.Op != 0 && s.text.label.op == 0
}

// past reports whether a rank has done all that one which is in the given call can wait for. Of a message nobody can tell.
func (s *stance) past(call *text) bool {
	seq := call.header.Seq
	return call.label.op == 0 && (s.come > seq+1 || s.come == seq+1 && !s.inCollective())
}

// stance returns what this rank does, with the text of collective seq, or of its latest call if it does not know that one. Anybody
// may ask, at any time.
func (m *member) stance(seq uint64) (s stance) {
	m.textMu.Lock()
	d := &m.diary
	used, waits := d.used, d.waits
	s.come, s.waits = d.come, slices.Clone(d.of)
	if n := m.current; n != nil {
		if other := &m.notes[seq&1]; other.sig != nil && other.seq == seq {
			n = other
		}
		s.text = n.text()
	}
	m.textMu.Unlock()
	m.mu.Lock() // after the call: if that is over by now, it is
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

// answer gives a peer what this rank does.
func (x *executor) answer(seq uint64) []byte {
	s := x.m.stance(seq)
	return encodeAnswer(&s)
}

// stanceOf returns what another rank does, if that can be found out.
func (m *member) stanceOf(rank int) (s stance, ok bool) {
	for _, mate := range *m.team.mates.Load() {
		if mate.rank == rank {
			return mate.stance(latestCall), true
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

// guilt is what a rank has to do with it that a call does not end, from the least to the most.
type guilt uint8

const (
	innocent   guilt = iota // it waits for others itself, or is past the call
	computing               // it is in a call and waits for nobody; as a rule it will soon
	fails                   // its communicator has failed: it tells why
	gone                    // it is known not to answer: it has left, or has not opened its end
	unanswered              // it does not say what it does
	absent                  // it has not come
)

// witness is a rank that was asked.
type witness struct {
	stance
	rank int
	by   *witness // who waits for it; nil: nobody that was asked
	said guilt
	tale string // what it did last, if it does not say so itself
}

// inquiry is the search for the ranks whose fault it is that this one waits.
type inquiry struct {
	m       *member
	begun   time.Time
	most    time.Duration
	limit   time.Duration
	silent  time.Duration // spent on questions that were not answered
	self    witness
	round   int // of questions
	asked   map[int]*witness
	order   []*witness   // of asking
	silence map[int]int  // by process: how many questions of this call were not answered in a row
	mute    map[int]bool // the processes that have not answered in this round of questions
}

// Bounds of an inquiry. A rank that does not answer takes half a second; one that does may take as long where processes get little time.
const (
	inquiryMost = 900 * time.Millisecond // of silence, when somebody is certainly at fault, and of asking again; then nobody is asked any more
	inquiryEnd  = 4 * inquiryMost        // of all: then one that has not answered once may be as slow as one that must be found
	stallEnd    = 400 * time.Millisecond // of all for a report, which the call waits for: one question more, at most
	silences    = 2                      // questions that a process must leave unanswered to be at fault
	quick       = 50 * time.Millisecond  // a question that ends sooner without an answer was none: the rank is known to be gone
	lastMost    = 4                      // culprits whose last calls are told
	viaMost     = 3                      // ranks between this one and a culprit that are told
)

// inquire finds them. Ranks go on meanwhile, and one that was woken just now may say something else a little later: it asks again until
// somebody is at fault or the time is over. One that does not answer may be slow, and wait like all others: it is asked twice, and all others
// are asked as well.
func (m *member) inquire(most, limit time.Duration) *inquiry {
	q := &inquiry{m: m, begun: time.Now(), most: most, limit: limit, silence: map[int]int{}}
	if m.wait.silent >= 0 {
		q.silence[m.site.process(m.wait.silent)] = 1
	}
	q.self = witness{stance: m.stance(latestCall), rank: m.rank}
	for pause := time.Millisecond; ; pause *= 2 {
		q.ask()
		if q.clear() || m.team.fate.Load() != sound || q.over() || time.Since(q.begun)-q.silent+pause >= most {
			return q
		}
		time.Sleep(pause)
	}
}

// clear reports whether somebody is at fault, and nobody who may be slow only would be named.
func (q *inquiry) clear() bool {
	if len(q.are(absent)) > 0 {
		return true
	}
	found := false
	for _, w := range q.order {
		if w.said == unanswered && q.silence[q.m.site.process(w.rank)] < silences {
			return false
		}
		found = found || w.said > computing
	}
	return found
}

// over reports whether nobody must be asked any more. Who has been silent often enough is at fault only when all others were asked once.
func (q *inquiry) over() bool {
	certain := func(w *witness) bool {
		return w.said == absent || w.said == fails || w.said == gone || q.round > 1 && w.said == unanswered && q.silence[q.m.site.process(w.rank)] >= silences
	}
	return time.Since(q.begun) >= q.limit || q.silent >= q.most && slices.ContainsFunc(q.order, certain)
}

// ask follows who waits for whom, from this rank on, and asks each rank once. If the call needs all ranks, those come last that nobody
// has named: of several that have not come a rank waits for one first.
func (q *inquiry) ask() {
	q.round++
	q.asked, q.order, q.mute = map[int]*witness{q.m.rank: &q.self}, nil, map[int]bool{}
	q.follow(&q.self, q.m.missing())
	for i := 0; i < len(q.order); i++ {
		q.follow(q.order[i], q.order[i].waits)
	}
	if call := q.m.wait.call; call.pairwise() || call.Op.Rooted() {
		return
	}
	for r := range q.m.team.size {
		q.question(r, nil)
	}
}

// follow asks the ranks that one waits for.
func (q *inquiry) follow(by *witness, waits []int) {
	for _, r := range waits {
		q.question(r, by)
	}
}

// question asks a rank, unless it was or there is no time left, and judges it from what the one does that waits for it.
func (q *inquiry) question(rank int, by *witness) {
	w := q.asked[rank]
	if w == &q.self || w == nil && q.over() {
		return
	}
	if w == nil {
		w = &witness{rank: rank, by: by}
		q.asked[rank], q.order = w, append(q.order, w)
		q.hear(w)
	}
	call := &q.self.text
	if by != nil {
		call = &by.text
	}
	switch {
	case w.said >= fails || w.state == waiting || w.past(call):
	case w.state == broken:
		w.said = fails
	case w.state == busy:
		w.said = computing
	default:
		w.said = absent
	}
}

// hear asks a rank. A process answers for all its ranks, or for none: one that has just been silent, or often enough, is not asked again.
func (q *inquiry) hear(w *witness) {
	process, began, asked := q.m.site.process(w.rank), time.Now(), false
	if q.silence[process] < silences && !q.mute[process] {
		asked = true
		var ok bool
		if w.stance, ok = q.m.stanceOf(w.rank); ok {
			delete(q.silence, process)
			return
		}
	}
	took := time.Since(began)
	w.said, w.tale = q.m.guess(w.rank)
	switch {
	case !asked:
	case took < quick:
		if w.said == unanswered {
			w.said = gone
		}
	default:
		q.silent += took
		q.silence[process]++
		q.mute[process] = true
	}
}

// guess says of a rank that does not answer what this one knows of it.
func (m *member) guess(rank int) (said guilt, tale string) {
	if m.site.marker != nil && m.site.in(rank) && !m.wait.call.pairwise() {
		if !slices.Contains(m.site.marker.Behind(0, nil), rank) {
			return unanswered, "is in this call, and does not answer"
		}
		if before := &m.notes[(m.header.Seq+1)&1]; before.sig != nil && before.seq+1 == m.header.Seq {
			last := before.text()
			return absent, cameLast(&last)
		}
	}
	if heard := m.heard[rank]; heard > 0 {
		return unanswered, fmt.Sprintf("was heard of last in call %d, and does not answer", heard-1)
	}
	return unanswered, "does not answer"
}

// cameLast says to which call a rank came last.
func cameLast(t *text) string {
	if t.header.Op == 0 {
		return "has made no call"
	}
	return fmt.Sprintf("came last to call %d, %s", t.header.Seq, describe(&t.header, &t.label))
}

// are returns the ranks of a guilt, in the order of asking.
func (q *inquiry) are(said guilt) (out []*witness) {
	for _, w := range q.order {
		if w.said == said {
			out = append(out, w)
		}
	}
	return out
}

// culprits returns those who have not come. If there are none it is those who do not answer: who does not may be slow and wait as well, so
// it must have been asked twice, if there was the time. Then it is those who compute, in their call; then those of a circle, which is true if
// they are.
func (q *inquiry) culprits() (out []*witness, circle bool) {
	var stopped, slow []*witness
	for _, w := range q.are(unanswered) {
		if q.silence[q.m.site.process(w.rank)] >= silences {
			stopped = append(stopped, w)
		} else if q.most < q.limit { // else there was no time to know
			slow = append(slow, w)
		}
	}
	for _, them := range [][]*witness{q.are(absent), stopped, q.are(fails), q.are(gone), slow, q.are(computing)} {
		if len(them) > 0 {
			return them, false
		}
	}
	out = q.circle()
	return out, len(out) > 0
}

// circle returns ranks that wait for each other, from one for which this rank waits, in this order; or nil. This one may be among them.
func (q *inquiry) circle() []*witness {
	w := &q.self
	waits := q.m.missing()
	for at := map[*witness]int{}; ; {
		if first, again := at[w]; again {
			out := make([]*witness, len(at))
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

// ruling is what an inquiry comes to.
type ruling struct {
	peers []int  // whose fault it is; nil: that was not to be found out
	via   string // how this rank comes to wait for them, to stand behind the ranks that it waits for
	tales string // what they did last; begins with a comma or a colon
}

// rule says it.
func (q *inquiry) rule() ruling {
	culprits, circle := q.culprits()
	if circle {
		return q.ruleOfCircle(culprits)
	}
	var r ruling
	for i, w := range culprits {
		r.peers = append(r.peers, w.rank)
		switch tale := w.tale; {
		case i >= lastMost:
		case tale != "":
			r.tales += fmt.Sprintf(", rank %d %s", w.rank, tale)
		case w.said == fails:
			r.tales += fmt.Sprintf(", rank %d has failed", w.rank)
		case w.said == computing && w.inCollective() && w.text.header.Seq == q.self.text.header.Seq:
			r.tales += fmt.Sprintf(", rank %d is in this call, and waits for nobody", w.rank)
		default:
			r.tales += fmt.Sprintf(", rank %d %s", w.rank, cameLast(&w.text))
		}
	}
	slices.Sort(r.peers)
	for i, w := range q.are(unanswered) {
		if i < lastMost && !slices.Contains(culprits, w) {
			r.tales += fmt.Sprintf(", rank %d %s", w.rank, w.tale)
		}
	}
	if i := slices.IndexFunc(culprits, func(w *witness) bool { return w.by != nil }); i >= 0 {
		var path []*witness
		for w := culprits[i]; w != nil; w = w.by {
			path = append(path, w)
		}
		slices.Reverse(path)
		r.via = q.way(path)
	}
	if len(culprits) == 0 {
		for _, w := range q.order {
			if w.by == &q.self && w.said != unanswered {
				r.tales += fmt.Sprintf(", rank %d is past this call", w.rank)
			}
		}
	}
	return r
}

func (q *inquiry) ruleOfCircle(circle []*witness) (r ruling) {
	for _, w := range circle {
		if w != &q.self {
			r.peers = append(r.peers, w.rank)
		}
	}
	slices.Sort(r.peers)
	path := []*witness{&q.self}
	if circle[0] != &q.self {
		for w := circle[0]; w != &q.self; w = w.by {
			path = slices.Insert(path, 1, w)
		}
	}
	r.via = q.way(append(append(path, circle[1:]...), circle[0]))
	r.tales = ": they wait for each other"
	return r
}

// way says who waits for whom, from this rank on: ", which waits for rank 4, which waits for rank 2".
func (q *inquiry) way(path []*witness) string {
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

// overdue is the error of a wait that took too long: it names the culprits. cause is what ended it: nil is the call's own deadline.
func (w *waiter) overdue(cause *ended) error {
	m := w.m
	waited := time.Since(w.since)
	q := m.inquire(inquiryMost, inquiryEnd)
	if m.team.fate.Load() != sound {
		return errFailed
	}
	patience := time.Duration(0) // others may have given up meanwhile, and have left
	if culprits, _ := q.culprits(); len(culprits) > 0 && culprits[0].said == fails {
		patience = failsMost
	}
	if told := m.hear(patience); told != nil {
		w.told = told // the wait may have had another end, as in Park
		return told
	}
	r := q.rule()
	text := w.why(waited, r.via) + r.tales
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

// failsMost is how long a rank waits to be told why another one has failed.
const failsMost = 500 * time.Millisecond

// why says what the wait was for: "rank 0 waited 10m0s for ranks 1, 2 in all_reduce …". via says for whom those wait, or nothing.
func (w *waiter) why(waited time.Duration, via string) string {
	return fmt.Sprintf("rank %d waited %v for %s%s in %s",
		w.m.rank, waited.Round(time.Microsecond), ranges.Text("rank", w.m.missing()), via, w.m.describe())
}

// stall logs that the call has waited long, and for whom.
func (w *waiter) stall(waited time.Duration) {
	m := w.m
	r := m.inquire(stallEnd, stallEnd).rule()
	if r.peers == nil {
		r.peers = m.missing()
	}
	m.team.cfg.Logger.Warn("collective: a call is stalled", "communicator", m.team.cfg.Name, "rank", m.rank,
		"call", w.seq, "operation", m.describe(), "waited", waited, "waits_for", ranges.Text("rank", r.peers), "because", w.why(waited, r.via)+r.tales)
}
