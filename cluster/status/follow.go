package status

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/pause"
	"github.com/lockstep-ml/lockstep/timeline"
)

// The names of the keys that are followed, in an epoch of the job: see [rendezvous.Key].
const (
	// Heartbeats is the name under which nodes report the heartbeats of their workers, and Reports the one of the
	// workers' reports about their steps.
	Heartbeats = "heartbeats"
	Reports    = "report"
)

// Follow keeps the tracker up to date with what the workers of a job publish in its store, until ctx ends. It reads
// at most once per every. The error is the store's.
func Follow(ctx context.Context, s rendezvous.Store, job string, t *Tracker, every time.Duration) error {
	prefix := url.QueryEscape(job) + "/"
	for {
		entries, revision, err := s.List(ctx, prefix)
		for err == nil {
			t.Lost(nil)
			for _, e := range entries {
				t.add(strings.TrimPrefix(e.Key, prefix), e)
			}
			if pause.For(ctx, every) != nil {
				return nil
			}
			entries, revision, err = s.Changes(ctx, prefix, revision)
		}
		if ctx.Err() != nil {
			return nil
		}
		if !errors.Is(err, rendezvous.ErrCompacted) {
			t.Lost(err)
			return err
		}
	}
}

// add adds an entry of the store whose key is "<epoch>/<name>/<worker or node>", or "heartbeats/<node>". Others, and
// invalid ones, are ignored.
func (t *Tracker) add(key string, e rendezvous.Entry) {
	parts := strings.Split(key, "/")
	if len(parts) == 2 && parts[0] == Heartbeats && !e.Deleted { // of the agents of lockstep run
		t.report(e.Value)
	}
	if len(parts) != 3 || e.Deleted {
		return
	}
	epoch, err := strconv.ParseUint(parts[0], 10, 32)
	worker, also := strconv.Atoi(parts[2])
	if err != nil || also != nil {
		return
	}
	switch parts[1] {
	case Heartbeats:
		t.report(e.Value)
	case Reports:
		var r timeline.Report
		if json.Unmarshal(e.Value, &r) == nil && r.Worker == worker {
			t.Report(uint32(epoch), r)
		}
	}
}

// report adds a node's report.
func (t *Tracker) report(text []byte) {
	r, err := membership.DecodeReport(text)
	if err != nil {
		return
	}
	for i := range r.Workers {
		t.Heartbeat(r.Epoch, r.Workers[i].Worker, r.Workers[i].Heartbeat)
	}
}

// Local is the state of a job whose only worker is this process. It is read from the recorder for each request.
type Local struct {
	*Tracker

	Recorder *timeline.Recorder
}

// Job returns the state now.
func (l *Local) Job() Job {
	l.Report(0, localReport(l.Recorder))
	return l.Tracker.Job()
}

// Follow keeps the charts up to date, also without requests, until ctx ends.
func (l *Local) Follow(ctx context.Context, every time.Duration) {
	for ok := true; ok; ok = pause.For(ctx, every) == nil {
		l.Report(0, localReport(l.Recorder))
	}
}

// localReport returns the report of the only worker of a job, which is this process.
func localReport(r *timeline.Recorder) timeline.Report {
	report := r.Report()
	report.PID = os.Getpid()
	var err error
	if report.Host, err = os.Hostname(); err != nil {
		report.Host = "unknown"
	}
	return report
}
