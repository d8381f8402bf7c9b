package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MeetKind is why a rendezvous failed.
type MeetKind string

// The reasons.
const (
	// Duplicate: two processes registered as the same worker.
	Duplicate MeetKind = "duplicate"
	// Stranger: a worker's number, or its number of workers, does not match this job.
	Stranger MeetKind = "stranger"
	// Missing: not all workers joined before the timeout of one that waited.
	Missing MeetKind = "missing"
	// Interrupted: a worker left before all had joined.
	Interrupted MeetKind = "interrupted"
	// Over: the job is already in a later epoch.
	Over MeetKind = "over"
)

// MeetError reports why a rendezvous failed. All workers that waited for each other get the same text.
type MeetError struct {
	Kind MeetKind `json:"kind"`
	// Workers are the workers at fault: the missing ones, the one that joined twice, …
	Workers []int `json:"workers"`
	// Text is the full message.
	Text string `json:"text"`
	// Current is the epoch that the job is in, for [Over].
	Current uint32 `json:"-"`
	// Cause is why this worker's own wait ended, if it is the one that left: its context's cause.
	Cause error `json:"-"`
}

// Error returns the text.
func (e *MeetError) Error() string {
	return "rendezvous: " + strings.TrimPrefix(e.Text, "rendezvous of ")
}

// Unwrap returns the cause: for [Missing], whichever worker's deadline expired, [context.DeadlineExceeded].
func (e *MeetError) Unwrap() error {
	if e.Kind == Missing {
		return context.DeadlineExceeded
	}
	return e.Cause
}

// outcome is the result of a rendezvous: the first one written to the store is valid for all.
type outcome struct {
	Met   bool       `json:"met"`
	Error *MeetError `json:"error,omitempty"`
}

const (
	epochKey     = "epoch"          // of a job: the epoch that it is in
	jobsKey      = "=jobs/"         // the jobs in the store; no escaped id begins with "="
	outcomeKey   = "outcome"        // of a rendezvous
	cardsKey     = "card/"          // of a rendezvous
	leaveWithin  = 2 * time.Second  // for a worker that leaves, to write it to the store
	refusedSince = 10 * time.Minute // older refusals by the store are not reported
	namedMax     = 16               // workers that a text names with host and pid
)

// Meet registers this process as a worker of its job, and waits until all workers have registered. It returns
// their registrations, by worker.
//
// A failed rendezvous ends the waits of all workers with the same *[MeetError]: a worker joined twice, a
// worker does not belong to the job, or a worker's ctx ended before all joined; the error then names the
// missing workers. After a rendezvous has succeeded, a further process that registers as one of its workers
// gets an error alone. The first worker of a later epoch ends the earlier epochs: their keys are deleted, and
// every worker that still joins them gets an error that says so.
func Meet(ctx context.Context, s Store, card Card) ([]Card, error) {
	card, err := card.filled()
	if err != nil {
		return nil, err
	}
	m := &meeting{store: s, card: card, prefix: card.Key(card.Role, "meet/"), since: time.Now()}
	cards, err := m.meet(ctx)
	if own := (*MeetError)(nil); err != nil && !errors.As(err, &own) {
		err = fmt.Errorf("rendezvous: %v failed to join: %w", &card, err)
	}
	return cards, err
}

// meeting is one worker's view of a rendezvous.
type meeting struct {
	store  Store
	card   Card
	prefix string
	since  time.Time
	report *waitReport
	cards  []Card // the registrations so far, by worker
}

func (m *meeting) meet(ctx context.Context) ([]Card, error) {
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	out, err := m.register(ctx)
	if err == nil && out == nil {
		m.report = reportWait(ctx, Waiting{
			Role: m.card.Role, Missing: absent(nil, "", m.card.Workers),
			Workers: m.card.Workers, done: "joined",
		})
		out, err = m.wait(ctx)
		m.report.stop()
	}
	if err != nil && ctx.Err() != nil {
		out, err = m.giveUp(ctx)
	}
	if err != nil {
		return nil, err
	}
	if !out.Met {
		return nil, out.Error
	}
	return m.cards, nil
}

// enter ensures that the job is in the card's epoch.
func (m *meeting) enter(ctx context.Context) error {
	job := jobKey(m.card.Job)
	if err := Register(ctx, m.store, m.card.Job); err != nil {
		return err
	}
	mine := []byte(strconv.FormatUint(uint64(m.card.Epoch), 10))
	for {
		_, created, err := m.store.Create(ctx, job+epochKey, mine)
		if created || err != nil {
			return err
		}
		text, revision, err := m.store.Get(ctx, job+epochKey)
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
		case uint32(current) == m.card.Epoch:
			return nil
		case uint32(current) > m.card.Epoch:
			return m.over(uint32(current))
		}
		swapped, err := m.store.Swap(ctx, job+epochKey, revision, mine)
		if err != nil {
			return err
		}
		if swapped {
			return m.deleteEarlier(ctx)
		}
	}
}

