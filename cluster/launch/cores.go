package launch

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
)

// Affinity selects whether each worker is bound to CPUs.
type Affinity string

// The affinities.
const (
	AffinityAuto Affinity = "auto" // bind where the machine has several NUMA nodes and every worker gets a core
	AffinityOn   Affinity = "on"
	AffinityOff  Affinity = "off"
)

// threadShare returns the number of threads for each of n workers: the same for all, so that equal work takes
// equal time, and at least one.
func threadShare(cores, n int) int { return max(1, cores/n) }

// cpuShare returns the CPUs of worker i of n among the allowed ones, nil for all of them. They are
// neighbours, so that few workers span two NUMA nodes. nodes are the CPUs of each NUMA node.
func cpuShare(affinity Affinity, cpus []int, nodes [][]int, n, i int) []int {
	share := len(cpus) / n
	if affinity == AffinityOff || share == 0 || affinity == AffinityAuto && len(nodes) < 2 {
		return nil
	}
	var ordered []int // by NUMA node
	for _, node := range nodes {
		for _, c := range node {
			if slices.Contains(cpus, c) {
				ordered = append(ordered, c)
			}
		}
	}
	if len(ordered) != len(cpus) {
		ordered = cpus
	}
	return ordered[i*share : (i+1)*share]
}

// memoryNodes reads the CPUs of each NUMA node that has any.
func memoryNodes(root fs.FS) [][]int {
	names, _ := fs.Glob(root, "sys/devices/system/node/node[0-9]*/cpulist")
	slices.SortFunc(names, func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b) // node2 before node10
		}
		return strings.Compare(a, b)
	})
	var out [][]int
	for _, name := range names {
		text, err := fs.ReadFile(root, name)
		if err != nil {
			continue
		}
		if cpus, err := parseList(strings.TrimSpace(string(text))); err == nil && len(cpus) > 0 {
			out = append(out, cpus)
		}
	}
	return out
}

// listMax bounds a list of numbers.
const listMax = 1 << 16

// ParseRanks parses a list of numbers: "0,2-3".
func ParseRanks(s string) ([]int, error) {
	out, err := parseList(s)
	if err == nil && len(out) == 0 {
		err = fmt.Errorf("an empty list")
	}
	if err != nil {
		return nil, fmt.Errorf("%q is not a list of ranks: %w; want one such as 0,2-3", s, err)
	}
	return out, nil
}

func parseList(s string) ([]int, error) {
	var out []int
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		low, high, isRange := strings.Cut(strings.TrimSpace(part), "-")
		a, err := strconv.ParseUint(low, 10, 31)
		b := a
		if err == nil && isRange {
			b, err = strconv.ParseUint(high, 10, 31)
		}
		switch {
		case err != nil:
			return nil, fmt.Errorf("%q is not a number", part)
		case b < a:
			return nil, fmt.Errorf("%q ends before it begins", part)
		case b-a >= listMax || len(out) >= listMax:
			return nil, fmt.Errorf("more than %d numbers", listMax)
		}
		for ; a <= b; a++ {
			out = append(out, int(a))
		}
	}
	return out, nil
}
