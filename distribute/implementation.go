package distribute

import (
	"context"

	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/mpi"
)

// Opener returns how workers are joined for an implementation: what [worker.Config] takes for a worker that a strategy with this
// implementation is given. It is nil where the library's own collectives do it.
func (i Implementation) Opener() *clusterworker.Opener {
	if i == ImplementationMPI {
		return &clusterworker.Opener{Name: mpiName, Open: openMPI}
	}
	return nil
}

// mpiName is what communicators over MPI call their transport.
const mpiName = "mpi"

// openMPI makes the group over MPI, whose processes come in the order of the workers.
func openMPI(ctx context.Context, w *clusterworker.Worker, cfg collective.Config) (collective.Group, error) {
	job := w.Job()
	return mpi.Open(ctx, mpi.Config{Replicas: w.Members()[job.Worker].Replicas, Processes: job.Workers, Key: job.Worker, Collective: cfg})
}

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

// noteImplementation logs once that a wish for another implementation cannot be met.
func (s *Strategy) noteImplementation(o Options) {
	i := o.Implementation
	if i != ImplementationNCCL && i != ImplementationMPI || s.workersInSync == 1 && i == ImplementationMPI {
		return
	}
	if t := s.transport(); t == mpiName && i == ImplementationMPI {
		return
	}
	s.elsewhere.Do(func() {
		s.logger.Warn("distribute: "+i.String()+" is not available; the library's own collectives reduce instead", "strategy", s.String())
	})
}
