package collective

import (
	"runtime"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/transport"
)

// site is where the ranks of a communicator are, seen from one of them, and what it has in common with those near it.
type site struct {
	marker transport.Marker // nil: no other rank's memory is reached
	domain []int            // the ranks that reach each other's memory
	places []plan.Place     // of all ranks; nil: one process
	// whole says that all ranks are in one process: then a call that all have entered needs nobody else's help, and runs to
	// its end on all.
	whole bool
	near  bool // all of the domain are in this process
	half  int  // bytes of one half of a rank's stage, the same in all domains
	where chooser.Where
}

// halfSpread is how many bytes of one half of a stage a call uses where there are several domains: as much as every transport
// has. The plan must be the same in all, and a rank that is a domain alone has no stage to ask.
const halfSpread = 32 << 10

func findSite(end transport.Endpoint) site {
	s := site{domain: []int{end.Rank()}}
	size, rank := end.Size(), end.Rank()
	marker, _ := end.(transport.Marker)
	placer, _ := end.(transport.Placer)
	if marker != nil && (placer != nil || len(marker.Domain()) == size) && len(marker.Domain()) > 1 {
		s.marker, s.domain = marker, marker.Domain()
		s.half = stageBytes(marker, rank) / 2
	}
	switch {
	case placer != nil:
		for _, p := range placer.Places() {
			s.places = append(s.places, plan.Place(p))
		}
	case s.marker == nil && size > 1:
		for r := range size {
			s.places = append(s.places, plan.Place{Worker: r, Domain: r, Host: r})
		}
	}
	s.near = !slices.ContainsFunc(s.domain, func(r int) bool { return s.places != nil && s.places[r].Worker != s.places[rank].Worker })
	s.whole = s.near && len(s.domain) == size
	if s.whole {
		s.places = nil
	}
	s.where = s.whereabouts(end, marker != nil)
	if s.spread() {
		s.half = halfSpread
	}
	if s.whole && size > 1 {
		s.where.Cores = runtime.GOMAXPROCS(0)
	}
	return s
}

// stageBytes returns the length of a rank's stage, if possible without having the transport take memory for one.
func stageBytes(marker transport.Marker, rank int) int {
	if m, ok := marker.(interface{ StageBytes() int }); ok {
		return m.StageBytes()
	}
	return len(marker.Stage(rank))
}

// spread reports whether the ranks are in several domains.
func (s *site) spread() bool { return s.places != nil && len(s.domain) < len(s.places) }

// process returns a number of the process that a rank is in.
func (s *site) process(rank int) int {
	if s.places == nil {
		return 0
	}
	return s.places[rank].Worker
}

// in reports whether a rank is of the domain.
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
	worker := map[int]int{} // of the first rank of each domain
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
