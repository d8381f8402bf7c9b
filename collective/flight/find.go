package flight

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Report is the result of merging the records of one epoch of a job.
type Report struct {
	Job     string   `json:"job"`
	Epoch   uint32   `json:"epoch"`
	Workers int      `json:"workers"`           // of the job
	Missing []Member `json:"missing,omitempty"` // those that left no record
	Parts   []Part   `json:"communicators"`     // by name, those whose ranks diverge first
}

// Kind classifies how the ranks of a communicator diverge.
type Kind string

// The kinds, the most severe first.
const (
	Differ   Kind = "differ"   // they make different calls with the same number
	Crossed  Kind = "crossed"  // two ranks wait for each other in sends and receives
	Absent   Kind = "absent"   // some have not entered a call that others are in
	Inside   Kind = "inside"   // all are in the same call, and it does not end, or failed
	Slow     Kind = "slow"     // all make the same calls; the others wait for one rank
	Together Kind = "together" // all have completed the same calls
)

var kinds = []Kind{Differ, Crossed, Absent, Inside, Slow, Together}

// Part is where the ranks of one communicator diverge.
type Part struct {
	Comm  string `json:"comm"`
	Epoch uint32 `json:"epoch"`
	Size  int    `json:"size"`
	Kind  Kind   `json:"kind"`
	// Common is how many collectives all recorded ranks have completed, and Last describes the last of these,
	// if it is still recorded.
	Common uint64 `json:"common"`
	Last   string `json:"last,omitempty"`
	// At is the number of the collective where they diverge, if Kind is Differ, Absent or Inside.
	At uint64 `json:"at"`
	// Field is the field that differs, and Calls are the different calls; the one that most ranks make is
	// first.
	Field string  `json:"field,omitempty"`
	Calls []Group `json:"calls,omitempty"`
	// Blamed are the ranks that the others wait for, or that are slow.
	Blamed []int `json:"blamed,omitempty"`
	// Text is the finding in sentences.
	Text []string `json:"text"`
	Rows []Row    `json:"ranks"`
}

// Group is the ranks that make the same call.
type Group struct {
	Ranks []int  `json:"ranks"`
	Call  string `json:"call"`
	Value string `json:"value"` // of the field that differs
}

// Row is one rank.
type Row struct {
	Rank int    `json:"rank"`
	Who  string `json:"who"`
	// collectives that it has completed or begun beyond those of the rank that is furthest behind
	Ahead  uint64  `json:"ahead"`
	Text   string  `json:"text"`
	Waited float64 `json:"waited_s"` // seconds that it waited in the recorded calls
	Span   float64 `json:"span_s"`   // seconds from the first to the last recorded moment
}

// Find merges the files of one epoch.
func Find(files []File) *Report {
	out := &Report{}
	byComm := map[string][]*view{}
	seen := map[int]bool{}
	var members []Member
	for i := range files {
		f := &files[i]
		out.Job, out.Epoch = f.Job, f.Epoch
		seen[f.Worker] = true
		if len(f.Members) > len(members) {
			members = f.Members
		}
		for j := range f.Ranks {
			r := &f.Ranks[j]
			key := fmt.Sprintf("%s\x00%d", r.Comm, r.Epoch)
			byComm[key] = append(byComm[key], newView(f, r))
		}
	}
	out.Workers = max(len(members), len(files))
	for _, m := range members {
		if !seen[m.Worker] {
			out.Missing = append(out.Missing, m)
		}
	}
	for _, views := range byComm {
		out.Parts = append(out.Parts, find(views, members))
	}
	slices.SortFunc(out.Parts, func(a, b Part) int {
		return cmp.Or(cmp.Compare(slices.Index(kinds, a.Kind), slices.Index(kinds, b.Kind)), cmp.Compare(a.Comm, b.Comm),
			cmp.Compare(a.Epoch, b.Epoch))
	})
	return out
}

