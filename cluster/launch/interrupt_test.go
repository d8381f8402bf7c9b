package launch

import (
	"os"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// TestInterruptIsTheCause: a worker that the user's signal ended first, and the others' loss of it, do not fail the
// job. What failed before the signal does.
func TestInterruptIsTheCause(t *testing.T) {
	reached := failure.Record{Worker: 0, Kind: "interrupted", Message: "compiling the model: context canceled"}
	lostIt := failure.Record{Worker: 1, Kind: "error", Message: "aborted: replica 0 returned an error", Blames: []int{0}}
	crashed := failure.Record{Worker: 1, Kind: "panic", Message: "index out of range"}
	for _, c := range []struct {
		name      string
		signal    os.Signal
		userFirst bool
		records   []failure.Record
		failed    bool
	}{
		{"the signal reached worker 0 first", os.Interrupt, true, []failure.Record{reached, lostIt}, false},
		{"it reached all", os.Interrupt, true, []failure.Record{reached}, false},
		{"worker 0 was lost before", os.Interrupt, false, []failure.Record{reached, lostIt}, true},
		{"a worker crashed then", os.Interrupt, true, []failure.Record{reached, crashed}, true},
		{"worker 0 reported nothing", os.Interrupt, true, []failure.Record{lostIt}, true},
		{"no signal", nil, false, []failure.Record{reached, lostIt}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			end := nodeEnd{}
			for _, r := range c.records {
				r.ExitCode = 1
				end.Failures = append(end.Failures, failureReport{Record: r})
			}
			d := decision{state: state{cfg: &Config{}, signal: c.signal, epoch: epoch{
				userFirst: c.userFirst, failing: true, ends: map[int]nodeEnd{0: end}, layout: lay([]nodeSlot{{}}, 0),
			}}}
			o := d.outcome()
			if (o.Report != nil) != c.failed || !c.failed && o.Code != codeInterrupted || c.failed && o.Code != 1 {
				t.Errorf("outcome %+v", o)
			}
		})
	}
}
