// Package status keeps the live state of a job for people who watch it: what each worker does, how fast the job trains,
// which worker slows it down, and what happened. A [Tracker] joins the heartbeats and reports of the workers; [Follow]
// reads them from the job's rendezvous store. It changes nothing in the job.
package status

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Job is the state of a job at one moment, as the dashboard's JSON has it.
type Job struct {
	Version  int       `json:"version"` // 1
	Job      string    `json:"job"`
	Restarts int       `json:"restarts"` // of all workers
	Began    time.Time `json:"began"`    // when the tracker was made
	At       time.Time `json:"at"`
	Workers  []Worker  `json:"workers"`
	// Training is the progress of the training; nil: unknown.
	Training *timeline.Training `json:"training"`
	Step     int64              `json:"step"` // the last one known; 0: none
	// ExamplesPerSecond is that of all replicas over the last steps, and StepSeconds the time of a step.
	ExamplesPerSecond float64 `json:"examples_per_second"`
	StepSeconds       float64 `json:"step_seconds"`
	// Straggler is the worker that slows the job down; nil: none.
	Straggler *timeline.Straggler `json:"straggler"`
	// Problem is why the state is not current, for example because the store cannot be reached; "": it is current.
	Problem string  `json:"problem,omitempty"`
	Events  []Event `json:"events"` // the last 50, oldest first
}

// Worker is the state of one worker. Shares are parts of the time of its last steps, from 0 to 1.
type Worker struct {
	Worker int    `json:"worker"`
	Host   string `json:"host"`
	PID    int    `json:"pid"`
	// State is "running", "silent" (no heartbeat for 5 seconds), "left", "joining", or "unknown": see Job.Problem.
	State string `json:"state"`
	Phase string `json:"phase"`
	Step  int64  `json:"step"`
	// HeartbeatAge is the time since its last heartbeat.
	HeartbeatAge float64 `json:"heartbeat_age_seconds"`
	Memory       int64   `json:"memory_bytes"` // resident; 0: unknown
	CPUs         float64 `json:"cpus"`         // processors that it keeps busy; 0: unknown
	CPUSeconds   float64 `json:"cpu_seconds"`  // processor time of the process; 0: unknown
	Input        float64 `json:"input_share"`
	Compute      float64 `json:"compute_share"`
	Wait         float64 `json:"wait_share"` // waiting for collective calls and other workers
	Update       float64 `json:"update_share"`
	Other        float64 `json:"other_share"`
	// OwnSeconds is the time in a step that it does not wait for collective calls.
	OwnSeconds float64 `json:"own_seconds"`
}

// Event is something that happened.
type Event struct {
	At      time.Time `json:"at"`
	Text    string    `json:"text"`
	Warning bool      `json:"warning"`
}

// Point is a step in a chart.
type Point struct {
	Step              int64    `json:"step"`
	Loss              *float64 `json:"loss"` // nil: unknown
	ExamplesPerSecond float64  `json:"examples_per_second"`
	Input             float64  `json:"input_share"`
	Compute           float64  `json:"compute_share"`
	Wait              float64  `json:"wait_share"`
}

// Charts has what the charts show, in the order of the steps.
type Charts struct {
	Points []Point `json:"points"`
	// Measured has the steps at which metrics, the learning rate and validations were measured.
	Measured []timeline.Measurement `json:"measured"`
	// Series is a number. If it is not the one before, Points and Measured replace all earlier ones.
	Series int64 `json:"series"`
}

const (
	eventsKept = 50
	pointsKept = 2000 // more are thinned out: every second one goes
	stepsKept  = 20   // of each worker, whose time the shares divide
	silentTime = 5 * time.Second
)

// Tracker keeps the state of a job. Its methods can be called by any goroutine at any time.
type Tracker struct {
	mu        sync.Mutex
	job       Job
	workers   []tracked
	detector  *timeline.Detector
	points    []Point
	measured  []timeline.Measurement
	stride    int64 // steps between two points
	series    int64 // see Charts
	trainer   int   // the latest one of the latest epoch with steps
	restarted bool  // no steps of this epoch yet
	lost      error // of the store; nil: it is reached
	epoch     uint32
	straggler func(s timeline.Straggler, named bool)
}

type tracked struct {
	Worker

	seen    time.Time // of the last heartbeat
	count   uint64
	final   bool
	last    int64         // step of the last report
	end     time.Duration // of that step, by the worker's clock
	recent  []timeline.Step
	cpu     float64 // of the last report
	cpuAt   time.Duration
	silence bool // reported
}

