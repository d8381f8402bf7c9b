package simnet_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/simnet"
	"github.com/lockstep-ml/lockstep/transport"
)

var ctx = context.Background()

// open makes a network inside the bubble of the test.
func open(t *testing.T, cfg simnet.Config) (*simnet.Net, []transport.Endpoint) {
	t.Helper()
	net, err := simnet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ends := net.Ends()
	t.Cleanup(func() {
		for _, e := range ends {
			e.Close()
		}
	})
	return net, ends
}

const mega = 1_000_000 - 64 // and what a frame has besides

// TestTimes: what frames take on a cluster of 1 GB/s and 10 µs between hosts, 10 GB/s and 1 µs inside.
func TestTimes(t *testing.T) {
	network := simnet.Link{Latency: 10 * time.Microsecond, Bandwidth: 1e9}
	ms := time.Millisecond
	for _, test := range []struct {
		name  string
		cfg   simnet.Config
		pairs [][2]int // sender and receiver of a megabyte, at the same time
		want  []time.Duration
	}{
		{
			"inside",
			simnet.Config{Places: simnet.Uniform(1, 2, false)},
			[][2]int{{0, 1}},
			[]time.Duration{ms/10 + time.Microsecond},
		},
		{
			"between",
			simnet.Config{Places: simnet.Uniform(2, 1, false)},
			[][2]int{{0, 1}},
			[]time.Duration{ms + 10*time.Microsecond},
		},
		{
			"both ways",
			simnet.Config{Places: simnet.Uniform(2, 1, false)},
			[][2]int{{0, 1}, {1, 0}},
			[]time.Duration{ms + 10*time.Microsecond, ms + 10*time.Microsecond},
		},
		{
			"one card for two ranks",
			simnet.Config{Places: simnet.Uniform(2, 2, false)},
			[][2]int{{0, 2}, {1, 3}},
			[]time.Duration{ms + 10*time.Microsecond, 2*ms + 10*time.Microsecond},
		},
		{
			"into one card",
			simnet.Config{Places: simnet.Uniform(3, 1, false)},
			[][2]int{{0, 2}, {1, 2}},
			[]time.Duration{ms + 10*time.Microsecond, 2*ms + 10*time.Microsecond},
		},
		{
			"through a narrow switch",
			simnet.Config{Places: simnet.Uniform(4, 1, false), Switch: 1e9},
			[][2]int{{0, 1}, {2, 3}},
			[]time.Duration{ms + 10*time.Microsecond, 2*ms + 10*time.Microsecond},
		},
		{
			"straggler",
			simnet.Config{Places: simnet.Uniform(2, 1, false), Slow: map[int]float64{1: 4}},
			[][2]int{{0, 1}},
			[]time.Duration{4*ms + 40*time.Microsecond},
		},
		{
			"delayed",
			simnet.Config{
				Places: simnet.Uniform(2, 1, false),
				Faults: []simnet.Fault{{Kind: simnet.Delay, Rank: 1, By: ms}},
			},
			[][2]int{{0, 1}},
			[]time.Duration{2*ms + 10*time.Microsecond},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				test.cfg.Network, test.cfg.Buffers = network, true
				_, ends := open(t, test.cfg)
				for i, took := range transfers(t, ends, test.pairs) {
					if more := took - test.want[i]; more < 0 || more > 10*time.Nanosecond {
						t.Errorf("a megabyte from %d to %d took %v, want %v", test.pairs[i][0], test.pairs[i][1], took, test.want[i])
					}
				}
			})
		})
	}
}

// transfers sends megabytes from ranks to ranks, all at once, and returns how long each took.
func transfers(t *testing.T, ends []transport.Endpoint, pairs [][2]int) []time.Duration {
	start := time.Now()
	took := make([]time.Duration, len(pairs))
	var wg sync.WaitGroup
	for _, e := range ends {
		wg.Go(func() {
			var of []int // the pair of each post
			for i, pair := range pairs {
				to, from := -1, -1
				switch e.Rank() {
				case pair[0]:
					to = pair[1]
				case pair[1]:
					from = pair[0]
				default:
					continue
				}
				if err := e.Posts().Post(to, transport.Frame{Data: make([]byte, mega)}, from, make([]byte, mega)); err != nil {
					t.Error(err)
				}
				of = append(of, i)
			}
			for _, i := range of {
				if err := e.Posts().Complete(ctx); err != nil {
					t.Error(err)
				}
				if e.Rank() == pairs[i][1] {
					took[i] = time.Since(start)
				}
			}
		})
	}
	wg.Wait()
	return took
}

// TestRunsRepeat: a run depends on its seed only, though goroutines are scheduled differently each time.
func TestRunsRepeat(t *testing.T) {
	times := func(seed uint64) (out string) {
		synctest.Test(t, func(t *testing.T) {
			_, ends := open(t, simnet.Config{
				Places: simnet.Uniform(3, 2, false), Jitter: 50 * time.Microsecond, Seed: seed,
				Switch: 2e9,
			})
			start := time.Now()
			took := make([]time.Duration, len(ends))
			var wg sync.WaitGroup
			for _, e := range ends {
				wg.Go(func() {
					random := rand.New(rand.NewPCG(seed, 7)) // the same on all ranks
					for range 50 {
						n := len(ends)
						shift, size := 1+random.IntN(n-1), random.IntN(100_000)
						data := make([]byte, size)
						if err := e.Exchange(ctx, (e.Rank()+shift)%n, transport.Frame{Data: data}, (e.Rank()+n-shift)%n,
							data); err != nil {
							t.Error(err)
						}
					}
					took[e.Rank()] = time.Since(start)
				})
			}
			wg.Wait()
			out = fmt.Sprint(took)
		})
		return out
	}
	first := times(1)
	for range 5 {
		if again := times(1); again != first {
			t.Fatalf("the same seed took %s, then %s", first, again)
		}
	}
	if other := times(2); other == first {
		t.Errorf("another seed took the same times %s", other)
	}
}

