package listener

import (
	"net"
	"net/netip"
	"slices"
)

// halfOpen holds the accepted connections that have not completed the handshake, oldest first.
type halfOpen struct {
	all  []pending
	from map[netip.Addr]int // number of them, by address
}

type pending struct {
	conn net.Conn
	from netip.Addr // without the port; zero if the connection has no IP address
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

// remove removes a connection, and returns false if it was not in the set.
func (h *halfOpen) remove(c net.Conn) bool {
	i := slices.IndexFunc(h.all, func(s pending) bool { return s.conn == c })
	if i >= 0 {
		h.take(i)
	}
	return i >= 0
}

// makeRoom closes connections until at most keep are left, each time the oldest of the address that has the most. So a
// flood from one address evicts only its own connections.
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
