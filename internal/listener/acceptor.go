package listener

import (
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
)

// Rules are what the two ends of a service's connections must have in common.
type Rules struct {
	// TLS encrypts the connections. It serves both sides: set Certificates, RootCAs and ClientCAs, and ClientAuth to
	// tls.RequireAndVerifyClientCert; without ServerName the host dialed is verified. Package cluster/secret makes one. Default nil: plain.
	TLS *tls.Config
	// Authenticate, if given, lets the two ends of a new connection prove to each other that they belong together, after the
	// greeting, which is given to it: it may read and write exactly what it needs on conn, which has a deadline. An error refuses
	// the connection. Package cluster/secret makes one.
	Authenticate func(conn net.Conn, dialed bool, greeting []byte) error
	// Below, if given, is put between TLS and the connection.
	Below func(net.Conn) net.Conn
}

// ServiceConfig says how a door lets in who is for some services.
type ServiceConfig struct {
	Services []Service
	Rules
	// Job is the job that callers must be of; nil: any.
	Job *string
	// Plain lets in callers without TLS although there is some: whether they may is Handle's to say.
	Plain bool
	// Handle takes a connection that has greeted and proven itself, on a goroutine of its own. It answers it ([Accepted.Answer]), then or
	// later, or returns why it is refused.
	Handle func(*Accepted) error
	// Refused, if given, is told of every refusal, one after the other or at once. It must not block.
	Refused func(from net.Addr, reason Reason, err error)
}

// Acceptor is what a door keeps for some services.
type Acceptor struct {
	ServiceConfig
	listener *Listener
	job      [16]byte
	refused  [reasons]atomic.Uint64
	last     atomic.Pointer[refused]
	work     sync.WaitGroup

	// Guarded by the door's mu.
	waiting map[*Accepted]struct{} // that have no answer yet
	closed  bool
}

// refused is a connection that was.
type refused struct {
	from net.Addr
	err  error
}

// Serve has a service's connections handed to it from now on. There can be one at a time for each service.
func (l *Listener) Serve(entry ServiceConfig) (*Acceptor, error) {
	e := &Acceptor{ServiceConfig: entry, listener: l, waiting: map[*Accepted]struct{}{}}
	if entry.Job != nil {
		e.job = JobID(*entry.Job)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("listener: %s is closed", l.Addr())
	}
	for _, other := range l.acceptors {
		if i := slices.IndexFunc(e.Services, func(s Service) bool { return slices.Contains(other.Services, s) }); i >= 0 {
			return nil, fmt.Errorf("listener: %s serves a %v already", l.Addr(), e.Services[i])
		}
	}
	l.acceptors = append(l.acceptors, e)
	if !l.accepting {
		l.accepting = true
		l.work.Go(l.accept)
	}
	return e, nil
}

// Close ends the service: connections that have no answer yet are closed, and those that are being handled are waited for.
// Closing again waits too.
func (e *Acceptor) Close() {
	e.listener.mu.Lock()
	e.listener.acceptors = slices.DeleteFunc(e.listener.acceptors, func(other *Acceptor) bool { return other == e })
	e.closed = true
	for a := range e.waiting {
		a.Raw.Close()
	}
	clear(e.waiting)
	e.listener.mu.Unlock()
	e.work.Wait()
}

// Refuse counts and logs a connection that the service refuses, or ends, after Handle.
func (e *Acceptor) Refuse(from net.Addr, err error) { e.listener.refuse(e, from, err) }

func (e *Acceptor) note(from net.Addr, reason Reason, err error) {
	e.refused[reason].Add(1)
	e.last.Store(&refused{from, err})
	if e.Refused != nil {
		e.Refused(from, reason, err)
	}
}

// Counts returns how many connections were refused, or ended for what came through them, by reason: "magic", "proof", …. Reasons
// that did not occur are left out.
func (e *Acceptor) Counts() map[string]uint64 {
	out := map[string]uint64{}
	for r := range e.refused {
		if n := e.refused[r].Load(); n > 0 {
			out[Reason(r).String()] = n
		}
	}
	return out
}

// Last says who was refused last, and why, for the error of who waits in vain: "" if nobody was.
func (e *Acceptor) Last() string {
	last := e.last.Load()
	if last == nil {
		return ""
	}
	return fmt.Sprintf("the last connection that was refused, from %v: %v", last.from, last.err)
}