// TestFaults: what the ranks of two exchanges with each other see of each fault, and when.
func TestFaults(t *testing.T) {
	down := func(rank int, why error) func(error) bool {
		return func(err error) bool {
			var d *transport.PeerDown
			return errors.As(err, &d) && d.Rank == rank && errors.Is(d.Err, why)
		}
	}
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	const at = 5 * time.Millisecond
	for _, test := range []struct {
		fault      simnet.Fault
		want0      func(error) bool // rank 0's error
		want1      func(error) bool // rank 1's
		soon, late time.Duration    // between which they come, after the fault
	}{
		{simnet.Fault{Kind: simnet.Kill, Rank: 1}, down(1, simnet.ErrReset), is(simnet.ErrKilled), 0, time.Millisecond},
		{
			simnet.Fault{Kind: simnet.Stop, Rank: 1},
			is(context.DeadlineExceeded), is(simnet.ErrKilled), time.Second - at,
			time.Hour,
		},
		{
			simnet.Fault{Kind: simnet.Cut, Rank: 1, Peer: 0},
			down(1, simnet.ErrCut), down(0, simnet.ErrCut),
			100 * time.Millisecond, 101 * time.Millisecond,
		},
		{
			simnet.Fault{Kind: simnet.Corrupt, Rank: 1, Peer: 0},
			down(1, transport.ErrCorrupt), down(0, simnet.ErrReset), 0,
			time.Millisecond,
		},
		{simnet.Fault{Kind: simnet.Forge, Rank: 1, Peer: 0}, is(errOther), is(context.DeadlineExceeded), 0, time.Hour},
	} {
		t.Run(test.fault.Kind.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				test.fault.At = at
				net, ends := open(t, simnet.Config{Places: simnet.Uniform(2, 1, false), Faults: []simnet.Fault{test.fault}})
				start := time.Now()
				errs := make([]error, 2)
				ended := make([]time.Duration, 2)
				waiting, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				var wg sync.WaitGroup
				for i, e := range ends {
					wg.Go(func() {
						h := transport.Header{Comm: 7, Seq: 9}
						e.Inspect(func(_ int, got transport.Header) error {
							if got != h {
								return errOther
							}
							return nil
						})
						buf := make([]byte, 100)
						for errs[i] == nil {
							errs[i] = e.Exchange(waiting, 1-i, transport.Frame{Header: h, Data: buf}, 1-i, buf)
						}
						ended[i] = time.Since(start) - at
					})
				}
				if test.fault.Kind == simnet.Stop {
					time.Sleep(time.Minute)
					net.Happen(simnet.Fault{Kind: simnet.Kill, Rank: 1}) // a stopped process can still be killed
				}
				wg.Wait()
				if !test.want0(errs[0]) || !test.want1(errs[1]) {
					t.Errorf("rank 0: %v\nrank 1: %v", errs[0], errs[1])
				}
				if ended[0] < test.soon || ended[0] > test.late {
					t.Errorf("rank 0 noticed it after %v, want it between %v and %v", ended[0], test.soon, test.late)
				}
			})
		})
	}
}

var errOther = errors.New("another header")

// TestStopAndResume: a process that stops for a while is late, and nothing else.
func TestStopAndResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ends := open(t, simnet.Config{Places: simnet.Uniform(2, 1, false), Faults: []simnet.Fault{
			{Kind: simnet.Stop, Rank: 0, At: 5 * time.Millisecond}, {Kind: simnet.Resume, Rank: 0, At: time.Minute},
		}})
		start := time.Now()
		var wg sync.WaitGroup
		for i, e := range ends {
			wg.Go(func() {
				for range 1000 {
					buf := make([]byte, 100)
					if err := e.Exchange(ctx, 1-i, transport.Frame{Data: buf}, 1-i, buf); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if took := time.Since(start); took < time.Minute || took > time.Minute+100*time.Millisecond {
			t.Errorf("it took %v, want a little more than a minute", took)
		}
	})
}

// TestWrongConfig says what is wrong.
func TestWrongConfig(t *testing.T) {
	for _, test := range []struct {
		cfg  simnet.Config
		says string
	}{
		{simnet.Config{}, "no ranks"},
		{simnet.Config{Places: []transport.Place{{}, {Domain: 1}}}, "a worker is in one domain"},
		{simnet.Config{Places: []transport.Place{{}, {Worker: 1, Host: 1}}}, "a domain on one host"},
		{simnet.Config{Places: simnet.Uniform(1, 1, false), Network: simnet.Link{Latency: 1}}, "bandwidth"},
		{
			simnet.Config{Places: simnet.Uniform(1, 2, false), Faults: []simnet.Fault{{Kind: simnet.Kill, Rank: 2}}},
			"kill of rank 2",
		},
		{simnet.Config{Places: simnet.Uniform(1, 2, false), Faults: []simnet.Fault{{}}}, "no fault"},
	} {
		if _, err := simnet.New(test.cfg); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%+v: %v, want %q", test.cfg, err, test.says)
		}
	}
}
