package rendezvous

import (
	"encoding/json"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// refusedKey holds the connections that a server has refused lately, so that workers that wait in vain can
// report them.
const refusedKey = "@refused"

// refusedReport is the value of refusedKey.
type refusedReport struct {
	Count uint64         `json:"count"` // of all refused connections
	Last  []refusedEntry `json:"last"`  // the latest of each reason
}

type refusedEntry struct {
	Time   time.Time `json:"time"`
	From   string    `json:"from"`
	Kind   string    `json:"kind"`
	Reason string    `json:"reason"`
}

// refusedOne is a refusal, which may not have been reported.
type refusedOne struct {
	time time.Time
	from net.Addr
	kind listener.Reason
	err  error
}

// reporter updates refusedKey: at once, then at most once a second. Refusals in between are reported with the
// next update, or by a timer.
type reporter struct {
	server *Server

	mu       sync.Mutex
	count    uint64
	last     []refusedOne // the latest of each kind
	next     time.Time    // earliest time of the next report
	timer    bool         // will report the pending refusals
	reported uint64       // count at the last report
}

// reportEvery bounds how often unauthenticated connections make the server write a report.
const reportEvery = time.Second

func (r *reporter) add(from net.Addr, kind listener.Reason, err error) {
	if r.server.ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	at := slices.IndexFunc(r.last, func(old refusedOne) bool { return old.kind == kind })
	if at < 0 {
		at = len(r.last)
		r.last = append(r.last, refusedOne{})
	}
	r.last[at] = refusedOne{time.Now(), from, kind, err}
	switch wait := time.Until(r.next); {
	case wait <= 0:
		r.write()
	case !r.timer:
		r.timer = true
		r.server.work.Go(func() { r.later(wait) })
	}
}

// later schedules a report of the pending refusals.
func (r *reporter) later(wait time.Duration) {
	for ; wait > 0; wait = r.due() {
		select {
		case <-time.After(wait):
		case <-r.server.ctx.Done():
			return
		}
	}
}

// due reports the pending refusals, or returns how long to wait before that is allowed.
func (r *reporter) due() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if wait := time.Until(r.next); wait > 0 {
		return wait
	}
	r.timer = false
	r.write()
	return 0
}

// write updates refusedKey.
func (r *reporter) write() {
	if r.reported == r.count {
		return
	}
	r.reported = r.count
	r.next = time.Now().Add(reportEvery)
	report := refusedReport{Count: r.count}
	for _, e := range r.last {
		report.Last = append(report.Last, refusedEntry{e.time, e.from.String(), e.kind.String(), e.err.Error()})
	}
	if text, err := json.Marshal(report); err == nil {
		r.server.memory.change(refusedKey, func(t *table) (bool, error) { return t.doSet(refusedKey, text) })
	}
}
