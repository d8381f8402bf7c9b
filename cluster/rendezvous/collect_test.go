package rendezvous_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// several is a number of workers of which these collect the registrations of all.
const several = 20

var collectors = []int{0, 4, 6, 9, 13, 15, 18}

func ofSeveral(worker int) rendezvous.Registration {
	return rendezvous.Registration{Job: "digits", Worker: worker, Workers: several, Host: "a", PID: 100 + worker}
}

// TestMissingCollectors: if none of the workers that collect joins, the others name them all, and only once their time
// is over.
func TestMissingCollectors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reports
		ctx := rendezvous.WithWaiting(t.Context(), r.add)
		var registrations []rendezvous.Registration
		for w := range several {
			if !slices.Contains(collectors, w) {
				registrations = append(registrations, ofSeveral(w))
			}
		}
		for i, got := range joinAll(ctx, rendezvous.NewMemory().Open, 3*time.Second, registrations...) {
			wantJoinError(t, got.err, rendezvous.Missing, "13 of 20 workers joined (worker 1 (host a, pid 101), ",
				"missing: workers 0, 4, 6, 9, 13, 15 and 18; ")
			if got.after != 3*time.Second {
				t.Errorf("process %d after %v", i, got.after)
			}
		}
		want := "2s: waiting for workers 0, 4, 6, 9, 13, 15 and 18, and perhaps for others of the 20 workers"
		if got := r.take(); len(got) != len(registrations) || got[0] != want {
			t.Errorf("reported %q, want %q", got, want)
		}
	})
}

// TestMissingOther: workers that do not collect report that those that do have joined.
func TestMissingOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reports
		var registrations []rendezvous.Registration
		for w := range several - 1 {
			registrations = append(registrations, ofSeveral(w))
		}
		ctx := rendezvous.WithWaiting(t.Context(), r.add)
		for _, got := range joinAll(ctx, rendezvous.NewMemory().Open, 3*time.Second, registrations...) {
			wantJoinError(t, got.err, rendezvous.Missing, "19 of 20 workers joined", "missing: worker 19; ")
		}
		seen := map[string]int{}
		for _, text := range r.take() {
			seen[text]++
		}
		if seen["2s: waiting for worker 19 (19 of 20 joined)"] != 7 ||
			seen["2s: waiting for some of the other 19 workers: worker 0 lists them"] != 12 {
			t.Errorf("reported %v", seen)
		}
	})
}

// dying is a store whose Changes of a job's registrations fail: the process of a collector ends there.
type dying struct{ rendezvous.Store }

func (d dying) Changes(context.Context, string, uint64) ([]rendezvous.Entry, uint64, error) {
	return nil, 0, errDying
}

var errDying = errors.New("the process ends here")

// TestCollectorsEnd: if all workers that collect end after they have registered or contributed, the others join,
// exchange and compare as soon as one of them looks itself, long before their time is over.
func TestCollectorsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		var work sync.WaitGroup
		facts := []rendezvous.Fact{{Name: "model", Value: "mlp"}}
		for w := range several {
			work.Go(func() {
				s := m.Open()
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				if slices.Contains(collectors, w) {
					if _, err := rendezvous.Join(ctx, dying{s}, ofSeveral(w)); !errors.Is(err, errDying) {
						t.Errorf("worker %d: %v", w, err)
					}
					rendezvous.Exchange(ctx, dying{s}, "digits/0/x", w, several, []byte{byte(w)})
					rendezvous.Compare(ctx, dying{s}, "digits/0/c", w, several, facts)
					return
				}
				begin := time.Now()
				within := func(what string, most time.Duration) {
					if took := time.Since(begin); took > most {
						t.Errorf("worker %d: %s after %v, want at most %v", w, what, took, most)
					}
					begin = time.Now()
				}
				time.Sleep(time.Second) // the last one has not joined when the collectors end
				all, err := rendezvous.Join(ctx, s, ofSeveral(w))
				if err != nil || len(all) != several || all[several-1].PID != 100+several-1 {
					t.Errorf("worker %d: %v, %v", w, all, err)
				}
				within("joined", 6*time.Second)
				values, err := rendezvous.Exchange(ctx, s, "digits/0/x", w, several, []byte{byte(w)})
				if err != nil || len(values) != several || values[5][0] != 5 {
					t.Errorf("worker %d: %v, %v", w, values, err)
				}
				within("exchanged", 5*time.Second)
				if err := rendezvous.Compare(ctx, s, "digits/0/c", w, several, facts); err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
				within("compared", 5*time.Second)
				missing := (*rendezvous.WaitError)(nil)
				short, cancel := context.WithTimeout(t.Context(), 12*time.Second)
				defer cancel()
				_, err = rendezvous.Exchange(short, s, "digits/0/y", w, several, []byte{byte(w)})
				if !errors.As(err, &missing) || fmt.Sprint(missing.Missing) != fmt.Sprint(collectors) {
					t.Errorf("worker %d: %v", w, err)
				}
				within("timed out", 12*time.Second)
			})
		}
		work.Wait()
	})
}

