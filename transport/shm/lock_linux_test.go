package shm

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"
)

// TestLockOfEndedProcess joins a group in place of a process that has ended, and whose lock the system has not released
// yet: its connection is closed before.
func TestLockOfEndedProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	// All processes of the host share the names of groups.
	cfg := Config{Name: fmt.Sprint(t.Name(), os.Getpid()), Size: 2, Ranks: []int{1}, ArenaBytes: page}
	listening := cfg
	listening.Ranks = []int{0}
	type opened struct {
		end *endpoint
		err error
	}
	first := make(chan opened, 1)
	open := func(cfg Config) (o opened) {
		ends, err := Open(ctx, cfg)
		if err != nil {
			return opened{err: err}
		}
		return opened{end: ends[0].(*endpoint)}
	}
	go func() { first <- open(listening) }()

	ended := &world{cfg: cfg}
	conn, err := ended.reach(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := send(conn, cfg.hello()); err != nil {
		t.Fatal(err)
	}
	if _, err := receive(conn, &helloReply{}); err != nil {
		t.Fatal(err)
	}
	if err := ended.receiveControl(conn, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	defer ended.control.Close()
	if err := ended.lock(); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	released := time.AfterFunc(50*time.Millisecond, func() { ended.life.Close() })
	defer released.Stop()

	second := open(cfg)
	if second.err != nil {
		t.Error(second.err)
	}
	o := <-first
	if o.err != nil {
		t.Error(o.err)
	}
	for _, o := range []opened{o, second} {
		if o.end != nil {
			defer o.end.Close()
		}
	}
	if t.Failed() {
		return
	}
	if locked, err := isLocked(o.end.g.world.life, 1); err != nil || !locked {
		t.Errorf("the member's lock is held: %v, %v", locked, err)
	}
}
