package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// Report is the result of an examination.
type Report struct {
	Workers []Worker `json:"workers"`
	Pairs   []Pair   `json:"pairs"` // one for each two workers
	Bytes   int      `json:"bytes"` // size of the messages for bandwidth
	// Wrong lists problems that keep the job from working, or from working well; Notes lists further remarks.
	// Both are sentences.
	Wrong []string `json:"wrong,omitempty"`
	Notes []string `json:"notes,omitempty"`
	// Chief reports that this worker prints the report.
	Chief bool `json:"-"`
}

// Worker is an examined worker.
type Worker struct {
	Worker int
	Host   string
	PID    int
	Facts  []Fact
}

// MarshalJSON implements [json.Marshaler]. The facts are an object: {"version": "v1.2.3", "processors": 2}.
func (w Worker) MarshalJSON() ([]byte, error) {
	facts := map[string]any{}
	for _, f := range w.Facts {
		name := strings.ReplaceAll(f.Name, " ", "_")
		facts[name] = f.Value
		if n, err := strconv.ParseFloat(f.Value, 64); f.Number && err == nil {
			facts[name] = n
		}
	}
	return json.Marshal(struct {
		Worker int            `json:"worker"`
		Host   string         `json:"host"`
		PID    int            `json:"pid"`
		Facts  map[string]any `json:"facts"`
	}{w.Worker, w.Host, w.PID, facts})
}

