package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// check ends the test if a call failed.
func (s *suite) check(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// holds checks the value of a key.
func (s *suite) holds(u rendezvous.Store, key, want string) (revision uint64) {
	s.Helper()
	value, revision, err := u.Get(s.ctx, key)
	if err != nil || string(value) != want {
		s.Fatalf("Get(%q) = %q, %v, want %q", key, value, err, want)
	}
	return revision
}

func testBasics(s *suite) {
	a, b := s.open(), s.open()
	if _, _, err := a.Get(s.ctx, "x"); !errors.Is(err, rendezvous.ErrNotFound) {
		s.Fatalf("Get of nothing: %v, want ErrNotFound", err)
	}
	s.check(a.Set(s.ctx, "x", []byte("1")))
	first := s.holds(b, "x", "1")
	s.check(b.Set(s.ctx, "x", []byte("2")))
	second := s.holds(a, "x", "2")
	if first == 0 || second <= first {
		s.Fatalf("revisions %d, then %d, want higher ones", first, second)
	}
	for _, revision := range []uint64{0, first, second + 1} {
		if swapped, err := a.Swap(s.ctx, "x", revision, []byte("no")); swapped || err != nil {
			s.Fatalf("Swap at revision %d: %v, %v, the key is at %d", revision, swapped, err, second)
		}
	}
	if swapped, err := a.Swap(s.ctx, "x", second, []byte("3")); !swapped || err != nil {
		s.Fatalf("Swap: %v, %v", swapped, err)
	}
	s.holds(b, "x", "3")
	if current, created, err := b.Create(s.ctx, "x", []byte("4")); created || err != nil || string(current) != "3" {
		s.Fatalf("Create of what is there: %q, %v, %v", current, created, err)
	}
	s.check(a.Delete(s.ctx, "x"))
	s.check(a.Delete(s.ctx, "x"))
	if _, _, err := b.Get(s.ctx, "x"); !errors.Is(err, rendezvous.ErrNotFound) {
		s.Fatalf("Get of what was deleted: %v, want ErrNotFound", err)
	}
	if swapped, err := a.Swap(s.ctx, "x", 0, []byte("no")); swapped || err != nil {
		s.Fatalf("Swap of nothing: %v, %v", swapped, err)
	}
	if current, created, err := b.Create(s.ctx, "x", nil); !created || err != nil || len(current) > 0 {
		s.Fatalf("Create: %q, %v, %v", current, created, err)
	}
	if third := s.holds(a, "x", ""); third <= second {
		s.Fatalf("revision %d after %d", third, second)
	}
}

func testBounds(s *suite) {
	u := s.open()
	long := strings.Repeat("k", rendezvous.KeyMax)
	s.check(u.Set(s.ctx, long, []byte("v")))
	s.holds(u, long, "v")
	for _, key := range []string{"", long + "k", "@own", "a\nb", "\xff", "a\x00"} {
		if err := u.Set(s.ctx, key, nil); err == nil {
			s.Errorf("Set(%.20q) is accepted", key)
		}
		if _, _, err := u.Create(s.ctx, key, nil); err == nil {
			s.Errorf("Create(%.20q) is accepted", key)
		}
		if _, err := u.Swap(s.ctx, key, 1, nil); err == nil {
			s.Errorf("Swap(%.20q) is accepted", key)
		}
		if err := u.Delete(s.ctx, key); err == nil {
			s.Errorf("Delete(%.20q) is accepted", key)
		}
	}
	for _, prefix := range []string{long + "k", "a\nb", "\xff"} {
		if _, _, err := u.List(s.ctx, prefix); err == nil {
			s.Errorf("List(%.20q) is accepted", prefix)
		}
		if _, _, err := u.Changes(s.ctx, prefix, 0); err == nil {
			s.Errorf("Changes(%.20q) is accepted", prefix)
		}
		if _, err := u.Wait(s.ctx, prefix, 1); err == nil {
			s.Errorf("Wait(%.20q) is accepted", prefix)
		}
	}
	if err := u.Set(s.ctx, "x", make([]byte, rendezvous.ValueMax+1)); err == nil {
		s.Error("Set of a value that is too long is accepted")
	}
	for _, key := range []string{"job/0/é", "a b", "%2F", "..", "x/../y", "x//y", "C:\\x", "-"} {
		s.check(u.Set(s.ctx, key, []byte(key)))
		s.holds(u, key, key)
	}
}

// testLarge: the largest value, and a list larger than any single message.
func testLarge(s *suite) {
	a, b := s.open(), s.open()
	large := bytes.Repeat([]byte("0123456789abcdef"), rendezvous.ValueMax/16)
	n := s.times(5, 2)
	for i := range n {
		s.check(a.Set(s.ctx, fmt.Sprintf("large/%d", i), large))
	}
	entries, _, err := b.List(s.ctx, "large/")
	s.check(err)
	changed, _, err := b.Changes(s.ctx, "large/", 0)
	s.check(err)
	if len(entries) != n || len(changed) != n {
		s.Fatalf("%d and %d entries, want %d", len(entries), len(changed), n)
	}
	for i := range entries {
		if !bytes.Equal(entries[i].Value, large) || !bytes.Equal(changed[i].Value, large) {
			s.Fatalf("entry %d is not what was set", i)
		}
	}
	// Values that were returned or passed belong to the caller.
	entries[0].Value[0] = 'x'
	large[0] = 'y'
	s.holds(a, "large/0", string(changed[0].Value))
}

func testList(s *suite) {
	u := s.open()
	if entries, _, err := u.List(s.ctx, ""); len(entries) > 0 || err != nil {
		s.Fatalf("List of nothing: %v, %v", entries, err)
	}
	for _, key := range []string{"b/2", "a", "b/10", "b", "c/1", "b/1"} {
		s.check(u.Set(s.ctx, key, []byte(key)))
	}
	s.check(u.Delete(s.ctx, "b/2"))
	for prefix, want := range map[string][]string{
		"": {"a", "b", "b/1", "b/10", "c/1"}, "b": {"b", "b/1", "b/10"}, "b/": {"b/1", "b/10"}, "b/1": {"b/1", "b/10"},
		"x": nil, "b/100": nil,
	} {
		entries, revision, err := u.List(s.ctx, prefix)
		s.check(err)
		var got []string
		for _, e := range entries {
			if e.Deleted || string(e.Value) != e.Key || e.Revision > revision {
				s.Errorf("List(%q) at revision %d: %+v", prefix, revision, e)
			}
			got = append(got, e.Key)
		}
		if !reflect.DeepEqual(got, want) {
			s.Errorf("List(%q): %q, want %q", prefix, got, want)
		}
	}
}

// testChangesPast: changes that were made before are returned at once, the latest of each key, in order.
func testChangesPast(s *suite) {
	a, b := s.open(), s.open()
	_, start, err := a.List(s.ctx, "")
	s.check(err)
	s.check(a.Set(s.ctx, "p/x", []byte("1")))
	s.check(a.Set(s.ctx, "p/y", []byte("2")))
	s.check(a.Set(s.ctx, "q/z", []byte("3")))
	s.check(a.Set(s.ctx, "p/x", []byte("4")))
	s.check(a.Delete(s.ctx, "p/y"))
	entries, next, err := b.Changes(s.ctx, "p/", start)
	s.check(err)
	if len(entries) != 2 || entries[0].Key != "p/x" || string(entries[0].Value) != "4" || entries[0].Deleted ||
		entries[1].Key != "p/y" || !entries[1].Deleted || entries[0].Revision >= entries[1].Revision ||
		entries[1].Revision > next {
		s.Fatalf("changes: %+v, next %d", entries, next)
	}
	entries, _, err = b.Changes(s.ctx, "p/", entries[0].Revision)
	s.check(err)
	if len(entries) != 1 || entries[0].Key != "p/y" {
		s.Fatalf("changes after the first: %+v", entries)
	}
	s.check(a.Set(s.ctx, "p/y", []byte("5")))
	entries, _, err = b.Changes(s.ctx, "p/", next)
	s.check(err)
	if len(entries) != 1 || entries[0].Key != "p/y" || entries[0].Deleted || string(entries[0].Value) != "5" {
		s.Fatalf("changes after that: %+v", entries)
	}
}

// testChangesToCome: a wait ends with a change of its prefix, by any user, and not with another.
func testChangesToCome(s *suite) {
	a, b := s.open(), s.open()
	_, revision, err := a.List(s.ctx, "p/")
	s.check(err)
	type result struct {
		entries []rendezvous.Entry
		err     error
	}
	got := make(chan result, 1)
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() {
		entries, _, err := a.Changes(s.ctx, "p/", revision)
		got <- result{entries, err}
	})
	s.check(b.Set(s.ctx, "q", nil))
	select {
	case r := <-got:
		s.Fatalf("a change of another key: %+v, %v", r.entries, r.err)
	case <-time.After(20 * time.Millisecond):
	}
	s.check(b.Set(s.ctx, "p/1", []byte("v")))
	if r := <-got; r.err != nil || len(r.entries) != 1 || r.entries[0].Key != "p/1" || string(r.entries[0].Value) != "v" {
		s.Fatalf("changes: %+v, %v", r.entries, r.err)
	}
}