// NewTracker returns a tracker of a job. onStraggler, unless it is nil, is called when a worker is named as the
// straggler, and when it no longer is; it must not call the tracker.
func NewTracker(job string, onStraggler func(s timeline.Straggler, named bool)) *Tracker {
	return &Tracker{job: Job{Version: 1, Job: job, Began: time.Now()}, stride: 1, series: 1, straggler: onStraggler}
}

// event records an event. The caller holds the lock.
func (t *Tracker) event(warning bool, format string, args ...any) {
	t.job.Events = append(t.job.Events, Event{At: time.Now(), Text: fmt.Sprintf(format, args...), Warning: warning})
	if len(t.job.Events) > eventsKept {
		t.job.Events = slices.Delete(t.job.Events, 0, 1)
	}
}

// enter begins a new epoch of the job, in which all workers are new, or returns false for an old one. The caller holds
// the lock.
func (t *Tracker) enter(epoch uint32) bool {
	if epoch > t.epoch {
		t.epoch, t.workers, t.detector, t.restarted = epoch, nil, nil, true
		t.job.Restarts, t.job.Straggler = int(epoch), nil
		t.event(true, "all workers were restarted: restart %d", epoch)
	}
	return epoch == t.epoch
}

// workersMax bounds the workers of a job.
const workersMax = 1 << 16

// worker returns a worker, or nil for a number that none can have. The caller holds the lock.
func (t *Tracker) worker(n int) *tracked {
	if n < 0 || n >= workersMax {
		return nil
	}
	for len(t.workers) <= n {
		t.workers = append(t.workers, tracked{Worker: Worker{Worker: len(t.workers), State: "joining"}})
		t.detector = nil
	}
	return &t.workers[n]
}

// Heartbeat adds the latest heartbeat of a worker in an epoch of the job.
func (t *Tracker) Heartbeat(epoch uint32, worker int, h membership.Heartbeat) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enter(epoch) {
		return
	}
	w := t.worker(worker)
	if w == nil || h.Count == 0 || w.count == h.Count && (!h.Final || w.final) {
		return
	}
	if w.count == 0 {
		t.event(false, "worker %d joined", worker)
	}
	if h.Final && !w.final {
		t.event(false, "worker %d left at step %d", worker, h.Step)
	}
	if w.silence {
		t.event(false, "worker %d sends heartbeats again", worker)
	}
	w.count, w.seen, w.final, w.silence = h.Count, time.Now(), h.Final, false
	w.Phase = h.Phase
	w.Step = max(w.last, h.Step)
}

// Report adds the latest report of a worker in an epoch of the job.
func (t *Tracker) Report(epoch uint32, r timeline.Report) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.enter(epoch) {
		return
	}
	w := t.worker(r.Worker)
	if w == nil {
		return
	}
	if r.PID == w.PID { // reports of this process can arrive out of order: processor time only grows
		r.CPU = max(r.CPU, w.CPUSeconds)
	}
	w.Host, w.PID, w.Memory, w.CPUSeconds = r.Host, r.PID, r.Memory, r.CPU
	if w.count == 0 { // a job of one worker has no heartbeats
		w.seen = time.Now()
	}
	if r.Training != nil && r.Worker == 0 {
		training := *r.Training
		training.Measured = nil // see Charts
		t.job.Training = &training
	}
	defer t.measure(r)
	fresh := r.Steps
	for len(fresh) > 0 && fresh[0].End <= w.end {
		fresh = fresh[1:]
	}
	if len(fresh) == 0 || fresh[0].Trainer < t.trainer && !t.restarted { // new processes number their trainers from 1
		return
	}
	t.begin(w, fresh[0])
	w.recent = append(w.recent, fresh...)
	w.recent = slices.Delete(w.recent, 0, max(len(w.recent)-stepsKept, 0))
	t.shares(w, r)
	w.last, w.end = fresh[len(fresh)-1].Step, fresh[len(fresh)-1].End
	w.Step = max(w.Step, w.last)
	if r.Worker == 0 {
		t.chart(fresh, r)
	}
	t.detect(r.Worker, fresh)
}

