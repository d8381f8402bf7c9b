package rendezvous

import (
	"encoding/json"
	"net"
	"slices"
	"sync"
	"time"
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

// reporter logs refusals and keeps refusedKey: at once, then at most once a second. What was held back is told by the next
// one that is not, or by a timer.
type reporter struct {
	server *Server

	mu     sync.Mutex
	report refusedReport
	next   time.Time // the next may be told then
	timer  bool      // will tell what was held back
	told   uint64    // of report.Count
}

// reportEvery bounds how often strangers make the server say something.
const reportEvery = time.Second

func (r *reporter) add(from net.Addr, reason Refusal, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := refusedEntry{time.Now(), from.String(), reason.String(), err.Error()}
	r.report.Count++
	at := slices.IndexFunc(r.report.Last, func(old refusedEntry) bool { return old.Kind == e.Kind })
	if at < 0 {
		at = len(r.report.Last)
		r.report.Last = append(r.report.Last, e)
	}
	r.report.Last[at] = e
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

// tell logs the latest refusal, and sets refusedKey.
func (r *reporter) tell() {
	if r.told == r.report.Count {
		return
	}
	latest := slices.MaxFunc(r.report.Last, func(a, b refusedEntry) int { return a.Time.Compare(b.Time) })
	r.server.cfg.Logger.Warn("rendezvous: connections to the store are refused", "from", latest.From, "reason", latest.Reason,
		"kind", latest.Kind, "since_the_last_warning", r.report.Count-r.told, "in_all", r.report.Count)
	r.told = r.report.Count
	r.next = time.Now().Add(reportEvery)
	if text, err := json.Marshal(r.report); err == nil {
		r.server.memory.change(refusedKey, func(t *table) (bool, error) { return t.doSet(refusedKey, text) })
	}
}
