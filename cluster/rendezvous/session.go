package rendezvous

import (
	"time"
)

// session is the state of a client that the server keeps across connections: the changes that were made. A
// change whose response was lost with a connection is then not repeated when the client sends it again.
type session struct {
	id   clientID
	conn *serverConn // nil: not connected; guarded by Server.mu
	left time.Time   // since when it is not connected

	// Guarded by the memory's mu.
	owner  *serverConn         // the latest connection: only this one may change anything
	oldest uint64              // changes before it are answered or abandoned
	made   map[uint64]struct{} // changes that took effect, from oldest on
}

const (
	sessionsMax   = 1 << 16         // clients that are remembered
	sessionMemory = 5 * time.Minute // how long a disconnected client is remembered, at least, when there are many
	madeMax       = 1 << 12         // changes of a client that are remembered
)

// sessions are all clients that are remembered. Guarded by Server.mu.
type sessions map[clientID]*session

func newSessions() sessions { return sessions{} }

// enter assigns a new connection to a client's session, and returns the former one.
func (m sessions) enter(id clientID, c *serverConn) (former *serverConn) {
	s := m[id]
	if s == nil {
		if len(m) >= sessionsMax {
			m.clean()
		}
		s = &session{id: id, made: map[uint64]struct{}{}}
		m[id] = s
	}
	former, s.conn, c.session = s.conn, c, s
	return former
}

// leave records that a connection has ended.
func (m sessions) leave(c *serverConn) {
	if s := c.session; s.conn == c {
		s.conn, s.left = nil, time.Now()
	}
}

// clean removes the clients that disconnected long ago; if all were connected lately, the one that has been
// disconnected longest.
func (m sessions) clean() {
	var longest *session
	for id, s := range m {
		switch {
		case s.conn != nil:
		case time.Since(s.left) > sessionMemory:
			delete(m, id)
		case longest == nil || s.left.Before(longest.left):
			longest = s
		}
	}
	if len(m) >= sessionsMax && longest != nil {
		delete(m, longest.id)
	}
}

// begin reports whether a change received on a connection must still be made, and whether its response is
// awaited. A change is not repeated. It is not made either if the client has a newer connection, on which it
// has sent the change again.
func (s *session) begin(c *serverConn, q *request) (todo, awaited bool) {
	if s.owner != c {
		return false, false
	}
	if q.oldest > s.oldest {
		s.oldest = q.oldest
		for id := range s.made {
			if id < s.oldest {
				delete(s.made, id)
			}
		}
	}
	_, made := s.made[q.id]
	return !made, true
}
