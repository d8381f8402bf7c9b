package stages

import (
	"errors"

	"github.com/gomlx/compute"

	"github.com/lockstep-ml/lockstep/internal/record"
)

// Recorder is the backend of one graph. It computes nothing, and owns no resources.
type Recorder struct {
	compute.Backend

	// Defer postpones compilation: when GoMLX compiles a graph, its outputs are recorded, and the executable
	// is a [Deferred].
	Defer bool

	next string // if not empty, the next Identity becomes an all-reduce with this name
}

// New returns a Recorder that wraps b, for one graph.
func New(b compute.Backend) *Recorder { return &Recorder{Backend: b} }

// AllReduce calls identity, which must add one Identity to the graph, and turns that into an all-reduce. Its
// output is the sum of the input over the replicas. name is its name in errors. For GoMLX it is an identity,
// for which a gradient can be set.
func (r *Recorder) AllReduce(name string, identity func()) {
	r.next = name
	identity()
	r.next = ""
}

// Pending reports whether the Identity of the AllReduce in progress has not been added yet.
func (r *Recorder) Pending() bool { return r.next != "" }

// Builder implements compute.Backend.
func (r *Recorder) Builder(name string) compute.Builder {
	b := &builder{Builder: record.New(r.Backend.Builder(name)), recorder: r, name: name}
	b.Check = b.check
	return b
}

// builder records operations. The methods that it does not override are for distribution by the backend,
// which Lockstep does not use.
type builder struct {
	*record.Builder
	recorder *Recorder
	name     string
	sums     []*record.Op // the all-reduces
}

// check gives an operation its plan, and turns an Identity into an all-reduce within Recorder.AllReduce.
func (b *builder) check(o *record.Op) error {
	p := &plan{index: o.Parameter}
	o.Note = p
	switch {
	case o.Name == "Parameter":
		p.kind = parameterOp
	case o.Name == "AllReduce":
		return errors.New("graph.Distributed().AllReduce is not supported in models that Lockstep distributes: use " +
			"gomlx.AllReduce")
	case o.Name == "Identity" && b.recorder.next != "":
		if o.Fn != b.Entry {
			return errors.New("an all-reduce must not be inside a condition, a loop or another function: replicas could " +
				"execute it in different orders")
		}
		p.kind, p.index = sumOp, len(b.sums)
		o.Name, b.recorder.next = b.recorder.next, ""
		b.sums = append(b.sums, o)
	}
	return nil
}

// Compile returns the backend's executable, a [Program] if the graph has all-reduces, or a [Deferred].
func (b *builder) Compile() (compute.Executable, error) {
	if b.recorder.Defer {
		return &Deferred{b: b}, nil
	}
	return b.compile(nil)
}

func (b *builder) compile(buckets [][]int) (compute.Executable, error) {
	if len(b.sums) == 0 && len(buckets) < 2 {
		return b.Builder.Builder.Compile()
	}
	if p, err := newPlanned(b, buckets); p != nil || err != nil {
		return p, err
	}
	return newStaged(b, buckets)
}

type opKind uint8

const (
	plainOp opKind = iota
	parameterOp
	sumOp
)
