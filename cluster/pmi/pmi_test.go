package pmi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// launcher is a server of the protocol for some processes, as Hydra's.
type launcher struct {
	mu     sync.Mutex
	values map[string]string
	inside []io.Writer // the processes in the barrier
	size   int
}

func (l *launcher) serve(c io.ReadWriter) {
	for lines := bufio.NewScanner(c); lines.Scan(); {
		f, err := parse(lines.Text())
		if err != nil {
			fmt.Fprintln(c, "cmd=error rc=-1")
			continue
		}
		l.mu.Lock()
		switch f["cmd"] {
		case "init":
			fmt.Fprintln(c, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")
		case "get_maxes":
			fmt.Fprintln(c, "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024")
		case "get_my_kvsname":
			fmt.Fprintln(c, "cmd=my_kvsname kvsname=kvs_1_0")
		case "put":
			if _, ok := l.values[f["key"]]; ok {
				fmt.Fprintln(c, "cmd=put_result rc=-1 msg=duplicate_key")
				break
			}
			l.values[f["key"]] = f["value"]
			fmt.Fprintln(c, "cmd=put_result rc=0 msg=success")
		case "get":
			if v, ok := l.values[f["key"]]; ok {
				fmt.Fprintln(c, "cmd=get_result rc=0 msg=success value="+v)
			} else {
				fmt.Fprintln(c, "cmd=get_result rc=-1 msg=key_not_found value=unknown")
			}
		case "barrier_in":
			if l.inside = append(l.inside, c); len(l.inside) == l.size {
				for _, each := range l.inside {
					fmt.Fprintln(each, "cmd=barrier_out")
				}
				l.inside = nil
			}
		case "finalize":
			fmt.Fprintln(c, "cmd=finalize_ack")
		}
		l.mu.Unlock()
	}
}

// TestExchange: what one process puts, all get after the barrier.
func TestExchange(t *testing.T) {
	const size = 3
	l := &launcher{values: map[string]string{}, size: size}
	var all sync.WaitGroup
	for rank := range size {
		mine, theirs := net.Pipe()
		t.Cleanup(func() { theirs.Close() })
		go l.serve(bufferedPipe(theirs))
		all.Go(func() {
			defer mine.Close()
			k, err := started(t.Context(), mine)
			if err != nil {
				t.Error(err)
				return
			}
			if rank == 1 {
				if err := k.Put(t.Context(), "address", "h:1=2"); err != nil {
					t.Error(err)
				}
				if err := k.Put(t.Context(), "address", "x"); !errors.Is(err, ErrProtocol) ||
					!strings.Contains(err.Error(), "duplicate_key") {
					t.Errorf("the second value of a key: %v", err)
				}
			}
			if err := k.Barrier(t.Context()); err != nil {
				t.Error(err)
			}
			if got, err := k.Get(t.Context(), "address"); got != "h:1=2" || err != nil {
				t.Errorf("process %d got %q, %v", rank, got, err)
			}
			if _, err := k.Get(t.Context(), "other"); !errors.Is(err, ErrProtocol) {
				t.Errorf("a key that was never put: %v", err)
			}
			if err := k.Put(t.Context(), "a b", "x"); err == nil {
				t.Error("a key with a space was put")
			}
			if err := k.Finalize(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// bufferedPipe makes writes of a server not wait for the reader, as those of a socket.
func bufferedPipe(c net.Conn) io.ReadWriter {
	lines := make(chan []byte, 16)
	go func() {
		for line := range lines {
			_, _ = c.Write(line)
		}
	}()
	return struct {
		io.Reader
		io.Writer
	}{c, writer(func(b []byte) (int, error) { lines <- append([]byte(nil), b...); return len(b), nil })}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

// TestBarrierEnds: a barrier that the others never reach ends with the context.
func TestBarrierEnds(t *testing.T) {
	mine, theirs := net.Pipe()
	defer theirs.Close()
	defer mine.Close()
	go (&launcher{values: map[string]string{}, size: 2}).serve(bufferedPipe(theirs))
	k, err := started(t.Context(), mine)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := k.Barrier(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the barrier ended with %v", err)
	}
}

// started returns a KVS on a connection.
func started(ctx context.Context, c net.Conn) (*KVS, error) {
	k := &KVS{conn: c, lines: bufio.NewReaderSize(c, lineMax), close: c.Close}
	return k, k.start(ctx)
}

// TestMalformedAnswers: every wrong answer is an error that quotes it, and a missing one ends with the context.
func TestMalformedAnswers(t *testing.T) {
	const initialized = "cmd=response_to_init rc=0\n"
	for _, test := range []struct{ answers, want string }{
		{"", "launcher has not answered"},
		{"cmd=response_to_init", "launcher has not answered"}, // half a line
		{"closed", "may have finalized the key-value space"},
		{"\n", "an empty line"},
		{"hello\n", `"hello": want NAME=VALUE`},
		{"rc=0 cmd=response_to_init\n", "want cmd=… first"},
		{"cmd=response_to_init rc=-1 msg=version\n", "refused: rc=-1 version"},
		{"cmd=finalize_ack\n", `"cmd=finalize_ack\n", want response_to_init`},
		{"cmd=response_to_init rc=0 rc=0\n", "rc is given twice"},
		{"cmd=" + strings.Repeat("x", 2*lineMax) + "\n", "want a line of less than 4096 bytes"},
		{initialized + "cmd=maxes keylen_max=64\n", `vallen_max="": want a number from 2`},
		{initialized + "cmd=maxes keylen_max=64 vallen_max=99999999999999999999\n", "want a number from 2"},
		{initialized + "cmd=maxes keylen_max=64 vallen_max=1024\ncmd=my_kvsname\n", "no name of the key-value space"},
	} {
		mine, theirs := net.Pipe()
		go func() {
			_, _ = theirs.Read(make([]byte, lineMax)) // the first command
			if test.answers == "closed" {
				theirs.Close()
				return
			}
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			_, _ = io.WriteString(theirs, test.answers)
		}()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if strings.Contains(test.want, "has not answered") {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
		}
		if _, err := started(ctx, mine); err == nil || !strings.Contains(err.Error(), test.want) || len(err.Error()) > 400 {
			t.Errorf("%.80q: %v, want %q", test.answers, err, test.want)
		}
		cancel()
		mine.Close()
		theirs.Close()
	}
}

// TestOpenRefuses: a variable that does not name the launcher's socket is an error.
func TestOpenRefuses(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for value, want := range map[string]string{
		"": "want the number", "x": "want the number", "-1": "want the number", "999999": "is not the launcher's socket",
		fmt.Sprint(f.Fd()): "is not the launcher's socket",
	} {
		_, err := Open(t.Context(), func(string) (string, bool) { return value, true })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("PMI_FD=%s: %v, want %q", value, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024", "cmd=get_result rc=0 value=a=b", "", "cmd", "cmd=a cmd=b",
		"rc=0 cmd=x", "cmd=\x00",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		fields, err := parse(line)
		if err != nil {
			return
		}
		// What was accepted, written again, is read as the same.
		text := "cmd=" + fields["cmd"]
		for name, value := range fields {
			if name != "cmd" {
				text += " " + name + "=" + value
			}
		}
		again, err := parse(text)
		if err != nil || !maps.Equal(fields, again) {
			t.Fatalf("%q: %v, again %v, %v", line, fields, again, err)
		}
	})
}
