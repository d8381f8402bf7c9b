package secret_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// bareAddress is the address of rank 0, of two in separate networks, for bare exchanges.
const bareAddress = "10.77.0.1:7099"

// bare times exchanges of that many bytes in each direction over one connection without Lockstep, over TLS if the job
// uses it, and returns the seconds of each: what the line and this machine can reach at this moment.
func (w *worker) bare(ctx context.Context, bytes, times int) []float64 {
	c := w.bareConn(ctx)
	defer c.Close()
	out, in := make([]byte, bytes), make([]byte, bytes)
	var took []float64
	for range times {
		since := time.Now()
		wrote := make(chan error, 1)
		go func() {
			_, err := c.Write(out)
			wrote <- err
		}()
		_, err := io.ReadFull(c, in)
		w.check(err)
		w.check(<-wrote)
		took = append(took, time.Since(since).Seconds())
	}
	return took
}

func (w *worker) bareConn(ctx context.Context) net.Conn {
	var c net.Conn
	if w.Rank == 0 {
		l, err := net.Listen("tcp", bareAddress)
		w.check(err)
		defer l.Close()
		c, err = l.Accept()
		w.check(err)
	}
	for c == nil { // until it listens
		if c, _ = (&net.Dialer{}).DialContext(ctx, "tcp", bareAddress); c == nil {
			time.Sleep(time.Millisecond)
		}
	}
	if !w.Encrypt {
		return c
	}
	s, err := secret.Parse(w.Secret)
	w.check(err)
	cfg, err := s.TLS(job, 0)
	w.check(err)
	if w.Rank == 0 {
		return tls.Server(c, cfg)
	}
	return tls.Client(c, cfg)
}
