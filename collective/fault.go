package collective

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/internal/fault"
	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// otherRanks is the other ranks of a communicator, for fault attribution.
type otherRanks struct{ d *diagnosis }

func (p otherRanks) Missing() []int { return p.d.missing() }

func (p otherRanks) State(rank int) (s fault.State, ok bool) {
	if calls := p.d.team.callsOf(rank); calls != nil {
		return calls.state(fault.LatestCall), true
	}
	return fault.DecodeState(p.d.end.Ask(rank, fault.LatestCall))
}

func (p otherRanks) LastSeen(rank int) (l fault.LastSeen) {
	d := p.d
	l.Frame = d.exec.LastCall(rank)
	if d.site.sharesMemory() && d.site.in(rank) && !d.run.Call.Op.Pairwise() {
		l.Entered = !slices.Contains(d.end.Memory().Behind(0, nil), rank)
		if !l.Entered {
			l.Previous = d.calls.before(d.slot.Seq)
		}
	}
	return l
}

func (p otherRanks) Process(rank int) int { return p.d.site.process(rank) }

func (p otherRanks) Failed() bool { return p.d.front.Failing() }

// wait returns the wait of the current call, for fault attribution.
func (d *diagnosis) wait() *fault.Wait {
	return &fault.Wait{Rank: d.rank, Size: d.team.size, Call: d.calls.call(), Silent: d.silent, Peers: otherRanks{d}}
}

// overdue returns the error of a wait that took too long: it names the ranks at fault. cause is what ended
// the wait; nil: the call's own deadline.
func (d *diagnosis) overdue(waited time.Duration, cause *ended) error {
	wait := d.wait()
	found := wait.Probe()
	if d.front.Failing() {
		return executor.ErrFailed
	}
	patience := time.Duration(0) // others may have given up meanwhile, and have left
	if found.Failed {
		patience = failsMost
	}
	if reason := d.awaitReason(patience); reason != nil {
		d.departed = reason // the wait may have ended for another reason, as in Park
		return reason
	}
	text := wait.Describe(waited, found)
	var err *Error
	if cause == nil {
		err = d.failure(ErrTimeout, errors.New(text))
	} else {
		err = d.failure(cause.kind(), fmt.Errorf("%s: %w", text, cause))
	}
	if len(found.Ranks) > 0 {
		err.Peers = found.Ranks
	}
	return err
}

// failsMost is how long a rank waits to receive the reason why another rank has failed.
const failsMost = 500 * time.Millisecond

// stall logs that the call has waited long, and for which ranks.
func (d *diagnosis) stall(waited time.Duration) {
	wait := d.wait()
	found := wait.ProbeBriefly()
	if found.Ranks == nil {
		found.Ranks = d.missing()
	}
	d.front.LogStall(d.run, waited, ranges.Text("rank", found.Ranks), wait.Describe(waited, found))
}
