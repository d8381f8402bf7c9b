package faulty_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/internal/transport/faulty"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestTransparent: an endpoint without faults, or with delays only, fulfils all contracts.
func TestTransparent(t *testing.T) {
	pairs := func(n int) []transport.Endpoint { return transporttest.Domains(n, transporttest.Pairs) }
	late := faulty.Config{Rate: map[faulty.Fault]float64{faulty.Delay: 0.02}, DelayMax: 20 * time.Microsecond}
	for _, test := range []struct {
		name   string
		ends   func(n int) []transport.Endpoint
		domain func(n, rank int) int
		cfg    faulty.Config
	}{
		{"memory", mem.New, transporttest.OneDomain, faulty.Config{}},
		{"pipes", mem.NewPipes, nil, faulty.Config{}},
		{"pairs, late", pairs, transporttest.Pairs, late},
	} {
		t.Run(test.name, func(t *testing.T) {
			transporttest.Run(t, transporttest.Transport{
				Open:   func(_ *testing.T, n int) []transport.Endpoint { return faulty.WrapAll(test.ends(n), test.cfg) },
				Domain: test.domain, Virtual: test.cfg.Rate != nil, Large: 1 << 20,
			})
		})
	}
}

var errOther = errors.New("another header")

// TestFaults: the errors of two ranks that exchange frames, for each fault of rank 1.
func TestFaults(t *testing.T) {
	down := func(rank int, why error) func(error) bool {
		return func(err error) bool {
			var d *transport.PeerDown
			return errors.As(err, &d) && d.Rank == rank && errors.Is(d.Err, why)
		}
	}
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	over := is(context.DeadlineExceeded)
	for _, test := range []struct {
		fault        faulty.Fault
		want0, want1 func(error) bool
	}{
		{faulty.Cut, down(1, transport.ErrClosed), down(0, faulty.ErrCut)},
		{faulty.Kill, down(1, transport.ErrClosed), is(faulty.ErrKilled)},
		{faulty.Stop, over, over}, // only a deadline detects it
		{faulty.Corrupt, down(1, transport.ErrClosed), down(0, transport.ErrCorrupt)},
		{faulty.Header, down(1, transport.ErrClosed), is(errOther)},
		{faulty.Replay, down(1, transport.ErrClosed), is(errOther)},
		{faulty.Truncate, is(transport.ErrSize), down(0, transport.ErrClosed)},
	} {
		for _, posted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v,posted=%v", test.fault, posted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ends := mem.NewPipes(2)
					happened := 0
					ends[1] = faulty.Wrap(ends[1], faulty.Config{
						Seed: 7, Rate: map[faulty.Fault]float64{test.fault: 0.1}, Once: true,
						Note: func(rank int, _ string, f faulty.Fault) {
							if happened++; rank != 1 || f != test.fault {
								t.Errorf("%v happened to rank %d", f, rank)
							}
						},
					})
					errs := exchangeUntilError(ends, posted)
					if !test.want0(errs[0]) || !test.want1(errs[1]) || happened != 1 {
						t.Errorf("it happened %d times\nrank 0: %v\nrank 1: %v", happened, errs[0], errs[1])
					}
				})
			})
		}
	}
}

// exchangeUntilError exchanges numbered frames between two ranks, each of which closes when it has an error.
func exchangeUntilError(ends []transport.Endpoint, posted bool) []error {
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for i, e := range ends {
		wg.Go(func() {
			defer e.Close()
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i)*time.Second) // rank 0 gives up first
			defer cancel()
			var frame uint32
			e.Inspect(func(_ int, h transport.Header) error {
				if h != (transport.Header{Comm: 7, Frame: frame}) {
					return errOther
				}
				return nil
			})
			for ; errs[i] == nil; frame++ {
				out := transport.Frame{
					Header: transport.Header{Comm: 7, Frame: frame},
					Data:   bytes.Repeat([]byte{byte(frame)}, 100),
				}
				in := make([]byte, 100)
				if posted {
					if errs[i] = e.Posts().Post(1-i, out, 1-i, in); errs[i] == nil {
						errs[i] = e.Posts().Complete(ctx)
					}
				} else {
					errs[i] = e.Exchange(ctx, 1-i, out, 1-i, in)
				}
				if errs[i] == nil && !bytes.Equal(in, out.Data) {
					errs[i] = errors.New("other bytes")
				}
			}
		})
	}
	wg.Wait()
	return errs
}

// TestFlags: faults are injected into flags too.
func TestFlags(t *testing.T) {
	for fault, want := range map[faulty.Fault]error{
		faulty.Kill: faulty.ErrKilled, faulty.Stop: context.DeadlineExceeded,
		faulty.Delay: nil,
	} {
		synctest.Test(t, func(t *testing.T) {
			ends := mem.New(2)
			ends[1] = faulty.Wrap(ends[1], faulty.Config{
				Seed: 3, Rate: map[faulty.Fault]float64{fault: 0.05},
				DelayMax: time.Minute,
			})
			ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
			defer cancel()
			errs := make([]error, 2)
			var wg sync.WaitGroup
			for i, e := range ends {
				wg.Go(func() {
					defer e.Close()
					for range 300 {
						e.Memory().Publish(&transport.Slot{})
						for flag := range 2 {
							if errs[i] = errors.Join(e.Memory().Signal(flag), e.Memory().Await(ctx, -1, flag)); errs[i] != nil {
								return
							}
						}
					}
				})
			}
			start := time.Now()
			wg.Wait()
			if !errors.Is(errs[1], want) || (want == nil) != (errs[0] == nil) {
				t.Errorf("%v: rank 0: %v, rank 1: %v, want %v", fault, errs[0], errs[1], want)
			}
			if fault == faulty.Delay && time.Since(start) < time.Minute {
				t.Errorf("1200 calls of which one in twenty is up to a minute late took %v", time.Since(start))
			}
		})
	}
}

// TestSameSeed: equal calls get equal faults.
func TestSameSeed(t *testing.T) {
	happened := func(seed uint64) (out string) {
		synctest.Test(t, func(t *testing.T) {
			ends := faulty.WrapAll(mem.NewPipes(2), faulty.Config{
				Seed: seed, Rate: map[faulty.Fault]float64{faulty.Delay: 0.1, faulty.Kill: 0.01, faulty.Truncate: 0.01},
				Note: func(rank int, call string, f faulty.Fault) {
					if rank == 1 {
						out += fmt.Sprintln(call, f)
					}
				},
			})
			exchangeUntilError(ends, false)
		})
		return out
	}
	if a, b, c := happened(5), happened(5), happened(6); a != b || a == c || a == "" {
		t.Errorf("seed 5: %q, then %q; seed 6: %q", a, b, c)
	}
}
