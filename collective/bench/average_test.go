package bench

import (
	"cmp"
	"context"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// oracleTime combines the times of one call on the ranks that count, of which rank 0 is the first.
func oracleTime(a Average, ranks []time.Duration) time.Duration {
	sum := new(big.Int)
	for _, d := range ranks {
		sum.Add(sum, big.NewInt(int64(d)))
	}
	n := big.NewInt(int64(len(ranks)))
	sum.Add(sum.Lsh(sum, 1), n) // the floor of (2 sum + n) / 2n is the nearest to sum / n
	mean := sum.Quo(sum, n.Lsh(n, 1)).Int64()
	sorted := slices.Sorted(slices.Values(ranks))
	return map[Average]time.Duration{
		AverageRank0: ranks[0], AverageAvg: time.Duration(mean), AverageMin: sorted[0], AverageMax: sorted[len(sorted)-1],
	}[a]
}

// oraclePercentile returns the smallest time that at least so many percent of the times do not exceed.
func oraclePercentile(times []time.Duration, percent int) time.Duration {
	return slices.MinFunc(times, func(a, b time.Duration) int {
		enough := func(d time.Duration) bool {
			n := 0
			for _, other := range times {
				if other <= d {
					n++
				}
			}
			return 100*n >= percent*len(times)
		}
		if enough(a) != enough(b) {
			if enough(a) {
				return -1
			}
			return 1
		}
		return cmp.Compare(a, b)
	})
}

// TestAverageTimes compares the averages of random times, and the percentiles of a result, with those of an oracle.
func TestAverageTimes(t *testing.T) {
	for seed := range uint64(40) {
		random := rand.New(rand.NewPCG(seed, 1))
		ranks, calls := 1+random.IntN(6), 1+random.IntN(150)
		own, counted := make([][]time.Duration, ranks), make([]bool, ranks)
		n := 0
		for rank := range own {
			if counted[rank] = rank == 0 || random.IntN(4) > 0; counted[rank] {
				n++
			}
			for range calls {
				own[rank] = append(own[rank], time.Duration(random.Int64N(1<<random.IntN(50)+1)))
			}
		}
		got := averageOn(t, own, counted, n)
		byCall := map[Average][]time.Duration{}
		for call := range calls {
			var times []time.Duration
			for rank := range own {
				if counted[rank] {
					times = append(times, own[rank][call])
				}
			}
			for _, a := range Averages {
				byCall[a] = append(byCall[a], oracleTime(a, times))
			}
		}
		for _, a := range Averages {
			if !slices.Equal(got.by(a), byCall[a]) {
				t.Errorf("seed %d, %s: %v, want %v", seed, a, got.by(a), byCall[a])
			}
			r := (&Options{Op: collective.AllReduce, Average: a}).result(8, ranks, &got)
			want := [3]time.Duration{
				oraclePercentile(byCall[a], 0), oraclePercentile(byCall[a], 50), oraclePercentile(byCall[a], 99),
			}
			if [3]time.Duration{r.Best, r.Median, r.P99} != want || r.Calls != calls || r.Average != a {
				t.Errorf("seed %d, %s: %+v, want best, median and p99 %v", seed, a, r, want)
			}
			if !slices.Equal(got.by(a), byCall[a]) {
				t.Errorf("seed %d, %s: the result has changed the times", seed, a)
			}
		}
		r := (&Options{Op: collective.AllReduce, Average: AverageMax}).result(8, ranks, &got)
		for a, median := range map[Average]time.Duration{
			AverageRank0: r.Medians.Rank0, AverageAvg: r.Medians.Avg, AverageMin: r.Medians.Min, AverageMax: r.Medians.Max,
		} {
			if want := oraclePercentile(byCall[a], 50); median != want {
				t.Errorf("seed %d: the median by %s is %v, want %v", seed, a, median, want)
			}
		}
	}
}

// averageOn returns rank 0's result of averageTimes on a group whose ranks have these times, of which n count.
func averageOn(t *testing.T, own [][]time.Duration, counted []bool, n int) callTimes {
	t.Helper()
	group, err := collective.Open(mem.New(len(own)), collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	all, errs := make([]callTimes, len(own)), make([]error, len(own))
	var wg sync.WaitGroup
	for _, c := range group.Local() {
		wg.Go(func() {
			rank := c.Rank()
			all[rank], errs[rank] = averageTimes(context.Background(), c, own[rank], counted[rank], n)
		})
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
		for _, a := range Averages {
			if rank > 0 && all[rank].by(a) != nil {
				t.Errorf("rank %d has times: %v", rank, all[rank])
			}
		}
	}
	return all[0]
}

func TestParseAverage(t *testing.T) {
	for i, text := range []string{"rank0", "avg", "min", "max", "0", "1", "2", "3"} {
		if got, err := ParseAverage(text); err != nil || got != Averages[i%4] {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "median", "4", "-1", "AVG"} {
		if got, err := ParseAverage(text); err == nil || !strings.Contains(err.Error(), "want rank0, avg, min or max, or") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
