package listener

import (
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
)

// Rules are the security settings of a service's connections. Both ends must have the same.
type Rules struct {
	// TLS encrypts the connections. The same config is used for both sides: set Certificates, RootCAs and ClientCAs,
	// and ClientAuth to tls.RequireAndVerifyClientCert; without ServerName the dialed host is verified. Package
	// cluster/secret makes one. Default nil: no encryption.
	TLS *tls.Config
	// Authenticate, if not nil, authenticates the two ends of a new connection to each other after the hello. It must
	// read and write on conn no more than its own messages; conn has a deadline. An error refuses the connection.
	// Package cluster/secret makes one.
	Authenticate func(conn net.Conn, dialed bool, hello []byte) error
	// Below, if not nil, wraps the TCP connection below TLS.
	Below func(net.Conn) net.Conn
}

// ServiceConfig configures how a [Listener] accepts connections for one or more services.
type ServiceConfig struct {
	Services []Service
	Rules
	// Job is the job to which dialers must belong; nil: any.
	Job *string
	// Plain accepts connections without TLS although TLS is set; Handle decides whether to refuse them. It needs
	// Authenticate.
	Plain bool
	// Handle receives a connection after the handshake, on a new goroutine. It answers ([Accepted.Answer]) at once or
	// later, or returns an error, which refuses the connection.
	Handle func(*Accepted) error
	// Refused, if not nil, is called for every refusal, possibly concurrently. It must not block.
	Refused func(from net.Addr, reason Reason, err error)
}

// Acceptor accepts the connections of the services that one [Listener.Serve] registered. Its methods may be called
// concurrently.
type Acceptor struct {
	ServiceConfig
	listener *Listener
	job      [16]byte
	refused  [reasons]atomic.Uint64
	last     atomic.Pointer[refused]
	work     sync.WaitGroup

	// Guarded by the listener's mu.
	waiting map[*Accepted]struct{} // connections without an answer
	closed  bool
}

// refused is a refused connection.
type refused struct {
	from net.Addr
	err  error
}

// Serve registers services and starts accepting their connections. It returns an error if the listener is closed or
// serves one of them already.
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
			return nil, fmt.Errorf("listener: %s already serves the %v", l.Addr(), e.Services[i])
		}
	}
	l.acceptors = append(l.acceptors, e)
	if !l.accepting {
		l.accepting = true
		l.work.Go(l.accept)
	}
	return e, nil
}

// Close unregisters the services, closes connections that have no answer yet, and waits for running handlers. Closing
// again waits too.
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

// Refuse counts and logs a connection that the service refuses or closes after Handle has returned.
func (e *Acceptor) Refuse(from net.Addr, err error) { e.listener.refuse(e, from, err) }

func (e *Acceptor) note(from net.Addr, reason Reason, err error) {
	e.refused[reason].Add(1)
	e.last.Store(&refused{from, err})
	if e.Refused != nil {
		e.Refused(from, reason, err)
	}
}

// Counts returns the number of connections that were refused, or closed because of invalid data, by reason: "magic",
// "proof", …. It omits reasons that did not occur.
func (e *Acceptor) Counts() map[string]uint64 {
	out := map[string]uint64{}
	for r := range e.refused {
		if n := e.refused[r].Load(); n > 0 {
			out[Reason(r).String()] = n
		}
	}
	return out
}

// LastRefusal describes the last refused connection, for the error of a rendezvous that timed out; "" if no connection
// was refused.
func (e *Acceptor) LastRefusal() string {
	last := e.last.Load()
	if last == nil {
		return ""
	}
	return fmt.Sprintf("last refused connection, from %v: %v", last.from, last.err)
}
