// Package affinity divides the CPUs of a machine among processes, and binds processes to them.
//
// [Read] returns the CPUs that this process may use, by core and by NUMA node. [CPUs.Of] divides them by a [Policy],
// and [Run] starts a process on some of them. Only Linux can bind processes: elsewhere [Read] finds no CPUs, and
// nothing is bound. [LastLevel] describes the last-level caches.
package affinity

import (
	"cmp"
	"fmt"
	"io/fs"
	"math"
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
	kinds []CPUs    // the same by the speed of the cores, fastest first; nil: all are alike
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
// since the system divides the time of the CPUs more evenly than a fixed assignment would. Where cores differ in speed,
// a share has equally many of each kind; if there are too few of one kind for that, no process is bound. [Core] takes
// the fastest cores if there are enough.
func (c CPUs) Of(p Policy, n, i int) []int {
	if n < 1 || i < 0 || i >= n || p == None {
		return nil
	}
	var own []int
	switch {
	case len(c.nodes) == 0:
		return nil
	case p == NUMA:
		own = slices.Concat(c.nodes[i*len(c.nodes)/n]...)
	case p == Core && len(c.kinds) > 0 && len(c.kinds[0].cores()) >= n:
		own = c.kinds[0].share(n, i, 1)
	case p == Core:
		own = c.share(n, i, 1)
	case len(c.kinds) > 0 && n > 1:
		for _, kind := range c.kinds {
			if len(kind.cores()) < n {
				return nil
			}
			own = append(own, kind.share(n, i, math.MaxInt)...)
		}
	default:
		own = c.share(n, i, math.MaxInt)
	}
	slices.Sort(own)
	return own
}

// share returns the CPUs of process i of n. Each process has the same number of cores, at most the given one; with
// fewer cores than processes, each has the same number of threads, and with fewer CPUs than processes none has any. A
// share is within a NUMA node if it has as many cores there.
func (c CPUs) share(n, i, most int) []int {
	cores := c.cores()
	switch each := len(cores) / n; {
	case each == 0:
		return threads(cores, n, i)
	case n >= len(c.nodes):
		node := i * len(c.nodes) / n
		if within := fewest(c.nodes, n); within == each || within >= most {
			at := (i - first(node, len(c.nodes), n)) * within
			return slices.Concat(c.nodes[node][at : at+min(within, most)]...)
		}
		fallthrough
	default:
		return slices.Concat(cores[i*each : i*each+min(each, most)]...)
	}
}

// threads returns the CPUs of process i of n where n is larger than the number of cores: equally many threads for each,
// on all cores if that is possible.
func threads(cores [][]int, n, i int) []int {
	if each := fewest(cores, n); each > 0 {
		core := i * len(cores) / n
		at := (i - first(core, len(cores), n)) * each
		return slices.Clone(cores[core][at : at+each])
	}
	all := slices.Concat(cores...)
	each := len(all) / n
	if each == 0 {
		return nil
	}
	return all[i*each : (i+1)*each]
}

// fewest returns how many members each of n processes can have if process i has some of part i·parts/n.
func fewest[E any](parts [][]E, n int) int {
	least := math.MaxInt
	for p, part := range parts {
		if of := first(p+1, len(parts), n) - first(p, len(parts), n); of > 0 {
			least = min(least, len(part)/of)
		}
	}
	return least
}

// first returns the first of n processes that has some of this part or a later one.
func first(part, parts, n int) int { return (part*n + parts - 1) / parts }

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
	rest := map[int]bool{}
	for _, cpu := range allowed {
		rest[cpu] = true
	}
	take := func(list []int) (node [][]int) {
		for _, cpu := range list {
			if !rest[cpu] {
				continue
			}
			core := []int{}
			for _, t := range listOf(root, fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu)) {
				if rest[t] {
					core = append(core, t)
				}
			}
			if !slices.Contains(core, cpu) {
				core = []int{cpu}
			}
			for _, t := range core {
				delete(rest, t)
			}
			node = append(node, core)
		}
		return node
	}
	var out CPUs
	for _, list := range append(nodes(root), allowed) { // finally the CPUs of no node
		if node := take(list); len(node) > 0 {
			out.nodes = append(out.nodes, node)
		}
	}
	out.kinds = out.byKind(speeds(root))
	return out
}

// byKind divides the CPUs by the speed of their cores, fastest first; nil if all are alike.
func (c CPUs) byKind(speed func(cpu int) int) []CPUs {
	var found []int
	for _, core := range c.cores() {
		if v := speed(core[0]); !slices.Contains(found, v) {
			found = append(found, v)
		}
	}
	if len(found) < 2 {
		return nil
	}
	slices.SortFunc(found, func(a, b int) int { return cmp.Compare(b, a) })
	out := make([]CPUs, len(found))
	for i, v := range found {
		for _, node := range c.nodes {
			alike := slices.DeleteFunc(slices.Clone(node), func(core []int) bool { return speed(core[0]) != v })
			if len(alike) > 0 {
				out[i].nodes = append(out[i].nodes, alike)
			}
		}
	}
	return out
}

// speeds returns a function that ranks the CPUs by their speed: by the capacity that Linux gives (arm64), or by the
// kinds of cores of an Intel processor.
func speeds(root fs.FS) func(cpu int) int {
	slow := append(listOf(root, "sys/devices/cpu_atom/cpus"), listOf(root, "sys/devices/cpu_lowpower/cpus")...)
	return func(cpu int) int {
		if v, err := strconv.Atoi(line(root, fmt.Sprintf("sys/devices/system/cpu/cpu%d/cpu_capacity", cpu))); err == nil {
			return v
		}
		if slices.Contains(slow, cpu) {
			return -1
		}
		return 0
	}
}

// nodes reads the CPUs of each NUMA node that has any.
func nodes(root fs.FS) (out [][]int) {
	names, _ := fs.Glob(root, "sys/devices/system/node/node[0-9]*/cpulist")
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(len(a)-len(b), strings.Compare(a, b)) // node2 before node10
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
