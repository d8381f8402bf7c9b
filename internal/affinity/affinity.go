// Package affinity divides the CPUs of a machine among processes, and binds processes to them.
//
// [Read] returns the CPUs that this process may use, by core and by NUMA node. [CPUs.Of] divides them by a [Policy],
// and [Run] starts a process on some of them. Only Linux can bind processes: elsewhere [Read] finds no CPUs, and
// nothing is bound. [LastLevel] describes the last-level caches.
package affinity

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
)

// Policy is how processes are bound to CPUs.
type Policy string

// The policies.
const (
	// Share gives each process the same number of neighbouring cores, as many as there are for it.
	Share Policy = "share"
	// Core gives each process one core.
	Core Policy = "core"
	// NUMA gives each process all cores of one NUMA node.
	NUMA Policy = "numa"
	// None binds no process.
	None Policy = "none"
)

// Policies returns all policies; the default is the first.
func Policies() []Policy { return []Policy{Share, Core, NUMA, None} }

// CPUs are the CPUs that a process may use. It is immutable.
type CPUs struct {
	nodes [][][]int // by NUMA node and core: neighbours first; a core has as many CPUs as threads
}

// Count returns the number of CPUs.
func (c CPUs) Count() (n int) {
	for _, core := range c.cores() {
		n += len(core)
	}
	return n
}

// cores returns the CPUs of each core, node by node.
func (c CPUs) cores() [][]int { return slices.Concat(c.nodes...) }

// Of returns the CPUs of process i of n on this machine, in increasing order; nil: it is not bound. By [NUMA]
// several processes may have one node; otherwise none share a CPU, and with more processes than CPUs none is bound,
// since the system divides the time of the CPUs more evenly than a fixed assignment would.
func (c CPUs) Of(p Policy, n, i int) []int {
	if n < 1 || i < 0 || i >= n {
		return nil
	}
	var own [][]int
	cores := c.cores()
	switch each := len(cores) / n; {
	case len(cores) == 0 || p == None:
		return nil
	case p == NUMA:
		own = c.nodes[i*len(c.nodes)/n]
	case each > 0 && p == Core:
		own = cores[i*each : i*each+1]
	case each > 0:
		own = cores[i*each : (i+1)*each]
	default: // fewer cores than processes: one thread each, if there are enough
		all := slices.Concat(cores...)
		if len(all) < n {
			return nil
		}
		own = [][]int{all[i*(len(all)/n) : (i+1)*(len(all)/n)]}
	}
	return slices.Sorted(slices.Values(slices.Concat(own...)))
}

// Text describes CPUs: "0-3,8".
func Text(cpus []int) string {
	var parts []string
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		part := strconv.Itoa(cpus[i])
		if j > i {
			part += "-" + strconv.Itoa(cpus[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	return strings.Join(parts, ",")
}

// read returns the allowed CPUs of the machine whose file system is root. CPUs without a known core are cores by
// themselves, and those without a known node are in one.
func read(root fs.FS, allowed []int) CPUs {
	if len(allowed) == 0 {
		return CPUs{}
	}
	var out CPUs
	rest := slices.Clone(allowed)
	take := func(list []int) (node [][]int) {
		for _, cpu := range list {
			if !slices.Contains(rest, cpu) {
				continue
			}
			threads := listOf(root, fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu))
			core := []int{}
			for _, t := range threads {
				if slices.Contains(rest, t) {
					core = append(core, t)
				}
			}
			if !slices.Contains(core, cpu) {
				core = []int{cpu}
			}
			rest = slices.DeleteFunc(rest, func(c int) bool { return slices.Contains(core, c) })
			node = append(node, core)
		}
		return node
	}
	for _, list := range nodes(root) {
		if node := take(list); len(node) > 0 {
			out.nodes = append(out.nodes, node)
		}
	}
	if node := take(slices.Clone(rest)); len(node) > 0 {
		out.nodes = append(out.nodes, node)
	}
	return out
}

// nodes reads the CPUs of each NUMA node that has any.
func nodes(root fs.FS) (out [][]int) {
	names, _ := fs.Glob(root, "sys/devices/system/node/node[0-9]*/cpulist")
	slices.SortFunc(names, func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b) // node2 before node10
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		if cpus := listOf(root, name); len(cpus) > 0 {
			out = append(out, cpus)
		}
	}
	return out
}

// listOf reads a list of CPUs from a file; nil if there is none.
func listOf(root fs.FS, name string) []int {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return nil
	}
	cpus, err := ParseList(strings.TrimSpace(string(text)))
	if err != nil {
		return nil
	}
	return cpus
}

// ListMax bounds the numbers of a list.
const ListMax = 1 << 16

// ParseList parses a list of numbers: "0,2-3". The empty list is nil.
func ParseList(s string) ([]int, error) {
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
		case b-a >= ListMax || len(out) >= ListMax:
			return nil, fmt.Errorf("more than %d numbers", ListMax)
		}
		for ; a <= b; a++ {
			out = append(out, int(a))
		}
	}
	return out, nil
}
