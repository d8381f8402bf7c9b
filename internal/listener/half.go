package listener

import (
	"net"
	"net/netip"
	"slices"
)

// halfOpen are connections that were accepted and have not greeted, or not proven themselves, the oldest first.
type halfOpen struct {
	all  []pending
	from map[netip.Addr]int // how many, by address
}

type pending struct {
	conn net.Conn
	from netip.Addr // without the port; the zero one where addresses have none
}

func (h *halfOpen) add(c net.Conn) {
	s := pending{conn: c}
	if t, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		s.from = t.AddrPort().Addr()
	}
	if h.from == nil {
		h.from = map[netip.Addr]int{}
	}
	h.all = append(h.all, s)
	h.from[s.from]++
}

// remove takes a connection out, and reports false if it is not there any more.
func (h *halfOpen) remove(c net.Conn) bool {
	i := slices.IndexFunc(h.all, func(s pending) bool { return s.conn == c })
	if i >= 0 {
		h.take(i)
	}
	return i >= 0
}

// makeRoom closes connections until at most keep are left: each time the oldest from the address that has the most, so that
// a stranger pushes out its own.
func (h *halfOpen) makeRoom(keep int) {
	for len(h.all) > max(keep, 0) {
		most := h.all[0].from
		for from, n := range h.from {
			if n > h.from[most] {
				most = from
			}
		}
		h.take(slices.IndexFunc(h.all, func(s pending) bool { return s.from == most })).Close()
	}
}

func (h *halfOpen) take(i int) net.Conn {
	s := h.all[i]
	h.all = slices.Delete(h.all, i, i+1)
	if h.from[s.from]--; h.from[s.from] == 0 {
		delete(h.from, s.from)
	}
	return s.conn
}
