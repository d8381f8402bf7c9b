package stages

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// Program is a compiled graph with all-reduces or buckets. Several goroutines may run it concurrently.
type Program interface {
	compute.Executable
	// Sums lists the all-reduces.
	Sums() []Sum
	// Run runs the program. args are the graph's parameters, as for Executable.Execute, and remain owned by the
	// caller. donate selects whether to donate the buffers that pass between stages to the backend. The results are
	// nil for those that take has received; take may be nil if there are no buckets.
	Run(args []compute.Buffer, device compute.DeviceNum, donate bool, exchange Exchange, take Take) ([]compute.Buffer,
		error)
}

// planned is a Program as one plan of Lockstep's backend.
type planned struct {
	*backend.Executable
	calls [][]int // by call of the plan: the all-reduces
	sums  []Sum
}

// Sums implements Program.
func (p *planned) Sums() []Sum { return p.sums }

// Run implements Program.
func (p *planned) Run(args []compute.Buffer, _ compute.DeviceNum, _ bool, exchange Exchange, take Take) (
	[]compute.Buffer, error,
) {
	out := make([]compute.Buffer, len(p.Outputs()))
	err := p.Executable.Run(out, args, nil, backend.Points{
		AllReduce: func(call int, operands []compute.Buffer) ([]compute.Buffer, error) {
			return exchange(p.calls[call], operands)
		},
		Bucket: take,
	})
	if err != nil {
		for _, b := range out {
			free(b)
		}
		return nil, err
	}
	return out, nil
}

// planner is a builder of Lockstep's backend.
type planner interface {
	CompileWithPoints(calls [][]compute.Value, buckets [][]int) (*backend.Executable, error)
}

// newPlanned returns nil if the backend has no plans, or none for this graph.
func newPlanned(b *builder, buckets [][]int) (Program, error) {
	to, ok := b.Builder.Builder.(planner)
	if !ok {
		return nil, nil
	}
	p := &planned{sums: b.listSums()}
	var calls [][]compute.Value
	b.assign()
	for i, o := range b.sums {
		if at := planOf(o); at.planned {
			for len(calls) <= at.level {
				calls, p.calls = append(calls, nil), append(p.calls, nil)
			}
			calls[at.level], p.calls[at.level] = append(calls[at.level], o.Outputs[0].Real), append(p.calls[at.level], i)
		}
	}
	var err error
	if p.Executable, err = to.CompileWithPoints(calls, buckets); err != nil || p.Executable == nil {
		return nil, err
	}
	return p, nil
}

// staged is a Program as one executable for each stage.
type staged struct {
	stages  []*stage
	sums    []Sum
	buckets [][]int  // of results
	names   []string // of the graph's parameters
	shapes  []shapes.Shape
	outputs []shapes.Shape
	slots   map[*record.Value]int // in which a run keeps an output of a stage
}

var _ Program = (*staged)(nil)

func newStaged(b *builder, buckets [][]int) (Program, error) {
	p := &staged{buckets: buckets, sums: b.listSums(), slots: map[*record.Value]int{}}
	for i, v := range b.Parameters {
		p.names, p.shapes = append(p.names, fmt.Sprint(i)), append(p.shapes, v.Shape)
	}
	for _, v := range b.Entry.Outputs {
		p.outputs = append(p.outputs, v.Shape)
	}
	p.stages = b.stages(buckets)
	for i, s := range p.stages {
		if err := s.build(b, i); err != nil {
			p.Finalize()
			return nil, fmt.Errorf("stage %d of %d: %w", i+1, len(p.stages), err)
		}
		for _, v := range s.outputs {
			if _, known := p.slots[v]; !known {
				p.slots[v] = len(p.slots)
			}
		}
	}
	p.findLastUses()
	return p, nil
}

// findLastUses marks the values that are not needed after a stage.
func (p *staged) findLastUses() {
	needed := map[*record.Value]bool{}
	for _, s := range slices.Backward(p.stages) {
		for _, v := range s.outputs {
			if !needed[v] {
				s.dropped = append(s.dropped, v)
			}
		}
		for _, v := range s.args {
			_, kept := p.slots[v]
			s.last = append(s.last, kept && !needed[v])
			needed[v] = true
		}
	}
}

// Stages returns the number of stages.
func (p *staged) Stages() int { return len(p.stages) }

// Sums implements Program.
func (p *staged) Sums() []Sum { return p.sums }

// Exchange all-reduces buffers over the replicas: buffers[i] is this replica's operand of all-reduce
// which[i]. It returns the sums. They remain owned by Exchange, and must keep their values until the run
// ends.
type Exchange func(which []int, buffers []compute.Buffer) ([]compute.Buffer, error)

