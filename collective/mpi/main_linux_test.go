package mpi_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/mpi"
	"github.com/lockstep-ml/lockstep/internal/librarytest"
	"github.com/lockstep-ml/lockstep/tensor"
)

// asRank is the variable that makes the test binary a process of an MPI job. Its value is the name of the task.
const asRank = "LOCKSTEP_TEST_MPI"

func TestMain(m *testing.M) {
	what := os.Getenv(asRank)
	if what == "" {
		flag.Parse()
		if err := flag.Set("test.parallel", "8"); err != nil { // the processes mostly wait
			panic(err)
		}
		os.Exit(m.Run())
	}
	do, ok := rankDoes[what]
	if !ok {
		fmt.Println("no such thing to do:", what)
		os.Exit(2)
	}
	if err := do(); err != nil {
		fmt.Printf("FAILED: %v\n", err)
		os.Exit(1)
	}
}

var rankDoes = map[string]func() error{
	"exercise": exercise, "mismatch": mismatch, "absent": absent, "alone": alone, "rebuild": rebuild, "killed": killed,
	"stopped": stopped, "again": again,
}

var allTypes = []tensor.DType{
	tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64, tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64,
	tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64,
}

// launched returns the rank that the launcher gave this process.
func launched() int {
	for _, name := range []string{"OMPI_COMM_WORLD_RANK", "PMI_RANK"} {
		if r, err := strconv.Atoi(os.Getenv(name)); err == nil {
			return r
		}
	}
	return 0
}

func open(replicas int, timeout time.Duration) (collective.Group, error) {
	return mpi.Open(context.Background(), mpi.Config{Replicas: replicas, Collective: collective.Config{Timeout: timeout}})
}

// exercise makes every kind of call, with as many replicas as LOCKSTEP_TEST_REPLICAS lists by process.
func exercise() error {
	replicas := 1
	if list := strings.Split(os.Getenv("LOCKSTEP_TEST_REPLICAS"), ","); len(list) > launched() {
		replicas, _ = strconv.Atoi(list[launched()])
	}
	seed, err := strconv.ParseUint(os.Getenv("LOCKSTEP_TEST_SEED"), 10, 64)
	if err != nil {
		return err
	}
	g, err := open(replicas, time.Minute)
	if err != nil {
		return err
	}
	if p := g.Local()[0].Properties(); p.Canonical || p.Transport != "mpi" {
		return fmt.Errorf("properties %+v", p)
	}
	done, err := librarytest.Exercise(context.Background(), g, seed, 9*2*len(allTypes), allTypes)
	if err != nil {
		return err
	}
	if err := g.Close(); err != nil {
		return fmt.Errorf("closing: %w", err)
	}
	fmt.Println("EXERCISED", done["all_reduce"], "rank", g.Local()[0].Rank(), "of", g.Local()[0].Size())
	return nil
}

func vector(n int) *collective.Call {
	return &collective.Call{
		Op: collective.AllReduce, Type: tensor.Float32, Src: tensor.HostMemory(make([]float32, n)),
		Dst:      tensor.HostMemory(make([]float32, n)),
		Manifest: &collective.Manifest{Name: "gradients"},
	}
}

// mismatch makes calls of different lengths.
func mismatch() error {
	g, err := open(1, time.Minute)
	if err != nil {
		return err
	}
	err = g.Local()[0].Do(context.Background(), vector(10+launched()))
	fmt.Println("RESULT", strings.ReplaceAll(fmt.Sprint(err), "\n", " "))
	// One more collective: MPICH's launcher ends the other processes as soon as one exits without MPI_Finalize, even
	// before they have printed the line.
	if g, err = g.Rebuild(context.Background()); err != nil {
		return err
	}
	return g.Close()
}

// absent makes rank 1 late for a call with a deadline.
func absent() error {
	g, err := open(1, 500*time.Millisecond)
	if err != nil {
		return err
	}
	if launched() == 0 {
		begun := time.Now()
		err = g.Local()[0].Do(context.Background(), vector(10))
		fmt.Println("RESULT", err, "AFTER", time.Since(begun) < 20*time.Second)
	} else {
		time.Sleep(3 * time.Second)
	}
	_ = g.Close() // the error is printed
	return nil
}

// alone requests more processes than the launcher has started.
func alone() error {
	_, err := mpi.Open(context.Background(), mpi.Config{Processes: 2})
	fmt.Println("RESULT", err)
	return nil
}

// rebuild fails once, and continues with a new communicator.
func rebuild() error {
	g, err := open(2, time.Minute)
	if err != nil {
		return err
	}
	if err := g.DoAll(context.Background(), []collective.Call{
		*vector(10 + launched()),
		*vector(10 + launched()),
	}); err == nil {
		return fmt.Errorf("a mismatch was not found")
	}
	g, err = g.Rebuild(context.Background())
	if err != nil {
		return err
	}
	if err := g.DoAll(context.Background(), []collective.Call{*vector(10), *vector(10)}); err != nil {
		return err
	}
	fmt.Println("REBUILT epoch", g.Local()[1].Properties().Epoch)
	return g.Close()
}

func killed() error { return lost(syscall.SIGKILL) }

func stopped() error { return lost(syscall.SIGSTOP) }

// lost makes rank 1 kill or suspend itself during a call. Rank 0 makes sure that it ends.
func lost(signal syscall.Signal) error {
	g, err := open(1, 4*time.Second)
	if err != nil {
		return err
	}
	c := g.Local()[0]
	mine, all := []int64{int64(os.Getpid())}, make([]int64, 2)
	gather := &collective.Call{
		Op: collective.AllGather, Type: tensor.Int64, Src: tensor.HostMemory(mine),
		Dst: tensor.HostMemory(all),
	}
	if err := c.Do(context.Background(), gather); err != nil {
		return err
	}
	for i := range 100 {
		if c.Rank() == 1 && i == 3 {
			if err := syscall.Kill(os.Getpid(), signal); err != nil {
				return err
			}
			select {}
		}
		if err := c.Do(context.Background(), vector(1000)); err != nil {
			fmt.Println("RESULT", i, err)
			_ = syscall.Kill(int(all[1]), syscall.SIGKILL) // it may be gone
			_ = g.Close()                                  // the error is printed
			return nil
		}
	}
	return fmt.Errorf("no rank was missed")
}

// again opens a communicator after MPI has ended.
func again() error {
	g, err := open(1, time.Minute)
	if err != nil {
		return err
	}
	if err := g.Close(); err != nil {
		return err
	}
	_, err = open(1, time.Minute)
	fmt.Println("RESULT", err)
	return nil
}
