package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// Config configures an examination. The zero value works.
type Config struct {
	// Join configures how this process joins the job. Examine sets its Replicas and its communicator's
	// timeout.
	Join worker.Config
	// Bytes is the size of the messages for measuring bandwidth. Default 4 MiB.
	Bytes int
	// Time is approximately how long each direction of a pair is measured, and its round trips. Default 200
	// ms.
	Time time.Duration
	// Timeout is how long a pair may take to answer. Default 10 seconds.
	Timeout time.Duration
	// Facts are compared among the workers: versions, instruction sets, ….
	Facts []Fact
}

// Fact is a property of a worker.
type Fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Alike reports that workers which differ in it cannot train together, or not to the same bits.
	Alike bool `json:"alike,omitempty"`
	// Number reports that Value is a number, which JSON output has as a number.
	Number bool `json:"number,omitempty"`
	// Wrong is a problem that the worker has found with itself: a sentence, or "".
	Wrong string `json:"wrong,omitempty"`
}

const (
	defaultBytes   = 4 << 20
	defaultTime    = 200 * time.Millisecond
	defaultTimeout = 10 * time.Second
	separateMax    = 8 // workers whose pairs are tested one at a time
)

func (c Config) filled() (Config, error) {
	if c.Bytes == 0 {
		c.Bytes = defaultBytes
	}
	if c.Time == 0 {
		c.Time = defaultTime
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.Bytes < 1 || c.Time < 0 || c.Timeout < 0 {
		return c, fmt.Errorf("doctor: %d bytes for %v, with a timeout of %v: want more than none", c.Bytes, c.Time, c.Timeout)
	}
	c.Join.Replicas = 1
	c.Join.Collective.Timeout = c.turn() + c.Timeout // the next turn waits for the slowest pair
	return c, nil
}

// turn returns the maximum duration of the test of a pair.
func (c *Config) turn() time.Duration { return 3*c.Timeout + 4*burstsMin*c.Time }

// Examine joins the job and examines it, together with all its workers, which must call it with the same
// configuration. All get the same report, except a worker that the others cannot reach any more. The error is
// that of joining, or of ctx; problems of a pair are in the report.
func Examine(ctx context.Context, cfg Config) (*Report, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	w, err := worker.Join(ctx, cfg.Join)
	if err != nil {
		return nil, err
	}
	report, err := examine(ctx, w, &cfg)
	if err != nil {
		err = errors.Join(err, w.Fail(err))
	}
	if e := w.Close(); report == nil {
		return nil, errors.Join(err, e)
	}
	return report, nil // it contains the problems
}

func examine(ctx context.Context, w *worker.Worker, cfg *Config) (*Report, error) {
	report := &Report{Chief: w.Job().Chief(), Bytes: cfg.Bytes}
	mine, err := json.Marshal(cfg.Facts)
	if err != nil {
		return nil, err
	}
	facts, err := w.Exchange(ctx, "facts", mine)
	if err != nil {
		return nil, err
	}
	for i, m := range w.Members() {
		p := Worker{Worker: m.Worker, Host: m.Host, PID: m.PID}
		if err := json.Unmarshal(facts[i], &p.Facts); err != nil {
			return nil, fmt.Errorf("doctor: the facts of %v: %w", &m, err)
		}
		report.Workers = append(report.Workers, p)
	}
	found := testPairs(ctx, w, cfg)
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	all, silent, err := exchange(ctx, w, cfg, found)
	if err != nil {
		return nil, err
	}
	if report.Pairs, err = merge(len(report.Workers), all); err != nil {
		return nil, err
	}
	report.advise(silent)
	return report, missingResults(silent)
}

// missingResults returns the error for workers that have not sent their results in time.
func missingResults(silent []int) error {
	if len(silent) == 0 {
		return nil
	}
	return fmt.Errorf("doctor: %s did not send their results", ranges.Text("worker", silent))
}

// exchange exchanges the results of all workers, by worker, and returns the silent workers: it waits no longer
// than a turn takes.
func exchange(ctx context.Context, w *worker.Worker, cfg *Config, found []half) (all [][]byte, silent []int,
	err error,
) {
	mine, err := json.Marshal(found)
	if err != nil {
		return nil, nil, err
	}
	all = make([][]byte, len(w.Members()))
	all[w.Job().Worker] = mine
	if w.Store() == nil {
		return all, nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.turn()+2*cfg.Timeout)
	defer cancel()
	key := func(parts ...string) string {
		return rendezvous.Key(w.Job().ID, w.Job().Epoch, append([]string{"doctor"}, parts...)...)
	}
	if err := w.Store().Set(ctx, key(strconv.Itoa(w.Job().Worker)), mine); err != nil {
		return nil, nil, err
	}
	entries, after, err := w.Store().List(ctx, key())
	for {
		for _, e := range entries {
			for i := range all {
				if e.Key == key(strconv.Itoa(i)) {
					all[i] = e.Value
				}
			}
		}
		if err != nil || !slices.ContainsFunc(all, func(text []byte) bool { return text == nil }) {
			break
		}
		entries, after, err = w.Store().Changes(ctx, key(), after)
	}
	if err != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return nil, nil, err
	}
	for i := range all {
		if all[i] == nil {
			silent = append(silent, i)
		}
	}
	return all, silent, nil
}

