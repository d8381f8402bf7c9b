package worker

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestLastSeen: whatever is known of a worker, the sentence says when and at what it was seen. One that was lost before
// anybody looked was
// seen as it joined.
func TestLastSeen(t *testing.T) {
	at := membership.Heartbeat{Step: 3, Phase: "compute", Text: "after 3 calls"}
	waits, gone := at, at
	waits.Waiting, gone.Final = true, true
	for _, test := range []struct {
		name string
		v    membership.WorkerState
		want string
	}{
		{
			"not seen yet",
			membership.WorkerState{Silent: time.Millisecond},
			"was last seen less than a second ago as it joined the job",
		},
		{
			"not seen for long",
			membership.WorkerState{Silent: 2340 * time.Millisecond},
			"was last seen 2.3s ago as it joined the job",
		},
		{"before its first step", membership.WorkerState{Seen: true, Heartbeat: membership.Heartbeat{
			Step: -1,
			Text: "after 0 calls",
		}}, "was last seen less than a second ago after 0 calls"},
		{
			"at work",
			membership.WorkerState{Seen: true, Heartbeat: at},
			"was last seen less than a second ago at step 3, compute, after 3 calls",
		},
		{
			"silent",
			membership.WorkerState{Seen: true, Heartbeat: at, Silent: 5 * time.Second},
			"was last seen 5s ago at step 3, compute, after 3 calls",
		},
		{
			"still",
			membership.WorkerState{Seen: true, Heartbeat: at, Stalled: time.Minute},
			"was last seen less than a second ago at step 3, compute, after 3 calls, where it has been for 1m0s",
		},
		{
			"waits for long",
			membership.WorkerState{Seen: true, Heartbeat: waits, Stalled: time.Minute},
			"was last seen less than a second ago at step 3, compute, after 3 calls",
		},
		{
			"gone",
			membership.WorkerState{Seen: true, Heartbeat: gone, Silent: time.Minute},
			"has left the job, at step 3, compute, after 3 calls",
		},
	} {
		if got := lastSeen(&test.v); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

// TestLeaseFix: each reason for which a worker ends by itself has its own text, which does not blame the store.
func TestLeaseFix(t *testing.T) {
	seen := map[string]bool{"": true}
	for _, err := range []error{
		membership.ErrDeclaredLost, membership.ErrAgent, membership.ErrFile, rendezvous.ErrFenced,
	} {
		err = fmt.Errorf("%w: for 30s", err)
		if fix := leaseFix(err); seen[fix] || strings.Contains(err.Error(), "store is lost") ||
			!errors.Is(err, rendezvous.ErrLost) {
			t.Errorf("%v: %q", err, fix)
		} else {
			seen[fix] = true
		}
	}
	if fix := leaseFix(rendezvous.ErrLost); fix != "" {
		t.Errorf("a lost store: %q", fix)
	}
}
