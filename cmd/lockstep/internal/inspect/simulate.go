package inspect

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/units"
	"github.com/lockstep-ml/lockstep/simulate"
)

// simulateRanksMax bounds the number of ranks: more take too much time and memory.
const simulateRanksMax = 1 << 16

// simulation holds the flags of lockstep simulate.
type simulation struct {
	cluster    simulate.Cluster
	op         string
	algorithm  string
	bytes      cli.BytesValue
	element    int
	anyOrder   bool
	root       int
	memory     string
	links      []string
	combine    cli.RateValue
	copying    cli.RateValue
	stragglers []string
	late       []string
	trace      string
	format     string
}

// simulated is one algorithm's result.
type simulated struct {
	Algorithm string        `json:"algorithm"`
	Chosen    bool          `json:"chosen"`
	Time      time.Duration `json:"time_ns"`
	Bound     time.Duration `json:"bound_ns,omitempty"`
	Frames    int           `json:"frames"`
	Sent      int           `json:"busiest_card_bytes"`
	Steps     int           `json:"steps"`
}

var simulateOps = map[string]plan.Op{
	"allreduce": plan.AllReduce, "reduce": plan.Reduce, "reducescatter": plan.ReduceScatter, "broadcast": plan.Broadcast,
	"allgather": plan.AllGather,
	"gather":    plan.Gather, "scatter": plan.Scatter, "alltoall": plan.AllToAll, "barrier": plan.Barrier,
}

// parseOp returns the operation of ops with this name, in any spelling that [plan.ParseOp] accepts.
func parseOp(name string, ops map[string]plan.Op) (plan.Op, bool) {
	op, err := plan.ParseOp(name)
	for _, o := range ops {
		if err == nil && o == op {
			return op, true
		}
	}
	return 0, false
}

// NewSimulate returns lockstep simulate.
func NewSimulate() *cobra.Command {
	s := simulation{bytes: 100 << 20, combine: 30e9, copying: 12e9}
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Predict how long a collective takes on a cluster",
		Long: `Simulate predicts how long a collective takes on a cluster that the flags
describe. It executes the real plan in virtual time; no data is moved. For an
all-reduce it also prints the lower bound

  2(n-1)/n * S/B + latency

where n is the number of hosts, S the bytes and B the bandwidth of a host's
network card.

A link has a latency and a rate. The inside link is the one between two ranks of
a host. The outside link is the one between two hosts: its rate is the bandwidth
of a host's network card in each direction.`,
		Example: `  lockstep simulate --ranks 1024 --hosts 128 --bytes 100MiB
  lockstep simulate --ranks 64 --hosts 8 --algorithm all --link outside=5us,100Gbit/s
  lockstep simulate --ranks 16 --hosts 4 --straggler 3:2.5 --trace step.json`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			problem, err := s.check()
			if err != nil {
				return err
			}
			return cli.Interruptible(cmd, func(ctx context.Context, out io.Writer) error {
				return s.run(ctx, out, cmd.ErrOrStderr(), problem)
			})
		},
	}
	f := cmd.Flags()
	f.IntVar(&s.cluster.Ranks, "ranks", 64, "number of ranks")
	f.IntVar(&s.cluster.Hosts, "hosts", 8, "number of hosts, over which the ranks are spread in order")
	f.StringVar(&s.op, "op", "allreduce", "operation: "+strings.Join(cli.Sorted(simulateOps), ", "))
	cli.ChoiceVar(f, &s.algorithm, "algorithm", "auto",
		"auto (the default), all (every algorithm that fits, fastest first) or one of "+strings.Join(chooser.Names(), ", "),
		append([]string{"auto", "all"}, chooser.Names()...)...)
	f.Var(&s.bytes, "bytes", "size of the whole vector")
	f.IntVar(&s.element, "element-bytes", 4, "size of an element: 1, 2, 4 or 8")
	f.BoolVar(&s.anyOrder, "any-order", false, "allow algorithms that do not add along the canonical tree")
	f.IntVar(&s.root, "root", 0, "the root of a rooted operation")
	memoryVar(f, &s.memory, "private")
	f.StringArrayVar(&s.links, "link", nil, "inside=LATENCY,RATE or outside=LATENCY,RATE (default inside=1us,10GB/s and "+
		"outside=25us,12.5GB/s)")
	f.IntVar(&s.cluster.MTU, "mtu", 0, "bytes of an IP packet between hosts: the headers of TCP, IP and Ethernet then "+
		"take a part of the rate (default: the rate is that of the data)")
	f.Float64Var(&s.cluster.Oversub, "oversubscribe", 1,
		"the switch between the hosts carries 1/x of the bandwidth of all network cards")
	f.IntVar(&s.cluster.Cores, "cores", 0, "processors of a host (default one per rank)")
	f.Var(&s.combine, "combine", "rate at which a rank reads while it reduces")
	f.Var(&s.copying, "copy", "rate at which a rank copies")
	f.StringArrayVar(&s.stragglers, "straggler", nil, "a rank that computes more slowly by this factor, as RANK:FACTOR")
	f.StringArrayVar(&s.late, "late", nil, "a rank that begins this much later than the others, as RANK:TIME")
	f.StringVar(&s.trace, "trace", "", "write every step to this `file`, for Perfetto at ui.perfetto.dev")
	cli.ChoiceVar(f, &s.format, "format", "table", "", "table", "json")
	cli.Suggest(f, "op", cli.Sorted(simulateOps)...)
	cli.Limit(f, fmt.Sprintf("[1,%d]", simulateRanksMax), "ranks")
	cli.Limit(f, "[1,)", "cores")
	cli.Limit(f, fmt.Sprintf("[1,%.0f]", simulate.FactorMax), "oversubscribe")
	return cmd
}

