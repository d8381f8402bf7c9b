package status

import (
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
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
			tr.Heartbeat(0, w, membership.Heartbeat{Count: 1})
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
		if points := tr.Charts(0, 0).Points; len(points) != 60 || points[59].Loss != nil {
			t.Errorf("%d points: want each step once, without a loss", len(points))
		}
		time.Sleep(silentTime)
		tr.Heartbeat(0, 0, membership.Heartbeat{Count: 2, Step: 60})
		time.Sleep(silentTime / 2)
		if j = tr.Job(); j.Workers[0].State != "running" || j.Workers[1].State != "silent" ||
			!strings.Contains(eventsOf(j), "worker 1 (host a, pid 1) has sent no heartbeat for 5s") {
			t.Errorf("workers %+v, events %s", j.Workers, eventsOf(j))
		}
		tr.Heartbeat(1, 0, membership.Heartbeat{Count: 1})
		tr.Report(0, steps(1, 61, 61, time.Millisecond)) // of the epoch before
		tr.Heartbeat(1, 0, membership.Heartbeat{Count: 2, Final: true, Step: 70})
		j = tr.Job()
		if j.Restarts != 1 || len(j.Workers) != 1 || j.Straggler != nil || j.Workers[0].State != "left" {
			t.Errorf("after a restart: %+v", j)
		}
	})
}

// TestTrackerLink follows a job of four workers whose ring has one slow link.
func TestTrackerLink(t *testing.T) {
	var named []string
	tr := NewTracker("job", func(s timeline.Straggler, _ bool) { named = append(named, s.String()) })
	for i := int64(1); i <= 60; i++ {
		for w := range 4 {
			tr.Heartbeat(0, w, membership.Heartbeat{Count: uint64(i)})
			r := steps(w, i, i, 60*time.Millisecond)
			s := &r.Steps[0]
			s.Links = [timeline.LinksMax]timeline.Link{
				{Peer: (w + 1) % 4, Sending: 5 * time.Millisecond, Bytes: 1 << 20},
				{Peer: (w + 3) % 4, Receiving: 40 * time.Millisecond},
			}
			if w == 1 {
				s.Links[0].Sending = 40 * time.Millisecond
			}
			tr.Report(0, r)
		}
	}
	j := tr.Job()
	if s := j.Straggler; s == nil || s.Link == nil || *s.Link != [2]int{1, 2} || s.Cause != "link to worker 2" ||
		len(named) != 1 || !strings.Contains(eventsOf(j), "the network link from worker 1 to worker 2 is slow, and all "+
		"workers wait for it: its data takes 40ms a step, on the other links 5ms (+54 % of a step)") {
		t.Errorf("straggler %+v, named %q, events %s", s, named, eventsOf(j))
	}
}

// TestPoints checks that the points of a chart are bounded, cover all steps, and say when earlier ones were dropped.
func TestPoints(t *testing.T) {
	tr := NewTracker("job", nil)
	const last = 3 * pointsKept
	for i := int64(1); i <= last; i++ {
		tr.Report(0, steps(0, i, i, time.Millisecond))
	}
	charts := tr.Charts(last, 1)
	all, series := charts.Points, charts.Series
	if len(all) > pointsKept || len(all) < pointsKept/2 || series < 2 || all[0].Step != 1 ||
		all[len(all)-1].Step < last-4 {
		t.Errorf("%d points of steps %d to %d, series %d", len(all), all[0].Step, all[len(all)-1].Step, series)
	}
	if c := tr.Charts(all[len(all)-1].Step, series); len(c.Points) != 0 || c.Series != series {
		t.Errorf("%d new points, series %d: want none, %d", len(c.Points), c.Series, series)
	}
	tr.add("0/heartbeats/-1", rendezvous.Entry{Value: []byte(`{"count":1}`)})
	tr.add("0/heartbeats/99999999", rendezvous.Entry{Value: []byte(`{"count":1}`)})
	tr.add("0/report/0", rendezvous.Entry{Value: []byte(`{"worker":7}`)})
	tr.add("0/report/0", rendezvous.Entry{Value: []byte(`null`)})
	tr.add("0/report/0", rendezvous.Entry{Value: []byte(`{"steps":[[1]]}`)})
	if n := len(tr.Job().Workers); n != 1 {
		t.Errorf("%d workers after invalid entries, want 1", n)
	}
}

