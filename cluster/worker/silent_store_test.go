package worker

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestSlowStore: a worker that fails does not query a store that has not answered, until the store has acknowledged
// another heartbeat.
func TestSlowStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		timing := membership.NewTiming(defaultHeartbeat, 1)
		w := &Worker{session: &session{member: membership.NewMember(membership.MemberConfig{
			Store: rendezvous.NewMemory().Open(), Key: "digits/0/heartbeats", Nodes: [][]int{{0}},
			File: membership.NewMemoryFile(1), Timing: timing,
			State: func() membership.Heartbeat { return membership.Heartbeat{} },
		})}}
		var running sync.WaitGroup
		running.Go(func() { w.member.Run(ctx) })
		defer running.Wait()
		defer end()
		time.Sleep(3 * timing.Every)
		slow := func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		queried := false
		quick := func(context.Context) error {
			queried = true
			return nil
		}
		if err := w.accessStore(storeWait, slow); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if err := w.accessStore(storeWait, quick); err != errNoAnswer || queried {
			t.Errorf("at once after a query without an answer: %v, queried %v; want %v", err, queried, errNoAnswer)
		}
		time.Sleep(3 * timing.Every)
		if err := w.accessStore(storeWait, quick); err != nil || !queried {
			t.Errorf("after the store has acknowledged heartbeats: %v, queried %v; want no error", err, queried)
		}
	})
}
