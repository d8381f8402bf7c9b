package rendezvous

import (
	"time"
)

// session is what the server keeps of a client from one connection to the next: which of its changes were made. So one whose
// response was lost with a connection is not made again when it is asked for again.
type session struct {
	id   clientID
	conn *serverConn // nil: none at the moment; guarded by Server.mu
	left time.Time   // since when there is none

	// Guarded by the memory's mu.
	owner  *serverConn         // the latest connection: no other one may change anything
	oldest uint64              // changes before it are answered or given up
	made   map[uint64]struct{} // changes that took effect, from oldest on
}

const (
	sessionsMax   = 1 << 16         // clients that are remembered
	sessionMemory = 5 * time.Minute // how long one without a connection is, at least if there are many
	madeMax       = 1 << 12         // changes of a client that are remembered
)

// sessions are all clients that are remembered. Guarded by Server.mu.
type sessions map[clientID]*session

func newSessions() sessions { return sessions{} }

// enter gives a client's session a new connection, and returns the one that it had.
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

// leave notes that a connection has ended.
func (m sessions) leave(c *serverConn) {
	if s := c.session; s.conn == c {
		s.conn, s.left = nil, time.Now()
	}
}

// clean forgets the clients that have been away for long; if all were here lately, the one that is away the longest.
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

// begin reports whether a change that came by a connection is still to be made, and whether its response is awaited. It is not
// to be made again, nor if the client has another connection by now, on which it has asked for it again.
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
