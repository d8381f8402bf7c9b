package transporttest

import (
	"github.com/lockstep-ml/lockstep/internal/transport/composite"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// Domains returns the endpoints of a group of n ranks in one process, by rank, as if each domain were a process on a
// separate host: the ranks of a domain access each other's memory, and frames go through pipes.
func Domains(n int, domain func(n, rank int) int) []transport.Endpoint {
	places := make([]transport.Place, n)
	for r := range places {
		d := domain(n, r)
		places[r] = transport.Place{Worker: d, Domain: d, Host: d}
	}
	near := map[int][]transport.Endpoint{} // by domain: the endpoints that are left
	c := transport.Capabilities{Places: places}
	g, ends := composite.NewGroup(places), mem.NewPipes(n)
	for r, far := range ends {
		d := places[r].Domain
		if near[d] == nil {
			near[d] = mem.New(len(c.Domain(r)))
		}
		ends[r] = g.Join(r, near[d][0], far)
		near[d] = near[d][1:]
	}
	return ends
}
