// Package chooser selects the algorithm that executes a collective. Its inputs are data: a [Table] with the
// cost of transferring, copying and combining bytes, with a correction of the cost function of each
// algorithm, and with rules that need no cost. [Default] is the built-in table; [Table.Save] and [Load] store
// a table measured on a machine (lockstep bench --calibrate writes it).
//
// The choice is a pure function of the problem and the table. Ranks with different tables may choose
// different algorithms; their first frames then report that the algorithms differ.
package chooser

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Where describes the transports and the host on which a problem is executed.
type Where struct {
	// the transport by which the ranks of a domain access each other's memory ("mem", "shm"); empty: none
	Memory       string
	Frames       string // the transport of frames within a host: "mem", "shm", "tcp"; empty: as Memory
	ElementBytes int    // of an element in the partial sums' type; 0: 1
	Cores        int    // processors of this host; 0: as many as ranks
}

// Candidate is one algorithm for a problem, as rated by [Table.Rank].
type Candidate struct {
	Algorithm plan.Algorithm
	Cost      time.Duration // predicted by the algorithm's cost function
	Factor    float64       // ratio of measured to predicted time, as far as the table knows it
	Rule      bool          // a rule of the table names it
	Err       error         // why it does not fit; nil if it does
}

// Time returns the expected time of the candidate.
func (c Candidate) Time() time.Duration { return time.Duration(float64(c.Cost) * c.Factor) }

// Rank returns all algorithms for a problem, the best first: the one that a rule of the table names; then
// those that fit, by their time; then the others. Where times are equal, the order of [plan.Algorithms]
// decides.
func (t *Table) Rank(p plan.Problem, w Where) []Candidate {
	links, over := t.links(w), w.over(p)
	bytes := p.Count * max(1, w.ElementBytes)
	rule := t.rule(p, w, bytes)
	var out []Candidate
	for _, a := range plan.Algorithms {
		c := Candidate{Algorithm: a, Factor: 1, Err: w.fits(a, p)}
		if c.Err == nil {
			c.Cost = a.Cost(p, links)
			c.Factor = t.factor(a.Name, p.Op, over, bytes)
			c.Rule = a.Name == rule
		}
		out = append(out, c)
	}
	slices.SortStableFunc(out, func(a, b Candidate) int {
		switch {
		case (a.Err == nil) != (b.Err == nil):
			return before(a.Err == nil)
		case a.Rule != b.Rule:
			return before(a.Rule)
		}
		return int(min(1, max(-1, a.Time()-b.Time())))
	})
	return out
}

func before(yes bool) int {
	if yes {
		return -1
	}
	return 1
}

// Choose returns the best algorithm for a problem. It fails with the reasons if no algorithm fits.
func (t *Table) Choose(p plan.Problem, w Where) (plan.Algorithm, error) {
	ranked := t.Rank(p, w)
	if best := ranked[0]; best.Err == nil {
		return best.Algorithm, nil
	}
	var why []string
	for _, c := range ranked {
		why = append(why, fmt.Sprintf("%s: %v", c.Algorithm.Name, c.Err))
	}
	return plan.Algorithm{}, fmt.Errorf("collective: no algorithm fits %v: %s", p, strings.Join(why, "; "))
}

// Named returns the algorithm with this name. It fails if that algorithm cannot solve the problem.
func Named(name string, p plan.Problem, w Where) (plan.Algorithm, error) {
	a, err := Find(name)
	if err != nil {
		return a, fmt.Errorf("collective: %w", err)
	}
	if err := w.fits(a, p); err != nil {
		return a, fmt.Errorf("collective: algorithm %s: %w", name, err)
	}
	return a, nil
}

// Find returns the algorithm with this name.
func Find(name string) (plan.Algorithm, error) {
	a, ok := plan.FindAlgorithm(name)
	if !ok {
		return a, fmt.Errorf("no algorithm %q: want one of %s", name, strings.Join(Names(), ", "))
	}
	return a, nil
}

// Names returns the names of all algorithms.
func Names() []string {
	names := make([]string, len(plan.Algorithms))
	for i, a := range plan.Algorithms {
		names[i] = a.Name
	}
	return names
}

var errNoMemory = errors.New("it works in the peers' memory, and no peer's memory is accessible")

// fits returns nil, or the reason why an algorithm cannot solve the problem.
func (w Where) fits(a plan.Algorithm, p plan.Problem) error {
	if err := a.Fits(p); err != nil {
		return err
	}
	if w.Memory != "" || p.Size == 1 {
		return nil
	}
	for s := range a.Steps(p, 0) {
		if s.Kind == plan.Signal {
			return errNoMemory
		}
	}
	return nil
}

// over returns the table's name for what connects the ranks: the transport of the domain if there is only one
// domain, else that of the frames, or both joined by a plus. Ranks on several hosts are connected by the
// "network".
func (w Where) over(p plan.Problem) string {
	frames := w.Frames
	if frames == "" {
		frames = w.Memory
	}
	domains, hosts, shared := p.Spread()
	switch {
	case hosts > 1:
		frames = "network"
	case domains == 1 && w.Memory != "":
		return w.Memory
	}
	if shared && w.Memory != "" {
		return w.Memory + "+" + frames
	}
	return frames
}

// ranksPerCore returns how many ranks share a processor on average; 1 if the processors are unknown.
func (w Where) ranksPerCore(p plan.Problem) float64 {
	if w.Cores <= 0 {
		return 1
	}
	_, hosts, _ := p.Spread()
	return float64(p.Size) / float64(hosts*w.Cores)
}
