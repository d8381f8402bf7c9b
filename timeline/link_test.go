package timeline_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/timeline"
)

// wire simulates the links of a job in virtual time: an all-reduce in a ring, or in which each worker sends to each
// other one, ends when the slowest link has sent its data.
type wire struct {
	job
	pairs bool    // each to each; otherwise a ring
	ms    float64 // the time of a link's data
	// latecomers is the part of a link's time by which the kernel's count is too long: late acknowledgements.
	latecomers float64
}

// next returns the next step of all workers. slow changes the time of a link.
func (v *wire) next(
	computation func(worker int, input, compute *float64), slow func(from, to int, ms *float64),
) []timeline.Step {
	steps := v.job.next(computation)
	took := map[[2]int]time.Duration{}
	longest := time.Duration(0)
	for from := range steps {
		for to := range steps {
			if from == to || !v.pairs && to != (from+1)%len(steps) {
				continue
			}
			ms := v.ms
			if slow != nil {
				slow(from, to, &ms)
			}
			d := time.Duration(1e6 * ms * math.Exp(v.noise*v.rng.NormFloat64()))
			took[[2]int{from, to}] = d
			longest = max(longest, d)
		}
	}
	v.now += longest
	for w := range steps {
		s := &steps[w]
		s.Wait += longest
		s.End += longest
		n := 0
		for peer := range steps {
			sent, got := took[[2]int{w, peer}], took[[2]int{peer, w}]
			if sent == 0 && got == 0 || n == timeline.LinksMax {
				continue
			}
			l := timeline.Link{Peer: peer, Sending: sent, Receiving: s.Wait - 10*time.Millisecond}
			if sent > 0 {
				l.Sending += time.Duration(v.latecomers * v.rng.Float64() * float64(sent))
				l.Bytes = 1 << 20
			}
			if got == 0 {
				l.Receiving = 0
			}
			s.Links[n] = l
			n++
		}
	}
	return steps
}

// TestNoSlowLink simulates an hour of steps on links that are equally fast, equally slow, or become slow together: no
// worker is named.
func TestNoSlowLink(t *testing.T) {
	until := time.Hour
	if testing.Short() {
		until = 6 * time.Minute
	}
	for _, c := range []struct {
		workers int
		pairs   bool
		noise   float64
		ms      float64
	}{
		{2, false, 0.05, 20},
		{2, false, 0.4, 200},
		{3, false, 0.05, 200},
		{3, false, 0.4, 300},
		{4, false, 0.02, 20},
		{4, false, 0.08, 200},
		{4, true, 0.25, 200},
		{4, false, 0.4, 400},
		{7, true, 0.1, 50},
		{16, false, 0.05, 100},
	} {
		v := &wire{
			job:   job{workers: c.workers, noise: c.noise, spikes: 0.01, rng: rand.New(rand.NewPCG(5, uint64(c.workers)))},
			pairs: c.pairs, ms: c.ms, latecomers: 0.5,
		}
		d := timeline.NewDetector(c.workers)
		for v.now < until {
			all := func(_, _ int, ms *float64) {
				if v.now%(until/3) > until/6 { // the whole network is slower for a time
					*ms *= 3
				}
			}
			for w, s := range v.next(nil, all) {
				d.Add(w, []timeline.Step{s})
			}
			if s, ok := d.Straggler(); ok {
				t.Fatalf("%+v: named after %v, step %d: %v", c, v.now, v.step, s)
			}
		}
	}
}

// TestSlowLink slows one link, all links from a worker, all to it, or all of a worker, so that a step takes 20 %
// longer: it is named within 20 steps, and cleared when it is fast again.
func TestSlowLink(t *testing.T) {
	seeds := uint64(96)
	if testing.Short() {
		seeds = 40
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 6))
		workers, kind := 3+int(seed/4%5), []string{"one", "from", "to", "both"}[seed%4]
		v := &wire{
			job: job{workers: workers, noise: 0.03, spikes: 0.01, rng: rng}, pairs: seed/20%2 == 1 && workers < 8,
			ms: 10, latecomers: 0.2,
		}
		d := timeline.NewDetector(workers)
		add := func(slow func(int, int, *float64)) {
			steps := v.next(nil, slow)
			for _, w := range rng.Perm(workers) {
				d.Add(w, steps[w:w+1])
			}
		}
		for range 50 {
			add(nil)
		}
		worker := rng.IntN(workers)
		next := (worker + 1) % workers
		isSlow := func(from, to int) bool {
			switch kind {
			case "one":
				return from == worker && to == next
			case "from":
				return from == worker
			case "to":
				return to == worker
			}
			return from == worker || to == worker
		}
		for range 20 {
			add(func(from, to int, ms *float64) {
				if isSlow(from, to) {
					*ms += 26
				}
			})
		}
		single := kind == "one" || kind != "both" && !v.pairs
		s, ok := d.Straggler()
		switch {
		case !ok || s.Excess < 0.1 || s.Excess > 0.35:
			t.Errorf("seed %d: %d workers, %s: after 20 slow steps got %+v, %v", seed, workers, kind, s, ok)
		case single && (s.Link == nil || !isSlow(s.Link[0], s.Link[1]) || s.Worker != s.Link[0]):
			t.Fatalf("seed %d: %d workers, %s %d: got %v: want the one link that is slow", seed, workers, kind, worker, s)
		case !single && (s.Worker != worker || s.Cause != "link" || s.Link != nil):
			t.Fatalf("seed %d: %d workers, %s %d: got %v: want worker %d", seed, workers, kind, worker, s, worker)
		}
		for range 40 { // it stays named
			add(func(from, to int, ms *float64) {
				if isSlow(from, to) {
					*ms += 26
				}
			})
			if again, ok := d.Straggler(); !ok || again.Worker != s.Worker || again.Cause != s.Cause {
				t.Fatalf("seed %d: %d workers, %s: first %v, then %v, %v", seed, workers, kind, s, again, ok)
			}
		}
		for range 80 {
			add(nil)
		}
		if s, ok := d.Straggler(); ok {
			t.Fatalf("seed %d: named 80 steps after it was fast again: %v", seed, s)
		}
	}
}

