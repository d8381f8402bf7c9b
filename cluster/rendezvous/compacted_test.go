package rendezvous_test

import (
	"context"
	"fmt"
	"strconv"
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

// TestCompactedWait: workers that do not collect end their waits at once, although the store has forgotten the changes
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

// TestStaleAtDeadline: a worker whose time is over as a later epoch has begun, whose first worker ended before it
// deleted the keys of this one, reports that.
func TestStaleAtDeadline(t *testing.T) {
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
		for i, got := range joinAll(t.Context(), m.Open, 5*time.Second, registrations...) {
			wantJoinError(t, got.err, rendezvous.StaleEpoch, fmt.Sprintf("worker %d (host a, pid %d) joined epoch 0", i, 100+i),
				"the job is in epoch 2")
		}
	})
}
