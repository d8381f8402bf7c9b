package listener

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a listener that is closed when the test ends.
func open(t testing.TB, cfg Config) *Listener {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	l, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// serve registers a service that sends its name to every client.
func serve(t testing.TB, l *Listener, s Service, rules Rules) *Acceptor {
	t.Helper()
	job := "ours"
	e, err := l.Serve(ServiceConfig{Services: []Service{s}, Job: &job, Rules: rules, Handle: func(a *Accepted) error {
		err := a.Answer(nil, []byte(s.String())...)
		a.Conn.Close()
		return err
	}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// call returns what a service sends.
func call(t testing.TB, l *Listener, c Dialer, g Hello) (string, error) {
	t.Helper()
	conn, err := c.DialContext(t.Context(), l.Addr(), &g)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	text, err := io.ReadAll(conn)
	return string(text), err
}

// TestServices: one port has several services, each with separate rules; a service that does not exist is refused by
// name.
func TestServices(t *testing.T) {
	l := open(t, Config{})
	prove := Rules{Authenticate: func(conn net.Conn, dialed bool, hello []byte) error {
		if dialed {
			_, err := conn.Write([]byte("please"))
			return err
		}
		b := make([]byte, 6)
		if _, err := io.ReadFull(conn, b); err != nil || string(b) != "please" {
			return fmt.Errorf("%q, %v", b, err)
		}
		return nil
	}}
	store := serve(t, l, Store, prove)
	serve(t, l, Data, Rules{})
	ours, theirs := JobID("ours"), JobID("theirs")
	for _, c := range []struct {
		name   string
		caller Dialer
		g      Hello
		want   string
		reason Reason
	}{
		{"data", Dialer{}, Hello{Service: Data, Job: ours}, "group's data", 0},
		{"the store", Dialer{Rules: prove}, Hello{Service: Store, Job: ours}, "store", 0},
		{"the store without a proof", Dialer{}, Hello{Service: Store, Job: ours}, "requests a proof", Proof},
		{"data with a proof", Dialer{Rules: prove}, Hello{Service: Data, Job: ours}, "requests no proof", Proof},
		{"another job", Dialer{}, Hello{Service: Data, Job: theirs}, `belongs to another job; this one is "ours"`, Job},
		{
			"TLS where there is none",
			Dialer{},
			Hello{Service: Data, Job: ours, Secure: true},
			"it requests TLS, but this end has no TLS", Proof,
		},
		{
			"a service that is not registered",
			Dialer{},
			Hello{Service: Control, Job: ours},
			"no group's control at " + l.Addr(), NoService,
		},
		{"an unknown service", Dialer{}, Hello{Service: 77, Job: ours}, "no service 77 at " + l.Addr(), NoService},
	} {
		text, err := call(t, l, c.caller, c.g)
		r := (*Refusal)(nil)
		if errors.As(err, &r) {
			text = r.Text
		}
		if !strings.Contains(text, c.want) || (err == nil) != (c.reason == 0) || r != nil && r.Reason != c.reason {
			t.Errorf("%s: %q, %v, want %q", c.name, text, err, c.want)
		}
	}
	if _, err := l.Serve(ServiceConfig{Services: []Service{Control, Store}}); err == nil ||
		!strings.Contains(err.Error(), "already serves the store") {
		t.Errorf("a service twice: %v", err)
	}
	store.Close()
	if text, err := call(t, l, Dialer{Rules: prove}, Hello{Service: Store, Job: ours}); err == nil ||
		!strings.Contains(err.Error(), "no store at") {
		t.Errorf("a service that has ended: %q, %v", text, err)
	}
	if text, err := call(t, l, Dialer{}, Hello{Service: Data, Job: ours}); err != nil || text != "group's data" {
		t.Errorf("the other service: %q, %v", text, err)
	}
}

// dialHalfOpen makes a connection that sends only a part of a hello.
func dialHalfOpen(t *testing.T, l *Listener) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	c.Write([]byte(magic))
	return c
}

// checkClosed checks that the listener closes connections.
func checkClosed(t *testing.T, conns []net.Conn) {
	t.Helper()
	for i, c := range conns {
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d, which sends no complete hello, is still open", i)
		}
	}
}

// TestHalfOpenBound: connections without a hello are bounded in number, and do not keep others out.
func TestHalfOpenBound(t *testing.T) {
	l := open(t, Config{HalfOpen: 16, Handshake: time.Hour})
	e := serve(t, l, Data, Rules{})
	var conns []net.Conn
	for range 200 {
		conns = append(conns, dialHalfOpen(t, l))
		l.mu.Lock()
		half := len(l.half.all)
		l.mu.Unlock()
		if half > 16 {
			t.Fatalf("%d connections are half open, want at most 16", half)
		}
	}
	if text, err := call(t, l, Dialer{}, Hello{Service: Data, Job: JobID("ours")}); err != nil || text != "group's data" {
		t.Errorf("among the half-open connections: %q, %v", text, err)
	}
	const evicted = 200 - 15 // 15 and the valid one are the latest
	checkClosed(t, conns[:evicted])
	for begin := time.Now(); e.Counts()["slow"] < evicted && time.Since(begin) < time.Minute; { // counted once closed
		time.Sleep(time.Millisecond)
	}
	if got := e.Counts(); !maps.Equal(got, map[string]uint64{"slow": evicted}) {
		t.Errorf("counted %v, want %d that were slow", got, evicted)
	}
	l.Close()
	checkClosed(t, conns)
}

// TestHalfOpenTime: connections without a hello are closed after the time for the handshake.
func TestHalfOpenTime(t *testing.T) {
	l := open(t, Config{Handshake: 100 * time.Millisecond})
	e := serve(t, l, Data, Rules{})
	conns := []net.Conn{dialHalfOpen(t, l), dialHalfOpen(t, l)}
	checkClosed(t, conns) // once they are counted
	if got := e.Counts(); !maps.Equal(got, map[string]uint64{"slow": 2}) {
		t.Errorf("counted %v, want 2 that were slow", got)
	}
}

// TestFlood: during a flood of invalid connections a valid one is accepted.
func TestFlood(t *testing.T) {
	l := open(t, Config{})
	e := serve(t, l, Data, Rules{})
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		for ctx.Err() == nil {
			if c, err := net.Dial("tcp", l.Addr()); err == nil {
				c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
				c.Close()
			}
		}
	}()
	for e.Counts()["magic"] < 1000 {
		if text, err := call(t, l, Dialer{}, Hello{Service: Data, Job: JobID("ours")}); err != nil || text != "group's data" {
			t.Errorf("during the flood: %q, %v", text, err)
			break
		}
	}
	stop()
	<-over
}

// TestPieces: a hello may arrive in any pieces; a connection is refused at the first byte that no hello has at that
// position.
func TestPieces(t *testing.T) {
	l := open(t, Config{})
	e := serve(t, l, Data, Rules{})
	hello := (&Hello{Service: Data, Job: JobID("ours")}).Encode()
	for _, cut := range []int{0, 1, 7, 8, 79} {
		c, err := net.Dial("tcp", l.Addr())
		if err != nil {
			t.Fatal(err)
		}
		c.Write(hello[:cut])
		for piece := range bytes.SplitSeq(hello[cut:], nil) {
			c.Write(piece)
		}
		if err := ReadAnswer(c); err != nil {
			t.Errorf("in pieces after %d bytes: %v", cut, err)
		}
		c.Close()
	}
	for _, sent := range []string{"X", "LOCKSTOP"} {
		c, err := net.Dial("tcp", l.Addr())
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range []byte(sent) {
			c.Write([]byte{b})
		}
		if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Errorf("%q is answered", sent)
		}
		c.Close()
	}
	l.Close()
	if got := e.Counts(); !maps.Equal(got, map[string]uint64{"magic": 2}) {
		t.Errorf("counted %v, want 2 of reason magic", got)
	}
}

