package collective

import (
	"context"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func TestSmoke(t *testing.T) {
	for name, open := range map[string]func(int) []transport.Endpoint{"memory": mem.New, "pipes": mem.NewPipes} {
		for n := 1; n <= 5; n++ {
			g, err := Open(open(n), Config{})
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for r, c := range g.Local() {
				wg.Go(func() {
					src := []float32{float32(r), 1, 2}
					dst := make([]float32, 3)
					for range 3 {
						err := c.Do(context.Background(), &Call{Op: AllReduce, Type: tensor.Float32, Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst)})
						if err != nil {
							t.Error(name, n, err)
						}
					}
					if dst[1] != float32(n) || dst[0] != float32(n*(n-1)/2) {
						t.Error(name, n, dst)
					}
				})
			}
			wg.Wait()
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
