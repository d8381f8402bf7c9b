package timeline

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unsafe"
)

// Straggler is a worker that the others wait for: its own work takes longer than theirs, or its network links are
// slower.
type Straggler struct {
	// Worker is the slow one; of a slow link between two workers, the sender.
	Worker int `json:"worker"`
	// Cause is the part of a step that takes longer ("computation", "input", …), "link" if the links of a worker are slow,
	// or "link to worker 3" if one link is.
	Cause string `json:"cause"`
	// Link has the sender and the receiver, if the link between two workers is slow; otherwise nil.
	Link *[2]int `json:"link,omitempty"`
	// Excess is how much longer its own work takes than the median of the others, as a share of that: 0.2 is 20 %. Of a
	// link, it is the time that it costs in a step, as a share of the rest of the step.
	Excess float64 `json:"excess"`
	// Own and Others are the time per step without waits for collective calls, and the median of the others'. Of a link,
	// they are the time in a step that all wait for its data, and the time that the data takes on other links.
	Own    time.Duration `json:"own_ns"`
	Others time.Duration `json:"others_ns"`
	Step   int64         `json:"step"` // at which it was named
}

// causeLink is the cause of a worker whose links are slow, and the beginning of that of a single link.
const causeLink = "link"

// Concerns reports whether the worker is slow, or is one end of the slow link.
func (s *Straggler) Concerns(worker int) bool {
	return s != nil && (s.Worker == worker || s.Link != nil && s.Link[1] == worker)
}

// String describes the straggler: "worker 2 is slow: its computation takes …".
func (s Straggler) String() string {
	if strings.HasPrefix(s.Cause, causeLink) {
		who := fmt.Sprintf("the network links of worker %d are slow, and all workers wait for them: their", s.Worker)
		if s.Link != nil {
			who = fmt.Sprintf("the network link from worker %d to worker %d is slow, and all workers wait for it: its",
				s.Link[0], s.Link[1])
		}
		return fmt.Sprintf("%s data takes %v a step, on the other links %v (%+.0f %% of a step)", who,
			s.Own.Round(10*time.Microsecond), s.Others.Round(10*time.Microsecond), 100*s.Excess)
	}
	return fmt.Sprintf("worker %d is slow, and the others wait for it: its own work takes %v a step, that of the others "+
		"%v (%+.0f %%); the difference is mostly %s", s.Worker, s.Own.Round(10*time.Microsecond),
		s.Others.Round(10*time.Microsecond), 100*s.Excess, s.Cause)
}

// Detector finds the straggler of a job from the steps of all workers. It compares the time that each worker spends on
// its own work in a step (not waiting for collective calls) with the median of the other workers. So a worker that
// waits is never named.
//
// It accumulates the differences (Page's CUSUM test): a worker is named when the sum of its excess above an allowance
// of 10 % exceeds the work of one step, or of more steps if they vary much, as on a machine with more processes than
// cores. The noise is measured, so nothing is named in the first 35 steps. A worker that takes 20 % longer is named
// after 10 steps, one that takes 5 % longer never. Each step counts for at most 30 %, so single long steps (garbage
// collection, a snapshot) name no worker.
//
// A slow network link makes all workers wait equally long, so it does not show in their own work. If that of no worker
// is longer, the Detector compares the links between workers in the same way (see [Step.Links]): for each worker the
// links to others, and those from others. They cost a step the time that their senders send, at most the time that the
// receivers wait for the data, and at most the wait of the worker that waits the least: that wait is not for another
// worker. What is more than at the median speed of the links that do not touch the worker is the excess. Links that
// cost 20 % of a step more are named after 10 to 15 steps, those that are less than a quarter slower than the others
// never. If only one link of a worker is slow, both its ends are named. Links that are all equally slow are not named.
// With two workers, one direction of their link is compared with the other.
//
// A Detector is not safe for concurrent use.
type Detector struct {
	workers  int
	pending  map[int64][]Step // by step number, by worker
	arrived  map[int64]int    // by step number: how many workers have reported it
	done     int64            // the last step that was compared
	compared int              // steps
	last     [][]Step         // the last steps that were compared, at most detectorKept
	own      cusum            // of each worker's own work
	links    linkDetector
}

const (
	detectorWarmup    = 3   // steps after the first one that are not compared: caches, connections
	detectorAllowance = 0.1 // of the others' work
	detectorLimit     = 1.0 // of the others' work
	detectorCeiling   = 1.5 // times the limit, so that a worker that is fast again is cleared soon
	detectorClip      = 0.3
	detectorBatch     = 8 // steps: long enough to contain what slows several consecutive steps
	detectorBatches   = 4 // before a worker is named
	// The weights of a batch in the moving means of the noise, of which the larger one counts: a long one, which is
	// exact, and one over the last batches, in which the noise may have risen.
	detectorNoise     = 0.01
	detectorRecent    = 0.1
	detectorNoiseRise = 5 // times the noise: the most that one batch counts for
	// detectorOdds is the logarithm of the number of steps of one worker between two false names: about 50 million.
	detectorOdds     = 18
	detectorScaleMin = 0.2      // of a step: own work that takes less of it is compared with this
	detectorKept     = 16       // steps, whose medians describe the straggler
	detectorPending  = 512      // steps at most
	detectorBytes    = 16 << 20 // of the steps that not all workers have reported
)