// TestMeasured checks that what was measured at a step stays at that step: a report has many steps at once, and a
// validation ends after its step was reported.
func TestMeasured(t *testing.T) {
	tr := NewTracker("job", nil)
	report := func(from, to int64, measured ...timeline.Measurement) {
		r := steps(0, from, to, time.Millisecond)
		r.Training = &timeline.Training{Measured: measured}
		tr.Report(0, r)
	}
	metrics := func(x float64) map[string]float64 { return map[string]float64{"accuracy": x} }
	report(1, 54, timeline.Measurement{Step: 10, Metrics: metrics(0.1)},
		timeline.Measurement{Step: 54, Metrics: metrics(0.5)})
	first := tr.Charts(0, 0)
	if n := len(first.Measured); n != 2 || first.Measured[0].Step != 10 || first.Measured[1].Step != 54 ||
		tr.Job().Training.Measured != nil {
		t.Errorf("measured %+v, want at the steps 10 and 54", first.Measured)
	}
	validated := timeline.Measurement{Step: 54, Metrics: metrics(0.5), Validation: metrics(0.4)}
	report(55, 80, validated, timeline.Measurement{Step: 70, Metrics: metrics(0.6)})
	report(55, 80, validated, timeline.Measurement{Step: 70, Metrics: metrics(0.6)})
	next := tr.Charts(54, first.Series)
	if n := len(next.Measured); n != 2 || next.Measured[0].Validation["accuracy"] != 0.4 || next.Measured[1].Step != 70 ||
		next.Measured[1].Validation != nil {
		t.Errorf("then %+v, want the validation at step 54, and step 70", next.Measured)
	}
	for _, p := range next.Points {
		if p.Step <= 54 {
			t.Errorf("step %d was sent twice", p.Step)
		}
	}
	tr.Report(1, func() timeline.Report { // resumed from step 60
		r := steps(0, 61, 62, time.Millisecond)
		r.Training = &timeline.Training{Measured: []timeline.Measurement{{Step: 62, Metrics: metrics(0.3)}}}
		return r
	}())
	if all := tr.Charts(80, next.Series).Measured; len(all) != 3 || all[2].Step != 62 {
		t.Errorf("after a restart at step 60: %+v, want step 70 replaced by step 62", all)
	}
}

// TestEarlierSteps checks that the charts follow a training back to an earlier step: after a restart from a snapshot,
// after a return inside of a process, and when another trainer begins.
func TestEarlierSteps(t *testing.T) {
	tr := NewTracker("job", nil)
	var series int64
	check := func(after string, first, last, step int64) {
		t.Helper()
		charts := tr.Charts(1000, series)
		points, now := charts.Points, charts.Series
		if n := len(points); n == 0 || points[0].Step != first || points[n-1].Step != last || now == series {
			t.Errorf("%s: %d points %+v, series %d after %d: want steps %d to %d, and another series", after, n, points, now,
				series, first, last)
		}
		series = now
		if got := tr.Job().Step; got != step {
			t.Errorf("%s: step %d, want %d", after, got, step)
		}
	}
	later := func(r timeline.Report, by time.Duration, trainer int) timeline.Report {
		for i := range r.Steps {
			r.Steps[i].Start, r.Steps[i].End, r.Steps[i].Trainer = r.Steps[i].Start+by, r.Steps[i].End+by, trainer
		}
		return r
	}
	tr.Report(0, later(steps(0, 1, 100, time.Millisecond), 0, 1))
	check("first", 1, 100, 100)
	tr.Report(1, later(steps(0, 51, 60, time.Millisecond), 0, 1))
	check("restart", 1, 60, 60)
	tr.Report(1, later(steps(0, 41, 45, time.Millisecond), time.Hour, 1))
	check("return", 1, 45, 45)
	tr.Report(1, later(steps(0, 1, 3, time.Millisecond), 2*time.Hour, 2))
	check("another trainer", 1, 3, 3)
	tr.Report(1, later(steps(0, 46, 50, time.Millisecond), 3*time.Hour, 1)) // the first one trains on, too
	if c := tr.Charts(0, series); len(c.Points) != 3 || c.Series != series || tr.Job().Step != 3 {
		t.Errorf("%d points: want those of the latest trainer only", len(c.Points))
	}
	tr.Report(2, later(steps(0, 1, 5, time.Millisecond), 0, 1)) // new processes number their trainers from 1
	check("restart during the second trainer", 1, 5, 5)
}

// TestLostStore checks that workers are not called silent while the store cannot be reached.
func TestLostStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := NewTracker("job", nil)
		beat := func(count uint64) {
			for w := range 2 {
				tr.Heartbeat(0, w, membership.Heartbeat{Count: count, Step: 1})
			}
		}
		check := func(state, problem string) {
			t.Helper()
			j := tr.Job()
			if j.Workers[0].State != state || j.Workers[1].State != state || (problem == "") != (j.Problem == "") ||
				!strings.Contains(j.Problem, problem) {
				t.Errorf("states %s and %s, %q: want %s, %q", j.Workers[0].State, j.Workers[1].State, j.Problem, state, problem)
			}
		}
		beat(1)
		check("running", "")
		tr.Lost(errors.New("connection refused"))
		check("unknown", "cannot be reached: connection refused")
		time.Sleep(2 * silentTime)
		check("unknown", "cannot be reached: connection refused")
		tr.Lost(nil)
		check("running", "")
		time.Sleep(2 * silentTime)
		check("unknown", "no heartbeat from any worker for 10s")
		beat(2)
		check("running", "")
		texts := eventsOf(tr.Job())
		if strings.Contains(texts, "no heartbeat") || !strings.Contains(texts, "is reached again") {
			t.Errorf("events: %s", texts)
		}
	})
}
