package collective_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// Two ranks of one process sum their vectors.
func Example() {
	group, err := collective.Open(mem.New(2), collective.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer group.Close()
	results := make([][]float32, 2)
	var ranks sync.WaitGroup
	for rank, c := range group.Local() {
		ranks.Go(func() {
			src, dst := []float32{1, 10, float32(rank)}, make([]float32, 3)
			err := c.Do(context.Background(), &collective.Call{
				Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32,
				Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst),
			})
			if err != nil {
				fmt.Println(err)
			}
			results[rank] = dst
		})
	}
	ranks.Wait()
	fmt.Println(results)
	// Output: [[2 20 1] [2 20 1]]
}
