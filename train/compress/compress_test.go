package compress_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]compress.Codec{
		"none":            {},
		"bfloat16":        {Method: compress.BFloat16},
		"float16":         {Method: compress.Float16},
		"int8":            {Method: compress.Int8},
		"powersgd":        {Method: compress.PowerSGD, Rank: 1},
		"powersgd:4":      {Method: compress.PowerSGD, Rank: 4},
		"powersgd:4:1000": {Method: compress.PowerSGD, Rank: 4, After: 1000},
	} {
		got, err := compress.Parse(text)
		if err != nil || got != want {
			t.Errorf("Parse(%q) = %+v, %v, want %+v", text, got, err, want)
		}
		again, err := compress.Parse(got.String())
		if err != nil || again != got {
			t.Errorf("Parse(%q) = %+v, %v, want %+v", got, again, err, got)
		}
	}
	for _, text := range []string{
		"", "bf16", "int8:4", "powersgd:", "powersgd:0", "powersgd:x", "powersgd:4:-1", "powersgd:4:5:6", "powersgd:257",
	} {
		if got, err := compress.Parse(text); err == nil {
			t.Errorf("Parse(%q) = %+v", text, got)
		}
	}
	for _, c := range []compress.Codec{{Method: 9}, {Rank: 1}, {Method: compress.PowerSGD, Rank: -1}} {
		if c.Check() == nil {
			t.Errorf("%+v is valid", c)
		}
	}
}

// TestReplicasDecodeEqualBits exchanges several steps, some of which are discarded.
func TestReplicasDecodeEqualBits(t *testing.T) {
	each(t, func(t *testing.T, c compress.Codec, replicas int) {
		r := rand.New(rand.NewPCG(1, uint64(replicas)))
		g := newGroup(t, c, replicas, model)
		for step := range int64(6) {
			gradients := draw(r, replicas, model)
			want := sums(gradients)
			g.exchange(gradients, step)
			equal(t, gradients)
			for i, p := range model {
				if p.DType == tensor.Float64 && distance(want[i], gradients[0][i].Float64s()) > 1e-14*norm(want[i]) {
					t.Errorf("the sum of %s is %v, want %v", p.Name, gradients[0][i].Float64s(), want[i])
				}
			}
			if step%3 == 1 {
				g.discard()
			} else {
				g.commit()
			}
		}
	})
}

func distance(a, b []float64) float64 {
	d := make([]float64, len(a))
	for i := range a {
		d[i] = a[i] - b[i]
	}
	return norm(d)
}

// TestNothingIsLost checks that the sums and the residuals of all replicas are together the sums of the gradients and
// of the residuals before.
func TestNothingIsLost(t *testing.T) {
	each(t, func(t *testing.T, c compress.Codec, replicas int) {
		if c.Method != compress.Int8 && c.Method != compress.PowerSGD {
			t.Skip("this method has no residual")
		}
		r := rand.New(rand.NewPCG(2, uint64(replicas)))
		g := newGroup(t, c, replicas, model)
		for step := range int64(5) {
			gradients, before := draw(r, replicas, model), g.residuals()
			want := sums(gradients)
			g.exchange(gradients, step)
			g.commit()
			after := g.residuals()
			for i, p := range model {
				name, got := "residual of "+p.Name, gradients[0][i].Float64s()
				for k := range got {
					total := want[i][k]
					if before[name] != nil {
						total += before[name][k]
						got[k] += after[name][k]
					}
					if math.Abs(got[k]-total) > 1e-4 {
						t.Fatalf("step %d: element %d of %s: the sum and its residual are %v, want %v", step, k, p.Name, got[k], total)
					}
				}
			}
		}
	})
}

// TestErrorBounds compares one exchange with the exact sums.
func TestErrorBounds(t *testing.T) {
	each(t, func(t *testing.T, c compress.Codec, replicas int) {
		r := rand.New(rand.NewPCG(3, uint64(replicas)))
		g := newGroup(t, c, replicas, model)
		gradients := draw(r, replicas, model)
		want, parts := sums(gradients), clone(gradients)
		g.exchange(gradients, 0)
		levels := math.Ceil(math.Log2(float64(replicas))) + 1 // each number is rounded, and each level of the tree
		for i, p := range model {
			if p.DType != tensor.Float32 {
				continue
			}
			got := gradients[0][i].Float64s()
			var values [][]float64
			for _, list := range parts {
				values = append(values, list[i].Float64s())
			}
			for k := range got {
				magnitude, largest := 0.0, 0.0
				for _, values := range values {
					magnitude += math.Abs(values[k])
					block := values[k/256*256 : min(k/256*256+256, len(values))]
					largest += math.Max(slices.Max(block), -slices.Min(block))
				}
				bound := math.Inf(1) // PowerSGD has none for an element
				switch c.Method {
				case compress.BFloat16:
					bound = levels * magnitude * 0x1p-8
				case compress.Float16:
					bound = levels * (magnitude*0x1p-11 + 0x1p-25)
				case compress.Int8:
					bound = largest/254 + largest/254*1.01 // of each replica's block, and of the sum's
				}
				if math.Abs(got[k]-want[i][k]) > bound+1e-6 {
					t.Fatalf("element %d of %s is %v, want %v up to %v", k, p.Name, got[k], want[i][k], bound)
				}
			}
		}
	})
}

