package distribute

import (
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/cluster"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
)

// separateWarned is set once this process has logged that it trains separately.
var separateWarned atomic.Bool

// warnSeparate logs a warning if this process is the first of several workers that were started as one job, and has not
// joined it: each of them trains a model that the others do not know.
func (s *Strategy) warnSeparate() {
	job, err := cluster.Discover(cluster.Discovery{})
	if err != nil || job.Workers == 1 || job.Worker != 0 || clusterworker.Joined() || separateWarned.Swap(true) {
		return
	}
	s.logger.Warn("distribute: the workers of this job have not joined it, and each trains its own model; to train one "+
		"model together, use NewMultiWorkerMirroredStrategy (lockstep train: --strategy multi-worker)",
		"strategy", s.kind, "workers", job.Workers, "started by", job.Source)
}
