package train

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// This file decides what a snapshot holds: the values of the state table, which lists for each value which replica has
// which of its elements. Writing, gathering and restoring snapshots work from the table alone. snapshotState has
// everything else. The table of variables is made once ([Trainer.makeTable]). An exchange that shards slots changes
// their entries, and the values that an exchange keeps from step to step are appended ([Trainer.stateTable]).

// stateValue is a value of the state table: a variable, or what an exchange keeps from step to step. If replicas or
// workers have different values, these are its components. The table is the same on all workers, but for the functions.
type stateValue struct {
	name  string
	kind  valueKind
	dtype tensor.DType
	shape []int // of a component, if there are several
	scope scope
	// entries divide the elements, in their order, among replicas. An owner has one entry. If there are components, each
	// entry is one.
	entries  []entry
	mirrored bool // every replica has all elements, and the same
	shared   bool // several replicas have all elements, and the same, or all of them do

	// read returns a copy of what a local replica has: its value, or as a vector its part of one that is divided.
	read func(local int) (*tensor.Tensor, error)
	// write sets the value of a local replica, which keeps its part of one that is divided.
	write func(local int, value *tensor.Tensor) error
}

// entry says that a replica owns the elements [from, to) of a value, as a snapshot stores it.
type entry struct{ from, to, owner int }

// valueKind is what a value of the state table is for.
type valueKind int

const (
	kindVariable valueKind = iota
	kindSlot
	kindCompression // what compression keeps
	kindMomentum    // of the outer steps of DiLoCo
)

// list returns where a snapshot has the values of a kind.
func (s *Snapshot) list(kind valueKind) *[]Weight {
	switch kind {
	case kindCompression:
		return &s.Compression
	case kindMomentum:
		return &s.OuterMomentum
	}
	return &s.Variables
}

// scope says which replicas have one value. Unless all have, a snapshot stacks the components along a first dimension.
type scope int

const (
	ofJob     scope = iota // all replicas
	ofWorker               // those of a worker
	ofReplica              // each has its own
)

// scopeOf returns the scope of a variable.
func scopeOf(role engine.Role, diloco bool) scope {
	switch {
	case role == engine.Average:
		return ofReplica
	case role == engine.Slot && diloco:
		return ofWorker
	}
	return ofJob
}

// owners returns the replicas that own the values of a scope: the chief's first one, the first one of each worker, or
// all.
func (t *Trainer) owners(s scope) (list []int) {
	switch s {
	case ofWorker:
		for _, ids := range t.replicasOf {
			list = append(list, ids[0])
		}
	case ofReplica:
		for id := range t.strategy.NumReplicasInSync() {
			list = append(list, id)
		}
	default:
		list = []int{t.chiefReplica()}
	}
	return list
}

// addEntries adds an entry for each owner of the value's scope.
func (t *Trainer) addEntries(v *stateValue) *stateValue {
	n := elements(v.shape)
	for i, owner := range t.owners(v.scope) {
		v.entries = append(v.entries, entry{i * n, (i + 1) * n, owner})
	}
	return v
}

// elements returns the number of elements of a shape, or -1 if there can be no tensor of it.
func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		if d < 0 || d > 0 && n > math.MaxInt/8/d { // more than can be addressed
			return -1
		}
		n *= d
	}
	return n
}

// storedShape returns the shape of the value in a snapshot.
func (v *stateValue) storedShape() []int {
	if v.scope == ofJob {
		return v.shape
	}
	return stackedShape(len(v.entries), v.shape)
}

// stackedShape returns the shape of n tensors of a shape along a first dimension.
func stackedShape(n int, shape []int) []int { return append([]int{n}, shape...) }

// divided reports whether a value is the same on all replicas, and some do not have all of it.
func (v *stateValue) divided() bool { return v.scope == ofJob && !v.mirrored }

// inPieces reports whether workers write the value in several tensors, if each writes a part of the snapshot.
func (v *stateValue) inPieces() bool { return len(v.entries) > 1 && v.entries[1].to > 0 }

// makeTable makes the table of the program's variables.
func (t *Trainer) makeTable() {
	for i, v := range t.variables {
		value := &stateValue{
			name: v.Name, dtype: v.DType, shape: v.Shape, scope: scopeOf(v.Role, t.config.diloco() != nil),
			read:  func(local int) (*tensor.Tensor, error) { return t.program.Read(local, i) },
			write: func(local int, value *tensor.Tensor) error { return t.writeTo(local, i, value) },
		}
		if v.Role == engine.Slot {
			value.kind = kindSlot
		}
		value.mirrored = value.scope == ofJob
		value.shared = value.mirrored
		t.table = append(t.table, t.addEntries(value))
	}
}

