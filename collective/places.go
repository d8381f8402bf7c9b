package collective

import (
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/transport"
)

// site is the placement of the ranks of a communicator, seen from one rank, and what that rank shares with
// its domain.
type site struct {
	domain []int        // the ranks that access each other's memory, this one included
	places []plan.Place // of all ranks; nil: one process
	// oneProcess reports that all ranks are in one process: a call that all ranks have entered depends on no other
	// process, and runs to its end on all of them.
	oneProcess bool
	oneWorker  bool // the whole domain is in this process
	stageBytes int  // of one half of a rank's staging buffer; the same in all domains
	where      chooser.Where
}

// spreadStageBytes is how many bytes of one half of a staging buffer a call uses where there are several domains:
// every transport has at least as many. The plan must be the same in all domains, and a rank that is alone in
// its domain has no staging buffer to measure.
const spreadStageBytes = 32 << 10

// findSite returns the site of a local rank. Places and domains are shared by all local ranks.
func (t *team) findSite(end transport.Endpoint) site {
	size, rank := end.Size(), end.Rank()
	offers := end.Capabilities()
	s := site{places: planPlaces(offers.Places)}
	if end.Memory() != nil {
		s.domain = t.domain(&offers, rank)
	}
	if len(s.domain) > 1 {
		s.stageBytes = offers.StagingBytes / 2
	} else {
		s.domain = []int{rank}
	}
	elsewhere := func(r int) bool { return s.places != nil && s.places[r].Worker != s.places[rank].Worker }
	s.oneWorker = !slices.ContainsFunc(s.domain, elsewhere)
	s.oneProcess = s.oneWorker && len(s.domain) == size
	if s.oneProcess {
		s.places = nil
	}
	s.where = t.whereabouts(&s, end.Transport(), end.Memory() != nil)
	if s.spread() {
		s.stageBytes = spreadStageBytes
	}
	switch {
	case s.oneProcess && size > 1:
		s.where.Cores = runtime.GOMAXPROCS(0)
	case s.where.Memory == "":
		s.where.Cores = offers.Processors
	}
	return s
}

// planPlaces returns the places of a transport, which no one changes, in the form of package plan: the same memory,
// because thousands of ranks would otherwise copy the places of thousands of ranks.
func planPlaces(places []transport.Place) []plan.Place {
	_ = plan.Place(transport.Place{}) // compiles as long as the two have the same fields
	return unsafe.Slice((*plan.Place)(unsafe.SliceData(places)), len(places))
}

// domain returns the ranks of the domain of a local rank.
func (t *team) domain(offers *transport.Capabilities, rank int) []int {
	t.mu.Lock()
	defer t.mu.Unlock()
	number := offers.Places[rank].Domain
	if t.domains[number] == nil {
		t.domains[number] = offers.Domain(rank)
	}
	return t.domains[number]
}

// sharesMemory reports whether other ranks access this rank's memory.
func (s *site) sharesMemory() bool { return len(s.domain) > 1 }

// spread reports whether the ranks are in several domains.
func (s *site) spread() bool { return s.places != nil && len(s.domain) < len(s.places) }

// process returns a number that identifies the process of a rank.
func (s *site) process(rank int) int {
	if s.places == nil {
		return 0
	}
	return s.places[rank].Worker
}

// in reports whether a rank is in the domain.
func (s *site) in(rank int) bool {
	_, found := slices.BinarySearch(s.domain, rank)
	return found
}

// whereabouts names the transports of a site for the chooser, the same on all ranks. The name of a transport of memory
// and one of frames is "memory+frames".
func (t *team) whereabouts(s *site, name string, memory bool) (w chooser.Where) {
	near, frames, both := strings.Cut(name, "+")
	if !both {
		frames = near
	}
	w.Frames = frames
	if memory {
		w.Memory = near
	}
	if s.spread() {
		t.finding.Do(func() { t.memory = spreadMemory(s.places) })
		w.Memory = t.memory
	}
	return w
}

// spreadMemory names the transport of the memory of several domains: "shm" if one is of several workers, else "mem" if
// one has several ranks, else "".
func spreadMemory(places []plan.Place) (memory string) {
	worker := map[int]int{} // the first rank of each domain
	for _, p := range places {
		first, seen := worker[p.Domain]
		switch {
		case !seen:
			worker[p.Domain] = p.Worker
		case first != p.Worker:
			return "shm"
		default:
			memory = "mem"
		}
	}
	return memory
}
