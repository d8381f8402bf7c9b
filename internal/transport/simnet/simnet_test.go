package simnet_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

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

// TestPlaces checks that places which contradict each other are an error that names the ranks.
func TestPlaces(t *testing.T) {
	for _, test := range []struct {
		places []transport.Place
		want   string
	}{
		{[]transport.Place{{Worker: 0}, {Worker: 1, Domain: 1}, {Worker: 1, Domain: 2}}, "ranks 1 and 2"},
		{[]transport.Place{{Worker: 0}, {Worker: 1}, {Worker: 2, Host: 1}}, "ranks 0 and 2"},
		{[]transport.Place{{Worker: 0}, {Worker: 1}, {Worker: 2, Domain: 1, Host: 1}}, ""},
		{nil, "Places is empty"},
	} {
		_, err := simnet.New(simnet.Config{Places: test.places})
		if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.places, err, test.want)
		}
	}
}

// TestManyDown checks that a rank is notified of more lost peers than its channel has room for, each once.
func TestManyDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ranks, lost = 300, 100
		net, err := simnet.New(simnet.Config{Places: simnet.Uniform(ranks, 1, false)})
		if err != nil {
			t.Fatal(err)
		}
		ends := net.Ends()
		for r := 1; r < ranks; r += 3 { // the others are still connected with each other
			net.Happen(simnet.Fault{Kind: simnet.Kill, Rank: r})
		}
		time.Sleep(time.Second)
		seen := map[int]bool{}
		for range lost {
			seen[(<-ends[0].Down()).Rank] = true
		}
		for r := range seen {
			if r%3 != 1 {
				t.Errorf("rank %d is down", r)
			}
		}
		if len(seen) != lost {
			t.Errorf("%d ranks are down: %v", len(seen), seen)
		}
		for _, e := range ends { // the last one never reads its channel
			e.Close()
		}
	})
}
