package nccl

import (
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/internal/foreign"
)

const (
	abortTimeout  = 10 * time.Second
	notReady      = 600 // cudaErrorNotReady
	inProgress    = 7   // ncclInProgress
	hostToDevice  = 1   // cudaMemcpyHostToDevice
	deviceToHost  = 2
	leastBlock    = 1 << 16
	cudaSucceeded = 0
)

// job is one operation with its memory on the GPU.
type job struct {
	library.Operation
	b       *driver
	in, out *block
	own     [2]block // of a message, which may run concurrently with others
	size    int      // bytes of an element
	offset  [2][]int // bytes of Out and In before each process' part
}

// Start begins an operation: it copies the source to the GPU and enqueues NCCL's work on the stream. The
// result is copied back when that is done.
func (b *driver) Start(o library.Operation) <-chan error {
	j := &job{Operation: o, b: b, in: &b.in, out: &b.out, size: o.Type.Bytes()}
	if o.Op.Pairwise() {
		j.in, j.out = &j.own[0], &j.own[1]
	}
	j.offset = [2][]int{offsets(o.Out, j.size), offsets(o.In, j.size)}
	return b.thread.Start(j.begin, func() (bool, error) {
		over, err := b.over()
		if over && err == nil {
			err = j.finish()
		}
		return over, err
	})
}

// over reports whether the stream is done, and checks the communicator for asynchronous errors.
func (b *driver) over() (bool, error) {
	switch code := foreign.Call(b.f.streamQuery, b.stream); code {
	case cudaSucceeded:
		return true, nil
	case notReady:
	default:
		return false, b.cudaCheck("cudaStreamQuery", code)
	}
	s := b.scratch
	err := b.check("ncclCommGetAsyncError", foreign.Call(b.f.asyncError, b.comm, foreign.Address(&s.number)))
	if err != nil {
		return false, err
	}
	if s.number != 0 && s.number != inProgress {
		return false, b.check("NCCL", s.number)
	}
	return false, nil
}

func offsets(parts []int, size int) []int {
	at := make([]int, len(parts)+1)
	for i, p := range parts {
		at[i+1] = at[i] + p*size
	}
	return at
}

// lengths returns the numbers of bytes that this process contributes and receives.
func (j *job) lengths() (in, out int) {
	all, root := j.Count*j.size, j.b.rank == j.Root
	sent, got := j.offset[0][len(j.offset[0])-1], j.offset[1][len(j.offset[1])-1]
	switch j.Op {
	case collective.AllReduce:
		return all, all
	case collective.Reduce:
		if root {
			return all, all
		}
		return all, 0
	case collective.Broadcast, collective.Recv:
		return 0, all
	case collective.Send:
		return all, 0
	case collective.ReduceScatter:
		return sent, j.Out[j.b.rank] * j.size
	case collective.Scatter:
		if !root {
			sent = 0
		}
		return sent, j.Out[j.b.rank] * j.size
	case collective.Gather:
		if !root {
			got = 0
		}
		return j.In[j.b.rank] * j.size, got
	case collective.AllGather:
		return j.In[j.b.rank] * j.size, got
	}
	return sent, got
}

// begin copies the source and calls NCCL.
func (j *job) begin() error {
	b := j.b
	in, out := j.lengths()
	if err := errors.Join(b.grow(j.in, in), b.grow(j.out, out)); err != nil {
		return err
	}
	from, to, n := j.Src, j.in.at, in
	if j.Op == collective.Broadcast && b.rank == j.Root { // Broadcast has only one memory
		from, to, n = j.Dst, j.out.at, out
	}
	if n > 0 {
		if err := b.cudaCheck("cudaMemcpy", foreign.Call(b.f.memcpy, to, uintptr(from), uintptr(n),
			hostToDevice)); err != nil {
			return err
		}
	}
	return j.enqueue()
}

// finish copies the result back.
func (j *job) finish() error {
	b := j.b
	var err error
	if _, n := j.lengths(); n > 0 {
		err = b.cudaCheck("cudaMemcpy", foreign.Call(b.f.memcpy, uintptr(j.Dst), j.out.at, uintptr(n), deviceToHost))
	}
	for _, own := range j.own {
		if own.bytes > 0 {
			err = errors.Join(err, b.cudaCheck("cudaFree", foreign.Call(b.f.free, own.at)))
		}
	}
	return err
}

