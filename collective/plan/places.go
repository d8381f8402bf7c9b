package plan

import "fmt"

// firsts finds the first rank with a number, such as that of its domain. Transports number from 0, so it is a slice;
// other numbers are in a map.
type firsts struct {
	ranks []int32 // by number: the first rank with it, plus 1
	other map[int]int
}

func newFirsts(size int) firsts { return firsts{ranks: make([]int32, size)} }

// of returns the first rank for which it was called with this number: this one, if there was none before.
func (f *firsts) of(number, rank int) int {
	if number >= 0 && number < len(f.ranks) {
		if f.ranks[number] == 0 {
			f.ranks[number] = int32(rank) + 1
		}
		return int(f.ranks[number]) - 1
	}
	if first, ok := f.other[number]; ok {
		return first
	}
	if f.other == nil {
		f.other = map[int]int{}
	}
	f.other[number] = rank
	return rank
}

func (p Problem) validatePlaces() error {
	if p.Places == nil {
		return nil
	}
	if len(p.Places) != p.Size {
		return fmt.Errorf("%d places for %d ranks", len(p.Places), p.Size)
	}
	workers, domains := newFirsts(p.Size), newFirsts(p.Size)
	for rank, at := range p.Places {
		if d := p.Places[workers.of(at.Worker, rank)].Domain; d != at.Domain {
			return fmt.Errorf("worker %d is in domain %d, and rank %d of it in domain %d", at.Worker, d, rank, at.Domain)
		}
		if h := p.Places[domains.of(at.Domain, rank)].Host; h != at.Host {
			return fmt.Errorf("domain %d is on host %d, and rank %d of it on host %d", at.Domain, h, rank, at.Host)
		}
	}
	return nil
}

// Spread returns the number of domains and hosts of the ranks, and whether a domain has several ranks.
func (p Problem) Spread() (domains, hosts int, shared bool) {
	if p.Places == nil {
		return 1, 1, p.Size > 1
	}
	d, h := newFirsts(len(p.Places)), newFirsts(len(p.Places))
	for rank, at := range p.Places {
		if d.of(at.Domain, rank) == rank {
			domains++
		}
		if h.of(at.Host, rank) == rank {
			hosts++
		}
	}
	return domains, hosts, domains < len(p.Places)
}

// domain returns the number of the domain that a rank is in.
func (p Problem) domain(rank int) int {
	if p.Places == nil {
		return 0
	}
	return p.Places[rank].Domain
}

// domains returns the ranks of each domain, in order, by the order of their first ranks.
func (p Problem) domains() [][]int {
	var all [][]int
	index, number := newFirsts(p.Size), make([]int, p.Size) // number: of the domain, by its first rank
	for rank := range p.Size {
		first := index.of(p.domain(rank), rank)
		if first == rank {
			number[rank] = len(all)
			all = append(all, nil)
		}
		all[number[first]] = append(all[number[first]], rank)
	}
	return all
}

// contiguous returns the ranks of each domain, or an error if one is not a contiguous range.
func (p Problem) contiguous(name string) ([]Ranks, error) {
	if p.Places == nil {
		return []Ranks{{0, p.Size}}, nil
	}
	var all []Ranks
	domains := newFirsts(p.Size)
	for rank, at := range p.Places {
		switch first := domains.of(at.Domain, rank); {
		case first == rank:
			all = append(all, Ranks{rank, rank + 1})
		case p.Places[rank-1].Domain != at.Domain:
			last := rank - 2
			for p.Places[last].Domain != at.Domain {
				last--
			}
			return nil, fmt.Errorf("%s needs the ranks of a domain to follow each other: ranks %d and %d are in domain %d, "+
				"rank %d is not",
				name, last, rank, at.Domain, rank-1)
		default:
			all[len(all)-1].Hi++
		}
	}
	return all, nil
}

// mostOnHost returns the number of ranks on the host that has the most, and whether there are several hosts.
func (p Problem) mostOnHost() (most int, several bool) {
	if p.Places == nil {
		return p.Size, false
	}
	hosts, ranks := newFirsts(len(p.Places)), make([]int32, len(p.Places)) // ranks: of a host, by its first rank
	for rank, at := range p.Places {
		first := hosts.of(at.Host, rank)
		several = several || first > 0
		ranks[first]++
		most = max(most, int(ranks[first]))
	}
	return most, several
}
