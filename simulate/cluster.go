package simulate

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Bounds of the values of a [Cluster].
const (
	FactorMax = 1e6                  // of a straggler, and of the oversubscription
	DelayMax  = 365 * 24 * time.Hour // of a latency, and of the late start of a rank
	MTUMin    = 576                  // every host accepts packets of this size (RFC 791)
	MTUMax    = 1<<16 - 1
)

// Cluster describes the machines. Bandwidths and rates are in bytes per second.
type Cluster struct {
	Ranks      int
	Hosts      int                   // the ranks are spread over them in order; the first may have one more
	Memory     bool                  // the ranks of a host access each other's memory
	Private    bool                  // with Memory: only the library's memory, so data is copied there first
	Inside     plan.Link             // within a host: a synchronisation or frame; a rank's reads or sends
	Outside    plan.Link             // between hosts: a frame; a host's network card in each direction
	MTU        int                   // bytes of an IP packet between hosts; 0: its headers take no bandwidth
	Oversub    float64               // the switch carries 1/Oversub of the bandwidth of all cards; 0 or 1: all of it
	Combine    float64               // rate at which one rank reads while it reduces
	Copy       float64               // rate at which one rank copies
	Cores      int                   // of a host; 0: one per rank
	Stragglers map[int]float64       // by rank: the factor by which it computes slower
	Late       map[int]time.Duration // by rank: how much later than the others it starts
}

// Bytes that TCP over IPv4 over Ethernet adds to the data of a packet.
const (
	HeaderBytes  = 20 + 20 + 12    // of IP, TCP and its timestamps, inside the MTU
	FramingBytes = 14 + 4 + 8 + 12 // of Ethernet around it: header, checksum, preamble and gap
)

// Places returns the place of every rank. Every rank is a separate process; the ranks of a host are one domain if
// they access each other's memory.
func (c *Cluster) Places() []plan.Place {
	places := make([]plan.Place, c.Ranks)
	each, more := c.Ranks/c.Hosts, c.Ranks%c.Hosts
	rank := 0
	for host := range c.Hosts {
		n := each
		if host < more {
			n++
		}
		for range n {
			p := plan.Place{Worker: rank, Domain: rank, Host: host}
			if c.Memory {
				p.Domain = host
			}
			places[rank] = p
			rank++
		}
	}
	return places
}

// stageBytes is the size of each rank's staging buffer in shared memory.
const stageBytes = 1 << 20

// Problem completes a problem for this cluster: it sets the number of ranks, their places and their memory.
func (c *Cluster) Problem(p plan.Problem, elementBytes int) plan.Problem {
	p.Size, p.Places = c.Ranks, c.Places()
	if c.Memory {
		p.Private, p.Stage = c.Private, stageBytes/elementBytes
	}
	return p
}

// Table returns a table from which algorithms are chosen for this cluster. Its network rate is that of one rank
// (plan.Links), so it divides the card's bandwidth by the ranks of a host: in the algorithms worth considering
// they send at the same time.
func (c *Cluster) Table() *chooser.Table {
	inside := chooser.Transport{
		Sync: int64(c.Inside.Latency), Read: c.Inside.Bandwidth, Frame: int64(c.Inside.Latency), Send: c.Inside.Bandwidth,
	}
	sharers := (c.Ranks + c.Hosts - 1) / c.Hosts
	return &chooser.Table{
		Version: chooser.Version, Machine: "the simulated cluster", Combine: c.Combine, Copy: c.Copy,
		Transports: map[string]chooser.Transport{
			"inside": inside, "network": {Frame: int64(c.Outside.Latency), Send: c.Outside.Bandwidth / float64(sharers)},
		},
	}
}

// Where returns the other inputs of the chooser.
func (c *Cluster) Where(elementBytes int) chooser.Where {
	w := chooser.Where{Frames: "inside", ElementBytes: elementBytes, Cores: c.Cores}
	if c.Memory {
		w.Memory = "inside"
	}
	return w
}

// Bound returns the lower bound of the time of an all-reduce of S bytes, 2(n-1)/n · S/B + latency. n is the number
// of hosts and B the bandwidth of a card; for a single host, n is the number of ranks and B the bandwidth of
// Inside.
func (c *Cluster) Bound(bytes int) time.Duration {
	n, link := c.Hosts, c.Outside
	if c.Hosts == 1 {
		n, link = c.Ranks, c.Inside
	}
	if n == 1 {
		return 0
	}
	carried := 2 * float64(n-1) / float64(n) * float64(bytes)
	return link.Latency + seconds(carried/link.Bandwidth)
}

// onCable returns the bytes that data takes between hosts, with its headers.
func (c *Cluster) onCable(bytes int) float64 {
	if c.MTU == 0 {
		return float64(bytes)
	}
	return float64(bytes) * float64(c.MTU+FramingBytes) / float64(c.MTU-HeaderBytes)
}

func (c *Cluster) check() error {
	positive := func(xs ...float64) bool {
		for _, x := range xs {
			if !(x > 0 && x <= math.MaxFloat64) {
				return false
			}
		}
		return true
	}
	switch {
	case c.Ranks < 1 || c.Hosts < 1 || c.Hosts > c.Ranks:
		return fmt.Errorf("simulate: %d ranks on %d hosts: want at least one rank a host", c.Ranks, c.Hosts)
	case !positive(c.Inside.Bandwidth, c.Outside.Bandwidth, c.Combine, c.Copy):
		return errors.New("simulate: a bandwidth or a rate is not positive, or not finite")
	case c.MTU != 0 && (c.MTU < MTUMin || c.MTU > MTUMax):
		return fmt.Errorf("simulate: an MTU of %d bytes: want %d to %d, or 0 for no headers", c.MTU, MTUMin, MTUMax)
	case c.Inside.Latency < 0 || c.Outside.Latency < 0 || c.Cores < 0:
		return errors.New("simulate: a latency or the number of cores is negative")
	case c.Inside.Latency > DelayMax || c.Outside.Latency > DelayMax:
		return fmt.Errorf("simulate: a latency is longer than %v", DelayMax)
	case !(c.Oversub >= 0 && c.Oversub <= FactorMax):
		return fmt.Errorf("simulate: oversubscription %v: want 1 to %.0f, or 0 for none", c.Oversub, float64(FactorMax))
	}
	for rank, factor := range c.Stragglers {
		if rank < 0 || rank >= c.Ranks || !(factor >= 1 && factor <= FactorMax) {
			return fmt.Errorf("simulate: straggler %d, %v times slower: want one of %d ranks and a factor from 1 to %.0f", rank,
				factor, c.Ranks, float64(FactorMax))
		}
	}
	for rank, by := range c.Late {
		if rank < 0 || rank >= c.Ranks || by < 0 || by > DelayMax {
			return fmt.Errorf("simulate: rank %d, %v late: want one of %d ranks and a time up to %v", rank, by, c.Ranks,
				DelayMax)
		}
	}
	return nil
}
