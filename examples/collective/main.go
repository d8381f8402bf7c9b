// Command collective all-reduces vectors between goroutines and processes. It uses package collective only: no model,
// no strategy.
//
//	go run ./examples/collective                       # four goroutines
//	go run ./examples/collective -processes 2          # two processes of two goroutines each
//
// The processes exchange addresses through the process that started them. Processes of one host then use shared memory.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"strconv"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/mixed"
)

const ranks = 4

// child is the environment variable with the number of a process that this program starts.
const child = "EXAMPLE_CHILD"

func main() {
	log.SetFlags(0)
	processes := flag.Int("processes", 1, "number of processes, over which the four ranks are spread: 1, 2 or 4")
	flag.Parse()
	ctx := context.Background()
	number, isChild := os.LookupEnv(child)
	var err error
	switch {
	case *processes < 1 || ranks%*processes != 0:
		log.Fatalf("-processes %d: want 1, 2 or 4", *processes)
	case isChild:
		err = work(ctx, number, *processes)
	case *processes == 1:
		err = sum(ctx, mem.New(ranks))
	default:
		err = start(*processes)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// sum runs an all-reduce on every rank of this process.
func sum(ctx context.Context, ends []transport.Endpoint) error {
	group, err := collective.Open(ends, collective.Config{})
	if err != nil {
		return err
	}
	defer group.Close()
	errs := make(chan error)
	for _, c := range group.Local() {
		go func() {
			x := []float32{float32(c.Rank()), 1, 0.5} // summed in place
			err := c.Do(ctx, &collective.Call{
				Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32,
				Src: tensor.HostMemory(x), Dst: tensor.HostMemory(x),
			})
			if err == nil {
				fmt.Fprintf(os.Stderr, "rank %d of %d in process %d, over %s: %v\n", c.Rank(), c.Size(), os.Getpid(),
					c.Properties().Transport, x)
			}
			errs <- err
		}()
	}
	for range group.Local() {
		if e := <-errs; err == nil {
			err = e // a failure of one rank fails all ranks
		}
	}
	return err
}

// work runs a started process, which exchanges addresses through its standard input and output.
func work(ctx context.Context, number string, processes int) error {
	p, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	each := ranks / processes
	var mine []int
	for i := range each {
		mine = append(mine, p*each+i)
	}
	parent := struct {
		io.Reader
		io.Writer
	}{os.Stdin, os.Stdout}
	ends, err := mixed.Open(ctx, mixed.Config{Ranks: mine, Size: ranks, Exchange: mixed.Through(parent)})
	if err != nil {
		return err
	}
	return sum(ctx, ends)
}

// start starts the processes and distributes their addresses.
func start(processes int) error {
	var links []io.ReadWriter
	var children []*exec.Cmd
	for i := range processes {
		cmd := exec.Command(os.Args[0], os.Args[1:]...)
		cmd.Env = append(os.Environ(), child+"="+strconv.Itoa(i))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		children = append(children, cmd)
		links = append(links, struct {
			io.Reader
			io.Writer
		}{out, in})
	}
	err := mixed.Collect(links)
	for _, cmd := range children {
		if e := cmd.Wait(); err == nil {
			err = e
		}
	}
	return err
}
