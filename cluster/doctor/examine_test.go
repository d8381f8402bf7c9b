package doctor

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // the tests mostly wait
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// join returns the configuration with which worker i of n joins, as if each were on a separate host.
func join(t *testing.T, n int, key secret.Secret) func(i int) worker.Config {
	t.Helper()
	store := fmt.Sprintf("tcp://127.0.0.1:%d", freeport.Take(t, 1))
	return func(i int) worker.Config {
		return worker.Config{
			Job:    &cluster.Job{Source: "a test", ID: "doctor", Worker: i, Workers: n, Store: store, LocalWorker: -1},
			Secret: key, Apart: fmt.Sprint(i), RendezvousTimeout: time.Minute,
			Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			Getenv: func(string) (string, bool) { return "", false },
		}
	}
}

// examineAll has all workers examine the job, except those with a function of the test.
func examineAll(t *testing.T, n int, cfg func(i int) Config, instead map[int]func()) []*Report {
	t.Helper()
	reports := make([]*Report, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			if f := instead[i]; f != nil {
				f()
				return
			}
			var err error
			if reports[i], err = Examine(t.Context(), cfg(i)); err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
		})
	}
	all.Wait()
	return reports
}

// TestExamine: all pairs are measured, and differences are found, over TCP and encrypted.
func TestExamine(t *testing.T) {
	key := secret.New()
	for reach, key := range map[string]secret.Secret{"tcp": {}, "tcp+tls": key} {
		t.Run(reach, func(t *testing.T) {
			const n = 3
			joins := join(t, n, key)
			reports := examineAll(t, n, func(i int) Config {
				return Config{Join: joins(i), Bytes: 64 << 10, Time: 10 * time.Millisecond, Timeout: time.Minute, Facts: []Fact{
					{Name: "instructions", Value: []string{"AVX2", "AVX2", "none"}[i], Alike: true},
					{Name: "processors", Value: fmt.Sprint(2 + i/2)},
				}}
			}, nil)
			for i, r := range reports {
				if r == nil {
					continue
				}
				if r.Chief != (i == 0) || len(r.Pairs) != 3 {
					t.Errorf("worker %d: chief %v, %d pairs", i, r.Chief, len(r.Pairs))
				}
				for _, p := range r.Pairs {
					if p.Problem != "" || p.Reach != reach || p.RoundTrip <= 0 || p.There <= 0 || p.Back <= 0 ||
						p.Ahead.Abs() > time.Second+p.RoundTrip {
						t.Errorf("worker %d has %+v", i, p)
					}
				}
				all := strings.Join(append(r.Wrong, r.Notes...), "\n")
				for _, says := range []string{
					`workers differ in instructions: "AVX2" on workers 0, 1, "none" on worker 2: results may differ`,
					`workers differ in processors: "2" on workers 0, 1, "3" on worker 2`,
				} {
					if !strings.Contains(all, says) || r.Healthy() {
						t.Errorf("%s\ndoes not say %q", all, says)
					}
				}
			}
		})
	}
}

// TestSilentPair: a pair that does not answer is named after its timeout; the other pairs are measured.
func TestSilentPair(t *testing.T) {
	t.Parallel()
	race.SkipShort(t, "it waits 7 s")
	const n = 3
	joins := join(t, n, secret.Secret{})
	cfg := func(i int) Config {
		return Config{Join: joins(i), Bytes: 1 << 10, Time: time.Millisecond, Timeout: 5 * time.Second}
	}
	reports := examineAll(t, n, cfg, map[int]func(){2: func() {
		c, err := cfg(2).filled()
		if err != nil {
			t.Error(err)
			return
		}
		w, err := worker.Join(t.Context(), c.Join)
		if err != nil {
			t.Error(err)
			return
		}
		defer w.Close()
		if _, err := w.Exchange(t.Context(), "facts", []byte("[]")); err != nil {
			t.Error(err)
			return
		}
		var out []half
		for _, turn := range turns(n) {
			color := 0
			if turn[0][1] != 2 {
				color = -1
			}
			pair, err := w.Group().Local()[0].Split(t.Context(), color, 2)
			if err != nil {
				t.Error(err)
				return
			}
			switch {
			case color < 0:
			case turn[0][0] == 1: // it does not answer
				time.Sleep(c.Timeout + c.Timeout/2)
				pair.Close()
			default:
				out = append(out, half{0, 2, testPair(t.Context(), pair, &c, false)})
			}
		}
		if _, _, err := exchange(t.Context(), w, &c, out); err != nil {
			t.Error(err)
		}
	}})
	for i, r := range reports[:2] {
		if r == nil {
			continue
		}
		if len(r.Wrong) != 1 || !strings.Contains(r.Wrong[0], "worker 1 (host") ||
			!strings.Contains(r.Wrong[0], "and worker 2 (host") || !strings.Contains(r.Wrong[0], "deadline exceeded") {
			t.Errorf("worker %d: %q", i, r.Wrong)
		}
		for _, p := range r.Pairs[:2] { // 0-1, 0-2
			if p.Problem != "" {
				t.Errorf("worker %d has %+v", i, p)
			}
		}
	}
}