// begin prepares for a step of a worker, which may be the first one of a new trainer, or one that follows a return to
// an earlier step. The caller holds the lock.
func (t *Tracker) begin(w *tracked, s timeline.Step) {
	t.restarted = false
	if s.Trainer == t.trainer && s.Step > w.last {
		return
	}
	if s.Trainer != t.trainer {
		if t.trainer > 0 {
			t.event(false, "another training has begun")
		}
		t.trainer, t.points, t.measured = s.Trainer, nil, nil
		t.stride, t.series = 1, t.series+1
		for i := range t.workers {
			t.workers[i].last = 0
		}
	}
	w.Step, w.last, t.detector = 0, 0, nil
	t.job.Straggler = nil
}

// shares computes where the last steps of a worker went.
func (t *Tracker) shares(w *tracked, r timeline.Report) {
	last := w.recent
	var sum timeline.Step
	var elapsed time.Duration
	for _, s := range last {
		elapsed += s.End - s.Start
		sum.Input += s.Input
		sum.Compute += s.Compute
		sum.Wait += s.Wait
		sum.Update += s.Update
	}
	if elapsed <= 0 {
		return
	}
	share := func(d time.Duration) float64 { return float64(d) / float64(elapsed) }
	w.Input, w.Compute, w.Wait, w.Update = share(sum.Input), share(sum.Compute), share(sum.Wait), share(sum.Update)
	w.Other = max(0, 1-w.Input-w.Compute-w.Wait-w.Update)
	w.OwnSeconds = (elapsed - sum.Wait).Seconds() / float64(len(last))
	at := last[len(last)-1].End
	if w.cpu > 0 && at > w.cpuAt {
		w.CPUs = max(0, (r.CPU-w.cpu)/(at-w.cpuAt).Seconds())
	}
	w.cpu, w.cpuAt = r.CPU, at
	if r.Worker == 0 {
		t.job.StepSeconds = elapsed.Seconds() / float64(len(last))
		examples := 0
		for _, s := range last {
			examples += s.Examples
		}
		t.job.ExamplesPerSecond = float64(examples) / elapsed.Seconds()
	}
}

// chart adds points for new steps of worker 0.
func (t *Tracker) chart(steps []timeline.Step, r timeline.Report) {
	kept := len(t.points)
	for kept > 0 && t.points[kept-1].Step >= steps[0].Step { // the training continues from an earlier step
		kept--
	}
	if kept < len(t.points) {
		t.points = t.points[:kept]
		t.measured = slices.DeleteFunc(t.measured, func(m timeline.Measurement) bool { return m.Step >= steps[0].Step })
		t.series++
	}
	for _, s := range steps {
		took := (s.End - s.Start).Seconds()
		if len(t.points) > 0 && s.Step < t.points[len(t.points)-1].Step+t.stride || took <= 0 {
			continue
		}
		p := Point{
			Step: s.Step, ExamplesPerSecond: float64(s.Examples) / took, Input: s.Input.Seconds() / took,
			Compute: s.Compute.Seconds() / took, Wait: s.Wait.Seconds() / took,
		}
		if !math.IsNaN(s.Loss) && !math.IsInf(s.Loss, 0) {
			p.Loss = &s.Loss
		}
		t.points = append(t.points, p)
	}
	if len(t.points) > pointsKept {
		t.stride *= 2
		t.series++
		t.points = everySecond(t.points, nil)
	}
}

// measure adds the measurements of worker 0 that are new, or more complete than those of the same step before.
func (t *Tracker) measure(r timeline.Report) {
	if r.Worker != 0 || r.Training == nil || r.Training.Trainer != t.trainer {
		return
	}
	for _, m := range r.Training.Measured {
		n := len(t.measured)
		if n > 0 && t.measured[n-1].Step == m.Step {
			t.measured[n-1] = m
		} else if n == 0 || t.measured[n-1].Step < m.Step {
			t.measured = append(t.measured, m)
		}
	}
	if len(t.measured) > pointsKept {
		t.series++
		t.measured = everySecond(t.measured, func(m timeline.Measurement) bool { return len(m.Validation) > 0 })
	}
}

// everySecond returns every second element and those that keep selects, unless these alone are more than pointsKept.
func everySecond[T any](list []T, keep func(T) bool) []T {
	selected := 0
	for _, x := range list {
		if keep != nil && keep(x) {
			selected++
		}
	}
	kept := list[:0]
	for i, x := range list {
		if i%2 == 0 || selected > 0 && selected <= pointsKept/2 && keep(x) {
			kept = append(kept, x)
		}
	}
	return kept
}

