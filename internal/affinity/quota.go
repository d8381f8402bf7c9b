package affinity

import (
	"io/fs"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/internal/cgroup"
)

// quota returns how many CPUs' time this process may use together with the others of its control groups, rounded up;
// 0: as much as there is.
func quota(root fs.FS) (cpus int) {
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
		if n := int(min((micros-1)/each+1, ListMax)); cpus == 0 || n < cpus {
			cpus = n
		}
	}
	return cpus
}

// line reads a file of one line; "" if there is none.
func line(root fs.FS, name string) string {
	text, _ := fs.ReadFile(root, name)
	return strings.TrimSpace(string(text))
}