// TestCloseHalfOpen: closing a listener or an acceptor does not wait for incomplete handshakes.
func TestCloseHalfOpen(t *testing.T) {
	for _, whole := range []bool{true, false} {
		l := open(t, Config{Handshake: time.Hour})
		e := serve(t, l, Data, Rules{Authenticate: func(conn net.Conn, _ bool, _ []byte) error {
			_, err := io.ReadFull(conn, make([]byte, 1))
			return err
		}})
		hello := (&Hello{Service: Data, Job: JobID("ours")}).Encode()
		for _, sent := range [][]byte{nil, hello[:20], hello} {
			c, err := net.Dial("tcp", l.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.Write(sent)
			if len(sent) == HelloBytes {
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil { // it requests the proof
					t.Fatal(err)
				}
			}
		}
		if !whole {
			e.Close()
		}
		l.Close()
		l.Close()
	}
}

// TestEarly: a connection that arrives before any service is registered waits for it.
func TestEarly(t *testing.T) {
	l := open(t, Config{})
	c, err := net.Dial("tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write((&Hello{Service: Store, Job: JobID("ours")}).Encode()); err != nil {
		t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes, %v, before anything is served", n, err)
	}
	serve(t, l, Store, Rules{})
	c.SetReadDeadline(time.Time{})
	if text, err := io.ReadAll(c); err != nil || !bytes.HasSuffix(text, []byte(Store.String())) {
		t.Errorf("%q, %v", text, err)
	}
}

// TestListen: ports of a range are tried in order; invalid addresses are refused.
func TestListen(t *testing.T) {
	taken := open(t, Config{})
	_, port, _ := net.SplitHostPort(taken.Addr())
	if _, err := Open(Config{Listen: taken.Addr()}); err == nil || !strings.Contains(err.Error(), "no port to listen on") {
		t.Errorf("a port that is taken: %v", err)
	}
	for _, wrong := range []string{"127.0.0.1", "127.0.0.1:x", "127.0.0.1:9-7", "127.0.0.1:0-9", "127.0.0.1:70000"} {
		if _, err := Open(Config{Listen: wrong}); err == nil || !strings.Contains(err.Error(), wrong) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
	ranged := open(t, Config{Listen: "127.0.0.1:" + port + "-65535"})
	if _, other, _ := net.SplitHostPort(ranged.Addr()); other == port {
		t.Error("two listeners have the same port")
	}
}

func FuzzHello(f *testing.F) {
	f.Add((&Hello{Service: Store, Secure: true, Job: [16]byte{1}, Fields: [FieldsBytes]byte{2}}).Encode())
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var g Hello
		if err := g.Decode(b); err != nil {
			if r := (*Refusal)(nil); !errors.As(err, &r) {
				t.Fatalf("%v is not a refusal", err)
			}
			return
		}
		if !bytes.Equal(g.Encode(), b) || !mayBe(b) {
			t.Fatalf("% x comes back as % x", b, g.Encode())
		}
	})
}

