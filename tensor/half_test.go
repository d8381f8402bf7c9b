package tensor_test

import (
	"math"
	"math/rand/v2"
	"sort"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// half is one of the two half-width formats, to test both alike. Their bits without the sign, taken as an integer, grow
// with the number: 0, the subnormal ones, the normal ones, infinity, NaNs.
type half struct {
	name     string
	from     func(float32) uint16
	to       func(uint16) float32
	inf      uint16  // bits
	beyond   float64 // the number that infinity's bits would encode
	fraction int     // bits
	bias     int
}

var halves = []half{
	{
		"float16",
		func(x float32) uint16 { return uint16(tensor.F16From(x)) },
		func(h uint16) float32 { return tensor.F16(h).Float32() },
		0x7c00, 1 << 16, 10, 15,
	},
	{
		"bfloat16",
		func(x float32) uint16 { return uint16(tensor.BF16From(x)) },
		func(h uint16) float32 { return tensor.BF16(h).Float32() },
		0x7f80, 0x1p128, 7, 127,
	},
}

// value decodes the bits by the definition of IEEE 754.
func (f half) value(h uint16) float64 {
	sign := 1.0
	if h&0x8000 != 0 {
		sign = -1
	}
	exponent, fraction := int(h&0x7fff)>>f.fraction, float64(h&(1<<f.fraction-1))
	switch {
	case h&0x7fff == f.inf:
		return math.Inf(int(sign))
	case h&0x7fff > f.inf:
		return math.NaN()
	case exponent == 0:
		return sign * math.Ldexp(fraction, 1-f.bias-f.fraction)
	}
	return sign * math.Ldexp(1+math.Ldexp(fraction, -f.fraction), exponent-f.bias)
}

// nearest is the oracle of rounding: it looks for the two neighbours among all numbers of the format and takes the
// nearer, or the even one. The distances are exact in float64.
func (f half) nearest(x float32) uint16 {
	if x != x {
		return f.inf + 1 // some NaN
	}
	sign := uint16(0)
	if math.Signbit(float64(x)) {
		sign = 0x8000
	}
	a := math.Abs(float64(x))
	at := func(h int) float64 {
		if h == int(f.inf) {
			return f.beyond
		}
		return f.value(uint16(h))
	}
	above := sort.Search(int(f.inf), func(h int) bool { return at(h) >= a }) // the first that is not below a
	if above == 0 {
		return sign
	}
	below := above - 1
	switch down, up := a-at(below), at(above)-a; {
	case down < up, down == up && below%2 == 0:
		return sign | uint16(below)
	}
	return sign | uint16(above)
}

// check compares one conversion with the oracle.
func (f half) check(t *testing.T, x float32) {
	t.Helper()
	got, want := f.from(x), f.nearest(x)
	if x != x {
		bits := math.Float32bits(x)
		if got&0x7fff <= f.inf || got>>15 != uint16(bits>>31) || got&(1<<(f.fraction-1)) == 0 {
			t.Fatalf("%s of the NaN %#x: %#x, want a quiet NaN of its sign", f.name, bits, got)
		}
		if payload := uint16(bits >> (23 - f.fraction)); (got^payload)&(1<<(f.fraction-1)-1) != 0 {
			t.Fatalf("%s of the NaN %#x: %#x lost the upper bits of the payload", f.name, bits, got)
		}
		return
	}
	if got != want {
		t.Fatalf("%s of %v (%#x): got %#x (%v), want %#x (%v)", f.name, x, math.Float32bits(x), got, f.to(got), want,
			f.to(want))
	}
}

func TestHalfWidens(t *testing.T) {
	for _, f := range halves {
		t.Run(f.name, func(t *testing.T) {
			for i := range 1 << 16 {
				h := uint16(i)
				got, want := f.to(h), f.value(h)
				if want != want {
					if got == got || math.Signbit(float64(got)) != (h>>15 == 1) {
						t.Fatalf("%#x: got %v, want a NaN of its sign", h, got)
					}
					continue
				}
				if float64(got) != want || math.Signbit(float64(got)) != math.Signbit(want) {
					t.Fatalf("%#x: got %v, want %v", h, got, want)
				}
			}
		})
	}
}

func TestHalfRoundTrip(t *testing.T) {
	for _, f := range halves {
		t.Run(f.name, func(t *testing.T) {
			for i := range 1 << 16 {
				h := uint16(i)
				want := h
				if h&0x7fff > f.inf {
					want |= 1 << (f.fraction - 1) // quiet
				}
				if got := f.from(f.to(h)); got != want {
					t.Fatalf("%#x: got %#x back, want %#x", h, got, want)
				}
			}
		})
	}
}

// TestHalfRounds tries every number of the format, every middle between two neighbours, and the float32 beside each.
func TestHalfRounds(t *testing.T) {
	for _, f := range halves {
		t.Run(f.name, func(t *testing.T) {
			for i := range int(f.inf) {
				next := f.beyond
				if uint16(i+1) != f.inf {
					next = f.value(uint16(i + 1))
				}
				for _, exact := range []float64{f.value(uint16(i)), (f.value(uint16(i)) + next) / 2} {
					x := float32(exact)
					if float64(x) != exact {
						t.Fatalf("%v is not a float32", exact)
					}
					for _, x := range []float32{x, math.Nextafter32(x, 0), math.Nextafter32(x, float32(math.Inf(1)))} {
						f.check(t, x)
						f.check(t, -x)
					}
				}
			}
			for _, bits := range []uint32{
				0x7f800000, 0x7f7fffff, 0x7f800001, 0x7fc00000, 0x7fffffff, 0x7f801fff, 0x00000001,
				0x007fffff, 0x00800000, 0x80000000,
			} {
				f.check(t, math.Float32frombits(bits))
				f.check(t, math.Float32frombits(bits|1<<31))
			}
			r := rand.New(rand.NewPCG(1, 2))
			for range 300_000 {
				f.check(t, math.Float32frombits(r.Uint32()))
			}
		})
	}
}

func FuzzHalf(f *testing.F) {
	for _, x := range []float32{
		0, 1, -65504, 65520, 5.9604645e-08, 3.4e38, 1e-45, float32(math.NaN()),
		float32(math.Inf(-1)),
	} {
		f.Add(math.Float32bits(x))
	}
	f.Fuzz(func(t *testing.T, bits uint32) {
		for _, h := range halves {
			h.check(t, math.Float32frombits(bits))
		}
	})
}

func BenchmarkHalf(b *testing.B) {
	in := make([]float32, 4096)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range in {
		in[i] = float32(r.NormFloat64())
	}
	for _, f := range halves {
		out := make([]uint16, len(in))
		b.Run(f.name+"/from", func(b *testing.B) {
			b.SetBytes(int64(4 * len(in)))
			for b.Loop() {
				for i, x := range in {
					out[i] = f.from(x)
				}
			}
		})
		b.Run(f.name+"/to", func(b *testing.B) {
			b.SetBytes(int64(4 * len(in)))
			back := make([]float32, len(in))
			for b.Loop() {
				for i, h := range out {
					back[i] = f.to(h)
				}
			}
		})
	}
}