// half is the result of one worker of a pair.
type half struct {
	Low, High int
	Pair      Pair
}

// testPairs tests this worker's pairs, in the turns that all workers follow.
func testPairs(ctx context.Context, w *worker.Worker, cfg *Config) []half {
	me := w.Job().Worker
	world := w.Group().Local()[0]
	var out []half
	var end error // of the communicator of all
	for _, turn := range turns(len(w.Members())) {
		color, other := -1, 0
		for i, p := range turn {
			if p[0] == me || p[1] == me {
				color, other = i, p[0]+p[1]-me
			}
		}
		var c collective.Communicator
		if end == nil {
			c, end = world.Split(ctx, color, me)
		}
		if color < 0 {
			continue
		}
		h := half{Low: min(me, other), High: max(me, other)}
		if end != nil {
			h.Pair.Problem = "not tested: " + firstLine(end)
		} else {
			h.Pair = testPair(ctx, c, cfg, me < other)
		}
		out = append(out, h)
	}
	return out
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// turns returns the pairs of n workers, in turns: each pair once, no worker twice in a turn. With few workers
// each pair has a separate turn. With many it is the circle method of tournaments: one worker stays, the
// others rotate around it.
func turns(n int) (out [][][2]int) {
	if n <= separateMax {
		for high := range n {
			for low := range high {
				out = append(out, [][2]int{{low, high}})
			}
		}
		return out
	}
	m := n + n%2 // with a dummy worker: its partner rests
	for turn := range m - 1 {
		pairs := [][2]int{{turn, m - 1}}
		for k := 1; k < m/2; k++ {
			pairs = append(pairs, [2]int{(turn + k) % (m - 1), (turn - k + m - 1) % (m - 1)})
		}
		var real [][2]int
		for _, p := range pairs {
			if low, high := min(p[0], p[1]), max(p[0], p[1]); high < n {
				real = append(real, [2]int{low, high})
			}
		}
		out = append(out, real)
	}
	return out
}

// merge combines the halves of all pairs: the lower worker has measured the latency, the forward bandwidth
// and the clock, the higher one the backward bandwidth.
func merge(n int, texts [][]byte) ([]Pair, error) {
	pairs := map[[2]int]Pair{}
	for from, text := range texts {
		if text == nil {
			continue
		}
		var halves []half
		if err := json.Unmarshal(text, &halves); err != nil {
			return nil, fmt.Errorf("doctor: the results of worker %d: %w", from, err)
		}
		for _, h := range halves {
			if h.Low < 0 || h.Low >= h.High || h.High >= n || from != h.Low && from != h.High {
				return nil, fmt.Errorf("doctor: worker %d reports a test of the pair %d and %d, of %d workers", from, h.Low, h.High,
					n)
			}
			p := pairs[[2]int{h.Low, h.High}]
			p.A, p.B = h.Low, h.High
			if from == h.Low {
				p.Reach, p.RoundTrip, p.There, p.Ahead = h.Pair.Reach, h.Pair.RoundTrip, h.Pair.There, h.Pair.Ahead
			} else {
				p.Back = h.Pair.Back
			}
			if p.Problem == "" {
				p.Problem = h.Pair.Problem
			}
			pairs[[2]int{h.Low, h.High}] = p
		}
	}
	var out []Pair
	for high := range n {
		for low := range high {
			p, ok := pairs[[2]int{low, high}]
			if !ok {
				p = Pair{A: low, B: high, Problem: "not tested"}
			}
			out = append(out, p)
		}
	}
	return out, nil
}