// testWait: a wait for keys ends when so many exist at once, whether they existed before, and however often they were
// set or deleted.
func testWait(s *suite) {
	u, other := s.open(), s.open()
	if entries, err := u.Wait(s.ctx, "p/", 0); err != nil || len(entries) > 0 {
		s.Fatalf("Wait for no key: %v, %v", entries, err)
	}
	s.check(u.Set(s.ctx, "p/b", []byte("1")))
	s.check(u.Set(s.ctx, "p", nil))
	if entries, err := other.Wait(s.ctx, "p/", 1); err != nil || len(entries) != 1 || entries[0].Key != "p/b" {
		s.Fatalf("Wait for one key: %v, %v", entries, err)
	}
	var work sync.WaitGroup
	var ended atomic.Bool
	for _, waiting := range []rendezvous.Store{u, other} {
		work.Go(func() {
			entries, err := waiting.Wait(s.ctx, "p/", 3)
			ended.Store(true)
			got := ""
			for _, e := range entries {
				got += fmt.Sprintf("%s=%s ", e.Key, e.Value)
			}
			if err != nil || got != "p/b=3 p/c=c p/d= " {
				s.Errorf("Wait for three keys: %q, %v", got, err)
			}
		})
	}
	for i := range 4 {
		s.check(u.Set(s.ctx, "p/b", []byte(fmt.Sprint(i))))
		s.check(other.Set(s.ctx, "other", nil))
	}
	s.check(u.Set(s.ctx, "p/a", nil))
	s.check(u.Delete(s.ctx, "p/a"))
	s.check(other.Set(s.ctx, "p/c", []byte("c")))
	s.check(u.Set(s.ctx, "p/b", []byte("3")))
	if ended.Load() {
		s.Error("Wait for three keys has ended with two")
	}
	s.check(other.Set(s.ctx, "p/d", nil))
	work.Wait()
	if entries, err := u.Wait(s.ctx, "p/", 2); err != nil || len(entries) != 3 {
		s.Errorf("Wait for two keys of three: %v, %v", entries, err)
	}
}

