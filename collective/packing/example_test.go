package packing_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// Two ranks sum a list of tensors, and use those of each pack while later packs travel.
func ExampleReducer() {
	group, err := collective.Open(mem.New(2), collective.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer group.Close()
	ctx := context.Background()
	tensors := []packing.Tensor{
		{Name: "kernel", Type: tensor.Float32, Count: 4},
		{Name: "bias", Type: tensor.Float32, Count: 1},
		{Name: "scale", Type: tensor.Float32, Count: 1},
	}
	var ranks sync.WaitGroup
	for _, c := range group.Local() {
		ranks.Go(func() {
			r, err := packing.NewReducer(c, tensors, packing.Config{Reduce: collective.Sum, BytesPerPack: 4})
			if err != nil {
				log.Fatal(err)
			}
			x := []tensor.Memory{
				tensor.HostMemory([]float32{1, 2, 3, 4}), tensor.HostMemory([]float32{5}),
				tensor.HostMemory([]float32{6}),
			}
			sum := []*tensor.Tensor{tensor.New(tensor.Float32, 4), tensor.New(tensor.Float32, 1), tensor.New(tensor.Float32, 1)}
			dst := []tensor.Memory{sum[0].Memory(), sum[1].Memory(), sum[2].Memory()}
			if err := r.Start(ctx, dst, x); err != nil {
				log.Fatal(err)
			}
			for k, p := range r.Packs() {
				if err := r.Wait(ctx, k); err != nil {
					log.Fatal(err)
				}
				for _, t := range p.Tensors {
					if c.Rank() == 0 {
						fmt.Printf("pack %d: %s is %v\n", k, tensors[t].Name, sum[t].Format())
					}
				}
			}
		})
	}
	ranks.Wait()
	// Output:
	// pack 0: scale is [12.]
	// pack 0: bias is [10.]
	// pack 1: kernel is [2. 4. 6. 8.]
}
