package rendezvous_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

func wantJoinError(t *testing.T, err error, kind rendezvous.JoinErrorKind, parts ...string) {
	t.Helper()
	var e *rendezvous.JoinError
	if !errors.As(err, &e) || e.Kind != kind {
		t.Fatalf("got %v, want one of kind %q", err, kind)
	}
	for _, p := range parts {
		if !strings.Contains(e.Error(), p) {
			t.Errorf("%v\nwant %q in it", e, p)
		}
	}
}

// TestLateDuplicate: after a rendezvous has succeeded, one more process that joins gets an error alone.
func TestLateDuplicate(t *testing.T) {
	m := rendezvous.NewMemory()
	for _, r := range joinAll(t.Context(), m.Open, time.Minute, registration(0, 2), registration(1, 2)) {
		if r.err != nil {
			t.Fatal(r.err)
		}
	}
	late := registration(1, 2)
	late.PID = 999
	_, err := rendezvous.Join(t.Context(), m.Open(), late)
	wantJoinError(t, err, rendezvous.Duplicate, "host b as pid 101", "as pid 999", "has started without this process")
	_, err = rendezvous.Join(t.Context(), m.Open(), registration(2, 2))
	wantJoinError(t, err, rendezvous.Mismatch, "worker 2", "numbered 0 to 1")
}

// TestEpochs: the first worker of a later epoch ends the waits of an earlier one, and deletes its keys; a worker that
// joins the earlier epoch gets an error with the current one.
func TestEpochs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		s := m.Open()
		old, now := registration(0, 2), registration(0, 1)
		now.Epoch = 3
		var work sync.WaitGroup
		work.Go(func() {
			_, err := rendezvous.Join(t.Context(), m.Open(), old)
			wantJoinError(t, err, rendezvous.StaleEpoch, "epoch 0", "the job is in epoch 3")
		})
		time.Sleep(time.Second)
		if err := s.Set(t.Context(), rendezvous.Key("digits", 0, "other"), nil); err != nil {
			t.Fatal(err)
		}
		if _, err := rendezvous.Join(t.Context(), s, now); err != nil {
			t.Fatal(err)
		}
		work.Wait()
		_, err := rendezvous.Join(t.Context(), s, old)
		wantJoinError(t, err, rendezvous.StaleEpoch, "worker 0 (host a, pid 100) joined epoch 0", "the job is in epoch 3")
		var e *rendezvous.JoinError
		if errors.As(err, &e); e.Current != 3 {
			t.Errorf("the current epoch is %d", e.Current)
		}
		entries, _, err := s.List(t.Context(), "digits/")
		for _, e := range entries {
			if strings.HasPrefix(e.Key, "digits/0/") {
				t.Errorf("%q is left of epoch 0", e.Key)
			}
		}
		if err != nil || len(entries) == 0 {
			t.Errorf("%v, %v", entries, err)
		}
	})
}

// TestInterrupted: a worker whose context is canceled while it waits ends the wait of the others, with its cause.
func TestInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		ctx, stop := context.WithCancelCause(t.Context())
		reason := errors.New("signal interrupt")
		time.AfterFunc(3*time.Second, func() { stop(reason) })
		var work sync.WaitGroup
		work.Go(func() {
			_, err := rendezvous.Join(ctx, m.Open(), registration(0, 3))
			wantJoinError(t, err, rendezvous.Interrupted, "worker 0 (host a, pid 100) left", "after 3s: signal interrupt")
			if !errors.Is(err, reason) {
				t.Errorf("%v is not %v", err, reason)
			}
		})
		for _, r := range joinAll(t.Context(), m.Open, time.Hour, registration(1, 3)) {
			wantJoinError(t, r.err, rendezvous.Interrupted, "worker 0 (host a, pid 100) left", "signal interrupt")
			if r.after != 3*time.Second {
				t.Errorf("after %v", r.after)
			}
		}
		work.Wait()
	})
}

