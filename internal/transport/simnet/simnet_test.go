package simnet_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestFrames(t *testing.T) {
	run(t, transporttest.Transport{}, simnet.Config{})
}

func TestMemory(t *testing.T) {
	run(t, transporttest.Transport{Domain: transporttest.OneDomain}, simnet.Config{})
}

func TestPairs(t *testing.T) {
	run(t, transporttest.Transport{Domain: transporttest.Pairs}, simnet.Config{Jitter: 5e3})
}

func TestBuffered(t *testing.T) {
	run(t, transporttest.Transport{Buffers: true}, simnet.Config{Buffers: true, Switch: 5e9, Slow: map[int]float64{0: 3}})
}

// run tests the transport in virtual time. Every rank is on a separate host, unless it is in a domain with others.
func run(t *testing.T, tr transporttest.Transport, cfg simnet.Config) {
	tr.Virtual, tr.Allocates = true, true
	tr.Open = func(t *testing.T, n int) []transport.Endpoint {
		cfg := cfg
		for r := range n {
			at := r
			if tr.Domain != nil {
				at = tr.Domain(n, r)
			}
			cfg.Places = append(cfg.Places, transport.Place{Worker: r, Domain: at, Host: at})
		}
		net, err := simnet.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return net.Ends()
	}
	transporttest.Run(t, tr)
}