// TestBytes checks what is sent for a large matrix, against four bytes for each element.
func TestBytes(t *testing.T) {
	parameters := []compress.Parameter{{Name: "w", DType: tensor.Float32, Shape: []int{512, 512}}}
	for text, most := range map[string]float64{
		"bfloat16": 0.5,
		"float16":  0.5,
		// all-to-all and all-gather send what the two halves of an all-reduce do: the second one counts as its own part
		"int8":       0.255 * 1.5,
		"powersgd:1": 0.004,
		"powersgd:4": 0.016,
	} {
		c, err := compress.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		g := newGroup(t, c, 2, parameters)
		g.exchange(draw(rand.New(rand.NewPCG(1, 1)), 2, parameters), 0)
		if got := float64(g.sent) / (4 * 512 * 512); got > most {
			t.Errorf("%s sends %v of the bytes, want at most %v", text, got, most)
		}
	}
}

// TestPowerSGDIsExactForLowRank: a sum of the rank of the codec is found in two steps, to rounding.
func TestPowerSGDIsExactForLowRank(t *testing.T) {
	const rows, columns, rank, replicas = 60, 80, 3, 2
	parameters := []compress.Parameter{{Name: "w", DType: tensor.Float32, Shape: []int{rows, columns}}}
	r := rand.New(rand.NewPCG(5, 5))
	gradients := draw(r, replicas, parameters)
	u := draw(r, 1, []compress.Parameter{{DType: tensor.Float32, Shape: []int{rows, rank}}})[0][0].Float64s()
	v := draw(r, 1, []compress.Parameter{{DType: tensor.Float32, Shape: []int{rank, columns}}})[0][0].Float64s()
	for i := range rows * columns { // the second one adds what makes the sum of low rank
		sum := 0.0
		for k := range rank {
			sum += u[i/columns*rank+k] * v[k*columns+i%columns]
		}
		tensor.Data[float32](gradients[1][0])[i] = float32(sum) - tensor.Data[float32](gradients[0][0])[i]
	}
	want := sums(gradients)[0]
	for _, k := range []int{rank, rank + 2} { // also with columns that have nothing left to find
		g := newGroup(t, compress.Codec{Method: compress.PowerSGD, Rank: k}, replicas, parameters)
		for step := range int64(3) {
			list := clone(gradients)
			g.exchange(list, step)
			g.discard()
			if d := distance(list[0][0].Float64s(), want); d > 1e-5*norm(want) {
				t.Errorf("rank %d, step %d: the error is %v of %v", k, step, d, norm(want))
			}
		}
	}
}

// TestPowerSGDAfter: the first steps are exact, and leave no residual.
func TestPowerSGDAfter(t *testing.T) {
	g := newGroup(t, compress.Codec{Method: compress.PowerSGD, After: 2}, 2, model)
	r := rand.New(rand.NewPCG(6, 6))
	for step := range int64(3) {
		gradients := draw(r, 2, model)
		want := sums(gradients)[0]
		g.exchange(gradients, step)
		g.commit()
		exact := distance(gradients[0][0].Float64s(), want) < 1e-5*norm(want)
		if rest := norm(g.residuals()["residual of /dense/weights"]); exact != (step < 2) || (rest == 0) != exact {
			t.Errorf("step %d: exact is %v, the residual's norm %v", step, exact, rest)
		}
	}
}

// TestDiscard: a discarded exchange leaves no trace.
func TestDiscard(t *testing.T) {
	each(t, func(t *testing.T, c compress.Codec, replicas int) {
		r := rand.New(rand.NewPCG(7, 7))
		once, twice := newGroup(t, c, replicas, model), newGroup(t, c, replicas, model)
		for step := range int64(4) {
			twice.exchange(draw(r, replicas, model), step)
			if step%2 == 0 { // a Start without either discards, too
				twice.discard()
				twice.commit() // does nothing
			}
			gradients := draw(r, replicas, model)
			same := clone(gradients)
			once.exchange(gradients, step)
			once.commit()
			twice.exchange(same, step)
			twice.commit()
			equal(t, [][]*tensor.Tensor{gradients[0], same[0]})
		}
	})
}

// TestState continues with other exchanges that have got the state of the first ones.
func TestState(t *testing.T) {
	each(t, func(t *testing.T, c compress.Codec, replicas int) {
		r := rand.New(rand.NewPCG(8, 8))
		g := newGroup(t, c, replicas, model)
		for step := range int64(3) {
			g.exchange(draw(r, replicas, model), step)
			g.commit()
		}
		other := newGroup(t, c, replicas, model)
		for i, x := range g.exchanges {
			to := other.exchanges[i].State()
			for k, s := range x.State() {
				if to[k].Name != s.Name || copy(to[k].Value.Memory().HostBytes(), s.Value.Memory().HostBytes()) == 0 {
					t.Fatalf("the state is %v, want %v", to[k], s)
				}
			}
		}
		for step := range int64(2) {
			gradients := draw(r, replicas, model)
			same := clone(gradients)
			g.exchange(gradients, 3+step)
			other.exchange(same, 3+step)
			g.commit()
			other.commit()
			equal(t, [][]*tensor.Tensor{gradients[0], same[0]})
		}
	})
}

