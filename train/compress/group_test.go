package compress_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// group is the exchange of several replicas, whose calls it makes in memory.
type group struct {
	t         testing.TB
	exchanges []compress.Exchange
	sent      int                 // bytes of the Src of replica 0 in the last step
	received  func(bytes []uint8) // changes what a replica gets
}

// newGroup returns the exchange of these parameters by some replicas.
func newGroup(t testing.TB, c compress.Codec, replicas int, parameters []compress.Parameter) *group {
	g := &group{t: t}
	for replica := range replicas {
		g.exchanges = append(g.exchanges, c.New(parameters, replica, replicas, 7))
	}
	return g
}

// exchange sums the replicas' gradients in place: gradients[replica][parameter].
func (g *group) exchange(gradients [][]*tensor.Tensor, step int64) {
	g.t.Helper()
	g.sent = 0
	calls := make([][][]compress.Call, len(g.exchanges))
	for i, x := range g.exchanges {
		calls[i] = x.Start(gradients[i], step)
	}
	for round := range calls[0] {
		for k := range calls[0][round] {
			list := make([]compress.Call, len(calls))
			for i := range calls {
				list[i] = calls[i][round][k]
			}
			g.make(list)
		}
		for _, x := range g.exchanges {
			x.Next()
		}
	}
}

// make makes one call, of which every replica has its part.
func (g *group) make(list []compress.Call) {
	g.t.Helper()
	for i, c := range list {
		if c.Op != list[0].Op || len(c.Src) != len(list[0].Src) || len(c.Dst) != len(c.Src) || len(c.Names) != len(c.Src) {
			g.t.Fatalf("replica %d makes call %+v, replica 0 %+v", i, c, list[0])
		}
	}
	for j, src := range list[0].Src {
		g.sent += src.Memory().Bytes
		var from, to [][]byte
		for _, c := range list {
			from = append(from, slices.Clone(c.Src[j].Memory().HostBytes()))
			to = append(to, c.Dst[j].Memory().HostBytes())
		}
		switch list[0].Op {
		case compress.AllReduce:
			g.sum(src.DType(), from, to)
		case compress.AllToAll:
			part := len(from[0]) / len(from)
			for receiver := range to {
				for sender := range from {
					copy(to[receiver][sender*part:(sender+1)*part], from[sender][receiver*part:(receiver+1)*part])
				}
				if g.received != nil {
					g.received(to[receiver])
				}
			}
		case compress.AllGather:
			all := slices.Concat(from...)
			for _, dst := range to {
				if copy(dst, all) != len(dst) {
					g.t.Fatalf("gathered %d bytes for %d", len(all), len(dst))
				}
				if g.received != nil {
					g.received(dst)
				}
			}
		}
	}
}

func (g *group) sum(dtype tensor.DType, from, to [][]byte) {
	if len(from[0]) == 0 {
		return
	}
	sources := make([]unsafe.Pointer, len(from))
	for i := range from {
		sources[i] = unsafe.Pointer(&from[i][0])
	}
	sum := make([]uint64, len(from[0])/8+1)
	kernel.Tree{Type: dtype}.Reduce(kernel.NewScratch(len(from)), []unsafe.Pointer{unsafe.Pointer(&sum[0])}, sources, 0,
		len(from[0])/dtype.Bytes())
	for _, dst := range to {
		copy(dst, unsafe.Slice((*byte)(unsafe.Pointer(&sum[0])), len(dst)))
	}
}

// draw returns gradients for every replica.
func draw(r *rand.Rand, replicas int, parameters []compress.Parameter) [][]*tensor.Tensor {
	all := make([][]*tensor.Tensor, replicas)
	for i := range all {
		for _, p := range parameters {
			x := tensor.New(p.DType, p.Shape...)
			switch p.DType {
			case tensor.Float32:
				for k := range tensor.Data[float32](x) {
					tensor.Data[float32](x)[k] = float32(r.NormFloat64())
				}
			case tensor.Float64:
				for k := range tensor.Data[float64](x) {
					tensor.Data[float64](x)[k] = r.NormFloat64()
				}
			}
			all[i] = append(all[i], x)
		}
	}
	return all
}

