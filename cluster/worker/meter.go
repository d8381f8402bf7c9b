package worker

import (
	"cmp"
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// linkMeter measures the network links of this worker with the others.
type linkMeter struct {
	tcp tcp.Meter

	mu      sync.Mutex
	traffic []tcp.Traffic   // reused by read
	links   []timeline.Link // reused by read
}

// read returns what the links did since the last call: those with the longest times, by worker.
func (m *linkMeter) read(members []Member) (out [timeline.LinksMax]timeline.Link) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.traffic = m.tcp.Read(m.traffic[:0])
	m.links = m.links[:0]
	for _, t := range m.traffic {
		at, _ := slices.BinarySearchFunc(members, t.Rank, func(w Member, rank int) int {
			return cmp.Compare(w.First+w.Replicas-1, rank)
		})
		if at == len(members) {
			continue
		}
		i := slices.IndexFunc(m.links, func(l timeline.Link) bool { return l.Peer == members[at].Worker })
		if i < 0 {
			i = len(m.links)
			m.links = append(m.links, timeline.Link{Peer: members[at].Worker})
		}
		l := &m.links[i]
		l.Sending, l.Receiving = max(l.Sending, t.Sending), max(l.Receiving, t.Receiving)
		l.Bytes += t.Bytes
	}
	slices.SortFunc(m.links, func(a, b timeline.Link) int {
		return cmp.Compare(max(b.Sending, b.Receiving), max(a.Sending, a.Receiving))
	})
	copy(out[:], m.links)
	return out
}
