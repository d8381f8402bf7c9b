package door

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

// Entry says how a door lets in who is for some services.
type Entry struct {
	Services []Service
	Rules
	// Job is the job that callers must be of; nil: any.
	Job *string
	// Plain lets in callers without TLS although there is some: whether they may is Handle's to say.
	Plain bool
	// Handle takes a connection that has greeted and proven itself, on a goroutine of its own. It answers it ([Arrival.Answer]), then or
	// later, or returns why it is refused.
	Handle func(*Arrival) error
	// Refused, if given, is told of every refusal, one after the other or at once. It must not block.
	Refused func(from net.Addr, reason Reason, err error)
}

// Entrance is what a door keeps for some services.
type Entrance struct {
	Entry
	door    *Door
	job     [16]byte
	refused [reasons]atomic.Uint64
	last    atomic.Pointer[refused]
	work    sync.WaitGroup

	// Guarded by the door's mu.
	waiting map[*Arrival]struct{} // that have no answer yet
	closed  bool
}

// refused is a connection that was.
type refused struct {
	from net.Addr
	err  error
}

// Serve has a service's connections handed to it from now on. There can be one at a time for each service.
func (d *Door) Serve(entry Entry) (*Entrance, error) {
	e := &Entrance{Entry: entry, door: d, waiting: map[*Arrival]struct{}{}}
	if entry.Job != nil {
		e.job = JobID(*entry.Job)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("door: %s is closed", d.Addr())
	}
	for _, other := range d.entrances {
		if i := slices.IndexFunc(e.Services, func(s Service) bool { return slices.Contains(other.Services, s) }); i >= 0 {
			return nil, fmt.Errorf("door: %s serves a %v already", d.Addr(), e.Services[i])
		}
	}
	d.entrances = append(d.entrances, e)
	if !d.accepting {
		d.accepting = true
		d.work.Go(d.accept)
	}
	return e, nil
}

// Close ends the service: connections that have no answer yet are closed, and those that are being handled are waited for.
// Closing again waits too.
func (e *Entrance) Close() {
	e.door.mu.Lock()
	e.door.entrances = slices.DeleteFunc(e.door.entrances, func(other *Entrance) bool { return other == e })
	e.closed = true
	for a := range e.waiting {
		a.Raw.Close()
	}
	clear(e.waiting)
	e.door.mu.Unlock()
	e.work.Wait()
}

// Refuse counts and logs a connection that the service refuses, or ends, after Handle.
func (e *Entrance) Refuse(from net.Addr, err error) { e.door.refuse(e, from, err) }

func (e *Entrance) note(from net.Addr, reason Reason, err error) {
	e.refused[reason].Add(1)
	e.last.Store(&refused{from, err})
	if e.Refused != nil {
		e.Refused(from, reason, err)
	}
}

// Counts returns how many connections were refused, or ended for what came through them, by reason: "magic", "proof", …. Reasons
// that did not occur are left out.
func (e *Entrance) Counts() map[string]uint64 {
	out := map[string]uint64{}
	for r := range e.refused {
		if n := e.refused[r].Load(); n > 0 {
			out[Reason(r).String()] = n
		}
	}
	return out
}

// Last says who was refused last, and why, for the error of who waits in vain: "" if nobody was.
func (e *Entrance) Last() string {
	last := e.last.Load()
	if last == nil {
		return ""
	}
	return fmt.Sprintf("the last connection that was refused, from %v: %v", last.from, last.err)
}