// sums returns the sums of the replicas' float32 gradients, by parameter, in float64.
func sums(gradients [][]*tensor.Tensor) [][]float64 {
	all := make([][]float64, len(gradients[0]))
	for _, list := range gradients {
		for i, x := range list {
			if all[i] == nil {
				all[i] = make([]float64, x.Len())
			}
			for k, v := range x.Float64s() {
				all[i][k] += v
			}
		}
	}
	return all
}

// clone copies the gradients of all replicas.
func clone(gradients [][]*tensor.Tensor) [][]*tensor.Tensor {
	all := make([][]*tensor.Tensor, len(gradients))
	for i, list := range gradients {
		for _, x := range list {
			all[i] = append(all[i], x.Clone())
		}
	}
	return all
}

// equal checks that all replicas have the same bits.
func equal(t testing.TB, gradients [][]*tensor.Tensor) {
	t.Helper()
	for i, list := range gradients {
		for k, x := range list {
			if !slices.Equal(x.Memory().HostBytes(), gradients[0][k].Memory().HostBytes()) {
				t.Fatalf("the gradient of parameter %d differs between replica 0 and replica %d", k, i)
			}
		}
	}
}

// commit commits, or discards, on all replicas.
func (g *group) commit() {
	for _, x := range g.exchanges {
		x.Commit()
	}
}

func (g *group) discard() {
	for _, x := range g.exchanges {
		x.Discard()
	}
}

// residuals returns the sum of the replicas' residuals, by name.
func (g *group) residuals() map[string][]float64 {
	all := map[string][]float64{}
	for _, x := range g.exchanges {
		for _, s := range x.State() {
			if s.Shared {
				continue
			}
			if all[s.Name] == nil {
				all[s.Name] = make([]float64, s.Value.Len())
			}
			for i, v := range s.Value.Float64s() {
				all[s.Name][i] += v
			}
		}
	}
	return all
}

// model is a list of parameters of all kinds: matrices, one of four dimensions, vectors, a scalar, an empty one, and
// one of another type.
var model = []compress.Parameter{
	{Name: "/dense/weights", DType: tensor.Float32, Shape: []int{48, 40}},
	{Name: "/dense/biases", DType: tensor.Float32, Shape: []int{40}},
	{Name: "/conv/weights", DType: tensor.Float32, Shape: []int{3, 3, 8, 12}},
	{Name: "/double", DType: tensor.Float64, Shape: []int{5, 3}},
	{Name: "/empty", DType: tensor.Float32, Shape: []int{0, 4}},
	{Name: "/large", DType: tensor.Float32, Shape: []int{513}},
	{Name: "/scalar", DType: tensor.Float32},
	{Name: "/small", DType: tensor.Float32, Shape: []int{4, 4}},
}

var codecs = []compress.Codec{
	{Method: compress.BFloat16},
	{Method: compress.Float16},
	{Method: compress.Int8},
	{Method: compress.PowerSGD},
	{Method: compress.PowerSGD, Rank: 4},
	{Method: compress.PowerSGD, Rank: 2, After: 2},
}

// each runs a test for every codec and several numbers of replicas.
func each(t *testing.T, f func(t *testing.T, c compress.Codec, replicas int)) {
	for _, c := range codecs {
		for _, replicas := range []int{2, 3, 5} {
			t.Run(fmt.Sprintf("%v/replicas=%d", c, replicas), func(t *testing.T) { f(t, c, replicas) })
		}
	}
}

func norm(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x * x
	}
	return math.Sqrt(sum)
}

// TestCallsNameTheirGradients checks that replicas that have encoded other gradients make calls of other names.
func TestCallsNameTheirGradients(t *testing.T) {
	names := func(c compress.Codec, parameter string) string {
		list := []compress.Parameter{{Name: parameter, DType: tensor.Float32, Shape: []int{64, 64}}}
		x := c.New(list, 0, 2, 1)
		text := ""
		for _, calls := range x.Start([]*tensor.Tensor{tensor.New(tensor.Float32, 64, 64)}, 0) {
			text += fmt.Sprint(calls[0].Names)
			x.Next()
		}
		return text
	}
	for _, m := range []compress.Method{compress.BFloat16, compress.Float16, compress.Int8, compress.PowerSGD} {
		if a, b := names(compress.Codec{Method: m}, "a"), names(compress.Codec{Method: m}, "b"); a == b {
			t.Errorf("%v: the calls of different gradients are both named %s", m, a)
		}
	}
}