// stateTable returns the whole table: all values that a snapshot holds.
func (t *Trainer) stateTable() []*stateValue {
	return slices.Concat(t.table, t.compressed(), t.diloco.kept())
}

// readEntry returns a copy of the elements of an entry of a local replica, as a vector.
func (t *Trainer) readEntry(v *stateValue, e entry) (*tensor.Tensor, error) {
	value, err := v.read(t.localOf(e.owner))
	if err != nil {
		return nil, err
	}
	return value.Reshape(value.Len()), nil
}

// gather returns a value as a snapshot stores it: on every worker, or on the chief only, where the others get nil.
// Owners send the elements that a worker does not have.
func (t *Trainer) gather(ctx context.Context, v *stateValue, onAll bool) (*tensor.Tensor, error) {
	worker := 0
	if onAll {
		worker = everywhere
	}
	if v.mirrored && !onAll {
		if !t.IsChief() {
			return nil, nil
		}
		return v.read(0)
	}
	counts := make([]int, t.strategy.NumReplicasInSync())
	values := slices.Repeat([]*tensor.Tensor{tensor.New(v.dtype, 0)}, len(t.local))
	for _, e := range v.entries {
		counts[e.owner] = e.to - e.from
		if local := t.localOf(e.owner); local >= 0 {
			var err error
			if values[local], err = t.readEntry(v, e); err != nil {
				return nil, err
			}
		}
	}
	all, err := t.concatenate(ctx, v.name, values, counts, worker)
	if err != nil || all == nil {
		return nil, err
	}
	byOwner := slices.Clone(v.entries)
	slices.SortFunc(byOwner, func(a, b entry) int { return a.owner - b.owner })
	if slices.Equal(byOwner, v.entries) {
		return all.Reshape(v.storedShape()...), nil
	}
	value := tensor.New(v.dtype, v.storedShape()...)
	from, to := all.Memory().HostBytes(), value.Memory().HostBytes()
	for _, e := range byOwner {
		from = from[copy(to[e.from*v.dtype.Bytes():e.to*v.dtype.Bytes()], from):]
	}
	return value, nil
}

// ofChief returns the component that the chief's first replica has, as a value of the job.
func (t *Trainer) ofChief(v *stateValue) *stateValue {
	chief := *v
	if v.scope != ofJob {
		i := slices.IndexFunc(v.entries, func(e entry) bool { return e.owner == t.chiefReplica() })
		chief.scope, chief.entries = ofJob, v.entries[i:i+1]
	}
	return &chief
}

// ownPieces returns the tensors of a value that this worker writes, of a snapshot that all workers write: those whose
// owner is one of its replicas. A value that all have is written by the worker with the fewest bytes so far. bytes has
// those of all workers; ownPieces adds the bytes of the value.
func (t *Trainer) ownPieces(v *stateValue, bytes []int) (list []Weight, err error) {
	entries := v.entries
	if !v.inPieces() {
		entries = entries[:1]
	}
	for _, e := range entries {
		worker := t.workerOf(e.owner)
		if v.mirrored {
			worker = slices.Index(bytes, slices.Min(bytes))
			e.owner = t.replicasOf[worker][0]
		}
		bytes[worker] += (e.to - e.from) * v.dtype.Bytes()
		if worker != t.worker {
			continue
		}
		value, err := t.readEntry(v, e)
		if err != nil {
			return nil, err
		}
		name := pieceName(v.name, e.from, e.to)
		if !v.inPieces() {
			name, value = v.name, value.Reshape(v.storedShape()...)
		}
		list = append(list, Weight{name, value})
	}
	return list, nil
}

// values returns the value of each local replica, or a single one if it is the same on all, of a value that a snapshot
// stores. The snapshot may have been made by other replicas or workers, or with another exchange.
func (t *Trainer) values(s *Snapshot, v *stateValue, stored *tensor.Tensor) ([]*tensor.Tensor, error) {
	storedScope, components := v.scope, 0
	if v.kind == kindSlot {
		storedScope = scopeOf(engine.Slot, s.DiLoCo != nil)
	}
	shape := v.shape
	switch storedScope {
	case ofWorker:
		components = s.Workers
	case ofReplica:
		components = s.Replicas
	}
	if storedScope != ofJob {
		shape = stackedShape(components, shape)
	}
	if err := fits(stored, v.dtype, shape); err != nil {
		return nil, err
	}
	switch {
	case storedScope == ofJob:
		return []*tensor.Tensor{stored}, nil
	case storedScope != v.scope || components != len(v.entries):
		return []*tensor.Tensor{v.combine(stored, t.strategy.NumReplicasInSync())}, nil
	}
	list := make([]*tensor.Tensor, len(t.local))
	for local, component := range t.ids() {
		if v.scope == ofWorker {
			component = t.worker
		}
		list[local] = stored.Rows(component, component+1).Reshape(v.shape...)
	}
	return list, nil
}

