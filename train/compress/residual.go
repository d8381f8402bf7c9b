package compress

import "github.com/lockstep-ml/lockstep/tensor"

// residual is what encoding has left of a replica's gradients so far: committed, and after the step in progress.
type residual struct {
	committed, pending []float32
	whole              bool // pending is that of a completed exchange
}

func newResidual(count int) residual {
	return residual{committed: make([]float32, count), pending: make([]float32, count)}
}

// commit makes the pending values the committed ones if the exchange is complete, and reports whether it was.
func (r *residual) commit() bool {
	if !r.whole {
		return false
	}
	r.committed, r.pending, r.whole = r.pending, r.committed, false
	return true
}

// state returns the committed values of a parameter, whose elements start at from.
func (r *residual) state(p Parameter, from int) State {
	values := r.committed[from : from+length(p.Shape)]
	return State{Name: "residual of " + p.Name, Value: tensor.Wrap(tensor.HostMemory(values), tensor.Float32, p.Shape...)}
}
