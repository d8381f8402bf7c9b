package library_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/tensor"
)

// flights returns the records of all processes, as files of workers.
func flights(groups []collective.Group, replicas []int) []flight.File {
	var members []flight.Member
	first := 0
	for p, n := range replicas {
		members = append(members, flight.Member{Worker: p, Host: "h", PID: p + 1, First: first, Replicas: n})
		first += n
	}
	var files []flight.File
	for p, g := range groups {
		files = append(files, flight.File{
			Header: flight.Header{Version: 1, Job: "test", Worker: p, At: time.Now(), Members: members},
			Ranks:  g.Flights(),
		})
	}
	return files
}

// TestFlights: the ranks' records show which ranks are missing, and what differs.
func TestFlights(t *testing.T) {
	named := func(name string, n int) *collective.Call {
		c := sum(n)
		c.Manifest = &collective.Manifest{Name: name, Shape: []int{n}}
		return c
	}
	for _, c := range []struct {
		name     string
		replicas []int
		calls    func(rank, i int) *collective.Call // nil: it makes no more calls
		want     []string
	}{
		{
			"a process makes no call", []int{1, 2}, func(rank, i int) *collective.Call {
				if rank == 0 && i == 300 {
					return nil
				}
				return named("w", 3)
			}, []string{"all have completed call 299, all_reduce SUM float32 [3] of \"w\"", "rank 0 has not entered call 300"},
		},
		{
			"a local rank makes no call", []int{1, 2}, func(rank, i int) *collective.Call {
				if rank == 2 && i == 5 {
					return nil
				}
				return named("w", 3)
			}, []string{"rank 2 has not entered call 5", "for rank 2"},
		},
		{
			"another order", []int{1, 1}, func(rank, i int) *collective.Call {
				names := []string{"a", "b"}
				if rank == 1 && i == 7 {
					return named("a", 2)
				}
				return named(names[i%2], 2)
			}, []string{`the name differs: "b" and "a"`},
		},
		{
			"a receive without a send", []int{1, 1}, func(rank, i int) *collective.Call {
				if i < 3 {
					return named("w", 2)
				}
				dst := tensor.HostMemory(make([]float32, 1))
				return &collective.Call{Op: collective.Recv, Peer: 1 - rank, Type: tensor.Float32, Dst: dst}
			}, []string{"they wait for each other"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				groups := openGroups(t, c.replicas, collective.Config{Timeout: time.Minute})
				for _, g := range groups {
					for _, m := range g.Local() {
						go func() {
							for i := range 400 {
								call := c.calls(m.Rank(), i)
								if call == nil || m.Do(context.Background(), call) != nil {
									return
								}
							}
						}()
					}
				}
				time.Sleep(10 * time.Second) // the others wait
				var text strings.Builder
				if err := flight.Find(flights(groups, c.replicas)).Print(&text); err != nil {
					t.Fatal(err)
				}
				for _, want := range c.want {
					if !strings.Contains(text.String(), want) {
						t.Errorf("got\n%s\nwant %q", &text, want)
					}
				}
				for _, g := range groups {
					g.Local()[0].Abort(errors.New("the end of the test"))
				}
				synctest.Wait()
				for _, f := range flights(groups, c.replicas) { // also once all is over
					for _, r := range f.Ranks {
						if n := len(r.Calls); r.Err == "" || n > 256 || n < 4 {
							t.Errorf("rank %d remembers %d calls, and that it ended by %q", r.Rank, n, r.Err)
						}
					}
				}
				closeAll(t, groups)
			})
		})
	}
}

// TestFlightsOfSplits checks that communicators that were split off are recorded too, with their ranks in the group
// that was opened, but not once they were closed without a failure.
func TestFlightsOfSplits(t *testing.T) {
	replicas := []int{2, 1}
	groups := openGroups(t, replicas, collective.Config{})
	inAll(groups, func(_ int, g collective.Group) {
		done := make(chan error)
		for _, m := range g.Local() {
			go func() {
				sub, err := m.Split(t.Context(), 0, -m.Rank()) // the other way round
				if err == nil {
					err = sub.Do(t.Context(), sum(1))
				}
				if m.Rank() == 2 && err == nil {
					ranks := g.Flights()
					i := slices.IndexFunc(ranks, func(r flight.Rank) bool { return strings.HasSuffix(r.Comm, "/1.0") })
					if i < 0 || ranks[i].Rank != 0 || !slices.Equal(ranks[i].World, []int{2, 1, 0}) ||
						len(ranks[i].Calls) != 1 || ranks[i].Calls[0].State != flight.Done {
						t.Errorf("got %+v", ranks)
					}
				}
				if err == nil {
					err = sub.Close()
				}
				done <- err
			}()
		}
		for range g.Local() {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	for p, g := range groups {
		ranks := g.Flights()
		if len(ranks) != replicas[p] || len(ranks[0].Calls) != 1 || ranks[0].Entered != 1 {
			t.Errorf("process %d: %+v", p, ranks)
		}
	}
	closeAll(t, groups)
}
