package collective

import (
	"runtime"
	"slices"
	"strings"

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

func findSite(end transport.Endpoint) site {
	s := site{domain: []int{end.Rank()}}
	size, rank := end.Size(), end.Rank()
	offers := end.Capabilities()
	if domain := offers.Domain(rank); offers.Memory && len(domain) > 1 {
		s.domain, s.stageBytes = domain, offers.StagingBytes/2
	}
	for _, p := range offers.Places {
		s.places = append(s.places, plan.Place(p))
	}
	elsewhere := func(r int) bool { return s.places != nil && s.places[r].Worker != s.places[rank].Worker }
	s.oneWorker = !slices.ContainsFunc(s.domain, elsewhere)
	s.oneProcess = s.oneWorker && len(s.domain) == size
	if s.oneProcess {
		s.places = nil
	}
	s.where = s.whereabouts(end, offers.Memory)
	if s.spread() {
		s.stageBytes = spreadStageBytes
	}
	if s.oneProcess && size > 1 {
		s.where.Cores = runtime.GOMAXPROCS(0)
	}
	return s
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
func (s *site) in(rank int) bool { return slices.Contains(s.domain, rank) }

// whereabouts names the transports for the chooser, the same on all ranks.
func (s *site) whereabouts(end transport.Endpoint, memory bool) (w chooser.Where) {
	near, frames, both := strings.Cut(end.Transport(), "+")
	if !both {
		frames = near
	}
	w.Frames = frames
	if memory {
		w.Memory = near
	}
	if !s.spread() {
		return w
	}
	w.Memory = ""
	worker := map[int]int{} // the first rank of each domain
	for _, p := range s.places {
		first, seen := worker[p.Domain]
		switch {
		case !seen:
			worker[p.Domain] = p.Worker
		case first != p.Worker:
			w.Memory = "shm"
		case w.Memory == "":
			w.Memory = "mem"
		}
	}
	return w
}
