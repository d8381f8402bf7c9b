package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// state implements [engine.State].
type state struct {
	values *inferenceValues // the model
	axis   int

	mu     sync.Mutex
	list   []*hostBuffer
	closed bool
}

// stateForm is what the programs for new values of a state depend on, for one inference.
type stateForm struct{ values, axis int }

// NewState implements [engine.Inference].
func (p *inference) NewState(first, axis int) (engine.State, error) {
	if first < 0 || first >= len(p.spec.Inputs) {
		return nil, fmt.Errorf("gomlx: a state of the inputs from %d on, of %d: want at least one", first,
			len(p.spec.Inputs))
	}
	s := &state{values: p.values, axis: axis}
	for i, f := range p.spec.Inputs[first:] {
		if axis < 1 || axis > len(f.Shape) {
			return nil, errors.Join(fmt.Errorf("gomlx: a state with axis %d: want one from 1 to the %d of input %d", axis,
				len(f.Shape), first+i), s.Close())
		}
		shape, err := batchShape(f, p.spec.Rows)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		b, err := newHostBuffer(p.b, p.device, shape)
		if err == nil {
			s.list = append(s.list, b)
			_, err = b.load()
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("gomlx: state of input %d: %w", first+i, err), s.Close())
		}
		if !p.b.HasSharedBuffers() {
			b.mem, b.flat = tensor.Memory{}, nil
		}
	}
	return s, nil
}

// Close implements [engine.State].
func (s *state) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, b := range s.list {
		b.close()
	}
	return nil
}

