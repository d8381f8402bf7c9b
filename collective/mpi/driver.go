package mpi

import (
	"context"
	"fmt"
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/internal/foreign"
	"github.com/lockstep-ml/lockstep/tensor"
)

// driver is one MPI communicator.
type driver struct {
	p          *process
	comm       uintptr
	rank, size int
}

var _ library.Driver = (*driver)(nil)

func (b *driver) Transport() string { return "mpi" }

func (b *driver) Rank() int { return b.rank }

func (b *driver) Size() int { return b.size }

// Reduces reports whether MPI has the type: it has no half-precision types.
func (b *driver) Reduces(t tensor.DType) bool { return b.p.types[t] != 0 }

// divide makes a communicator of the member processes of comm, by MPI_Comm_split.
func (p *process) divide(ctx context.Context, comm uintptr, member bool, key int) (*driver, error) {
	b := &driver{p: p}
	color := uintptr(0)
	if !member {
		undefined := int32(undefined)
		color = uintptr(uint32(undefined))
	}
	err := p.thread.Do(ctx, "MPI_Comm_split", func() error {
		s := p.scratch
		s.handle = 0
		if err := p.check("MPI_Comm_split", foreign.Call(p.f.commSplit, comm, color, uintptr(key),
			foreign.Address(&s.handle))); err != nil || !member {
			return err
		}
		b.comm = s.handle
		if err := p.check("MPI_Comm_set_errhandler", foreign.Call(p.f.setErrhandler, b.comm, p.errorsReturn)); err != nil {
			return err
		}
		if err := p.check("MPI_Comm_rank", foreign.Call(p.f.commRank, b.comm, foreign.Address(&s.number))); err != nil {
			return err
		}
		err := p.check("MPI_Comm_size", foreign.Call(p.f.commSize, b.comm, foreign.Address(&s.other)))
		b.rank, b.size = int(s.number), int(s.other)
		return err
	})
	if err != nil || !member {
		return nil, err
	}
	return b, nil
}

// Split calls MPI_Comm_split.
func (b *driver) Split(ctx context.Context, member bool, key int) (library.Driver, error) {
	s, err := b.p.divide(ctx, b.comm, member, key)
	if err != nil || s == nil {
		return nil, err
	}
	b.p.mu.Lock()
	b.p.users++
	b.p.mu.Unlock()
	return s, nil
}

// Close frees the communicator, unless operations were abandoned. The last one to close ends MPI.
func (b *driver) Close(ctx context.Context, sound bool) error {
	var err error
	if sound {
		err = b.p.thread.Do(ctx, "MPI_Comm_free", func() error {
			b.p.scratch.handle = b.comm
			return b.p.check("MPI_Comm_free", foreign.Call(b.p.f.commFree, foreign.Address(&b.p.scratch.handle)))
		})
	}
	if e := b.p.release(ctx, sound && err == nil); err == nil {
		err = e
	}
	return err
}

// Start begins an operation by MPI's nonblocking function for it.
func (b *driver) Start(o library.Operation) <-chan error {
	out, outAt, err := counts(o.Out)
	in, inAt, err2 := counts(o.In)
	if err == nil {
		err = err2
	}
	if err == nil && o.Count > math.MaxInt32 {
		err = tooLong(o.Count)
	}
	if err != nil {
		done := make(chan error, 1)
		done <- fmt.Errorf("%w: %w", collective.ErrInvalid, err)
		return done
	}
	r := &request{keep: o.Keep, counts: [][]int32{out, outAt, in, inAt}}
	return b.p.begin("MPI_I"+o.Op.String(), r, func(r *request) int32 { return b.call(&o, r) })
}

// call calls the function. The request keeps the arguments alive until it has completed.
func (b *driver) call(o *library.Operation, r *request) int32 {
	f, t, c := &b.p.f, b.p.types[o.Type], b.comm
	src, dst, n := uintptr(o.Src), uintptr(o.Dst), uintptr(o.Count)
	out, outAt, in, inAt := first(r.counts[0]), first(r.counts[1]), first(r.counts[2]), first(r.counts[3])
	req := foreign.Address(&r.handle)
	root := uintptr(o.Root)
	own := func(counts []int) uintptr {
		if counts == nil {
			return 0
		}
		return uintptr(counts[b.rank])
	}
	switch o.Op {
	case collective.AllReduce:
		return foreign.Call(f.iallreduce, src, dst, n, t, b.p.ops[o.Reduce], c, req)
	case collective.Reduce:
		return foreign.Call(f.ireduce, src, dst, n, t, b.p.ops[o.Reduce], root, c, req)
	case collective.Broadcast:
		return foreign.Call(f.ibcast, dst, n, t, root, c, req)
	case collective.ReduceScatter:
		return foreign.Call(f.ireduceScatter, src, dst, out, t, b.p.ops[o.Reduce], c, req)
	case collective.AllGather:
		return foreign.Call(f.iallgatherv, src, own(o.In), t, dst, in, inAt, t, c, req)
	case collective.Gather:
		return foreign.Call(f.igatherv, src, own(o.In), t, dst, in, inAt, t, root, c, req)
	case collective.Scatter:
		return foreign.Call(f.iscatterv, src, out, outAt, t, dst, own(o.Out), t, root, c, req)
	case collective.AllToAll:
		return foreign.Call(f.ialltoallv, src, out, outAt, t, dst, in, inAt, t, c, req)
	case collective.Send:
		return foreign.Call(f.isend, src, n, t, uintptr(o.Peer), uintptr(o.Tag), c, req)
	case collective.Recv:
		return foreign.Call(f.irecv, dst, n, t, uintptr(o.Peer), uintptr(o.Tag), c, req)
	}
	return foreign.Call(f.ibarrier, c, req)
}

// counts returns the lengths and offsets of parts in MPI's form.
func counts(parts []int) (n, at []int32, err error) {
	if parts == nil {
		return nil, nil, nil
	}
	sum := 0
	for _, p := range parts {
		n, at = append(n, int32(min(p, math.MaxInt32))), append(at, int32(min(sum, math.MaxInt32)))
		sum += p
	}
	if sum > math.MaxInt32 {
		return nil, nil, tooLong(sum)
	}
	return n, at, nil
}

func tooLong(n int) error {
	return fmt.Errorf("%d elements: MPI counts in 32 bits, so at most %d: move fewer at once", n, math.MaxInt32)
}

func first(s []int32) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(s))) }
