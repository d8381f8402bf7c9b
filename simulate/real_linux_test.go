package simulate_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/formula"
	"github.com/lockstep-ml/lockstep/internal/testnet"
	"github.com/lockstep-ml/lockstep/simulate"
)

var realHosts = flag.Bool("real-hosts", false, "TestRealHosts measures real all-reduces between network namespaces")

const hostVariable = "SIMULATE_TEST_HOST"

// TestMain runs a process of a measurement if TestRealHosts started this program as one.
func TestMain(m *testing.M) {
	if job, ok := os.LookupEnv(hostVariable); ok {
		if err := bench.Work(context.Background(), job, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestRealHosts compares simulated all-reduces with real ones, of the same plans: between processes in network
// namespaces, whose cables to one switch are limited so that they decide, and not the processors of this machine. The
// latency is that of a message of 4 bytes between two of them.
func TestRealHosts(t *testing.T) {
	if !*realHosts {
		t.Skip("without -real-hosts: it measures for a minute, on an idle machine; .ci/long scale runs it")
	}
	const (
		// A host that is ahead sends the data of its next round at once, which shares the partner's cable with the data
		// of the round before, for as long as the partner's buffer has room: docs/simulate.md.
		receives = 128 << 10
		within   = 0.1
		burst    = 80 << 10 // passes at once after a pause: a packet of 64 KiB, before it is cut into frames
		tries    = 4        // other programs of this machine only make the real calls longer
	)
	for i, link := range []struct {
		rate  string
		bits  float64 // per second
		hosts []int
	}{
		{"200mbit", 200e6, []int{2, 4, 8}},
		{"1gbit", 1e9, []int{2}},
	} {
		most := slices.Max(link.hosts)
		subnet := fmt.Sprintf("10.9%d.0", i)
		network := testnet.NewSwitch(t, subnet, most)
		for h := range most {
			network.CapLink(t, h, link.rate, fmt.Sprint(burst))
			network.CapReceives(t, h, receives)
		}
		measure := func(o bench.Options) bench.Result {
			for h := range o.Ranks {
				o.Listen = append(o.Listen, fmt.Sprintf("%s.%d:0", subnet, h+1))
			}
			next := 0
			o.Transport, o.Bind, o.Average = "tcp", affinity.None, bench.AverageRank0
			o.Worker = func(ctx context.Context, job string) *exec.Cmd {
				args := network.Command(next, os.Args[0])
				next++
				cmd := exec.CommandContext(ctx, args[0], args[1:]...)
				cmd.Env = append(os.Environ(), hostVariable+"="+job)
				return cmd
			}
			results, err := bench.Run(t.Context(), io.Discard, o)
			if err != nil {
				t.Fatal(err)
			}
			return results[0]
		}
		latency := measure(bench.Options{Ranks: 2, Sizes: []int{4}, Algorithm: "recursive_doubling", Calls: 200}).Median
		t.Logf("%s, latency %v", link.rate, latency)
		for _, hosts := range link.hosts {
			c := cluster(hosts, hosts, false)
			c.Combine, c.Copy, c.MTU = 30e9, 12e9, 1500
			// tbf counts 14 of the 38 bytes by which Ethernet frames a packet.
			c.Outside = plan.Link{Latency: latency, Bandwidth: link.bits / 8 * (1500 + simulate.FramingBytes) / (1500 + 14)}
			for _, name := range []string{"recursive_doubling", "rabenseifner"} {
				for _, bytes := range []int{2 << 20, 4 << 20, 8 << 20} {
					p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: bytes / 4}, 4)
					r, err := simulate.Run(t.Context(), c, algorithm(t, name), p, 4, nil)
					if err != nil {
						t.Fatal(err)
					}
					real := time.Duration(math.MaxInt64)
					ratio := 0.0
					for try := 0; try < tries && ratio < 1-within; try++ {
						o := bench.Options{Ranks: hosts, Sizes: []int{bytes}, Algorithm: name, Calls: 3, Warmup: 1}
						real = min(real, measure(o).Median)
						ratio = float64(r.Time) / float64(real)
					}
					formula.Row(t, fmt.Sprintf("%s, %d hosts, %d MiB, %s: µs", link.rate, hosts, bytes>>20, name),
						int(real.Microseconds()), int(r.Time.Microseconds()), fmt.Sprintf("simulated, %.3f times as long", ratio))
					if ratio < 1-within || ratio > 1+within {
						t.Errorf("%d hosts, %s, %d bytes: %v in reality, simulated %v", hosts, name, bytes, real, r.Time)
					}
				}
			}
		}
	}
}
