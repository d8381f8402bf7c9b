package dataparallel

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Backend returns a backend that runs graphs on b, and the all-reduces of [Job.AllReduce] in them. A graph without any
// is compiled by b alone. Finalize finalizes b.
func (j *Job) Backend(b compute.Backend) compute.Backend {
	return &backend{Backend: b, job: j, recorders: map[string]*stages.Recorder{}}
}

type backend struct {
	compute.Backend
	job *Job

	mu        sync.Mutex
	recorders map[string]*stages.Recorder // by graph's name: of the last one
}

// Builder implements compute.Backend.
func (b *backend) Builder(name string) compute.Builder {
	r := stages.New(b.Backend)
	b.mu.Lock()
	b.recorders[name] = r
	b.mu.Unlock()
	return &builder{Builder: r.Builder(name), b: b}
}

// BufferFromFlatData implements compute.Backend.
func (b *backend) BufferFromFlatData(d compute.DeviceNum, flat any, shape shapes.Shape) (compute.Buffer, error) {
	return b.wrap(b.Backend.BufferFromFlatData(d, flat, shape))
}

// NewSharedBuffer implements compute.Backend.
func (b *backend) NewSharedBuffer(d compute.DeviceNum, shape shapes.Shape) (compute.Buffer, any, error) {
	x, flat, err := b.Backend.NewSharedBuffer(d, shape)
	x, err = b.wrap(x, err)
	return x, flat, err
}

// buffer is a buffer of the wrapped backend. GoMLX's tensors compare the backends of buffers.
type buffer struct {
	compute.Buffer
	b *backend
}

func (b *backend) wrap(x compute.Buffer, err error) (compute.Buffer, error) {
	if err != nil {
		return nil, err
	}
	return &buffer{x, b}, nil
}

// Backend implements compute.Buffer.
func (x *buffer) Backend() compute.Backend { return x.b }

// CopyToDevice implements compute.Buffer.
func (x *buffer) CopyToDevice(d compute.DeviceNum) (compute.Buffer, error) {
	return x.b.wrap(x.Buffer.CopyToDevice(d))
}

// builder makes executables that take and return the backend's buffers.
type builder struct {
	compute.Builder
	b *backend
}

// Compile implements compute.Builder.
func (b *builder) Compile() (compute.Executable, error) {
	exe, err := b.Builder.Compile()
	if err != nil {
		return nil, err
	}
	return &executable{exe, b.b}, nil
}

// AllReduce returns the sum of x over all workers, in a graph of the backend of [Job.Backend]. Its gradient is
// also an all-reduce. Every worker must execute the same graph. It must not be inside a condition or a loop.
func (j *Job) AllReduce(x *graph.Node) (y *graph.Node) {
	if j.Size() == 1 {
		return x
	}
	b, ok := x.Graph().Backend().(*backend)
	if !ok || b.job != j {
		panic(fmt.Errorf("dataparallel: the graph is built for the backend %s: want that of Job.Backend",
			x.Graph().Backend().Name()))
	}
	if d, err := dtypeOf(x.Shape()); err != nil || !d.IsNumeric() {
		panic(fmt.Errorf("dataparallel: cannot sum %s: want numbers", x.Shape()))
	}
	b.mu.Lock()
	r := b.recorders[x.Graph().Name()]
	b.mu.Unlock()
	recorded := false
	name := "all_reduce_" + x.Graph().UniqueName("lockstep")
	r.AllReduce(name, func() {
		y = graph.IdentityWithCustomGradient(x, func(_, v *graph.Node) *graph.Node { return j.AllReduce(v) })
		recorded = !r.Pending()
	})
	if !recorded {
		panic(errors.New("dataparallel: two graphs of one name are built at the same time: give executors different names"))
	}
	return y
}

func dtypeOf(s shapes.Shape) (tensor.DType, error) {
	return tensor.ParseDType(strings.ToLower(s.DType.String()))
}

// executable runs a graph, with all-reduces if it has any.
type executable struct {
	compute.Executable
	b *backend
}

