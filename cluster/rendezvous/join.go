package rendezvous

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/pause"
)

// JoinErrorKind is why a rendezvous failed.
type JoinErrorKind string

// The reasons.
const (
	// Duplicate: two processes registered as the same worker.
	Duplicate JoinErrorKind = "duplicate"
	// Mismatch: a worker's number, or its number of workers, does not match this job.
	Mismatch JoinErrorKind = "mismatch"
	// Missing: not all workers joined before the timeout of one that waited.
	Missing JoinErrorKind = "missing"
	// Interrupted: a worker left before all had joined.
	Interrupted JoinErrorKind = "interrupted"
	// StaleEpoch: the job is already in a later epoch.
	StaleEpoch JoinErrorKind = "stale"
)

// JoinError reports why a rendezvous failed. All workers that waited for each other get the same text.
type JoinError struct {
	Kind JoinErrorKind `json:"kind"`
	// Workers are the workers at fault: the missing ones, the one that joined twice, …
	Workers []int `json:"workers"`
	// Text is the full message.
	Text string `json:"text"`
	// Current is the epoch that the job is in, for [StaleEpoch].
	Current uint32 `json:"-"`
	// Cause is why this worker's own wait ended, if it is the one that left: its context's cause.
	Cause error `json:"-"`
}

// Error returns the text.
func (e *JoinError) Error() string {
	return "rendezvous: " + strings.TrimPrefix(e.Text, "rendezvous of ")
}

// Unwrap returns the cause: for [Missing], whichever worker's deadline expired, [context.DeadlineExceeded].
func (e *JoinError) Unwrap() error {
	if e.Kind == Missing {
		return context.DeadlineExceeded
	}
	return e.Cause
}

// outcome is the result of a rendezvous: the first one written to the store is valid for all.
type outcome struct {
	Joined bool       `json:"joined"`
	Error  *JoinError `json:"error,omitempty"`
	// Roster has the registrations, packed, if Joined. It follows the rest after a line feed.
	Roster []byte `json:"-"`
}

const (
	epochKey         = "epoch"          // of a job: the epoch that it is in
	jobsKey          = "=jobs/"         // the jobs in the store; no escaped id begins with "="
	joinKey          = "worker/join/"   // of a rendezvous
	outcomeKey       = "outcome"        // of a rendezvous
	registrationsKey = "registration/"  // of a rendezvous
	leaveWithin      = 2 * time.Second  // for a worker that leaves, to write it to the store
	deputyAfter      = 2 * time.Second  // after which worker 1 determines the outcome in place of worker 0
	refusedSince     = 10 * time.Minute // older refusals by the store are not reported
	namedMax         = 16               // workers that a text names with host and pid
)

// Join registers this process as a worker of its job, and waits until all workers have registered. It returns
// their registrations, by worker.
//
// A failed rendezvous ends the waits of all workers with the same *[JoinError]: a worker joined twice, a
// worker does not belong to the job, or a worker's ctx ended before all joined; the error then names the
// missing workers. After a rendezvous has succeeded, a further process that registers as one of its workers
// gets an error alone. The first worker of a later epoch ends the earlier epochs: their keys are deleted, and
// every worker that still joins them gets an error that says so.
func Join(ctx context.Context, s Store, own Registration) ([]Registration, error) {
	m, err := newJoiner(s, own)
	if err != nil {
		return nil, err
	}
	registrations, err := m.join(ctx)
	if errors.Is(err, ErrFenced) { // in which epoch the job is now
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin) // the deadline may have passed just now
		defer cancel()
		if e := m.enterEpoch(ctx); e != nil && ctx.Err() == nil {
			err = e
		}
	}
	if failed := (*JoinError)(nil); err != nil && !errors.As(err, &failed) {
		err = fmt.Errorf("rendezvous: %v failed to join: %w", &m.own, err)
	}
	return registrations, err
}

// joiner is one worker's view of a rendezvous.
type joiner struct {
	unfenced      Store // to enter the epoch
	store         Store // for all else
	own           Registration
	prefix        string
	since         time.Time
	registrations []Registration // those seen so far, by worker
}

func newJoiner(s Store, own Registration) (*joiner, error) {
	own, err := own.filled()
	return &joiner{
		unfenced: s, store: Fence(s, own.Job, own.Epoch), own: own, prefix: own.Key(joinKey), since: time.Now(),
	}, err
}

func (m *joiner) join(ctx context.Context) ([]Registration, error) {
	if err := m.enterEpoch(ctx); err != nil {
		return nil, err
	}
	out, err := m.register(ctx)
	if err == nil && out == nil {
		out, err = m.await(ctx)
	}
	if err != nil && ctx.Err() != nil {
		out, err = m.giveUp(ctx)
	}
	if err != nil {
		return nil, err
	}
	if !out.Joined {
		return nil, out.Error
	}
	members, err := unpackRoster(out.Roster, m.own.Workers)
	if err == nil {
		members[m.own.Worker].Nonce = m.own.Nonce
	}
	return members, err
}