// TestTwoJobs: jobs of one store do not see each other, whatever their ids, and deleting one leaves the other.
func TestTwoJobs(t *testing.T) {
	m := rendezvous.NewMemory()
	jobs := []string{"a", "a/0", "a/0/worker", "A b", "@x", "=jobs", "é\n", strings.Repeat("j", 150)}
	var work sync.WaitGroup
	for n, job := range jobs {
		for w := range 3 {
			work.Go(func() {
				s := m.Open()
				registrations, err := rendezvous.Join(t.Context(), s, rendezvous.Registration{
					Job: job, Epoch: uint32(n),
					Worker: w, Workers: 3, PID: n + 1,
				})
				if err != nil {
					t.Error(err)
					return
				}
				for _, c := range registrations {
					if c.PID != n+1 || c.Job != job {
						t.Errorf("job %q: %v of job %q", job, &c, c.Job)
					}
				}
				got, err := rendezvous.Exchange(t.Context(), s, registrations[w].Key("x"), w, 3, []byte(fmt.Sprint(job, w)))
				if err != nil || string(got[2]) != fmt.Sprint(job, 2) {
					t.Errorf("job %q: %q, %v", job, got, err)
				}
				if err := rendezvous.Leave(t.Context(), s, registrations[w]); err != nil {
					t.Error(err)
				}
				if w > 0 || n == 0 {
					return
				}
				if err := rendezvous.DeleteJob(t.Context(), s, job); err != nil {
					t.Error(err)
				}
			})
		}
	}
	work.Wait()
	entries, _, err := m.Open().List(t.Context(), "")
	for _, e := range entries {
		if !strings.HasPrefix(e.Key, "a/") && e.Key != "=jobs/a" {
			t.Errorf("%q is left", e.Key)
		}
	}
	if err != nil || len(entries) == 0 {
		t.Errorf("what job a has is gone: %v, %v", entries, err)
	}
}

// TestJoinAtRandom: whatever processes join at whatever time, all of one rendezvous get the same result, no later than
// the first deadline.
func TestJoinAtRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	for round := range 200 {
		random := rand.New(rand.NewPCG(seed, uint64(round)))
		synctest.Test(t, func(t *testing.T) {
			n := 1 + random.IntN(6) + 8*(random.IntN(4)/3)
			m := rendezvous.NewMemory()
			var registrations []rendezvous.Registration
			for w := range n {
				for range 1 + random.IntN(20)/18 - random.IntN(20)/19 { // sometimes twice, sometimes not at all
					c := registration(w, n+random.IntN(30)/29)
					c.PID = len(registrations) + 1
					registrations = append(registrations, c)
				}
			}
			results := make([]joinResult, len(registrations))
			var work sync.WaitGroup
			for i, c := range registrations {
				delay, timeout := time.Duration(random.IntN(5000))*time.Millisecond, time.Duration(1+random.IntN(20))*time.Second
				work.Go(func() {
					time.Sleep(delay)
					ctx, cancel := context.WithTimeout(t.Context(), timeout)
					defer cancel()
					start := time.Now()
					results[i].registrations, results[i].err = rendezvous.Join(ctx, m.Open(), c)
					if results[i].after = time.Since(start); results[i].after > timeout {
						t.Errorf("a joiner with a deadline of %v took %v", timeout, results[i].after)
					}
				})
			}
			work.Wait()
			text, won := "", 0
			for _, r := range results {
				switch {
				case r.err == nil && len(r.registrations) == n:
					won++
				case r.err == nil:
					t.Errorf("%d registrations of %d", len(r.registrations), n)
				case strings.Contains(r.err.Error(), "has started without this process"):
				case text == "":
					text = r.err.Error()
				case text != r.err.Error():
					t.Errorf("two errors:\n%s\n%v", text, r.err)
				}
			}
			if won > 0 && (won != n || text != "") {
				t.Errorf("%d of %d have joined, others: %q", won, n, text)
			}
		})
		if t.Failed() {
			t.Fatalf("round %d of seed %d", round, seed)
		}
	}
}

// TestExchangeErrors: an exchange names the missing workers, and refuses a second value of one worker.
func TestExchangeErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := rendezvous.NewMemory().Open()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := s.Set(ctx, "k/2", nil); err != nil {
			t.Fatal(err)
		}
		_, err := rendezvous.Exchange(ctx, s, "k", 0, 5, nil)
		var e *rendezvous.WaitError
		if !errors.As(err, &e) || !errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(), `waited 5s for workers 1, 3 and 4 of 5 at "k"`) {
			t.Errorf("got %v", err)
		}
		if _, err := rendezvous.Exchange(t.Context(), s, "k", 0, 5, []byte("other")); err == nil ||
			!strings.Contains(err.Error(), "a different value") {
			t.Errorf("got %v", err)
		}
		if _, err := rendezvous.Exchange(t.Context(), s, "k", 5, 5, nil); err == nil {
			t.Error("worker 5 of 5 is accepted")
		}
	})
}

