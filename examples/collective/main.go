// Command collective sums vectors and gathers values between goroutines, processes and hosts, without a model and
// without a strategy.
//
//	go run ./examples/collective                       # one process of four ranks
//	go build ./examples/collective
//	lockstep run --nproc-per-node 2 -- ./collective -ranks 2
//
// worker.Join finds the other processes of the job: under lockstep run, mpirun, srun, TF_CONFIG, Kubernetes, …
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"

	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/typed"
)

func main() {
	log.SetFlags(0)
	ranks := flag.Int("ranks", 4, "number of ranks of this process")
	flag.Parse()
	if err := run(context.Background(), *ranks); err != nil {
		log.Fatal(err)
	}
}

// run joins the job and works on every rank of this process.
func run(ctx context.Context, ranks int) error {
	w, err := worker.Join(ctx, worker.Config{Replicas: ranks})
	if err != nil {
		return err
	}
	defer w.Close()
	errs := make(chan error)
	for _, c := range w.Group().Local() {
		go func() { errs <- work(ctx, c) }()
	}
	for range ranks {
		if e := <-errs; err == nil {
			err = e // a failure of one rank fails all ranks
		}
	}
	return err
}

// work is what each rank does.
func work(ctx context.Context, c collective.Communicator) error {
	x := []float32{float32(c.Rank()), 1, 0.5}
	if err := typed.Sum(ctx, c, x); err != nil { // in place
		return err
	}
	processes, err := typed.Gather(ctx, c, os.Getpid()) // of any type that encoding/gob encodes
	if err != nil {
		return err
	}
	fmt.Printf("rank %d of %d, over %s: %v, in the processes %v\n",
		c.Rank(), c.Size(), c.Properties().Transport, x, processes)
	return nil
}
