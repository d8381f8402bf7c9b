package collective

import (
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
)

// Recorded is a [Group] whose ranks remember their last calls, those of the communicators that were split off too. Those of
// [Open] are.
type Recorded interface {
	Group
	// Flights returns what the local ranks remember, by communicator, to any goroutine at any time. It does not wait for a call.
	Flights() []flight.Rank
}

const (
	keptCalls  = 256       // of each rank, in each communicator; a power of two
	keptDims   = 4         // of a shape; a longer one is left out
	timedBytes = 256 << 10 // a call that moves as much is timed: it takes longer than to look at the clock
	timedEvery = 64        // and each so many calls, for those that neither move much nor wait
)

// kept is what a rank remembers of a call. It is written where the call's text is, under the same lock, so it costs no more than
// the copying. A look at the clock costs more than that: see timedBytes.
type kept struct {
	ticket
	plan       *planned // nil: a call of two ranks, or one that is wrong
	name       string
	op         Op
	reduce     ReduceOp
	dtype      DType
	order      Order
	accumulate Accumulate
	dims       uint8 // of shape
	shape      [keptDims]int
	count      int
	peer       int
	start, end time.Duration // since the member was made; 0: not known
	err        error         // how it failed
}

// diary is a rank's last calls; textMu guards it.
type diary struct {
	began time.Time
	calls []kept // the one of turn t at t modulo keptCalls; nil: there was none yet
	used  uint64 // turn of the last one, and 1

	come  uint64 // collectives that were noted
	waits uint64 // turn of the call that waits, and 1
	of    []int  // the ranks that it waits for
}

// now is the time since the member was made. It is never 0.
func (d *diary) now() time.Duration { return max(time.Since(d.began), 1) }

// keep remembers a call that begins.
func (d *diary) keep(call *Call, t ticket, count int, o *Options, p *planned) {
	if d.calls == nil {
		d.calls = make([]kept, keptCalls)
	}
	k := &d.calls[t.turn%keptCalls]
	k.ticket, k.plan, k.count, k.peer, k.err = t, p, count, call.Peer, nil
	k.op, k.reduce, k.dtype, k.order, k.accumulate = call.Op, call.Reduce, call.Type, o.Order, o.Accumulate
	k.name, k.dims = "", 0
	if m := call.Manifest; m != nil {
		k.name = m.Name
		if n := len(m.Shape); n <= keptDims {
			k.dims = uint8(n)
			copy(k.shape[:], m.Shape)
		}
	}
	k.start, k.end = 0, 0
	if t.turn%timedEvery == 0 || count >= timedBytes || count*call.Type.Bytes() >= timedBytes {
		k.start = d.now()
	}
	d.used = t.turn + 1
}

// keepOdd remembers a call that is wrong by itself, which is never carried out.
func (x *executor) keepOdd(call *Call, t ticket, o *Options) {
	x.textMu.Lock()
	x.diary.keep(call, t, 0, o, nil)
	x.textMu.Unlock()
}

// blocks remembers that the current call waits, and for whom.
func (m *member) blocks(now time.Time) {
	m.textMu.Lock()
	d := &m.diary
	if d.used == m.wait.turn+1 {
		k := &d.calls[m.wait.turn%keptCalls]
		if k.start == 0 {
			k.start = max(now.Sub(d.began), 1)
		}
		d.waits = d.used
		d.of = m.missingIn(d.of[:0])
	}
	m.textMu.Unlock()
}

// wakes remembers that the current call waits no longer. One that fails goes on waiting until it is over.
func (m *member) wakes() {
	m.textMu.Lock()
	m.diary.waits = 0
	m.textMu.Unlock()
}

// ended remembers the end of the current call, if it was timed or has failed.
func (x *executor) ended(t ticket, err error) {
	d := &x.diary
	if err == nil && d.calls[t.turn%keptCalls].start == 0 { // only this goroutine writes it
		return
	}
	now := d.now()
	x.textMu.Lock()
	if k := &d.calls[t.turn%keptCalls]; d.used == t.turn+1 {
		k.end, k.err = now, err
	}
	x.textMu.Unlock()
}

// Flight returns what the rank remembers.
func (m *member) Flight() flight.Rank {
	t := m.team
	out := flight.Rank{Comm: t.cfg.Name, Epoch: t.cfg.Epoch, Rank: m.rank, Size: t.size, World: t.world}
	m.textMu.Lock()
	d := &m.diary
	calls := slices.Clone(d.calls)
	used, waits, of := d.used, d.waits, slices.Clone(d.of)
	m.textMu.Unlock()
	m.mu.Lock() // after the calls: what was over by then is over
	over, next := m.turn, m.next
	out.Entered = m.numbers[0].of(0)
	m.mu.Unlock()
	if err := t.cause(); err != nil {
		out.Err = firstLine(err)
	}
	for turn := used - min(used, uint64(len(calls))); turn < used; turn++ {
		k := &calls[turn%keptCalls]
		if k.turn != turn || k.op == 0 {
			continue // it ended before it began, or has not been so many yet
		}
		c := k.call(d.began)
		switch {
		case k.err != nil:
			c.State, c.Err = flight.Failed, firstLine(k.err)
		case turn < over:
			c.State = flight.Done
		case waits == turn+1:
			c.State = flight.Waiting
		default:
			c.State = flight.Running
		}
		if c.State != flight.Done && waits == turn+1 {
			c.WaitsFor = of
		}
		out.Calls = append(out.Calls, c)
	}
	out.Queued = int(next - max(used, over))
	return out
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// call returns what must agree of a call, and how it went.
func (k *kept) call(began time.Time) flight.Call {
	must := field(0)
	if int(k.op) < len(agreed) {
		must = agreed[k.op]
	}
	c := flight.Call{Seq: k.seq, Op: k.op.String(), Name: k.name}
	if k.op == Send || k.op == Recv {
		c.Pair, c.Peer = true, k.peer
	}
	if must&fieldReduce != 0 {
		c.Reduce = k.reduce.String()
	}
	if must&fieldType != 0 {
		c.DType = k.dtype.String()
	}
	if must&fieldCount != 0 {
		c.Count = k.count
	}
	if must&fieldShape != 0 && k.dims > 0 {
		c.Shape = slices.Clone(k.shape[:k.dims])
	}
	if p := k.plan; p != nil {
		c.Algorithm = p.row.Name
		if must&fieldRoot != 0 {
			c.Rooted, c.Root = true, p.problem.Root
		}
		if must&fieldCounts != 0 {
			c.Counts = p.problem.Counts
		}
	}
	if must&fieldOrder != 0 && (k.order == Any || k.accumulate == AccumulateFloat32) {
		c.Order = "canonical"
		if k.order == Any {
			c.Order = "any"
		}
		if k.accumulate == AccumulateFloat32 {
			c.Order += ", in float32"
		}
	}
	if k.start > 0 {
		c.Start = began.Add(k.start)
	}
	if k.end > 0 {
		c.End = began.Add(k.end)
	}
	return c
}

func (g *group) Flights() []flight.Rank { return g.team.book.All() }

var _ Recorded = (*group)(nil)

// within returns the numbers that ranks of this team have in the group that Open made.
func (t *team) within(ranks []int) []int {
	out := slices.Clone(ranks)
	for i, r := range ranks {
		if t.world != nil {
			out[i] = t.world[r]
		}
	}
	return out
}
