package kernel

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Every benchmark reports the bytes of one vector as its rate; "moved" counts what is read and written.

func BenchmarkCopy(b *testing.B) {
	for _, bytes := range []int{4 << 10, 256 << 10, 4 << 20} {
		b.Run(size(bytes), func(b *testing.B) {
			dst, src := vectors(1, bytes)[0], vectors(1, bytes)[0]
			b.SetBytes(int64(bytes))
			for b.Loop() {
				move(dst, src, bytes)
			}
			moved(b, 2*bytes)
		})
	}
}

func BenchmarkReduce(b *testing.B) {
	for _, t := range []tensor.DType{
		tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16, tensor.Int8,
		tensor.Int32,
	} {
		for _, op := range []Op{Sum, Max} {
			for _, bytes := range []int{4 << 10, 256 << 10, 4 << 20} {
				b.Run(fmt.Sprintf("%v/%v/%s", t, op, size(bytes)), func(b *testing.B) {
					v := vectors(3, bytes)
					b.SetBytes(int64(bytes))
					for b.Loop() {
						Reduce(op, t, v[0], v[1], v[2], bytes/t.Bytes())
					}
					moved(b, 3*bytes)
				})
			}
		}
	}
}

// BenchmarkTree reads n sources and writes n destinations, as a rank does with its slice in memory.
func BenchmarkTree(b *testing.B) {
	for _, tree := range []Tree{
		{Type: tensor.Float32},
		{Type: tensor.Float32, Stream: true},
		{Type: tensor.Float32, Divide: 2},
		{Type: tensor.Float32, Divide: 3},
		{Type: tensor.BFloat16},
		{Type: tensor.BFloat16, Float32: true},
		{Type: tensor.Float16},
	} {
		for _, n := range []int{2, 3, 4, 5, 8, 16} {
			for _, bytes := range []int{64 << 10, 2 << 20} {
				name := fmt.Sprintf("%v/wide=%v/divide=%d/stream=%v/ranks=%d/%s", tree.Type, tree.Float32, tree.Divide, tree.Stream,
					n, size(bytes))
				b.Run(name, func(b *testing.B) {
					src, dst, scratch := vectors(n, bytes), vectors(n, bytes), NewScratch(n)
					b.SetBytes(int64(bytes))
					for b.Loop() {
						tree.Reduce(scratch, dst, src, 0, bytes/tree.Type.Bytes())
					}
					moved(b, 2*n*bytes)
				})
			}
		}
	}
}

func moved(b *testing.B, bytes int) {
	b.ReportMetric(float64(bytes)*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "movedGB/s")
}

func size(bytes int) string {
	if bytes < 1<<20 {
		return fmt.Sprintf("%dKiB", bytes>>10)
	}
	return fmt.Sprintf("%dMiB", bytes>>20)
}

func vectors(n, bytes int) []unsafe.Pointer {
	out := make([]unsafe.Pointer, n)
	for i := range out {
		out[i] = unsafe.Pointer(unsafe.SliceData(make([]uint64, (bytes+7)/8)))
	}
	return out
}

func BenchmarkConvert(b *testing.B) {
	for _, half := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		for _, c := range []struct{ to, from tensor.DType }{{tensor.Float32, half}, {half, tensor.Float32}} {
			b.Run(fmt.Sprintf("%v_to_%v", c.from, c.to), func(b *testing.B) {
				const n = 16 << 10
				v := vectors(2, 4*n)
				if c.to == half {
					for i := range n {
						*one[float32](v[1], i) = float32(i%1000) / 977
					}
				} else {
					for i := range n {
						*one[uint16](v[1], i) = uint16(0x3000 + i%0xfff)
					}
				}
				b.SetBytes(2 * n)
				for b.Loop() {
					Convert(c.to, c.from, v[0], v[1], n)
				}
			})
		}
	}
}
