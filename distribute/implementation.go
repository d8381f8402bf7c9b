package distribute

import (
	"context"
	"fmt"
	"strings"

	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/mpi"
	"github.com/lockstep-ml/lockstep/collective/nccl"
)

// Opener returns the opener of communicators for an implementation. Set it in [worker.Config] for a worker that
// is given to a strategy with this implementation. It is nil if the library's own collectives are used.
func (i Implementation) Opener() *clusterworker.Opener {
	switch i {
	case ImplementationMPI:
		return &clusterworker.Opener{Name: mpiName, Open: openMPI}
	case ImplementationNCCL:
		return &clusterworker.Opener{Name: ncclName, Open: openNCCL}
	}
	return nil
}

// Transport names of communicators over MPI and NCCL.
const (
	mpiName  = "mpi"
	ncclName = "nccl"
)

// openMPI opens the group over MPI. The ranks of the MPI processes are in the order of the workers.
func openMPI(ctx context.Context, w *clusterworker.Worker, cfg collective.Config) (collective.Group, error) {
	job := w.Job()
	return mpi.Open(ctx,
		mpi.Config{Replicas: w.Members()[job.Worker].Replicas, Processes: job.Workers, Key: job.Worker, Collective: cfg})
}

// openNCCL opens the group over NCCL if all workers have it. Otherwise it uses the library's own collectives,
// and every worker logs why.
func openNCCL(ctx context.Context, w *clusterworker.Worker, cfg collective.Config) (collective.Group, error) {
	lack := ""
	if err := nccl.Available(); err != nil {
		lack = err.Error()
	}
	all, err := w.Exchange(ctx, "what of NCCL is missing", []byte(lack))
	if err != nil {
		return nil, err
	}
	members := w.Members()
	ranks := make([][]int, len(members))
	for i, text := range all {
		if len(text) > 0 {
			cfg.Logger.Warn(noNCCL, "worker", i, "reason", string(text))
			return nil, nil
		}
		ranks[i] = members[i].Ranks()
	}
	job, made := w.Job(), 0
	exchange := func(ctx context.Context, mine []byte) ([][]byte, error) {
		made++
		return w.Exchange(ctx, fmt.Sprintf("NCCL's id %d", made), mine)
	}
	return nccl.Open(ctx,
		nccl.Config{Ranks: ranks, Process: job.Worker, Device: max(0, job.LocalWorker), Exchange: exchange, Collective: cfg})
}

const noNCCL = "distribute: NCCL is not available; the library's own collectives reduce instead"

// checkImplementation returns an error if the replicas' communicators are not those of the implementation in
// the options.
func (s *Strategy) checkImplementation(op string) error {
	if s.options.Implementation != ImplementationMPI {
		return nil
	}
	if s.kind != multiWorkerKind {
		return errorf(op, ErrInvalid, "implementation MPI needs several processes, and this strategy has one: use "+
			"NewMultiWorkerMirroredStrategy, or AUTO")
	}
	if t := s.transport(); s.workersInSync > 1 && t != mpiName {
		return errorf(op, ErrInvalid, "implementation MPI is requested, but the group in the strategy's configuration uses "+
			"%s: join with worker.Config.Opener of ImplementationMPI.Opener()", t)
	}
	return nil
}

// transport is the transport of the replicas' communicators, or empty with one replica.
func (s *Strategy) transport() string {
	if s.group == nil {
		return ""
	}
	return s.group.comms[0].Properties().Transport
}

// warnImplementation logs once that a request for NCCL or MPI cannot be met. If workers have joined with that
// request, openNCCL has logged it.
func (s *Strategy) warnImplementation(o Options) {
	i := o.Implementation
	if i != ImplementationNCCL && i != ImplementationMPI {
		return // does not build the transport's name: every call takes this path
	}
	logged := s.member != nil && s.member.Opener() != nil && s.member.Opener().Name == strings.ToLower(i.String())
	switch {
	case logged || s.transport() == strings.ToLower(i.String()):
	case i == ImplementationNCCL:
		s.warnedImplementation.Do(func() {
			s.logger.Warn(noNCCL, "strategy", s.String(),
				"reason", "NCCL is only used by MultiWorkerMirroredStrategy; replicas of one process share memory")
		})
	case i == ImplementationMPI && s.workersInSync > 1:
		s.warnedImplementation.Do(func() {
			s.logger.Warn("distribute: MPI must be chosen for a whole strategy, not for a call; using the library's own "+
				"collectives",
				"strategy", s.String())
		})
	}
}
