package compress_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// BenchmarkExchange is what one replica computes for an exchange, without the calls. Its rate counts the bytes of the
// gradients; "copy" only reads and writes them once.
func BenchmarkExchange(b *testing.B) {
	const rows, columns = 2048, 1024
	parameters := []compress.Parameter{{Name: "w", DType: tensor.Float32, Shape: []int{rows, columns}}}
	gradients := draw(rand.New(rand.NewPCG(1, 1)), 1, parameters)[0]
	b.Run("copy", func(b *testing.B) {
		to := tensor.New(tensor.Float32, rows, columns)
		b.SetBytes(4 * rows * columns)
		for b.Loop() {
			copy(to.Memory().HostBytes(), gradients[0].Memory().HostBytes())
		}
	})
	for _, c := range codecs {
		for _, replicas := range []int{2, 8} {
			b.Run(fmt.Sprintf("%v/replicas=%d", c, replicas), func(b *testing.B) {
				x := c.New(parameters, 0, replicas, 1)
				b.SetBytes(4 * rows * columns)
				for b.Loop() {
					for range x.Start(gradients, 9) {
						x.Next()
					}
					x.Commit()
				}
			})
		}
	}
}
