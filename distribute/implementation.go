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

// Opener returns how workers are joined for an implementation: what [worker.Config] takes for a worker that a strategy with this
// implementation is given. It is nil where the library's own collectives do it.
func (i Implementation) Opener() *clusterworker.Opener {
	switch i {
	case ImplementationMPI:
		return &clusterworker.Opener{Name: mpiName, Open: openMPI}
	case ImplementationNCCL:
		return &clusterworker.Opener{Name: ncclName, Open: openNCCL}
	}
	return nil
}

// What communicators over MPI and NCCL call their transport.
const (
	mpiName  = "mpi"
	ncclName = "nccl"
)

// openMPI makes the group over MPI, whose processes come in the order of the workers.
func openMPI(ctx context.Context, w *clusterworker.Worker, cfg collective.Config) (collective.Group, error) {
	job := w.Job()
	return mpi.Open(ctx, mpi.Config{Replicas: w.Members()[job.Worker].Replicas, Processes: job.Workers, Key: job.Worker, Collective: cfg})
}

// openNCCL makes the group over NCCL if all workers have it; else they are joined by the library's own collectives, with a line in each
// one's log that says why.
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
			cfg.Logger.Warn(noNCCL, "worker", i, "why", string(text))
			return nil, nil
		}
		ranks[i] = members[i].Ranks()
	}
	job, made := w.Job(), 0
	exchange := func(ctx context.Context, mine []byte) ([][]byte, error) {
		made++
		return w.Exchange(ctx, fmt.Sprintf("NCCL's id %d", made), mine)
	}
	return nccl.Open(ctx, nccl.Config{Ranks: ranks, Process: job.Worker, Device: max(0, job.LocalWorker), Exchange: exchange, Collective: cfg})
}

const noNCCL = "distribute: NCCL is not available; the library's own collectives reduce instead"

// checkImplementation refuses a strategy whose replicas are not joined as its options say.
func (s *Strategy) checkImplementation(op string) error {
	if s.options.Implementation != ImplementationMPI {
		return nil
	}
	if s.kind != multiWorkerKind {
		return errorf(op, ErrInvalid, "implementation MPI joins processes, and this strategy has one: want NewMultiWorkerMirroredStrategy, or AUTO")
	}
	if t := s.transport(); s.workersInSync > 1 && t != mpiName {
		return errorf(op, ErrInvalid, "implementation MPI is asked for, and the group that the strategy was given goes over %s: join with worker.Config.Opener of ImplementationMPI.Opener()", t)
	}
	return nil
}

// transport is what joins the replicas, or empty if there is one.
func (s *Strategy) transport() string {
	if s.group == nil {
		return ""
	}
	return s.group.comms[0].Properties().Transport
}

// noteImplementation logs once that a wish for NCCL or MPI cannot be met. Workers that were joined in that wish have been told already.
func (s *Strategy) noteImplementation(o Options) {
	i := o.Implementation
	if i != ImplementationNCCL && i != ImplementationMPI {
		return // without a name to make lower: this is in the way of every call
	}
	told := s.member != nil && s.member.Opener() != nil && s.member.Opener().Name == strings.ToLower(i.String())
	switch {
	case told || s.transport() == strings.ToLower(i.String()):
	case i == ImplementationNCCL:
		s.elsewhere.Do(func() {
			s.logger.Warn(noNCCL, "strategy", s.String(), "why", "it joins the workers of MultiWorkerMirroredStrategy, and the replicas of one process work in each other's memory")
		})
	case i == ImplementationMPI && s.workersInSync > 1:
		s.elsewhere.Do(func() {
			s.logger.Warn("distribute: MPI is chosen for a strategy, not for a call; the library's own collectives reduce", "strategy", s.String())
		})
	}
}
