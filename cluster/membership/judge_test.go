package membership

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestLateNode: a node that joins long after the coordinator began is not lost with its first report, whether it was
// expected or not, and whenever its second one arrives.
func TestLateNode(t *testing.T) {
	timing := Timing{Every: time.Second, Min: 200 * time.Millisecond, Timeout: 30 * time.Second}
	began := time.Unix(1000, 0)
	for _, expected := range []map[int][]int{nil, {0: {0}, 7: {1}}} {
		j := newJudge(timing, expected, began)
		first := Report{Node: 0, Count: 1, Workers: []WorkerReport{{Worker: 0, Heartbeat: Heartbeat{Count: 1}}}}
		j.record(began, true, first)
		late := began.Add(29 * time.Second)
		first.Count++
		j.record(late, false, first)
		j.record(late, false, Report{
			Node: 7, Count: 1, Workers: []WorkerReport{{Worker: 1, Heartbeat: Heartbeat{Count: 1}}},
		})
		if v, _ := j.view(late.Add(2 * timing.Every)); len(v.Doubts) > 0 {
			t.Errorf("expected nodes %v: %+v two seconds after the first report", expected, v.Doubts)
		}
		if v, _ := j.view(late.Add(timing.Timeout)); len(v.lost()) != 2 {
			t.Errorf("expected nodes %v: %+v at the timeout after the first report, want both nodes lost", expected, v.Doubts)
		}
	}
}

// TestLateReporter is TestLateNode with real reporters, of which the late one is unknown until it reports.
func TestLateReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		timing := Timing{Every: time.Second, Min: 200 * time.Millisecond, Timeout: 30 * time.Second}
		store := rendezvous.NewMemory()
		var mu sync.Mutex
		var lost []int
		run := func(node int) {
			r := NewReporter(ReporterConfig{
				Store: store.Open(), Key: "job/heartbeats", Node: node, Order: node, Timing: timing, By: -1,
				OnView: func(_ context.Context, doubts []Doubt) error {
					mu.Lock()
					defer mu.Unlock()
					for _, d := range doubts {
						if !slices.Contains(lost, d.Node) {
							lost = append(lost, d.Node)
						}
					}
					return nil
				},
			})
			if err := r.First(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second) // as while an agent joins
			go r.Run(t.Context())
		}
		run(0)
		time.Sleep(time.Minute)
		run(1)
		time.Sleep(10 * time.Second)
		mu.Lock()
		defer mu.Unlock()
		if len(lost) > 0 {
			t.Errorf("nodes %v are lost; all report", lost)
		}
	})
}

// TestOlderView: a view that a slow reader delivers after a later one does not replace it.
func TestOlderView(t *testing.T) {
	r := NewReporter(ReporterConfig{Store: rendezvous.NewMemory().Open(), Key: "job/heartbeats"})
	for _, c := range []struct {
		count, revision, want, wantRevision uint64
	}{{1, 10, 1, 10}, {3, 30, 3, 30}, {2, 20, 3, 30}, {3, 30, 3, 30}, {4, 31, 4, 31}} {
		text, err := json.Marshal(&View{Term: 1, Count: c.count})
		if err != nil {
			t.Fatal(err)
		}
		if r.saw(text, c.revision); r.view.Count != c.want || r.revision != c.wantRevision {
			t.Errorf("after view %d at revision %d: view %d at revision %d, want view %d at revision %d", c.count, c.revision,
				r.view.Count, r.revision, c.want, c.wantRevision)
		}
	}
}

// TestEarlierRun: reports that an earlier run with more nodes has left in the store are ignored, so that its workers,
// which have the numbers of this run's, are not lost.
func TestEarlierRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := rendezvous.NewMemory().Open()
		old, err := json.Marshal(&Report{
			Node: 5, Count: 9, Workers: []WorkerReport{{Worker: 1, Heartbeat: Heartbeat{Count: 7}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := store.Set(t.Context(), "job/heartbeats/5", old); err != nil {
			t.Fatal(err)
		}
		view := []byte(`{"term":3,"count":9,"node":5}`) // whose node coordinated
		if err := store.Set(t.Context(), "job/heartbeats-view", view); err != nil {
			t.Fatal(err)
		}
		r := NewReporter(ReporterConfig{
			Store: store, Key: "job/heartbeats", Timing: NewTiming(10*time.Second, 2), By: -1, NodesMax: 2,
		})
		go r.Run(t.Context())
		time.Sleep(time.Minute)
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.view == nil || r.view.Term != 4 || len(r.view.Doubts) > 0 {
			t.Errorf("view %+v, want one of this run without doubts", r.view)
		}
	})
}
