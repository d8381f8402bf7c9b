package membership

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestListsAreBounded: reports, views and answers whose lists have more elements than a job can have workers are
// errors, however short these elements are; a report of all workers that a job can have is not.
func TestListsAreBounded(t *testing.T) {
	list := func(element string, n int) string {
		return "[" + strings.TrimSuffix(strings.Repeat(element+",", n), ",") + "]"
	}
	many := 1_300_000 // 4 MiB of {}, the largest value of a store
	for name, text := range map[string]string{
		"empty workers":  `{"workers":` + list("{}", many) + `}`,
		"null workers":   `{"workers":` + list("null", many/2) + `}`,
		"wrong workers":  `{"workers":` + list("1", many) + `}`,
		"one too many":   `{"workers":` + list("{}", workersMax+1) + `}`,
		"after a string": `{"nonce":"\\\"[","workers":` + list("{}", workersMax+1) + `}`,
	} {
		if _, err := DecodeReport([]byte(text)); err == nil || !strings.Contains(err.Error(), "more than 65536 elements") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if r, err := DecodeReport([]byte(`{"nonce":"],],","workers":` + list("{}", workersMax) + `}`)); err != nil ||
		len(r.Workers) != workersMax {
		t.Errorf("%d workers, error %v", len(r.Workers), err)
	}
	if _, err := DecodeReport([]byte(strings.Repeat("[", 1<<20))); err == nil || !strings.Contains(err.Error(), "nested") {
		t.Errorf("nested: error %v", err)
	}
	if _, err := decodeView([]byte(`{"doubts":` + list("{}", workersMax+1) + `}`)); err == nil {
		t.Error("a view of too many doubts is no error")
	}
	file := NewMemoryFile(1)
	if err := file.write(1, 1, []byte(`{"echo":`+list("0", workersMax+1)+`}`)); err != nil {
		t.Fatal(err)
	}
	if a, ok := file.answer(0); ok {
		t.Errorf("an answer that acknowledges %d heartbeats", len(a.Echo))
	}
}

// TestManyDoubts: every worker knows which workers are lost and suspected also when a view that describes them one by
// one would not fit into an answer, and the view stays as it is when it fits.
func TestManyDoubts(t *testing.T) {
	const nodes, locals = 64, 256 // 16,384 workers in doubt
	timing := Timing{Every: time.Second, Min: time.Second, Timeout: 30 * time.Second}
	now := time.Now()
	j := newJudge(timing, nil, now)
	workers := make([][]int, nodes)
	for node := range nodes {
		r := Report{Node: node, Nonce: "nonce", Count: 1, Epoch: 3}
		for local := range locals {
			w := node*locals + local
			workers[node] = append(workers[node], w)
			silent := int64(10_000) // a suspect
			if w%2 == 1 {
				silent = 40_000 + int64(w) // lost
			}
			r.Workers = append(r.Workers, WorkerReport{
				Worker: w, Silent: silent, Heartbeat: Heartbeat{Step: 5, Phase: "compute", Count: 7},
			})
		}
		j.record(now, false, r)
	}
	v, _ := j.view(now)
	v.Term = 1
	plain, err := json.Marshal(&v)
	if err != nil || len(v.Doubts) != nodes*locals || len(plain) <= answerBytes {
		t.Fatalf("%d doubts in %d bytes, %v", len(v.Doubts), len(plain), err)
	}

	store, file := rendezvous.NewMemory().Open(), NewMemoryFile(locals)
	r := NewReporter(ReporterConfig{Store: store, Key: "job", Timing: timing, By: -1})
	r.Watch(3, file, workers[0], -1, time.Time{})
	c := &coordinator{reporter: r, judge: j, view: v}
	if done, err := c.write(t.Context(), true, 0); !done || err != nil {
		t.Fatal(done, err)
	}
	text, revision, err := store.Get(t.Context(), "job"+viewSuffix)
	if err != nil {
		t.Fatal(err)
	}
	r.saw(text, revision)
	r.writeAnswer(now, false)
	m := NewMember(MemberConfig{Epoch: 3, Nodes: workers, File: file, Agent: true, Timing: timing})
	m.poll(now, 0, 0)
	for w, s := range m.viewed() {
		silent := 10 * time.Second
		if w%2 == 1 {
			silent = 40*time.Second + time.Millisecond
		}
		if s.Lost != (w%2 == 1) || s.Silent < silent || !s.Seen {
			t.Fatalf("worker %d: %+v", w, s)
		}
	}
	if last, err := m.Lost(t.Context()); err != nil || last.Worker != nodes*locals-1 || last.Heartbeat.Phase != "compute" {
		t.Errorf("lost: %+v, %v, want the worker that has been silent longest", last, err)
	}
	if len(c.view.Doubts) != nodes*locals {
		t.Errorf("the coordinator has forgotten doubts: %d are left", len(c.view.Doubts))
	}
	few := v
	few.Doubts = v.Doubts[:5000]
	plain, _ = json.Marshal(&few)
	if text := few.encode(); string(text) != string(plain) {
		t.Errorf("a view of %d bytes has been changed", len(plain))
	}
}

// TestEveryViewFits: the text of a view of the most workers is not too long, whatever is doubtful about each.
func TestEveryViewFits(t *testing.T) {
	for name, c := range map[string]struct {
		left  func(w int) bool
		phase string
	}{
		"all lost":    {func(int) bool { return false }, "compute"},
		"half left":   {func(w int) bool { return w%2 == 0 }, "compute"},
		"long phases": {func(w int) bool { return w%2 == 0 }, strings.Repeat("x", slotBytes)},
	} {
		t.Run(name, func(t *testing.T) {
			v := &View{Term: 1, Count: 1}
			for w := range workersMax {
				if c.left(w) {
					v.left(w)
					continue
				}
				d := Doubt{
					Node: -1, Epoch: 1, Workers: []int{w}, Lost: w%3 > 0, Silent: int64(w), Reported: w%5 > 0, Unseen: w%7 == 0,
				}
				if w >= workersMax-4*doubtsMax { // those that are described one by one
					d.Phase = c.phase
				}
				v.Doubts = append(v.Doubts, d)
			}
			got, err := decodeView(v.encode())
			if err != nil {
				t.Fatal(err)
			}
			seen := map[int]bool{} // whether a worker is lost
			for _, d := range got.Doubts {
				for _, w := range d.Workers {
					if _, twice := seen[w]; twice || d.Reported != (w%5 > 0) || d.Unseen != (w%7 == 0) || d.Silent > int64(w) {
						t.Fatalf("worker %d: %+v", w, d)
					}
					seen[w] = d.Lost
				}
			}
			for w := range workersMax {
				if lost, doubtful := seen[w]; doubtful == c.left(w) || doubtful && lost != (w%3 > 0) {
					t.Fatalf("worker %d: in doubt %v, lost %v", w, doubtful, lost)
				}
			}
		})
	}
}

// TestUnacknowledgedHeartbeats: a worker without a heartbeat timeout whose store does not answer does not remember all
// its heartbeats. The first acknowledgement after that counts.
func TestUnacknowledgedHeartbeats(t *testing.T) {
	file := NewMemoryFile(1)
	m := NewMember(MemberConfig{
		Nodes: [][]int{{0}}, File: file, Timing: NewTiming(0, 1), State: func() Heartbeat { return Heartbeat{} },
	})
	const written = 3 * sentMax
	for count := range uint64(written) {
		m.write(count+1, false)
	}
	if n := len(m.sent); n != sentMax {
		t.Errorf("%d heartbeats are remembered, want %d", n, sentMax)
	}
	at := m.sent[written-1]
	if err := file.write(1, 1, fmt.Appendf(nil, `{"echo":[%d]}`, written-1)); err != nil {
		t.Fatal(err)
	}
	m.poll(time.Now(), 0, 0)
	if !m.running.Equal(at) || len(m.sent) != 1 {
		t.Errorf("acknowledged until %v, want %v; %d heartbeats are left, want 1", m.running, at, len(m.sent))
	}
}
