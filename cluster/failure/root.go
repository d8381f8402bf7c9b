package failure

import (
	"cmp"
	"fmt"
	"slices"
)

// Report is the analysis of the records of one epoch of a job.
type Report struct {
	// Root is the root cause: the failure that caused the others.
	Root Record
	// Unseen reports that the root's worker did not report its failure. Root then has the message, the time
	// and the stack of the first worker that lost it.
	Unseen bool
	// Others are the other records, by worker.
	Others []Record
}

// Find returns the root cause among the records of an epoch, which may be in any order. It returns false if
// there is no record. The root cause is
//
//  1. the earliest failure that a worker caused itself: one that blames no other worker and is not a loss, timeout
//     or interruption;
//  2. else the worker that the others lost and that reported no failure itself, except that it was lost or was
//     ended from outside: the one that most of them blame;
//  3. else the earliest loss, timeout or mismatch, of those that others blame if there are any: where the link
//     between two workers is cut, each of the two loses the other, and a third worker that is notified of it may
//     be the first to end;
//  4. else the earliest interruption.
//
// Of two failures at the same time, the lower worker's is chosen. There is at most one record per worker (see
// [Merge]).
func Find(records []Record) (Report, bool) {
	if len(records) == 0 {
		return Report{}, false
	}
	sorted := slices.Clone(records)
	slices.SortStableFunc(sorted, func(a, b Record) int {
		return cmp.Or(cmp.Compare(tier(a), tier(b)), a.Time.Compare(b.Time), cmp.Compare(a.Worker, b.Worker))
	})
	rep := Report{Root: sorted[0]}
	if tier(sorted[0]) > own {
		mutual := slices.IndexFunc(sorted, func(r Record) bool { return tier(r) == consequence && blamed(sorted, r.Worker) })
		if worker, ok := unseen(sorted); ok {
			rep = Report{Root: lostBy(sorted, worker), Unseen: true}
		} else if mutual >= 0 {
			rep.Root = sorted[mutual]
		}
	}
	rep.Others = slices.DeleteFunc(sorted, func(r Record) bool { return r.Worker == rep.Root.Worker })
	slices.SortStableFunc(rep.Others, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), a.Time.Compare(b.Time))
	})
	return rep, true
}

// The tiers of causes, the most likely root first.
const (
	own         = iota // caused by the worker itself
	consequence        // caused by another worker
	interrupted        // caused from outside
)

func tier(r Record) int {
	switch {
	case r.Kind == "interrupted":
		return interrupted
	case len(r.Blames) > 0 || r.Kind == "lost" || r.Kind == "timeout":
		return consequence
	}
	return own
}

// blamed reports whether another worker blames this worker for its failure.
func blamed(records []Record, worker int) bool {
	return slices.ContainsFunc(records, func(r Record) bool {
		return r.Worker != worker && slices.Contains(r.Blames, worker)
	})
}

// cutOff reports whether a worker's record only says that the worker was lost itself: by the others, or by
// the launcher.
func cutOff(r Record) bool { return r.Kind == "lost" && len(r.Blames) == 0 }

// unseen returns the worker that most records blame, among those that reported no failure.
func unseen(records []Record) (worker int, ok bool) {
	tells, blamed := map[int]bool{}, map[int]int{}
	for _, r := range records {
		tells[r.Worker] = tells[r.Worker] || tier(r) < interrupted && !cutOff(r)
		for _, b := range r.Blames {
			blamed[b]++
		}
	}
	most := 0
	for w, n := range blamed {
		if !tells[w] && (n > most || n == most && w < worker) {
			worker, most = w, n
		}
	}
	return worker, most > 0
}

// lostBy builds the record of a worker that reported no failure, from the first worker that lost it. The
// records are ordered by time.
func lostBy(records []Record, worker int) Record {
	out := Record{Worker: worker, ExitCode: -1}
	for _, r := range records {
		if r.Worker == worker {
			out.Host, out.PID = r.Host, r.PID
		}
		if out.Kind == "" && slices.Contains(r.Blames, worker) {
			out.Job, out.Epoch, out.Time, out.Step, out.Phase, out.Stack = r.Job, r.Epoch, r.Time, r.Step, r.Phase, r.Stack
			out.Kind, out.Message = r.Kind, fmt.Sprintf("worker %d reported: %s", r.Worker, r.Message)
		}
	}
	return out
}

// Merge combines the record that a worker wrote with the launcher's observation: the worker's message and the
// launcher's exit code. A worker that was killed after it wrote a record of a consequence (a lost peer, for
// example) keeps its message.
func Merge(worker, launcher Record) Record {
	out := worker
	out.ExitCode = launcher.ExitCode
	if out.Host == "" {
		out.Host = launcher.Host
	}
	if out.PID == 0 {
		out.PID = launcher.PID
	}
	return out
}
