package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/pause"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// startMonitoring publishes this worker's heartbeat and watches those of the others until ctx ends, when the worker
// leaves. file is the launcher's file of this node; nil: none.
func (w *Worker) startMonitoring(ctx context.Context, file *membership.NodeFile) error {
	nodes, numbers := w.nodes()
	key := w.key(status.Heartbeats)
	if numbers != nil {
		key = rendezvous.JobKey(w.job.ID, status.Heartbeats)
	}
	if numbers == nil { // a worker has no agent that reports for it
		file.Close()
		var err error
		if file, err = w.nodeFile(nodes); err != nil {
			return err
		}
	}
	timing := membership.NewTiming(w.cfg.HeartbeatTimeout, len(nodes))
	if numbers != nil {
		timing = timing.Through(file)
	}
	if w.cfg.HeartbeatTimeout > 0 && timing.Timeout > w.cfg.HeartbeatTimeout {
		if w.job.Worker == 0 {
			w.cfg.Logger.Warn("worker: the heartbeat timeout is longer than configured: it is at least four intervals between "+
				"two reports of this host", "interval", timing.Timeout/4, "hosts", len(nodes),
				"configured", w.cfg.HeartbeatTimeout, "used", timing.Timeout)
		}
		w.cfg.HeartbeatTimeout = timing.Timeout
	}
	timing.Wake = w.progress.phaseBegun
	w.member = membership.NewMember(membership.MemberConfig{
		Store: w.store, Key: key, Epoch: w.job.Epoch, Worker: w.job.Worker, Nodes: nodes, Numbers: numbers,
		Agent: numbers != nil, File: file, Timing: timing, State: w.heartbeat,
	})
	w.work.Go(func() {
		defer file.Close()
		w.member.Run(ctx)
	})
	w.work.Go(func() { w.retry(ctx, func() error { return w.answer(ctx) }) })
	w.work.Go(func() { w.retry(ctx, func() error { return w.publishReports(ctx) }) })
	if w.job.Worker == 0 {
		w.track()
		w.work.Go(func() { w.retry(ctx, func() error { return w.followStatus(ctx) }) })
	}
	if w.recordsFolder() != "" {
		w.work.Go(func() { w.retry(ctx, func() error { return w.serveFlightRequests(ctx) }) })
		signals, stop := requests()
		w.work.Go(func() { defer stop(); w.serveSignal(ctx, signals) })
	}
	if w.cfg.HeartbeatTimeout > 0 {
		w.work.Go(func() { w.watchHeartbeats(ctx) })
		w.work.Go(func() { w.watchProgress(ctx) })
	}
	return nil
}

// retry repeats f as long as the store is lost, since the store may come back. If the store refuses this process, the
// group ends.
func (w *Worker) retry(ctx context.Context, f func() error) {
	for err := f(); err != nil && ctx.Err() == nil; err = f() {
		if errors.Is(err, rendezvous.ErrFenced) {
			w.loseLease(err)
			return
		}
		pause.For(ctx, w.cfg.heartbeatInterval())
	}
}

// watchHeartbeats ends the group if a worker, or the store, is silent for the heartbeat timeout.
func (w *Worker) watchHeartbeats(ctx context.Context) {
	silent, err := w.member.Lost(ctx)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		w.loseLease(err)
	default:
		why := fmt.Errorf("no heartbeat for %v: its process is stopped or has exited, or its host cannot be reached",
			silent.Silent.Round(100*time.Millisecond))
		if silent.HostReports {
			why = fmt.Errorf("no heartbeat for %v: its process is stopped or has exited, but another process of its host %s "+
				"reports", silent.Silent.Round(100*time.Millisecond), w.members[silent.Worker].Host)
		}
		others := w.silentHost(silent.Worker)
		if len(others) > 0 {
			why = fmt.Errorf("no heartbeat for %v, and none from %s of the same host %s: the host is down or cannot be reached",
				silent.Silent.Round(100*time.Millisecond), ranges.Text("worker", others), w.members[silent.Worker].Host)
		}
		w.lose(ctx, silent.Worker, why, false, others...)
	}
}