func (w *Worker) fact(name string) string {
	for _, f := range w.Facts {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// Pair is two workers, A below B.
type Pair struct {
	A int `json:"a"`
	B int `json:"b"`
	// Reach is the transport between them: "shm", "tcp", "tcp+tls".
	Reach     string        `json:"reach"`
	RoundTrip time.Duration `json:"round_trip_ns"`          // median for a message of 16 bytes and its answer
	There     float64       `json:"there_bytes_per_second"` // bytes a second from A to B
	Back      float64       `json:"back_bytes_per_second"`  // bytes a second from B to A
	Ahead     time.Duration `json:"ahead_ns"`               // how far B's clock is ahead of A's
	Problem   string        `json:"problem,omitempty"`      // why the measurements are incomplete: no answer, for example
}

// Healthy reports whether there are no problems.
func (r *Report) Healthy() bool { return len(r.Wrong) == 0 }

// Thresholds of reported pairs: a third of the bandwidth, or three times the round-trip time, of pairs with
// the same transport; clocks that differ by a second.
const (
	slowTimes = 3
	clockMost = time.Second
	listedMax = 8 // of one kind
)

// advise finds the problems.
func (r *Report) advise(silent []int) {
	r.Wrong, r.Notes = nil, nil
	for _, worker := range silent {
		r.Wrong = append(r.Wrong, fmt.Sprintf("%s has not reported its results: it is stopped or has exited, or cannot "+
			"reach the others", r.name(worker)))
	}
	several(&r.Wrong, "workers have the like", r.faulty())
	several(&r.Wrong, "pairs have the like", r.unanswered())
	for _, name := range r.factNames() {
		r.compare(name)
	}
	several(&r.Wrong, "pairs are as slow", r.slow())
	several(&r.Notes, "pairs have the like", r.unshared())
	several(&r.Notes, "clocks are as wrong", r.clocks())
}

// several adds sentences, the first few of many.
func several(to *[]string, more string, all []string) {
	*to = append(*to, all[:min(len(all), listedMax)]...)
	if n := len(all) - listedMax; n > 0 {
		*to = append(*to, fmt.Sprintf("%d more %s", n, more))
	}
}

// faulty lists what workers have found wrong with themselves.
func (r *Report) faulty() (out []string) {
	for i := range r.Workers {
		for _, f := range r.Workers[i].Facts {
			if f.Wrong != "" {
				out = append(out, fmt.Sprintf("%s: %s", r.name(i), f.Wrong))
			}
		}
	}
	return out
}

func (r *Report) unanswered() (out []string) {
	for i := range r.Pairs {
		if p := &r.Pairs[i]; p.Problem != "" {
			out = append(out, fmt.Sprintf("%s and %s: %s", r.name(p.A), r.name(p.B), p.Problem))
		}
	}
	return out
}

func (r *Report) name(worker int) string {
	w := &r.Workers[worker]
	return fmt.Sprintf("worker %d (host %s, pid %d)", w.Worker, w.Host, w.PID)
}

func (r *Report) factNames() (names []string) {
	for i := range r.Workers {
		for _, f := range r.Workers[i].Facts {
			if !slices.Contains(names, f.Name) {
				names = append(names, f.Name)
			}
		}
	}
	return names
}

// compare compares one fact of all workers.
func (r *Report) compare(name string) {
	type group struct {
		value   string
		workers []int
	}
	var groups []group
	alike := false
	for i := range r.Workers {
		w := &r.Workers[i]
		value := w.fact(name)
		at := slices.IndexFunc(groups, func(g group) bool { return g.value == value })
		if at < 0 {
			at, groups = len(groups), append(groups, group{value: value})
		}
		groups[at].workers = append(groups[at].workers, i)
		alike = alike || slices.ContainsFunc(w.Facts, func(f Fact) bool { return f.Name == name && f.Alike })
	}
	if len(groups) < 2 {
		return
	}
	slices.SortStableFunc(groups, func(a, b group) int { return len(b.workers) - len(a.workers) })
	var parts []string
	for _, g := range groups {
		parts = append(parts, fmt.Sprintf("%q on %s", g.value, ranges.Text("worker", g.workers)))
	}
	text := fmt.Sprintf("workers differ in %s: %s", name, strings.Join(parts, ", "))
	if alike {
		r.Wrong = append(r.Wrong, text+": results may differ in their last bits, or the workers may refuse each other")
		return
	}
	r.Notes = append(r.Notes, text)
}

// slow finds pairs that are slow compared with the median of pairs with the same transport.
func (r *Report) slow() (out []string) {
	rates, trips := map[string][]float64{}, map[string][]time.Duration{}
	for i := range r.Pairs {
		if p := &r.Pairs[i]; p.Problem == "" {
			rates[p.Reach] = append(rates[p.Reach], p.There, p.Back)
			trips[p.Reach] = append(trips[p.Reach], p.RoundTrip)
		}
	}
	for i := range r.Pairs {
		p := &r.Pairs[i]
		if p.Problem != "" || len(trips[p.Reach]) < 3 { // of two pairs it is unknown which is the slow one
			continue
		}
		if usual := median(rates[p.Reach]); p.There*slowTimes < usual {
			out = append(out, fmt.Sprintf("slow: from worker %d to worker %d %s, where %s is usual (%s)", p.A, p.B,
				rate(p.There), rate(usual), p.Reach))
		} else if p.Back*slowTimes < usual {
			out = append(out, fmt.Sprintf("slow: from worker %d to worker %d %s, where %s is usual (%s)", p.B, p.A, rate(p.Back),
				rate(usual), p.Reach))
		}
		if usual := median(trips[p.Reach]); p.RoundTrip > slowTimes*usual {
			out = append(out, fmt.Sprintf("slow: a round trip between worker %d and worker %d takes %v, where %v is usual (%s)",
				p.A, p.B, short(p.RoundTrip), short(usual), p.Reach))
		}
	}
	return out
}

// unshared finds workers of one host that do not share memory.
func (r *Report) unshared() (out []string) {
	for i := range r.Pairs {
		p := &r.Pairs[i]
		if p.Problem == "" && p.Reach != "shm" && p.Reach != "mem" && r.Workers[p.A].Host == r.Workers[p.B].Host {
			out = append(out, fmt.Sprintf("worker %d and worker %d are on one host, %s, and share no memory: they use %s", p.A,
				p.B, r.Workers[p.A].Host, p.Reach))
		}
	}
	return out
}

// clocks finds workers whose clock differs from worker 0's.
func (r *Report) clocks() (out []string) {
	for i := range r.Pairs {
		if p := &r.Pairs[i]; p.A == 0 && p.Problem == "" && p.Ahead.Abs() > clockMost {
			way := "ahead of"
			if p.Ahead < 0 {
				way = "behind"
			}
			out = append(out, fmt.Sprintf("the clock of %s is %v %s worker 0's: their logs do not go together", r.name(p.B),
				short(p.Ahead.Abs()), way))
		}
	}
	return out
}

func median[T cmp.Ordered](x []T) T {
	s := slices.Sorted(slices.Values(x))
	return s[len(s)/2]
}

// short rounds a time for display.
func short(d time.Duration) time.Duration {
	for unit := time.Nanosecond; unit < time.Hour; unit *= 10 {
		if d < 1000*unit {
			return d.Round(unit)
		}
	}
	return d.Round(time.Minute)
}

// rate formats bytes a second.
func rate(x float64) string {
	unit := 0
	names := []string{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}
	for x >= 1000 && unit < len(names)-1 {
		x, unit = x/1000, unit+1
	}
	return fmt.Sprintf("%.3g %s", x, names[unit])
}