// grow makes a block large enough.
func (b *driver) grow(block *block, bytes int) error {
	if block.bytes >= bytes {
		return nil
	}
	if err := b.cudaCheck("cudaFree", foreign.Call(b.f.free, block.at)); err != nil {
		return err
	}
	block.at, block.bytes = 0, 0
	bytes = max(bytes, leastBlock)
	err := b.cudaCheck("cudaMalloc", foreign.Call(b.f.malloc, foreign.Address(&b.scratch.handle), uintptr(bytes)))
	if err != nil {
		return fmt.Errorf("%w, for %d bytes", err, bytes)
	}
	block.at, block.bytes = b.scratch.handle, bytes
	return nil
}

// enqueue calls NCCL. Operations on parts of different lengths are grouped messages.
func (j *job) enqueue() error {
	b, f := j.b, &j.b.f
	t, op := types[j.Type], operations[j.Reduce]
	n, root := uintptr(j.Count), uintptr(j.Root)
	bytes := n * uintptr(j.size)
	switch j.Op {
	case collective.AllReduce:
		return b.check("ncclAllReduce", foreign.Call(f.allReduce, j.in.at, j.out.at, n, t, op, b.comm, b.stream))
	case collective.Reduce:
		return b.check("ncclReduce", foreign.Call(f.reduce, j.in.at, j.out.at, n, t, op, root, b.comm, b.stream))
	case collective.Broadcast:
		return b.check("ncclBroadcast", foreign.Call(f.broadcast, j.out.at, j.out.at, bytes, byteType, root, b.comm,
			b.stream))
	case collective.Send:
		return b.check("ncclSend", foreign.Call(f.send, j.in.at, bytes, byteType, uintptr(j.Peer), b.comm, b.stream))
	case collective.Recv:
		return b.check("ncclRecv", foreign.Call(f.recv, j.out.at, bytes, byteType, uintptr(j.Peer), b.comm, b.stream))
	}
	err := b.check("ncclGroupStart", foreign.Call(f.groupStart))
	for p := 0; p < b.size && err == nil; p++ {
		err = j.part(p)
	}
	return errors.Join(err, b.check("ncclGroupEnd", foreign.Call(f.groupEnd)))
}

// part enqueues the messages with one process.
func (j *job) part(p int) error {
	b := j.b
	own, root := b.rank, j.Root
	switch j.Op {
	case collective.ReduceScatter:
		if j.Out[p] == 0 {
			return nil
		}
		return b.check("ncclReduce", foreign.Call(b.f.reduce, j.in.at+uintptr(j.offset[0][p]), j.out.at, uintptr(j.Out[p]),
			types[j.Type], operations[j.Reduce],
			uintptr(p), b.comm, b.stream))
	case collective.AllGather:
		return errors.Join(j.send(p, 0, j.In[own]), j.recv(p, j.offset[1][p], j.In[p]))
	case collective.Gather:
		var err error
		if p == root {
			err = j.send(p, 0, j.In[own])
		}
		if own == root {
			err = errors.Join(err, j.recv(p, j.offset[1][p], j.In[p]))
		}
		return err
	case collective.Scatter:
		var err error
		if own == root {
			err = j.send(p, j.offset[0][p], j.Out[p])
		}
		if p == root {
			err = errors.Join(err, j.recv(p, 0, j.Out[own]))
		}
		return err
	}
	return errors.Join(j.send(p, j.offset[0][p], j.Out[p]), j.recv(p, j.offset[1][p], j.In[p]))
}

func (j *job) send(to, at, n int) error {
	if n == 0 {
		return nil
	}
	return j.b.check("ncclSend", foreign.Call(j.b.f.send, j.in.at+uintptr(at), uintptr(n*j.size), byteType, uintptr(to),
		j.b.comm, j.b.stream))
}

func (j *job) recv(from, at, n int) error {
	if n == 0 {
		return nil
	}
	return j.b.check("ncclRecv", foreign.Call(j.b.f.recv, j.out.at+uintptr(at), uintptr(n*j.size), byteType, uintptr(from),
		j.b.comm, j.b.stream))
}