// The parts of a worker's own work.
const (
	partInput = iota
	partCompute
	partUpdate
	partCallbacks
	partEvaluate
	partSnapshot
	partOther
	partCount
)

var partNames = [partCount]string{
	"input", "computation", "update", "callbacks between steps", "evaluation", "snapshots", "other work",
}

func parts(s Step) (p [partCount]time.Duration) {
	p = [partCount]time.Duration{s.Input, s.Compute, s.Update, s.Callbacks, s.Evaluate, s.Snapshot}
	rest := s.Own()
	for _, d := range p {
		rest -= d
	}
	p[partOther] = rest
	return p
}

// NewDetector returns a detector for a job of so many workers.
func NewDetector(workers int) *Detector {
	return &Detector{
		workers: workers, pending: map[int64][]Step{}, arrived: map[int64]int{},
		own: newCUSUM(workers), links: newLinkDetector(workers),
	}
}

// Add adds steps of a worker. It compares a step when it has that of all workers; steps that some workers do not report
// are left out.
func (d *Detector) Add(worker int, steps []Step) {
	if worker < 0 || worker >= d.workers || d.workers < 2 {
		return
	}
	for _, s := range steps {
		if s.Step <= d.done || s.End <= s.Start {
			continue
		}
		all := d.pending[s.Step]
		if all == nil {
			all = make([]Step, d.workers)
			d.pending[s.Step] = all
		}
		if all[worker].Step == 0 {
			all[worker] = s
			d.arrived[s.Step]++
		}
	}
	d.compareAll()
}

// compareAll compares the steps that all workers have reported, in their order.
func (d *Detector) compareAll() {
	var ready []int64
	for step, n := range d.arrived {
		if n == d.workers {
			ready = append(ready, step)
		}
	}
	slices.Sort(ready)
	for _, step := range ready {
		d.compare(d.pending[step])
		d.done = step
	}
	waiting := slices.Sorted(maps.Keys(d.pending))
	room := max(1, min(detectorPending, detectorBytes/(d.workers*int(unsafe.Sizeof(Step{})))))
	for i, step := range waiting {
		if step <= d.done || i < len(waiting)-room {
			delete(d.pending, step)
			delete(d.arrived, step)
		}
	}
}

// compare compares the workers in one step.
func (d *Detector) compare(all []Step) {
	if d.compared++; d.compared <= 1+detectorWarmup {
		return
	}
	if d.last = append(d.last, all); len(d.last) > detectorKept {
		d.last = slices.Delete(d.last, 0, 1)
	}
	own, elapsed := make([]float64, d.workers), make([]float64, d.workers)
	for i, s := range all {
		own[i], elapsed[i] = s.Own().Seconds(), (s.End - s.Start).Seconds()
	}
	for i := range all {
		others := without(own, i)
		// Relative to the shorter time, so that a worker that is as often slower as faster has no excess on average:
		// relative to the others' it has half the variance of the logarithm, which is 12 % with noise of 35 %.
		scale := max(min(own[i], others), detectorScaleMin*median(elapsed))
		d.own.add(i, (own[i]-others)/scale, detectorAllowance)
	}
	d.own.endStep(all[0].Step)
	d.links.compare(all, median(elapsed))
}

// without returns the median of the values but that of index i.
func without(values []float64, i int) float64 {
	return median(slices.Delete(slices.Clone(values), i, i+1))
}

func median(values []float64) float64 {
	list := slices.Sorted(slices.Values(values))
	n := len(list)
	return (list[n/2] + list[(n-1)/2]) / 2
}

// Straggler returns the worker that is slow now. ok is false if there is none.
func (d *Detector) Straggler() (s Straggler, ok bool) {
	i := d.own.named
	if i < 0 {
		return d.links.straggler()
	}
	// over returns the medians over the last steps: of the worker, of the median of the others, and of the difference.
	over := func(value func(Step) time.Duration) (worker, others, difference float64) {
		var lists [3][]float64
		for _, all := range d.last {
			values := make([]float64, d.workers)
			for w, step := range all {
				values[w] = float64(value(step))
			}
			other := without(values, i)
			for k, x := range []float64{values[i], other, values[i] - other} {
				lists[k] = append(lists[k], x)
			}
		}
		return median(lists[0]), median(lists[1]), median(lists[2])
	}
	most := 0.0
	for part, name := range partNames {
		if _, _, x := over(func(step Step) time.Duration { return parts(step)[part] }); x > most || part == 0 {
			most, s.Cause = x, name
		}
	}
	own, others, _ := over(Step.Own)
	s.Worker, s.Step, s.Own, s.Others = i, d.own.step, time.Duration(own), time.Duration(others)
	if others > 0 {
		s.Excess = own/others - 1
	}
	return s, true
}
