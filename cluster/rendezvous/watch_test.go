package rendezvous_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// leaderless is a store whose first writes return an error, whether they were made or not, and whose reads after them
// do too.
type leaderless struct {
	rendezvous.Store
	made          bool // the first write was made
	writes, reads int  // that still fail
	between       func()
}

var errNoLeader = errors.New("no leader is elected")

func (l *leaderless) write(do func() error) error {
	if l.writes == 0 {
		return do()
	}
	l.writes--
	if l.made {
		if err := do(); err != nil {
			return err
		}
	}
	if l.between != nil {
		l.between()
	}
	return errNoLeader
}

func (l *leaderless) Create(ctx context.Context, key string, value []byte) (current []byte, created bool, err error) {
	err = l.write(func() error {
		current, created, err = l.Store.Create(ctx, key, value)
		return err
	})
	return current, created, err
}

func (l *leaderless) Swap(ctx context.Context, key string, revision uint64, value []byte) (done bool, err error) {
	err = l.write(func() error {
		done, err = l.Store.Swap(ctx, key, revision, value)
		return err
	})
	return done, err
}

func (l *leaderless) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	if l.reads > 0 {
		l.reads--
		return nil, 0, errNoLeader
	}
	return l.Store.Get(ctx, key)
}

// TestReplace: a write whose result is unknown is read, and made if it was not.
func TestReplace(t *testing.T) {
	for _, c := range []struct {
		name          string
		there         bool // the key has a value
		made          bool
		writes, reads int
		other         bool // another process writes after the first write
		want          bool
		err           error
	}{
		{name: "create", want: true},
		{name: "create what is there", there: true, other: true},
		{name: "create, not made", writes: 1, want: true},
		{name: "create, made", writes: 1, made: true, want: true},
		{name: "create, made, and the store is away", writes: 1, reads: 3, made: true, want: true},
		{name: "create, another was faster", writes: 1, other: true},
		{name: "swap, not made", there: true, writes: 2, reads: 1, want: true},
		{name: "swap, made", there: true, writes: 1, made: true, want: true},
		{name: "swap, another was faster", there: true, writes: 1, other: true},
		{name: "never", writes: 1 << 30, err: errNoLeader},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				memory := rendezvous.NewMemory().Open()
				revision := uint64(0)
				if c.there {
					if err := memory.Set(ctx, "k", []byte("before")); err != nil {
						t.Fatal(err)
					}
					if _, at, _ := memory.Get(ctx, "k"); c.writes > 0 {
						revision = at
					}
				}
				s := &leaderless{Store: memory, made: c.made, writes: c.writes, reads: c.reads}
				if c.other {
					s.between = func() { _ = memory.Set(ctx, "k", []byte("other")) }
				}
				done, err := rendezvous.Replace(ctx, s, "k", revision, []byte("mine"), time.Second)
				if done != c.want || !errors.Is(err, c.err) {
					t.Errorf("got %v, %v; want %v, %v", done, err, c.want, c.err)
				}
				if value, _, _ := memory.Get(ctx, "k"); c.want != (string(value) == "mine") {
					t.Errorf("the key has %q", value)
				}
			})
		})
	}
}

// TestWatch: a watch gets all entries, then the changes, and a further one continues where the first has ended.
func TestWatch(t *testing.T) {
	s := rendezvous.NewMemory().Open()
	set := func(value string) {
		t.Helper()
		if err := s.Set(t.Context(), "p/k", []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	enough := errors.New("enough")
	after, got := uint64(0), ""
	look := func(changes []rendezvous.Entry) error {
		for _, e := range changes {
			got += string(e.Value)
		}
		return enough
	}
	for _, value := range []string{"a", "b"} {
		set(value)
		if err := rendezvous.Watch(t.Context(), s, "p/", &after, look); !errors.Is(err, enough) {
			t.Errorf("got %v, want %v", err, enough)
		}
	}
	if got != "ab" {
		t.Errorf("got %q", got)
	}
}
