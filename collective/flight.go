package collective

import (
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
)

// Recorded is a [Group] whose ranks record their last calls, also those of communicators that were split off.
// The groups of [Open] implement it.
type Recorded interface {
	Group
	// Flights returns the records of the local ranks, by communicator. Any goroutine may call it at any time.
	// It does not wait for a call.
	Flights() []flight.Rank
}

const (
	keptCalls  = 256       // of each rank, in each communicator; a power of two
	timedBytes = 256 << 10 // a call that transfers as much is timed: it takes longer than reading the clock
	timedEvery = 64        // one in this many calls is timed, among those that neither transfer much nor wait
)

// kept is the record of one call: one cache line. It is written where the call is noted, under the same lock.
// Reading the clock costs more than that: see timedBytes.
type kept struct {
	ticket
	sig        *signature    // nil: no call yet
	start, end time.Duration // since the member was made; 0: unknown
	err        error         // the failure
	_          [8]byte
}

// callLog is the record of a rank's last calls; textMu guards it.
type callLog struct {
	began time.Time
	calls []kept // the call of turn t is at t modulo keptCalls; nil: none yet
	used  uint64 // turn of the last one, plus 1

	entered uint64 // collectives that were noted
	waits   uint64 // turn of the waiting call, plus 1
	of      []int  // the ranks that it waits for
}

// now returns the time since the member was made. It is never 0.
func (d *callLog) now() time.Duration { return max(time.Since(d.began), 1) }

// keep records a call that begins.
func (d *callLog) keep(t ticket, s *signature) {
	if d.calls == nil {
		d.calls = make([]kept, keptCalls)
	}
	k := &d.calls[t.turn%keptCalls]
	*k = kept{ticket: t, sig: s}
	if t.turn%timedEvery == 0 || s.count >= timedBytes || s.byteCount >= timedBytes {
		k.start = d.now()
	}
	d.used = t.turn + 1
}

// keepOdd records an invalid call, which is never executed.
func (x *executor) keepOdd(call *Call, t ticket, o *Options) {
	s := unsigned(call, keyOf(call, o, nil), 0)
	x.textMu.Lock()
	x.callLog.keep(t, s)
	x.textMu.Unlock()
}

// blocks records that the current call waits, and for which ranks.
func (m *member) blocks(now time.Time) {
	m.textMu.Lock()
	d := &m.callLog
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

// wakes records that the current call no longer waits. A failing call counts as waiting until it has ended.
func (m *member) wakes() {
	m.textMu.Lock()
	m.callLog.waits = 0
	m.textMu.Unlock()
}

// ended records the end of the current call, if it was timed or has failed.
func (x *executor) ended(t ticket, err error) {
	d := &x.callLog
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

// Flight returns the rank's record.
func (m *member) Flight() flight.Rank {
	t := m.team
	out := flight.Rank{Comm: t.cfg.Name, Epoch: t.cfg.Epoch, Rank: m.rank, Size: t.size, World: t.world}
	m.textMu.Lock()
	d := &m.callLog
	calls := slices.Clone(d.calls)
	used, waits, of := d.used, d.waits, slices.Clone(d.of)
	m.textMu.Unlock()
	m.mu.Lock() // read after the calls: a call that had ended by then counts as ended
	over, next := m.turn, m.next
	out.Entered = m.numbers[0].of(0)
	m.mu.Unlock()
	if err := t.cause(); err != nil {
		out.Err = firstLine(err)
	}
	for turn := used - min(used, uint64(len(calls))); turn < used; turn++ {
		k := &calls[turn%keptCalls]
		if k.turn != turn || k.sig == nil || k.sig.key.op == 0 {
			continue // it ended before it began, or there were fewer calls
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

// call returns the fields of a call that must agree, and its progress.
func (k *kept) call(began time.Time) flight.Call {
	sig := k.sig
	key := &sig.key
	must := fingerprint.Agreed(key.op)
	c := flight.Call{Seq: k.seq, Op: key.op.String(), Name: key.name}
	if key.op == Send || key.op == Recv {
		c.Pair, c.Peer = true, key.peer
	}
	if must.Has(fingerprint.Reduce) {
		c.Reduce = key.reduce.String()
	}
	if must.Has(fingerprint.Type) {
		c.DType = key.dtype.String()
	}
	if must.Has(fingerprint.Count) {
		c.Count = sig.count
	}
	if must.Has(fingerprint.Shape) && len(sig.shape) > 0 {
		c.Shape = slices.Clone(sig.shape)
	}
	if p := key.plan; p != nil {
		c.Algorithm = p.row.Name
		if must.Has(fingerprint.Root) {
			c.Rooted, c.Root = true, p.problem.Root
		}
		if must.Has(fingerprint.Counts) {
			c.Counts = p.problem.Counts
		}
	}
	if must.Has(fingerprint.Order) && (key.order == Any || key.accumulate == AccumulateFloat32) {
		c.Order = "canonical"
		if key.order == Any {
			c.Order = "any"
		}
		if key.accumulate == AccumulateFloat32 {
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
