package tcp_test

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// TestLateReader: a rank is not lost while it computes for much longer than the keep-alive limit and more is sent to it
// than its socket holds, because its host responds.
func TestLateReader(t *testing.T) {
	t.Parallel()
	race.SkipShort(t, "the receiver is 6 s late")
	brief := net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 1}
	ends := opened(t, 2, 2, func(int) tcp.Config { return tcp.Config{KeepAlive: brief} })
	out, in := bytes.Repeat([]byte("gradient"), 8<<20), make([]byte, 64<<20)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var sender sync.WaitGroup
	sender.Go(func() {
		if err := ends[0].Exchange(ctx, 1, transport.Frame{Data: out}, -1, nil); err != nil {
			t.Errorf("sending to a late receiver: %v", err)
		}
	})
	time.Sleep(6 * time.Second) // it computes
	if err := ends[1].Exchange(ctx, -1, transport.Frame{}, 0, in); err != nil {
		t.Errorf("receiving late: %v", err)
	}
	sender.Wait()
	if !bytes.Equal(in, out) {
		t.Error("the received data differs from the sent data")
	}
	for _, e := range ends {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
