package rendezvous

import (
	"encoding/json"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// refusedKey is where a server says whom it has refused lately, so that workers that wait in vain can say why.
const refusedKey = "@refused"

// refusedReport is what stands there.
type refusedReport struct {
	Count uint64         `json:"count"` // of all connections that were refused
	Last  []refusedEntry `json:"last"`  // the latest of each reason
}

type refusedEntry struct {
	Time   time.Time `json:"time"`
	From   string    `json:"from"`
	Kind   string    `json:"kind"`
	Reason string    `json:"reason"`
}

// refusedOne is a refusal that may never be told.
type refusedOne struct {
	time time.Time
	from net.Addr
	kind listener.Reason
	err  error
}

// reporter keeps refusedKey: at once, then at most once a second. What was held back is told by the next
// one that is not, or by a timer.
type reporter struct {
	server *Server

	mu    sync.Mutex
	count uint64
	last  []refusedOne // the latest of each kind
	next  time.Time    // the next may be told then
	timer bool         // will tell what was held back
	told  uint64       // of count
}

// reportEvery bounds how often strangers make the server say something.
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
		r.tell()
	case !r.timer:
		r.timer = true
		r.server.work.Go(func() { r.later(wait) })
	}
}

// later tells what was held back, when that may be told.
func (r *reporter) later(wait time.Duration) {
	for ; wait > 0; wait = r.due() {
		select {
		case <-time.After(wait):
		case <-r.server.ctx.Done():
			return
		}
	}
}

// due tells what was held back, or returns how long that must wait.
func (r *reporter) due() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if wait := time.Until(r.next); wait > 0 {
		return wait
	}
	r.timer = false
	r.tell()
	return 0
}

// tell sets refusedKey.
func (r *reporter) tell() {
	if r.told == r.count {
		return
	}
	r.told = r.count
	r.next = time.Now().Add(reportEvery)
	report := refusedReport{Count: r.count}
	for _, e := range r.last {
		report.Last = append(report.Last, refusedEntry{e.time, e.from.String(), e.kind.String(), e.err.Error()})
	}
	if text, err := json.Marshal(report); err == nil {
		r.server.memory.change(refusedKey, func(t *table) (bool, error) { return t.doSet(refusedKey, text) })
	}
}