// Register lists a job's id in the store, so that workers of other jobs that wait in vain on the same store
// can report it (see [Strangers]). [Meet] calls it.
func Register(ctx context.Context, s Store, job string) error {
	return s.Set(ctx, jobsKey+strings.TrimSuffix(jobKey(job), "/"), []byte(job))
}

// over returns the error of a worker that joins an epoch that is over.
func (m *meeting) over(current uint32) error {
	return &MeetError{Kind: Over, Workers: []int{m.card.Worker}, Current: current, Text: fmt.Sprintf(
		"%v joined epoch %d of job %q, which is over: the job is in epoch %d", &m.card, m.card.Epoch, m.card.Job, current)}
}

// deleteEarlier deletes the keys of earlier epochs.
func (m *meeting) deleteEarlier(ctx context.Context) error {
	job := jobKey(m.card.Job)
	entries, _, err := m.store.List(ctx, job)
	for _, e := range entries {
		number, _, below := strings.Cut(strings.TrimPrefix(e.Key, job), "/")
		if epoch, wrong := strconv.ParseUint(number, 10, 32); err == nil && below && wrong == nil && uint32(epoch) < m.card.Epoch {
			err = m.store.Delete(ctx, e.Key)
		}
	}
	return err
}

// register writes the registration. It returns an outcome if one is known already.
func (m *meeting) register(ctx context.Context) (*outcome, error) {
	text, err := json.Marshal(&m.card)
	if err != nil {
		return nil, err
	}
	if m.card.Worker >= m.card.Workers {
		return m.refused(ctx, &MeetError{Kind: Stranger, Workers: []int{m.card.Worker}, Text: fmt.Sprintf(
			"%v expects job %q to have %d %ss, numbered 0 to %d, and is not one of them", &m.card, m.card.Job, m.card.Workers, m.card.Role, m.card.Workers-1)})
	}
	current, created, err := m.store.Create(ctx, m.prefix+cardsKey+strconv.Itoa(m.card.Worker), text)
	if created || err != nil {
		return nil, err
	}
	other, err := parseCard(current)
	if err != nil || other.Nonce == m.card.Nonce {
		return nil, err
	}
	return m.refused(ctx, &MeetError{Kind: Duplicate, Workers: []int{m.card.Worker}, Text: fmt.Sprintf(
		"%s %d of job %q (epoch %d) joined twice: on host %s as pid %d, and on host %s as pid %d",
		m.card.Role, m.card.Worker, m.card.Job, m.card.Epoch, other.Host, other.PID, m.card.Host, m.card.PID)})
}

// refused fails the rendezvous for all workers because of this process. If it has succeeded already, only
// this process fails.
func (m *meeting) refused(ctx context.Context, why *MeetError) (*outcome, error) {
	out, err := m.propose(ctx, why)
	if err == nil && out.Met {
		why.Text += "; the job has started without this process. " +
			"Use a higher epoch for a restarted job, and a different job id for each job on a store that outlives jobs"
		out = &outcome{Error: why}
	}
	return out, err
}

// propose writes an outcome, failure or nil for success, and returns the one that is valid: the first one
// written.
func (m *meeting) propose(ctx context.Context, failure *MeetError) (*outcome, error) {
	out := &outcome{Met: failure == nil, Error: failure}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	current, created, err := m.store.Create(ctx, m.prefix+outcomeKey, text)
	if created || err != nil {
		return out, err
	}
	return parseOutcome(current)
}

func parseOutcome(text []byte) (*outcome, error) {
	out := &outcome{}
	if err := json.Unmarshal(text, out); err != nil || out.Met == (out.Error != nil) {
		return nil, fmt.Errorf("invalid outcome: %.100q (%v)", text, err)
	}
	return out, nil
}

// wait waits for an outcome, or determines it.
func (m *meeting) wait(ctx context.Context) (out *outcome, err error) {
	err = follow(ctx, m.store, m.prefix, func(now map[string]Entry) (bool, error) {
		out, err = m.look(ctx, now)
		return out != nil, err
	})
	return out, err
}

