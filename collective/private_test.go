package collective_test

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestPrivateMemories checks calls in which some ranks pass memory that ranks of other processes cannot access, from
// none to all, call after call: ranks with such memory begin with another plan than the others.
func TestPrivateMemories(t *testing.T) {
	const ranks, count = 4, 60_000
	ops := []collective.Op{collective.AllReduce, collective.AllGather, collective.Broadcast, collective.ReduceScatter}
	eachPlacement(t, ranks, func(t *testing.T, w *world) {
		errs := w.each(func(c collective.Communicator) error {
			var shared, ordinary [2][]float32 // source and destination
			for i := range shared {
				m, err := c.NewBuffer(4 * count)
				if err != nil {
					return err
				}
				shared[i], ordinary[i] = unsafe.Slice((*float32)(m.Ptr), count), make([]float32, count)
			}
			for _, op := range ops {
				for private := range 1 << (2 * ranks) { // a bit for each memory of each rank
					if testing.Short() && private%7 != 0 && private != 1<<(2*ranks)-1 {
						continue
					}
					var m [2][]float32
					for i := range m {
						if m[i] = shared[i]; private>>(2*c.Rank()+i)&1 != 0 {
							m[i] = ordinary[i]
						}
						clear(m[i])
					}
					if err := checkPrivate(c, op, m[0], m[1]); err != nil {
						return fmt.Errorf("%v, private %08b: %w", op, private, err)
					}
				}
			}
			return nil
		})
		for r, err := range errs {
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		}
	})
}

// checkPrivate makes a call with a source and a destination, and checks some elements of the result.
func checkPrivate(c collective.Communicator, op collective.Op, src, dst []float32) error {
	n := len(src) / c.Size()
	own := func(i int) float32 { return float32(i%5 + c.Rank()) }
	sum := func(i int) float32 { return float32(4*(i%5) + 6) }
	want := sum
	switch op {
	case collective.AllGather:
		src, want = src[:n], func(i int) float32 { return float32(i%n%5 + i/n) }
	case collective.Broadcast:
		want = func(i int) float32 { return float32(i % 5) }
	case collective.ReduceScatter:
		dst, want = dst[:n], func(i int) float32 { return sum(i + c.Rank()*n) }
	}
	for i := range src {
		src[i] = own(i)
	}
	call := &collective.Call{Op: op, Type: tensor.Float32, Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst)}
	if err := c.Do(background, call); err != nil {
		return err
	}
	for i := 0; i < len(dst); i += 17 {
		if dst[i] != want(i) {
			return fmt.Errorf("element %d is %v, want %v", i, dst[i], want(i))
		}
	}
	return nil
}
