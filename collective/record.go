package collective

import (
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
)

const (
	keptCalls  = 256       // of each rank, in each communicator; a power of two
	timedBytes = 256 << 10 // a call that transfers as much is timed: it takes longer than reading the clock
	timedEvery = 64        // one in this many calls is timed, among those that neither transfer much nor wait
)

// kept is the record of one call: one cache line. Reading the clock costs more than writing it: see timedBytes.
type kept struct {
	ticket
	call       *flight.Call  // shared by the calls that are alike; nil: no call yet
	start, end time.Duration // since the log was opened; 0: unknown
	err        error         // the failure
	_          [8]byte
}

// callLog is the record of a rank's last calls. Its lock also guards what a backend notes when a call begins.
type callLog struct {
	mu    sync.Mutex
	began time.Time // 1 ns before the log was opened, so that no later moment is 0
	calls []kept    // the call of turn t is at t modulo keptCalls; nil: none yet
	used  uint64    // turn of the last one, plus 1
	timed bool      // the last one has a start, so its end is recorded; only the goroutine that executes calls uses it

	waits uint64 // turn of the waiting call, plus 1
	of    []int  // the ranks that it waits for

	// missing returns them if they change while the call waits; nil: of is valid. It may lock, so it is called
	// without mu. Only the goroutine that executes calls sets it.
	missing func() []int
}

// now returns the time since the log was opened. It is never 0.
func (d *callLog) now() time.Duration { return time.Since(d.began) }

// add adds the record of a call, which begins. The caller holds the lock.
func (d *callLog) add(r *Running, call *flight.Call, timed bool) {
	if d.calls == nil {
		d.calls = make([]kept, keptCalls)
	}
	k := &d.calls[r.turn%keptCalls]
	k.ticket, k.call, k.start, k.end, k.err = r.ticket, call, 0, 0, nil
	if d.timed = timed || r.turn%timedEvery == 0; d.timed {
		k.start = d.now()
	}
	d.used = r.turn + 1
}

// waitsFor records that the call of a turn waits, and for which ranks: see [FrontEnd.Waits].
func (d *callLog) waitsFor(turn uint64, since time.Duration, ranks []int, missing func() []int) {
	d.mu.Lock()
	if d.used == turn+1 {
		if k := &d.calls[turn%keptCalls]; k.start == 0 {
			k.start, d.timed = since, true
		}
		d.waits = d.used
		d.of, d.missing = append(d.of[:0], ranks...), missing
	}
	d.mu.Unlock()
}

// resumes records that the last call no longer waits.
func (d *callLog) resumes() {
	d.mu.Lock()
	d.waits, d.missing = 0, nil
	d.mu.Unlock()
}

// ended records the end of a call, if it was timed or has failed. A call that has failed without beginning is
// recorded now. Only the goroutine that executes calls calls it.
func (d *callLog) ended(r *Running, err error) {
	if d.timed || err != nil {
		d.end(r, err)
	}
}

func (d *callLog) end(r *Running, err error) {
	began := d.used == r.turn+1
	if err == nil && !began {
		return
	}
	end := d.now()
	var of []int
	if d.missing != nil {
		of = d.missing()
	}
	d.mu.Lock()
	if d.missing != nil {
		d.of, d.missing = of, nil
	}
	if !began {
		record := newRecord(r.Call, 0, &r.Options, "")
		d.add(r, &record, false)
	}
	k := &d.calls[r.turn%keptCalls]
	k.end, k.err = end, err
	d.mu.Unlock()
}

// latest describes the last call, in the form used in errors.
func (d *callLog) latest() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.used == 0 {
		return ""
	}
	return d.calls[(d.used-1)%keptCalls].call.String()
}

// record returns the record of a call, without its state. began is when the log was opened.
func (k *kept) record(began time.Time) flight.Call {
	c := *k.call
	c.Seq = k.seq
	c.Shape, c.Counts = slices.Clone(c.Shape), slices.Clone(c.Counts)
	if k.start > 0 {
		c.Start = began.Add(k.start)
	}
	if k.end > 0 {
		c.End = began.Add(k.end)
	}
	return c
}

// newRecord returns the fields of a call that must agree, and by which algorithm or library it is executed.
// An operation that does not exist has no name.
func newRecord(call *Call, count int, o *Options, by string) flight.Call {
	if call.Op == 0 {
		return flight.Call{}
	}
	must := fingerprint.Agreed(call.Op)
	c := flight.Call{Op: call.Op.String(), Name: call.name(), Algorithm: by}
	if call.Op.Pairwise() {
		c.Pair, c.Peer = true, call.Peer
	}
	if must.Has(fingerprint.Reduce) {
		c.Reduce = call.Reduce.String()
	}
	if must.Has(fingerprint.Type) {
		c.DType = call.Type.String()
	}
	if must.Has(fingerprint.Count) {
		c.Count = count
	}
	if must.Has(fingerprint.Shape) && call.Manifest != nil && len(call.Manifest.Shape) > 0 {
		c.Shape = slices.Clone(call.Manifest.Shape)
	}
	if must.Has(fingerprint.Root) {
		c.Rooted, c.Root = true, call.Root
	}
	if must.Has(fingerprint.Counts) {
		c.Counts = slices.Clone(call.Counts)
	}
	if must.Has(fingerprint.Order) && (o.Order == Any || o.Accumulate == AccumulateFloat32) {
		c.Order = "canonical"
		if o.Order == Any {
			c.Order = "any"
		}
		if o.Accumulate == AccumulateFloat32 {
			c.Order += ", in float32"
		}
	}
	return c
}
