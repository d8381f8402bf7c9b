package compress

import (
	"hash/fnv"
	"math"
	"math/rand/v2"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// powerSGD exchanges matrices of float32 as products of two narrow ones. A step makes one iteration of the power
// method: with M the sum of all replicas' matrices, P = M Q, orthogonalized, and then Q = Mᵀ P; the result is P Qᵀ.
// Both products are linear in M, so they are summed over the replicas instead. The next step starts with this Q.
type powerSGD struct {
	parameters []Parameter
	after      int64
	replicas   int
	seed       uint64
	matrices   []matrix
	residual   residual
	row        []float32 // scratch memory

	left, right []float32 // the P and the Q of all matrices
	start       []float32 // the Q that the next step starts with

	first, plain, second Call  // the calls of P with the other gradients, of all gradients, and of Q
	firstParameters      []int // of the other gradients in first
	gradients            []*tensor.Tensor
	stage                stage
	calls                [2]Call
	rounds               [2][]Call // each one of calls
}

type stage uint8

const (
	plain  stage = iota // the gradients are summed as they are
	lefts               // the P are summed
	rights              // the Q are summed
)

// matrix is a compressed parameter. The columns of its P and Q are vectors that follow one another.
type matrix struct {
	parameter           int
	rows, columns, rank int
	at, leftAt, rightAt int // in residual, left and right
}

// compressionMin is how many times fewer elements a compressed matrix must have.
const compressionMin = 2

func newPowerSGD(parameters []Parameter, rank int, after int64, replicas int, seed uint64) *powerSGD {
	p := &powerSGD{parameters: parameters, after: after, replicas: replicas, seed: seed}
	count, leftCount, rightCount, widest := 0, 0, 0, 0
	for i, x := range parameters {
		columns := 1
		if len(x.Shape) > 0 {
			columns = x.Shape[len(x.Shape)-1]
		}
		n := length(x.Shape)
		rows := n / max(1, columns)
		r := min(rank, rows, columns)
		if x.DType != tensor.Float32 || len(x.Shape) < 2 || compressionMin*r*(rows+columns) >= n {
			p.firstParameters = append(p.firstParameters, i)
			continue
		}
		p.matrices = append(p.matrices, matrix{i, rows, columns, r, count, leftCount, rightCount})
		count, leftCount, rightCount = count+n, leftCount+r*rows, rightCount+r*columns
		widest = max(widest, columns)
	}
	p.residual = newResidual(count)
	p.row = make([]float32, widest)
	p.left = make([]float32, leftCount)
	p.right, p.start = make([]float32, rightCount), make([]float32, rightCount)
	p.plain.Src = make([]*tensor.Tensor, len(parameters))
	for _, x := range parameters {
		p.plain.Names = append(p.plain.Names, x.Name)
	}
	if len(p.matrices) > 0 {
		p.first.Src, p.first.Names = []*tensor.Tensor{tensor.Of(p.left)}, []string{callName("P of gradients", parameters)}
		p.second.Src, p.second.Names = []*tensor.Tensor{tensor.Of(p.right)}, []string{callName("Q of gradients", parameters)}
	}
	for _, i := range p.firstParameters {
		p.first.Src, p.first.Names = append(p.first.Src, nil), append(p.first.Names, parameters[i].Name)
	}
	p.plain.Dst, p.first.Dst, p.second.Dst = p.plain.Src, p.first.Src, p.second.Src
	p.calls[1] = p.second
	p.rounds = [2][]Call{p.calls[:1], p.calls[1:]}
	return p
}

func (p *powerSGD) Start(gradients []*tensor.Tensor, step int64) [][]Call {
	p.gradients, p.residual.whole = gradients, false
	if step < p.after || len(p.matrices) == 0 {
		copy(p.plain.Src, gradients)
		p.stage, p.calls[0] = plain, p.plain
		return p.rounds[:1]
	}
	for k, i := range p.firstParameters {
		p.first.Src[1+k] = gradients[i]
	}
	copy(p.right, p.start)
	for i := range p.matrices {
		x := &p.matrices[i]
		q := p.right[x.rightAt:][:x.rank*x.columns]
		p.refill(x, q, step)
		orthogonalize(q, x.columns, x.rank)
		p.multiply(x, q)
	}
	p.stage, p.calls[0] = lefts, p.first
	return p.rounds[:]
}

// multiply adds the residual to a replica's matrix, in place, and sets P = M Q.
func (p *powerSGD) multiply(x *matrix, q []float32) {
	left := p.left[x.leftAt:]
	for i := range x.rows {
		row := p.rowOf(x, i)
		rest := unsafe.Pointer(&p.residual.committed[x.at+i*x.columns])
		kernel.Reduce(kernel.Sum, tensor.Float32, row, row, rest, x.columns)
		for k := range x.rank {
			left[k*x.rows+i] = kernel.Dot(row, unsafe.Pointer(&q[k*x.columns]), x.columns)
		}
	}
}

// rowOf returns row i of a replica's matrix.
func (p *powerSGD) rowOf(x *matrix, i int) unsafe.Pointer {
	return unsafe.Add(p.gradients[x.parameter].Memory().Ptr, 4*i*x.columns)
}

func (p *powerSGD) Next() {
	switch p.stage {
	case lefts:
		clear(p.right)
		for i := range p.matrices {
			x := &p.matrices[i]
			left := p.left[x.leftAt:][:x.rank*x.rows]
			orthogonalize(left, x.rows, x.rank)
			p.multiplyTransposed(x, left)
		}
		p.stage = rights
		return
	case rights:
		for i := range p.matrices {
			p.decode(&p.matrices[i])
		}
		p.residual.whole = true
	}
	p.gradients = nil
}

// multiplyTransposed sets Q = Mᵀ P, where Q was 0.
func (p *powerSGD) multiplyTransposed(x *matrix, left []float32) {
	for i := range x.rows {
		row := p.rowOf(x, i)
		for k := range x.rank {
			q := unsafe.Pointer(&p.right[x.rightAt+k*x.columns])
			kernel.AddScaled(q, q, row, x.columns, left[k*x.rows+i])
		}
	}
}

// decode sets the gradient to P Qᵀ. What it does not represent of this replica's matrix M is M - P Qᵀ/replicas: over
// all replicas the sum of that is what it does not represent of the sum.
func (p *powerSGD) decode(x *matrix) {
	left := p.left[x.leftAt:]
	out := unsafe.Pointer(&p.row[0])
	for i := range x.rows {
		clear(p.row[:x.columns])
		for k := range x.rank {
			kernel.AddScaled(out, out, unsafe.Pointer(&p.right[x.rightAt+k*x.columns]), x.columns, left[k*x.rows+i])
		}
		row := p.rowOf(x, i)
		rest := unsafe.Pointer(&p.residual.pending[x.at+i*x.columns])
		kernel.AddScaled(rest, row, out, x.columns, -1/float32(p.replicas))
		kernel.Convert(tensor.Float32, tensor.Float32, row, out, x.columns)
	}
}

// refill replaces the zero columns of Q with random ones: at the beginning, and after a gradient of lower rank.
func (p *powerSGD) refill(x *matrix, q []float32, step int64) {
	for k := range x.rank {
		column := q[k*x.columns:][:x.columns]
		if !isZero(column) {
			continue
		}
		h := fnv.New64a()
		h.Write([]byte(p.parameters[x.parameter].Name))
		r := rand.New(rand.NewPCG(p.seed+h.Sum64(), uint64(step)*rankMax+uint64(k)))
		for i := range column {
			column[i] = r.Float32() - 0.5
		}
	}
}

func isZero(v []float32) bool {
	for _, x := range v {
		if x != 0 {
			return false
		}
	}
	return true
}

// dependent is how much of a vector's square must remain after the projections are taken away. Less is rounding error.
const dependent = 1e-10

// orthogonalize makes count vectors of n elements, which follow one another, orthonormal, by the modified Gram-Schmidt
// method, twice for each vector because once is not exact enough. A vector that depends on those before it becomes 0,
// and one that is not finite NaN.
func orthogonalize(vectors []float32, n, count int) {
	for k := range count {
		vector := vectors[k*n : (k+1)*n]
		v := unsafe.Pointer(&vector[0])
		scale(vector, inverseMagnitude(vector)) // no square overflows, and none that matters is lost
		before := kernel.Dot(v, v, n)
		for range 2 {
			for j := range k {
				other := unsafe.Pointer(&vectors[j*n])
				kernel.AddScaled(v, v, other, n, -kernel.Dot(other, v, n))
			}
		}
		square := kernel.Dot(v, v, n)
		switch {
		case !(square <= math.MaxFloat32):
			scale(vector, math.Float32frombits(quietNaN))
		case square <= dependent*before:
			clear(vector)
		default:
			scale(vector, 1/float32(math.Sqrt(float64(square))))
		}
	}
}

// inverseMagnitude returns the power of two that brings the largest magnitude between 1/2 and 1, or 1 if none does.
func inverseMagnitude(v []float32) float32 {
	largest := float32(0)
	for _, x := range v {
		largest = max(largest, x, -x)
	}
	if !(largest > 0 && largest <= math.MaxFloat32) {
		return 1
	}
	_, exponent := math.Frexp(float64(largest))
	return float32(math.Ldexp(1, min(-exponent, 127)))
}

func scale(v []float32, by float32) {
	for i := range v {
		v[i] *= by
	}
}

func (p *powerSGD) Commit() {
	if p.residual.commit() {
		copy(p.start, p.right)
	}
}

func (p *powerSGD) Discard() { p.residual.whole = false }

func (p *powerSGD) State() (list []State) {
	for i := range p.matrices {
		x := &p.matrices[i]
		parameter := p.parameters[x.parameter]
		q := p.start[x.rightAt:][:x.rank*x.columns]
		list = append(list, p.residual.state(parameter, x.at),
			State{Name: "PowerSGD's Q of " + parameter.Name, Shared: true, Value: tensor.Of(q, x.rank, x.columns)})
	}
	return list
}
