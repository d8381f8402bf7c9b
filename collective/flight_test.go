package collective

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

func openFlights(t testing.TB, size int, cfg Config) Group {
	g, err := Open(mem.New(size), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

func sumOf(name string, dims ...int) *Call {
	n := 1
	for _, d := range dims {
		n *= d
	}
	x := tensor.HostMemory(make([]float32, n))
	return &Call{Op: AllReduce, Type: tensor.Float32, Src: x, Dst: x, Manifest: &Manifest{Name: name, Shape: dims}}
}

// onEach runs f for each local rank, each on a separate goroutine.
func onEach(g Group, f func(c Communicator) error) []error {
	errs := make([]error, len(g.Local()))
	var ranks sync.WaitGroup
	for i, c := range g.Local() {
		ranks.Go(func() { errs[i] = f(c) })
	}
	ranks.Wait()
	return errs
}

// flightOf returns the record of a rank of a communicator.
func flightOf(t *testing.T, g Group, comm string, rank int) flight.Rank {
	t.Helper()
	for _, r := range g.Flights() {
		if r.Comm == comm && r.Rank == rank {
			return r
		}
	}
	t.Fatalf("no record of rank %d of %q", rank, comm)
	return flight.Rank{}
}

// TestFlights checks that each rank records its last calls, with their properties, in its communicator and in those
// made by Split.
func TestFlights(t *testing.T) {
	g := openFlights(t, 3, Config{})
	background := context.Background()
	for _, err := range onEach(g, func(c Communicator) error {
		for i := range 300 {
			if err := c.Do(background, sumOf(fmt.Sprint("w", i), 2, 3)); err != nil {
				return err
			}
		}
		part, err := c.Split(background, min(c.Rank(), 1), -c.Rank())
		if err != nil {
			return err
		}
		return part.Do(background, &Call{
			Op: Broadcast, Type: tensor.Int32, Root: 0,
			Src: tensor.HostMemory([]int32{1}), Dst: tensor.HostMemory(make([]int32, 1)),
		})
	}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	r := flightOf(t, g, "world", 1)
	if len(r.Calls) != keptCalls || r.Entered != 301 || r.Queued != 0 || r.Err != "" || r.Size != 3 || r.World != nil {
		t.Errorf("got %d calls of %d, %d queued, err %q, world %v", len(r.Calls), r.Entered, r.Queued, r.Err, r.World)
	}
	for i, c := range r.Calls[:len(r.Calls)-1] {
		seq := 301 - keptCalls + i
		if want := fmt.Sprintf(`all_reduce SUM float32 [2 3] of "w%d"`, seq); c.String() != want || c.Seq != uint64(seq) ||
			c.State != flight.Done || c.Algorithm == "" {
			t.Fatalf("call %d is %v, %s, by %q: want %s", c.Seq, &c, c.State, c.Algorithm, want)
		}
		if c.Start.IsZero() != c.End.IsZero() || c.End.Before(c.Start) {
			t.Errorf("call %d from %v to %v", c.Seq, c.Start, c.End)
		}
	}
	part := flightOf(t, g, "world/1.1", 0) // the higher one, by its key
	if !slices.Equal(part.World, []int{2, 1}) || len(part.Calls) != 1 ||
		part.Calls[0].String() != "broadcast int32 [1] from rank 0" {
		t.Errorf("the split has %+v", part)
	}
}

// TestFlightsOfFailure checks that the records show what differs, which ranks are missing, and which ranks wait, also
// after Rebuild.
func TestFlightsOfFailure(t *testing.T) {
	g := openFlights(t, 2, Config{})
	background := context.Background()
	errs := onEach(g, func(c Communicator) error {
		if err := c.Do(background, sumOf("a", 4)); err != nil {
			return err
		}
		return c.Do(background, sumOf("b", 4+c.Rank()))
	})
	if !errors.Is(errs[0], ErrMismatch) {
		t.Fatal(errs)
	}
	next, err := g.Rebuild(background)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	report := flight.Find([]flight.File{{Ranks: next.Flights()}})
	if len(report.Parts) != 2 {
		t.Fatalf("%d communicators: %+v", len(report.Parts), report)
	}
	p := report.Parts[0]
	if p.Kind != flight.Differ || p.At != 1 || p.Field != "shape" || p.Common != 1 || p.Epoch != 0 {
		t.Errorf("%s at %d in %q after %d of epoch %d", p.Kind, p.At, p.Field, p.Common, p.Epoch)
	}
	if !strings.Contains(p.Rows[0].Text, "failed in call 1") ||
		!strings.HasPrefix(p.Text[0], `rank 0 calls all_reduce SUM float32 [4] of "b"`) {
		t.Error(p.Rows[0].Text, p.Text)
	}
	onEach(next, func(c Communicator) error {
		if c.Rank() == 1 {
			return c.Do(background, &Call{
				Op: AllGather, Type: tensor.Float32,
				Src: tensor.HostMemory([]float32{1}), Dst: tensor.HostMemory([]float32{1, 2, 3}),
			})
		}
		return nil
	})
	report = flight.Find([]flight.File{{Ranks: next.Flights()}})
	if text := report.Parts[1].Rows[1].Text; !strings.Contains(text, "failed in call 0") ||
		!strings.Contains(text, "all_gather: invalid argument") {
		t.Error(text)
	}
}

// TestFlightsWhileCalled checks that any goroutine may read the records at any time, and sees a waiting call and the
// ranks that it waits for. (The race detector verifies this.)
func TestFlightsWhileCalled(t *testing.T) {
	g := openFlights(t, 3, Config{})
	background := context.Background()
	release := make(chan struct{})
	done := make(chan []error)
	go func() {
		done <- onEach(g, func(c Communicator) error {
			for i := range 1000 {
				if i == 500 && c.Rank() == 2 {
					<-release
				}
				if err := c.Do(background, sumOf("w", 16)); err != nil {
					return err
				}
			}
			return nil
		})
	}()
	waits := func(rank int) bool {
		r := flightOf(t, g, "world", rank)
		n := len(r.Calls)
		return n > 0 && r.Calls[n-1].State == flight.Waiting && r.Calls[n-1].Seq == 500 &&
			slices.Contains(r.Calls[n-1].WaitsFor, 2)
	}
	for !waits(0) || !waits(1) {
		time.Sleep(time.Millisecond)
	}
	p := flight.Find([]flight.File{{Ranks: g.Flights()}}).Parts[0]
	if p.Kind != flight.Absent || !slices.Equal(p.Blamed, []int{2}) || p.At != 500 {
		t.Errorf("%s: %v at %d", p.Kind, p.Blamed, p.At)
	}
	close(release)
	for {
		select {
		case errs := <-done:
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
			return
		default:
			g.Flights()
		}
	}
}

// BenchmarkKeep measures the cost of recording a call that does not wait.
func BenchmarkKeep(b *testing.B) {
	g := openFlights(b, 1, Config{})
	c := g.Local()[0].(*communicator)
	x := c.backend.(*planBackend)
	r := &Running{Call: sumOf("layers/0/kernel", 8, 8), Count: 64}
	c.group.cfg.options(&r.Options, r.Call)
	if err := x.prepare(r); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		x.calls.note(r, x.signer.last, &x.diagnosis.begun)
		c.log.ended(r, nil)
		r.turn++
		r.seq++
	}
}
