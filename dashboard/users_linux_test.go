package dashboard

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// TestOtherUser: another user of this host who opens all connections and event streams does not keep the owner out, and
// closes none of the owner's.
func TestOtherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can open a socket as another user")
	}
	s, _ := open(t, "127.0.0.1:0", "")
	own := openStream(t, s)
	const other = 65534
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		syscall.RawSyscall(syscall.SYS_SETFSUID, other, 0, 0)
		var err error
		for i := 0; i < 2*connectionsMax && err == nil; i++ {
			var c net.Conn
			if c, err = net.Dial("tcp", s.listener.Addr().String()); err == nil {
				t.Cleanup(func() { c.Close() })
				_, err = fmt.Fprint(c, request)
			}
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for range 20 {
		http.DefaultClient.CloseIdleConnections() // so that each request has a new connection
		if code, _ := get(t, s.URL(), nil); code != http.StatusOK {
			t.Fatalf("beside another user's connections: %d", code)
		}
	}
	for name, r := range map[string]*bufio.Reader{"the owner's stream": own, "a new one": openStream(t, s)} {
		_, err := r.Discard(r.Buffered()) // then comes the next message
		if _, e := r.ReadString('\n'); err != nil || e != nil {
			t.Errorf("%s: %v, %v", name, err, e)
		}
	}
}

const request = "GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"

// openStream opens an event stream, and reads its first line.
func openStream(t *testing.T, s *Server) *bufio.Reader {
	t.Helper()
	c, err := net.Dial("tcp", s.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	fmt.Fprint(c, request)
	r := bufio.NewReader(c)
	if line, err := r.ReadString('\n'); err != nil || !strings.Contains(line, "200 OK") {
		t.Fatalf("an event stream: %q, %v", line, err)
	}
	return r
}
