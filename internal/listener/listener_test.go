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

// open opens a door that ends with the test.
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

// welcome serves a service that says its name to all who come.
func welcome(t testing.TB, l *Listener, s Service, rules Rules) *Acceptor {
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

// call returns what a service says.
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

// TestServices: one port leads to several services, each with rules of its own; one that is not there is refused by its name.
func TestServices(t *testing.T) {
	l := open(t, Config{})
	prove := Rules{Authenticate: func(conn net.Conn, dialed bool, greeting []byte) error {
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
	store := welcome(t, l, Store, prove)
	welcome(t, l, Data, Rules{})
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
		{"the store without a proof", Dialer{}, Hello{Service: Store, Job: ours}, "asks for a proof", Proof},
		{"data with a proof", Dialer{Rules: prove}, Hello{Service: Data, Job: ours}, "asks for no proof", Proof},
		{"another job", Dialer{}, Hello{Service: Data, Job: theirs}, `another job than "ours"`, Job},
		{"who wants TLS", Dialer{}, Hello{Service: Data, Job: ours, Secure: true}, "it wants TLS, which this end does not have", Proof},
		{"a service that is not there", Dialer{}, Hello{Service: Control, Job: ours}, "no group's control is at " + l.Addr(), NoService},
		{"a service that nobody knows", Dialer{}, Hello{Service: 77, Job: ours}, "no service 77 is at " + l.Addr(), NoService},
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
	if _, err := l.Serve(ServiceConfig{Services: []Service{Control, Store}}); err == nil || !strings.Contains(err.Error(), "serves a store already") {
		t.Errorf("a service twice: %v", err)
	}
	store.Close()
	if text, err := call(t, l, Dialer{Rules: prove}, Hello{Service: Store, Job: ours}); err == nil || !strings.Contains(err.Error(), "no store is at") {
		t.Errorf("a service that has ended: %q, %v", text, err)
	}
	if text, err := call(t, l, Dialer{}, Hello{Service: Data, Job: ours}); err != nil || text != "group's data" {
		t.Errorf("the other service: %q, %v", text, err)
	}
}

// TestCrowd: connections that do not greet are bounded in number and time, and keep nobody out.
func TestCrowd(t *testing.T) {
	l := open(t, Config{HalfOpen: 16, Handshake: 3 * time.Second}) // as long as the one in the crowd may need at worst
	e := welcome(t, l, Data, Rules{})
	var conns []net.Conn
	for range 200 {
		c, err := net.Dial("tcp", l.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write([]byte(magic)) // a part of a greeting
		conns = append(conns, c)
		l.mu.Lock()
		half := len(l.half.all)
		l.mu.Unlock()
		if half > 16 {
			t.Fatalf("%d connections are half open, want at most 16", half)
		}
	}
	if text, err := call(t, l, Dialer{}, Hello{Service: Data, Job: JobID("ours")}); err != nil || text != "group's data" {
		t.Errorf("in the crowd: %q, %v", text, err)
	}
	for _, c := range conns { // every one is ended by the other side
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("a connection that says nothing is still open")
		}
	}
	l.Close()
	if got := e.Counts(); !maps.Equal(got, map[string]uint64{"slow": 200}) {
		t.Errorf("counted %v, want 200 that were slow", got)
	}
}

// TestFlood: while strangers come without a pause, who belongs to the job gets in.
func TestFlood(t *testing.T) {
	l := open(t, Config{})
	e := welcome(t, l, Data, Rules{})
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
			t.Errorf("in the flood: %q, %v", text, err)
			break
		}
	}
	stop()
	<-over
}

// TestPieces: a greeting may come in any pieces, and a stranger is sent away after the first byte that no greeting has there.
func TestPieces(t *testing.T) {
	l := open(t, Config{})
	e := welcome(t, l, Data, Rules{})
	greeting := (&Hello{Service: Data, Job: JobID("ours")}).Encode()
	for _, cut := range []int{0, 1, 7, 8, 79} {
		c, err := net.Dial("tcp", l.Addr())
		if err != nil {
			t.Fatal(err)
		}
		c.Write(greeting[:cut])
		for piece := range bytes.SplitSeq(greeting[cut:], nil) {
			c.Write(piece)
		}
		if err := ReadAnswer(c); err != nil {
			t.Errorf("in pieces after %d bytes: %v", cut, err)
		}
		c.Close()
	}
	for _, says := range []string{"X", "LOCKSTOP"} {
		c, err := net.Dial("tcp", l.Addr())
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range []byte(says) {
			c.Write([]byte{b})
		}
		if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil {
			t.Errorf("%q is answered", says)
		}
		c.Close()
	}
	l.Close()
	if got := e.Counts(); !maps.Equal(got, map[string]uint64{"magic": 2}) {
		t.Errorf("counted %v, want two strangers", got)
	}
}

// TestCloseAmongStrangers: a door that closes waits for nobody who has stopped half way, nor does a service.
func TestCloseAmongStrangers(t *testing.T) {
	for _, whole := range []bool{true, false} {
		l := open(t, Config{Handshake: time.Hour})
		e := welcome(t, l, Data, Rules{Authenticate: func(conn net.Conn, _ bool, _ []byte) error {
			_, err := io.ReadFull(conn, make([]byte, 1))
			return err
		}})
		greeting := (&Hello{Service: Data, Job: JobID("ours")}).Encode()
		for _, says := range [][]byte{nil, greeting[:20], greeting} {
			c, err := net.Dial("tcp", l.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.Write(says)
			if len(says) == HelloBytes {
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil { // it asks for the proof
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

// TestEarly: who comes before there is a service waits for it.
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
	welcome(t, l, Store, Rules{})
	c.SetReadDeadline(time.Time{})
	if text, err := io.ReadAll(c); err != nil || !bytes.HasSuffix(text, []byte(Store.String())) {
		t.Errorf("%q, %v", text, err)
	}
}

// TestListen: ports in a range are tried one after the other; what is no address is refused.
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
		t.Error("one port twice")
	}
}

func FuzzHello(f *testing.F) {
	f.Add((&Hello{Service: Store, Secure: true, Job: [16]byte{1}, Fields: [FieldsBytes]byte{2}}).Encode())
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var g Hello
		if err := g.Decode(b); err != nil {
			if r := (*Refusal)(nil); !errors.As(err, &r) {
				t.Fatalf("%v is no refusal", err)
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
			t.Fatalf("% x is taken for a welcome", b)
		}
	})
}

// TestPage: docs/wire.md has every service and reason to refuse, and the lengths, as they are.
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