// TestSlowLinkOfTwo: of two workers, a slow direction is named. If both are slow, the detector cannot know.
func TestSlowLinkOfTwo(t *testing.T) {
	for _, both := range []bool{false, true} {
		v := &wire{job: job{workers: 2, noise: 0.03, rng: rand.New(rand.NewPCG(7, 7))}, ms: 10}
		d := timeline.NewDetector(2)
		for i := range 120 {
			for w, s := range v.next(nil, func(from, _ int, ms *float64) {
				if i >= 100 && (both || from == 1) {
					*ms += 26
				}
			}) {
				d.Add(w, []timeline.Step{s})
			}
		}
		if s, ok := d.Straggler(); ok == both || ok && (*s.Link != [2]int{1, 0} || s.Cause != "link to worker 0") {
			t.Errorf("both directions %v: got %v, %v", both, s, ok)
		} else if ok && !(s.Concerns(0) && s.Concerns(1) && !s.Concerns(2)) {
			t.Errorf("%v: want it to concern both workers", s)
		}
	}
}

// TestSlowComputationWithLinks: late acknowledgements of a worker that computes longer, and does not read meanwhile, do
// not make its links slow.
func TestSlowComputationWithLinks(t *testing.T) {
	for _, excess := range []float64{1.08, 1.2} {
		v := &wire{job: job{workers: 4, noise: 0.03, rng: rand.New(rand.NewPCG(8, 8))}, ms: 3}
		d := timeline.NewDetector(4)
		for range 1000 {
			for w, s := range v.next(func(w int, _, compute *float64) {
				if w == 2 {
					*compute *= excess
				}
			}, nil) {
				i := slices.IndexFunc(s.Links[:], func(l timeline.Link) bool { return l.Peer == 2 && l.Bytes > 0 })
				if i >= 0 {
					s.Links[i].Sending += 40 * time.Millisecond // delayed acknowledgements
				}
				d.Add(w, []timeline.Step{s})
			}
			if s, ok := d.Straggler(); ok && s.Cause != "computation" {
				t.Fatalf("excess %v, step %d: %v", excess, v.step, s)
			}
		}
		if s, ok := d.Straggler(); ok != (excess > 1.1) {
			t.Errorf("excess %v: got %v, %v", excess, s, ok)
		}
	}
}

// TestStepLinks records and encodes the links of a step.
func TestStepLinks(t *testing.T) {
	r := timeline.NewRecorder()
	want := [timeline.LinksMax]timeline.Link{
		{Peer: 3, Sending: 20 * time.Millisecond, Receiving: time.Millisecond, Bytes: 1 << 40},
		{Peer: 1, Receiving: time.Second},
	}
	r.MeasureLinks(func() [timeline.LinksMax]timeline.Link { return want })
	step := timeline.Step{Step: 16, End: time.Second}
	if allocated := testing.AllocsPerRun(100, func() { r.AddStep(step) }); allocated > 0 {
		t.Errorf("a step allocates %v objects", allocated)
	}
	list, _ := r.Steps(0)
	text, err := list[0].MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	var back timeline.Step
	if err := back.UnmarshalJSON(text); err != nil || back.Links != want || list[0].Links != want {
		t.Errorf("recorded %v, decoded %v (%s), %v: want %v", list[0].Links, back.Links, text, err, want)
	}
}

// BenchmarkDetector measures a step of many workers in a ring.
func BenchmarkDetector(b *testing.B) {
	for _, workers := range []int{4, 64, 512} {
		b.Run(strconv.Itoa(workers), func(b *testing.B) {
			v := &wire{job: job{workers: workers, noise: 0.05, rng: rand.New(rand.NewPCG(9, 9))}, ms: 10}
			d := timeline.NewDetector(workers)
			for b.Loop() {
				for w, s := range v.next(nil, nil) {
					d.Add(w, []timeline.Step{s})
				}
			}
		})
	}
}
