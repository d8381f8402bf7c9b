package secret_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// protocol is one of the protocols whose connections start with the challenge.
type protocol struct {
	name    string
	purpose secret.Purpose
	hello   []byte // a dialer's
	framed  bool   // messages have a length of 4 bytes before them, which the challenge does not cover
	next    []byte // what the acceptor sends before the challenge
	// listen starts an acceptor, and dial a dialer, which ends with ctx.
	listen func(t *testing.T, authenticate authenticator) (network, address string)
	dial   func(ctx context.Context, authenticate authenticator, address string) error
	// impostor opens the listener that dial reaches.
	impostor func(t *testing.T) net.Listener
}

const proofJob, proofEpoch = "job with a secret", 3

var discard = slog.New(slog.DiscardHandler)

// protocols returns all of them.
func protocols(t *testing.T) []protocol {
	group := func(service listener.Service, network string) protocol {
		hello := listener.Hello{Service: service, Job: listener.JobID(proofJob)}
		p := protocol{
			name: service.String() + " over " + network, purpose: secret.Group, hello: hello.Encode(), next: []byte{'A'},
			listen: func(t *testing.T, authenticate authenticator) (string, string) {
				l := listen(t, network)
				node, err := tcp.Listen(tcp.Config{Job: proofJob, Listener: l, Authenticate: authenticate, Logger: discard})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { node.Close() })
				return network, l.Addr().String()
			},
			dial: func(ctx context.Context, authenticate authenticator, address string) error {
				node, err := tcp.Listen(tcp.Config{
					Job: proofJob, Authenticate: authenticate, Logger: discard,
					Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
						return new(net.Dialer).DialContext(ctx, network, address)
					},
				})
				if err != nil {
					return err
				}
				defer node.Close()
				_, err = node.Group(ctx, tcp.GroupConfig{
					Epoch: proofEpoch, Addrs: []string{"127.0.0.1:1", node.Addr()},
					Local: []int{1},
				})
				return err
			},
			impostor: func(t *testing.T) net.Listener { return listen(t, network) },
		}
		if service != listener.Control {
			p.dial = nil // it dials once a group is open, as Control does
		}
		return p
	}
	all := []protocol{group(listener.Control, "tcp"), group(listener.Data, "tcp"), storeProtocol()}
	if runtime.GOOS != "windows" {
		all = append(all, group(listener.Control, "unix"))
	}
	if shm.HostID() != "" {
		all = append(all, sharedMemory(t))
	}
	return all
}

// listen opens a listener, which the test closes.
func listen(t *testing.T, network string) net.Listener {
	address := "127.0.0.1:0"
	if network == "unix" {
		address = t.TempDir() + "/socket"
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func storeProtocol() protocol {
	hello := listener.Hello{Service: listener.Store}
	return protocol{
		name: "store", purpose: secret.Store, hello: hello.Encode(), next: []byte{'A'},
		listen: func(t *testing.T, authenticate authenticator) (string, string) {
			cfg := rendezvous.ServerConfig{Listen: "127.0.0.1:0", Authenticate: authenticate, Logger: discard}
			server, err := rendezvous.Serve(context.Background(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { server.Close() })
			return "tcp", server.Addr()
		},
		dial: func(ctx context.Context, authenticate authenticator, address string) error {
			s, err := rendezvous.Open(ctx, "tcp://"+address, rendezvous.Config{Authenticate: authenticate, Logger: discard})
			if err == nil {
				s.Close()
			}
			return err
		},
		impostor: func(t *testing.T) net.Listener { return listen(t, "tcp") },
	}
}

// sharedMemory is the set-up of shared memory over an abstract unix socket.
func sharedMemory(t *testing.T) protocol {
	hello, err := json.Marshal(map[string]any{
		"Protocol": "lockstep shm", "Version": 5, "Arch": runtime.GOARCH, "Job": proofJob, "Epoch": proofEpoch,
		"Size": 2, "Ranks": []int{1}, "Proof": true,
	})
	if err != nil {
		t.Fatal(err)
	}
	name := t.Name() + strconv.FormatInt(time.Now().UnixNano(), 36)
	sum := sha256.Sum256([]byte(name))
	address := "@lockstep-" + hex.EncodeToString(sum[:16])
	open := func(ctx context.Context, authenticate authenticator, rank int) error {
		ends, err := shm.Open(ctx, shm.Config{
			Name: name, Job: proofJob, Epoch: proofEpoch, Size: 2, Ranks: []int{rank}, ArenaBytes: 1, Authenticate: authenticate,
		})
		for _, e := range ends {
			e.Close()
		}
		return err
	}
	return protocol{
		name: "shared memory", purpose: secret.Group, hello: hello, framed: true, next: framed([]byte(`{"Refused":""}`)),
		listen: func(t *testing.T, authenticate authenticator) (string, string) {
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() {
				defer close(done)
				open(ctx, authenticate, 0)
			}()
			t.Cleanup(func() { cancel(); <-done })
			return "unix", address
		},
		dial: func(ctx context.Context, authenticate authenticator, _ string) error {
			return open(ctx, authenticate, 1)
		},
		impostor: func(t *testing.T) net.Listener {
			l, err := net.Listen("unix", address)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			return l
		},
	}
}

func framed(message []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(message))), message...)
}