func FuzzAnswer(f *testing.F) {
	f.Add(answer(nil))
	f.Add(answer(Refuse(Job, "it belongs to another job")))
	f.Add(answer(Refuse(Job, "%s", strings.Repeat("x", 1000))))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		err := ReadAnswer(r)
		if read := len(b) - r.Len(); read > answerBytes+answerTextMax {
			t.Fatalf("read %d bytes", read)
		}
		if err == nil && (len(b) < answerBytes || b[10] != byte(accepted)) {
			t.Fatalf("% x is decoded as acceptance", b)
		}
	})
}

// TestPage: docs/wire.md lists every service, every refusal reason, and the lengths.
func TestPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/wire.md")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		fmt.Sprintf("# The wire format, version %d\n", Version), fmt.Sprintf("### Hello, %d bytes\n", HelloBytes),
		fmt.Sprintf("### Answer, %d bytes and a text\n", answerBytes),
	}
	for r := accepted + 1; r < reasons; r++ {
		want = append(want, fmt.Sprintf("\n| %d | %v | ", r, r))
	}
	for s := Service(1); s < services; s++ {
		want = append(want, fmt.Sprintf("%d %v", s, s))
	}
	for _, w := range want {
		if !strings.Contains(string(text), w) {
			t.Errorf("docs/wire.md does not have %q", w)
		}
	}
}

func TestParsePorts(t *testing.T) {
	for _, c := range []struct {
		text        string
		first, last int
	}{
		{"0", 0, 0},
		{"7000", 7000, 7000},
		{"7000-7099", 7000, 7099},
		{"65535-65535", 65535, 65535},
		{"", -1, -1},
		{"7099-7000", -1, -1},
		{"0-5", -1, -1},
		{"65536", -1, -1},
		{"1-2-3", -1, -1},
		{"-1", -1, -1},
		{"1-", -1, -1},
		{"x", -1, -1},
	} {
		first, last, err := ParsePorts(c.text)
		if err != nil {
			first, last = -1, -1
		}
		if first != c.first || last != c.last {
			t.Errorf("%q: %d to %d, %v, want %d to %d", c.text, first, last, err, c.first, c.last)
		}
	}
}