// Execute implements compute.Executable.
func (x *executable) Execute(in []compute.Buffer, donate []bool, device compute.DeviceNum) ([]compute.Buffer, error) {
	real := make([]compute.Buffer, len(in))
	for i, b := range in {
		wrapped, ok := b.(*buffer)
		if !ok || wrapped.b != x.b {
			return nil, fmt.Errorf("dataparallel: argument %d is a buffer of another backend: want that of Job.Backend", i)
		}
		real[i] = wrapped.Buffer
	}
	var out []compute.Buffer
	var err error
	if p, ok := x.Executable.(stages.Program); ok {
		out, err = x.withSums(p, real, donate, device)
	} else {
		out, err = x.Executable.Execute(real, donate, device)
	}
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i] = &buffer{out[i], x.b}
	}
	return out, nil
}

// withSums runs a program with all-reduces.
func (x *executable) withSums(p stages.Program, in []compute.Buffer, donate []bool, device compute.DeviceNum) (
	[]compute.Buffer, error,
) {
	e := &exchange{b: x.b, p: p, device: device}
	defer e.close()
	out, err := p.Run(in, device, false, e.sum, nil)
	if err != nil {
		return nil, err
	}
	for i, b := range in {
		if i < len(donate) && donate[i] {
			if err := b.Finalize(); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// exchange executes the all-reduces of one run.
type exchange struct {
	b      *backend
	p      stages.Program
	device compute.DeviceNum
	sums   []compute.Buffer
}

func (e *exchange) close() {
	for _, b := range e.sums {
		_ = b.Finalize() // otherwise it is freed with the backend
	}
}

// sum implements stages.Exchange: one call for all operands of a type.
func (e *exchange) sum(which []int, operands []compute.Buffer) ([]compute.Buffer, error) {
	b := e.b.Backend
	shared := b.HasSharedBuffers()
	sums := make([]compute.Buffer, len(which))
	flats := make([]any, len(which))
	calls := map[tensor.DType]*collective.Call{}
	var order []tensor.DType
	for i, k := range which {
		s := e.p.Sums()[k]
		d, err := dtypeOf(s.Shape)
		if err != nil {
			return nil, err
		}
		n := s.Shape.Size()
		from := reflect.MakeSlice(reflect.SliceOf(s.Shape.DType.GoType()), n, n).Interface()
		if shared {
			if from, err = operands[i].Data(); err == nil {
				sums[i], flats[i], err = b.NewSharedBuffer(e.device, s.Shape)
				e.sums = append(e.sums, sums[i])
			}
		} else {
			err, flats[i] = operands[i].ToFlatData(from), from
		}
		if err != nil {
			return nil, fmt.Errorf("buffers of %s: %w", s.Name, err)
		}
		c := calls[d]
		if c == nil {
			c = &collective.Call{Op: collective.AllReduce, Reduce: collective.Sum, Type: d}
			calls[d], order = c, append(order, d)
		}
		c.SrcList = append(c.SrcList, memoryOf(from, s.Shape))
		c.DstList = append(c.DstList, memoryOf(flats[i], s.Shape))
	}
	for _, d := range order {
		if err := e.b.job.call(calls[d]); err != nil {
			return nil, fmt.Errorf("dataparallel: all-reduce: %w", err)
		}
	}
	for i, k := range which {
		if !shared {
			var err error
			if sums[i], err = b.BufferFromFlatData(e.device, flats[i], e.p.Sums()[k].Shape); err != nil {
				return nil, err
			}
			e.sums = append(e.sums, sums[i])
		}
	}
	return sums, nil
}

// memoryOf returns the memory of a flat slice.
func memoryOf(flat any, shape shapes.Shape) tensor.Memory {
	if shape.Size() == 0 {
		return tensor.Memory{}
	}
	return tensor.Memory{Ptr: unsafe.Pointer(reflect.ValueOf(flat).Pointer()), Bytes: int(shape.ByteSize())}
}
