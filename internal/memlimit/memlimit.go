// Package memlimit reports how much more memory this process can allocate, limited by the host and by its memory
// control groups (cgroups, version 1 or 2). Beyond that the kernel does not refuse memory; it kills a process.
package memlimit

import (
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/cgroup"
)

// Available returns how many bytes of memory this process can still allocate: the minimum of what the host and each of
// its control groups have left, including file caches, which the kernel reclaims on demand, and the free swap that each
// may use. It returns false if the system does not report it, as on systems other than Linux. Other processes may take
// the memory at any time.
func Available() (bytes int64, ok bool) { return available(os.DirFS("/")) }

// Total returns how many bytes of memory this process may use in total: the minimum of the host's memory and the limits
// of its control groups. It returns false if the system does not report it.
func Total() (bytes int64, ok bool) {
	root := os.DirFS("/")
	least, ok := fields(root, "proc/meminfo")["MemTotal"]
	if !ok {
		return 0, false
	}
	for _, g := range groups(root) {
		if limit, ok := number(root, g.limit); ok {
			least = min(least, limit)
		}
	}
	return least, true
}

func available(root fs.FS) (int64, bool) {
	host := fields(root, "proc/meminfo")
	left, ok := host["MemAvailable"]
	if !ok {
		return 0, false
	}
	swap := host["SwapFree"]
	left += swap
	for _, g := range slices.Backward(groups(root)) { // from above: a limit of swap holds for all groups below
		if limit, ok := number(root, g.swapLimit); ok && !g.both {
			used, _ := number(root, g.swapUsage)
			swap = min(swap, max(limit-used, 0))
		}
		limit, ok := number(root, g.limit)
		if !ok {
			continue
		}
		used, ok := number(root, g.usage)
		if !ok {
			continue
		}
		stat := fields(root, g.stat)
		cached := stat[g.prefix+"inactive_file"] + stat[g.prefix+"active_file"]
		left = min(left, max(limit-used+cached, 0)+swap)
		if limit, ok := number(root, g.swapLimit); ok && g.both {
			if used, ok := number(root, g.swapUsage); ok {
				left = min(left, max(limit-used+cached, 0))
			}
		}
	}
	return left, true
}

// group names the files of a control group.
type group struct {
	limit, usage, stat string
	prefix             string // of the names in stat

	swapLimit, swapUsage string
	both                 bool // these two are of memory and swap together
}

// groups returns the control groups that bound this process's memory: its own and all above it.
func groups(root fs.FS) (out []group) {
	for _, f := range cgroup.Folders(root, "memory") {
		dir := f.Path
		if f.Unified {
			out = append(out, group{
				limit: dir + "/memory.max", usage: dir + "/memory.current", stat: dir + "/memory.stat",
				swapLimit: dir + "/memory.swap.max", swapUsage: dir + "/memory.swap.current",
			})
			continue
		}
		out = append(out, group{
			limit: dir + "/memory.limit_in_bytes", usage: dir + "/memory.usage_in_bytes", stat: dir + "/memory.stat",
			prefix:    "total_",
			swapLimit: dir + "/memory.memsw.limit_in_bytes", swapUsage: dir + "/memory.memsw.usage_in_bytes", both: true,
		})
	}
	return out
}

// number reads a file with one number; false if there is no such file, or no limit.
func number(root fs.FS, name string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n > math.MaxInt64/2 { // "max", and version 1's value for no limit
		return 0, false
	}
	return int64(n), true
}

// fields reads lines of a name and a number, the number in bytes or, with this unit, in kB.
func fields(root fs.FS, name string) map[string]int64 {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return nil
	}
	out := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		n, err := strconv.ParseInt(words[1], 10, 64)
		if err != nil || n < 0 || n > math.MaxInt64>>11 {
			continue
		}
		if len(words) > 2 && words[2] == "kB" {
			n <<= 10
		}
		out[strings.TrimSuffix(words[0], ":")] = n
	}
	return out
}
