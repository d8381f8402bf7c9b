package worker

import (
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestSight: whatever is known of a worker, the sentence says when and at what it was seen. One that was lost before anybody looked was
// seen as it joined.
func TestSight(t *testing.T) {
	at := rendezvous.Pulse{Step: 3, Phase: "compute", Text: "after 3 calls"}
	waits, gone := at, at
	waits.Waits, gone.Gone = true, true
	for _, test := range []struct {
		name string
		v    rendezvous.Vital
		want string
	}{
		{"not seen yet", rendezvous.Vital{Silent: time.Millisecond}, "was last seen less than a second ago as it joined the job"},
		{"not seen for long", rendezvous.Vital{Silent: 2340 * time.Millisecond}, "was last seen 2.3s ago as it joined the job"},
		{"before its first step", rendezvous.Vital{Seen: true, Pulse: rendezvous.Pulse{Step: -1, Text: "after 0 calls"}}, "was last seen less than a second ago after 0 calls"},
		{"at work", rendezvous.Vital{Seen: true, Pulse: at}, "was last seen less than a second ago at step 3, compute, after 3 calls"},
		{"silent", rendezvous.Vital{Seen: true, Pulse: at, Silent: 5 * time.Second}, "was last seen 5s ago at step 3, compute, after 3 calls"},
		{"still", rendezvous.Vital{Seen: true, Pulse: at, Still: time.Minute}, "was last seen less than a second ago at step 3, compute, after 3 calls, where it has been for 1m0s"},
		{"waits for long", rendezvous.Vital{Seen: true, Pulse: waits, Still: time.Minute}, "was last seen less than a second ago at step 3, compute, after 3 calls"},
		{"gone", rendezvous.Vital{Seen: true, Pulse: gone, Silent: time.Minute}, "has left the job, at step 3, compute, after 3 calls"},
	} {
		if got := sight(&test.v); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}
