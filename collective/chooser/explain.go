package chooser

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/units"
)

// Explain describes what would be chosen for a problem, and why: every algorithm with its predicted time, its
// correction and, if it does not fit, the reason. named is an algorithm that is used independently of the table,
// for the reason why; empty: the table's choice.
func (t *Table) Explain(p plan.Problem, w Where, named, why string) string {
	ranked := t.Rank(p, w)
	links := t.links(w)
	var b strings.Builder
	fmt.Fprintf(&b, "%v, %s, over %s\n", p, units.Bytes(p.Count*links.ElementBytes), w.over(p))
	fmt.Fprintf(&b, "table: %s\n", t.Machine)
	for _, l := range []struct {
		name string
		link plan.Link
	}{{"memory", links.Memory}, {"frames in a host", links.Host}, {"frames between hosts", links.Network}} {
		if l.link.Bandwidth > 0 {
			fmt.Fprintf(&b, "  %-21s %v, %s/s\n", l.name, l.link.Latency, units.Bytes(int(l.link.Bandwidth)))
		}
	}
	fmt.Fprintf(&b, "  %-21s %s/s\n  %-21s %s/s\n\n", "combining", units.Bytes(int(links.Combine)), "copying",
		units.Bytes(int(links.Copy)))
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\talgorithm\tpredicted\tcorrected\twhy")
	for i, c := range ranked {
		mark, because := " ", ""
		switch {
		case c.Err != nil:
			fmt.Fprintf(table, "\t%s\t-\t-\t%v\n", c.Algorithm.Name, c.Err)
			continue
		case c.Algorithm.Name == named:
			mark, because = ">", why
		case named != "" || i > 0:
		case c.Rule:
			mark, because = ">", "a rule of the table names it"
		default:
			mark, because = ">", "the shortest time"
		}
		fmt.Fprintf(table, "%s\t%s\t%v\t%v\t%s\n", mark, c.Algorithm.Name, rounded(c.Cost), rounded(c.Time()), because)
	}
	table.Flush() // a strings.Builder returns no error
	return b.String()
}

// rounded keeps about three digits.
func rounded(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}
