package worker

import (
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestSilentHost: a host is called lost only if all of its workers that have not left the job are silent.
func TestSilentHost(t *testing.T) {
	const timeout = 20 * time.Second
	silent := membership.WorkerState{Seen: true, Silent: 21 * time.Second}
	late := membership.WorkerState{Seen: true, Silent: 16 * time.Second}
	alive := membership.WorkerState{Seen: true, Silent: time.Second}
	left := membership.WorkerState{Seen: true, Silent: time.Hour, Heartbeat: membership.Heartbeat{Final: true}}
	for _, test := range []struct {
		name   string
		states []membership.WorkerState // of workers 0 on one host, and 1 and those after it on another
		want   []int
	}{
		{"alone on its host", []membership.WorkerState{alive, silent}, nil},
		{"all silent", []membership.WorkerState{alive, silent, late, silent}, []int{2, 3}},
		{"one sends heartbeats", []membership.WorkerState{alive, silent, alive, silent}, nil},
		{"one has left", []membership.WorkerState{alive, silent, left, late}, []int{3}},
		{"the others have left", []membership.WorkerState{alive, silent, left, left}, nil},
	} {
		got := silentWith(1, test.states, timeout, func(a, b int) bool { return (a == 0) == (b == 0) })
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// TestSameHost: workers are on one host if its name is the same and the identities do not contradict.
func TestSameHost(t *testing.T) {
	const id = "boot net user 1000 amd64"
	w := &Worker{session: newSession()}
	for i, m := range [][2]string{
		{"a", id},
		{"a", id},
		{"b", id},                          // another node of Slurm on the same host
		{"a", "boot2 net user 1000 amd64"}, // another host of the same name
		{"a", "boot net user 1001 amd64"},
		{"a", ""},
		{"a", ""},
	} {
		w.members = append(w.members, Member{Worker: i, Host: m[0]})
		w.registrations = append(w.registrations,
			rendezvous.Registration{Host: m[0], Data: []byte(`{"transport":{"host":"` + m[1] + `"}}`)})
	}
	w.infos = decodeInfos(w.registrations)
	for b, want := range []bool{true, true, false, false, true, false, false} {
		if got := w.sameHost(0, b); got != want {
			t.Errorf("workers 0 and %d: %v, want %v", b, got, want)
		}
	}
	if !w.sameHost(5, 6) {
		t.Error("hosts of one name, without identities: want true")
	}
}
