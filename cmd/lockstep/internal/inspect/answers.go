package inspect

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/cluster/doctor"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// A processor that computes wrongly without an error is found by a computation whose result is known: the loops of
// package kernel give the same bits on every correct processor.
const (
	answer     = 0x602a310456295067
	answerTime = 200 * time.Millisecond // on each CPU, all at the same time
)

// answers computes the known answer on every CPU that this process may use.
func answers() doctor.Fact {
	f := doctor.Fact{Name: "known answers", Value: "right"}
	if wrong := wrongCPUs(affinity.Allowed(), answerTime, compute); len(wrong) > 0 {
		f.Value = "wrong on CPU " + affinity.Text(wrong)
		f.Wrong = fmt.Sprintf("a computation with a known result gave another one on CPU %s: do not train on this host, "+
			"and have its processor and memory tested", affinity.Text(wrong))
	}
	return f
}

// wrongCPUs repeats compute for a time on all CPUs, and returns those on which a result was not the answer.
func wrongCPUs(cpus []int, d time.Duration, compute func(cpu int) uint64) (wrong []int) {
	if len(cpus) == 0 {
		cpus = []int{0} // the system does not name them
	}
	found := make([]atomic.Bool, len(cpus))
	var all sync.WaitGroup
	end := time.Now().Add(d)
	for i, cpu := range cpus {
		all.Go(func() {
			affinity.Run([]int{cpu}, func() {
				for first := true; first || time.Now().Before(end); first = false {
					if compute(cpu) != answer {
						found[i].Store(true)
					}
				}
			})
		})
	}
	all.Wait()
	for i, cpu := range cpus {
		if found[i].Load() {
			wrong = append(wrong, cpu)
		}
	}
	return wrong
}

// compute makes sums, products and fused multiply-adds of float32 and float64, in vectors and one by one, and returns
// the hash of all results.
func compute(int) uint64 {
	const n = 4099 // with a remainder of every vector length
	a, b, c := make([]float32, n), make([]float32, n), make([]float32, n)
	x := uint64(1)
	for i := range n {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		a[i], b[i] = float32(int32(x))/(1<<31), float32(int32(x>>32))/(1<<31)
	}
	pa, pb, pc := unsafe.Pointer(&a[0]), unsafe.Pointer(&b[0]), unsafe.Pointer(&c[0])
	fused := 0.0
	for round := range 16 {
		kernel.AddScaled(pc, pa, pb, n, 1/float32(round+3))
		kernel.Reduce(kernel.Sum, tensor.Float32, pa, pa, pc, n)
		kernel.Multiply(tensor.Float32, pa, n, 0.4375)
		fused = math.FMA(fused, 0.7, kernel.Squares(tensor.Float32, pa, n))
		fused = math.FMA(float64(kernel.Dot(pa, pb, n)), fused, 1)
	}
	hash := xxh3.Hash(unsafe.Slice((*byte)(pa), 4*n))
	return hash ^ math.Float64bits(fused)
}
