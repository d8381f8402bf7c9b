// Package backend is a backend of GoMLX (compute.Backend) in pure Go: import it for its side effect, and set
// GOMLX_BACKEND=lockstep, or call [New].
//
// It records a graph while it is built, plans it when it is compiled, and executes the plan. A plan is a sequence of
// products of matrices, convolutions, loops over rows, sums over columns, copies, and subgraphs that GoMLX's Go backend
// executes: all that the plan has no instruction for. Reshapes, transposes, slices and broadcasts are strides of what
// reads them. A loop fuses a chain of operations on elements with reductions of rows and broadcasts of their results:
// softmax, layer normalization and cross entropy, for example, with their gradients. The memory of all intermediate
// values is planned when the graph is compiled.
//
// Results do not depend on the number of cores: an instruction is divided into tasks whose results are independent.
package backend

//go:generate sh internal/_gen/generate.sh

import (
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// Name is the name of the backend, for GOMLX_BACKEND.
const Name = "lockstep"

func init() { compute.Register(Name, New) }

// Backend implements compute.Backend. Its methods may be called concurrently.
type Backend struct {
	inner compute.Backend // executes what a plan has no instruction for, and owns the memory of buffers
	team  *team

	mu     sync.Mutex
	free   map[string][]*Buffer // by shape
	empty  []*Buffer            // without memory
	logged map[string]bool      // what the Go backend executes
}

var _ compute.Backend = (*Backend)(nil)

// New returns a new backend. config must be empty.
func New(config string) (compute.Backend, error) {
	if config != "" {
		return nil, fmt.Errorf("backend %s has no options, but was given %q", Name, config)
	}
	inner, err := gobackend.New("ops_sequential") // in parallel its products can deadlock
	if err != nil {
		return nil, err
	}
	return &Backend{
		inner: inner, team: newTeam(runtime.GOMAXPROCS(0) - 1), free: map[string][]*Buffer{}, logged: map[string]bool{},
	}, nil
}

// Name implements compute.Backend.
func (b *Backend) Name() string { return Name }

// String implements compute.Backend.
func (b *Backend) String() string { return Name }

// Description implements compute.Backend.
func (b *Backend) Description() string { return "Lockstep's planned backend in pure Go" }

// NumDevices implements compute.Backend.
func (b *Backend) NumDevices() int { return 1 }

// DeviceDescription implements compute.Backend.
func (b *Backend) DeviceDescription(compute.DeviceNum) string { return "CPU" }

// Capabilities implements compute.Backend.
func (b *Backend) Capabilities() compute.Capabilities {
	c := b.inner.Capabilities().Clone()
	for _, op := range []compute.OpType{
		compute.OpTypeBatchNormForInference, compute.OpTypeBatchNormForTraining, compute.OpTypeBatchNormGradient,
	} {
		c.Operations[op] = true
	}
	return c
}

// Finalize implements compute.Backend.
func (b *Backend) Finalize() {
	b.team.close()
	b.inner.Finalize()
	b.mu.Lock()
	b.free = map[string][]*Buffer{}
	b.mu.Unlock()
}

// IsFinalized implements compute.Backend.
func (b *Backend) IsFinalized() bool { return b.inner.IsFinalized() }

// Builder implements compute.Backend.
func (b *Backend) Builder(name string) compute.Builder {
	r := record.New(b.inner.Builder(name))
	r.ComposeBatchNorm, r.WidenHalf = true, true
	return &builder{r, b}
}

type builder struct {
	*record.Builder
	backend *Backend
}

// Compile implements compute.Builder.
func (x *builder) Compile() (compute.Executable, error) {
	if reason := unplannable(x.Builder); reason != "" {
		x.backend.log("whole graphs", "because of", reason)
		exe, err := x.Builder.Builder.Compile()
		if err != nil {
			return nil, err
		}
		return &wholeGraph{exe, x.backend, reason}, nil
	}
	return newExecutable(x.backend, x.Builder, nil, nil)
}

// log reports what the Go backend executes, each name once.
func (b *Backend) log(what, key string, names ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	names = slices.DeleteFunc(names, func(name string) bool { return b.logged[name] })
	for _, name := range names {
		b.logged[name] = true
	}
	if len(names) > 0 {
		slog.Info("backend "+Name+": GoMLX's Go backend executes "+what, key, strings.Join(names, ", "))
	}
}

// Buffer implements compute.Buffer. It must not be used after it is finalized or donated: a later result may be the
// same Buffer.
type Buffer struct {
	backend *Backend
	inner   compute.Buffer // nil if it is finalized
	freed   compute.Buffer // its memory, if it waits for its next use
	shape   shapes.Shape
	class   string // of the backend's free buffers; empty if its memory does not return to them
}

var _ compute.Buffer = (*Buffer)(nil)

// buffer returns a buffer with memory of any contents.
func (b *Backend) buffer(shape shapes.Shape, class string) (*Buffer, error) {
	b.mu.Lock()
	if list := b.free[class]; len(list) > 0 {
		x := list[len(list)-1]
		b.free[class] = list[:len(list)-1]
		b.mu.Unlock()
		x.inner, x.freed = x.freed, nil
		return x, nil
	}
	b.mu.Unlock()
	inner, _, err := b.inner.NewSharedBuffer(0, shape)
	if err != nil {
		return nil, err
	}
	return &Buffer{backend: b, inner: inner, shape: shape, class: class}, nil
}

// take returns a buffer with the memory of x, which then is as if finalized.
func (b *Backend) take(x *Buffer) *Buffer {
	b.mu.Lock()
	defer b.mu.Unlock()
	var y *Buffer
	if n := len(b.empty); n > 0 {
		y, b.empty = b.empty[n-1], b.empty[:n-1]
	} else {
		y = new(Buffer)
	}
	*y = *x
	x.inner = nil
	return y
}

// reuse keeps buffers without memory for take.
func (b *Backend) reuse(list []*Buffer) {
	b.mu.Lock()
	b.empty = append(b.empty, list...)
	b.mu.Unlock()
}

// mostFree is how many buffers of a shape are kept for reuse.
const mostFree = 64

// BufferFromFlatData implements compute.DataInterface.
func (b *Backend) BufferFromFlatData(device compute.DeviceNum, flat any, shape shapes.Shape) (compute.Buffer, error) {
	x, memory, err := b.NewSharedBuffer(device, shape)
	if err != nil {
		return nil, err
	}
	from, to := reflect.ValueOf(flat), reflect.ValueOf(memory)
	switch {
	case reflect.TypeOf(flat) != to.Type():
		err = fmt.Errorf("a buffer of shape %s needs a %T, but was given a %T", shape, memory, flat)
	case from.Len() != to.Len():
		err = fmt.Errorf("a buffer of shape %s has %d elements, but was given %d", shape, to.Len(), from.Len())
	default:
		reflect.Copy(to, from)
		return x, nil
	}
	return nil, errors.Join(err, x.Finalize())
}

// HasSharedBuffers implements compute.DataInterface.
func (b *Backend) HasSharedBuffers() bool { return true }

// NewSharedBuffer implements compute.DataInterface.
func (b *Backend) NewSharedBuffer(device compute.DeviceNum, shape shapes.Shape) (compute.Buffer, any, error) {
	if device != 0 {
		return nil, nil, fmt.Errorf("backend %s has device 0 only, but was asked for device %d", Name, device)
	}
	if b.IsFinalized() {
		return nil, nil, errFinalized
	}
	x, err := b.buffer(shape.Clone(), shape.String())
	if err != nil {
		return nil, nil, err
	}
	flat, err := x.Data()
	return x, flat, err
}

var errFinalized = errors.New("backend " + Name + " is finalized")

// Backend implements compute.Buffer.
func (x *Buffer) Backend() compute.Backend { return x.backend }

// Finalize implements compute.Buffer.
func (x *Buffer) Finalize() error {
	if !x.detach() {
		return nil
	}
	return x.backend.recycle(x)
}

// detach makes x a buffer without memory, but for recycle. It reports whether x had some.
func (x *Buffer) detach() bool {
	if x.inner == nil {
		return false
	}
	x.freed, x.inner = x.inner, nil
	return true
}

// recycle keeps detached buffers for their next use, or frees their memory.
func (b *Backend) recycle(list ...*Buffer) (err error) {
	finalized := b.IsFinalized()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, x := range list {
		if free := b.free[x.class]; x.class != "" && !finalized && len(free) < mostFree {
			b.free[x.class] = append(free, x)
			continue
		}
		if e := x.freed.Finalize(); err == nil {
			err = e
		}
		x.freed = nil
	}
	return err
}

// Shape implements compute.Buffer.
func (x *Buffer) Shape() (shapes.Shape, error) { return x.shape, nil }

// DeviceNum implements compute.Buffer.
func (x *Buffer) DeviceNum() (compute.DeviceNum, error) { return 0, nil }

// ToFlatData implements compute.Buffer.
func (x *Buffer) ToFlatData(flat any) error {
	if x.inner == nil {
		return errFreed
	}
	return x.inner.ToFlatData(flat)
}

// Data implements compute.Buffer.
func (x *Buffer) Data() (any, error) {
	if x.inner == nil {
		return nil, errFreed
	}
	return x.inner.Data()
}

var errFreed = errors.New("the buffer was finalized or donated")

// CopyToDevice implements compute.Buffer.
func (x *Buffer) CopyToDevice(compute.DeviceNum) (compute.Buffer, error) {
	return nil, fmt.Errorf("backend %s has one device only", Name)
}

// pointer returns the address of the elements.
func (x *Buffer) pointer() (unsafe.Pointer, error) {
	flat, err := x.Data()
	if err != nil {
		return nil, err
	}
	return pointerOf(flat), nil
}

// own returns the buffer as one of this backend.
func (b *Backend) own(x compute.Buffer) (*Buffer, error) {
	y, ok := x.(*Buffer)
	if !ok || y.backend != b {
		return nil, fmt.Errorf("it is a %T of another backend than this %s", x, Name)
	}
	if y.inner == nil {
		return nil, errFreed
	}
	return y, nil
}

// fits returns an error unless x is a buffer of this backend, and has this shape.
func (b *Backend) fits(x compute.Buffer, shape shapes.Shape) error {
	y, err := b.own(x)
	if err == nil && !y.shape.Equal(shape) {
		err = fmt.Errorf("it has shape %s, want %s", y.shape, shape)
	}
	return err
}

// wholeGraph executes a graph by the Go backend: one with dimensions that are not known when it is built.
type wholeGraph struct {
	compute.Executable
	backend *Backend
	reason  string // why
}

// Execute implements compute.Executable.
func (w *wholeGraph) Execute(in []compute.Buffer, donate []bool, _ compute.DeviceNum) ([]compute.Buffer, error) {
	inner := make([]compute.Buffer, len(in))
	for i, x := range in {
		y, err := w.backend.own(x)
		if err != nil {
			return nil, fmt.Errorf("argument %d: %w", i, err)
		}
		inner[i] = y.inner
	}
	for i := range in {
		if len(donate) == len(in) && donate[i] {
			in[i].(*Buffer).inner = nil // even if an error follows
		}
	}
	out, err := executeInner(w.Executable, "a graph with "+w.reason, inner, donate)
	if err != nil {
		return nil, err
	}
	return w.backend.wrap(out)
}

// executeInner executes a program of the Go backend. A panic of it becomes an error: for a division of integers by 0,
// for example, or for an operation that it does not have for a type. what has the names of the operations.
func executeInner(exe compute.Executable, what string, in []compute.Buffer, donate []bool) (
	out []compute.Buffer, err error,
) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case error:
			err = fmt.Errorf("GoMLX's Go backend panicked when it executed %s: %w", what, r)
		default:
			err = fmt.Errorf("GoMLX's Go backend panicked when it executed %s: %v", what, r)
		}
	}()
	return exe.Execute(in, donate, 0)
}

// wrap returns buffers of the Go backend as buffers of this one.
func (b *Backend) wrap(list []compute.Buffer) ([]compute.Buffer, error) {
	for i, x := range list {
		shape, err := x.Shape()
		if err != nil {
			return nil, err
		}
		list[i] = &Buffer{backend: b, inner: x, shape: shape}
	}
	return list, nil
}
