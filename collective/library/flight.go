package library

import (
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

// Every rank records its last calls, as the built-in communicators do (package collective's flight.go). A
// call between processes takes at least microseconds here, so each call is timed.

const (
	keptCalls = 256 // of each rank, in each communicator
	keptDims  = 4   // of a shape; a longer one is left out
)

// kept is the record of one call.
type kept struct {
	seq, turn  uint64
	op         collective.Op
	reduce     collective.ReduceOp
	dtype      collective.DType
	name       string
	count      int
	counts     []int
	dims       int // of shape; 0: none
	shape      [keptDims]int
	root, peer int
	start, end time.Time
	err        error
}

// callLog is the record of a rank's last calls; the member's mutex guards it.
type callLog struct {
	calls []kept       // the call of turn t is at t modulo keptCalls; nil: none yet
	used  uint64       // turn of the last one, plus 1
	waits uint64       // turn of the waiting call, plus 1
	of    func() []int // the ranks that it waits for, as far as known; nil: unknown
}

// keep records a call that begins.
func (m *member) keep(call *collective.Call, t ticket, count int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &m.callLog
	if d.calls == nil {
		d.calls = make([]kept, keptCalls)
	}
	k := &d.calls[t.turn%keptCalls]
	counts := append(k.counts[:0], call.Counts...)
	*k = kept{
		seq: t.seq, turn: t.turn, op: call.Op, reduce: call.Reduce, dtype: call.Type, count: count, counts: counts, root: call.Root, peer: call.Peer, start: time.Now(),
	}
	if c := call.Manifest; c != nil {
		k.name = c.Name
		if len(c.Shape) <= keptDims {
			k.dims = copy(k.shape[:], c.Shape)
		}
	}
	d.used = t.turn + 1
}

// blocks records that a call waits; missing returns the ranks that it waits for.
func (m *member) blocks(t ticket, missing func() []int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := &m.callLog; d.used == t.turn+1 {
		d.waits, d.of = d.used, missing
	}
}

// ended records the end of a call.
func (m *member) ended(t ticket, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &m.callLog
	if d.calls == nil {
		return
	}
	if k := &d.calls[t.turn%keptCalls]; k.turn == t.turn && k.op != 0 {
		k.end, k.err = time.Now(), err
	}
}

// Flight returns the rank's record.
func (m *member) Flight() flight.Rank {
	t := m.team
	out := flight.Rank{Comm: t.cfg.Name, Epoch: t.cfg.Epoch, Rank: m.rank, Size: t.size, World: t.world}
	if err := t.cause(); err != nil {
		out.Err = firstLine(err)
	}
	m.mu.Lock()
	of := m.callLog.of
	m.mu.Unlock()
	var missing []int
	if of != nil {
		missing = of() // locks the team
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &m.callLog
	out.Entered, out.Queued = m.seq, int(m.begun-max(d.used, m.over))
	for turn := d.used - min(d.used, uint64(len(d.calls))); turn < d.used; turn++ {
		k := &d.calls[turn%keptCalls]
		if k.turn != turn || k.op == 0 {
			continue // it ended before its turn
		}
		c := k.call(t.backend.Transport())
		waits := d.waits == turn+1
		switch {
		case k.err != nil:
			c.State, c.Err = flight.Failed, firstLine(k.err)
		case !k.end.IsZero():
			c.State = flight.Done
		case waits:
			c.State = flight.Waiting
		default:
			c.State = flight.Running
		}
		if c.State != flight.Done && waits {
			c.WaitsFor = missing
		}
		out.Calls = append(out.Calls, c)
	}
	return out
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// call returns the fields of a call that must agree, and its times.
func (k *kept) call(by string) flight.Call {
	c := flight.Call{Seq: k.seq, Op: k.op.String(), Name: k.name, Algorithm: by, Start: k.start, End: k.end}
	if k.op == collective.Send || k.op == collective.Recv {
		c.Pair, c.Peer = true, k.peer
	}
	if k.op.Reduces() {
		c.Reduce = k.reduce.String()
	}
	if k.op != collective.Barrier {
		c.DType, c.Count = k.dtype.String(), k.count
	}
	if sameShape(k.op) && k.dims > 0 {
		c.Shape = slices.Clone(k.shape[:k.dims])
	}
	if k.op.Rooted() && !c.Pair {
		c.Rooted, c.Root = true, k.root
	}
	if len(k.counts) > 0 {
		c.Counts = slices.Clone(k.counts)
	}
	return c
}

// Flights implements [collective.Recorded].
func (g *group) Flights() []flight.Rank {
	return g.team.book.All()
}

var _ collective.Recorded = (*group)(nil)

// within returns the ranks of the group that Open made which correspond to ranks of this team.
func (t *team) within(ranks []int) []int {
	out := slices.Clone(ranks)
	for i, r := range ranks {
		if t.world != nil {
			out[i] = t.world[r]
		}
	}
	return out
}
