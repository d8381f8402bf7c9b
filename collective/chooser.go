package collective

import (
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/transport"
)

// choose returns the algorithm for a problem: the one named, or the table's first that fits, where every rank of the
// group can do what it needs.
func choose(p Problem, reach transport.Reach, name string) (plan.Algorithm, error) {
	if name != "" {
		a, _ := plan.FindAlgorithm(name)
		return a, fits(a, p, reach)
	}
	var why []string
	for _, a := range plan.Algorithms {
		err := fits(a, p, reach)
		if err == nil {
			return a, nil
		}
		why = append(why, err.Error())
	}
	return plan.Algorithm{}, fmt.Errorf("no algorithm fits: %s", strings.Join(why, "; "))
}

// fits returns why a cannot solve p, or nil. An algorithm that works in memory needs every peer's.
func fits(a Algorithm, p Problem, reach transport.Reach) error {
	if err := a.Fits(p); err != nil {
		return fmt.Errorf("%s: %w", a.Name, err)
	}
	if reach == transport.Memory {
		return nil
	}
	for s := range a.Steps(p, 0) {
		if s.Kind == plan.Signal {
			return fmt.Errorf("%s: it works in the peers' memory, and not all are reached so", a.Name)
		}
	}
	return nil
}

func algorithmNames() string {
	names := make([]string, len(plan.Algorithms))
	for i, a := range plan.Algorithms {
		names[i] = fmt.Sprintf("%q", a.Name)
	}
	return strings.Join(names, " or ")
}
