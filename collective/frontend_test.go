package collective

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// idle is a backend of a rank that is never attached.
type idle struct {
	Backend
	rank, size int
}

func (b idle) Rank() int { return b.rank }

func (b idle) Size() int { return b.size }

// TestOpenChecksRanks checks that Open and OpenBackends refuse ranks that cannot be one communicator's.
func TestOpenChecksRanks(t *testing.T) {
	for says, local := range map[string][]idle{
		"at least one":                      nil,
		"1 belongs to a group of 3 ranks, ": {{rank: 0, size: 2}, {rank: 1, size: 3}},
		"s of rank 1":                       {{rank: 1, size: 2}, {rank: 1, size: 2}},
		"rank 2 in a group of 2 ranks":      {{rank: 0, size: 2}, {rank: 2, size: 2}},
		"rank -1 in a group of 2 ranks":     {{rank: -1, size: 2}},
	} {
		var backends []Backend
		var ends []transport.Endpoint
		for _, b := range local {
			backends, ends = append(backends, b), append(ends, misplaced{b: b})
		}
		if _, err := OpenBackends(backends, Config{}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("OpenBackends: %v, want an error with %q", err, says)
		}
		if _, err := Open(ends, Config{}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("Open: %v, want an error with %q", err, says)
		}
	}
}

// misplaced is the endpoint of a rank that may not exist.
type misplaced struct {
	transport.Endpoint
	b idle
}

func (e misplaced) Rank() int { return e.b.rank }

func (e misplaced) Size() int { return e.b.size }

// tracked is an endpoint of rank 0 or 1 whose Split fails on rank 1 as often as refuse says. open counts the endpoints
// that Split made and that are not closed.
type tracked struct {
	transport.Endpoint
	refuse, open *int
}

var errRefused = errors.New("no more endpoints")

func (e *tracked) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if e.Rank() == 1 && *e.refuse > 0 {
		*e.refuse--
		return nil, errRefused
	}
	end, err := e.Endpoint.Split(id, ranks)
	if err != nil {
		return nil, err
	}
	*e.open++
	return &tracked{Endpoint: end, refuse: e.refuse, open: e.open}, nil
}

func (e *tracked) Close() error {
	*e.open--
	return e.Endpoint.Close()
}

// TestRebuildFails checks that a Rebuild that fails on a later rank closes what it made for the ranks before, and that
// the next Rebuild then works.
func TestRebuildFails(t *testing.T) {
	refuse, open := 1, 0
	ends := mem.New(2)
	for i, e := range ends {
		ends[i] = &tracked{Endpoint: e, refuse: &refuse, open: &open}
		open++
	}
	g, err := Open(ends, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Rebuild(context.Background()); !errors.Is(err, errRefused) {
		t.Fatalf("%v, want %v", err, errRefused)
	}
	if open != 2 {
		t.Errorf("%d endpoints are open, want the 2 of the old group", open)
	}
	next, err := g.Rebuild(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	works(t, next)
	if err := next.Close(); err != nil || open != 0 {
		t.Errorf("%v; %d endpoints are open, want none", err, open)
	}
}

// TestRebuildTwice checks that two groups that were rebuilt from the same group share nothing.
func TestRebuildTwice(t *testing.T) {
	g := openFlights(t, 2, Config{})
	var groups []Group
	for range 2 {
		next, err := g.Rebuild(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		groups = append(groups, next)
		works(t, next)
		if n := len(next.(*group).members[0].backend.(*planBackend).team.executors.Ranks()); n != 2 {
			t.Errorf("a team of %d ranks, want 2", n)
		}
	}
	groups[1].Local()[0].Abort(errors.New("enough"))
	works(t, groups[0])
}

// works checks that a group executes a call.
func works(t *testing.T, g Group) {
	t.Helper()
	errs := onEach(g, func(c Communicator) error { return c.Do(context.Background(), sumOf("x", 3)) })
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// TestInvalidCallIsNotEntered checks that peers never see a rank as having entered a call that is invalid.
func TestInvalidCallIsNotEntered(t *testing.T) {
	for _, call := range []*Call{
		{Op: AllReduce, Type: tensor.Float32, Options: &Options{Algorithm: "none"}},
		{Op: AllReduce, Type: tensor.Float32, Reduce: Prod + 1},
	} {
		g := openFlights(t, 2, Config{})
		works(t, g)
		c := g.Local()[0].(*communicator)
		if err := c.Do(context.Background(), call); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v, want ErrInvalid", err)
		}
		if s := c.backend.(*planBackend).calls.state(fault.LatestCall); s.Entered != 1 {
			t.Errorf("%d collectives entered, want 1", s.Entered)
		}
		calls := c.flight().Calls
		if !slices.ContainsFunc(calls, func(k flight.Call) bool { return k.Err != "" }) {
			t.Errorf("calls %v: want the invalid one among them", calls)
		}
	}
}