// view is a rank's record, prepared for comparison.
type view struct {
	*Rank
	file  *File
	begun uint64 // collectives that it has begun
	over  uint64 // and completed
	now   *Call  // the call that it is in, or that failed; nil: none
}

func newView(f *File, r *Rank) *view {
	v := &view{Rank: r, file: f, begun: r.Entered - min(uint64(r.Queued), r.Entered)}
	v.over = v.begun
	if c := r.collective(len(r.Calls) - 1); c != nil {
		v.begun = c.Seq + 1
		if v.over = v.begun; c.State != Done {
			v.over--
		}
	}
	if n := len(r.Calls); n > 0 && r.Calls[n-1].State != Done {
		v.now = &r.Calls[n-1]
	}
	return v
}

// call returns the collective with this number, or nil if the rank has not begun it or no longer has its
// record.
func (v *view) call(seq uint64) *Call {
	for i := len(v.Calls) - 1; i >= 0; i-- {
		if c := &v.Calls[i]; !c.Pair && c.Seq == seq {
			return c
		}
	}
	return nil
}

// who names the worker of a rank.
func who(rank int, members []Member) string {
	for i := range members {
		if m := &members[i]; rank >= m.First && rank < m.First+m.Replicas {
			return m.String()
		}
	}
	return "an unknown worker"
}

// find determines where the ranks of one communicator diverge.
func find(views []*view, members []Member) Part {
	slices.SortStableFunc(views, func(a, b *view) int { return a.Rank.Rank - b.Rank.Rank })
	views = slices.CompactFunc(views, func(a, b *view) bool { return a.Rank.Rank == b.Rank.Rank })
	first := views[0]
	s := &search{
		views: views, members: members,
		Part: Part{Comm: first.Comm, Epoch: first.Rank.Epoch, Size: first.Size, Kind: Together},
	}
	s.Common = first.over
	for _, v := range views {
		s.Common = min(s.Common, v.over)
	}
	for _, v := range views {
		if s.Common > 0 && s.Last == "" {
			if c := v.call(s.Common - 1); c != nil {
				s.Last = c.String()
			}
		}
	}
	s.At = s.Common
	s.lost()
	stuck := !s.moves()
	_ = s.differ() || stuck && (s.crossed() || s.absent() || s.inside()) || s.slow() || s.together()
	s.rows()
	return s.Part
}

// search is the search in one communicator.
type search struct {
	Part
	views      []*view
	members    []Member
	unrecorded []int // ranks without a record
}

const unrecordedMax = 1 << 10 // listed one by one

func (s *search) lost() {
	here := map[int]bool{}
	for _, v := range s.views {
		here[v.Rank.Rank] = true
	}
	for r := 0; r < s.Size && len(s.unrecorded) < unrecordedMax; r++ {
		if !here[r] {
			s.unrecorded = append(s.unrecorded, r)
		}
	}
}

func (s *search) add(format string, args ...any) {
	s.Text = append(s.Text, fmt.Sprintf(format, args...))
}

// differ looks for the first collective in which the ranks' calls differ.
func (s *search) differ() bool {
	last := uint64(0)
	for _, v := range s.views {
		last = max(last, v.begun)
	}
	const back = callsMax // no record goes back further
	for seq := s.Common - min(s.Common, back); seq < last && seq < s.Common+back; seq++ {
		if s.differAt(seq) {
			return true
		}
	}
	return false
}

