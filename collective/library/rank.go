package library

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/tensor"
)

// team is what the local ranks of one communicator share.
type team struct {
	driver  Driver
	again   func(ctx context.Context) (Driver, error)
	ranks   [][]int // by process
	at      []place // by rank
	size    int
	members []*rank // the local ranks

	stage stage // used by the rank that executes a collective

	mu      sync.Mutex
	rounds  map[uint64]*round // rounds that not all local ranks have joined
	pairs   map[pair]*meeting // pairs of local ranks of which one has arrived
	splits  map[uint64]*split // splits whose result not all local ranks have taken
	rebuilt *team             // the same ranks in the next epoch
	closed  int               // closed members
}

// place is the location of a rank.
type place struct{ process, local int }

func newTeam(d Driver, ranks [][]int, again func(ctx context.Context) (Driver, error)) *team {
	t := &team{
		driver: d, again: again, ranks: ranks,
		rounds: map[uint64]*round{}, pairs: map[pair]*meeting{}, splits: map[uint64]*split{},
	}
	for _, own := range ranks {
		t.size += len(own)
	}
	t.at = make([]place, t.size)
	for p, own := range ranks {
		for i, r := range own {
			t.at[r] = place{p, i}
		}
	}
	for i, r := range ranks[d.Rank()] {
		t.members = append(t.members, &rank{team: t, rank: r, local: i})
	}
	return t
}

func (t *team) backends() []collective.Backend {
	out := make([]collective.Backend, len(t.members))
	for i, m := range t.members {
		out[i] = m
	}
	return out
}

// others returns the ranks of other processes.
func (t *team) others() []int {
	var out []int
	for r, at := range t.at {
		if at.process != t.driver.Rank() {
			out = append(out, r)
		}
	}
	return out
}

// rank is the backend of one rank.
type rank struct {
	front collective.FrontEnd
	team  *team
	rank  int
	local int
	lists joined
}

var _ collective.Backend = (*rank)(nil)

func (m *rank) Rank() int { return m.rank }

func (m *rank) Size() int { return m.team.size }

func (m *rank) Attach(f collective.FrontEnd) { m.front = f }

func (m *rank) Properties() collective.Properties {
	return collective.Properties{Transport: m.team.driver.Transport()}
}

// NewBuffer returns memory of the Go heap: the driver's memory is separate.
func (m *rank) NewBuffer(bytes int) (tensor.Memory, error) {
	return tensor.HostMemory(tensor.AlignedBytes(bytes, tensor.CacheLine)), nil
}

// Fail does nothing: no process notifies another.
func (m *rank) Fail(error) {}

func (m *rank) Run(r *collective.Running) error {
	if err := m.check(r); err != nil {
		return m.front.Error(r, collective.ErrInvalid, err)
	}
	if call := r.Call; call.SrcList != nil || call.DstList != nil {
		whole := *r
		whole.Call = m.lists.join(call)
		err := m.run(&whole)
		if err == nil {
			m.lists.split(call)
		}
		return err
	}
	return m.run(r)
}

// run executes a valid call without lists.
func (m *rank) run(r *collective.Running) error {
	m.front.Begin(r, m.team.driver.Transport())
	w := &wait{Running: r, m: m, print: m.fingerprint(r)}
	defer w.stop()
	if r.Call.Op.Pairwise() {
		return m.exchange(w)
	}
	return m.together(w)
}

// check validates what package collective does not know.
func (m *rank) check(r *collective.Running) error {
	name := m.team.driver.Transport()
	switch {
	case r.Options.Order == collective.Canonical:
		return fmt.Errorf("order Canonical was requested, but %s does not keep the canonical order of sums", name)
	case r.Options.Algorithm != "":
		return fmt.Errorf("algorithm %s was requested, but %s chooses its algorithms itself", r.Options.Algorithm, name)
	case r.Call.Op.Reduces() && len(m.team.ranks) > 1 && !m.team.driver.Reduces(wideType(r.Call.Type)):
		return fmt.Errorf("%s cannot reduce %v", name, r.Call.Type)
	}
	return nil
}

// fingerprint returns what all ranks of a call must agree on. The accumulation type has no effect here, and an
// empty Manifest is the same as none.
func (m *rank) fingerprint(r *collective.Running) fingerprint.Call {
	cfg, c := m.front.Config(), r.Call
	p := fingerprint.Params{
		Epoch: cfg.Epoch, Comm: fingerprint.HashString(fingerprint.Seed, cfg.Name), Op: c.Op, Reduce: c.Reduce,
		Type: c.Type, Count: r.Count, Counts: c.Counts, Root: c.Root, Peer: c.Peer,
		Order: r.Options.Order, Named: true,
	}
	if c.Manifest != nil {
		p.Name, p.Shape = c.Manifest.Name, c.Manifest.Shape
	}
	call := fingerprint.New(&p)
	call.Header.Seq = r.Seq()
	return call
}

// Rebuild makes a new driver for the first local rank, which the others share.
func (m *rank) Rebuild(ctx context.Context) (collective.Backend, error) {
	t := m.team
	if m.local == 0 {
		ctx, cancel := m.bounded(ctx)
		defer cancel()
		d, err := t.again(ctx)
		if err != nil {
			return nil, err
		}
		t.rebuilt = newTeam(d, t.ranks, t.again)
	}
	return t.rebuilt.members[m.local], nil
}

// Close closes the driver with the last local rank.
func (m *rank) Close() error {
	t := m.team
	t.mu.Lock()
	t.closed++
	last := t.closed == len(t.members)
	t.mu.Unlock()
	if !last {
		return nil
	}
	for _, s := range t.splits { // of ranks that failed, or whose context ended, in a Split
		s.close()
	}
	if m.front == (collective.FrontEnd{}) || m.front.Err() != nil {
		return t.driver.Close(context.Background(), false)
	}
	ctx, cancel := m.sound(context.Background())
	defer cancel()
	return t.driver.Close(ctx, true)
}

// bounded returns a context with the deadline of a call.
func (m *rank) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if limit := m.front.Config().Timeout; limit >= 0 {
		return context.WithTimeout(ctx, limit)
	}
	return context.WithCancel(ctx)
}

// sound returns a context that also ends when the communicator fails.
func (m *rank) sound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := m.bounded(ctx)
	ctx, end := context.WithCancelCause(ctx)
	over := make(chan struct{})
	go func() {
		select {
		case <-m.front.Failed():
			end(m.front.Err())
		case <-over:
		}
	}()
	return ctx, func() { close(over); end(nil); cancel() }
}

// outcome returns the kind of failure of an operation that the driver could not execute.
func outcome(err error) error {
	for _, k := range []error{collective.ErrMismatch, collective.ErrInvalid, collective.ErrTimeout} {
		if errors.Is(err, k) {
			return k
		}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return collective.ErrTimeout
	}
	return collective.ErrPeerLost
}
