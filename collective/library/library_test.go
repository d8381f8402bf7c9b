package library_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/librarytest"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// inAll runs f for each process at the same time.
func inAll(groups []collective.Group, f func(p int, g collective.Group)) {
	var wg sync.WaitGroup
	for p, g := range groups {
		wg.Go(func() { f(p, g) })
	}
	wg.Wait()
}

func openGroups(t *testing.T, replicas []int, cfg collective.Config) []collective.Group {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	groups, err := librarytest.Open(replicas, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return groups
}

func closeAll(t *testing.T, groups []collective.Group) {
	inAll(groups, func(p int, g collective.Group) {
		if err := g.Close(); err != nil {
			t.Errorf("process %d: Close: %v", p, err)
		}
	})
}

// TestExercise: every operation of every dtype, however replicas are spread.
func TestExercise(t *testing.T) {
	types := []tensor.DType{tensor.Int8, tensor.Uint64, tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64}
	for _, replicas := range [][]int{{1}, {3}, {1, 1}, {2, 1}, {1, 3, 2}} {
		seed := rand.Uint64()
		groups := openGroups(t, replicas, collective.Config{})
		inAll(groups, func(p int, g collective.Group) {
			done, err := librarytest.Exercise(t.Context(), g, seed, 9*3*len(types), types)
			if err != nil {
				t.Errorf("replicas %v, process %d: %v", replicas, p, err)
				g.Local()[0].Abort(err)
			}
			if err == nil && done["all_reduce"] != 3*len(types) {
				t.Errorf("%v", done)
			}
		})
		if t.Failed() {
			return
		}
		closeAll(t, groups)
	}
}

func sum(n int) *collective.Call {
	return &collective.Call{
		Op: collective.AllReduce, Type: tensor.Float32,
		Src: tensor.HostMemory(make([]float32, n)), Dst: tensor.HostMemory(make([]float32, n)),
		Manifest: &collective.Manifest{Name: "gradients"},
	}
}

// TestMismatch: what differs is said on all ranks, whether it is in one process or between two.
func TestMismatch(t *testing.T) {
	for name, c := range map[string]struct {
		replicas []int
		lengths  []int // by rank
		wants    []string
	}{
		"processes": {[]int{1, 2}, []int{4, 5, 5}, []string{
			`rank 0 calls all_reduce SUM float32 [4] of "gradients"`, "ranks 1, 2 call all_reduce SUM float32 [5]",
		}},
		"one process": {[]int{2, 1}, []int{4, 5, 4}, []string{
			"rank 0 calls all_reduce SUM float32 [4]", "but rank 1 calls all_reduce SUM float32 [5]",
			": the shapes differ",
		}},
		"alone": {[]int{2}, []int{4, 5}, []string{
			"rank 0 calls all_reduce SUM float32 [4]", "but rank 1 calls all_reduce SUM float32 [5]",
			": the shapes differ",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			groups := openGroups(t, c.replicas, collective.Config{})
			inAll(groups, func(_ int, g collective.Group) {
				calls := make([]collective.Call, len(g.Local()))
				for i, m := range g.Local() {
					calls[i] = *sum(c.lengths[m.Rank()])
				}
				err := g.DoAll(t.Context(), calls)
				for _, want := range append(c.wants, "gradients", "mismatch") {
					if !errors.Is(err, collective.ErrMismatch) || !strings.Contains(err.Error(), want) {
						t.Errorf("%v, want %q", err, want)
					}
				}
				if g.Local()[0].Err() == nil {
					t.Error("the communicator is not poisoned")
				}
			})
			closeAll(t, groups)
		})
	}
}

// TestPairMismatch checks that the error says how the calls of two local ranks differ.
func TestPairMismatch(t *testing.T) {
	g := openGroups(t, []int{2}, collective.Config{})[0]
	send, receive := sum(3), sum(4)
	send.Op, send.Peer, receive.Op, receive.Peer = collective.Send, 1, collective.Recv, 0
	err := g.DoAll(t.Context(), []collective.Call{*send, *receive})
	if !errors.Is(err, collective.ErrMismatch) || !strings.HasSuffix(err.Error(), ": the shapes differ") {
		t.Errorf("%v, want a mismatch of the shapes", err)
	}
	closeAll(t, []collective.Group{g})
}

// TestAgree checks that calls agree which differ only in what has no effect here, whatever the tensor's name.
func TestAgree(t *testing.T) {
	for name, change := range map[string]func(*collective.Call){
		"accumulation type": func(c *collective.Call) {
			c.Options = &collective.Options{Accumulate: collective.AccumulateFloat32}
		},
		"empty manifest": func(c *collective.Call) { c.Manifest = &collective.Manifest{} },
		"shape":          func(c *collective.Call) { c.Manifest = &collective.Manifest{Shape: []int{3}} },
	} {
		for _, replicas := range [][]int{{2}, {1, 1}} {
			t.Run(fmt.Sprint(name, replicas), func(t *testing.T) {
				groups := openGroups(t, replicas, collective.Config{})
				inAll(groups, func(_ int, g collective.Group) {
					calls := make([]collective.Call, len(g.Local()))
					for i, m := range g.Local() {
						calls[i] = *sum(3)
						if calls[i].Manifest = nil; m.Rank() == 1 {
							change(&calls[i])
						}
					}
					if err := g.DoAll(t.Context(), calls); err != nil {
						t.Error(err)
					}
					for i := range calls {
						calls[i].Manifest = &collective.Manifest{Name: "one, but not the other"}
					}
					if err := g.DoAll(t.Context(), calls); err != nil {
						t.Error(err)
					}
				})
				closeAll(t, groups)
			})
		}
	}
}

// TestEnds: waits end at the deadline, with the context, by Abort and by Close; the error names the missing ranks.
func TestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(cancel context.CancelFunc, m collective.Communicator)
		kind error
		says string
	}{
		"deadline": {
			func(context.CancelFunc, collective.Communicator) {},
			collective.ErrTimeout, "rank 0 waited 10s for ",
		},
		"context": {
			func(cancel context.CancelFunc, _ collective.Communicator) { cancel() },
			context.Canceled, "rank 0 waited 3s for ",
		},
		"abort": {
			func(_ context.CancelFunc, m collective.Communicator) { m.Abort(errors.New("enough")) },
			collective.ErrAborted, "enough",
		},
		"close": {
			func(_ context.CancelFunc, m collective.Communicator) { go m.Close() },
			collective.ErrClosed, "",
		},
	} {
		for where, replicas := range map[string][]int{"a process": {1, 1}, "a local rank": {2, 1}} {
			t.Run(name+" for "+where, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					groups := openGroups(t, replicas, collective.Config{Timeout: 10 * time.Second, Stall: time.Second})
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					m := groups[0].Local()[0]
					time.AfterFunc(3*time.Second, func() { c.end(cancel, m) })
					err := m.Do(ctx, sum(3))
					if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) {
						t.Errorf("%v, want %v with %q", err, c.kind, c.says)
					}
					if name == "deadline" {
						want := "for other processes (in-process does not report which) in all_reduce SUM float32 [3]"
						if replicas[0] == 2 {
							want = "for rank 1 in all_reduce SUM float32 [3]"
						}
						if !strings.Contains(err.Error(), want) {
							t.Errorf("%v, want %q", err, want)
						}
						if again := m.Do(ctx, sum(3)); !errors.Is(again, err) && again.Error() != err.Error() {
							t.Errorf("a later call: %v, want the first cause %v", again, err)
						}
					}
					for _, g := range groups {
						g.Local()[0].Abort(errors.New("the end of the test"))
						g.Close()
					}
				})
			})
		}
	}
}

