package stages

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
)

// Kernel is a computation on the host, in memory that it shares with the device.
type Kernel struct {
	Name string // with everything, apart from the inputs, that determines the results

	// Run computes the outputs from the inputs. Each is a slice of the elements. The outputs hold any numbers
	// before. Run may be called concurrently, for several runs of a program.
	Run func(out, in []any)
}

type recorderKey struct{}

// Attach makes [Host] record kernels in g, whose backend is r or wraps it.
func (r *Recorder) Attach(g *graph.Graph) { g.AttachState(recorderKey{}, r) }

// Records reports whether [Host] can be used for x: its graph is recorded, and x is not in a condition, a loop or
// another function.
func Records(x *graph.Node) bool {
	r, _ := x.Graph().State(recorderKey{}).(*Recorder)
	if r == nil {
		return false
	}
	_, values := r.identities([]*graph.Node{x})
	return values[0].op.fn == values[0].op.fn.b.main
}

// Host returns nodes of the given shapes and floating-point types, which k computes from in, of floating-point types
// too. [Records] must be true. A kernel ends a stage, like an all-reduce. GoMLX cannot derive its gradient: set
// one by hand.
func Host(k Kernel, results []shapes.Shape, in ...*graph.Node) []*graph.Node {
	r := in[0].Graph().State(recorderKey{}).(*Recorder)
	_, inputs := r.identities(in)
	for i, v := range inputs {
		inputs[i] = v.op.inputs[0]
	}
	// GoMLX sees operations with the shapes and the dependencies of the kernel, which are never compiled.
	all := graph.ReduceAllSum(in[0])
	for _, x := range in[1:] {
		all = graph.Add(all, graph.ConvertDType(graph.ReduceAllSum(x), all.DType()))
	}
	var list []*graph.Node
	for _, s := range results {
		list = append(list, graph.BroadcastToShape(graph.ConvertDType(all, s.DType), s))
	}
	list, outputs := r.identities(list)
	inputs[0].op.fn.b.main.replace(k, inputs, outputs)
	return list
}

// identities adds an identity of each node, and returns them with their values.
func (r *Recorder) identities(nodes []*graph.Node) (list []*graph.Node, values []*value) {
	r.noting, r.noted = true, nil
	defer func() { r.noting = false }()
	for _, x := range nodes {
		// graph.Identity has no gradient.
		list = append(list, graph.IdentityWithCustomGradient(x, func(_, v *graph.Node) *graph.Node { return v }))
	}
	return list, r.noted
}

// replace lets k compute the outputs.
func (f *function) replace(k Kernel, inputs, outputs []*value) {
	o := &op{name: k.Name, kind: hostOp, fn: f, index: f.b.ops, inputs: inputs, outputs: outputs, run: k.Run}
	f.b.ops++
	f.ops = append(f.ops, o)
	for _, v := range outputs {
		v.op = o
	}
	f.b.hosts++
}

// hostMemory keeps the buffers that kernels write, for later runs. The backend would not: it frees shared buffers.
type hostMemory struct {
	backend compute.Backend
	mu      sync.Mutex
	shapes  []shapes.Shape
	free    [][]hostBuffer // by shape
}

type hostBuffer struct {
	buffer compute.Buffer
	flat   any
}

// class returns the number of a shape.
func (m *hostMemory) class(s shapes.Shape) int {
	i := slices.IndexFunc(m.shapes, s.Equal)
	if i < 0 {
		i = len(m.shapes)
		m.shapes, m.free = append(m.shapes, s), append(m.free, nil)
	}
	return i
}

func (m *hostMemory) get(class int, device compute.DeviceNum) (hostBuffer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(m.free[class]); n > 0 {
		b := m.free[class][n-1]
		m.free[class] = m.free[class][:n-1]
		return b, nil
	}
	b, flat, err := m.backend.NewSharedBuffer(device, m.shapes[class])
	if err != nil {
		return hostBuffer{}, fmt.Errorf("memory of shape %s for the host: %w", m.shapes[class], err)
	}
	return hostBuffer{b, flat}, nil
}

func (m *hostMemory) put(class int, b hostBuffer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free[class] = append(m.free[class], b)
}

func (m *hostMemory) close() {
	for i, list := range m.free {
		for _, b := range list {
			free(b.buffer)
		}
		m.free[i] = nil
	}
}

// compute runs the kernels that end a stage.
func (r *run) compute(s *stage) error {
	for _, o := range s.kernels {
		in, out := make([]any, len(o.inputs)), make([]any, len(o.outputs))
		for i, v := range o.inputs {
			b := r.buffer(v)
			if b == nil {
				return errors.New("stages: " + o.name + " has no input")
			}
			var err error
			if in[i], err = b.Data(); err != nil {
				return fmt.Errorf("%s: %w", o.name, err)
			}
		}
		for i, v := range o.outputs {
			slot := r.p.slots[v]
			b, err := r.p.host.get(r.p.classes[v], r.device)
			if err != nil {
				return fmt.Errorf("%s: %w", o.name, err)
			}
			r.slots[slot], r.flats[slot] = b.buffer, b.flat
			out[i] = b.flat
		}
		o.run(out, in)
	}
	return nil
}
