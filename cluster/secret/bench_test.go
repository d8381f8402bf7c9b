package secret_test

import (
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// BenchmarkLoopback times an all-reduce of two processes over loopback, encrypted and not. Their metric is the median; take
// it from one long run: -benchtime 100x.
func BenchmarkLoopback(b *testing.B) {
	for _, bytes := range []int{4, 64 << 10, 1 << 20, 16 << 20} {
		for _, name := range []string{"plain", "tls"} {
			b.Run(fmt.Sprintf("%s/%d", name, bytes), func(b *testing.B) {
				s := secret.New()
				var all []*process
				for r := range 2 {
					all = append(all, start(b, worker{Rank: r, Size: 2, Secret: s.Text(), Encrypt: name == "tls", Host: fmt.Sprint(r)}, nil))
				}
				meet(b, all)
				reduced(b, all, bytes, 3)
				b.ResetTimer()
				took := reduced(b, all, bytes, b.N)
				slices.Sort(took)
				b.SetBytes(int64(bytes))
				b.ReportMetric(took[len(took)/2]*1e6, "µs/median")
				ask(b, all, "leave")
			})
		}
	}
}

// BenchmarkUnderAttack times the steps of a job of three processes while thousands of hostile connections a second are made to
// it, or, for comparison, to somebody else.
func BenchmarkUnderAttack(b *testing.B) {
	const perSecond = 1000
	for _, target := range []string{"nobody", "a port beside", "the job"} {
		b.Run(target, func(b *testing.B) {
			s := secret.New()
			var all []*process
			for r, host := range []string{"a", "a", "b"} {
				all = append(all, start(b, worker{Rank: r, Size: 3, Secret: s.Text(), Encrypt: true, Host: host}, nil))
			}
			meet(b, all)
			ask(b, all, "train 5")
			a := newAttacker(b, s, all...)
			var attacked []string
			switch target {
			case "the job":
				for _, p := range all {
					attacked = append(attacked, p.addr)
				}
			case "a port beside":
				l := sink(b)
				defer l.Close()
				attacked = []string{l.Addr().String()}
			}
			over := make(chan struct{})
			var attacking sync.WaitGroup
			if len(attacked) > 0 {
				attacking.Go(func() { a.pace(b, attacked, perSecond, over) })
			}
			reduced(b, all, 4*elements, 20)
			b.ResetTimer()
			took := reduced(b, all, 4*elements, b.N)
			b.StopTimer()
			close(over)
			attacking.Wait()
			a.release()
			slices.Sort(took)
			b.ReportMetric(took[len(took)/2]*1e6, "µs/median")
			b.ReportMetric(took[len(took)*9/10]*1e6, "µs/p90")
			ask(b, all, "leave")
		})
	}
}

// pace makes so many hostile connections a second.
func (a *attacker) pace(b *testing.B, addrs []string, perSecond int, over <-chan struct{}) {
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := 0; ; i++ {
		select {
		case <-tick.C:
			wg.Go(func() { a.one(b, addrs, i, 1) })
		case <-over:
			return
		}
	}
}

// sink listens, and reads what comes.
func sink(b *testing.B) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				c.SetDeadline(time.Now().Add(10 * time.Second))
				io.CopyN(io.Discard, c, 80)
				c.Close()
			}()
		}
	}()
	return l
}
