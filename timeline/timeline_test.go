package timeline_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/timeline/timelinetest"
)

// TestRecorderKeepsTheLast compares a recorder with a list of all that was added.
func TestRecorderKeepsTheLast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := timeline.NewRecorder()
		room := r.Room()
		var all []timeline.Event
		for i := range rapid.IntRange(0, 3*room).Draw(t, "events") {
			e := timeline.Event{
				Kind: timeline.Input, Step: int64(i + 1), Start: time.Duration(i), End: time.Duration(2 * i), Replica: i % 7,
				Bucket: i % 5,
			}
			if i%3 == 0 {
				e = timeline.Event{
					Kind: timeline.Collective, Step: int64(i + 1), Start: time.Duration(i), End: time.Duration(i + 1),
					Op: "all_reduce", Algorithm: fmt.Sprint("ring", i%11), Comm: "world", Seq: uint64(i), Bytes: int64(i) << 20,
				}
			}
			all = append(all, e)
			r.Add(e)
		}
		want := all[max(len(all)-room, 0):]
		got := r.Events()
		if len(got) != len(want) {
			t.Fatalf("%d events kept, want %d", len(got), len(want))
		}
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("event %d: got %+v, want %+v", i, got[i], want[i])
			}
		}
	})
}

// TestRecorderConcurrently checks that readers never see a record that was not added.
func TestRecorderConcurrently(t *testing.T) {
	r := timeline.NewRecorder()
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := range 20_000 {
				x := time.Duration(i)
				r.Add(timeline.Event{Kind: timeline.Update, Step: int64(i + 1), Replica: w, Start: x, End: x, Bytes: int64(i)})
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		for _, e := range r.Events() {
			if e.Kind != timeline.Update || e.Start != e.End || int64(e.Start) != e.Bytes || e.Step != e.Bytes+1 {
				t.Fatalf("a torn record: %+v", e)
			}
		}
	}
	if n := len(r.Events()); n+r.Dropped() < r.Room() {
		t.Errorf("%d of %d events kept, %d dropped", n, r.Room(), r.Dropped())
	}
}

func TestRecorderAllocatesNothing(t *testing.T) {
	if race.Enabled {
		t.Skip("-race allocates")
	}
	r := timeline.NewRecorder()
	call := timeline.Event{Kind: timeline.Collective, Op: "all_reduce", Algorithm: "ring", Comm: "world"}
	r.Add(call)
	if n := testing.AllocsPerRun(100, func() {
		r.Add(call)
		r.AddStep(timeline.Step{Step: 1, End: r.Now(), Loss: 1})
		r.SetStep(2)
	}); n != 0 {
		t.Errorf("recording allocates %v times", n)
	}
}

func TestNoRecorder(t *testing.T) {
	var r *timeline.Recorder
	r.Add(timeline.Event{})
	r.AddStep(timeline.Step{})
	r.SetStep(1)
	r.SetTraining(nil)
	if r.Events() != nil || r.Training() != nil || r.Now() != 0 {
		t.Error("a nil recorder has something")
	}
}

func TestSteps(t *testing.T) {
	r := timeline.NewRecorder()
	read := uint64(0)
	var got []timeline.Step
	for i := range 3000 {
		r.AddStep(timeline.Step{Step: int64(i + 1), End: time.Duration(10 * (i + 1)), Wait: 3, Loss: float64(i)})
		if i%700 == 0 {
			list, n := r.Steps(read)
			read, got = n, append(got, list...)
		}
	}
	list, _ := r.Steps(read)
	got = append(got, list...)
	if len(got) != 3000 {
		t.Fatalf("%d steps, want 3000", len(got))
	}
	for i, s := range got {
		if s.Step != int64(i+1) || s.Own() != 7 || s.Loss != float64(i) {
			t.Fatalf("step %d: %+v", i, s)
		}
	}
}

// TestOffset checks that the offset of two clocks is never wrong by more than its error, for calls that no rank leaves
// before all have entered.
func TestOffset(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		truth := time.Duration(rapid.Int64Range(-1e12, 1e12).Draw(t, "offset"))
		wait := func(name string) time.Duration { return time.Duration(rapid.Int64Range(0, 1e6).Draw(t, name)) }
		var a, b []timeline.Visit
		at := time.Duration(0)
		best := time.Duration(math.MaxInt64)
		for range rapid.IntRange(1, 20).Draw(t, "calls") {
			enterA, enterB := at+wait("enter a"), at+wait("enter b")
			both := max(enterA, enterB)
			leaveA, leaveB := both+wait("leave a"), both+wait("leave b")
			a = append(a, timeline.Visit{Enter: enterA, Leave: leaveA})
			b = append(b, timeline.Visit{Enter: enterB - truth, Leave: leaveB - truth})
			best = min(best, (leaveA-enterB)+(leaveB-enterA))
			at = max(leaveA, leaveB)
		}
		o, ok := timeline.OffsetOf(b, a)
		if !ok || (o.Add-truth).Abs() > o.Error {
			t.Fatalf("offset %v ± %v, %v: want %v", o.Add, o.Error, ok, truth)
		}
		if o.Error > (best+1)/2 {
			t.Fatalf("error %v: want at most half the best round trip, %v", o.Error, best/2)
		}
	})
	if _, ok := timeline.OffsetOf(nil, nil); ok {
		t.Error("an offset without calls")
	}
	before, after := []timeline.Visit{{0, 1}, {10, 11}}, []timeline.Visit{{5, 6}, {1, 2}}
	if o, ok := timeline.OffsetOf(before, after); ok {
		t.Errorf("visits that contradict each other have the offset %v", o)
	}
}

