package listener

import (
	"net"
	"net/netip"
	"os"
	"slices"
)

// Conns is a bounded set of open connections, oldest first, such as those that have not completed a handshake. The
// caller calls MakeRoom before Add, and holds a lock. Its zero value is empty.
type Conns struct {
	// Users makes MakeRoom distinguish the users of this host among the connections from a loopback address, where the
	// system reports it (Linux). Those of this process' user are closed last.
	Users bool

	all  []member
	from map[source]int // number of them
}

type member struct {
	conn net.Conn
	from source
}

// source is where connections come from.
type source struct {
	address netip.Addr // without the port; zero if the connection has no IP address
	user    int        // of a loopback address, or -1 if unknown
}

const unknownUser = -1

// Add adds a connection.
func (s *Conns) Add(c net.Conn) {
	if s.from == nil {
		s.from = map[source]int{}
	}
	from := s.sourceOf(c)
	s.all = append(s.all, member{c, from})
	s.from[from]++
}

func (s *Conns) sourceOf(c net.Conn) source {
	t, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return source{user: unknownUser}
	}
	peer := unmapped(t)
	from := source{peer.Addr(), unknownUser}
	if own, ok := c.LocalAddr().(*net.TCPAddr); s.Users && ok && peer.Addr().IsLoopback() {
		if user, ok := userOf(peer, unmapped(own)); ok {
			from.user = user
		}
	}
	return from
}

func unmapped(t *net.TCPAddr) netip.AddrPort {
	a := t.AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// Remove removes a connection, and returns false if it was not in the set.
func (s *Conns) Remove(c net.Conn) bool {
	i := slices.IndexFunc(s.all, func(o member) bool { return o.conn == c })
	if i >= 0 {
		s.take(i)
	}
	return i >= 0
}

// MakeRoom closes connections until at most keep are left, each time the oldest of the source that has the most: an
// address, or, with Users, a user of this host. So a flood from one source evicts only its own connections.
func (s *Conns) MakeRoom(keep int) {
	for len(s.all) > max(keep, 0) {
		most := s.all[0].from
		for from, n := range s.from {
			if s.before(from, n, most) {
				most = from
			}
		}
		s.take(slices.IndexFunc(s.all, func(o member) bool { return o.from == most })).Close()
	}
}

// before reports whether a connection of a source, which has n, is closed before one of another source.
func (s *Conns) before(from source, n int, other source) bool {
	if own, otherOwn := s.own(from), s.own(other); own != otherOwn {
		return otherOwn
	}
	return n > s.from[other]
}

// own reports whether a source is this process' user.
func (s *Conns) own(from source) bool { return from.user >= 0 && from.user == os.Getuid() }

func (s *Conns) take(i int) net.Conn {
	o := s.all[i]
	s.all = slices.Delete(s.all, i, i+1)
	s.leave(o.from)
	return o.conn
}

func (s *Conns) leave(from source) {
	if s.from[from]--; s.from[from] == 0 {
		delete(s.from, from)
	}
}
