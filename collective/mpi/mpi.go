// Package mpi makes communicators over MPI. It loads MPI by dlopen, without cgo: Open MPI, or MPICH and the
// libraries with its ABI (MVAPICH, Intel MPI, Cray). The environment variable LOCKSTEP_MPI names the library,
// if the system's loader does not find it or finds another one.
//
//	mpirun -np 4 ./prog
//
//	group, err := mpi.Open(ctx, mpi.Config{Replicas: 2})
//
// Each process is one MPI rank, however many replicas it has. Package library describes the communicators
// that result, and their limits. Above all they do not keep the canonical order of sums, so results depend
// bitwise on the library and on the placement of replicas. Use them for networks that MPI supports and
// Lockstep's own collectives do not.
//
// Calls use MPI's nonblocking functions, so they end at their deadline, whatever the other processes do. The
// functions that block in MPI itself, MPI_Init_thread and MPI_Comm_split, are abandoned at the end of the
// context; MPI is then unusable in the process. Only one thread calls MPI, which is compatible with Go's
// runtime.
//
// MPI is initialised with the first communicator and finalised by the last one's Close, which waits for the
// other processes; it cannot be initialised again. After a failure it is not finalised, so the launcher may
// report that a process exited without MPI_Finalize.
package mpi

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Config configures a communicator. The zero value works.
type Config struct {
	// Replicas is the number of this process's ranks. It may differ between processes. Default 1.
	Replicas int
	// Processes is the expected number of processes. Default: as many as the launcher has started.
	Processes int
	// Key orders the processes, and so the ranks; processes with equal keys are in MPI's own order.
	Key int
	// Collective configures the communicator.
	Collective collective.Config
}

// startTimeout bounds Open if the context has no deadline.
const startTimeout = 10 * time.Minute

// Open makes a communicator of all processes that the launcher has started; ranks are numbered process by
// process. All processes call it. It waits for them until ctx ends, but at most 10 minutes.
func Open(ctx context.Context, cfg Config) (collective.Group, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if cfg.Replicas == 0 {
		cfg.Replicas = 1
	}
	if cfg.Replicas < 0 {
		return nil, fmt.Errorf("mpi: %d replicas: want 1 or more", cfg.Replicas)
	}
	p, err := acquire(ctx)
	if err != nil {
		return nil, err
	}
	again := func(ctx context.Context) (library.Driver, error) {
		p.mu.Lock()
		p.users++
		p.mu.Unlock()
		return p.open(ctx, cfg.Key)
	}
	b, err := p.open(ctx, cfg.Key)
	if err != nil {
		return nil, err
	}
	ranks, err := b.ranks(ctx, cfg)
	if err != nil {
		_ = b.Close(context.Background(), false) // of an unused communicator
		return nil, err
	}
	return library.Open(library.Setup{Driver: b, Ranks: ranks, Again: again, Config: cfg.Collective})
}

// open makes a communicator of all processes.
func (p *process) open(ctx context.Context, key int) (*driver, error) {
	b, err := p.divide(ctx, p.world, true, key)
	if err != nil {
		_ = p.release(ctx, false)
	}
	return b, err
}

// ranks returns the ranks of each process.
func (b *driver) ranks(ctx context.Context, cfg Config) ([][]int, error) {
	if cfg.Processes > 0 && b.size != cfg.Processes {
		return nil, fmt.Errorf("mpi: the job has %d processes, and %s (%s) joins %d: start all of them with the launcher "+
			"of this library, or name another library in LOCKSTEP_MPI",
			cfg.Processes, strings.TrimRight(b.p.library.Version, ", "), b.p.library.Path, b.size)
	}
	mine, all := []int64{int64(cfg.Replicas)}, make([]int64, b.size)
	one := make([]int, b.size)
	for i := range one {
		one[i] = 1
	}
	o := library.Operation{
		Op: collective.AllGather, Type: tensor.Uint64, In: one, Keep: [2][]int64{mine, all},
		Src: unsafe.Pointer(unsafe.SliceData(mine)), Dst: unsafe.Pointer(unsafe.SliceData(all)),
	}
	select {
	case err := <-b.Start(o):
		if err != nil {
			return nil, fmt.Errorf("mpi: exchanging the numbers of replicas: %w", err)
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("mpi: exchanging the numbers of replicas: %w", context.Cause(ctx))
	}
	out := make([][]int, b.size)
	next := 0
	for p, n := range all {
		for range n {
			out[p] = append(out[p], next)
			next++
		}
	}
	return out, nil
}