// silentHost returns the other workers of a silent worker's host that have not left the job, if none of them has sent a
// heartbeat for most of the heartbeat timeout, else nil.
func (w *Worker) silentHost(worker int) []int {
	if w.sameHost(worker, w.job.Worker) {
		return nil
	}
	return silentWith(worker, w.member.States(), w.cfg.HeartbeatTimeout, w.sameHost)
}

// silentWith is silentHost for the states of all workers.
func silentWith(worker int, states []membership.WorkerState, timeout time.Duration,
	sameHost func(a, b int) bool,
) []int {
	var others []int
	for i := range states {
		switch {
		case i == worker || states[i].Heartbeat.Final || !sameHost(i, worker):
		case states[i].Silent < timeout*3/4: // the last heartbeats of workers have different ages
			return nil
		default:
			others = append(others, i)
		}
	}
	return others
}

// sameHost reports whether two workers are on hosts of the same name and, as far as their registrations show, on the
// same one: hosts may have equal names, such as localhost, and one host may be several nodes of a launcher.
func (w *Worker) sameHost(a, b int) bool {
	if w.members[a].Host != w.members[b].Host {
		return false
	}
	one, other := w.hostOf(a), w.hostOf(b)
	return one == other || shm.WhyApart(one, other) != ""
}

// watchProgress detects workers that are alive, make no progress and are in no call, while this one waits. It logs
// each once, and ends the group after [Config.ProgressTimeout].
func (w *Worker) watchProgress(ctx context.Context) {
	logged := map[int]uint64{} // progress of those that were logged
	for ctx.Err() == nil {
		pause.For(ctx, w.cfg.heartbeatInterval())
		stalled := w.member.Stalled(w.cfg.HeartbeatTimeout)
		if len(stalled) == 0 || !w.member.States()[w.job.Worker].Heartbeat.Waiting {
			continue
		}
		for k := range stalled {
			v, i := &stalled[k], stalled[k].Worker
			if i == w.job.Worker || !v.Seen || v.Heartbeat.Waiting || v.Heartbeat.Final || ctx.Err() != nil {
				continue
			}
			if most := w.cfg.progressLimit(v.Heartbeat.Phase); most > 0 && v.Stalled > most {
				w.lose(ctx, i, fmt.Errorf("it is alive, but has made no progress for %v while others wait for it",
					v.Stalled.Round(100*time.Millisecond)), true)
				return
			}
			if before, ok := logged[i]; !ok || before != v.Heartbeat.Progress {
				logged[i] = v.Heartbeat.Progress
				w.cfg.Logger.Warn("worker: a worker has made no progress, and this worker waits for it", "who",
					w.describeWorker(ctx, i, nil, true), "since", v.Stalled.Round(time.Second))
			}
		}
	}
}

// endWait is how long ending the group waits for the store's information about the worker that caused it.
const endWait = 500 * time.Millisecond

// lose ends the group because of another worker, and others that are lost with it. A stuck worker is alive: its
// goroutine stacks are requested first.
func (w *Worker) lose(ctx context.Context, worker int, why error, stuck bool, others ...int) {
	if !stuck {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, endWait)
		defer cancel()
	}
	peers, who := w.members[worker].Ranks(), w.describeWorker(ctx, worker, nil, stuck)
	for i, other := range others {
		peers = append(peers, w.members[other].Ranks()...)
		if i < describedMost-1 {
			seen := w.member.States()[other]
			who += "\n" + w.name(other) + " " + lastSeen(&seen)
		}
	}
	slices.Sort(peers)
	w.endSession(&collective.Error{
		Kind: collective.ErrPeerLost, Comm: w.cfg.Collective.Name, Rank: -1, Peers: peers,
		Err: fmt.Errorf("worker %d is lost: %w", worker, why), Who: who + "\n" + w.self(),
	})
}

// errStoreLost is matched by the failure of a worker that lost a store which no worker serves: no other
// worker caused it.
var errStoreLost = errors.New("the store is lost")

