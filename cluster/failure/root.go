package failure

import (
	"cmp"
	"fmt"
	"slices"
)

// Report is what the records of one epoch of a job come to.
type Report struct {
	// Root is the failure that the others follow from.
	Root Record
	// Unseen says that the worker of the root did not tell its failure: Root then has the words, the time and the stack of the first one
	// that lost it.
	Unseen bool
	// Others are the other records, by worker.
	Others []Record
}

// Find finds the root cause among the records of an epoch, in any order; no record: false. It is
//
//  1. the earliest failure of a worker's own: one that blames nobody and is no loss, time-out or interruption;
//  2. else the worker that the others lost and that tells nothing itself, but perhaps that it was lost, or ended from outside: the one
//     that most of them blame;
//  3. else the earliest loss, time-out or mismatch, of those whom others blame if there are any: where the link between two workers is cut,
//     each of the two loses the other, and a third that hears of it may be the first to end;
//  4. else the earliest interruption.
//
// Of two at the same time it is the lower worker's. There is at most one record of each worker (see [Merge]).
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
	slices.SortStableFunc(rep.Others, func(a, b Record) int { return cmp.Or(cmp.Compare(a.Worker, b.Worker), a.Time.Compare(b.Time)) })
	return rep, true
}

// The tiers of causes, from the likeliest root on.
const (
	own         = iota // a failure of the worker's own
	consequence        // of another's
	interrupted        // from outside
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

// blamed reports whether another worker lays its failure on a worker.
func blamed(records []Record, worker int) bool {
	return slices.ContainsFunc(records, func(r Record) bool { return r.Worker != worker && slices.Contains(r.Blames, worker) })
}

// cutOff reports whether a worker's record says no more than that it was lost itself: by the others, or by the launcher.
func cutOff(r Record) bool { return r.Kind == "lost" && len(r.Blames) == 0 }

// unseen returns the worker that most records blame among those that tell no failure.
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

// lostBy makes up the record of a worker that tells no failure, from the first one that lost it. The records are by time.
func lostBy(records []Record, worker int) Record {
	out := Record{Worker: worker, ExitCode: -1}
	for _, r := range records {
		if r.Worker == worker {
			out.Host, out.PID = r.Host, r.PID
		}
		if out.Kind == "" && slices.Contains(r.Blames, worker) {
			out.Job, out.Epoch, out.Time, out.Step, out.Phase, out.Stack = r.Job, r.Epoch, r.Time, r.Step, r.Phase, r.Stack
			out.Kind, out.Message = r.Kind, fmt.Sprintf("worker %d says: %s", r.Worker, r.Message)
		}
	}
	return out
}

// Merge joins what a worker wrote itself with what its launcher saw: the worker's words, and the launcher's exit code. A worker that was
// killed after it had written a record of a mere consequence (it lost a peer, say) keeps its words.
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