// detect looks for a straggler.
func (t *Tracker) detect(worker int, steps []timeline.Step) {
	if t.detector == nil {
		t.detector = timeline.NewDetector(len(t.workers))
	}
	before := t.job.Straggler
	t.detector.Add(worker, steps)
	s, ok := t.detector.Straggler()
	switch {
	case !ok && before != nil:
		t.event(false, "worker %d is no longer slow", before.Worker)
		t.job.Straggler = nil
		t.notify(*before, false)
	case ok:
		s.Cause += t.processor(s)
		t.job.Straggler = &s
		if before == nil || before.Worker != s.Worker {
			t.event(true, "%v", s)
			t.notify(s, true)
		}
	}
}

// processor explains a slow computation by the processor time that the worker gets.
func (t *Tracker) processor(s timeline.Straggler) string {
	if s.Cause != "computation" {
		return ""
	}
	var others []float64
	for i := range t.workers {
		if w := &t.workers[i]; i != s.Worker && w.CPUs > 0 && w.OwnSeconds > 0 {
			others = append(others, w.CPUs*t.job.StepSeconds)
		}
	}
	slices.Sort(others)
	own := t.workers[s.Worker].CPUs * t.job.StepSeconds
	if len(others) > 0 && own > 0 && own < 1.05*others[len(others)/2] {
		return " (without more processor time than the others: its cores are busy)"
	}
	return ""
}

func (t *Tracker) notify(s timeline.Straggler, named bool) {
	if t.straggler != nil {
		t.straggler(s, named)
	}
}

// Job returns the state now. It is the caller's.
func (t *Tracker) Job() Job {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.job.Step, t.job.Problem = 0, t.problem(now)
	for i := range t.workers {
		w := &t.workers[i]
		t.job.Step = max(t.job.Step, w.Step)
		if w.seen.IsZero() {
			continue
		}
		age := now.Sub(w.seen)
		w.HeartbeatAge = age.Seconds()
		switch {
		case w.final:
			w.State = "left"
		case t.job.Problem != "":
			w.State = "unknown"
		case age > silentTime && w.count > 0:
			w.State = "silent"
			if !w.silence {
				w.silence = true
				t.event(true, "worker %d (host %s, pid %d) has sent no heartbeat for %v", i, w.Host, w.PID, silentTime)
			}
		default:
			w.State = "running"
		}
	}
	out := t.job
	out.At = now
	out.Workers = make([]Worker, len(t.workers))
	for i := range t.workers {
		out.Workers[i] = t.workers[i].Worker
	}
	out.Events = append([]Event{}, t.job.Events...) // in JSON a list, also without an event
	return out
}

// Lost notes that the store cannot be reached, and why; nil: it is reached again. What is known of the workers stays.
func (t *Tracker) Lost(why error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if (why == nil) == (t.lost == nil) {
		return
	}
	if t.lost = why; why != nil {
		t.event(true, "the rendezvous store cannot be reached: %v", why)
		return
	}
	t.event(false, "the rendezvous store is reached again")
	for i := range t.workers { // their heartbeats may arrive in the next moment
		if w := &t.workers[i]; w.count > 0 {
			w.seen = time.Now()
		}
	}
}

// problem returns why the state is not current. Workers that all fall silent at once are less likely than a store, or a
// network, that does not answer. The caller holds the lock.
func (t *Tracker) problem(now time.Time) string {
	if t.lost != nil {
		return fmt.Sprintf("the rendezvous store cannot be reached: %v", t.lost)
	}
	running := 0
	var last time.Time
	for i := range t.workers {
		if w := &t.workers[i]; w.count > 0 && !w.final {
			running++
			if w.seen.After(last) {
				last = w.seen
			}
		}
	}
	if silent := now.Sub(last); running > 1 && silent > silentTime {
		return fmt.Sprintf("no heartbeat from any worker for %v: the rendezvous store or the network does not answer, or "+
			"all are suspended", silent.Round(time.Second))
	}
	return ""
}

// Charts returns the points of the charts after a step, and the measurements from that step on: a validation takes time
// after its step. If the number of their series is not the given one, earlier points were dropped: then the lists have
// all, and replace those of the caller.
func (t *Tracker) Charts(after, series int64) Charts {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, k := 0, 0
	if series == t.series {
		for i < len(t.points) && t.points[i].Step <= after {
			i++
		}
		for k < len(t.measured) && t.measured[k].Step < after {
			k++
		}
	}
	return Charts{slices.Clone(t.points[i:]), slices.Clone(t.measured[k:]), t.series}
}
