package gomlx

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
)

// recycler returns the memory of a set of buffers to the backend's pool. The Go backend allocates outputs
// from a pool, but leaves finalized buffers to the garbage collector. Every collection also empties the pool,
// so a step would allocate all its intermediate values again. Donated arguments do return to the pool. So the
// recycler is a program that ignores its arguments, all of which are donated.
type recycler struct {
	g      *graph.Graph
	shapes []shapes.Shape
	donate []bool
}

// newRecycler returns nil if the backend does not benefit from one.
func newRecycler(b *backend, list []shapes.Shape) (*recycler, error) {
	if !b.recycles || len(list) == 0 {
		return nil, nil
	}
	r := &recycler{g: graph.NewGraph(b.Backend, "lockstep: recycle"), shapes: list, donate: make([]bool, len(list))}
	for i, s := range list {
		graph.Parameter(r.g, fmt.Sprintf("#%d", i), s)
		r.donate[i] = true
	}
	if err := r.g.Compile(graph.ScalarZero(r.g, dtypes.Int32)); err != nil {
		r.g.Finalize()
		return nil, fmt.Errorf("gomlx: compile the recycle program: %w", err)
	}
	return r, nil
}

// free frees the buffers, of the shapes given to newRecycler or nil, and sets them to nil.
func (r *recycler) free(list []compute.Buffer) {
	if r != nil && complete(list, len(r.shapes)) {
		if out, err := r.g.Executable().Execute(list, r.donate, 0); err == nil {
			release(out[0])
			clear(list)
			return
		}
	}
	for _, b := range list {
		release(b)
	}
	clear(list)
}

func (r *recycler) close() {
	if r != nil {
		r.g.Finalize()
	}
}

func complete(list []compute.Buffer, n int) bool {
	for _, b := range list {
		if b == nil {
			return false
		}
	}
	return len(list) == n
}
