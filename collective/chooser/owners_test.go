package chooser_test

import (
	"fmt"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
)

// sent returns the elements that all ranks together send in frames, by the algorithm that the table chooses.
func sent(t *testing.T, p plan.Problem) (total int, algorithm string) {
	t.Helper()
	a, err := chooser.Default().Choose(p, chooser.Where{Frames: "tcp", ElementBytes: 4})
	if err != nil {
		t.Fatal(err)
	}
	for rank := range p.Size {
		for s := range a.Steps(p, rank) {
			if s.Kind == plan.Exchange && s.To >= 0 {
				total += s.Out.Hi - s.Out.Lo
			}
		}
	}
	return total, a.Name
}

// TestUnevenPartsSendNoMore checks that a reduce-scatter to uneven parts and the all-gather of them send together no
// more than the all-reduce; if one rank owns everything, at most a quarter more.
func TestUnevenPartsSendNoMore(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8} {
		for _, each := range []int{10, 30_000, 3_000_000} {
			parts := make([]int, n)
			for r := range parts {
				parts[r] = each/2 + (r*7919)%each
			}
			lopsided := make([]int, n)
			lopsided[n-1] = n * each
			for name, counts := range map[string][]int{"uneven": parts, "all at one rank": lopsided} {
				count := 0
				for _, c := range counts {
					count += c
				}
				problem := plan.Problem{Size: n, Count: count, Reduce: plan.Sum, Order: plan.Canonical}
				problem.Op = plan.AllReduce
				most, by := sent(t, problem)
				problem.Counts = counts
				problem.Op = plan.ReduceScatter
				scattered, one := sent(t, problem)
				problem.Op = plan.AllGather
				gathered, other := sent(t, problem)
				text := fmt.Sprintf("%d ranks, %d elements, %s: %d (%s) + %d (%s), all-reduce %d (%s)", n, count, name,
					scattered, one, gathered, other, most, by)
				if name != "uneven" {
					most += most / 4
				}
				if scattered+gathered > most {
					t.Error(text)
				}
			}
		}
	}
}
