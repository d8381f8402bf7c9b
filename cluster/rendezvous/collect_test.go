package rendezvous_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// several is a number of workers of which each reports who is missing, and many one of which only worker 0 does.
const (
	several = 20
	many70  = 70
)

func ofSeveral(worker int) rendezvous.Registration { return of(worker, several) }

func of(worker, workers int) rendezvous.Registration {
	return rendezvous.Registration{Job: "digits", Worker: worker, Workers: workers, Host: "a", PID: 100 + worker}
}

// TestMissingZero: without worker 0 the others name it, and only once their time is over.
func TestMissingZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reports
		ctx := rendezvous.WithWaiting(t.Context(), r.add)
		var registrations []rendezvous.Registration
		for w := 1; w < several; w++ {
			registrations = append(registrations, ofSeveral(w))
		}
		for i, got := range joinAll(ctx, rendezvous.NewMemory().Open, 3*time.Second, registrations...) {
			wantJoinError(t, got.err, rendezvous.Missing, "19 of 20 workers joined (worker 1 (host a, pid 101), ",
				"missing: worker 0; ")
			if got.after != 3*time.Second {
				t.Errorf("process %d after %v", i, got.after)
			}
		}
		want := "2s: waiting for worker 0 (19 of 20 joined)"
		if got := r.take(); len(got) != len(registrations) || got[0] != want {
			t.Errorf("reported %q, want %q", got, want)
		}
	})
}

// TestMissingOther: in a large job only worker 0 reports which workers are missing.
func TestMissingOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reports
		var registrations []rendezvous.Registration
		for w := range many70 - 1 {
			registrations = append(registrations, of(w, many70))
		}
		ctx := rendezvous.WithWaiting(t.Context(), r.add)
		for _, got := range joinAll(ctx, rendezvous.NewMemory().Open, 3*time.Second, registrations...) {
			wantJoinError(t, got.err, rendezvous.Missing, "69 of 70 workers joined", "missing: worker 69; ")
		}
		seen := map[string]int{}
		for _, text := range r.take() {
			seen[text]++
		}
		if seen["2s: waiting for worker 69 (69 of 70 joined)"] != 1 ||
			seen["2s: waiting for some of the other 69 workers: worker 0 lists them"] != 68 {
			t.Errorf("reported %v", seen)
		}
	})
}

// dying is a store whose waits fail: the process ends there.
type dying struct{ rendezvous.Store }

func (d dying) Changes(context.Context, string, uint64) ([]rendezvous.Entry, uint64, error) {
	return nil, 0, errDying
}

func (d dying) Wait(context.Context, string, int) ([]rendezvous.Entry, error) { return nil, errDying }

var errDying = errors.New("the process ends here")

// TestZeroEnds: if worker 0 ends after it has registered, worker 1 soon takes its place. If it ends after it has
// contributed, the others exchange and compare when the time of the first of them is over.
func TestZeroEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		var work sync.WaitGroup
		facts := []rendezvous.Fact{{Name: "model", Value: "mlp"}}
		for w := range several {
			work.Go(func() {
				s := m.Open()
				within := func(d time.Duration) context.Context {
					ctx, cancel := context.WithTimeout(t.Context(), d)
					t.Cleanup(cancel)
					return ctx
				}
				if w == 0 {
					if _, err := rendezvous.Join(within(time.Hour), dying{s}, ofSeveral(w)); !errors.Is(err, errDying) {
						t.Errorf("worker %d: %v", w, err)
					}
					rendezvous.Exchange(within(time.Hour), dying{s}, "digits/0/x", w, several, []byte{byte(w)})
					rendezvous.Compare(within(time.Hour), dying{s}, "digits/0/c", w, several, facts)
					return
				}
				begin := time.Now()
				took := func(what string, want ...time.Duration) {
					if took := time.Since(begin); took < want[0] || took > want[len(want)-1] {
						t.Errorf("worker %d: %s after %v, want %v", w, what, took, want)
					}
					begin = time.Now()
				}
				time.Sleep(time.Second) // the last one has not joined when worker 0 ends
				all, err := rendezvous.Join(within(time.Minute), s, ofSeveral(w))
				if err != nil || len(all) != several || all[several-1].PID != 100+several-1 {
					t.Errorf("worker %d: %v, %v", w, all, err)
				}
				took("joined", 3*time.Second, 5*time.Second)
				values, err := rendezvous.Exchange(within(time.Minute), s, "digits/0/x", w, several, []byte{byte(w)})
				if err != nil || len(values) != several || values[5][0] != 5 {
					t.Errorf("worker %d: %v, %v", w, values, err)
				}
				took("exchanged", time.Minute)
				if err := rendezvous.Compare(within(time.Minute), s, "digits/0/c", w, several, facts); err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
				took("compared", time.Minute)
				missing := (*rendezvous.WaitError)(nil)
				_, err = rendezvous.Exchange(within(time.Minute), s, "digits/0/y", w, several, []byte{byte(w)})
				if !errors.As(err, &missing) || fmt.Sprint(missing.Missing) != "[0]" {
					t.Errorf("worker %d: %v", w, err)
				}
				took("timed out", time.Minute)
			})
		}
		work.Wait()
	})
}

