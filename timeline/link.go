package timeline

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Link records what a worker sent to another one over the network in a step, and how long it waited for data from it.
type Link struct {
	Peer int // worker
	// Sending is the time with data on its way to the peer: sent and not acknowledged, without the time in which the
	// peer's receive buffer was full.
	Sending time.Duration
	// Receiving is the time of waiting for data from the peer in collective calls.
	Receiving time.Duration
	Bytes     int64 // that the peer has acknowledged
}

// LinksMax is the number of links of a worker that a step has. A ring uses two, recursive halving the logarithm of the
// number of workers.
const LinksMax = 6

const (
	// linkWeight is the weight of a step in the moving means of a link: a kernel counts in ticks of 4 ms, and counts data
	// that is acknowledged late in the next step.
	linkWeight = 1.0 / 3
	linkLong   = 1.0 / 8 // of linkState.long
	// linkRatio is the part of the expected time that the links of a worker may take longer.
	linkRatio = 0.25
	// linkCorrelation is the variance of sums of those means over many steps, relative to that which batches of
	// detectorBatch steps show, because consecutive means have steps in common.
	linkCorrelation = 1.8
)

// linkDetector finds a worker with slow links, or one slow link. See [Detector].
//
// It compares two groups of links for each worker: those to the other workers, and those from them.
type linkDetector struct {
	links  map[[2]int]*linkState // by sender and receiver
	order  []*linkState          // in a fixed order
	groups []linkGroup           // 2w: the links from worker w; 2w+1: those to it
	cusum  cusum                 // of the groups
	named  Straggler             // the last one
}

// linkState has moving means of one direction between two workers over steps.
type linkState struct {
	ends [2]int // sender and receiver
	linkMeans
	long linkMeans // over more steps
	seen bool      // in this step
}

// linkMeans are moving means, in seconds and bytes.
type linkMeans struct{ sending, receiving, bytes float64 }

// add adds a step with a weight.
func (m *linkMeans) add(step linkMeans, weight float64) {
	m.sending += weight * (step.sending - m.sending)
	m.receiving += weight * (step.receiving - m.receiving)
	m.bytes += weight * (step.bytes - m.bytes)
}

// linkGroup has what the links of a group cost in the last steps, at most detectorKept.
type linkGroup struct{ last []linkCost }

// linkCost is the time of a step in which the slow links of a group send, the time expected of one of them, and the
// difference as a share of the rest of the step.
type linkCost struct{ cost, expected, excess float64 }

// linkRate is the time that a link takes for a byte, in seconds.
type linkRate struct {
	*linkState
	rate float64
}

func newLinkDetector(workers int) linkDetector {
	d := linkDetector{
		links: map[[2]int]*linkState{}, groups: make([]linkGroup, 2*workers), cusum: newCUSUM(2 * workers),
	}
	d.cusum.correlation = linkCorrelation
	return d
}

// compare compares the links in one step of all workers, which took that many seconds.
func (d *linkDetector) compare(all []Step, elapsed float64) {
	d.measure(all)
	wait := all[0].Wait
	for i := range all {
		wait = min(wait, all[i].Wait)
	}
	rates := d.rates(func(l *linkState) *linkMeans { return &l.linkMeans })
	var scratch []float64
	for worker := range all {
		var usual float64
		var ok bool
		usual, scratch, ok = usualRate(rates, worker, scratch)
		for end := range 2 {
			g := &d.groups[2*worker+end]
			c := linkCost{}
			if rate := usual; ok || otherRate(rates, worker, end, &rate) {
				c = d.cost(worker, end, rate, wait.Seconds(), elapsed)
			}
			d.cusum.add(2*worker+end, c.excess, max(detectorAllowance, linkRatio*c.expected/elapsed))
			if g.last = append(g.last, c); len(g.last) > detectorKept {
				g.last = slices.Delete(g.last, 0, 1)
			}
		}
	}
	d.cusum.endStep(all[0].Step)
}

// cost returns what the links of which a worker is the given end cost a step. What each costs more than expected is
// added, since they may send in turn; together it is at most what remains of the wait without them.
func (d *linkDetector) cost(worker, end int, rate, wait, elapsed float64) (c linkCost) {
	more := 0.0
	for _, l := range d.order {
		if l.ends[end] == worker {
			c.expected = max(c.expected, l.bytes*rate)
			more += min(l.sending, l.receiving) - l.bytes*rate
		}
	}
	more = min(more, wait-c.expected)
	c.cost = c.expected + more
	c.excess = more / max(elapsed-max(more, 0), detectorScaleMin*elapsed)
	return c
}

