package nccl

import (
	"context"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/internal/foreign"
	"github.com/lockstep-ml/lockstep/tensor"
)

// driver is one NCCL communicator, with a stream and memory of the GPU. It has an OS thread, because CUDA's current
// device is per thread.
type driver struct {
	*api
	thread       *foreign.Thread
	scratch      *scratch // used only by the thread
	comm, stream uintptr
	device       int
	rank, size   int
	in, out      block // for collectives, one of which is in progress at a time
}

var _ library.Driver = (*driver)(nil)

// block is memory of the GPU.
type block struct {
	at    uintptr
	bytes int
}

func (b *driver) Transport() string { return "nccl" }

func (b *driver) Rank() int { return b.rank }

func (b *driver) Size() int { return b.size }

// types and operations have the values of ncclDataType_t and ncclRedOp_t.
var (
	types = map[tensor.DType]uintptr{
		tensor.Int8: 0, tensor.Uint8: 1, tensor.Int32: 2, tensor.Uint32: 3, tensor.Int64: 4, tensor.Uint64: 5,
		tensor.Float32: 7, tensor.Float64: 8,
	}
	operations = map[collective.ReduceOp]uintptr{
		collective.Sum: 0, collective.Prod: 1, collective.Max: 2,
		collective.Min: 3,
	}
)

// byteType is the type of data that is not reduced.
const byteType = 1

// Reduces reports whether NCCL has the type: it has no 16-bit integers.
func (b *driver) Reduces(t tensor.DType) bool {
	_, ok := types[t]
	return ok
}

// newDriver starts the thread of a communicator, which works on a device.
func (a *api) newDriver(device int) *driver {
	return &driver{api: a, device: device, scratch: &scratch{}, thread: foreign.NewThread(foreign.ThreadConfig{
		Library: "nccl", Unusable: "the communicator is unusable", Callers: "all processes",
		PauseMax: 50 * time.Microsecond,
	})}
}

// open makes the communicator of all processes; process 0 makes its id.
func (a *api) open(ctx context.Context, cfg *Config) (*driver, error) {
	b := a.newDriver(cfg.Device % a.devices)
	b.rank, b.size = cfg.Process, len(cfg.Ranks)
	var id []byte
	if b.rank == 0 {
		if err := b.thread.Do(ctx, "ncclGetUniqueId", func() error {
			err := b.check("ncclGetUniqueId", foreign.Call(a.f.uniqueID, foreign.Address(&b.scratch.id[0])))
			id = append(id, b.scratch.id[:]...)
			return err
		}); err != nil {
			b.thread.Close()
			return nil, err
		}
	}
	all, err := cfg.Exchange(ctx, id)
	if err == nil && (len(all) != b.size || len(all[0]) != idBytes) {
		err = fmt.Errorf("nccl: process 0 sent no id of %d bytes", idBytes)
	}
	if err == nil {
		err = b.thread.Do(ctx, "ncclCommInitRankScalable", func() error {
			if err := b.equip(); err != nil {
				return err
			}
			s := b.scratch
			copy(s.id[:], all[0])
			err := b.check("ncclCommInitRankScalable", foreign.Call(a.f.initRank, foreign.Address(&s.handle), uintptr(b.size),
				uintptr(b.rank), 1, foreign.Address(&s.id[0]), 0))
			b.comm = s.handle
			return err
		})
	}
	if err != nil {
		b.thread.Close()
		return nil, err
	}
	return b, nil
}

// equip selects the device, and makes the stream.
func (b *driver) equip() error {
	if err := b.cudaCheck("cudaSetDevice", foreign.Call(b.f.setDevice, uintptr(b.device))); err != nil {
		return err
	}
	err := b.cudaCheck("cudaStreamCreate", foreign.Call(b.f.streamCreate, foreign.Address(&b.scratch.handle)))
	b.stream = b.scratch.handle
	return err
}

// Split calls ncclCommSplit.
func (b *driver) Split(ctx context.Context, member bool, key int) (library.Driver, error) {
	color := uintptr(0)
	if !member {
		color = ^uintptr(0) // NCCL_SPLIT_NOCOLOR
	}
	order := make([]int64, b.size) // the new communicator's rank follows from the keys
	keys := []int64{-1}
	if member {
		keys[0] = int64(key)
	}
	in := make([]int, b.size)
	for i := range in {
		in[i] = 1
	}
	o := library.Operation{
		Op: collective.AllGather, Type: tensor.Uint64, Src: tensor.HostMemory(keys).Ptr, Dst: tensor.HostMemory(order).Ptr,
		In: in, Keep: [2][]int64{keys, order},
	}
	select {
	case err := <-b.Start(o):
		if err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, fmt.Errorf("nccl: splitting: %w", context.Cause(ctx))
	}
	var handle uintptr
	err := b.thread.Do(ctx, "ncclCommSplit", func() error {
		s := b.scratch
		s.handle = 0
		err := b.check("ncclCommSplit", foreign.Call(b.f.split, b.comm, color, uintptr(key), foreign.Address(&s.handle), 0))
		handle = s.handle
		return err
	})
	if err != nil || !member {
		return nil, err
	}
	s := b.newDriver(b.device)
	s.comm = handle
	for _, k := range order {
		if k >= 0 {
			s.size++
		}
		if k >= 0 && k < int64(key) {
			s.rank++
		}
	}
	if err := s.thread.Do(ctx, "cudaStreamCreate", s.equip); err != nil {
		s.thread.Close()
		return nil, err
	}
	return s, nil
}

// Close ends the communicator; if operations were abandoned, it is aborted, which ends them on the GPU.
func (b *driver) Close(ctx context.Context, sound bool) error {
	defer b.thread.Close()
	if !sound {
		ended, cancel := context.WithTimeout(ctx, abortTimeout)
		defer cancel()
		return b.thread.Do(ended, "ncclCommAbort", func() error {
			return b.check("ncclCommAbort", foreign.Call(b.f.abort, b.comm))
		})
	}
	return b.thread.Do(ctx, "ncclCommDestroy", func() error {
		err := b.check("ncclCommDestroy", foreign.Call(b.f.destroy, b.comm))
		for _, at := range []uintptr{b.in.at, b.out.at} {
			if e := b.cudaCheck("cudaFree", foreign.Call(b.f.free, at)); err == nil {
				err = e
			}
		}
		if e := b.cudaCheck("cudaStreamDestroy", foreign.Call(b.f.streamDestroy, b.stream)); err == nil {
			err = e
		}
		return err
	})
}
