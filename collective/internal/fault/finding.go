package fault

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// Finding is the result of a search. The zero value is that of no search.
type Finding struct {
	Ranks  []int // the ranks at fault, in ascending order; nil: unknown
	Failed bool  // their communicators have failed: they report the reason

	via      string // the chain of waits to them, printed after the ranks that the waiting rank waits for
	lastSeen string // their last reported states; begins with a comma or a colon
}

const (
	lastMost = 4 // ranks at fault whose last calls are reported
	viaMost  = 3 // ranks between the waiting rank and a rank at fault that are reported
)

// Probe searches for the ranks that are the reason of the wait, for about four seconds at most. If the
// communicator fails meanwhile, it returns at once.
func (w *Wait) Probe() Finding { return w.search(roundsMost, searchMost).finding() }

// ProbeBriefly is Probe for a wait that goes on afterwards: what the call waits for may arrive meanwhile. It
// takes less than a second, and may blame fewer ranks.
func (w *Wait) ProbeBriefly() Finding { return w.search(briefMost, briefMost).finding() }

// Describe describes the wait and what was found: "rank 0 waited 10m0s for ranks 1, 2 in all_reduce …".
func (w *Wait) Describe(waited time.Duration, f Finding) string {
	return fmt.Sprintf("rank %d waited %v for %s%s in %v%s", w.Rank, waited.Round(time.Microsecond),
		ranges.Text("rank", w.Peers.Missing()), f.via, &w.Call, f.lastSeen)
}

// finding returns the result of the search.
func (q *search) finding() Finding {
	atFault, cycle := q.atFault()
	if cycle {
		return q.findingOfCycle(atFault)
	}
	f := Finding{Failed: len(atFault) > 0 && atFault[0].level == failed}
	for i, s := range atFault {
		f.Ranks = append(f.Ranks, s.rank)
		if i < lastMost {
			f.lastSeen += fmt.Sprintf(", rank %d %s", s.rank, q.lastSeen(s))
		}
	}
	slices.Sort(f.Ranks)
	for i, s := range q.with(silent) {
		if i < lastMost && !slices.Contains(atFault, s) {
			f.lastSeen += fmt.Sprintf(", rank %d %s", s.rank, s.lastSeen)
		}
	}
	if i := slices.IndexFunc(atFault, func(s *suspect) bool { return s.by != nil }); i >= 0 {
		var path []*suspect
		for s := atFault[i]; s != nil; s = s.by {
			path = append(path, s)
		}
		slices.Reverse(path)
		f.via = q.way(path)
	}
	if len(atFault) == 0 {
		for _, s := range q.order {
			if s.by == &q.self && s.level != silent {
				f.lastSeen += fmt.Sprintf(", rank %d is past this call", s.rank)
			}
		}
	}
	return f
}

// lastSeen describes what a rank at fault did last.
func (q *search) lastSeen(s *suspect) string {
	switch {
	case s.lastSeen != "":
		return s.lastSeen
	case s.level == failed:
		return "has failed"
	case s.level == computing && s.inCollective() && s.Call.Header.Seq == q.Call.Header.Seq:
		return "is in this call, and waits for no peer"
	}
	return lastEntered(&s.Call)
}

func (q *search) findingOfCycle(cycle []*suspect) (f Finding) {
	for _, s := range cycle {
		if s != &q.self {
			f.Ranks = append(f.Ranks, s.rank)
		}
	}
	slices.Sort(f.Ranks)
	path := []*suspect{&q.self}
	if cycle[0] != &q.self {
		for s := cycle[0]; s != &q.self; s = s.by {
			path = slices.Insert(path, 1, s)
		}
	}
	f.via = q.way(append(append(path, cycle[1:]...), cycle[0]))
	f.lastSeen = ": they wait for each other"
	return f
}

// way describes the chain of waits from this rank: ", which waits for rank 4, which waits for rank 2".
func (q *search) way(path []*suspect) string {
	if len(path) < 3 {
		return ""
	}
	var b strings.Builder
	for i, s := range path[2:] {
		if left := len(path) - 2 - i; i == viaMost-1 && left > 2 {
			fmt.Fprintf(&b, ", which waits through %d more for rank %d", left-1, path[len(path)-1].rank)
			break
		}
		fmt.Fprintf(&b, ", which waits for rank %d", s.rank)
	}
	if len(q.Peers.Missing()) > 1 {
		return fmt.Sprintf(" (rank %d%s)", path[1].rank, strings.TrimPrefix(b.String(), ", which"))
	}
	return b.String()
}