// TestCompare: every worker gets the same list of differences, with the workers of each value.
func TestCompare(t *testing.T) {
	m := rendezvous.NewMemory()
	compare := func(key string, all [][]rendezvous.Fact) []error {
		errs := make([]error, len(all))
		var work sync.WaitGroup
		for w, facts := range all {
			work.Go(func() { errs[w] = rendezvous.Compare(t.Context(), m.Open(), key, w, len(all), facts) })
		}
		work.Wait()
		return errs
	}
	same := []rendezvous.Fact{{Name: "model", Value: "mlp"}, {Name: "global batch", Value: "64"}}
	for _, err := range compare("same", [][]rendezvous.Fact{same, same, same}) {
		if err != nil {
			t.Error(err)
		}
	}
	other := []rendezvous.Fact{{Name: "model", Value: "mlp"}, {Name: "global batch", Value: "32"}, {
		Name:  "seed",
		Value: "1",
	}}
	errs := compare("other", [][]rendezvous.Fact{same, other, same})
	for _, err := range errs {
		var e *rendezvous.DifferError
		if !errors.As(err, &e) || err.Error() != errs[0].Error() || len(e.Differences) != 2 {
			t.Fatalf("got %v", err)
		}
		d := e.Differences[0]
		if d.Name != "global batch" || len(d.Values) != 2 || fmt.Sprint(d.Values[0].Workers,
			d.Values[1].Workers) != "[0 2] [1]" {
			t.Errorf("got %+v", d)
		}
		for _, part := range []string{
			`global batch is "64" for worker 0 (host `, `, but "32" for worker 1 (host `,
			"; seed is not given for worker 0", `but "1" for worker 1`,
		} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v\nwant %q in it", err, part)
			}
		}
	}
}

// slowDeletes is a handle whose deletions take a second. It counts them, and how many are in progress.
type slowDeletes struct {
	rendezvous.Store
	refused   error // of the deletion with the number refusedAt
	refusedAt int

	mu                sync.Mutex
	made, now, atOnce int
}

func (s *slowDeletes) Delete(ctx context.Context, key string) error {
	s.mu.Lock()
	s.made, s.now = s.made+1, s.now+1
	s.atOnce = max(s.atOnce, s.now)
	refused := s.made == s.refusedAt
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.now--
		s.mu.Unlock()
	}()
	if refused {
		return s.refused
	}
	select {
	case <-time.After(time.Second):
		return s.Store.Delete(ctx, key)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// TestDeletesTogether: the keys of an earlier epoch are deleted 32 at a time. The first error ends it.
func TestDeletesTogether(t *testing.T) {
	const workers = 300
	for _, refused := range []error{nil, errors.New("the disk is full")} {
		synctest.Test(t, func(t *testing.T) {
			m := rendezvous.NewMemory()
			old := registration(0, workers)
			for i := range workers {
				key := old.Key("worker", fmt.Sprint("join/registration/", i))
				if err := m.Open().Set(t.Context(), key, []byte("{}")); err != nil {
					t.Fatal(err)
				}
			}
			if err := m.Open().Set(t.Context(), "digits/epoch", []byte("0")); err != nil {
				t.Fatal(err)
			}
			s := &slowDeletes{Store: m.Open()}
			if refused != nil {
				s.refused, s.refusedAt = refused, 100
			}
			next := registration(0, 1)
			next.Epoch = 1
			start := time.Now()
			_, err := rendezvous.Join(t.Context(), s, next)
			if refused != nil {
				if !errors.Is(err, refused) || s.made > 100+32 || s.now > 0 {
					t.Errorf("%v after %d deletions, with %d in progress; want %v after about 100", err, s.made, s.now, refused)
				}
				return
			}
			left, _, failed := m.Open().List(t.Context(), "digits/0/")
			if err != nil || failed != nil || len(left) > 0 {
				t.Fatalf("%v, %v: %d keys are left of epoch 0", err, failed, len(left))
			}
			if took := time.Since(start); s.made != workers || s.atOnce > 32 || took != 10*time.Second {
				t.Errorf("%d deletions, at most %d at the same time, took %v; want %d, 32, 10s", s.made, s.atOnce, took,
					workers)
			}
			if err := rendezvous.DeleteJob(t.Context(), s, "digits"); err != nil || s.atOnce > 32 {
				t.Errorf("%v, at most %d deletions at the same time", err, s.atOnce)
			}
		})
	}
}