// TestNotFinite: an infinity or NaN in the gradient of one replica is found on all of them, and does not stay.
func TestNotFinite(t *testing.T) {
	each(t, func(t *testing.T, c compress.Codec, replicas int) {
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
			r := rand.New(rand.NewPCG(9, 9))
			g := newGroup(t, c, replicas, model)
			for i, p := range model {
				if p.DType != tensor.Float32 || length(p.Shape) == 0 {
					continue
				}
				gradients := draw(r, replicas, model)
				data := tensor.Data[float32](gradients[replicas-1][i])
				data[r.IntN(len(data))] = bad
				g.exchange(gradients, 5)
				for replica, list := range gradients {
					if tensor.FirstNotFinite(list[i]) < 0 {
						t.Errorf("replica %d does not find %v in %s", replica, bad, p.Name)
					}
				}
				g.discard()
				gradients = draw(r, replicas, model)
				g.exchange(gradients, 5)
				for k, x := range gradients[0] {
					if tensor.FirstNotFinite(x) >= 0 {
						t.Errorf("%v in %s stays in %s after the step was discarded", bad, p.Name, model[k].Name)
					}
				}
				g.commit()
			}
		}
	})
}

// TestFloat16Overflows: what is too large for float16 becomes an infinity, also in the sum.
func TestFloat16Overflows(t *testing.T) {
	parameters := []compress.Parameter{{Name: "w", DType: tensor.Float32, Shape: []int{3}}}
	g := newGroup(t, compress.Codec{Method: compress.Float16}, 2, parameters)
	gradients := [][]*tensor.Tensor{{tensor.From([]float32{70000, 40000, 1e-9})}, {tensor.From([]float32{1, 40000, 1e-9})}}
	g.exchange(gradients, 0)
	want := []float64{math.Inf(1), math.Inf(1), 0}
	if got := gradients[1][0].Float64s(); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestInt8OfExtremes: the largest and the smallest numbers keep their bounds, and zeros stay zeros.
func TestInt8OfExtremes(t *testing.T) {
	for _, x := range []float32{0, 1e-45, 1e-38, 0x1p-110, 1e-30, 1, 1e30, 1.6e38, -1.6e38} {
		parameters := []compress.Parameter{{Name: "w", DType: tensor.Float32, Shape: []int{300}}}
		g := newGroup(t, compress.Codec{Method: compress.Int8}, 2, parameters)
		total, gradients := 0.0, [][]*tensor.Tensor(nil)
		for step := range int64(8) {
			gradients = [][]*tensor.Tensor{{tensor.New(tensor.Float32, 300)}, {tensor.New(tensor.Float32, 300)}}
			if step == 0 {
				tensor.Data[float32](gradients[0][0])[0] = x
				tensor.Data[float32](gradients[1][0])[1] = x / 3
			}
			g.exchange(gradients, step)
			g.commit()
			total += gradients[0][0].Float64s()[1]
		}
		rest := g.residuals()["residual of w"][1]
		want := float64(x / 3)
		stays := math.Abs(rest) > math.Abs(float64(x))/100 && math.Abs(want) >= 0x1p-110
		if stays || math.Abs(total+rest-want) > 1e-6*math.Abs(want) {
			t.Errorf("%v: after the steps the sum is %v and the residual %v", want, total, rest)
		}
	}
}

// FuzzReceived exchanges gradients of which other bytes arrive: any bytes decode, to the same on all replicas.
func FuzzReceived(f *testing.F) {
	f.Add([]byte{0, 1, 2, 0x7f, 0x80, 0xff}, uint8(2))
	f.Add(binary.LittleEndian.AppendUint32(nil, 0x7f812345), uint8(3))
	f.Fuzz(func(t *testing.T, bytes []byte, replicas uint8) {
		n := 2 + int(replicas%6)
		g := newGroup(t, compress.Codec{Method: compress.Int8}, n, model)
		g.received = func(to []uint8) {
			for i := range to {
				if len(bytes) > 0 {
					to[i] = bytes[i%len(bytes)]
				}
			}
		}
		for step := range int64(2) {
			gradients := draw(rand.New(rand.NewPCG(1, 1)), n, model)
			g.exchange(gradients, step)
			equal(t, gradients)
			g.commit()
		}
	})
}

func TestNoAllocation(t *testing.T) {
	for _, c := range codecs {
		x := c.New(model, 0, 2, 1)
		gradients := draw(rand.New(rand.NewPCG(1, 1)), 1, model)[0]
		if n := testing.AllocsPerRun(5, func() {
			for range x.Start(gradients, 9) {
				x.Next()
			}
			x.Commit()
		}); n != 0 {
			t.Errorf("%v: %v allocations", c, n)
		}
	}
}

func length(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
