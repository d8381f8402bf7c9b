package membership

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// ReporterConfig configures the process that reports for a node.
type ReporterConfig struct {
	// Store is the job's store, and Key the start of the keys: "<key>/<node>" is a node's report, and "<key>-view" the
	// view.
	Store rendezvous.Store
	Key   string
	// Node is the node's number, unique in the job, and Order its place among the nodes: the first one coordinates.
	Node, Order int
	// Nonce identifies this process in its reports.
	Nonce string
	// Nodes are the workers of each node. A node that never reports is lost too. nil: a node is watched once it has
	// sent a report.
	Nodes map[int][]int
	// NodesMax is the number of nodes, if they are numbered from 0: reports of other nodes, which an earlier run of the
	// job has left in the store, are ignored. 0: none are.
	NodesMax int
	// Timing is that of the reports. With Early a report is sent at once when a worker begins a phase or leaves, but
	// not before Timing.Min.
	Timing Timing
	Early  bool
	// By orders the processes that may report for this node: the lowest one does.
	By int
	// OnView is called on the coordinator before each view is written, with the members that it declares lost. If it
	// returns an error, it is called again soon. nil: nothing.
	OnView func(ctx context.Context, lost []Doubt) error
}

// Reporter sends the reports of a node, passes the view on to its workers and, if it is the coordinator, makes the
// view. Run runs it; the other methods are safe for concurrent use.
type Reporter struct {
	cfg   ReporterConfig
	ready chan struct{} // buffer of one: next is set, for the sender
	seen  chan struct{} // buffer of one: a view was read

	mu        sync.Mutex
	file      *NodeFile // nil: no workers
	epoch     uint32
	workers   []local  // by slot
	count     uint64   // of reports and answers
	next      *Report  // for the sender; nil: none
	echo      []uint64 // by slot: the worker's latest heartbeat that the store has acknowledged
	acked     time.Time
	view      *View // the latest; nil: none
	viewText  []byte
	viewAt    time.Time
	revision  uint64    // of the view's key
	viewed    time.Time // when the write of the latest view that this process is known to have written began; zero: none
	fenced    bool      // the store refuses the reports: the job is in a later epoch
	answered  bool      // the file has the latest view and echo
	rewritten time.Time
}

// local is the state of a worker of this node.
type local struct {
	worker             int
	latest             Heartbeat
	received, advanced time.Time
}

// answer is what a reporter writes for the workers of its node.
type answer struct {
	Every    int64           `json:"every_ms"` // its interval
	By       int             `json:"by"`
	Released bool            `json:"released,omitempty"`
	Fenced   bool            `json:"fenced,omitempty"`
	Echo     []uint64        `json:"echo"`
	View     json.RawMessage `json:"view,omitempty"`

	count uint64 // in the file
}

// NewReporter returns a reporter of a node without workers: see [Reporter.Watch].
func NewReporter(cfg ReporterConfig) *Reporter {
	now := time.Now()
	return &Reporter{
		cfg: cfg, ready: make(chan struct{}, 1), seen: make(chan struct{}, 1), count: uint64(now.UnixNano()),
		viewAt: now, acked: now,
	}
}

// Watch makes the reporter report for the workers that use a file, in an epoch of the job. A nil file ends that. If the
// reporter replaces another process of the node, that worker's silence counts from since; -1: no worker.
func (r *Reporter) Watch(epoch uint32, file *NodeFile, workers []int, replaced int, since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.file, r.epoch, r.workers, r.echo, r.answered = file, epoch, nil, make([]uint64, len(workers)), false
	for i, worker := range workers {
		w := local{worker: worker, received: now, advanced: now}
		if worker == replaced {
			w.received = since
		}
		if _, text, fresh := file.read(i, 0); fresh {
			_ = json.Unmarshal(text, &w.latest) // an earlier heartbeat: only the next one shows that the worker is alive
		}
		r.workers = append(r.workers, w)
	}
}

// Latest returns a worker of this node as its file has it, and whether it is one that has sent a heartbeat.
func (r *Reporter) Latest(worker int) (Heartbeat, bool) {
	r.mu.Lock()
	file := r.file
	slot := slices.IndexFunc(r.workers, func(w local) bool { return w.worker == worker })
	r.mu.Unlock()
	if slot < 0 {
		return Heartbeat{}, false
	}
	return latestIn(file, slot)
}

