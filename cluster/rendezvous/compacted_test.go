package rendezvous_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// compact makes the store forget its oldest changes.
func compact(t *testing.T, s rendezvous.Store) {
	for i := range 1<<16 + 1 {
		key := "other/" + strconv.Itoa(i)
		if err := s.Set(t.Context(), key, nil); err != nil {
			t.Fatal(err)
		}
		if err := s.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCompactedWait: workers end their waits at once, although the store has forgotten the changes
// since they began.
func TestCompactedWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		var registrations []rendezvous.Registration
		for w := range several - 1 {
			registrations = append(registrations, ofSeveral(w))
		}
		time.AfterFunc(time.Second, func() {
			compact(t, m.Open())
			if _, err := rendezvous.Join(t.Context(), m.Open(), ofSeveral(several-1)); err != nil {
				t.Error(err)
			}
		})
		for w, got := range joinAll(t.Context(), m.Open, time.Minute, registrations...) {
			if got.err != nil || got.after > 2*time.Second {
				t.Errorf("worker %d after %v: %v", w, got.after, got.err)
			}
		}
		begin := time.Now()
		for w := range several - 1 {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, err := rendezvous.Exchange(ctx, m.Open(), "digits/0/x", w, several, []byte{1})
				if after := time.Since(begin); err != nil || after > 2*time.Second {
					t.Errorf("exchange: worker %d after %v: %v", w, after, err)
				}
			}()
		}
		time.Sleep(time.Second)
		compact(t, m.Open())
		if _, err := rendezvous.Exchange(t.Context(), m.Open(), "digits/0/x", several-1, several, []byte{1}); err != nil {
			t.Error(err)
		}
		synctest.Wait()
	})
}

// TestStaleAtOnce: a later epoch ends the waits of an earlier one, also if its first worker ended before it deleted the
// keys of that one.
func TestStaleAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		time.AfterFunc(time.Second, func() {
			if err := m.Open().Set(t.Context(), "digits/epoch", []byte("2")); err != nil {
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

// compacting is a store that forgets all changes up to a revision, even if no key was deleted, as etcd may at any
// moment: that of the first worker that reads a registration.
type compacting struct {
	rendezvous.Store
	once  *sync.Once
	past  *atomic.Uint64 // the revision
	calls *atomic.Int64
}

func (c compacting) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	value, revision, err := c.Store.Get(ctx, key)
	if strings.Contains(key, "/registration/") {
		c.once.Do(func() {
			err = errors.Join(err, c.Set(ctx, "other", nil))
			_, now, failed := c.List(ctx, "other")
			err = errors.Join(err, failed)
			c.past.Store(now)
		})
	}
	return value, revision, err
}

func (c compacting) Changes(ctx context.Context, prefix string, after uint64) ([]rendezvous.Entry, uint64, error) {
	switch {
	case c.calls.Add(1) > 1000:
		return nil, 0, errors.New("it is asked again and again")
	case after > 0 && after < c.past.Load():
		return nil, 0, rendezvous.ErrCompacted
	}
	return c.Store.Changes(ctx, prefix, after)
}

// TestCompactedAlways: a worker whose registration is older than the changes that the store remembers waits without
// requests.
func TestCompactedAlways(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := rendezvous.NewMemory()
		var once sync.Once
		var past atomic.Uint64
		var calls atomic.Int64
		open := func() rendezvous.Store { return compacting{m.Open(), &once, &past, &calls} }
		time.AfterFunc(time.Second, func() {
			if _, err := rendezvous.Join(t.Context(), m.Open(), ofSeveral(several-1)); err != nil {
				t.Error(err)
			}
		})
		var registrations []rendezvous.Registration
		for w := range several - 1 {
			registrations = append(registrations, ofSeveral(w))
		}
		for w, got := range joinAll(t.Context(), open, time.Minute, registrations...) {
			if got.err != nil || got.after > 2*time.Second {
				t.Errorf("worker %d after %v: %v", w, got.after, got.err)
			}
		}
	})
}
