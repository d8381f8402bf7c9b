// Package nccl makes communicators over NCCL. It loads NCCL and CUDA's runtime by dlopen, without cgo.
// LOCKSTEP_NCCL and LOCKSTEP_CUDART name the libraries, if the system's loader does not find them. NCCL 2.23
// or later is required: it takes the communicator's id by its address (ncclCommInitRankScalable); earlier
// versions take 128 bytes by value, which cannot be passed without a C compiler.
//
// Each process is one NCCL rank and works on one GPU, however many replicas it has. Package library describes
// the communicators that result, and their limits. Tensors are in host memory here, so each call copies them
// to the GPU and back: NCCL is worth it where the GPUs' network (NVLink, InfiniBand) is much faster than the
// hosts'.
package nccl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/internal/foreign"
)

// Config configures a communicator.
type Config struct {
	// Ranks are the ranks of each process, as in [library.Setup].
	Ranks [][]int
	// Process is this process's index in Ranks.
	Process int
	// Device is the number of this process's GPU, which no other process may use. It is taken modulo the
	// number of GPUs.
	Device int
	// Exchange is an all-gather: it returns what every process passed, in the order of processes. It is
	// called once by Open, and once for each Rebuild.
	Exchange func(ctx context.Context, mine []byte) ([][]byte, error)
	// Collective configures the communicator.
	Collective collective.Config
}

// Available returns nil if NCCL can be used on this machine, or an error that names what is missing.
func Available() error {
	_, err := load()
	return err
}

// startTimeout bounds Open if the context has no deadline.
const startTimeout = 10 * time.Minute

// Open makes a communicator of all processes. All of them call it, and it waits for them until ctx ends, but
// at most 10 minutes.
func Open(ctx context.Context, cfg Config) (collective.Group, error) {
	if cfg.Process < 0 || cfg.Process >= len(cfg.Ranks) || cfg.Device < 0 || cfg.Exchange == nil {
		return nil, fmt.Errorf("nccl: process %d of %d, device %d: want a process in range, a device, and an Exchange",
			cfg.Process, len(cfg.Ranks), cfg.Device)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	a, err := load()
	if err != nil {
		return nil, err
	}
	again := func(ctx context.Context) (library.Driver, error) { return a.open(ctx, &cfg) }
	b, err := a.open(ctx, &cfg)
	if err != nil {
		return nil, err
	}
	return library.Open(library.Setup{Driver: b, Ranks: cfg.Ranks, Again: again, Config: cfg.Collective})
}

// api is the functions of NCCL and CUDA.
type api struct {
	nccl, cuda foreign.Library
	devices    int
	f          struct {
		deviceCount, setDevice, malloc, free, memcpy, streamCreate, streamDestroy, streamQuery, cudaErrorString uintptr

		uniqueID, initRank, split, destroy, abort, asyncError, errorString, groupStart, groupEnd uintptr

		allReduce, reduce, broadcast, send, recv uintptr
	}
}

func load() (*api, error) {
	a := &api{}
	var err error
	if a.nccl, err = foreign.Find("nccl"); err != nil {
		return nil, fmt.Errorf("nccl: %w: install NCCL 2.23 or later, or set LOCKSTEP_NCCL to its path", err)
	}
	if a.cuda, err = foreign.Find("cuda"); err != nil {
		return nil, fmt.Errorf("nccl: %w: install CUDA's runtime, or set LOCKSTEP_CUDART to its path", err)
	}
	for name, at := range map[string]*uintptr{
		"cudaGetDeviceCount": &a.f.deviceCount, "cudaSetDevice": &a.f.setDevice, "cudaMalloc": &a.f.malloc,
		"cudaFree":   &a.f.free,
		"cudaMemcpy": &a.f.memcpy, "cudaStreamCreate": &a.f.streamCreate, "cudaStreamDestroy": &a.f.streamDestroy,
		"cudaStreamQuery": &a.f.streamQuery, "cudaGetErrorString": &a.f.cudaErrorString,
	} {
		if *at, err = a.cuda.Symbol(name); err != nil {
			return nil, fmt.Errorf("nccl: %s (CUDA %s) has no %s: %w", a.cuda.Path, a.cuda.Version, name, err)
		}
	}
	for name, at := range map[string]*uintptr{
		"ncclGetUniqueId": &a.f.uniqueID, "ncclCommInitRankScalable": &a.f.initRank, "ncclCommSplit": &a.f.split,
		"ncclCommDestroy": &a.f.destroy, "ncclCommAbort": &a.f.abort, "ncclCommGetAsyncError": &a.f.asyncError,
		"ncclGetErrorString": &a.f.errorString, "ncclGroupStart": &a.f.groupStart, "ncclGroupEnd": &a.f.groupEnd,
		"ncclAllReduce": &a.f.allReduce, "ncclReduce": &a.f.reduce, "ncclBroadcast": &a.f.broadcast, "ncclSend": &a.f.send,
		"ncclRecv": &a.f.recv,
	} {
		if *at, err = a.nccl.Symbol(name); err != nil {
			return nil, fmt.Errorf("nccl: %s (NCCL %s) has no %s: want NCCL 2.23 or later: %w", a.nccl.Path, a.nccl.Version,
				name, err)
		}
	}
	s := &scratch{}
	if err := a.cudaCheck("cudaGetDeviceCount", foreign.Call(a.f.deviceCount, foreign.Address(&s.number))); err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	if a.devices = int(s.number); a.devices < 1 {
		return nil, errors.New("nccl: NCCL is installed, but CUDA finds no usable GPU")
	}
	return a, nil
}
