package secret_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// proofOf is what Authenticate returns.
type proofOf = func(conn net.Conn, dialed bool, greeting []byte) error

// between has two ends prove themselves over a connection, and returns what each says.
func between(dialer, acceptor net.Conn, dial, accept proofOf, greetings [2]string) (dialed, accepted error) {
	deadline := time.Now().Add(time.Minute)
	dialer.SetDeadline(deadline)
	acceptor.SetDeadline(deadline)
	done := make(chan error, 1)
	go func() {
		err := accept(acceptor, false, []byte(greetings[1]))
		if err != nil {
			acceptor.Close()
		}
		done <- err
	}()
	dialed = dial(dialer, true, []byte(greetings[0]))
	if dialed != nil {
		dialer.Close()
	}
	return dialed, <-done
}

func TestAuthenticate(t *testing.T) {
	s, other := parsed(t, text), parsed(t, text+"x")
	hello := [2]string{"hello", "hello"}
	for _, c := range []struct {
		name         string
		dial, accept proofOf
		greetings    [2]string
		ok           bool
	}{
		{"of one job", s.Authenticate("job", 3), s.Authenticate("job", 3), hello, true},
		{"another secret", other.Authenticate("job", 3), s.Authenticate("job", 3), hello, false},
		{"another job", s.Authenticate("jobb", 3), s.Authenticate("job", 3), hello, false},
		{"another epoch", s.Authenticate("job", 2), s.Authenticate("job", 3), hello, false},
		{"a greeting that was changed", s.Authenticate("job", 3), s.Authenticate("job", 3), [2]string{"hello", "hullo"}, false},
	} {
		a, b := net.Pipe()
		dialed, accepted := between(a, b, c.dial, c.accept, c.greetings)
		a.Close()
		b.Close()
		if c.ok {
			if dialed != nil || accepted != nil {
				t.Errorf("%s: %v, %v", c.name, dialed, accepted)
			}
			continue
		}
		for side, err := range map[string]error{"dialed": dialed, "accepted": accepted} {
			if err == nil || !strings.Contains(err.Error(), "has another secret, job or epoch") {
				t.Errorf("%s: the one who %s says %v", c.name, side, err)
			}
		}
	}
}

// TestReflection: who sends back to an end what it has sent, or has another end of the job answer, proves nothing.
func TestReflection(t *testing.T) {
	prove := parsed(t, text).Authenticate("job", 3)
	for _, dialed := range []bool{true, false} {
		a, b := net.Pipe()
		go func() { // the mirror
			echo := make([]byte, 64)
			if dialed { // a nonce, then back comes the proof that was given
				b.Write(echo[:32])
				io.ReadFull(b, echo)
				b.Write(append([]byte{1}, echo[32:]...))
			} else { // the nonce that was given, for a nonce and for a proof
				io.ReadFull(b, echo[:32])
				copy(echo[32:], echo)
				b.Write(echo)
			}
			io.Copy(io.Discard, b)
		}()
		a.SetDeadline(time.Now().Add(time.Minute))
		if err := prove(a, dialed, []byte("hello")); err == nil {
			t.Errorf("a mirror is believed (dialed: %v)", dialed)
		}
		a.Close()
		b.Close()
	}
	// Two sessions with one acceptor: the first's challenge is answered with what the second was told.
	var ends [2]net.Conn
	var nonces [2][32]byte
	done := make(chan error, 2)
	for i := range ends {
		a, b := net.Pipe()
		ends[i] = a
		defer a.Close()
		for _, c := range []net.Conn{a, b} {
			c.SetDeadline(time.Now().Add(10 * time.Second))
		}
		go func() { done <- prove(b, false, []byte("hello")); b.Close() }()
		io.ReadFull(a, nonces[i][:])
	}
	ends[0].Write(append(make([]byte, 32), nonces[1][:]...))
	var verdict [33]byte
	if _, err := io.ReadFull(ends[0], verdict[:]); err != nil || verdict != [33]byte{} {
		t.Errorf("the verdict is % x, %v; want a refusal that holds nothing", verdict, err)
	}
	if err := <-done; err == nil {
		t.Error("a nonce passes for a proof")
	}
	ends[1].Close()
	<-done
}

// tapped keeps what was written to a connection.
type tapped struct {
	net.Conn
	wrote bytes.Buffer
}

func (c *tapped) Write(p []byte) (int, error) {
	c.wrote.Write(p)
	return c.Conn.Write(p)
}

// TestReplay: what a dialer has said once is worth nothing a second time.
func TestReplay(t *testing.T) {
	prove := parsed(t, text).Authenticate("job", 3)
	a, b := net.Pipe()
	tap := &tapped{Conn: a}
	if dialed, accepted := between(tap, b, prove, prove, [2]string{"hello", "hello"}); dialed != nil || accepted != nil {
		t.Fatal(dialed, accepted)
	}
	a, b = net.Pipe()
	defer a.Close()
	go func() {
		io.ReadFull(a, make([]byte, 32))
		a.Write(tap.wrote.Bytes())
		io.Copy(io.Discard, a)
	}()
	b.SetDeadline(time.Now().Add(time.Minute))
	if err := prove(b, false, []byte("hello")); err == nil || !strings.Contains(err.Error(), "its proof is wrong") {
		t.Errorf("a proof that was replayed: %v", err)
	}
	b.Close()
}

// TestBoundToTLS: somebody in the middle, with a TLS connection to each of the two, cannot pass on their proofs.
func TestBoundToTLS(t *testing.T) {
	s := parsed(t, text)
	open := func(cfg *tls.Config) (client, server *tls.Conn) {
		a, b := net.Pipe()
		client, server = tls.Client(a, cfg), tls.Server(b, cfg)
		done := make(chan error, 1)
		go func() { done <- server.Handshake() }()
		if err := client.Handshake(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		return client, server
	}
	cfg, err := s.TLS("job", 3)
	if err != nil {
		t.Fatal(err)
	}
	prove := s.Authenticate("job", 3)
	hello := [2]string{"hello", "hello"}
	client, server := open(cfg)
	if dialed, accepted := between(client, server, prove, prove, hello); dialed != nil || accepted != nil {
		t.Errorf("inside of TLS: %v, %v", dialed, accepted)
	}
	client, middle := open(cfg)
	middle2, server := open(cfg)
	go io.Copy(middle, middle2)
	go io.Copy(middle2, middle)
	if dialed, accepted := between(client, server, prove, prove, hello); dialed == nil || accepted == nil {
		t.Errorf("through a man in the middle: %v, %v", dialed, accepted)
	}
	for _, c := range []net.Conn{middle, middle2} {
		c.(*tls.Conn).NetConn().Close()
	}
}

// FuzzAuthenticate: whatever a stranger says, it is refused, on both sides.
func FuzzAuthenticate(f *testing.F) {
	f.Add(make([]byte, 64), true)
	f.Add(append(bytes.Repeat([]byte{1}, 33), 2), false)
	s, err := secret.Parse(text)
	if err != nil {
		f.Fatal(err)
	}
	prove := s.Authenticate("job", 3)
	f.Fuzz(func(t *testing.T, says []byte, dialed bool) {
		if err := prove(&stranger{says: bytes.NewReader(says)}, dialed, []byte("hello")); err == nil {
			t.Errorf("% x is believed", says)
		}
	})
}

// stranger is a connection with one who says what it says.
type stranger struct {
	net.Conn
	says *bytes.Reader
}

func (s *stranger) Read(p []byte) (int, error)  { return s.says.Read(p) }
func (s *stranger) Write(p []byte) (int, error) { return len(p), nil }
