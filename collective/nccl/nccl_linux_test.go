package nccl_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/nccl"
	"github.com/lockstep-ml/lockstep/internal/foreign"
	"github.com/lockstep-ml/lockstep/internal/librarytest"
	"github.com/lockstep-ml/lockstep/tensor"
)

// fake builds a fake library of NCCL and the CUDA runtime, and sets the variables by which they are found. It verifies
// that calls match the headers. What the real libraries do with them can only be tested on GPUs.
func fake(t *testing.T, flags ...string) {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("there is no C compiler to make a library with")
	}
	so := filepath.Join(t.TempDir(), "libfake.so")
	args := append([]string{"-O1", "-shared", "-fPIC", "-pthread", "-o", so, "testdata/fake.c"}, flags...)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("LOCKSTEP_NCCL", so)
	t.Setenv("LOCKSTEP_CUDART", so)
}

// processes opens the groups of a number of processes, which are goroutines.
func processes(t *testing.T, ranks [][]int) []collective.Group {
	t.Helper()
	groups := make([]collective.Group, len(ranks))
	exchanger := newExchanger(len(ranks))
	var wg sync.WaitGroup
	for p := range ranks {
		wg.Go(func() {
			g, err := nccl.Open(t.Context(), nccl.Config{
				Ranks: ranks, Process: p, Device: p, Exchange: func(_ context.Context, mine []byte) ([][]byte, error) {
					return exchanger.exchange(p, mine), nil
				},
				Collective: collective.Config{Timeout: time.Minute},
			})
			if err != nil {
				t.Error(err)
			}
			groups[p] = g
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return groups
}

// exchanger gives the contributions of all processes to each.
type exchanger struct {
	mu      sync.Mutex
	cond    *sync.Cond
	all     [][]byte
	arrived int
}

func newExchanger(n int) *exchanger {
	m := &exchanger{all: make([][]byte, n)}
	m.cond = sync.NewCond(&m.mu)
	return m
}

func (m *exchanger) exchange(p int, mine []byte) [][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	round := m.arrived / len(m.all)
	m.all[p] = mine
	m.arrived++
	m.cond.Broadcast()
	for m.arrived/len(m.all) == round {
		m.cond.Wait()
	}
	return append([][]byte(nil), m.all...)
}

func inAll(groups []collective.Group, f func(p int, g collective.Group)) {
	var wg sync.WaitGroup
	for p, g := range groups {
		wg.Go(func() { f(p, g) })
	}
	wg.Wait()
}

// TestExercise checks the results of every operation, and that no memory remains allocated on the GPU.
func TestExercise(t *testing.T) {
	fake(t)
	types := []tensor.DType{
		tensor.Int8, tensor.Uint32, tensor.Int64, tensor.Float16, tensor.BFloat16, tensor.Float32,
		tensor.Float64,
	}
	for _, ranks := range [][][]int{{{0}, {1}}, {{0, 1}, {2}, {3}}} {
		groups := processes(t, ranks)
		seed := rand.Uint64()
		inAll(groups, func(p int, g collective.Group) {
			if _, err := librarytest.Exercise(t.Context(), g, seed, 9*2*len(types), types); err != nil {
				t.Errorf("ranks %v, process %d: %v", ranks, p, err)
				g.Local()[0].Abort(err)
			}
			if p := g.Local()[0].Properties(); p.Canonical || p.Transport != "nccl" {
				t.Errorf("%+v", p)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
		l, err := foreign.Find("nccl")
		if err != nil {
			t.Fatal(err)
		}
		live, err := l.Symbol("fakeLive")
		if n := foreign.Call(live); err != nil || n != 0 {
			t.Errorf("%d things are left on the GPU, %v", n, err)
		}
	}
}

// TestRebuild checks that a new communicator, with a new id, works after a mismatch.
func TestRebuild(t *testing.T) {
	fake(t)
	groups := processes(t, [][]int{{0}, {1}})
	inAll(groups, func(p int, g collective.Group) {
		call := func(n int) *collective.Call {
			return &collective.Call{
				Op: collective.AllReduce, Type: tensor.Float32, Src: tensor.HostMemory(make([]float32, n)),
				Dst: tensor.HostMemory(make([]float32, n)),
			}
		}
		if err := g.Local()[0].Do(t.Context(), call(3+p)); !errors.Is(err, collective.ErrMismatch) ||
			!strings.Contains(err.Error(), "rank 1 calls all_reduce SUM float32 [4]") {
			t.Errorf("%v", err)
		}
		g, err := g.Rebuild(t.Context())
		if err != nil {
			t.Error(err)
			return
		}
		if err := g.Local()[0].Do(t.Context(), call(3)); err != nil || g.Local()[0].Properties().Epoch != 1 {
			t.Error(err)
		}
		g.Close()
	})
}

// TestRefused checks that the error names a type that NCCL lacks, and anything that is missing on the machine.
func TestRefused(t *testing.T) {
	fake(t)
	groups := processes(t, [][]int{{0}, {1}})
	inAll(groups, func(_ int, g collective.Group) {
		v := tensor.HostMemory(make([]int16, 4))
		err := g.Local()[0].Do(t.Context(), &collective.Call{Op: collective.AllReduce, Type: tensor.Int16, Src: v, Dst: v})
		if !errors.Is(err, collective.ErrInvalid) || !strings.Contains(err.Error(), "nccl cannot reduce int16") {
			t.Errorf("%v", err)
		}
		g.Close()
	})
	for _, c := range []struct{ variable, value, want string }{
		{"LOCKSTEP_NCCL", "/nowhere/libnccl.so", "install NCCL 2.23 or later, or set LOCKSTEP_NCCL to its path"},
		{"LOCKSTEP_CUDART", "/nowhere/libcudart.so", "install CUDA's runtime, or set LOCKSTEP_CUDART to its path"},
		{"FAKE_GPUS", "0", "CUDA finds no usable GPU"},
	} {
		t.Run(c.variable, func(t *testing.T) {
			t.Setenv(c.variable, c.value)
			if err := nccl.Available(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	t.Run("an old NCCL", func(t *testing.T) {
		fake(t, "-DncclCommInitRankScalable=ncclCommInitRank")
		if err := nccl.Available(); err == nil || !strings.Contains(err.Error(),
			"NCCL 2.23.4) has no ncclCommInitRankScalable: want NCCL 2.23 or later") {
			t.Errorf("%v", err)
		}
	})
}