// TestSilentWorker: a worker that joins and then does nothing is named, and every wait for it ends, whichever worker
// times out first: the one that waits for it, or one that waits for that worker.
func TestSilentWorker(t *testing.T) {
	t.Parallel()
	const soon, later = 300 * time.Millisecond, time.Second
	for name, timeouts := range map[string][3]time.Duration{
		"at once":        {soon, soon, soon},
		"worker 1 first": {later, soon, soon},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			race.SkipShort(t, "it waits 12 to 16 s")
			silentWorker(t, timeouts)
		})
	}
}

// silentRank matches the name of rank 2, with another that was late if the machine was busy.
var silentRank = regexp.MustCompile(`rank 2|ranks [01], 2`)

func silentWorker(t *testing.T, timeouts [3]time.Duration) {
	const n = 3
	joins := join(t, n, secret.Secret{})
	cfg := func(i int) Config {
		return Config{Join: joins(i), Bytes: 1 << 10, Time: time.Millisecond, Timeout: timeouts[i]}
	}
	others := make(chan struct{})
	var two sync.WaitGroup
	two.Add(2)
	go func() { two.Wait(); close(others) }()
	reports := make([]*Report, n)
	var all sync.WaitGroup
	for i := range 2 {
		all.Go(func() {
			defer two.Done()
			var err error
			if reports[i], err = Examine(t.Context(), cfg(i)); err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
		})
	}
	all.Go(func() {
		c, err := cfg(2).filled()
		if err != nil {
			t.Error(err)
			return
		}
		w, err := worker.Join(context.Background(), c.Join)
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := w.Exchange(t.Context(), "facts", []byte("[]")); err != nil {
			t.Error(err)
		}
		<-others
		_ = w.Fail(fmt.Errorf("it slept"))
		_ = w.Close() // the others have left
	})
	all.Wait()
	for i, r := range reports[:2] {
		if r == nil {
			continue
		}
		text := strings.Join(r.Wrong, "\n")
		if !strings.Contains(text, "worker 2 (host") || !strings.Contains(text, "has not reported its results") ||
			!silentRank.MatchString(text) {
			t.Errorf("worker %d: %s", i, text)
		}
	}
}

// TestTurns: each two workers are one pair, and no worker is in two pairs of one turn.
func TestTurns(t *testing.T) {
	for n := 1; n < 40; n++ {
		met := map[[2]int]int{}
		all := turns(n)
		for _, turn := range all {
			busy := map[int]bool{}
			for _, p := range turn {
				met[p]++
				if p[0] < 0 || p[0] >= p[1] || p[1] >= n || busy[p[0]] || busy[p[1]] {
					t.Errorf("%d workers: turn %v", n, turn)
				}
				busy[p[0]], busy[p[1]] = true, true
			}
		}
		if len(met) != n*(n-1)/2 {
			t.Errorf("%d workers: %d pairs", n, len(met))
		}
		for p, times := range met {
			if times != 1 {
				t.Errorf("%d workers: %v are paired %d times", n, p, times)
			}
		}
		if n > separateMax && len(all) != n-1+n%2 {
			t.Errorf("%d workers take %d turns", n, len(all))
		}
	}
}
