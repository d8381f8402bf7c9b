package membership

import (
	"testing"
	"time"
)

// TestViewOfEpoch: what a view states about workers that have left, and about worker 0, is that of one epoch. A worker
// of another epoch ignores it: also in a view that an earlier run left in the store.
func TestViewOfEpoch(t *testing.T) {
	now := time.Unix(1000, 0)
	report := func(node, worker int, epoch uint32, final bool) Report {
		return Report{Node: node, Count: 1, Epoch: epoch, Final: final, Workers: []WorkerReport{{
			Worker: worker, Heartbeat: Heartbeat{Count: 1, Step: int64(10 * (worker + 1)), Final: final, Waiting: true},
		}}}
	}
	j := newJudge(Timing{Every: time.Second, Min: time.Second / 5, Timeout: time.Minute}, nil, now)
	for _, r := range []Report{report(0, 0, 0, true), report(1, 1, 0, true)} {
		j.record(now, false, r)
	}
	before, _ := j.view(now)
	if before.Epoch != 0 || len(before.Left) != 1 || before.First == nil {
		t.Errorf("epoch 0: %+v, want workers 0 and 1 as left", before)
	}
	j.record(now, false, report(1, 1, 1, false)) // node 1 has restarted its worker
	j.record(now, false, Report{Node: 0, Count: 2})
	after, _ := j.view(now)
	if after.Epoch != 1 || len(after.Left) > 0 || after.First != nil {
		t.Errorf("epoch 1: %+v, want no worker as left, and nothing of worker 0", after)
	}
	m := NewMember(MemberConfig{
		Epoch: 1, Worker: 1, Nodes: [][]int{{0}, {1}}, File: NewMemoryFile(1), Timing: Timing{Every: time.Second},
	})
	for _, v := range []View{before, after} {
		m.view = v
		for _, s := range m.States() {
			if s.Heartbeat.Final || s.Heartbeat.Step != 0 {
				t.Errorf("a worker of epoch 1 with a view of epoch %d: %+v", v.Epoch, s)
			}
		}
	}
	m.cfg.Epoch, m.view = 0, before
	if s := m.States(); !s[0].Heartbeat.Final || !s[1].Heartbeat.Final || s[0].Heartbeat.Step != 10 {
		t.Errorf("a worker of epoch 0: %+v", s)
	}
}