// measure adds a step to the means of the links.
func (d *linkDetector) measure(all []Step) {
	for _, l := range d.order {
		l.seen = false
	}
	for from := range all {
		for _, sent := range all[from].Links {
			if sent.Bytes <= 0 || sent.Peer < 0 || sent.Peer >= len(all) || sent.Peer == from {
				continue
			}
			ends := [2]int{from, sent.Peer}
			l := d.links[ends]
			if l == nil {
				l = &linkState{ends: ends}
				d.links[ends] = l
				d.order = append(d.order, l)
			}
			if l.seen {
				continue
			}
			l.seen = true
			step := linkMeans{sending: sent.Sending.Seconds(), bytes: float64(sent.Bytes)}
			for _, got := range all[sent.Peer].Links {
				if got.Peer == from && got.Receiving > 0 {
					step.receiving = got.Receiving.Seconds()
					break
				}
			}
			l.add(step, linkWeight)
			l.long.add(step, linkLong)
		}
	}
	for _, l := range d.order {
		if !l.seen {
			l.add(linkMeans{}, linkWeight)
			l.long.add(linkMeans{}, linkLong)
		}
	}
}

// rates returns the links that send, from the fastest to the slowest.
func (d *linkDetector) rates(of func(*linkState) *linkMeans) (rates []linkRate) {
	for _, l := range d.order {
		if m := of(l); m.bytes >= 1 {
			rates = append(rates, linkRate{l, m.sending / m.bytes})
		}
	}
	slices.SortFunc(rates, func(a, b linkRate) int { return cmp.Compare(a.rate, b.rate) })
	return rates
}

// usualRate returns the median rate of the links that do not touch a worker. ok is false if there is none. It also
// returns its scratch space, for the next call.
func usualRate(rates []linkRate, worker int, scratch []float64) (usual float64, _ []float64, ok bool) {
	list := scratch[:0]
	for _, l := range rates {
		if l.ends[0] != worker && l.ends[1] != worker {
			list = append(list, l.rate)
		}
	}
	n := len(list)
	if n == 0 {
		return 0, list, false
	}
	return (list[n/2] + list[(n-1)/2]) / 2, list, true
}

// otherRate sets the rate of the other direction of two workers' link. It returns false if nothing is sent there.
func otherRate(rates []linkRate, worker, end int, rate *float64) bool {
	for _, l := range rates {
		if l.ends[end] != worker {
			*rate = l.rate
			return true
		}
	}
	return false
}

// straggler returns the worker whose links are slow, or one slow link. ok is false if there is none. The answer changes
// at most once while a group is named: from a link to a worker.
func (d *linkDetector) straggler() (s Straggler, ok bool) {
	i := d.cusum.named
	if i < 0 {
		return s, false
	}
	over := func(value func(linkCost) float64) float64 {
		var list []float64
		for _, c := range d.groups[i].last {
			list = append(list, value(c))
		}
		return median(list)
	}
	if s = d.named; s.Step != d.cusum.step || s.Link != nil {
		worker, link := d.slowest(i / 2)
		switch {
		case link == nil:
			s = Straggler{Worker: worker, Cause: causeLink}
		case s.Step != d.cusum.step:
			s = Straggler{Worker: link[0], Cause: fmt.Sprintf("%s to worker %d", causeLink, link[1]), Link: link}
		}
	}
	s.Step = d.cusum.step
	s.Excess = over(func(c linkCost) float64 { return c.excess })
	s.Own = time.Duration(1e9 * over(func(c linkCost) float64 { return c.cost }))
	s.Others = time.Duration(1e9 * over(func(c linkCost) float64 { return c.expected }))
	d.named = s
	return s, true
}

// slowest returns the worker whose links with several others are slow: the given one, or the other end of its only slow
// link. If there is neither, it returns that link.
func (d *linkDetector) slowest(worker int) (slow int, link *[2]int) {
	peers, one := d.slowLinks(worker)
	if len(peers) != 1 {
		return worker, nil
	}
	if others, _ := d.slowLinks(peers[0]); len(others) > 1 {
		return peers[0], nil
	}
	return one[0], &one
}

// slowLinks returns the workers whose links with a worker are slow, and the slowest of those links. A slow link takes
// for a byte at least the mean of the slowest one's time and the median of the links that do not touch the worker.
func (d *linkDetector) slowLinks(worker int) (peers []int, slowest [2]int) {
	rates := d.rates(func(l *linkState) *linkMeans { return &l.long })
	rates, all := slices.DeleteFunc(slices.Clone(rates), func(l linkRate) bool {
		return l.ends[0] != worker && l.ends[1] != worker
	}), rates
	if len(rates) == 0 {
		return nil, slowest
	}
	last := rates[len(rates)-1]
	usual, _, ok := usualRate(all, worker, nil)
	if !ok { // two workers
		return []int{last.ends[0] + last.ends[1] - worker}, last.ends
	}
	for _, l := range rates {
		if peer := l.ends[0] + l.ends[1] - worker; l.rate >= (usual+last.rate)/2 && !slices.Contains(peers, peer) {
			peers = append(peers, peer)
		}
	}
	return peers, last.ends
}