// TestRefused: what this cannot do is refused by name.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		change func(*collective.Call)
		says   string
	}{
		{func(c *collective.Call) {
			c.Options = &collective.Options{Order: collective.Canonical}
		}, "does not keep the canonical order of sums"},
		{func(c *collective.Call) { c.Options = &collective.Options{Algorithm: "ring"} }, "chooses its algorithms itself"},
		{func(c *collective.Call) {
			c.Type, c.Src, c.Dst = tensor.Int16, tensor.HostMemory(make([]int16, 2)), tensor.HostMemory(make([]int16, 2))
		}, "cannot reduce int16"},
		{func(c *collective.Call) { c.Dst = tensor.Memory{} }, "want as many"},
	} {
		groups := openGroups(t, []int{1, 1}, collective.Config{})
		call := sum(3)
		c.change(call)
		err := groups[0].Local()[0].Do(t.Context(), call)
		if !errors.Is(err, collective.ErrInvalid) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %q", err, c.says)
		}
		groups[1].Local()[0].Abort(nil)
		closeAll(t, groups)
	}
	var none context.Context
	for name, call := range map[string]func(collective.Group) error{
		"Do, no context": func(g collective.Group) error { return g.Local()[0].Do(none, sum(3)) },
		"Do, no call":    func(g collective.Group) error { return g.Local()[0].Do(t.Context(), nil) },
		"Start": func(g collective.Group) error {
			_, err := g.Local()[0].Start(t.Context(), nil)
			return err
		},
		"DoAll": func(g collective.Group) error { return g.DoAll(none, []collective.Call{*sum(3), *sum(3)}) },
	} {
		groups := openGroups(t, []int{2}, collective.Config{})
		if err := call(groups[0]); !errors.Is(err, collective.ErrInvalid) || !strings.Contains(err.Error(), "a call ") {
			t.Errorf("%s: %v, want an invalid call", name, err)
		}
		closeAll(t, groups)
	}
	_, err := librarytest.Open([]int{1, 1}, collective.Config{Order: collective.Canonical})
	if err == nil || !strings.Contains(err.Error(), `configuration of "world"`) ||
		!strings.Contains(err.Error(), "want Order: Any") {
		t.Errorf("%v", err)
	}
}
