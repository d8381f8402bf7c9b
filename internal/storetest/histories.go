package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// users opens n users of the store.
func (s *suite) several(n int) []rendezvous.Store {
	out := make([]rendezvous.Store, n)
	for i := range out {
		out[i] = s.open()
	}
	return out
}

// seed returns the seed of the random choices, and makes a failing test print it.
func (s *suite) seed() *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	s.Cleanup(func() {
		if s.Failed() {
			s.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

func testOneCreates(s *suite) {
	users := s.several(6)
	rounds := s.times(40, 5)
	for round := range rounds {
		key := fmt.Sprintf("k/%d", round)
		var won atomic.Int32
		seen := make([]string, len(users))
		var work sync.WaitGroup
		for i, u := range users {
			work.Go(func() {
				mine := strconv.Itoa(i)
				current, created, err := u.Create(s.ctx, key, []byte(mine))
				if err != nil {
					s.Error(err)
				}
				if seen[i] = string(current); created {
					won.Add(1)
					seen[i] = mine
				}
			})
		}
		work.Wait()
		if won.Load() != 1 || len(slices.Compact(seen)) != 1 {
			s.Fatalf("%d created it; they saw %q", won.Load(), seen)
		}
	}
}

// testNoLostUpdate: a counter that all users increment by Get and Swap has the right value in the end.
func testNoLostUpdate(s *suite) {
	users := s.several(4)
	each := s.times(50, 5)
	s.check(users[0].Set(s.ctx, "n", []byte("0")))
	var work sync.WaitGroup
	for _, u := range users {
		work.Go(func() {
			for done := 0; done < each; {
				text, revision, err := u.Get(s.ctx, "n")
				n, _ := strconv.Atoi(string(text))
				swapped := false
				if err == nil {
					swapped, err = u.Swap(s.ctx, "n", revision, []byte(strconv.Itoa(n+1)))
				}
				if err != nil {
					s.Error(err)
					return
				}
				if swapped {
					done++
				}
			}
		})
	}
	work.Wait()
	s.holds(users[0], "n", strconv.Itoa(each*len(users)))
}

// testModel compares a sequence of random operations of two users with a map.
func testModel(s *suite) {
	random := s.seed()
	users := s.several(2)
	model := map[string]string{}
	revisions := map[string]uint64{}
	keys := []string{"a", "a/1", "a/2", "b", "b/1"}
	steps := s.times(600, 80)
	for step := range steps {
		u, key := users[random.IntN(2)], keys[random.IntN(len(keys))]
		value := strconv.Itoa(step)
		was, there := model[key]
		switch random.IntN(6) {
		case 0:
			s.check(u.Set(s.ctx, key, []byte(value)))
			model[key] = value
		case 1:
			current, created, err := u.Create(s.ctx, key, []byte(value))
			if err != nil || created == there || there && string(current) != was {
				s.Fatalf("step %d: Create(%q): %q, %v, %v; it held %q, %v", step, key, current, created, err, was, there)
			}
			if created {
				model[key] = value
			}
		case 2:
			s.check(u.Delete(s.ctx, key))
			delete(model, key)
		case 3:
			got, revision, err := u.Get(s.ctx, key)
			if there != (err == nil) || !there && !errors.Is(err, rendezvous.ErrNotFound) || string(got) != was {
				s.Fatalf("step %d: Get(%q): %q, %v; it holds %q, %v", step, key, got, err, was, there)
			}
			revisions[key] = revision
		case 4:
			revision := revisions[key]
			_, now, err := u.Get(s.ctx, key)
			if there && err != nil {
				s.Fatal(err)
			}
			swapped, err := u.Swap(s.ctx, key, revision, []byte(value))
			if err != nil || swapped != (there && now == revision) {
				s.Fatalf("step %d: Swap(%q) at %d: %v, %v; it is at %d", step, key, revision, swapped, err, now)
			}
			if swapped {
				model[key] = value
			}
		case 5:
			prefix := []string{"", "a", "a/", "b"}[random.IntN(4)]
			entries, _, err := u.List(s.ctx, prefix)
			s.check(err)
			n := 0
			for _, k := range keys {
				if v, ok := model[k]; ok && bytes.HasPrefix([]byte(k), []byte(prefix)) {
					if n >= len(entries) || entries[n].Key != k || string(entries[n].Value) != v {
						s.Fatalf("step %d: List(%q): %+v, want %q among them to be %q", step, prefix, entries, k, v)
					}
					n++
				}
			}
			if n != len(entries) {
				s.Fatalf("step %d: List(%q): %+v, want %d of them", step, prefix, entries, n)
			}
		}
	}
}

// testFollower: a user that lists once and follows the changes has the final content in the end, and each key's
// revisions only increase.
func testFollower(s *suite) {
	random := s.seed()
	users := s.several(4)
	changes := s.times(150, 15)
	var writers, follower sync.WaitGroup
	follower.Go(func() { s.follow(users[0]) })
	for _, u := range users[1:] {
		r := rand.New(rand.NewPCG(random.Uint64(), 2))
		writers.Go(func() {
			for i := range changes {
				key := fmt.Sprintf("f/%d", r.IntN(8))
				var err error
				if r.IntN(3) == 0 {
					err = u.Delete(s.ctx, key)
				} else {
					err = u.Set(s.ctx, key, []byte(strconv.Itoa(i)))
				}
				if err != nil {
					s.Error(err)
				}
			}
		})
	}
	writers.Wait()
	s.check(users[1].Set(s.ctx, "f/end", nil))
	follower.Wait()
}

// follow follows the changes until "f/end" is set, and compares.
func (s *suite) follow(u rendezvous.Store) {
	now := map[string]rendezvous.Entry{}
	entries, revision, err := u.List(s.ctx, "f/")
	for {
		if err != nil {
			s.Error(err)
			return
		}
		for _, e := range entries {
			if e.Revision <= now[e.Key].Revision || e.Revision > revision {
				s.Errorf("%q went from revision %d to %d, at %d", e.Key, now[e.Key].Revision, e.Revision, revision)
			}
			now[e.Key] = e
		}
		if now["f/end"].Revision > 0 {
			break
		}
		entries, revision, err = u.Changes(s.ctx, "f/", revision)
	}
	there, _, err := u.List(s.ctx, "f/")
	if err != nil {
		s.Error(err)
	}
	for _, e := range there {
		if got := now[e.Key]; got.Deleted || got.Revision != e.Revision || !bytes.Equal(got.Value, e.Value) {
			s.Errorf("%+v is there; the changes said %+v", e, got)
		}
		delete(now, e.Key)
	}
	for _, e := range now {
		if !e.Deleted {
			s.Errorf("%+v is not there, as its last change said", e)
		}
	}
}
