package librarytest

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/library"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// Drivers returns drivers of a number of processes that are all in this process, over the library's own collectives.
// With them, package library can be tested without another library.
func Drivers(n int) ([]library.Driver, error) {
	g, err := collective.Open(mem.New(n), collective.Config{
		Name: "between processes", Timeout: -1, Stall: -1,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	var out []library.Driver
	letters := &post{boxes: map[address]chan []byte{}}
	for _, c := range g.Local() {
		out = append(out, &inProcess{comm: c, post: letters, closed: make(chan struct{})})
	}
	return out, nil
}

// post delivers messages. A process may have several messages in flight at a time.
type post struct {
	mu    sync.Mutex
	boxes map[address]chan []byte
}

type address struct{ from, to, tag int }

func (p *post) box(a address) chan []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.boxes[a] == nil {
		p.boxes[a] = make(chan []byte, 16)
	}
	return p.boxes[a]
}

// inProcess is the backend of one of these processes.
type inProcess struct {
	comm   collective.Communicator
	post   *post // nil for communicators made by Split, which send by the communicator
	closed chan struct{}

	mu   sync.Mutex // the order of starts
	work sync.WaitGroup
}

func (b *inProcess) Transport() string { return "in-process" }
func (b *inProcess) Rank() int         { return b.comm.Rank() }
func (b *inProcess) Size() int         { return b.comm.Size() }

// Reduces does not support one type, as NCCL.
func (b *inProcess) Reduces(t tensor.DType) bool { return t != tensor.Int16 }

func (b *inProcess) Start(o library.Operation) <-chan error {
	done := make(chan error, 1)
	size := o.Type.Bytes()
	memory := func(p unsafe.Pointer, n int) tensor.Memory {
		if n == 0 {
			return tensor.Memory{}
		}
		return tensor.Memory{Ptr: p, Bytes: n * size}
	}
	c := &collective.Call{Op: o.Op, Reduce: o.Reduce, Type: o.Type, Root: o.Root, Peer: o.Peer}
	src, dst := o.Count, o.Count
	switch o.Op {
	case collective.ReduceScatter, collective.Scatter:
		c.Counts, src, dst = o.Out, total(o.Out), o.Out[b.Rank()]
	case collective.AllGather, collective.Gather:
		c.Counts, src, dst = o.In, o.In[b.Rank()], total(o.In)
	case collective.AllToAll:
		return b.uneven(o)
	case collective.Broadcast:
		o.Src = o.Dst
	}
	c.Src, c.Dst = memory(o.Src, src), memory(o.Dst, dst)
	if o.Op.Pairwise() && b.post != nil {
		b.work.Go(func() { done <- b.deliver(o, c) })
		return done
	}
	b.begin(c, done)
	return done
}

// deliver sends or receives a message.
func (b *inProcess) deliver(o library.Operation, c *collective.Call) error {
	if o.Op == collective.Send {
		b.post.box(address{b.Rank(), o.Peer, o.Tag}) <- slices.Clone(c.Src.HostBytes())
		return nil
	}
	select {
	case letter := <-b.post.box(address{o.Peer, b.Rank(), o.Tag}):
		if len(letter) > c.Dst.Bytes {
			return fmt.Errorf("%w: %d bytes for %d", collective.ErrMismatch, len(letter), c.Dst.Bytes)
		}
		copy(c.Dst.HostBytes(), letter)
		return nil
	case <-b.closed:
		return collective.ErrClosed
	}
}

func total(counts []int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// begin starts a call; done gets its result.
func (b *inProcess) begin(c *collective.Call, done chan<- error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h, err := b.comm.Start(context.Background(), c)
	if err != nil {
		done <- err
		return
	}
	b.work.Go(func() { done <- h.Wait(context.Background()) })
}

// uneven is an all-to-all of parts of any length: a gather for each process in turn.
func (b *inProcess) uneven(o library.Operation) <-chan error {
	done := make(chan error, 1)
	size, n := o.Type.Bytes(), b.Size()
	outcomes := make(chan error, n)
	lengths := make([]int64, n*n)
	mine := make([]int64, n)
	for p, c := range o.Out {
		mine[p] = int64(c)
	}
	first := collective.Call{
		Op: collective.AllGather, Type: tensor.Int64, Src: tensor.HostMemory(mine),
		Dst: tensor.HostMemory(lengths),
	}
	known := make(chan error, 1)
	b.begin(&first, known)
	b.work.Go(func() {
		if err := <-known; err != nil {
			done <- err
			return
		}
		at := 0
		for root := range n {
			c := &collective.Call{Op: collective.Gather, Type: o.Type, Root: root}
			for p := range n {
				c.Counts = append(c.Counts, int(lengths[p*n+root]))
			}
			if k := o.Out[root]; k > 0 {
				c.Src = tensor.Memory{Ptr: unsafe.Add(o.Src, at*size), Bytes: k * size}
			}
			if k := total(c.Counts); root == b.Rank() && k > 0 {
				c.Dst = tensor.Memory{Ptr: o.Dst, Bytes: k * size}
			}
			at += o.Out[root]
			b.begin(c, outcomes)
		}
		var err error
		for range n {
			if e := <-outcomes; err == nil {
				err = e
			}
		}
		done <- err
	})
	return done
}

func (b *inProcess) Split(ctx context.Context, member bool, key int) (library.Driver, error) {
	color := 0
	if !member {
		color = -1
	}
	c, err := b.comm.Split(ctx, color, key)
	if err != nil || c == nil {
		return nil, err
	}
	return &inProcess{comm: c, closed: make(chan struct{})}, nil
}

func (b *inProcess) Close(_ context.Context, sound bool) error {
	if !sound {
		b.comm.Abort(fmt.Errorf("operations were given up"))
	}
	close(b.closed)
	err := b.comm.Close()
	b.work.Wait()
	if !sound {
		return nil
	}
	return err
}

// Open makes the groups of processes with the given numbers of replicas, numbered process by process.
func Open(replicas []int, cfg collective.Config) ([]collective.Group, error) {
	drivers, err := Drivers(len(replicas))
	if err != nil {
		return nil, err
	}
	ranks, next := make([][]int, len(replicas)), 0
	for p, n := range replicas {
		for range n {
			ranks[p] = append(ranks[p], next)
			next++
		}
	}
	groups := make([]collective.Group, len(replicas))
	for p, b := range drivers {
		again := func(context.Context) (library.Driver, error) {
			return nil, fmt.Errorf("%v are not joined again", slices.Clone(replicas))
		}
		if groups[p], err = library.Open(library.Setup{Driver: b, Ranks: ranks, Again: again, Config: cfg}); err != nil {
			return nil, err
		}
	}
	return groups, nil
}