// TestStaleForAll: a later epoch ends the waits of all workers of an earlier one.
func TestStaleForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		time.AfterFunc(time.Second, func() {
			c := ofSeveral(0)
			c.Workers, c.Epoch = 1, 2
			if _, err := rendezvous.Join(context.Background(), m.Open(), c); err != nil {
				t.Error(err)
			}
		})
		var registrations []rendezvous.Registration
		for w := range several - 1 {
			registrations = append(registrations, ofSeveral(w))
		}
		for i, got := range joinAll(t.Context(), m.Open, time.Hour, registrations...) {
			wantJoinError(t, got.err, rendezvous.StaleEpoch, fmt.Sprintf("worker %d (host a, pid %d) joined epoch 0", i, 100+i),
				"the job is in epoch 2")
			if got.after != time.Second {
				t.Errorf("worker %d after %v", i, got.after)
			}
		}
	})
}

// TestCompareSeveral: all workers get the same differences, and values that are too large for a record are exchanged.
func TestCompareSeveral(t *testing.T) {
	m := rendezvous.NewMemory()
	var work sync.WaitGroup
	var texts [several]string
	for w := range several {
		work.Go(func() {
			s := m.Open()
			for _, name := range []string{"equal", "differ"} {
				facts := []rendezvous.Fact{{Name: "model", Value: "mlp"}}
				if name == "differ" && w == 7 {
					facts[0].Value = "cnn"
				}
				err := rendezvous.Compare(t.Context(), s, "digits/0/"+name, w, several, facts)
				differ := (*rendezvous.DifferError)(nil)
				if (name == "differ") != errors.As(err, &differ) || name == "equal" && err != nil {
					t.Errorf("worker %d: %v", w, err)
				} else if err != nil {
					texts[w] = err.Error()
				}
			}
			large := make([]byte, 220<<10)
			rand.Read(large)
			values, err := rendezvous.Exchange(t.Context(), s, "digits/0/large", w, several, large)
			if err != nil || len(values) != several || string(values[w]) != string(large) {
				t.Errorf("worker %d: %d values, %v", w, len(values), err)
			}
		})
	}
	work.Wait()
	for w, text := range texts {
		if text != texts[0] || !strings.Contains(text, `"cnn" for worker 7 (`) {
			t.Errorf("worker %d: %s", w, text)
		}
	}
}

// TestContributed: the others need worker 0 until it has written the record, and any other worker until it has written
// its value.
func TestContributed(t *testing.T) {
	s := rendezvous.NewMemory().Open()
	for _, c := range []struct {
		key    string
		worker int
		want   bool
	}{{"k/0", 0, false}, {"k/1", 1, true}, {"k/all", 0, true}} {
		if err := s.Set(t.Context(), c.key, nil); err != nil {
			t.Fatal(err)
		}
		if got := rendezvous.Contributed(t.Context(), s, "k", c.worker); got != c.want {
			t.Errorf("with %s: worker %d has contributed: %v, want %v", c.key, c.worker, got, c.want)
		}
	}
}

// unlisted is a store that does not answer List.
type unlisted struct{ rendezvous.Store }

func (unlisted) List(ctx context.Context, _ string) ([]rendezvous.Entry, uint64, error) {
	<-ctx.Done()
	return nil, 0, context.Cause(ctx)
}

// TestSilentAtTheDeadline: a worker whose store does not answer when its time is over accuses no other worker.
func TestSilentAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		for _, got := range joinAll(t.Context(), func() rendezvous.Store { return unlisted{m.Open()} }, 3*time.Second,
			ofSeveral(1), ofSeveral(2)) {
			failed := (*rendezvous.JoinError)(nil)
			if errors.As(got.err, &failed) || !errors.Is(got.err, context.DeadlineExceeded) ||
				!strings.Contains(fmt.Sprint(got.err), "the store does not answer") {
				t.Errorf("got %v", got.err)
			}
		}
	})
}

// TestZeroFails: a registration that worker 0 cannot read fails the rendezvous for all, at once.
func TestZeroFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		key := rendezvous.Key("digits", 0, "worker/join/registration", "2")
		if err := m.Open().Set(t.Context(), key, []byte("{")); err != nil {
			t.Fatal(err)
		}
		for i, got := range joinAll(t.Context(), m.Open, time.Hour, of(0, 3), of(1, 3)) {
			wantJoinError(t, got.err, rendezvous.Interrupted, "worker 0 (host a, pid 100) left the rendezvous",
				"registration/2")
			if got.after != 0 {
				t.Errorf("worker %d after %v", i, got.after)
			}
		}
	})
}