// connect dials an acceptor, sends the hello, and reads up to the challenge.
func (p *protocol) connect(t *testing.T, network, address string) net.Conn {
	t.Helper()
	var c net.Conn
	for since := time.Now(); c == nil; {
		var err error
		if c, err = net.Dial(network, address); err != nil { // it does not listen yet
			if time.Since(since) > time.Minute {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	hello := p.hello
	if p.framed {
		hello = framed(hello)
	}
	c.Write(hello)
	next := make([]byte, len(p.next))
	if _, err := io.ReadFull(c, next); err != nil || !bytes.Equal(next, p.next) {
		t.Fatalf("after the hello: %q, %v; want %q", next, err, p.next)
	}
	return c
}

// admit accepts a dialer's connection, and sends and receives up to the challenge.
func (p *protocol) admit(t *testing.T, l net.Listener) (c net.Conn, hello []byte) {
	t.Helper()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	hello = make([]byte, listener.HelloBytes)
	if p.framed {
		var n [4]byte
		io.ReadFull(c, n[:])
		hello = make([]byte, binary.LittleEndian.Uint32(n[:]))
	}
	if _, err := io.ReadFull(c, hello); err != nil {
		t.Fatal(err)
	}
	c.Write(p.next)
	return c, hello
}

// recorder is a connection that records what it sends.
type recorder struct {
	net.Conn
	sent bytes.Buffer
}

func (c *recorder) Write(p []byte) (int, error) {
	c.sent.Write(p)
	return c.Conn.Write(p)
}

// forger is an attack on one end of the challenge.
type forger struct {
	name   string
	attack func(c net.Conn, dialed bool, hello []byte)
}

// forgers returns attacks by one who does not have the secret s. recorded is what an end on the attacker's side sent in
// a challenge that succeeded.
func forgers(s secret.Secret, purpose secret.Purpose, recorded []byte) []forger {
	right := s.Authenticate(purpose, proofJob, proofEpoch)
	with := func(name string, s secret.Secret, purpose secret.Purpose, job string, epoch uint32) forger {
		return forger{name, func(c net.Conn, dialed bool, hello []byte) {
			if dialed {
				s.Authenticate(purpose, job, epoch)(c, true, hello)
			} else {
				s.Impostor(purpose, job, epoch)(c, hello)
			}
		}}
	}
	// send exchanges the messages of one side: what it sends depends on what it received last.
	send := func(c net.Conn, dialed bool, message func(received []byte) []byte) {
		received := make([]byte, 64)
		if dialed {
			io.ReadFull(c, received[:32])
			c.Write(message(received[:32]))
			return
		}
		c.Write(message(nil)[:32])
		io.ReadFull(c, received)
		c.Write(message(received))
	}
	finish := func(c net.Conn) { c.(interface{ CloseWrite() error }).CloseWrite() }
	other := map[secret.Purpose]secret.Purpose{secret.Store: secret.Group, secret.Group: secret.Store}[purpose]
	return []forger{
		with("wrong secret", secret.New(), purpose, proofJob, proofEpoch),
		with("another purpose", s, other, proofJob, proofEpoch),
		with("another job", s, purpose, "another job", proofEpoch),
		with("another epoch", s, purpose, proofJob, proofEpoch+1),
		{"another hello", func(c net.Conn, dialed bool, hello []byte) {
			hello = bytes.Clone(hello)
			hello[len(hello)-1] ^= 1
			with("", s, purpose, proofJob, proofEpoch).attack(c, dialed, hello)
		}},
		{"replayed transcript", func(c net.Conn, dialed bool, _ []byte) {
			send(c, dialed, func(received []byte) []byte {
				if dialed || received == nil {
					return recorded
				}
				return recorded[32:]
			})
		}},
		{"reflected challenge", func(c net.Conn, dialed bool, _ []byte) {
			send(c, dialed, func(received []byte) []byte {
				switch {
				case dialed: // the nonce as nonce and as proof
					return append(received, received...)
				case received == nil:
					return make([]byte, 32)
				}
				return append([]byte{1}, received[32:]...) // the dialer's own proof
			})
		}},
		{"missing proof", func(c net.Conn, dialed bool, _ []byte) {
			if dialed {
				io.ReadFull(c, make([]byte, 32))
			}
			finish(c)
		}},
		{"truncated proof", func(c net.Conn, dialed bool, hello []byte) {
			n := map[bool]int{true: 64, false: 32 + 33}[dialed] - 1
			right(&altered{c, func(p []byte) []byte { p = p[:min(n, len(p))]; n -= len(p); return p }}, dialed, hello)
		}},
		{"proof with a flipped bit", func(c net.Conn, dialed bool, hello []byte) {
			right(&altered{c, func(p []byte) []byte {
				if len(p) > 32 {
					p[len(p)-1] ^= 1
				}
				return p
			}}, dialed, hello)
		}},
		{"no proof but ones", func(c net.Conn, dialed bool, _ []byte) {
			send(c, dialed, func([]byte) []byte { return bytes.Repeat([]byte{1}, 64) })
		}},
	}
}

// altered is a connection that alters what it sends. It ends its side when a message is shortened.
type altered struct {
	net.Conn
	change func(p []byte) []byte
}

func (c *altered) Write(p []byte) (int, error) {
	sent := c.change(bytes.Clone(p))
	_, err := c.Conn.Write(sent)
	if len(sent) < len(p) {
		c.Conn.(interface{ CloseWrite() error }).CloseWrite()
		return len(p), net.ErrClosed
	}
	return len(p), err
}

// refused returns an error unless the other end closes the connection, and sends nothing before but zeros: the verdict.
func refused(c net.Conn) error {
	got, err := io.ReadAll(c)
	if sent := bytes.Trim(got, "\x00"); len(sent) > 0 {
		return fmt.Errorf("the other end sends %q", sent)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the other end does not close the connection: %w", err)
	}
	return nil
}

// TestListeners: every acceptor accepts the right proof and refuses every forged one: it sends nothing, and closes the
// connection.
func TestListeners(t *testing.T) {
	s := secret.New()
	for _, p := range protocols(t) {
		t.Run(p.name, func(t *testing.T) {
			right := s.Authenticate(p.purpose, proofJob, proofEpoch)
			network, address := p.listen(t, right)
			tape := &recorder{Conn: p.connect(t, network, address)}
			if err := right(tape, true, p.hello); err != nil {
				t.Fatalf("the right proof: %v", err)
			}
			tape.Close()
			for _, f := range forgers(s, p.purpose, tape.sent.Bytes()) {
				c := p.connect(t, network, address)
				f.attack(c, true, p.hello)
				if err := refused(c); err != nil {
					t.Fatalf("%s: %v", f.name, err)
				}
				c.Close()
			}
		})
	}
}

// TestDialers: every dialer accepts the right proof of the acceptor and refuses every forged one: after the challenge
// it sends nothing, and closes the connection.
func TestDialers(t *testing.T) {
	s := secret.New()
	for _, p := range protocols(t) {
		if p.dial == nil {
			continue
		}
		t.Run(p.name, func(t *testing.T) {
			right := s.Authenticate(p.purpose, proofJob, proofEpoch)
			// with runs a dialer against an acceptor's side of the challenge.
			with := func(accept func(c net.Conn, hello []byte)) {
				l := p.impostor(t)
				defer l.Close()
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- p.dial(ctx, right, l.Addr().String()) }()
				c, hello := p.admit(t, l)
				accept(c, hello)
				c.Close()
				l.Close()
				cancel()
				if err := <-done; err == nil {
					t.Error("the dialer reports no error")
				}
			}
			tape := new(recorder)
			with(func(c net.Conn, hello []byte) {
				tape.Conn = c
				if err := right(tape, false, hello); err != nil {
					t.Errorf("the right proof: %v", err)
				}
			})
			for _, f := range forgers(s, p.purpose, tape.sent.Bytes()) {
				with(func(c net.Conn, hello []byte) {
					f.attack(c, false, hello)
					if err := refused(c); err != nil {
						t.Fatalf("%s: %v", f.name, err)
					}
				})
			}
		})
	}
}
