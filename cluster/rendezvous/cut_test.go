package rendezvous_test

import (
	"context"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/storetest"
)

// cutting dials connections that break after some bytes, in either direction: mostly few, sometimes many.
type cutting struct {
	mu     sync.Mutex
	random *rand.Rand
	dialed atomic.Int64
}

func newCutting(t testing.TB) *cutting {
	seed := uint64(time.Now().UnixNano())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("connections were cut by seed %d", seed)
		}
	})
	return &cutting{random: rand.New(rand.NewPCG(seed, 0))}
}

func (d *cutting) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.dialed.Add(1)
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &cutConn{Conn: c}
	// 100 bytes, more than a hello, to 100 MiB
	out.left.Store(int64(100 * math.Pow(2, 20*math.Pow(d.random.Float64(), 4))))
	return out, nil
}

type cutConn struct {
	net.Conn
	left atomic.Int64
}

func (c *cutConn) spend(n int) (allowed int) {
	left := c.left.Add(-int64(n))
	if left >= 0 {
		return n
	}
	return max(0, n+int(left))
}

func (c *cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if allowed := c.spend(n); allowed < n { // what arrived is lost
		c.Conn.Close()
		return allowed, net.ErrClosed
	}
	return n, err
}

func (c *cutConn) Write(b []byte) (int, error) {
	allowed := c.spend(len(b))
	n, err := c.Conn.Write(b[:allowed])
	if allowed < len(b) && err == nil {
		c.Conn.Close()
		err = net.ErrClosed
	}
	return n, err
}

// TestConformanceTCPCut: the store passes the conformance suite while its connections break all the time: no change is
// repeated or lost.
func TestConformanceTCPCut(t *testing.T) {
	d := newCutting(t)
	storetest.Run(t, storetest.Stores{New: func(t *testing.T) func() rendezvous.Store {
		s := serve(t, rendezvous.ServerConfig{})
		return func() rendezvous.Store { return open(t, s.URL(), rendezvous.Config{Dial: d.dial}) }
	}})
	if n := d.dialed.Load(); n < 40 {
		t.Errorf("only %d connections were made: the test cut too few", n)
	}
}
