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

// authenticator is what Authenticate returns.
type authenticator = func(conn net.Conn, dialed bool, hello []byte) error

// between runs both ends of the challenge on a connection, and returns their errors.
func between(dialer, acceptor net.Conn, dial, accept authenticator, hellos [2]string) (dialed, accepted error) {
	deadline := time.Now().Add(time.Minute)
	dialer.SetDeadline(deadline)
	acceptor.SetDeadline(deadline)
	done := make(chan error, 1)
	go func() {
		err := accept(acceptor, false, []byte(hellos[1]))
		if err != nil {
			acceptor.Close()
		}
		done <- err
	}()
	dialed = dial(dialer, true, []byte(hellos[0]))
	if dialed != nil {
		dialer.Close()
	}
	return dialed, <-done
}

func TestAuthenticate(t *testing.T) {
	s, other := parsed(t, text), parsed(t, text+"x")
	same := [2]string{"hello", "hello"}
	accept := s.Authenticate(secret.Group, "job", 3)
	for _, c := range []struct {
		name   string
		dial   authenticator
		hellos [2]string
		ok     bool
	}{
		{"the same job", s.Authenticate(secret.Group, "job", 3), same, true},
		{"another secret", other.Authenticate(secret.Group, "job", 3), same, false},
		{"another purpose", s.Authenticate(secret.Store, "job", 3), same, false},
		{"another job", s.Authenticate(secret.Group, "jobb", 3), same, false},
		{"another epoch", s.Authenticate(secret.Group, "job", 2), same, false},
		{"a changed hello", accept, [2]string{"hello", "hullo"}, false},
		{"a truncated hello", accept, [2]string{"hello", "hell"}, false},
	} {
		a, b := net.Pipe()
		dialed, accepted := between(a, b, c.dial, accept, c.hellos)
		a.Close()
		b.Close()
		if c.ok {
			if dialed != nil || accepted != nil {
				t.Errorf("%s: %v, %v", c.name, dialed, accepted)
			}
			continue
		}
		for side, err := range map[string]error{"dialer": dialed, "acceptor": accepted} {
			if err == nil || !strings.Contains(err.Error(), "has another secret, job or epoch") {
				t.Errorf("%s: the %s's error is %v", c.name, side, err)
			}
		}
	}
}

// TestReflection: an end that sends back what it receives, or that uses another session's messages, proves nothing.
func TestReflection(t *testing.T) {
	authenticate := parsed(t, text).Authenticate(secret.Group, "job", 3)
	for _, dialed := range []bool{true, false} {
		a, b := net.Pipe()
		go func() { // the mirror
			echo := make([]byte, 64)
			if dialed { // a nonce; then the received proof is sent back
				b.Write(echo[:32])
				io.ReadFull(b, echo)
				b.Write(append([]byte{1}, echo[32:]...))
			} else { // the received nonce is sent back as nonce and as proof
				io.ReadFull(b, echo[:32])
				copy(echo[32:], echo)
				b.Write(echo)
			}
			io.Copy(io.Discard, b)
		}()
		a.SetDeadline(time.Now().Add(time.Minute))
		if err := authenticate(a, dialed, []byte("hello")); err == nil {
			t.Errorf("a mirror is accepted (dialed: %v)", dialed)
		}
		a.Close()
		b.Close()
	}
	// Two sessions with one acceptor: the response to the first is the nonce of the second.
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
		go func() { done <- authenticate(b, false, []byte("hello")); b.Close() }()
		io.ReadFull(a, nonces[i][:])
	}
	ends[0].Write(append(make([]byte, 32), nonces[1][:]...))
	var verdict [33]byte
	if _, err := io.ReadFull(ends[0], verdict[:]); err != nil || verdict != [33]byte{} {
		t.Errorf("the verdict is % x, %v; want a refusal without content", verdict, err)
	}
	if err := <-done; err == nil {
		t.Error("a nonce is accepted as proof")
	}
	ends[1].Close()
	<-done
}

// TestBoundToTLS: an attacker in the path, with a TLS connection to each of the two ends, cannot forward their proofs.
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
	authenticate := s.Authenticate(secret.Group, "job", 3)
	hellos := [2]string{"hello", "hello"}
	client, server := open(cfg)
	if dialed, accepted := between(client, server, authenticate, authenticate, hellos); dialed != nil || accepted != nil {
		t.Errorf("inside TLS: %v, %v", dialed, accepted)
	}
	client, middle := open(cfg)
	middle2, server := open(cfg)
	go io.Copy(middle, middle2)
	go io.Copy(middle2, middle)
	if dialed, accepted := between(client, server, authenticate, authenticate, hellos); dialed == nil || accepted == nil {
		t.Errorf("with an attacker in the path: %v, %v", dialed, accepted)
	}
	for _, c := range []net.Conn{middle, middle2} {
		c.(*tls.Conn).NetConn().Close()
	}
}

// FuzzAuthenticate: whatever bytes a stranger sends, both sides refuse it.
func FuzzAuthenticate(f *testing.F) {
	f.Add(make([]byte, 64), true)
	f.Add(append(bytes.Repeat([]byte{1}, 33), 2), false)
	s, err := secret.Parse(text)
	if err != nil {
		f.Fatal(err)
	}
	authenticate := s.Authenticate(secret.Group, "job", 3)
	f.Fuzz(func(t *testing.T, sent []byte, dialed bool) {
		if err := authenticate(&stranger{sent: bytes.NewReader(sent)}, dialed, []byte("hello")); err == nil {
			t.Errorf("% x is accepted", sent)
		}
	})
}

// stranger is a connection to an end that sends fixed bytes.
type stranger struct {
	net.Conn
	sent *bytes.Reader
}

func (s *stranger) Read(p []byte) (int, error)  { return s.sent.Read(p) }
func (s *stranger) Write(p []byte) (int, error) { return len(p), nil }