// combine returns one value for stacked components. Of what compression keeps, only the sum over the replicas matters.
func (v *stateValue) combine(stacked *tensor.Tensor, replicas int) *tensor.Tensor {
	if v.kind != kindCompression {
		return combineComponents(stacked, v.dtype, v.shape)
	}
	value := meanOfComponents(stacked, v.shape)
	of := tensor.Data[float32](value)
	for i, mean := range of {
		of[i] = mean * float32(stacked.Shape()[0]) / float32(replicas)
	}
	return value
}

// combineComponents returns one value for stacked components: the mean of floating-point numbers, otherwise the first.
func combineComponents(stacked *tensor.Tensor, dtype tensor.DType, shape []int) *tensor.Tensor {
	if dtype.IsFloat() && stacked.Shape()[0] > 1 {
		return meanOfComponents(stacked, shape)
	}
	return stacked.Rows(0, 1).Reshape(shape...)
}

// meanOfComponents returns the mean over the first dimension, summed in float64.
func meanOfComponents(stacked *tensor.Tensor, shape []int) *tensor.Tensor {
	n := stacked.Shape()[0]
	sums := make([]float64, stacked.Len()/n)
	for i, x := range stacked.Float64s() {
		sums[i%len(sums)] += x
	}
	for i := range sums {
		sums[i] /= float64(n)
	}
	return fromFloat64s(stacked.DType(), shape, sums)
}

// pieceName is the name of a range of the elements of a value, in snapshots and in calls.
func pieceName(name string, from, to int) string { return fmt.Sprintf("%s[%d:%d]", name, from, to) }

// parsePiece is the inverse of pieceName.
func parsePiece(text string) (name string, from, to int, ok bool) {
	open := strings.LastIndexByte(text, '[')
	if open < 0 {
		return "", 0, 0, false
	}
	lo, hi, found := strings.Cut(strings.TrimSuffix(text[open+1:], "]"), ":")
	from, errFrom := strconv.Atoi(lo)
	to, errTo := strconv.Atoi(hi)
	ok = found && errFrom == nil && errTo == nil && from >= 0 && to >= from && pieceName(text[:open], from, to) == text
	return text[:open], from, to, ok
}

// joinPieces replaces the pieces of values by the values, of the shapes given by name.
func joinPieces(list []Weight, shapes map[string][]int) ([]Weight, error) {
	type piece struct {
		from  int
		value *tensor.Tensor
	}
	pieces, joined := map[string][]piece{}, []Weight{}
	for _, w := range list {
		name, from, to, ok := parsePiece(w.Name)
		if _, divided := shapes[name]; !ok || !divided {
			joined = append(joined, w)
			continue
		}
		if s := w.Value.Shape(); len(s) != 1 || s[0] != to-from {
			return nil, fmt.Errorf("%s has shape %s: want %d elements", w.Name, tensor.FormatShape(s), to-from)
		}
		pieces[name] = append(pieces[name], piece{from, w.Value})
	}
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		of := pieces[name]
		slices.SortStableFunc(of, func(a, b piece) int { return a.from - b.from })
		at := 0
		for _, p := range of {
			if p.from != at || p.value.DType() != of[0].value.DType() {
				return nil, fmt.Errorf("no elements of %s from %d on, but %s from %d on", name, at,
					p.value.DType(), p.from)
			}
			at += p.value.Len()
		}
		if len(of) == 0 || elements(shapes[name]) != at {
			return nil, fmt.Errorf("%d elements of %s in %d pieces: want those of shape %s", at, name, len(of),
				tensor.FormatShape(shapes[name]))
		}
		whole := tensor.New(of[0].value.DType(), shapes[name]...)
		to := whole.Memory().HostBytes()
		for _, p := range of {
			to = to[copy(to, p.value.Memory().HostBytes()):]
		}
		joined = append(joined, Weight{name, whole})
	}
	return joined, nil
}
