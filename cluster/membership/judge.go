package membership

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// judge decides who is a suspect, and who is lost, from the reports of all nodes. It does no I/O and reads no clock.
type judge struct {
	timing Timing
	nodes  map[int]*nodeState
}

// nodeState is what is known of a node.
type nodeState struct {
	report   Report
	seen     bool
	received time.Time // the latest new report
	expected []int     // its workers, before the first report
}

// stalledMost bounds the workers that a view lists as stalled: the longest.
const stalledMost = 16

// newJudge returns a judge for which the silence of the expected nodes begins at a time.
func newJudge(timing Timing, expected map[int][]int, since time.Time) *judge {
	j := &judge{timing: timing, nodes: map[int]*nodeState{}}
	for node, workers := range expected {
		j.nodes[node] = &nodeState{expected: workers, received: since}
	}
	return j
}

// record records a report, and reports whether a worker has left with it. old: the store had the report before this
// process began to read reports, so that it does not show that the node is alive now.
func (j *judge) record(at time.Time, old bool, r Report) (left bool) {
	n := j.nodes[r.Node]
	if n == nil {
		n = &nodeState{received: at}
		j.nodes[r.Node] = n
	}
	if !old && (!n.seen || r.Count != n.report.Count || r.Nonce != n.report.Nonce) {
		n.received = at
	}
	left = r.left() > n.report.left()
	n.report, n.seen = r, true
	return left
}

// left returns how many workers have left.
func (r *Report) left() (n int) {
	for i := range r.Workers {
		if r.Workers[i].Final {
			n++
		}
	}
	return n
}

// coordinated lets the silence of the former coordinator's node begin with its latest report, which was sent
// [Report.ViewAge] after a view. The latest view arrived at a time at which that view was written, or later: so the
// silence is never counted too early. The report of a process that has made no view is as new as those of the others.
func (j *judge) coordinated(node int, viewAt time.Time) {
	if n := j.nodes[node]; n != nil && n.report.ViewAge > 0 {
		n.received = sooner(n.received, viewAt.Add(fromMilliseconds(n.report.ViewAge)))
	}
}

// slept subtracts a time from every silence: this process did not run then and could not read reports.
func (j *judge) slept(now time.Time, gone time.Duration) {
	for _, n := range j.nodes {
		if n.received = n.received.Add(gone); n.received.After(now) {
			n.received = now
		}
	}
}

// view returns the view at a time, and when it will change if no report arrives.
func (j *judge) view(now time.Time) (v View, next time.Time) {
	next = now.Add(time.Hour)
	v.Epoch = j.epoch()
	var stalled []Doubt
	waiting := false
	for _, node := range slices.Sorted(maps.Keys(j.nodes)) {
		n := j.nodes[node]
		silent := now.Sub(n.received)
		suspect := !n.report.Final && j.due(now, n.received, 0, j.timing.Timeout, &next)
		d := Doubt{Node: node, Nonce: n.report.Nonce, Epoch: n.report.Epoch, Unseen: !n.seen, Silent: milliseconds(silent)}
		if d.Lost = lost(silent, j.timing.Timeout); !n.seen {
			d.Workers = n.expected
		}
		other := Doubt{Node: -1, Epoch: d.Epoch, Lost: !d.Lost, Silent: d.Silent} // workers with another timeout
		for i := range n.report.Workers {
			w := &n.report.Workers[i]
			current := n.report.Epoch == v.Epoch
			if w.Worker == 0 && current {
				first := *w
				first.Silent += milliseconds(silent)
				v.First = &first
			}
			waiting = waiting || w.Waiting && current
			own, timeout := fromMilliseconds(w.Silent), j.timing.Timeout
			if w.Timeout != 0 {
				timeout = fromMilliseconds(w.Timeout)
			}
			if w.Final {
				if current {
					v.left(w.Worker)
				}
				continue
			}
			due := j.due(now, n.received, own, timeout, &next)
			gone := lost(silent+own, timeout)
			switch {
			case suspect && gone != d.Lost:
				other.Workers = append(other.Workers, w.Worker)
			case suspect:
				d.Workers = append(d.Workers, w.Worker)
			case due:
				v.Doubts = append(v.Doubts, Doubt{
					Node: -1, Epoch: n.report.Epoch, Workers: []int{w.Worker}, Lost: gone,
					Silent: milliseconds(silent + own), Unseen: w.Count == 0, Phase: w.Phase, Progress: w.Progress,
					Reported: silent < j.timing.suspectAfter(),
				})
			case !w.Waiting && w.Count > 0 && fromMilliseconds(w.Stalled) >= j.timing.suspectAfter():
				stalled = append(stalled, Doubt{
					Node: -1, Epoch: n.report.Epoch, Workers: []int{w.Worker}, Stalled: w.Stalled + milliseconds(silent),
					Phase: w.Phase, Progress: w.Progress,
				})
			}
		}
		if suspect {
			v.Doubts = append(v.Doubts, d)
		}
		if len(other.Workers) > 0 {
			v.Doubts = append(v.Doubts, other)
		}
	}
	if waiting { // else no worker is delayed
		slices.SortStableFunc(stalled, func(a, b Doubt) int { return cmp.Compare(b.Stalled, a.Stalled) })
		v.Doubts = append(v.Doubts, stalled[:min(len(stalled), stalledMost)]...)
	}
	return v, next
}

// epoch returns the latest epoch of the job in which a node has workers.
func (j *judge) epoch() (latest uint32) {
	for _, n := range j.nodes {
		if len(n.report.Workers) > 0 {
			latest = max(latest, n.report.Epoch)
		}
	}
	return latest
}

// due reports whether a member is a suspect, by its silence when its node's report arrived and the time since then. It
// lowers next to the time when the member becomes a suspect or is lost.
func (j *judge) due(now, received time.Time, own, timeout time.Duration, next *time.Time) bool {
	silent := now.Sub(received) + own
	suspect := silent >= j.timing.suspectAfter()
	limit := j.timing.suspectAfter()
	if suspect {
		limit = timeout
	}
	if at := received.Add(limit - own); limit > 0 && at.After(now) && at.Before(*next) {
		*next = at
	}
	return suspect
}

// lost reports the verdict on a member.
func lost(silent, timeout time.Duration) bool { return timeout > 0 && silent >= timeout }

// left adds a worker that has left: to the last range if it follows it, else as a new range.
func (v *View) left(worker int) {
	if n := len(v.Left); n > 0 && v.Left[n-1][1] == worker-1 {
		v.Left[n-1][1] = worker
		return
	}
	v.Left = append(v.Left, [2]int{worker, worker})
}
