package membership_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestLeaseEndsWhileFileHangs: the time for which a member waits for its file is not one in which its process did not
// run: its lease ends, however often each access hangs.
func TestLeaseEndsWhileFileHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := membership.NewMemoryFile(1).Through(func() { time.Sleep(usual.Timeout / 4) }, new(atomic.Bool))
		m := membership.NewMember(membership.MemberConfig{
			Store: rendezvous.NewMemory().Open(), Key: "digits", Nodes: [][]int{{0}}, File: file, Agent: true, Timing: usual,
			State: func() membership.Heartbeat { return membership.Heartbeat{} },
		})
		ctx, end := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { m.Run(ctx) })
		began := time.Now()
		watching, cancel := context.WithTimeout(ctx, 20*usual.Timeout)
		defer cancel()
		_, err := m.Lost(watching)
		if after := time.Since(began); !errors.Is(err, rendezvous.ErrLost) || after > usual.Timeout+usual.Every {
			t.Errorf("the lease ended after %v with %v, want %v after %v", after, err, rendezvous.ErrLost, usual.Timeout)
		}
		end()
		running.Wait()
	})
}
