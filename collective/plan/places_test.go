package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestPlacesAgainstMaps compares what plans derive from random places with the same derived by maps.
func TestPlacesAgainstMaps(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	numbers := []int{0, 1, 2, 3, 4, 5, 6, 7, 100, -1, -1 << 31, 1 << 30}
	valid, inOrder := 0, 0
	for range 20000 {
		p := Problem{Op: AllReduce, Size: 1 + random.IntN(7)}
		pick := func() int { return numbers[random.IntN(1+random.IntN(len(numbers)))] }
		for r := range p.Size {
			at := Place{Worker: pick(), Domain: pick(), Host: pick()}
			if random.IntN(2) == 0 {
				at = Place{Worker: r, Domain: r / 2, Host: r / 4}
			}
			if r > 0 && random.IntN(2) == 0 {
				at = p.Places[r-1]
			}
			p.Places = append(p.Places, at)
		}
		domainOf, hostOf, consistent := map[int]int{}, map[int]int{}, true
		domains, hosts := map[int][]int{}, map[int]int{}
		for r, at := range p.Places {
			if d, ok := domainOf[at.Worker]; ok && d != at.Domain {
				consistent = false
			}
			if h, ok := hostOf[at.Domain]; ok && h != at.Host {
				consistent = false
			}
			domainOf[at.Worker], hostOf[at.Domain] = at.Domain, at.Host
			domains[at.Domain] = append(domains[at.Domain], r)
			hosts[at.Host]++
		}
		if err := p.Validate(); (err == nil) != consistent {
			t.Fatalf("%v: Validate returns %v, consistent: %v", p.Places, err, consistent)
		}
		if d, h, shared := p.Spread(); d != len(domains) || h != len(hosts) || shared != (len(domains) < p.Size) {
			t.Fatalf("%v: Spread returns %d, %d, %v", p.Places, d, h, shared)
		}
		most, several := p.mostOnHost()
		if several != (len(hosts) > 1) || !slices.Contains(values(hosts), most) || slices.Max(values(hosts)) != most {
			t.Fatalf("%v: %d ranks on a host, several hosts: %v", p.Places, most, several)
		}
		adjacent := true
		for _, ranks := range domains {
			adjacent = adjacent && ranks[len(ranks)-1]-ranks[0] == len(ranks)-1
		}
		ranges, err := p.contiguous("it")
		if (err == nil) != adjacent {
			t.Fatalf("%v: contiguous returns %v, %v", p.Places, ranges, err)
		}
		all := p.domains()
		if len(all) != len(domains) {
			t.Fatalf("%v: domains %v", p.Places, all)
		}
		for i, ranks := range all {
			if !slices.Equal(ranks, domains[p.Places[ranks[0]].Domain]) {
				t.Fatalf("%v: domains %v", p.Places, all)
			}
			if err == nil && fmt.Sprint(ranges[i]) != fmt.Sprint(Ranks{ranks[0], ranks[0] + len(ranks)}) {
				t.Fatalf("%v: domains %v, ranges %v", p.Places, all, ranges)
			}
		}
		if consistent {
			valid++
		}
		if adjacent {
			inOrder++
		}
	}
	if valid < 1000 || inOrder < 1000 || inOrder > 19000 {
		t.Errorf("%d valid places and %d contiguous ones of 20000: too few of a kind", valid, inOrder)
	}
}

func values(m map[int]int) (out []int) {
	for _, v := range m {
		out = append(out, v)
	}
	return out
}
