package timeline

import (
	"fmt"
	"maps"
	"slices"
	"time"
	"unsafe"
)

// Straggler is a worker whose own work takes longer than that of the others, which wait for it.
type Straggler struct {
	Worker int    `json:"worker"`
	Cause  string `json:"cause"` // the part of a step that takes longer: "computation", "input", …
	// Excess is how much longer its own work takes than the median of the others, as a share of that: 0.2 is 20 %.
	Excess float64 `json:"excess"`
	// Own and Others are the time per step without waits for collective calls, and the median of the others'.
	Own    time.Duration `json:"own_ns"`
	Others time.Duration `json:"others_ns"`
	Step   int64         `json:"step"` // at which it was named
}

// String describes the straggler: "worker 2 is slow: its computation takes …".
func (s Straggler) String() string {
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
// collection, a snapshot) name no worker. A Detector is not safe for concurrent use.
type Detector struct {
	workers  int
	pending  map[int64][]Step // by step number, by worker
	arrived  map[int64]int    // by step number: how many workers have reported it
	done     int64            // the last step that was compared
	compared int              // steps
	sums     []float64        // by worker
	last     [][]Step         // the last steps that were compared, at most detectorKept
	batch    []float64        // by worker: the sum of its excess in the current batch of steps
	before   []float64        // by worker: the mean of the batch before
	batches  int              // that have ended
	noise    float64          // variance of the excess of a step, as sums of consecutive steps show it
	named    int              // worker; -1: none
	step     int64            // at which it was named
}

const (
	detectorWarmup    = 3   // steps after the first one that are not compared: caches, connections
	detectorAllowance = 0.1 // of the others' work
	detectorLimit     = 1.0 // of the others' work
	detectorCeiling   = 1.5 // times the limit, so that a worker that is fast again is cleared soon
	detectorClip      = 0.3
	detectorBatch     = 8   // steps: long enough to contain what slows several consecutive steps
	detectorBatches   = 4   // before a worker is named
	detectorNoise     = 0.1 // weight of a batch in the moving mean
	// detectorOdds is the logarithm of the number of steps of one worker between two false names: about ten million.
	detectorOdds     = 16
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
		workers: workers, pending: map[int64][]Step{}, arrived: map[int64]int{}, sums: make([]float64, workers),
		batch: make([]float64, workers), before: make([]float64, workers), named: -1,
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
		scale := max(others, detectorScaleMin*median(elapsed))
		excess := min(max((own[i]-others)/scale, -detectorClip), detectorClip)
		d.batch[i] += excess / detectorBatch
		d.sums[i] = min(max(d.sums[i]+excess-detectorAllowance, 0), detectorCeiling*d.limit())
	}
	if (d.compared-1-detectorWarmup)%detectorBatch == 0 {
		d.endBatch()
	}
	if d.batches < detectorBatches {
		clear(d.sums)
	}
	if d.named >= 0 && d.sums[d.named] > 0 {
		return // it stays the straggler until its excess is used up
	}
	d.named = -1
	for i, sum := range d.sums {
		if sum >= d.limit() && (d.named < 0 || sum > d.sums[d.named]) {
			d.named, d.step = i, all[i].Step
		}
	}
}

// endBatch measures the noise by the differences between the means of consecutive batches: a worker that becomes slow
// changes one of them only.
func (d *Detector) endBatch() {
	variance := 0.0
	for i, mean := range d.batch {
		change := mean - d.before[i]
		variance += detectorBatch * change * change / 2 / float64(d.workers)
		d.before[i], d.batch[i] = mean, 0
	}
	d.batches++
	if d.batches > 1 {
		d.noise += max(detectorNoise, 1/float64(d.batches-1)) * (variance - d.noise)
	}
}

// limit returns the sum at which a worker is named. A sum of independent steps without a straggler reaches it about
// once in exp(2*limit*allowance/variance) steps.
func (d *Detector) limit() float64 {
	return max(detectorLimit, detectorOdds*d.noise/(2*detectorAllowance))
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
	i := d.named
	if i < 0 {
		return s, false
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
	s.Worker, s.Step, s.Own, s.Others = i, d.step, time.Duration(own), time.Duration(others)
	if others > 0 {
		s.Excess = own/others - 1
	}
	return s, true
}
