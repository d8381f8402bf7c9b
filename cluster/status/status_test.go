package status

import (
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/timeline"
)

// steps returns the report of a worker whose steps of 100 ms compute for a time and wait for the rest.
func steps(worker int, from, to int64, compute time.Duration) timeline.Report {
	r := timeline.Report{Worker: worker, Host: "a", PID: 1}
	for i := from; i <= to; i++ {
		r.Steps = append(r.Steps, timeline.Step{
			Step: i, Start: time.Duration(i-1) * 100 * time.Millisecond, End: time.Duration(i) * 100 * time.Millisecond,
			Compute: compute, Wait: 100*time.Millisecond - compute, Examples: 10, Loss: math.NaN(),
		})
	}
	return r
}

// eventsOf returns the texts of a job's events.
func eventsOf(j Job) string {
	var texts []string
	for _, e := range j.Events {
		texts = append(texts, e.Text)
	}
	return strings.Join(texts, "; ")
}

// TestTracker follows a job of two workers: one is slow, then it is killed, then all workers are restarted and leave.
func TestTracker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		named := ""
		tr := NewTracker("job", func(s timeline.Straggler, on bool) {
			if named = ""; on {
				named = s.String()
			}
		})
		for w := range 2 {
			tr.Heartbeat(0, w, rendezvous.Heartbeat{Count: 1})
		}
		for i := int64(1); i <= 60; i++ { // each report repeats steps of the one before
			tr.Report(0, steps(0, max(i-3, 1), i, 40*time.Millisecond))
			tr.Report(0, steps(1, max(i-3, 1), i, 80*time.Millisecond))
		}
		j := tr.Job()
		if j.Step != 60 || math.Abs(j.Workers[0].Compute-0.4) > 1e-9 || math.Abs(j.Workers[1].Wait-0.2) > 1e-9 ||
			math.Abs(j.ExamplesPerSecond-100) > 1e-9 {
			t.Errorf("got %+v", j)
		}
		if j.Straggler == nil || j.Straggler.Worker != 1 || !strings.HasPrefix(named, "worker 1 is slow") {
			t.Errorf("straggler %+v, named %q: want worker 1", j.Straggler, named)
		}
		if points, stride := tr.Points(0, 0); len(points) != 60 || stride != 1 || points[59].Loss != nil {
			t.Errorf("%d points, stride %d: want each step once, without a loss", len(points), stride)
		}
		time.Sleep(silentTime)
		tr.Heartbeat(0, 0, rendezvous.Heartbeat{Count: 2, Step: 60})
		time.Sleep(silentTime / 2)
		if j = tr.Job(); j.Workers[0].State != "running" || j.Workers[1].State != "silent" ||
			!strings.Contains(eventsOf(j), "worker 1 (host a, pid 1) has sent no heartbeat for 5s") {
			t.Errorf("workers %+v, events %s", j.Workers, eventsOf(j))
		}
		tr.Heartbeat(1, 0, rendezvous.Heartbeat{Count: 1})
		tr.Report(0, steps(1, 61, 61, time.Millisecond)) // of the epoch before
		tr.Heartbeat(1, 0, rendezvous.Heartbeat{Count: 2, Final: true, Step: 70})
		j = tr.Job()
		if j.Restarts != 1 || len(j.Workers) != 1 || j.Straggler != nil || j.Workers[0].State != "left" {
			t.Errorf("after a restart: %+v", j)
		}
	})
}

// TestPoints checks that the points of a chart are bounded, cover all steps, and say when earlier ones were dropped.
func TestPoints(t *testing.T) {
	tr := NewTracker("job", nil)
	const last = 3 * pointsKept
	for i := int64(1); i <= last; i++ {
		tr.Report(0, steps(0, i, i, time.Millisecond))
	}
	all, stride := tr.Points(last, 1)
	if len(all) > pointsKept || len(all) < pointsKept/2 || stride < 2 || all[0].Step != 1 ||
		all[len(all)-1].Step < last-stride {
		t.Errorf("%d points of steps %d to %d, stride %d", len(all), all[0].Step, all[len(all)-1].Step, stride)
	}
	if list, now := tr.Points(all[len(all)-1].Step, stride); len(list) != 0 || now != stride {
		t.Errorf("%d new points, stride %d: want none, %d", len(list), now, stride)
	}
	tr.add("0/alive/-1", rendezvous.Entry{Value: []byte(`{"beat":1}`)})
	tr.add("0/alive/99999999", rendezvous.Entry{Value: []byte(`{"beat":1}`)})
	tr.add("0/report/0", rendezvous.Entry{Value: []byte(`{"worker":7}`)})
	tr.add("0/report/0", rendezvous.Entry{Value: []byte(`null`)})
	tr.add("0/report/0", rendezvous.Entry{Value: []byte(`{"steps":[[1]]}`)})
	if n := len(tr.Job().Workers); n != 1 {
		t.Errorf("%d workers after invalid entries, want 1", n)
	}
}