// look reads the store's current state, and returns the outcome if there is one.
func (m *meeting) look(ctx context.Context, now map[string]Entry) (*outcome, error) {
	if err := m.read(now); err != nil {
		return nil, err
	}
	if m.report != nil {
		m.report.missing(absent(now, cardsKey, m.card.Workers))
	}
	if e, ok := now[outcomeKey]; ok {
		return parseOutcome(e.Value)
	}
	own := slices.IndexFunc(m.cards, func(c Card) bool { return c.Worker == m.card.Worker && c.Nonce == m.card.Nonce })
	if own < 0 { // deleted: enter returns the error if a later epoch did it
		if err := m.enter(ctx); err != nil {
			return nil, err
		}
		return nil, errors.New("its registration was deleted from the store by another process")
	}
	for i := range m.cards {
		if c := &m.cards[i]; c.Workers != m.card.Workers {
			return m.propose(ctx, m.disagree(c))
		}
	}
	if len(m.cards) < m.card.Workers {
		return nil, nil
	}
	return m.propose(ctx, nil)
}

// read decodes the registrations so far.
func (m *meeting) read(now map[string]Entry) error {
	m.cards = m.cards[:0]
	for name, e := range now {
		if !strings.HasPrefix(name, cardsKey) {
			continue
		}
		c, err := parseCard(e.Value)
		if err != nil {
			return fmt.Errorf("key %q: %w", e.Key, err)
		}
		m.cards = append(m.cards, c)
	}
	slices.SortFunc(m.cards, func(a, b Card) int { return a.Worker - b.Worker })
	return nil
}

// disagree returns the error of workers that were started with different numbers of workers.
func (m *meeting) disagree(c *Card) *MeetError {
	a, b := c, &m.card
	if b.Worker < a.Worker {
		a, b = b, a
	}
	return &MeetError{Kind: Stranger, Workers: []int{a.Worker, b.Worker}, Text: fmt.Sprintf(
		"job %q (epoch %d): %v expects %d %ss, but %v expects %d", m.card.Job, m.card.Epoch, a, a.Workers, m.card.Role, b, b.Workers)}
}

// giveUp ends the rendezvous for all, since this worker must leave.
func (m *meeting) giveUp(ctx context.Context) (*outcome, error) {
	cause := context.Cause(ctx)
	waited := time.Since(m.since).Round(time.Millisecond)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
	defer cancel()
	err := &MeetError{
		Kind: Interrupted, Workers: []int{m.card.Worker}, Cause: cause,
		Text: fmt.Sprintf("%v left the rendezvous of job %q (epoch %d) after %v: %v", &m.card, m.card.Job, m.card.Epoch, waited, cause),
	}
	if errors.Is(cause, context.DeadlineExceeded) {
		err = m.missing(ctx, waited, cause)
	}
	out, failed := m.propose(ctx, err)
	if failed != nil {
		return nil, fmt.Errorf("%w (and reporting it to the others failed: %w)", err, failed)
	}
	if out.Met { // this worker has not seen it yet
		entries, _, err := m.store.List(ctx, m.prefix)
		if err != nil {
			return nil, err
		}
		now := map[string]Entry{}
		merge(now, entries, m.prefix)
		if err := m.read(now); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// missing returns the error that names the workers that joined, the missing ones, and other processes that
// tried to connect.
func (m *meeting) missing(ctx context.Context, waited time.Duration, cause error) *MeetError {
	present := map[int]bool{}
	var names []string
	for i := range m.cards {
		present[m.cards[i].Worker] = true
		names = append(names, m.cards[i].String())
	}
	joined := len(names)
	if joined > namedMax {
		names = append(names[:namedMax], fmt.Sprintf("%d others", joined-namedMax))
	}
	var missing []int
	for w := range m.card.Workers {
		if !present[w] {
			missing = append(missing, w)
		}
	}
	text := fmt.Sprintf("rendezvous of job %q (epoch %d) timed out after %v: %d of %d %ss joined",
		m.card.Job, m.card.Epoch, waited, joined, m.card.Workers, m.card.Role)
	if joined > 0 {
		text += " (" + enumerate(names) + ")"
	}
	text += fmt.Sprintf("; missing: %s; it timed out on %v", numbers(m.card.Role, missing), &m.card)
	return &MeetError{Kind: Missing, Workers: missing, Text: text + Strangers(ctx, m.store, m.card.Job), Cause: cause}
}

// Strangers reports processes at the store that do not belong to the job: refused connections, and other
// jobs. It returns the end of a sentence, or "" if there are none.
func Strangers(ctx context.Context, s Store, job string) string {
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
