package collective_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/tensor"
)

// models are the gradients' sizes of a multilayer perceptron, of a transformer of 100 tensors, and of a large bucket.
var models = []struct {
	name  string
	sizes []int
}{
	{"mlp", []int{784 * 512, 512, 512 * 512, 512, 512 * 10, 10}},
	{"gpt", append(slices.Repeat([]int{128 * 128, 128, 128, 128 * 128, 128, 128 * 384 / 4, 384}, 14), 256*128, 64*128)},
	{"50MB", slices.Repeat([]int{250_000, 1000}, 50)},
}

// BenchmarkBuckets reduces the gradients of models, as one vector and as separate tensors.
func BenchmarkBuckets(b *testing.B) {
	for _, p := range placements {
		if !slices.Contains([]string{"mem", "shm alone", "tcp"}, p.name) {
			continue
		}
		for _, m := range models {
			total := 0
			var tensors []packing.Tensor
			for i, n := range m.sizes {
				total += n
				tensors = append(tensors, packing.Tensor{Name: fmt.Sprint(i), Type: tensor.Float32, Count: n})
			}
			for _, way := range []string{"one", "bucket"} {
				b.Run(fmt.Sprintf("%s/%s/%s", p.name, m.name, way), func(b *testing.B) {
					w := p.world(b, 2, collective.Config{})
					defer w.close(b)
					b.SetBytes(int64(4 * total))
					n := b.N
					b.ResetTimer()
					for _, err := range w.each(func(c collective.Communicator) error {
						if way == "one" {
							x := tensor.HostMemory(make([]float32, total))
							call := collective.Call{Op: collective.AllReduce, Type: tensor.Float32, Src: x, Dst: x}
							for range n {
								if err := c.Do(background, &call); err != nil {
									return err
								}
							}
							return nil
						}
						cfg := packing.Config{BytesPerPack: packing.OnePack}
						r, err := packing.NewReducer(c, tensors, cfg)
						if err != nil {
							return err
						}
						var x []tensor.Memory
						for _, n := range m.sizes {
							x = append(x, tensor.HostMemory(make([]float32, n)))
						}
						for range n {
							if err := r.Do(background, x, x); err != nil {
								return err
							}
						}
						return nil
					}) {
						if err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}
