package gomlx

import (
	"fmt"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
)

// A large parameter is divided among several shards if the optimizer works element by element. The update of a piece is
// built as that of a vector with the parameter's name: the program takes the whole parameter and gradient, of which the
// optimizer sees a range, and slots of the range. It returns the range's new values.

// By the measurements in docs/performance.md, a sharded optimizer makes a step shorter if its update takes long, but
// not if the reduction of most gradients is hidden behind the computation: the new values are gathered after it.
const (
	shardedBytes = 1 << 20 // the least of parameters: below, the further call takes as long as the update
	shardedSlots = 2       // slots of at least so many times the parameters' bytes, as Adam's
)

// shardsFaster estimates whether a sharded optimizer makes steps shorter. It depends on the model, the engine and the
// number of replicas only.
func (bl *builder) shardsFaster(buckets []engine.Bucket) bool {
	parameters, slots, last := int64(0), int64(0), int64(buckets[len(buckets)-1].Bytes)
	for _, v := range bl.trained {
		parameters += v.Shape().ByteSize()
	}
	for v := range bl.store.IterVariables() {
		if bl.ofUpdates[v.Path()] && !v.Trainable {
			slots += v.Shape().ByteSize()
		}
	}
	return parameters >= shardedBytes && slots >= shardedSlots*parameters && 2*last >= parameters
}

// unshard makes every device update all parameters.
func (bl *builder) unshard() { bl.spec.Shards, bl.spec.ReplicaShards = 1, nil }

// idleShard reports whether a shard has no piece.
func (bl *builder) idleShard() bool {
	for k := range bl.spec.Shards {
		if !slices.ContainsFunc(bl.pieces, func(p engine.Piece) bool { return p.Owner == k }) {
			return true
		}
	}
	return false
}

// part are parameters that one update program computes: all elements of several, or a piece of one.
type part struct {
	parameters []int
	piece      *engine.Piece // nil: all elements
}

// updatePiece builds the update program of a piece.
func (bl *builder) updatePiece(name string, piece *engine.Piece) (*executable, error) {
	whole := bl.trained[piece.Parameter]
	n := piece.To - piece.From
	flat := shapes.Make(whole.DType(), n)
	store := newStore(bl.m, bl.spec)
	v := store.Scope(whole.Scope()).VariableWithShape(whole.Name(), flat)
	gradient := argName(gradientArg, piece.Parameter)
	x := bl.newExecutableOn(name, func(b compute.Backend) compute.Backend {
		return parameterBackend{b, func(f compute.Function, name string, s shapes.Shape) (compute.Value, error) {
			if name != v.Path() && name != gradient {
				return nil, nil
			}
			of := shapes.Make(s.DType, whole.Shape().Dimensions...)
			all, err := f.Parameter(name, of, nil)
			if err == nil {
				all, err = f.Reshape(all, of.Size())
			}
			if err != nil {
				return nil, err
			}
			return f.Slice(all, []int{piece.From}, []int{piece.To}, []int{1})
		}}
	})
	x.piece, x.whole, x.flat = piece, printed(whole.Shape().Dimensions), printed(flat.Dimensions)
	err := catch(fmt.Sprintf("build the update program with %T", bl.m.Optimizer), func() error {
		model.SetStore(x.g, store)
		store.SetTraining(x.g, true)
		node := graph.Parameter(x.g, gradient, flat)
		v.NodeValue(x.g)
		bl.addUpdate(store, x.g, map[string]*graph.Node{v.Path(): node})
		for other := range store.IterVariables() {
			if other == v || !other.InUseByGraph(x.g) {
				continue
			}
			same := bl.store.GetVariable(other.Path())
			switch {
			case same == nil || same.DType() != other.DType():
				return fmt.Errorf("the optimizer has another variable %s for a part of %s", other.Path(), whole.Path())
			case same.Shape().EqualDimensions(whole.Shape()) && other.Shape().EqualDimensions(flat):
				x.slots = append(x.slots, other.Path())
			case !same.Shape().EqualDimensions(other.Shape()):
				return fmt.Errorf("the optimizer's %s has shape %s for %d elements of %s", other.Path(), other.Shape(), n,
					whole.Path())
			}
		}
		bl.addChanges(store, x)
		return nil
	})
	return x, err
}

// divisible reports whether the update of all parameters works element by element.
func divisible(one *executable) bool {
	if one.recorder == nil || one.finish() != nil {
		return false
	}
	return one.g.Executable().(*stages.Deferred).ElementByElement()
}

// parameterBackend builds graphs whose parameters have another form in the program. parameter adds the program's
// parameter, and returns what the graph sees, or nil to leave it as it is. It is the outermost wrapper of a backend,
// because its functions only matter to GoMLX.
type parameterBackend struct {
	compute.Backend
	parameter func(f compute.Function, name string, shape shapes.Shape) (compute.Value, error)
}

// Builder implements compute.Backend.
func (b parameterBackend) Builder(name string) compute.Builder {
	real := b.Backend.Builder(name)
	return &parameterBuilder{Builder: real, main: &parameterFunction{real.Main(), b.parameter}}
}

type parameterBuilder struct {
	compute.Builder
	main *parameterFunction
}

// Main implements compute.Builder.
func (b *parameterBuilder) Main() compute.Function { return b.main }

// parameterFunction is the main function. The others have no parameters of the program.
type parameterFunction struct {
	compute.Function
	parameter func(f compute.Function, name string, shape shapes.Shape) (compute.Value, error)
}

// Parameter implements compute.Function.
func (f *parameterFunction) Parameter(name string, shape shapes.Shape, s *compute.ShardingSpec) (compute.Value, error) {
	v, err := f.parameter(f.Function, name, shape)
	if v == nil && err == nil {
		return f.Function.Parameter(name, shape, s)
	}
	return v, err
}
