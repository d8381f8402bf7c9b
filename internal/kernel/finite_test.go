package kernel

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// TestFiniteBetween compares FiniteBetween with tensor's for every place of one number that is not finite, in ranges of
// all alignments, and for numbers of every magnitude.
func TestFiniteBetween(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, n := range []int{0, 1, 3, 4, 8, 15, 16, 17, 64, 79, 150} {
		x := tensor.New(tensor.Float32, n)
		data := tensor.Data[float32](x)
		for i := range data {
			for data[i] = float32(math.Inf(1)); math.Float32bits(data[i])&0x7f800000 == 0x7f800000; {
				data[i] = math.Float32frombits(random.Uint32())
			}
		}
		if !FiniteBetween(x, 0, n) {
			t.Fatalf("%d finite numbers are not finite", n)
		}
		for i, bits := range []uint32{0x7f800000, 0xff800000, 0x7f800001, 0xffffffff, 0x7f7fffff, 0xff7fffff} {
			for at := range n {
				was := data[at]
				data[at] = math.Float32frombits(bits)
				for _, r := range [][2]int{{0, n}, {min(1, at), n}, {at / 2, n}, {0, at}, {at, at + 1}, {at + 1, n}} {
					want := i >= 4 || at < r[0] || at >= r[1]
					if got := FiniteBetween(x, r[0], r[1]); got != want || want != tensor.FiniteBetween(x, r[0], r[1]) {
						t.Fatalf("%d numbers, number %d is %#x, range %v: finite is %v, want %v", n, at, bits, r, got, want)
					}
				}
				data[at] = was
			}
		}
	}
	half := tensor.Of([]tensor.F16{1, 2, 0x7c00}, 3)
	if !FiniteBetween(half, 0, 2) || FiniteBetween(half, 0, 3) {
		t.Error("wrong about float16")
	}
}

func BenchmarkFinite(b *testing.B) {
	x := tensor.New(tensor.Float32, 670_000)
	for name, f := range map[string]func(*tensor.Tensor, int, int) bool{
		"vectors": FiniteBetween, "plain": tensor.FiniteBetween,
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(x.Memory().Bytes))
			for b.Loop() {
				if !f(x, 0, x.Len()) {
					b.Fatal("zeros are finite")
				}
			}
		})
	}
}