// memoryVar defines the flag --memory.
func memoryVar(f *pflag.FlagSet, p *string, value string) {
	cli.ChoiceVar(f, p, "memory", value, "what ranks of one host share: inplace (each other's buffers), private (a "+
		"staging buffer), none (they exchange messages)", "inplace", "private", "none")
}

// check validates the flags and returns the problem.
func (s *simulation) check() (plan.Problem, error) {
	c := &s.cluster
	c.Inside = plan.Link{Latency: time.Microsecond, Bandwidth: 10e9}
	c.Outside = plan.Link{Latency: 25 * time.Microsecond, Bandwidth: 12.5e9}
	c.Combine, c.Copy = float64(s.combine), float64(s.copying)
	op, ok := parseOp(s.op, simulateOps)
	var none plan.Problem
	switch {
	case !ok:
		return none, cli.Usagef("--op %s: want one of %s", s.op, strings.Join(cli.Sorted(simulateOps), ", "))
	case c.Hosts < 1 || c.Hosts > c.Ranks:
		return none, cli.Usagef("--hosts %d: want 1 to %d, a host for each rank at most", c.Hosts, c.Ranks)
	case s.root < 0 || s.root >= c.Ranks:
		return none, cli.Usagef("--root %d: want 0 to %d", s.root, c.Ranks-1)
	case !slices.Contains([]int{1, 2, 4, 8}, s.element):
		return none, cli.Usagef("--element-bytes %d: want 1, 2, 4 or 8", s.element)
	case s.trace != "" && s.algorithm == "all":
		return none, cli.Usagef("--trace with --algorithm all: a trace shows one algorithm")
	case c.MTU != 0 && (c.MTU < simulate.MTUMin || c.MTU > simulate.MTUMax):
		return none, cli.Usagef("--mtu %d: want %d to %d, or 0 for no headers", c.MTU, simulate.MTUMin, simulate.MTUMax)
	}
	c.Memory, c.Private = s.memory != "none", s.memory == "private"
	if err := s.parse(); err != nil {
		return none, err
	}
	p := plan.Problem{Op: op, Count: int(s.bytes) / s.element, Root: s.root}
	if s.anyOrder {
		p.Order = plan.Any
	}
	switch op {
	case plan.Barrier:
		p.Count = 0
	case plan.ReduceScatter, plan.AllGather, plan.Gather, plan.Scatter, plan.AllToAll:
		p.Count = p.Count / c.Ranks * c.Ranks // all ranks have equal parts
	}
	return c.Problem(p, s.element), nil
}

// parse parses the flags that may be given several times.
func (s *simulation) parse() error {
	c := &s.cluster
	for _, text := range s.links {
		name, link, _ := strings.Cut(text, "=")
		of, ok := map[string]*plan.Link{"inside": &c.Inside, "outside": &c.Outside}[name]
		if !ok {
			return cli.Usagef("--link %s: want inside=LATENCY,RATE or outside=LATENCY,RATE", text)
		}
		latency, rate, err := cli.ParseLink(link)
		if err != nil {
			return cli.Usagef("--link %s: %v", text, err)
		}
		if latency > simulate.DelayMax {
			return cli.Usagef("--link %s: want a latency up to %v", text, simulate.DelayMax)
		}
		*of = plan.Link{Latency: latency, Bandwidth: rate}
	}
	c.Stragglers, c.Late = map[int]float64{}, map[int]time.Duration{}
	for _, text := range s.stragglers {
		rank, value, err := s.rankAnd(text)
		factor, e := strconv.ParseFloat(value, 64)
		if err != nil || e != nil || !(factor >= 1 && factor <= simulate.FactorMax) {
			return cli.Usagef("--straggler %s: want RANK:FACTOR with a rank from 0 to %d and a factor from 1 to %s", text,
				c.Ranks-1, cli.Grouped(simulate.FactorMax))
		}
		c.Stragglers[rank] = factor
	}
	for _, text := range s.late {
		rank, value, err := s.rankAnd(text)
		by, e := time.ParseDuration(value)
		if err != nil || e != nil || by < 0 || by > simulate.DelayMax {
			return cli.Usagef("--late %s: want RANK:TIME with a rank from 0 to %d and a time such as 5ms, up to %v", text,
				c.Ranks-1, simulate.DelayMax)
		}
		c.Late[rank] = by
	}
	return nil
}