func TestClock(t *testing.T) {
	c := timeline.Clock{
		First: timeline.Offset{Add: 100, Error: 3}, Last: timeline.Offset{Add: 200, Error: 5}, FirstAt: 1000, LastAt: 2000,
	}
	for at, want := range map[time.Duration]time.Duration{0: 100, 1000: 1100, 1500: 1650, 2000: 2200, 3000: 3200} {
		if got := c.Convert(at); got != want {
			t.Errorf("Convert(%d) = %d, want %d", at, got, want)
		}
	}
	if c.Error() != 5 {
		t.Errorf("error %v, want 5", c.Error())
	}
}

func TestWrite(t *testing.T) {
	call := func(replica int, start, end time.Duration) timeline.Event {
		return timeline.Event{
			Kind: timeline.Collective, Replica: replica, Step: 3, Start: start, End: end, Op: "all_reduce", Algorithm: "ring",
			Comm: "world", Seq: 8, Bytes: 4096,
		}
	}
	ms := time.Millisecond
	all := timeline.Timeline{Job: "j", Steps: 2, Workers: []timeline.Worker{
		{Worker: 0, Host: "a", PID: 1, Events: []timeline.Event{
			call(0, 13*ms, 20*ms),
			{Kind: timeline.Forward, Step: 3, Start: 10 * ms, End: 12 * ms, Bucket: 1},
			{Kind: timeline.Backward, Step: 3, Start: 12 * ms, End: 13 * ms, Bucket: 2},
		}},
		{
			Worker: 1, Host: "b", PID: 2, Clock: timeline.Clock{Last: timeline.Offset{Add: -5 * ms, Error: ms}, FirstAt: 1},
			Events: []timeline.Event{call(1, 22*ms, 25*ms)},
		},
	}}
	all.Workers[1].Clock.First = all.Workers[1].Clock.Last
	var out bytes.Buffer
	if err := all.Write(&out); err != nil {
		t.Fatal(err)
	}
	got, err := timelinetest.Read(&out)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for worker := range 2 {
		for _, thread := range []string{fmt.Sprint("replica ", worker), fmt.Sprintf("replica %d calls", worker)} {
			for _, e := range got.Spans(worker, thread) {
				lines = append(lines, fmt.Sprintf("%s, %s: %s %v+%v", got.Processes[worker], thread, e.Name, *e.Start, *e.Duration))
			}
		}
	}
	want := `worker 0 (host a, pid 1), replica 0: forward and backward, bucket 1 0+2000
worker 0 (host a, pid 1), replica 0: backward, bucket 2 2000+1000
worker 0 (host a, pid 1), replica 0 calls: all_reduce 3000+7000
worker 0 (host a, pid 1), replica 0 calls: wait for replica 1 3000+4000
worker 1 (host b, pid 2), replica 1 calls: all_reduce 7000+3000`
	if text := strings.Join(lines, "\n"); text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	meta, _ := json.Marshal(got.Metadata)
	for _, part := range []string{
		`"error_us":1000`, `"offset_us":-5000`, `at most the last 2 of each worker`,
		`"job":"j"`, `"programs":"the engine runs the forward pass`,
	} {
		if !strings.Contains(string(meta), part) {
			t.Errorf("metadata %s: want %s", meta, part)
		}
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space") }

func TestWriteFails(t *testing.T) {
	w := timeline.NewWriter(fullDisk{}, nil)
	w.Span(timeline.Span{Name: "a"})
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "no space") {
		t.Errorf("error %v", err)
	}
	w = timeline.NewWriter(&bytes.Buffer{}, map[string]any{"x": math.NaN()})
	if err := w.Close(); err == nil {
		t.Error("metadata that is not JSON is accepted")
	}
}

func BenchmarkAdd(b *testing.B) {
	r := timeline.NewRecorder()
	for b.Loop() {
		now := r.Now()
		r.Add(timeline.Event{
			Kind: timeline.Collective, Op: "all_reduce", Algorithm: "ring", Comm: "world", Start: now,
			End: now,
		})
	}
}

// BenchmarkStep measures what recording a step costs, as a training with eight buckets records it: the parts of a step,
// eight collective calls, and where its time went.
func BenchmarkStep(b *testing.B) {
	r := timeline.NewRecorder()
	b.ReportAllocs()
	events := 0
	for i := range b.N {
		step := int64(i + 1)
		add := func(e timeline.Event) {
			now := r.Now() // as a trainer and a communicator do
			e.Step, e.Start, e.End = step, now, now
			r.Add(e)
			events++
		}
		for _, kind := range []timeline.Kind{
			timeline.Input, timeline.Forward, timeline.Wait, timeline.Update, timeline.Commit, timeline.Callbacks,
		} {
			add(timeline.Event{Kind: kind})
		}
		for k := range 8 {
			add(timeline.Event{Kind: timeline.Backward, Bucket: k + 1})
			add(timeline.Event{
				Kind: timeline.Collective, Op: "all_reduce", Algorithm: "direct", Comm: "replicas", Seq: uint64(i), Bytes: 1 << 20,
			})
		}
		r.AddStep(timeline.Step{Step: step, End: r.Now()})
		r.SetStep(step + 1)
	}
	b.ReportMetric(float64(events)/float64(b.N), "events/step")
}
