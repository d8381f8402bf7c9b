package storetest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// epochs opens a store with the key of an epoch in it, and handles of processes of that epoch.
func (s *suite) epochs(n int) (raw rendezvous.Store, handles []rendezvous.Store) {
	raw = s.open()
	s.check(raw.Set(s.ctx, "job/epoch", []byte("1")))
	for range n {
		handles = append(handles, rendezvous.Fence(s.open(), "job", 1))
	}
	return raw, handles
}

// writes are all operations that change something, on a key that exists at a revision.
var writes = []func(ctx context.Context, u rendezvous.Store, key string, revision uint64, value []byte) error{
	func(ctx context.Context, u rendezvous.Store, key string, _ uint64, value []byte) error {
		return u.Set(ctx, key, value)
	},
	func(ctx context.Context, u rendezvous.Store, key string, _ uint64, value []byte) error {
		_, _, err := u.Create(ctx, key+"/new", value)
		return err
	},
	func(ctx context.Context, u rendezvous.Store, key string, revision uint64, value []byte) error {
		_, err := u.Swap(ctx, key, revision, value)
		return err
	},
	func(ctx context.Context, u rendezvous.Store, key string, _ uint64, _ []byte) error {
		return u.Delete(ctx, key)
	},
}

// testFence: a process of the current epoch writes. One of an earlier or later epoch, or of a job that is over, changes
// nothing, and may read.
func testFence(s *suite) {
	raw, handles := s.epochs(1)
	u := handles[0]
	for i, write := range writes {
		key := fmt.Sprint("now/", i)
		s.check(u.Set(s.ctx, key, []byte("v")))
		if err := write(s.ctx, u, key, s.holds(u, key, "v"), []byte("w")); err != nil {
			s.Errorf("write %d in the current epoch: %v", i, err)
		}
	}
	s.check(raw.Set(s.ctx, "late", []byte("v")))
	for _, epoch := range []string{"2", "10", "0", ""} {
		if epoch == "" {
			s.check(raw.Delete(s.ctx, "job/epoch"))
		} else {
			s.check(raw.Set(s.ctx, "job/epoch", []byte(epoch)))
		}
		for i, write := range writes {
			err := write(s.ctx, u, "late", s.holds(u, "late", "v"), []byte("w"))
			if !errors.Is(err, rendezvous.ErrFenced) || !errors.Is(err, rendezvous.ErrEnded) {
				s.Errorf("write %d of epoch 1 in epoch %q: %v, want ErrFenced", i, epoch, err)
			}
		}
		s.holds(u, "late", "v")
		if _, _, err := u.Get(s.ctx, "late/new"); !errors.Is(err, rendezvous.ErrNotFound) {
			s.Errorf("epoch %q: a refused Create wrote: %v", epoch, err)
		}
	}
}

// testFenceInTime: processes of an epoch write while another one begins the next epoch. The store has no write of
// theirs after that moment, whenever they were stopped.
func testFenceInTime(s *suite) {
	const users = 3
	raw, handles := s.epochs(users)
	var work sync.WaitGroup
	begun := make(chan struct{}, users)
	for i, u := range handles {
		work.Go(func() {
			for n := 0; ; n++ {
				key := fmt.Sprintf("old/%d/%d", i, n)
				_, _, err := u.Create(s.ctx, key, []byte(strconv.Itoa(n)))
				if err == nil && n%2 == 1 {
					err = u.Set(s.ctx, fmt.Sprintf("old/%d", i), []byte(strconv.Itoa(n)))
				}
				if n == 3 {
					begun <- struct{}{}
				}
				if errors.Is(err, rendezvous.ErrFenced) {
					return
				}
				if err != nil {
					s.Errorf("user %d: %v", i, err)
					begun <- struct{}{}
					return
				}
			}
		})
	}
	for range users {
		<-begun
	}
	_, revision, err := raw.Get(s.ctx, "job/epoch")
	s.check(err)
	if swapped, err := raw.Swap(s.ctx, "job/epoch", revision, []byte("2")); !swapped || err != nil {
		s.Fatalf("the next epoch: %v, %v", swapped, err)
	}
	_, revision, err = raw.Get(s.ctx, "job/epoch")
	s.check(err)
	work.Wait()
	entries, _, err := raw.List(s.ctx, "old/")
	s.check(err)
	if len(entries) == 0 {
		s.Error("no user has written")
	}
	for _, e := range entries {
		if e.Revision > revision {
			s.Errorf("%s was written at revision %d, after the next epoch began at %d", e.Key, e.Revision, revision)
		}
	}
}
