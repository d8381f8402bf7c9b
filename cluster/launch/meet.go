package launch

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// meet waits until the agents of all nodes have joined an epoch, or the next one if it has started without this
// agent. It ends for all agents when the user or another agent ends the job, or when a node's agent does not
// join in time: the first one, or the replacement of a lost one.
func (a *Agent) meet(ctx context.Context, number uint32, mine card) (*meeting, error) {
	p := a.peers
	if p.nodes == 1 {
		return &meeting{Epoch: number, Seats: []nodeSlot{{card: mine, Nodes: 1, Nonce: p.nonce}}}, nil
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
	for _, s := range p.seats {
		a.await(s)
	}
	for proposed := false; ; {
		if !proposed && p.complete(number) {
			proposed = true
			p.propose(p.meeting(number), "event", "met", number)
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
			a.asked = sig
			return nil, a.stoppedEarly()
		case ev := <-p.events:
			switch met, err := a.hearBefore(ev, number); {
			case err != nil || met != nil && met.has(p.nonce):
				return met, err
			case met != nil: // it was declared lost when the others began
				if number++; int(number) > a.cfg.RestartsMax {
					return nil, fmt.Errorf("the job continues without %v, which was declared lost", &p.mine.card)
				}
				if err := renew(); err != nil {
					return nil, err
				}
				proposed = false
			case p.seats[p.node].State == lost: // wrongly
				if err := renew(); err != nil {
					return nil, err
				}
			}
		}
	}
}

// hearBefore handles an event that arrives before an epoch has begun. It returns the meeting if the epoch has
// begun.
func (a *Agent) hearBefore(ev event, number uint32) (*meeting, error) {
	p := a.peers
	switch {
	case ev.err != nil && p.gone(ev.err):
		p.cutOff = ev.err
		return nil, ev.err
	case ev.err != nil: // it can still recover before the rendezvous timeout
		a.remark(fmt.Sprintf("lockstep run: node %d cannot reach the other nodes, and retries: %v\n",
			p.node, ev.err))
	case ev.over != nil:
		return nil, &overError{*ev.over}
	case ev.interruption != nil:
		if a.asked = sigInterrupt; ev.interruption.Terminate {
			a.asked = sigTerminate
		}
		return nil, fmt.Errorf("node %d was stopped by %s", ev.interruption.Node, signalText(a.asked))
	case ev.kill:
		a.asked = sigInterrupt
		return nil, errors.New("another node was stopped by its user")
	case ev.met != nil && ev.epoch == number:
		if len(ev.met.Seats) != p.nodes {
			return nil, fmt.Errorf("this agent expects %d nodes, but the job has started with %d", p.nodes, len(ev.met.Seats))
		}
		return ev.met, nil
	case ev.seat != nil && ev.seat.Node < p.nodes:
		before := p.seats[ev.seat.Node]
		p.seats[ev.seat.Node] = ev.seat
		a.await(ev.seat)
		if before != nil && before.Nonce == ev.seat.Nonce && before.State == lost && ev.seat.State == here &&
			ev.seat.Node != p.node {
			a.remark(fmt.Sprintf("lockstep run: %v is back\n", &ev.seat.card))
		}
		if before != nil && before.Nonce != ev.seat.Nonce && ev.seat.State == here {
			a.remark(fmt.Sprintf("lockstep run: %v has replaced the agent on host %s with pid %d\n", &ev.seat.card, before.Host, before.PID))
		}
		if ev.seat.Nonce != p.nonce && ev.seat.Node == p.node {
			return nil, fmt.Errorf("%v was declared lost, and %w by the agent on host %s with pid %d", &p.mine.card, errReplaced, ev.seat.Host, ev.seat.PID)
		}
	}
	return nil, nil
}

// await reports that an agent is lost, and that a replacement is awaited.
func (a *Agent) await(s *nodeSlot) {
	if s != nil && s.State == lost && s.Node != a.cfg.Node {
		a.remark(fmt.Sprintf("lockstep run: %v is lost: %s; waiting up to %v for another agent with --node-rank %d\n", &s.card, s.Why, a.cfg.RendezvousTimeout, s.Node))
	}
}

// complete reports whether all agents have joined an epoch.
func (p *peers) complete(epoch uint32) bool {
	for _, s := range p.seats {
		if s == nil || s.State != here || s.Epoch != epoch || !s.Ready {
			return false
		}
	}
	return true
}

// meeting returns the meeting of an epoch with the current agents.
func (p *peers) meeting(epoch uint32) *meeting {
	m := &meeting{Epoch: epoch}
	for _, s := range p.seats {
		m.Seats = append(m.Seats, *s)
	}
	return m
}

// missing returns the error of a rendezvous that timed out: the agents that are missing, those that joined,
// and other processes at the store.
func (p *peers) missing(epoch uint32) error {
	var away, joined []string
	for n, s := range p.seats {
		switch {
		case s == nil:
			away = append(away, fmt.Sprintf("node %d is missing", n))
		case s.State == here && s.Epoch == epoch:
			joined = append(joined, s.String())
		case s.State == here:
			away = append(away, fmt.Sprintf("%v is alive, but has not ended its earlier workers", &s.card))
		default:
			away = append(away, fmt.Sprintf("%v is lost, and no agent with --node-rank %d has replaced it", &s.card, n))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewellTime)
	defer cancel()
	text := rendezvous.Strangers(ctx, p.store, p.job)
	if p.earlier != "" {
		text += "; " + p.earlier
	}
	return fmt.Errorf("rendezvous of job %q (epoch %d) timed out after %v: %d of %d nodes joined (%s); %s%s",
		p.job, epoch, p.wait, len(joined), p.nodes, strings.Join(joined, ", "), strings.Join(away, ", "), text)
}

// renewed calls renew repeatedly while the store cannot be reached.
func (p *peers) renewed(ctx context.Context, epoch uint32, mine card) error {
	for {
		err := p.renew(ctx, epoch, mine)
		if !errors.Is(err, rendezvous.ErrLost) || p.gone(err) || pause(ctx, p.beat) != nil {
			return err
		}
	}
}

// keeper names the possible causes, besides a cut link, why an agent cannot reach the store.
func (p *peers) keeper() string {
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