// TestLateAfterCollectors: a worker that joins minutes after all collectors have ended is noticed at the next turn, and
// the turns cost few requests.
func TestLateAfterCollectors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		var requests, bytes atomic.Int64
		var work sync.WaitGroup
		for w := range several {
			work.Go(func() {
				s := m.Open()
				if slices.Contains(collectors, w) {
					rendezvous.Join(t.Context(), dying{s}, ofSeveral(w))
					return
				}
				if w == 1 {
					time.Sleep(10*time.Minute + time.Second)
				}
				c := counted{s, &requests, &bytes, make(chan struct{}, several), new(atomic.Bool)}
				if all, err := rendezvous.Join(t.Context(), c, ofSeveral(w)); err != nil || len(all) != several {
					t.Errorf("worker %d: %v, %v", w, all, err)
				}
			})
		}
		begin := time.Now()
		work.Wait()
		if took := time.Since(begin); took > 10*time.Minute+6*time.Second {
			t.Errorf("joined after %v", took)
		}
		// 7 turns each 5 s, of 6 requests, and 10 for each worker.
		if n := requests.Load(); n > 120*7*6+10*several {
			t.Errorf("%d requests", n)
		}
	})
}

// refusing is a store that does not take the records of collectors.
type refusing struct {
	rendezvous.Store
	err error
}

func (r refusing) Create(ctx context.Context, key string, value []byte) ([]byte, bool, error) {
	if strings.HasSuffix(key, "/all") {
		return nil, false, r.err
	}
	return r.Store.Create(ctx, key, value)
}

// TestRecordNotWritten: workers exchange and compare although the store takes no record; only a fenced one fails.
func TestRecordNotWritten(t *testing.T) {
	for _, refused := range []error{rendezvous.ErrFull, rendezvous.ErrLost, rendezvous.ErrFenced} {
		synctest.Test(t, func(t *testing.T) {
			m := rendezvous.NewMemory()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			var work sync.WaitGroup
			for w := range several {
				work.Go(func() {
					s := refusing{m.Open(), refused}
					values, err := rendezvous.Exchange(ctx, s, "digits/0/x", w, several, []byte{byte(w)})
					fenced := refused == rendezvous.ErrFenced
					if errors.Is(err, rendezvous.ErrFenced) != fenced || !fenced && (err != nil || values[5][0] != 5) {
						t.Errorf("%v: worker %d: %v, %v", refused, w, values, err)
					}
					if err = rendezvous.Compare(ctx, s, "digits/0/c", w, several, nil); (err != nil) != fenced {
						t.Errorf("%v: worker %d: %v", refused, w, err)
					}
				})
			}
			work.Wait()
		})
	}
}

// TestStaleForAll: a later epoch ends the waits of all workers of an earlier one, whether they collect or not.
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

// TestCompareSeveral: all workers get the same differences, whether they have collected the facts or not; and large
// values are exchanged without a record.
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
			large := make([]byte, 60<<10)
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