func (s *search) differAt(seq uint64) bool {
	type group struct {
		call  *Call
		views []*view
	}
	var groups []*group
	for _, v := range s.views {
		c := v.call(seq)
		if c == nil {
			continue
		}
		i := slices.IndexFunc(groups, func(g *group) bool { return differ(g.call, c) == nil })
		if i < 0 {
			i, groups = len(groups), append(groups, &group{call: c})
		}
		groups[i].views = append(groups[i].views, v)
	}
	if len(groups) < 2 {
		return false
	}
	slices.SortStableFunc(groups, func(a, b *group) int { return len(b.views) - len(a.views) })
	what := differ(groups[0].call, groups[1].call)
	s.Kind, s.At, s.Field = Differ, seq, what.name
	for _, g := range groups {
		out := Group{Call: g.call.String(), Value: what.text(g.call)}
		for _, v := range g.views {
			out.Ranks = append(out.Ranks, v.Rank.Rank)
		}
		s.Calls = append(s.Calls, out)
		s.add("%s %s", calls(out.Ranks), g.call)
	}
	s.add("the %s differs: %s and %s", what.name, s.Calls[0].Value, s.Calls[1].Value)
	a, b := groups[0], groups[1]
	if a.views[0].made(b.call, seq) && b.views[0].made(a.call, seq) {
		s.add("both have made both calls before: they probably make them in different orders")
	}
	return true
}

// made reports whether a rank has made a call like c before number seq.
func (v *view) made(c *Call, seq uint64) bool {
	return slices.ContainsFunc(v.Calls, func(old Call) bool {
		return !old.Pair && old.Seq < seq && differ(&old, c) == nil
	})
}

// stuckTime is how long a rank must have been in a call for that to be significant.
const stuckTime = time.Second

// moves reports whether the ranks were making progress when they wrote their records: none has failed, is
// missing, or has been in a call for long. Then it is not significant that some are ahead of others.
func (s *search) moves() bool {
	return len(s.unrecorded) == 0 && !slices.ContainsFunc(s.views, func(v *view) bool {
		if v.now == nil {
			return false
		}
		return v.now.State == Failed || v.file.At.IsZero() || !v.now.Start.IsZero() && v.file.At.Sub(v.now.Start) >= stuckTime
	})
}

// crossed looks for two ranks that wait for each other in calls that do not match.
func (s *search) crossed() bool {
	for _, a := range s.views {
		if a.now == nil || !a.now.Pair {
			continue
		}
		for _, b := range s.views {
			if b.Rank.Rank != a.now.Peer || b.now == nil || !b.needs(a.Rank.Rank) || match(a, b) {
				continue
			}
			s.Kind, s.Blamed = Crossed, []int{a.Rank.Rank, b.Rank.Rank}
			s.add("rank %d is in %s, rank %d in %s: they wait for each other", a.Rank.Rank, a.now, b.Rank.Rank, b.now)
			return true
		}
	}
	return false
}

// needs reports whether the current call of a rank waits for another rank.
func (v *view) needs(rank int) bool {
	if v.now.Pair {
		return v.now.Peer == rank
	}
	return len(v.now.WaitsFor) == 0 || slices.Contains(v.now.WaitsFor, rank)
}

// match reports whether two ranks are in the two halves of one message.
func match(a, b *view) bool {
	return b.now.Pair && a.now.Op != b.now.Op && b.now.Peer == a.Rank.Rank && a.now.Seq == b.now.Seq
}

// absent looks for ranks that have not entered the collective that others are in, or have completed.
func (s *search) absent() bool {
	var in, out []int
	for _, v := range s.views {
		if v.begun > s.Common {
			in = append(in, v.Rank.Rank)
		} else {
			out = append(out, v.Rank.Rank)
		}
	}
	waited := false // a rank waits for the missing ranks, which may have been ahead
	for _, v := range s.views {
		if v.now != nil {
			waited = waited || len(v.now.WaitsFor) == 0 ||
				slices.ContainsFunc(s.unrecorded, func(r int) bool { return slices.Contains(v.now.WaitsFor, r) })
		}
	}
	if len(in) == 0 || len(out) == 0 && (len(s.unrecorded) == 0 || !waited) {
		return false
	}
	s.Kind, s.Blamed = Absent, slices.Clone(out)
	text := ""
	for _, v := range s.views {
		if c := v.call(s.Common); c != nil {
			text = ", " + c.String()
			break
		}
	}
	if len(out) > 0 {
		s.add("%s not entered call %d%s, which %s in", have(out), s.Common, text, are(in))
		for _, v := range s.views {
			if v.begun <= s.Common && v.now != nil {
				s.add("rank %d is in %s instead", v.Rank.Rank, v.now)
			}
		}
	}
	if len(s.unrecorded) > 0 && waited {
		s.Blamed = append(s.Blamed, s.unrecorded...)
		slices.Sort(s.Blamed)
		s.add("%s left no record: killed, stopped, or its records are on another host; %s in call %d%s", have(s.unrecorded),
			are(in), s.Common, text)
	}
	return true
}

