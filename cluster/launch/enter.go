package launch

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/cluster/membership"
)

// enter decides about the input of an agent that takes its node's slot. Only one agent can have it: another agent that
// is alive keeps it, and one without a heartbeat for the heartbeat timeout is replaced.
func (d *decision) enter(in input) {
	if result, is := in.(interface{ ended() stoppable }); is {
		if end := result.ended(); end.sig != nil { // whether the action has succeeded or not
			d.signal = end.sig
			d.leave(d.stoppedEarly())
			return
		} else if end.err != nil {
			d.leave(end.err)
			return
		}
	}
	switch in := in.(type) {
	case begin:
		d.slots = make([]*nodeSlot, d.cfg.Nodes)
		if d.cfg.Nodes == 1 {
			d.do(takeReports{})
			return
		}
		t := membership.NewTiming(d.cfg.HeartbeatTimeout, d.cfg.Nodes)
		if t.Timeout > d.cfg.HeartbeatTimeout && d.cfg.Node == 0 {
			d.print("lockstep run: %d nodes report every %v, so the heartbeat timeout is %v instead of %v\n", d.cfg.Nodes,
				t.Every, t.Timeout, d.cfg.HeartbeatTimeout)
		}
		d.do(readMessages{})
	case found:
		if d.phase == checking {
			d.checkOthers(in.messages)
		} else {
			d.claim(in.messages)
		}
	case cleared:
		d.do(readMessages{})
	case contest:
		if old := d.slots[d.cfg.Node]; in.alive {
			d.leave(fmt.Errorf("node %d of job %q joined twice: its agent is on host %s as pid %d, and is alive; this one is "+
				"on host %s as pid %d", d.cfg.Node, d.cfg.ID, old.Host, old.PID, d.mine.Host, d.mine.PID))
			return
		}
		d.do(readMessages{})
	case written:
		if !in.done { // another agent was faster
			d.do(readMessages{})
			return
		}
		d.do(takeReports{})
	case reporting:
		if d.cfg.Nodes == 1 {
			d.joinNext(0)
			return
		}
		d.phase = checking
		d.do(readMessages{})
	}
}

// claim claims the slot, given all messages, unless another agent keeps it, or this one does not fit into the job. A
// store that outlives jobs may still have the end of an earlier job of this name: it is removed first.
func (d *decision) claim(messages []message) {
	end, held := endOf(messages)
	switch {
	case end == nil:
	case d.cfg.StoreHolder != "":
		d.leave(&jobEndedError{*end})
		return
	case d.before == nil:
		d.before = agentsIn(messages)
		d.earlier = fmt.Sprintf("an earlier run of job %q is over: %v", d.cfg.ID, end)
		d.print("lockstep run: %s; starting a new run\n", d.earlier)
		d.do(clearEnds{held})
		return
	default: // an agent of the earlier run may have written its slot, with the end of the job, at the same time
		for _, m := range held {
			if end := endIn(m); !d.before[end.Nonce] { // the new run has ended meanwhile
				d.leave(&jobEndedError{*end})
				return
			}
		}
		d.do(clearEnds{held})
		return
	}
	slots, begun := slotsIn(messages, d.cfg.Nodes)
	d.slots, d.first = slots, uint32(len(begun))
	s := &nodeSlot{registration: d.mine, Nodes: d.cfg.Nodes, Nonce: d.nonce, State: present, Epoch: d.first}
	old := slots[d.cfg.Node]
	switch err := s.incompatible(slots, begun); {
	case err != nil:
		d.leaveIncompatible(err, begun)
		return
	case old != nil && old.Nonce != s.Nonce && old.State == present && old.Nonce != d.rival:
		d.rival = old.Nonce // if it does not prove to be alive
		d.print("lockstep run: %v has this node slot: checking its heartbeat for up to %v\n", &old.registration,
			membership.NewTiming(d.cfg.HeartbeatTimeout, d.cfg.Nodes).Timeout)
		d.do(checkHolder{})
		return
	}
	if len(begun) > 0 {
		if err := s.mayReplace(begun[len(begun)-1], d.cfg.ID); err != nil {
			d.leave(err)
			return
		}
	}
	d.do(writeSlot{s, old})
}

// checkOthers compares a slot that was taken with those that others have taken at the same time: of two, at
// least the later one sees both.
func (d *decision) checkOthers(messages []message) {
	slots, begun := slotsIn(messages, d.cfg.Nodes)
	if s := slots[d.cfg.Node]; s != nil {
		if err := s.incompatible(slots, begun); err != nil {
			d.leaveIncompatible(err, begun)
			return
		}
		d.setSlot(s)
	}
	d.do(startPeers{})
	d.joinNext(d.first)
}

// leaveIncompatible ends a job that has not begun for all, since it is unknown which agent is right.
func (d *decision) leaveIncompatible(why error, begun []*epochMembers) {
	if len(begun) == 0 {
		d.do(endJob{1, why.Error()})
	}
	d.leave(why)
}

// leave ends an agent that has not joined.
func (d *decision) leave(err error) {
	d.result = &result{Outcome{Code: d.code(), Interrupted: d.signal != nil}, err}
	if d.cfg.Nodes > 1 {
		d.do(withdraw{*d.result})
	}
}
