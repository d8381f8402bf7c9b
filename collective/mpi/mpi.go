// Package mpi makes communicators over MPI, which it finds by dlopen, without cgo: Open MPI, or MPICH and those with its ABI (MVAPICH, Intel
// MPI, Cray). The environment variable LOCKSTEP_MPI names the library, if the system's loader does not find it or finds another.
//
//	mpirun -np 4 ./prog
//
//	group, err := mpi.Open(ctx, mpi.Config{Replicas: 2})
//
// Each process is one rank of MPI's, however many replicas it has; package library says what that means, and what holds of such
// communicators: above all, that they do not keep the canonical order of sums, so that bits depend on the library and on how replicas are
// spread. They are for networks that MPI knows and Lockstep's own collectives do not.
//
// Calls use MPI's nonblocking functions, so that they end at their deadline, whatever the other processes do. What blocks in MPI itself,
// MPI_Init_thread and MPI_Comm_split, is given up at the end of the context; then MPI is of no more use in the process. Go's
// runtime and MPI's thread get on, as one thread alone calls MPI.
//
// MPI starts with the first communicator and ends with the last one's Close, which waits for the other processes; it cannot be started
// again. After a failure it is not ended, so the launcher may say that a process has left without MPI_Finalize.
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

// Config says which communicator is opened. The zero value works.
type Config struct {
	// Replicas is the number of this process' ranks. Processes may have different numbers. Default 1.
	Replicas int
	// Processes is how many processes there must be. Default: as many as the launcher has started.
	Processes int
	// Key orders the processes, and so the ranks; of equal ones MPI's own order decides.
	Key int
	// Collective sets up the communicator.
	Collective collective.Config
}

// startTimeout bounds Open where the context has no end of its own.
const startTimeout = 10 * time.Minute

// Open makes a communicator of all processes that the launcher has started; ranks are numbered process by process. All of them call it. It
// waits for them until ctx ends, 10 minutes at most.
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
	again := func(ctx context.Context) (library.Backend, error) {
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
		_ = b.Close(context.Background(), false) // of a communicator that nobody uses
		return nil, err
	}
	return library.Open(library.Setup{Backend: b, Ranks: ranks, Again: again, Config: cfg.Collective})
}

// open makes a communicator of all processes.
func (p *process) open(ctx context.Context, key int) (*backend, error) {
	b, err := p.divide(ctx, p.world, true, key)
	if err != nil {
		_ = p.release(ctx, false)
	}
	return b, err
}

// ranks returns the ranks of each process.
func (b *backend) ranks(ctx context.Context, cfg Config) ([][]int, error) {
	if cfg.Processes > 0 && b.size != cfg.Processes {
		return nil, fmt.Errorf("mpi: the job has %d processes, and %s (%s) joins %d: want all of them started by the launcher of that very library; LOCKSTEP_MPI names another library",
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
			return nil, fmt.Errorf("mpi: meeting the other processes: %w", err)
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("mpi: meeting the other processes: %w", context.Cause(ctx))
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
