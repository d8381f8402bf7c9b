package launch

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// join waits until the agents of all nodes have joined an epoch, or the next one if it has started without this
// agent. It ends for all agents when the user or another agent ends the job, or when a node's agent does not
// join in time: the first one, or the replacement of a lost one.
func (a *Agent) join(ctx context.Context, number uint32, mine registration) (*epochMembers, error) {
	p := a.peers
	if p.nodes == 1 {
		return &epochMembers{Epoch: number, Slots: []nodeSlot{{registration: mine, Nodes: 1, Nonce: p.nonce}}}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.wait)
	defer cancel()
	renew := func() error {
		err := a.unlessStopped(ctx, func(ctx context.Context) error { return p.renewed(ctx, number, mine) })
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
			return p.missing(number)
		}
		return err
	}
	if err := renew(); err != nil {
		return nil, err
	}
	for _, s := range p.slots {
		a.await(s)
	}
	for proposed := false; ; {
		if !proposed && p.complete(number) {
			proposed = true
			p.propose(p.membership(number), "event", "members", number)
		}
		select {
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				if p.cutOff = p.reach(context.WithoutCancel(ctx)); p.cutOff != nil {
					return nil, p.cutOff
				}
				return nil, p.missing(number)
			}
			return nil, context.Cause(ctx)
		case sig := <-a.signals:
			a.userSignal = sig
			return nil, a.stoppedEarly()
		case ev := <-p.events:
			switch members, err := a.handleBefore(ev, number); {
			case err != nil || members != nil && members.has(p.nonce):
				return members, err
			case members != nil: // it was declared lost when the others began
				if number++; int(number) > a.cfg.RestartsMax {
					return nil, fmt.Errorf("the job continues without %v, which was declared lost", &p.mine.registration)
				}
				if err := renew(); err != nil {
					return nil, err
				}
				proposed = false
			case p.slots[p.node].State == lost: // wrongly
				if err := renew(); err != nil {
					return nil, err
				}
			}
		}
	}
}

// handleBefore handles an event that arrives before an epoch has begun. It returns the membership if the epoch has
// begun.
func (a *Agent) handleBefore(ev event, number uint32) (*epochMembers, error) {
	p := a.peers
	switch {
	case ev.err != nil && p.gone(ev.err):
		p.cutOff = ev.err
		return nil, ev.err
	case ev.err != nil: // it can still recover before the rendezvous timeout
		a.printUnlessQuiet(fmt.Sprintf("lockstep run: node %d cannot reach the other nodes, and retries: %v\n",
			p.node, ev.err))
	case ev.jobEnd != nil:
		return nil, &jobEndedError{*ev.jobEnd}
	case ev.interruption != nil:
		if a.userSignal = sigInterrupt; ev.interruption.Terminate {
			a.userSignal = sigTerminate
		}
		return nil, fmt.Errorf("node %d was stopped by %s", ev.interruption.Node, signalText(a.userSignal))
	case ev.kill:
		a.userSignal = sigInterrupt
		return nil, errors.New("another node was stopped by its user")
	case ev.members != nil && ev.epoch == number:
		if len(ev.members.Slots) != p.nodes {
			return nil, fmt.Errorf("this agent expects %d nodes, but the job has started with %d", p.nodes,
				len(ev.members.Slots))
		}
		return ev.members, nil
	case ev.slot != nil && ev.slot.Node < p.nodes:
		before := p.slots[ev.slot.Node]
		p.slots[ev.slot.Node] = ev.slot
		a.await(ev.slot)
		if before != nil && before.Nonce == ev.slot.Nonce && before.State == lost && ev.slot.State == present &&
			ev.slot.Node != p.node {
			a.printUnlessQuiet(fmt.Sprintf("lockstep run: %v is back\n", &ev.slot.registration))
		}
		if before != nil && before.Nonce != ev.slot.Nonce && ev.slot.State == present {
			a.printUnlessQuiet(fmt.Sprintf("lockstep run: %v has replaced the agent on host %s with pid %d\n",
				&ev.slot.registration, before.Host, before.PID))
		}
		if ev.slot.Nonce != p.nonce && ev.slot.Node == p.node {
			return nil, p.replaced(ev.slot)
		}
	}
	return nil, nil
}

// await reports that an agent is lost, and that a replacement is awaited.
func (a *Agent) await(s *nodeSlot) {
	if s != nil && s.State == lost && s.Node != a.cfg.Node {
		a.printUnlessQuiet(fmt.Sprintf("lockstep run: %v is lost: %s; waiting up to %v for another agent with --node-rank "+
			"%d\n", &s.registration, s.Why, a.cfg.RendezvousTimeout, s.Node))
	}
}

// complete reports whether all agents have joined an epoch.
func (p *peers) complete(epoch uint32) bool {
	for _, s := range p.slots {
		if s == nil || s.State != present || s.Epoch != epoch || !s.Ready {
			return false
		}
	}
	return true
}

// membership returns the membership of an epoch with the current agents.
func (p *peers) membership(epoch uint32) *epochMembers {
	m := &epochMembers{Epoch: epoch}
	for _, s := range p.slots {
		m.Slots = append(m.Slots, *s)
	}
	return m
}

// missing returns the error of a rendezvous that timed out: the agents that are missing, those that joined,
// and other processes at the store.
func (p *peers) missing(epoch uint32) error {
	var away, joined []string
	for n, s := range p.slots {
		switch {
		case s == nil:
			away = append(away, fmt.Sprintf("node %d is missing", n))
		case s.State == present && s.Epoch == epoch:
			joined = append(joined, s.String())
		case s.State == present:
			away = append(away, fmt.Sprintf("%v is alive, but has not ended its earlier workers", &s.registration))
		default:
			away = append(away, fmt.Sprintf("%v is lost, and no agent with --node-rank %d has replaced it", &s.registration, n))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	text := rendezvous.UnrelatedProcesses(ctx, p.store, p.job)
	if p.earlier != "" {
		text += "; " + p.earlier
	}
	return fmt.Errorf("rendezvous of job %q (epoch %d) timed out after %v: %d of %d nodes joined (%s); %s%s",
		p.job, epoch, p.wait, len(joined), p.nodes, strings.Join(joined, ", "), strings.Join(away, ", "), text)
}

// renewed calls renew repeatedly while the store cannot be reached.
func (p *peers) renewed(ctx context.Context, epoch uint32, mine registration) error {
	for {
		err := p.renew(ctx, epoch, mine)
		if !errors.Is(err, rendezvous.ErrLost) || p.gone(err) || pause.For(ctx, p.interval) != nil {
			return err
		}
	}
}

// outageCause names the possible causes, besides a cut link, why an agent cannot reach the store.
func (p *peers) outageCause() string {
	if p.holder == "" {
		return "the store is down"
	}
	return "the host of " + p.holder + " is"
}

// storeLost returns the error of an agent whose store is lost.
func (p *peers) storeLost(err error) error {
	if p.holder == "" {
		return fmt.Errorf("the store cannot be reached any more: %w", err)
	}
	return fmt.Errorf("the store cannot be reached any more; it ended with %s, and so does the job: %w", p.holder, err)
}
