package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// pairLink is the communicator of a pair.
type pairLink struct {
	collective.Communicator
	ctx  context.Context
	opts collective.Options
}

// testPair tests the pair of a communicator. Both workers call it; the lower worker leads.
func testPair(ctx context.Context, c collective.Communicator, cfg *Config, leads bool) Pair {
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.turn(),
		fmt.Errorf("the test of the pair took more than %v", cfg.turn()))
	defer cancel()
	l := &pairLink{c, ctx, collective.Options{Timeout: cfg.Timeout}}
	p := Pair{Reach: c.Properties().Transport}
	if c.Properties().Encrypted {
		p.Reach += "+tls"
	}
	if err := l.test(&p, cfg, leads); err != nil {
		p.Problem = firstLine(err)
	}
	if err := c.Close(); err != nil && p.Problem == "" {
		p.Problem = firstLine(err)
	}
	return p
}

func (l *pairLink) test(p *Pair, cfg *Config, leads bool) error {
	if !leads {
		if err := l.echo(); err != nil {
			return err
		}
		if err := l.recvBursts(cfg.Bytes); err != nil {
			return err
		}
		var err error
		p.Back, err = l.sendBursts(cfg)
		return err
	}
	if err := l.ping(p, cfg.Time); err != nil {
		return err
	}
	var err error
	if p.There, err = l.sendBursts(cfg); err != nil {
		return err
	}
	return l.recvBursts(cfg.Bytes)
}

func (l *pairLink) send(m tensor.Memory) error {
	return l.Do(l.ctx, &collective.Call{
		Op: collective.Send, Type: tensor.Uint8, Peer: 1 - l.Rank(), Src: m,
		Options: &l.opts,
	})
}

func (l *pairLink) recv(m tensor.Memory) error {
	return l.Do(l.ctx, &collective.Call{
		Op: collective.Recv, Type: tensor.Uint8, Peer: 1 - l.Rank(), Dst: m,
		Options: &l.opts,
	})
}

// sendNumbers sends two numbers.
func (l *pairLink) sendNumbers(a, b int64) error {
	x := [2]int64{a, b}
	return l.send(bytesOf(&x))
}

// recvNumbers receives two numbers.
func (l *pairLink) recvNumbers() (a, b int64, err error) {
	var x [2]int64
	err = l.recv(bytesOf(&x))
	return x[0], x[1], err
}

// bytesOf returns the memory of two numbers. Workers of one job have the same byte order: the handshake of
// the transports verifies it.
func bytesOf(x *[2]int64) tensor.Memory {
	return tensor.HostMemory(unsafe.Slice((*byte)(unsafe.Pointer(x)), unsafe.Sizeof(*x)))
}

const (
	tripsMin = 20
	tripsMax = 2000
)

// ping measures round trips. From the fastest one it computes the peer's clock offset, as NTP does: half the
// difference of the apparent one-way times.
func (l *pairLink) ping(p *Pair, most time.Duration) error {
	var trips []time.Duration
	start := time.Now()
	for len(trips) < tripsMax && (len(trips) < tripsMin || time.Since(start) < most) {
		sent := time.Now()
		if err := l.sendNumbers(1, 0); err != nil {
			return err
		}
		got, replied, err := l.recvNumbers()
		if err != nil {
			return err
		}
		trip := time.Since(sent)
		if len(trips) == 0 || trip < slices.Min(trips) {
			p.Ahead = (time.Duration(got-sent.UnixNano()) + time.Duration(replied-sent.Add(trip).UnixNano())) / 2
		}
		trips = append(trips, trip)
	}
	slices.Sort(trips)
	p.RoundTrip = trips[len(trips)/2]
	return l.sendNumbers(0, 0)
}

// echo answers pings with the times of arrival and of the answer.
func (l *pairLink) echo() error {
	for {
		more, _, err := l.recvNumbers()
		if err != nil || more == 0 {
			return err
		}
		now := time.Now().UnixNano()
		if err := l.sendNumbers(now, time.Now().UnixNano()); err != nil {
			return err
		}
	}
}

const (
	messagesMax = 10_000
	burstsMin   = 5
)

// sendBursts measures the bandwidth to the peer, in bytes a second, in bursts: from the first message until the
// peer has acknowledged the last. The result is that of the best burst: other load on the machine slows one
// burst, a slow link slows all.
func (l *pairLink) sendBursts(cfg *Config) (best float64, err error) {
	m, err := l.NewBuffer(cfg.Bytes)
	if err != nil {
		return 0, err
	}
	defer release(m)
	burst := cfg.Time / burstsMin
	n := int64(1)
	start := time.Now()
	more := func(done int) bool {
		took := time.Since(start)
		return took < cfg.Time || done < 2 || done < burstsMin && took < burstsMin*cfg.Time
	}
	for done := 0; more(done); done++ {
		took, err := l.burst(m, n)
		if err != nil {
			return 0, err
		}
		best = max(best, float64(n)*float64(cfg.Bytes)/took.Seconds())
		if took < burst/2 {
			n = min(messagesMax, 2*n)
		}
	}
	return best, l.sendNumbers(0, 0)
}

// burst sends n messages and waits until the peer has received them.
func (l *pairLink) burst(m tensor.Memory, n int64) (took time.Duration, err error) {
	start := time.Now()
	if err := l.sendNumbers(n, 0); err != nil {
		return 0, err
	}
	for range n {
		if err := l.send(m); err != nil {
			return 0, err
		}
	}
	_, _, err = l.recvNumbers()
	return max(time.Since(start), time.Nanosecond), err
}

// recvBursts receives the peer's bursts.
func (l *pairLink) recvBursts(bytes int) error {
	m, err := l.NewBuffer(bytes)
	if err != nil {
		return err
	}
	defer release(m)
	for {
		n, _, err := l.recvNumbers()
		if err != nil || n == 0 {
			return err
		}
		for range n {
			if err := l.recv(m); err != nil {
				return err
			}
		}
		if err := l.sendNumbers(n, 0); err != nil {
			return err
		}
	}
}

func release(m tensor.Memory) {
	if m.Owner != nil {
		m.Owner.Release()
	}
}