func (s *simulation) rankAnd(text string) (rank int, value string, err error) {
	first, value, _ := strings.Cut(text, ":")
	rank, err = strconv.Atoi(first)
	if err == nil && (rank < 0 || rank >= s.cluster.Ranks) {
		err = fmt.Errorf("rank %d", rank)
	}
	return rank, value, err
}

// run simulates the operation and prints the results to w. If it takes long, it writes its progress to progress.
func (s *simulation) run(in context.Context, w, progress io.Writer, p plan.Problem) error {
	var now atomic.Value // describes the current work
	var steps atomic.Int64
	now.Store("choosing an algorithm")
	defer cli.Reassure(progress, func() string {
		return fmt.Sprintf("%v, %s", now.Load(), cli.Count(int(steps.Load()), "step"))
	})()
	ranked := s.cluster.Table().Rank(p, s.cluster.Where(s.element))
	if ranked[0].Err != nil {
		return fmt.Errorf("no algorithm fits: %s: %w", ranked[0].Algorithm.Name, ranked[0].Err)
	}
	chosen := ranked[0].Algorithm.Name
	algorithms := []plan.Algorithm{ranked[0].Algorithm}
	switch s.algorithm {
	case "auto":
	case "all":
		algorithms = nil
		for _, c := range ranked {
			if c.Err == nil {
				algorithms = append(algorithms, c.Algorithm)
			}
		}
	default:
		algorithms[0], _ = plan.FindAlgorithm(s.algorithm)
	}
	var trace *simulate.Trace
	watch := func(simulate.Event) { steps.Add(1) }
	if s.trace != "" {
		f, err := os.Create(s.trace)
		if err != nil {
			return fmt.Errorf("--trace: %w", err)
		}
		defer f.Close()
		trace = simulate.NewTrace(f)
		watch = func(e simulate.Event) {
			steps.Add(1)
			trace.Write(e)
		}
	}
	var results []simulated
	for i, a := range algorithms {
		now.Store(fmt.Sprintf("simulating %s (%d of %d)", a.Name, i+1, len(algorithms)))
		r, err := simulate.Run(in, s.cluster, a, p, s.element, watch)
		if err != nil {
			return err
		}
		one := simulated{
			Algorithm: a.Name, Chosen: a.Name == chosen, Time: r.Time, Frames: r.Frames, Sent: r.Sent,
			Steps: r.Steps,
		}
		if p.Op == plan.AllReduce {
			one.Bound = s.cluster.Bound(p.Count * s.element)
		}
		results = append(results, one)
	}
	slices.SortStableFunc(results, func(a, b simulated) int { return cmp.Compare(a.Time, b.Time) })
	if trace != nil {
		if err := trace.Close(); err != nil {
			return err
		}
	}
	return s.print(w, p, results)
}

// print writes the results.
func (s *simulation) print(w io.Writer, p plan.Problem, results []simulated) error {
	if s.format == "json" {
		for _, r := range results {
			if err := cli.WriteJSON(w, r); err != nil {
				return err
			}
		}
		return nil
	}
	c := &s.cluster
	p.Places = nil // printed below
	var b strings.Builder
	fmt.Fprintf(&b, "%v, %s\n", p, units.Bytes(p.Count*s.element))
	fmt.Fprintf(&b, "%d ranks on %d hosts, memory %s\n", c.Ranks, c.Hosts, s.memory)
	fmt.Fprintf(&b, "inside %v, %s; outside %v, %s per network card", c.Inside.Latency, cli.FormatRate(c.Inside.Bandwidth),
		c.Outside.Latency, cli.FormatRate(c.Outside.Bandwidth))
	if c.MTU > 0 {
		fmt.Fprintf(&b, ", packets of %d bytes", c.MTU)
	}
	b.WriteString("\n\n")
	fmt.Fprintf(&b, "  %-20s %12s %12s %7s %10s %14s\n", "algorithm", "time", "bound", "share", "frames", "busiest NIC")
	for _, r := range results {
		mark, bound, share := " ", "-", "-"
		if r.Chosen {
			mark = ">"
		}
		if r.Bound > 0 {
			bound, share = cli.Round(r.Bound).String(), fmt.Sprintf("%.0f %%", 100*float64(r.Bound)/float64(r.Time))
		}
		fmt.Fprintf(&b, "%s %-20s %12v %12s %7s %10d %14s\n", mark, r.Algorithm, cli.Round(r.Time), bound, share, r.Frames,
			units.Bytes(r.Sent))
	}
	if s.trace != "" {
		fmt.Fprintf(&b, "\n%s holds every step: open it in Perfetto (ui.perfetto.dev)\n", s.trace)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