// inside checks whether all ranks are in one collective that does not end.
func (s *search) inside() bool {
	var c *Call
	failed := 0
	for _, v := range s.views {
		if own := v.call(s.Common); own != nil && own.State != Done {
			c = own
			if own.State == Failed {
				failed++
			}
		}
	}
	switch {
	case c == nil:
		return false
	case failed == len(s.views):
		s.add("all were in call %d, %s, and it failed", s.Common, c)
	default:
		s.add("all are in call %d, %s", s.Common, c)
	}
	s.Kind = Inside
	return true
}

// A rank is slow if it waits at most a quarter of the time that the others wait, and the others wait at least
// a fifth of their time.
const (
	slowShare   = 0.25
	waitedShare = 0.2
)

// slow looks for a rank that hardly ever waits, while the others do.
func (s *search) slow() bool {
	shares := make([]float64, len(s.views))
	for i, v := range s.views {
		waited, span := v.waited()
		if span <= 0 {
			return false
		}
		shares[i] = waited.Seconds() / span.Seconds()
	}
	if len(shares) < 2 {
		return false
	}
	least := slices.Index(shares, slices.Min(shares))
	others := slices.Sorted(slices.Values(slices.Delete(slices.Clone(shares), least, least+1)))
	median := others[(len(others)-1)/2]
	if median < waitedShare || shares[least] > slowShare*median {
		return false
	}
	v := s.views[least]
	s.Kind, s.Blamed = Slow, []int{v.Rank.Rank}
	s.add("rank %d waits for %.2g %% of its time, the others for %.2g %%: they wait for it", v.Rank.Rank,
		100*shares[least], 100*median)
	return true
}

// waited returns how long a rank waited in its recorded calls, and the time from its first to its last
// recorded moment.
func (v *view) waited() (waited, span time.Duration) {
	var first, last time.Time
	for i := range v.Calls {
		c := &v.Calls[i]
		if c.Start.IsZero() || c.End.Before(c.Start) {
			continue
		}
		if first.IsZero() {
			first = c.Start
		}
		last = c.End
		waited += c.End.Sub(c.Start)
	}
	return waited, last.Sub(first)
}

func (s *search) together() bool {
	s.add("the ranks do not diverge")
	if s.Common == 0 {
		s.Text[0] = "no collective was called"
	}
	if slices.ContainsFunc(s.views, func(v *view) bool { return v.now != nil }) {
		s.Text[0] += "; they were making progress"
	}
	return true
}

// described reports whether a call with this number was described already.
func (s *search) described(c *Call) bool {
	if c.Pair {
		return false
	}
	return c.Seq == s.At && s.Kind != Together && s.Kind != Slow && s.Kind != Crossed ||
		c.Seq+1 == s.Common && s.Last == c.String()
}

// rows describes what every rank did last.
func (s *search) rows() {
	for _, v := range s.views {
		world := v.of(v.Rank.Rank)
		waited, span := v.waited()
		s.Rows = append(s.Rows, Row{
			Rank: v.Rank.Rank, Who: who(world, s.members), Ahead: v.begun - min(v.begun, s.Common), Text: v.text(s.described),
			Waited: waited.Seconds(), Span: span.Seconds(),
		})
	}
	for _, r := range s.unrecorded {
		s.Rows = append(s.Rows, Row{Rank: r, Who: who(s.views[0].of(r), s.members), Text: "left no record"})
	}
	slices.SortStableFunc(s.Rows, func(a, b Row) int { return a.Rank - b.Rank })
}
