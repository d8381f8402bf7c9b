package inspect

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/simulate"
)

// Limits of a printed plan: a larger one is not readable, and its proof takes too long.
const (
	planRanksMax = 256
	planCountMax = 1 << 20
)

// planPrinter holds the flags of lockstep plan.
type planPrinter struct {
	cluster   simulate.Cluster
	algorithm string
	reduce    string
	count     int
	root      int
	peer      int
	anyOrder  bool
	memory    string
	format    string
}

// planOps returns the operations of lockstep plan: those of lockstep simulate, and a send.
func planOps() map[string]plan.Op {
	ops := map[string]plan.Op{"send": plan.Send}
	for name, op := range simulateOps {
		ops[name] = op
	}
	return ops
}

// NewPlan returns lockstep plan.
func NewPlan() *cobra.Command {
	f := planPrinter{cluster: simulate.Cluster{
		Inside:  plan.Link{Latency: time.Microsecond, Bandwidth: 10e9},
		Outside: plan.Link{Latency: 25 * time.Microsecond, Bandwidth: 12.5e9},
		Combine: 30e9, Copy: 12e9, // as in lockstep simulate
	}}
	ops := planOps()
	cmd := &cobra.Command{
		Use:   "plan OPERATION",
		Short: "Print the plan of a collective, and prove it correct",
		Long: `Plan prints what each rank does in a collective operation, step by step, and
what it holds after each step: (0+1) is the sum of the contributions of ranks 0
and 1, in this order. No data is moved.

Plan first proves that the plan is correct. The proof executes the plans of all
ranks symbolically, for each way in which the buffers of a call can share
memory. It shows that every rank ends with the right result, that each
contribution is added exactly once and in the right order, and that the plan has
no deadlock and no data race.

Operations: ` +
			strings.Join(cli.WrapWords(strings.Join(cli.Sorted(ops), ", "), cli.HelpColumns-len("Operations: ")), "\n") + `.
docs/algorithms.md explains the algorithms.`,
		Example: `  lockstep plan allreduce --algorithm ring --ranks 8
  lockstep plan allreduce --ranks 8 --hosts 2 --format svg > plan.svg
  lockstep plan broadcast --algorithm double_tree --format dot | dot -Tpdf > plan.pdf`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.Usagef("want one operation: %s", strings.Join(cli.Sorted(ops), ", "))
			}
			return nil
		},
		ValidArgs: cli.Sorted(ops),
		RunE: func(cmd *cobra.Command, args []string) error {
			op, ok := parseOp(args[0], ops)
			if !ok {
				return cli.Usagef("operation %s: want one of %s", args[0], strings.Join(cli.Sorted(ops), ", "))
			}
			p, err := f.problem(op)
			if err != nil {
				return err
			}
			return f.print(cmd.OutOrStdout(), p)
		},
	}
	flags := cmd.Flags()
	cli.ChoiceVar(flags, &f.algorithm, "algorithm", "auto",
		"auto (the default for this topology) or one of "+strings.Join(chooser.Names(), ", "),
		append([]string{"auto"}, chooser.Names()...)...)
	flags.IntVar(&f.cluster.Ranks, "ranks", 4, "number of ranks")
	flags.IntVar(&f.cluster.Hosts, "hosts", 1, "number of hosts; the ranks are spread over them in order")
	flags.IntVar(&f.count, "count", 0, "elements of the whole vector (default 64 for each rank)")
	cli.ChoiceVar(flags, &f.reduce, "reduce", "sum", "", "sum", "prod", "min", "max", "mean")
	flags.IntVar(&f.root, "root", 0, "the root of a rooted operation; the sender of a send")
	flags.IntVar(&f.peer, "peer", 1, "the receiver of a send")
	flags.BoolVar(&f.anyOrder, "any-order", false, "allow any order of addition (default: only if the algorithm needs it)")
	memoryVar(flags, &f.memory, "inplace")
	cli.ChoiceVar(flags, &f.format, "format", "text", "text, dot (Graphviz), svg or json", "text", "dot", "svg", "json")
	cli.Limit(flags, fmt.Sprintf("[1,%d]", planRanksMax), "ranks")
	cli.Limit(flags, fmt.Sprintf("[0,%d]", planCountMax), "count")
	return cmd
}

// problem validates the flags.
func (f *planPrinter) problem(op plan.Op) (plan.Problem, error) {
	var none plan.Problem
	c := &f.cluster
	reduce, err := plan.ParseReduceOp(f.reduce)
	switch {
	case err != nil:
		return none, err
	case c.Hosts < 1 || c.Hosts > c.Ranks:
		return none, cli.Usagef("--hosts %d: want 1 to %d, at most one for each rank", c.Hosts, c.Ranks)
	case f.root < 0 || f.root >= c.Ranks:
		return none, cli.Usagef("--root %d: want 0 to %d", f.root, c.Ranks-1)
	case op == plan.Send && (f.peer < 0 || f.peer >= c.Ranks || f.peer == f.root):
		return none, cli.Usagef("--peer %d: want a rank from 0 to %d other than --root %d", f.peer, c.Ranks-1, f.root)
	}
	p := plan.Problem{Op: op, Reduce: reduce, Count: f.count, Root: f.root}
	if op == plan.Send {
		p.Peer = f.peer
	}
	if f.count == 0 {
		p.Count = 64 * c.Ranks
	}
	switch op {
	case plan.Barrier:
		p.Count = 0
	case plan.ReduceScatter, plan.AllGather, plan.Gather, plan.Scatter, plan.AllToAll:
		if p.Count%c.Ranks != 0 {
			return none, cli.Usagef("--count %d: want a multiple of the %d ranks: each has an equal part", p.Count, c.Ranks)
		}
	}
	if f.anyOrder {
		p.Order = plan.Any
	}
	c.Memory, c.Private = f.memory != "none", f.memory == "private"
	return c.Problem(p, planElementBytes), nil
}

// planElementBytes is the size of an element, for the choice of an algorithm: float32.
const planElementBytes = 4

// print proves the plan and prints it.
func (f *planPrinter) print(w io.Writer, p plan.Problem) error {
	a, err := f.choose(&p)
	if err != nil {
		return err
	}
	d, err := plan.Draw(a, p)
	if err != nil {
		return fmt.Errorf("%s: %w", a.Name, err)
	}
	switch f.format {
	case "dot":
		_, err = io.WriteString(w, d.DOT())
	case "svg":
		_, err = io.WriteString(w, d.SVG())
	case "json":
		err = cli.WriteJSON(w, d)
	default:
		_, err = fmt.Fprintf(w, "%v\nproven: right result on every rank, no deadlock, no data race (%d symbolic "+
			"executions)\n", d, d.Proofs)
	}
	return err
}

// choose returns the algorithm. If a named algorithm needs another order of addition, choose sets it in p.
func (f *planPrinter) choose(p *plan.Problem) (plan.Algorithm, error) {
	where := f.cluster.Where(planElementBytes)
	if f.algorithm == "auto" {
		ranked := f.cluster.Table().Rank(*p, where)
		if ranked[0].Err != nil {
			return plan.Algorithm{}, fmt.Errorf("no algorithm fits: %s: %w", ranked[0].Algorithm.Name, ranked[0].Err)
		}
		return ranked[0].Algorithm, nil
	}
	a, err := chooser.Named(f.algorithm, *p, where)
	if err != nil && p.Order != plan.Any {
		anyOrder := *p
		anyOrder.Order = plan.Any
		if b, e := chooser.Named(f.algorithm, anyOrder, where); e == nil {
			*p = anyOrder
			return b, nil
		}
	}
	return a, err
}