// Continue implements [engine.Inference].
func (p *inference) Continue(ctx context.Context, of engine.State, at, count int, inputs []*tensor.Tensor,
) ([]*tensor.Tensor, error) {
	s, ok := of.(*state)
	if !ok || s.values != p.values {
		return nil, fmt.Errorf("gomlx: continue a state (%T) of another model: want one of NewState of this inference, or "+
			"of one that shares its variables by ForInputs", of)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("gomlx: continue a state that is closed")
	}
	if len(inputs)+len(s.list) != len(p.spec.Inputs) {
		return nil, fmt.Errorf("gomlx: continue: %d inputs and a state of %d: want %d together", len(inputs), len(s.list),
			len(p.spec.Inputs))
	}
	var kept []compute.Buffer
	for i, b := range s.list {
		want, err := batchShape(p.spec.Inputs[len(inputs)+i], p.spec.Rows)
		if err != nil {
			return nil, err
		}
		if !b.shape.Equal(want) {
			return nil, fmt.Errorf("gomlx: continue: value %d of the state is %s: want %s, as input %d", i, b.shape, want,
				len(inputs)+i)
		}
		kept = append(kept, b.buffer)
	}
	end, err := p.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	results, err := p.execute(inputs, kept)
	defer func() {
		for _, b := range results {
			release(b)
		}
	}()
	if err != nil {
		return nil, err
	}
	n := len(results) - len(s.list)
	if n < 0 {
		return nil, fmt.Errorf("gomlx: continue: the model has %d results: want at least the %d of the state", len(results),
			len(s.list))
	}
	out := make([]*tensor.Tensor, n)
	for i, b := range results[:n] {
		if out[i], err = toHost(b); err != nil {
			return nil, err
		}
	}
	if err := s.check(results[n:], at, count); err != nil {
		return nil, fmt.Errorf("gomlx: continue: %w", err)
	}
	if p.b.HasSharedBuffers() {
		err = s.copyFrom(results[n:], at, count)
	} else {
		err = p.replace(s, results[n:], at, count)
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// check returns an error if results do not fit the values of the state.
func (s *state) check(results []compute.Buffer, at, count int) error {
	for i, b := range results {
		got, err := b.Shape()
		if err != nil {
			return err
		}
		want := s.list[i].shape.Clone()
		if got.Rank() == want.Rank() {
			want.Dimensions[s.axis] = got.Dim(s.axis)
		}
		if !got.Equal(want) {
			return fmt.Errorf("the result for value %d of the state is %s: want the state's shape %s but for axis %d", i, got,
				s.list[i].shape, s.axis)
		}
		if size := s.list[i].shape.Dim(s.axis); at < 0 || count < 0 || count > got.Dim(s.axis) || count > size-at {
			return fmt.Errorf("%d elements at %d of axis %d: the result for value %d of the state has %d, and the state %d",
				count, at, s.axis, i, got.Dim(s.axis), size)
		}
	}
	return nil
}

// copyFrom copies results to the memory of the state, which host and device share.
func (s *state) copyFrom(results []compute.Buffer, at, count int) error {
	for i, b := range results {
		flat, err := b.Data()
		if err != nil {
			return fmt.Errorf("gomlx: fetch a result for a state: %w", err)
		}
		shape, err := b.Shape()
		if err != nil {
			return fmt.Errorf("gomlx: shape of a result: %w", err)
		}
		to, from := s.list[i].mem.HostBytes(), memoryOf(flat, shape, 0).HostBytes()
		element := int(shape.ByteSize()) / shape.Size()
		for _, n := range shape.Dimensions[s.axis+1:] {
			element *= n
		}
		toRow, fromRow := s.list[i].shape.Dim(s.axis)*element, shape.Dim(s.axis)*element
		for len(from) > 0 {
			copy(to[at*element:][:count*element], from)
			to, from = to[toRow:], from[fromRow:]
		}
	}
	return nil
}

// replace makes the new values of a state on the device, by a program that it compiles on first use.
func (p *inference) replace(s *state, results []compute.Buffer, at, count int) (err error) {
	p.updating.Lock()
	defer p.updating.Unlock()
	var args []compute.Buffer
	for i, b := range results {
		args = append(args, s.list[i].buffer, b)
	}
	form := stateForm{len(s.list), s.axis}
	update := p.updates[form]
	if update == nil {
		update = graph.NewGraph(p.b.Backend, "lockstep: state")
		if err := catch("compile the state program", func() error { return buildUpdate(update, s.axis, args) }); err != nil {
			update.Finalize()
			return err
		}
		p.updates[form] = update
	}
	for _, n := range []int{at, count} {
		b, err := p.b.BufferFromFlatData(p.device, []int32{int32(n)}, shapes.Make(dtypes.Int32))
		if err != nil {
			return fmt.Errorf("gomlx: place in a state: %w", err)
		}
		defer release(b)
		args = append(args, b)
	}
	var values []compute.Buffer
	err = catch("run the state program", func() (err error) {
		values, err = update.Executable().Execute(args, nil, p.device)
		return err
	})
	for i := range values {
		s.list[i].close()
		s.list[i].buffer = values[i]
	}
	return err
}

// buildUpdate compiles the program whose arguments are the values of a state, each followed by the result for it, and
// the place and number of the new elements. It has the new values as results.
func buildUpdate(g *graph.Graph, axis int, args []compute.Buffer) error {
	var nodes, values []*graph.Node
	for i, b := range args {
		shape, err := b.Shape()
		if err != nil {
			return err
		}
		nodes = append(nodes, graph.Parameter(g, fmt.Sprintf("#%d", i), shape))
	}
	at := graph.Parameter(g, "#at", shapes.Make(dtypes.Int32))
	count := graph.Parameter(g, "#count", shapes.Make(dtypes.Int32))
	for pair := range slices.Chunk(nodes, 2) {
		old, result := pair[0], pair[1]
		number := graph.Sub(graph.Iota(g, shapes.Make(dtypes.Int32, old.Shape().Dim(axis)), 0), at)
		isNew := graph.And(graph.GreaterOrEqual(number, graph.ScalarZero(g, dtypes.Int32)), graph.LessThan(number, count))
		front := make([]int, old.Rank())
		for i := range front {
			front[i] = i
		}
		front[0], front[axis] = axis, 0
		last := float64(result.Shape().Dim(axis) - 1)
		spread := graph.Gather(graph.TransposeAllAxes(result, front...),
			graph.InsertAxes(graph.ClipScalar(number, 0, last), -1))
		dims := make([]int, old.Rank())
		for i := range dims {
			dims[i] = 1
		}
		dims[axis] = old.Shape().Dim(axis)
		isNew = graph.BroadcastToShape(graph.Reshape(isNew, dims...), shapes.Make(dtypes.Bool, old.Shape().Dimensions...))
		values = append(values, graph.Where(isNew, graph.TransposeAllAxes(spread, front...), old))
	}
	return g.Compile(values...)
}
