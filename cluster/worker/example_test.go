package worker_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Two workers sum a vector. Here both are goroutines of one process, and the job is described in the program; a real
// worker is a
// process and leaves Job empty: then Join finds the job in the environment that lockstep run, mpirun, srun or
// Kubernetes set.
func ExampleJoin() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	sums := make([][]float32, 2)
	var workers sync.WaitGroup
	for i := range sums {
		workers.Go(func() {
			ctx := context.Background()
			w, err := worker.Join(ctx, worker.Config{
				Job:    &cluster.Job{ID: "example", Worker: i, Workers: len(sums), Store: "file://" + filepath.ToSlash(dir)},
				Logger: slog.New(slog.DiscardHandler),
			})
			if err != nil {
				log.Fatal(err)
			}
			defer w.Close()
			rank := w.Group().Local()[0] // one replica per worker
			sums[i] = []float32{1, float32(i)}
			vector := tensor.HostMemory(sums[i])
			if err := rank.Do(ctx, &collective.Call{
				Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32, Src: vector, Dst: vector,
			}); err != nil {
				log.Fatal(err)
			}
		})
	}
	workers.Wait()
	fmt.Println(sums)
	// Output: [[2 1] [2 1]]
}
