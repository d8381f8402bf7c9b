package secret_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// BenchmarkLoopback times an all-reduce of two processes over loopback, encrypted and not. Run it with -benchtime 100x.
func BenchmarkLoopback(b *testing.B) {
	for _, bytes := range []int{4, 64 << 10, 1 << 20, 16 << 20} {
		for _, name := range []string{"plain", "tls"} {
			b.Run(fmt.Sprintf("%s/%d", name, bytes), func(b *testing.B) {
				s := secret.New()
				var all []*process
				for r := range 2 {
					all = append(all, start(b, worker{
						Rank: r, Size: 2, Secret: s.Text(), Encrypt: name == "tls",
						Host: fmt.Sprint(r),
					}, nil))
				}
				joinAll(b, all)
				benchmarkReduce(b, all, bytes)
			})
		}
	}
}

// benchmarkReduce reports the median time of an all-reduce, and the processor time that all processes spend in one.
func benchmarkReduce(b *testing.B, all []*process, bytes int) {
	timed(b, all, "reduce", bytes, 3)
	spent := func() (sum time.Duration) {
		for _, p := range all {
			sum += spentBy(b, p)
		}
		return sum
	}
	before := spent()
	b.ResetTimer()
	took := timed(b, all, "reduce", bytes, b.N)
	b.StopTimer()
	slices.Sort(took)
	b.SetBytes(int64(bytes))
	b.ReportMetric(took[len(took)/2]*1e6, "µs/median")
	b.ReportMetric(float64((spent()-before).Microseconds())/float64(b.N), "µs-cpu/op")
	ask(b, all, "leave")
}
