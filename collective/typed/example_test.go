package typed_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/typed"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// Two ranks of one process sum vectors and gather values. The ranks of several processes come from worker.Join.
func Example() {
	group, err := collective.Open(mem.New(2), collective.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer group.Close()
	ctx := context.Background()
	var ranks sync.WaitGroup
	for _, c := range group.Local() {
		ranks.Go(func() {
			x := []float32{1, 10, float32(c.Rank())}
			if err := typed.Sum(ctx, c, x); err != nil {
				log.Fatal(err)
			}
			type found struct {
				Rank  int
				Words []string
			}
			all, err := typed.Gather(ctx, c, found{c.Rank(), []string{"one", "two"}[c.Rank():]})
			if err != nil {
				log.Fatal(err)
			}
			if c.Rank() == 0 {
				fmt.Println(x, all)
			}
		})
	}
	ranks.Wait()
	// Output: [2 20 1] [{0 [one two]} {1 [two]}]
}