// await waits for the outcome, which worker 0 determines, or worker 1 in its place, unless a worker fails the
// rendezvous first. If all followed the registrations of all, they would read n² of them.
func (m *joiner) await(ctx context.Context) (*outcome, error) {
	report := reportWait(ctx, Waiting{Workers: m.own.Workers, done: "joined"},
		looksFor(m.store, m.prefix+registrationsKey, m.own.Worker, m.own.Workers))
	defer report.stop()
	current, end := context.WithCancelCause(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer end(nil)
	work.Go(func() { end(m.awaitLaterEpoch(current)) })
	if m.own.Worker <= 1 {
		work.Go(func() {
			if err := m.decide(current); err != errDecided {
				end(err)
			}
		})
	}
	entries, err := m.store.Wait(current, m.prefix+outcomeKey, 1)
	if err != nil {
		if cause := context.Cause(current); cause != nil {
			err = cause
		}
		return nil, err
	}
	return parseOutcome(entries[0].Value)
}

// errDecided ends the collection of registrations.
var errDecided = errors.New("the outcome is determined")

// decide follows the registrations until they determine the outcome. Worker 1 is late by deputyAfter: then worker 0 has
// failed, or the outcome is known.
func (m *joiner) decide(ctx context.Context) error {
	return Watch(ctx, m.store, m.prefix+registrationsKey, new(uint64), func(changes []Entry) error {
		if m.own.Worker > 0 && pause.For(ctx, deputyAfter) != nil {
			return context.Cause(ctx)
		}
		out, err := m.see(ctx, changes)
		if err != nil && ctx.Err() == nil && !Final(err) { // the others would wait in vain
			out, err = m.propose(ctx, m.interrupted(err), nil)
		}
		if out != nil {
			return errDecided
		}
		return err
	})
}

// awaitLaterEpoch waits until the job is in a later epoch or its keys are deleted, and returns the error that says so,
// or that of the store.
func (m *joiner) awaitLaterEpoch(ctx context.Context) error {
	key := jobKey(m.own.Job) + epochKey
	return Watch(ctx, m.store, key, new(uint64), func(changes []Entry) error {
		for _, e := range changes {
			if e.Key != key {
				continue
			}
			if e.Deleted {
				return errors.New("the keys of its job were deleted from the store by another process")
			}
			if epoch, err := strconv.ParseUint(string(e.Value), 10, 32); err == nil && uint32(epoch) > m.own.Epoch {
				return m.stale(uint32(epoch))
			}
		}
		return nil
	})
}

// enterEpoch ensures that the job is in the registration's epoch.
func (m *joiner) enterEpoch(ctx context.Context) error {
	job := jobKey(m.own.Job)
	if err := AnnounceJob(ctx, m.unfenced, m.own.Job); err != nil {
		return err
	}
	mine := epochText(m.own.Epoch)
	for {
		now, created, err := m.unfenced.Create(ctx, job+epochKey, mine)
		if created || err != nil || bytes.Equal(now, mine) {
			return err
		}
		text, revision, err := m.unfenced.Get(ctx, job+epochKey)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		current, err := strconv.ParseUint(string(text), 10, 32)
		switch {
		case err != nil:
			return fmt.Errorf("key %q holds %.20q, want an epoch", job+epochKey, text)
		case uint32(current) == m.own.Epoch:
			return nil
		case uint32(current) > m.own.Epoch:
			return m.stale(uint32(current))
		}
		swapped, err := m.unfenced.Swap(ctx, job+epochKey, revision, mine)
		if err != nil {
			return err
		}
		if swapped {
			return m.deleteEarlier(ctx)
		}
	}
}

// AnnounceJob lists a job's id in the store, so that workers of other jobs that wait in vain on the same store
// can report it (see [UnrelatedProcesses]). [Join] calls it.
func AnnounceJob(ctx context.Context, s Store, job string) error {
	return s.Set(ctx, jobsKey+strings.TrimSuffix(jobKey(job), "/"), []byte(job))
}

// stale returns the error of a worker that joins an epoch that is over.
func (m *joiner) stale(current uint32) error {
	return &JoinError{Kind: StaleEpoch, Workers: []int{m.own.Worker}, Current: current, Text: fmt.Sprintf(
		"%v joined epoch %d of job %q, which is over: the job is in epoch %d", &m.own, m.own.Epoch, m.own.Job, current)}
}

// deleteEarlier deletes the keys of earlier epochs, whose waits have ended.
func (m *joiner) deleteEarlier(ctx context.Context) error {
	job := jobKey(m.own.Job)
	entries, _, err := m.store.List(ctx, job)
	if err != nil {
		return err
	}
	var keys []string
	for _, e := range entries {
		number, _, below := strings.Cut(strings.TrimPrefix(e.Key, job), "/")
		if epoch, wrong := strconv.ParseUint(number, 10, 32); below && wrong == nil && uint32(epoch) < m.own.Epoch {
			keys = append(keys, e.Key)
		}
	}
	return deleteKeys(ctx, m.store, keys)
}

// register writes the registration. It returns an outcome if one is known already.
func (m *joiner) register(ctx context.Context) (*outcome, error) {
	text, err := json.Marshal(&m.own)
	if err != nil {
		return nil, err
	}
	if m.own.Worker >= m.own.Workers {
		return m.refused(ctx, &JoinError{Kind: Mismatch, Workers: []int{m.own.Worker}, Text: fmt.Sprintf(
			"%v expects job %q to have %d workers, numbered 0 to %d, and is not one of them", &m.own, m.own.Job, m.own.Workers,
			m.own.Workers-1)})
	}
	current, created, err := m.store.Create(ctx, m.prefix+registrationsKey+strconv.Itoa(m.own.Worker), text)
	if created || err != nil {
		return nil, err
	}
	other, err := parseRegistration(current)
	if err != nil || other.Nonce == m.own.Nonce {
		return nil, err
	}
	return m.refused(ctx, &JoinError{Kind: Duplicate, Workers: []int{m.own.Worker}, Text: fmt.Sprintf(
		"worker %d of job %q (epoch %d) joined twice: on host %s as pid %d, and on host %s as pid %d",
		m.own.Worker, m.own.Job, m.own.Epoch, other.Host, other.PID, m.own.Host, m.own.PID)})
}

// refused fails the rendezvous for all workers because of this process. If it has succeeded already, only
// this process fails.
func (m *joiner) refused(ctx context.Context, why *JoinError) (*outcome, error) {
	out, err := m.propose(ctx, why, nil)
	if err == nil && out.Joined {
		why.Text += "; the job has started without this process. " +
			"Use a higher epoch for a restarted job, and a different job id for each job on a store that outlives jobs"
		out = &outcome{Error: why}
	}
	return out, err
}

// propose writes an outcome, a failure or, for success, the roster, and returns the one that is valid: the first one
// written.
func (m *joiner) propose(ctx context.Context, failure *JoinError, roster []byte) (*outcome, error) {
	out := &outcome{Joined: failure == nil, Error: failure, Roster: roster}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	current, created, err := m.store.Create(ctx, m.prefix+outcomeKey, slices.Concat(text, []byte("\n"), roster))
	if created || err != nil {
		return out, err
	}
	return parseOutcome(current)
}

func parseOutcome(text []byte) (*outcome, error) {
	out := &outcome{}
	head, roster, _ := bytes.Cut(text, []byte("\n"))
	out.Roster = roster
	if err := json.Unmarshal(head, out); err != nil || out.Joined == (out.Error != nil) {
		return nil, fmt.Errorf("invalid outcome: %.100q (%v)", text, err)
	}
	return out, nil
}

// see adds registrations to those seen so far. It determines the outcome if all have registered, or one does not belong
// to the job; otherwise it returns nil.
func (m *joiner) see(ctx context.Context, entries []Entry) (*outcome, error) {
	for _, e := range entries {
		if e.Deleted {
			continue
		}
		c, err := parseRegistration(e.Value)
		if err != nil {
			return nil, fmt.Errorf("key %q: %w", e.Key, err)
		}
		switch {
		case versionOf(c.Version) != Version:
			return m.propose(ctx, &JoinError{Kind: Mismatch, Workers: []int{c.Worker, m.own.Worker}, Text: fmt.Sprintf(
				"job %q (epoch %d): %v has version %d of the rendezvous, and %v has version %d: run the same version of "+
					"Lockstep on all hosts", m.own.Job, m.own.Epoch, &c, versionOf(c.Version), &m.own, Version)}, nil)
		case c.Workers != m.own.Workers:
			return m.propose(ctx, m.disagree(&c), nil)
		}
		at, known := slices.BinarySearchFunc(m.registrations, c.Worker, func(a Registration, worker int) int {
			return a.Worker - worker
		})
		if !known {
			m.registrations = slices.Insert(m.registrations, at, c)
		}
	}
	if len(m.registrations) < m.own.Workers {
		return nil, nil
	}
	roster, err := packRoster(m.registrations)
	if err != nil {
		return nil, err
	}
	return m.propose(ctx, nil, roster)
}

// disagree returns the error of workers that were started with different numbers of workers.
func (m *joiner) disagree(c *Registration) *JoinError {
	a, b := c, &m.own
	if b.Worker < a.Worker {
		a, b = b, a
	}
	return &JoinError{Kind: Mismatch, Workers: []int{a.Worker, b.Worker}, Text: fmt.Sprintf(
		"job %q (epoch %d): %v expects %d workers, but %v expects %d", m.own.Job, m.own.Epoch, a, a.Workers, b, b.Workers)}
}

// Withdraw registers that a worker cannot join, and why: the rendezvous ends for all workers that wait in it.
func Withdraw(ctx context.Context, s Store, own Registration, cause error) error {
	m, err := newJoiner(s, own)
	if err == nil {
		err = m.enterEpoch(ctx)
	}
	if err == nil {
		_, err = m.propose(ctx, m.interrupted(cause), nil)
	}
	return err
}

// giveUp ends the rendezvous for all, since this worker must leave. At its deadline it first reads the registrations
// itself: if all are there, worker 0 has failed.
func (m *joiner) giveUp(ctx context.Context) (*outcome, error) {
	cause := context.Cause(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
	defer cancel()
	why := m.interrupted(cause)
	if errors.Is(cause, context.DeadlineExceeded) {
		entries, _, err := m.store.List(ctx, m.prefix+registrationsKey)
		if err != nil {
			return nil, fmt.Errorf("%w after %v, and the store does not answer, which knows the missing workers: %w", cause,
				m.waited(), err)
		}
		if out, err := m.see(ctx, entries); out != nil || err != nil {
			return out, err
		}
		why = m.missing(ctx, cause)
	}
	out, failed := m.propose(ctx, why, nil)
	if failed != nil {
		return nil, fmt.Errorf("%w (and reporting it to the others failed: %w)", why, failed)
	}
	return out, nil // it may have succeeded without this worker having seen it
}

// interrupted returns the error of a rendezvous that this worker leaves.
func (m *joiner) interrupted(cause error) *JoinError {
	return &JoinError{Kind: Interrupted, Workers: []int{m.own.Worker}, Cause: cause, Text: fmt.Sprintf(
		"%v left the rendezvous of job %q (epoch %d) after %v: %v", &m.own, m.own.Job, m.own.Epoch, m.waited(), cause)}
}

func (m *joiner) waited() time.Duration { return time.Since(m.since).Round(time.Millisecond) }

// missing returns the error that names the workers that joined, the missing ones, and other processes that
// tried to connect.
func (m *joiner) missing(ctx context.Context, cause error) *JoinError {
	present := map[int]bool{}
	var names []string
	for i := range m.registrations {
		present[m.registrations[i].Worker] = true
		names = append(names, m.registrations[i].String())
	}
	joined := len(names)
	if joined > namedMax {
		names = append(names[:namedMax], fmt.Sprintf("%d others", joined-namedMax))
	}
	var missing []int
	for w := range m.own.Workers {
		if !present[w] {
			missing = append(missing, w)
		}
	}
	text := fmt.Sprintf("rendezvous of job %q (epoch %d) timed out after %v: %d of %d workers joined",
		m.own.Job, m.own.Epoch, m.waited(), joined, m.own.Workers)
	if joined > 0 {
		text += " (" + enumerate(names) + ")"
	}
	text += fmt.Sprintf("; missing: %s; it timed out on %v", numbers(missing), &m.own)
	return &JoinError{
		Kind: Missing, Workers: missing, Text: text + UnrelatedProcesses(ctx, m.store, m.own.Job),
		Cause: cause,
	}
}

// UnrelatedProcesses reports processes at the store that do not belong to the job: refused connections, and other
// jobs. It returns the end of a sentence, or "" if there are none.
func UnrelatedProcesses(ctx context.Context, s Store, job string) string {
	text := ""
	if b, _, err := s.Get(ctx, refusedKey); err == nil {
		var r refusedReport
		if json.Unmarshal(b, &r) == nil {
			for _, e := range r.Last {
				if ago := time.Since(e.Time).Round(time.Second); ago < refusedSince {
					text += fmt.Sprintf("; the store refused a connection from %s %v ago (%s): %s", e.From, ago, e.Kind, e.Reason)
				}
			}
		}
	}
	entries, _, err := s.List(ctx, jobsKey)
	var others []string
	for _, e := range entries {
		if other := string(e.Value); err == nil && other != job && len(others) < namedMax {
			others = append(others, strconv.Quote(other))
		}
	}
	if len(others) > 0 {
		text += "; the store also has job " + enumerate(others)
	}
	return text
}