// latestIn returns the heartbeat in a slot.
func latestIn(file *NodeFile, slot int) (h Heartbeat, seen bool) {
	_, text, fresh := file.read(slot, 0)
	return h, fresh && json.Unmarshal(text, &h) == nil
}

// First sends a first report, before Run: from now on the others notice the silence of this node.
func (r *Reporter) First(ctx context.Context) error {
	return r.cfg.Store.Set(ctx, r.key(), encode(r.prepare(time.Now(), false)))
}

// Contested reports, before Run, whether another process reports for this node: true as soon as it sends a report,
// false when it has sent none for the timeout. It counts looks, not time: a process that was stopped itself knows
// nothing about others.
func (r *Reporter) Contested(ctx context.Context) (bool, error) {
	var first []byte
	for look := range contestedLooks + 1 {
		text, _, err := r.cfg.Store.Get(ctx, r.key())
		switch {
		case err != nil && !errors.Is(err, rendezvous.ErrNotFound):
			return false, err
		case look == 0:
			first = text
		case !bytes.Equal(text, first):
			return true, nil
		}
		if look < contestedLooks {
			if err := pause.For(ctx, r.cfg.Timing.Timeout/contestedLooks); err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

// contestedLooks is how often Contested looks for a new report.
const contestedLooks = 20

// StoreSilence returns the time since this process sent the latest report that the store has acknowledged, without the
// time in which the process did not run.
func (r *Reporter) StoreSilence() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Since(r.acked)
}

// Run reports until ctx ends.
func (r *Reporter) Run(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() { r.send(ctx) })
	work.Go(func() { r.readViews(ctx) })
	work.Go(func() { r.coordinate(ctx) })
	ticker := time.NewTicker(max(r.cfg.Timing.Min, time.Millisecond))
	defer ticker.Stop()
	var sent time.Time
	for due := time.Now(); ; due = time.Now().Add(r.cfg.Timing.Min) {
		now := time.Now()
		if late := now.Sub(due); late > r.cfg.Timing.Every {
			r.mu.Lock()
			r.acked = sooner(r.acked.Add(late), now)
			r.mu.Unlock()
		}
		news := r.readSlots(now)
		if now.Sub(sent) >= r.cfg.Timing.Every || r.cfg.Early && news {
			sent = now
			r.prepare(now, false)
		}
		r.writeAnswer(now, false)
		select {
		case <-ticker.C:
		case <-r.seen:
		case <-ctx.Done():
			return
		}
	}
}

// Leave sends the last report of a node's reporter after [Reporter.Run] has returned, and hands its roles over. ctx
// bounds it.
func (r *Reporter) Leave(ctx context.Context) {
	now := time.Now()
	r.readSlots(now)
	_ = r.cfg.Store.Set(ctx, r.key(), encode(r.prepare(now, true))) // else the others notice the silence
	r.mu.Lock()
	v, revision := r.view, r.revision
	r.mu.Unlock()
	if v != nil && v.Node == r.cfg.Node && !v.Released {
		released := *v
		released.Released, released.Count = true, v.Count+1
		_, _ = r.cfg.Store.Swap(ctx, r.cfg.Key+viewSuffix, revision, released.encode()) // the lease ends anyway
	}
	r.writeAnswer(now, true)
}

const viewSuffix = "-view"

// key returns the key of this node's reports.
func (r *Reporter) key() string { return r.cfg.Key + "/" + strconv.Itoa(r.cfg.Node) }

// readSlots reads the workers' new heartbeats, and reports whether one has begun a phase or left.
func (r *Reporter) readSlots(now time.Time) (news bool) {
	r.mu.Lock()
	file, last := r.file, make([]uint64, len(r.workers))
	for i := range r.workers {
		last[i] = r.workers[i].latest.Count
	}
	r.mu.Unlock()
	texts := make([][]byte, len(last)) // reading may take long: not under the lock
	for i := range last {
		_, texts[i], _ = file.read(i, last[i])
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if file != r.file {
		return false
	}
	for i := range r.workers {
		w := &r.workers[i]
		var h Heartbeat
		if texts[i] == nil || json.Unmarshal(texts[i], &h) != nil {
			if w.latest.Waiting {
				w.advanced = now
			}
			continue
		}
		news = news || h.Phase != w.latest.Phase || h.Final != w.latest.Final || w.latest.Count == 0
		if h.Progress != w.latest.Progress || h.Waiting || w.latest.Count == 0 {
			w.advanced = now
		}
		w.received, w.latest = now, h
	}
	return news
}

// prepare makes the next report, and wakes the sender.
func (r *Reporter) prepare(now time.Time, final bool) *Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	next := &Report{Node: r.cfg.Node, Nonce: r.cfg.Nonce, Count: r.count, Epoch: r.epoch, Final: final}
	for i := range r.workers {
		w := &r.workers[i]
		next.Final = next.Final && w.latest.Final
		if w.latest.Count == 0 && r.cfg.Nodes == nil {
			continue // it has not joined: the rendezvous reports that
		}
		s := WorkerReport{
			Worker: w.worker, Silent: milliseconds(now.Sub(w.received)), Stalled: milliseconds(now.Sub(w.advanced)),
			Heartbeat: w.latest,
		}
		if s.Timeout == milliseconds(r.cfg.Timing.Timeout) {
			s.Timeout = 0
		}
		if fromMilliseconds(s.Silent) < r.cfg.Timing.suspectAfter() && w.latest.Count > 0 {
			s.Silent = 0 // it has not missed enough heartbeats: the report counts as one
		}
		next.Workers = append(next.Workers, s)
	}
	r.next = next
	wake(r.ready)
	return next
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// send sends the latest report whenever there is a new one.
func (r *Reporter) send(ctx context.Context) {
	for {
		select {
		case <-r.ready:
		case <-ctx.Done():
			return
		}
		r.mu.Lock()
		next, viewed := r.next, r.viewed
		r.next = nil
		r.mu.Unlock()
		if next == nil {
			continue
		}
		began := time.Now()
		if !viewed.IsZero() {
			next.ViewAge = milliseconds(began.Sub(viewed)) + 1
		}
		if err := r.cfg.Store.Set(ctx, r.key(), encode(next)); err != nil {
			if errors.Is(err, rendezvous.ErrFenced) {
				r.mu.Lock()
				r.fenced, r.answered = true, false
				r.mu.Unlock()
			}
			pause.For(ctx, r.cfg.Timing.Every)
			continue // the next report repeats it
		}
		r.mu.Lock()
		r.acked = began
		for i, slot := 0, 0; slot < len(r.workers) && i < len(next.Workers) && next.Epoch == r.epoch; slot++ {
			if r.workers[slot].worker == next.Workers[i].Worker {
				r.echo[slot], r.answered = next.Workers[i].Count, false
				i++
			}
		}
		r.mu.Unlock()
	}
}

// readViews follows the view.
func (r *Reporter) readViews(ctx context.Context) {
	key := r.cfg.Key + viewSuffix
	for after := uint64(0); ctx.Err() == nil; pause.For(ctx, r.cfg.Timing.Every) {
		_ = rendezvous.Watch(ctx, r.cfg.Store, key, &after, func(changes []rendezvous.Entry) error {
			for _, e := range changes {
				if e.Key == key && !e.Deleted {
					r.saw(e.Value, e.Revision)
				}
			}
			return nil
		})
	}
}

// saw records a view, unless a later one is known.
func (r *Reporter) saw(text []byte, revision uint64) {
	v, err := decodeView(text)
	if err != nil {
		v, text = &View{Node: -1, Released: true}, nil // not a view: it is replaced
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if revision < r.revision {
		return // the coordinator has read a later one itself
	}
	r.view, r.viewText, r.viewAt, r.revision, r.answered = v, text, time.Now(), revision, false
	wake(r.seen)
}

// writeAnswer writes what the workers of the node read, if it has changed or the reporter's own heartbeat is due.
func (r *Reporter) writeAnswer(now time.Time, released bool) {
	r.mu.Lock()
	file := r.file
	if file == nil || r.answered && !released && now.Sub(r.rewritten) < r.cfg.Timing.Every {
		r.mu.Unlock()
		return
	}
	text := encode(&answer{
		Every: milliseconds(r.cfg.Timing.Every), By: r.cfg.By, Released: released, Fenced: r.fenced, Echo: r.echo,
		View: r.viewText,
	})
	r.count++
	count := r.count
	r.answered, r.rewritten = true, now
	r.mu.Unlock()
	if file.write(file.slots, count, text) != nil {
		r.mu.Lock()
		r.answered = false
		r.mu.Unlock()
	}
}

// coordinate makes the view while this node is the coordinator, and takes over when the coordinator is silent.
func (r *Reporter) coordinate(ctx context.Context) {
	for ctx.Err() == nil {
		r.mu.Lock()
		v, at, revision := r.view, r.viewAt, r.revision
		r.mu.Unlock()
		wait := r.cfg.Timing.lease() + min(time.Duration(r.cfg.Order)*r.cfg.Timing.Min, r.cfg.Timing.lease())
		switch {
		case v == nil && r.cfg.Order == 0, v != nil && v.Node == r.cfg.Node:
			wait = 0
		case v != nil && v.Released:
			wait = min(time.Duration(r.cfg.Order)*r.cfg.Timing.Min, r.cfg.Timing.lease())
		}
		if left := wait - time.Since(at); left > 0 {
			pause.For(ctx, min(max(left, r.cfg.Timing.Min), r.cfg.Timing.lease()/4))
			continue
		}
		r.lead(ctx, v, at, revision)
		pause.For(ctx, r.cfg.Timing.Min)
	}
}

// lead makes the view until another node does, or the store fails.
func (r *Reporter) lead(ctx context.Context, before *View, since time.Time, revision uint64) {
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	// The reports of the other nodes may be as new as this moment.
	now := time.Now()
	c := &coordinator{reporter: r, judge: newJudge(r.cfg.Timing, r.cfg.Nodes, now), news: make(chan struct{}, 1)}
	c.readAt, c.view.Node = now, r.cfg.Node
	if before != nil {
		c.view.Term = before.Term
	}
	c.view.Term++
	if c.read(ctx) != nil {
		return
	}
	if before != nil && !before.Released && before.Node != r.cfg.Node {
		c.judge.coordinated(before.Node, since)
	}
	if done, err := c.write(ctx, before == nil, revision); !done || err != nil {
		return
	}
	following.Go(func() { c.follow(ctx) })
	for due := time.Now(); ; {
		next, ok := c.step(ctx, due)
		if !ok {
			return
		}
		wait := min(time.Until(next), r.cfg.Timing.Every)
		due = time.Now().Add(wait)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-c.news:
			timer.Stop()
		case <-ctx.Done():
			return
		}
	}
}

// has reports whether a node is one of the job.
func (r *Reporter) has(node int) bool {
	return node >= 0 && (r.cfg.NodesMax == 0 || node < r.cfg.NodesMax)
}

// coordinator is the state of a reporter that makes the view.
type coordinator struct {
	reporter *Reporter
	news     chan struct{} // buffer of one: a member has left

	mu       sync.Mutex
	judge    *judge
	begun    bool // the reports that the store had at first are recorded
	revision uint64
	readAt   time.Time // the latest answer of the store

	view    View // the one written
	unknown bool // whether it was: the store has not answered
}

// read reads all reports.
func (c *coordinator) read(ctx context.Context) error {
	entries, revision, err := c.reporter.cfg.Store.List(ctx, c.reporter.cfg.Key+"/")
	if err == nil {
		c.record(entries, revision)
	}
	return err
}

// record records reports.
func (c *coordinator) record(entries []rendezvous.Entry, revision uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// This node's own reports are among the changes, so a healthy store answers once per interval. When it does so
	// after an outage, the others have had no opportunity to report during it.
	now := time.Now()
	if out := now.Sub(c.readAt); out > 2*c.reporter.cfg.Timing.Every {
		c.judge.slept(now, out)
	}
	c.readAt = now
	left := false
	for _, e := range entries {
		node, err := strconv.Atoi(strings.TrimPrefix(e.Key, c.reporter.cfg.Key+"/"))
		if err != nil || e.Deleted || !c.reporter.has(node) {
			continue
		}
		if r, err := DecodeReport(e.Value); err == nil && r.Node == node {
			left = c.judge.record(time.Now(), !c.begun, r) || left
		}
	}
	c.begun, c.revision = true, revision
	if left {
		wake(c.news)
	}
}

// follow reads the reports as they arrive.
func (c *coordinator) follow(ctx context.Context) {
	for ctx.Err() == nil {
		c.mu.Lock()
		after := c.revision
		c.mu.Unlock()
		entries, revision, err := c.reporter.cfg.Store.Changes(ctx, c.reporter.cfg.Key+"/", after)
		switch {
		case errors.Is(err, rendezvous.ErrCompacted):
			err = c.read(ctx)
		case err == nil:
			c.record(entries, revision)
			pause.For(ctx, c.reporter.cfg.Timing.Min) // several reports at once
		}
		if err != nil {
			pause.For(ctx, c.reporter.cfg.Timing.Every)
		}
	}
}

// step writes the next view. It returns when the one after it is due, or false if this node is not the coordinator.
func (c *coordinator) step(ctx context.Context, due time.Time) (next time.Time, ok bool) {
	r := c.reporter
	now := time.Now()
	if late := now.Sub(due); late > r.cfg.Timing.Every {
		c.mu.Lock()
		c.judge.slept(now, late)
		c.mu.Unlock()
	}
	if c.unknown && !c.find(ctx) {
		return now.Add(r.cfg.Timing.Every), c.unknown && r.coordinates(c.view.Term)
	}
	v, next := c.current(now)
	if v.losesMore(&c.view) { // the last opportunity to refute
		if c.read(ctx) != nil {
			return now.Add(r.cfg.Timing.Every), r.coordinates(c.view.Term)
		}
		v, next = c.current(time.Now())
	}
	if r.cfg.OnView != nil && r.cfg.OnView(ctx, v.lost()) != nil {
		next = now.Add(r.cfg.Timing.Min)
	}
	r.mu.Lock()
	revision, known := r.revision, r.view != nil && r.view.Term == c.view.Term && r.view.Count == c.view.Count
	r.mu.Unlock()
	if !known { // its own view has not been read yet, so its revision is unknown
		return now.Add(r.cfg.Timing.Min), r.coordinates(c.view.Term)
	}
	v.Term, v.Count, v.Node = c.view.Term, c.view.Count, c.view.Node
	c.view = v
	done, err := c.write(ctx, false, revision)
	if err != nil { // the judge is kept: a new one would not know since when a member is silent
		c.unknown = true
		return time.Now().Add(r.cfg.Timing.Every), r.coordinates(c.view.Term)
	}
	return next, done
}

// find reads the view that the store has after a write whose result is unknown. It reports false if the store does not
// answer, or if another node has taken over: then nothing is unknown any more.
func (c *coordinator) find(ctx context.Context) bool {
	text, revision, err := c.reporter.cfg.Store.Get(ctx, c.reporter.cfg.Key+viewSuffix)
	if err != nil && !errors.Is(err, rendezvous.ErrNotFound) {
		return false
	}
	c.unknown = false
	v, err := decodeView(text)
	if err != nil || v.Term != c.view.Term || v.Node != c.view.Node {
		return false
	}
	c.view.Count = v.Count
	c.reporter.saw(text, revision)
	return true
}

// current returns the view of now.
func (c *coordinator) current(now time.Time) (View, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.judge.view(now)
}

// coordinates reports whether no other node has taken over.
func (r *Reporter) coordinates(term uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.view == nil || r.view.Term <= term
}

// write writes the view in place of a revision, and reports whether it did: another node may have been faster. The
// revision is the fencing token. After an error it is unknown whether it did.
func (c *coordinator) write(ctx context.Context, create bool, revision uint64) (done bool, err error) {
	c.view.Count++
	text := c.view.encode()
	r, began := c.reporter, time.Now()
	r.wrote(began, false)
	key := r.cfg.Key + viewSuffix
	if create {
		_, done, err = r.cfg.Store.Create(ctx, key, text)
	} else {
		done, err = r.cfg.Store.Swap(ctx, key, revision, text)
	}
	if done && err == nil {
		r.wrote(began, true)
	}
	return done, err
}

// wrote records when the write of a view began. Until one is known to be written, the first one counts.
func (r *Reporter) wrote(began time.Time, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known || r.viewed.IsZero() {
		r.viewed = began
	}
}