func testContext(s *suite) {
	u := s.open()
	over := errors.New("enough")
	ctx, cancel := context.WithCancelCause(s.ctx)
	var work sync.WaitGroup
	work.Go(func() {
		if _, _, err := u.Changes(ctx, "p/", 0); !errors.Is(err, over) && !errors.Is(err, context.Canceled) {
			s.Errorf("Changes: %v, want the context's error", err)
		}
	})
	work.Go(func() {
		if _, err := u.Wait(ctx, "p/", 1); !errors.Is(err, over) && !errors.Is(err, context.Canceled) {
			s.Errorf("Wait: %v, want the context's error", err)
		}
	})
	time.Sleep(5 * time.Millisecond)
	cancel(over)
	work.Wait()
	for name, err := range map[string]error{
		"Set":    u.Set(ctx, "x", nil),
		"Delete": u.Delete(ctx, "x"),
		"Create": second(u.Create(ctx, "x", nil)),
		"List":   second(u.List(ctx, "")),
		"Get":    second(u.Get(ctx, "x")),
	} {
		if !errors.Is(err, over) && !errors.Is(err, context.Canceled) {
			s.Errorf("%s: %v, want the context's error", name, err)
		}
	}
	s.check(u.Set(s.ctx, "x", nil))
}

func second[A, B any](_ A, _ B, err error) error { return err }

func testClose(s *suite) {
	u, other := s.open(), s.open()
	var work sync.WaitGroup
	work.Go(func() {
		if _, _, err := u.Changes(s.ctx, "p/", 0); !errors.Is(err, rendezvous.ErrClosed) {
			s.Errorf("Changes: %v, want ErrClosed", err)
		}
	})
	work.Go(func() {
		if _, err := u.Wait(s.ctx, "p/", 1); !errors.Is(err, rendezvous.ErrClosed) {
			s.Errorf("Wait: %v, want ErrClosed", err)
		}
	})
	time.Sleep(5 * time.Millisecond)
	s.check(u.Close())
	work.Wait()
	if err := u.Set(s.ctx, "x", nil); !errors.Is(err, rendezvous.ErrClosed) {
		s.Errorf("Set: %v, want ErrClosed", err)
	}
	if _, _, err := u.Get(s.ctx, "x"); !errors.Is(err, rendezvous.ErrClosed) {
		s.Errorf("Get: %v, want ErrClosed", err)
	}
	s.check(u.Close())
	s.check(other.Set(s.ctx, "x", nil))
}