// errLeaseEnded is matched by the failure of a worker that may not act on the job any more: no other worker caused it.
var errLeaseEnded = errors.New("this worker's lease has ended")

// loseLease ends the group because this worker must end: the others declare it lost, if they have not done so already.
func (w *Worker) loseLease(err error) {
	fix := leaseFix(err)
	if fix == "" {
		w.loseStore()
		return
	}
	me := &w.members[w.job.Worker]
	w.endSession(&collective.Error{
		Kind: collective.ErrPeerLost, Comm: w.cfg.Collective.Name, Rank: me.First, Who: w.self(),
		Err: fmt.Errorf("%w: worker %d ends: %w: %s", errLeaseEnded, me.Worker, err, fix),
	})
}

// leaseFix describes what has happened to a worker whose lease has ended, and what to do; "": the store is lost.
func leaseFix(err error) string {
	switch {
	case errors.Is(err, membership.ErrDeclaredLost):
		return "this process or its host was suspended, or could not be reached; " +
			"where hosts pause, set a longer heartbeat timeout"
	case errors.Is(err, rendezvous.ErrFenced):
		return "this process or its host was suspended or cut off; where hosts pause, set a longer heartbeat timeout"
	case errors.Is(err, membership.ErrAgent):
		return "lockstep run on this host is suspended or has exited"
	case errors.Is(err, membership.ErrFile):
		return "make room in the folder for temporary files (TMPDIR), and check that it can be written"
	}
	return ""
}

// loseStore ends the group because the state of the others is unknown without the store.
func (w *Worker) loseStore() {
	w.markStoreSilent()
	me, silent := &w.members[w.job.Worker], w.cfg.HeartbeatTimeout
	e := &collective.Error{Kind: collective.ErrPeerLost, Comm: w.cfg.Collective.Name, Rank: -1, Who: w.self()}
	switch {
	case !serves(w.job):
		e.Rank = me.First // the others blame this worker
		e.Err = fmt.Errorf("%w: %s has not answered worker %d for %v: its host cannot be reached from host %s, or it has "+
			"ended", errStoreLost, w.storeName(), me.Worker, silent, me.Host)
	case w.job.Worker != 0:
		e.Peers = w.members[0].Ranks()
		e.Err = fmt.Errorf("the store %s has not answered for %v: worker 0, which serves it, is stopped or has exited, or "+
			"its host cannot be reached", w.storeName(), silent)
		seen := w.member.States()[0]
		e.Who = w.name(0) + " " + lastSeen(&seen) + "\n" + e.Who
	default:
		e.Err = fmt.Errorf("the store %s has not answered for %v", w.storeName(), silent)
	}
	w.endSession(e)
}

// self describes what this worker does, for an error about others.
func (w *Worker) self() string {
	p := w.heartbeat()
	return w.name(w.job.Worker) + ", which reports this, is " + positionText(&p)
}

// endSession ends the session of this worker, and so its group and all its waits, unless it has ended already.
func (w *Worker) endSession(cause error) {
	if w.end(cause) {
		w.cfg.Logger.Error("worker: the job cannot continue", "error", cause)
	}
}

// lastSeen continues a sentence that begins with a worker's name: its last known state.
func lastSeen(v *membership.WorkerState) string {
	if v.Seen && v.Heartbeat.Final {
		return "has left the job, " + positionText(&v.Heartbeat)
	}
	ago := "less than a second"
	if v.Silent >= time.Second {
		ago = v.Silent.Round(100 * time.Millisecond).String()
	}
	if !v.Seen { // it may have done some steps before the first look at the heartbeats, but it has joined
		return fmt.Sprintf("was last seen %s ago as it joined the job", ago)
	}
	text := fmt.Sprintf("was last seen %s ago %s", ago, positionText(&v.Heartbeat))
	if stalled := v.Stalled.Round(time.Second); stalled > 2*time.Second && !v.Heartbeat.Waiting {
		text += fmt.Sprintf(", where it has been for %v", stalled)
	}
	return text
}