// Take receives the results of a bucket, as soon as they are computed, and owns them. It must not keep the slice.
type Take func(bucket int, results []compute.Buffer) error

// Run implements Program.
func (p *staged) Run(args []compute.Buffer, device compute.DeviceNum, donate bool, exchange Exchange, take Take) (
	[]compute.Buffer, error,
) {
	r := &run{
		p: p, args: args, slots: make([]compute.Buffer, len(p.slots)), sums: make([]compute.Buffer, len(p.sums)),
		results: make([]compute.Buffer, len(p.outputs)), device: device, donate: donate,
	}
	defer r.release()
	for _, s := range p.stages {
		err := r.execute(s)
		if err == nil {
			err = r.handOver(s, take)
		}
		if err == nil {
			err = r.exchange(s, exchange)
		}
		for _, v := range s.dropped {
			r.free(v)
		}
		if err != nil {
			for _, b := range r.results {
				free(b)
			}
			return nil, err
		}
	}
	return r.results, nil
}

// run is one run in progress.
type run struct {
	p       *staged
	args    []compute.Buffer
	slots   []compute.Buffer // values that later stages need
	sums    []compute.Buffer
	results []compute.Buffer
	device  compute.DeviceNum
	donate  bool
}

// buffer returns an argument of a stage.
func (r *run) buffer(v *record.Value) compute.Buffer {
	switch p := planOf(v.Op); p.kind {
	case parameterOp:
		return r.args[p.index]
	case sumOp:
		return r.sums[p.index]
	}
	return r.slots[r.p.slots[v]]
}

// execute runs a stage.
func (r *run) execute(s *stage) error {
	if s.exe == nil {
		return nil
	}
	in, donate := make([]compute.Buffer, len(s.args)), make([]bool, len(s.args))
	for i, v := range s.args {
		in[i], donate[i] = r.buffer(v), r.donate && s.last[i] && planOf(v.Op).kind == plainOp
	}
	out, err := s.exe.Execute(in, donate, r.device)
	if err != nil {
		return err
	}
	for i, v := range s.args {
		if s.last[i] {
			if donate[i] {
				r.slots[r.p.slots[v]] = nil
			}
			r.free(v)
		}
	}
	for i, v := range s.outputs {
		r.free(v) // a constant may be an output of several stages
		r.slots[r.p.slots[v]] = out[i]
	}
	for i, result := range s.results {
		r.results[result] = out[len(s.outputs)+i]
	}
	return nil
}

// handOver gives the buckets that a stage has completed to take.
func (r *run) handOver(s *stage, take Take) error {
	for _, k := range s.buckets {
		list := make([]compute.Buffer, len(r.p.buckets[k]))
		for i, result := range r.p.buckets[k] {
			list[i], r.results[result] = r.results[result], nil
		}
		if err := take(k, list); err != nil {
			return err
		}
	}
	return nil
}

// exchange executes the all-reduces that end a stage.
func (r *run) exchange(s *stage, exchange Exchange) error {
	if len(s.sums) == 0 {
		return nil
	}
	operands := make([]compute.Buffer, len(s.sums))
	for i, v := range s.operands {
		operands[i] = r.slots[r.p.slots[v]]
	}
	sums, err := exchange(s.sums, operands)
	if err != nil {
		return err
	}
	for i, which := range s.sums {
		r.sums[which] = sums[i]
	}
	return nil
}

// free frees the value that a slot holds.
func (r *run) free(v *record.Value) {
	slot := r.p.slots[v]
	free(r.slots[slot])
	r.slots[slot] = nil
}

func free(b compute.Buffer) {
	if b != nil {
		_ = b.Finalize() // a buffer that cannot be freed is freed with the backend
	}
}

func (r *run) release() {
	for v := range r.p.slots {
		r.free(v)
	}
}

// Finalize implements compute.Executable.
func (p *staged) Finalize() {
	for _, s := range p.stages {
		if s.exe != nil {
			s.exe.Finalize()
			s.exe = nil
		}
	}
}

// Inputs implements compute.Executable.
func (p *staged) Inputs() (names []string, inputShapes []shapes.Shape) { return p.names, p.shapes }

// Outputs implements compute.Executable.
func (p *staged) Outputs() []shapes.Shape { return p.outputs }

// Execute implements compute.Executable. It fails for a program with all-reduces or buckets, which needs the other
// replicas or a receiver. It donates nothing.
func (p *staged) Execute(args []compute.Buffer, _ []bool, device compute.DeviceNum) ([]compute.Buffer, error) {
	if len(p.sums) > 0 || len(p.buckets) > 0 {
		return nil, errors.New("stages: a graph with all-reduces or buckets must be run by Program.Run")
	}
	return p.Run(args, device, true, nil, nil)
}
