package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// threadShare returns the number of threads for each worker, given the cores that this process may use and the CPUs to
// which each worker is bound, nil: all. It is the same for all, so that equal work takes equal time, and at least one.
// No worker gets more threads than CPUs: several workers may be bound to the same ones, and then share them.
func threadShare(cores int, bound [][]int) int {
	together := map[int]int{} // how many workers are bound to a CPU, by the first one of the worker's list
	for _, own := range bound {
		if len(own) > 0 {
			together[own[0]]++
		}
	}
	least := cores / len(bound)
	for _, own := range bound {
		if len(own) > 0 {
			least = min(least, len(own)/together[own[0]])
		}
	}
	return max(1, least)
}

// logBinding writes to the folder of logs, unless it is "", which CPUs each worker of this node may use. cpus are those
// to which each is bound, nil: all.
func logBinding(logs string, l *layout, cpus [][]int) error {
	if logs == "" {
		return nil
	}
	var b strings.Builder
	for local, own := range cpus {
		text := affinity.Text(own)
		if own == nil {
			text = "all"
		}
		fmt.Fprintf(&b, "rank%d: %s\n", l.first+local, text)
	}
	return os.WriteFile(filepath.Join(logs, fmt.Sprintf("cpus.node%d.log", l.node)), []byte(b.String()), 0o644)
}

// ParseRanks parses a list of numbers: "0,2-3".
func ParseRanks(s string) ([]int, error) {
	out, err := affinity.ParseList(s)
	if err == nil && len(out) == 0 {
		err = fmt.Errorf("an empty list")
	}
	if err != nil {
		return nil, fmt.Errorf("%q is not a list of ranks: %w; want one such as 0,2-3", s, err)
	}
	return out, nil
}
