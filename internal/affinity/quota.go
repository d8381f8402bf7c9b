package affinity

import (
	"io/fs"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/cgroup"
)

// Limit is the limit of a control group on the CPU time of its processes.
type Limit struct {
	Group uint64 // identifies the control group among those of this host; 0: unknown
	CPUs  int    // how many CPUs' time its processes may use together, rounded down: 0 is less than one
}

// limits returns the limits of the control groups of this process. id identifies a folder of the file system.
func limits(root fs.FS, id func(fs.FileInfo) uint64) (out []Limit) {
	for _, f := range cgroup.Folders(root, "cpu") {
		var limit, period string
		if f.Unified {
			limit, period, _ = strings.Cut(line(root, f.Path+"/cpu.max"), " ")
		} else {
			limit, period = line(root, f.Path+"/cpu.cfs_quota_us"), line(root, f.Path+"/cpu.cfs_period_us")
		}
		micros, err := strconv.ParseInt(limit, 10, 64) // "max" in version 2, and -1 in version 1: no limit
		each, errEach := strconv.ParseInt(period, 10, 64)
		if err != nil || errEach != nil || micros <= 0 || each <= 0 {
			continue
		}
		l := Limit{CPUs: int(min(micros/each, ListMax))}
		if info, err := fs.Stat(root, f.Path); err == nil {
			l.Group = id(info)
		}
		out = append(out, l)
	}
	return out
}

// least returns the lowest of the limits, and false if there is none.
func least(limits []Limit) (cpus int, ok bool) {
	for _, l := range limits {
		if !ok || l.CPUs < cpus {
			cpus, ok = l.CPUs, true
		}
	}
	return cpus, ok
}

// line reads a file of one line; "" if there is none.
func line(root fs.FS, name string) string {
	text, _ := fs.ReadFile(root, name)
	return strings.TrimSpace(string(text))
}
