//go:build unix

package pmi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOpen opens an inherited socket: the end of the context ends the wait for a launcher that does not answer, and
// the socket stays open and blocking, for an MPI library.
func TestOpen(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0) // not closed in child processes, like an inherited one
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	server := os.NewFile(uintptr(pair[1]), "launcher")
	defer server.Close()
	getenv := func(string) (string, bool) { return fmt.Sprint(pair[0]), true }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var line string
	var failed error
	read := make(chan struct{})
	go func() { // the launcher: the context ends once the command has arrived
		defer close(read)
		line, failed = bufio.NewReader(server).ReadString('\n')
		cancel()
	}()
	if _, err := Open(ctx, getenv); !errors.Is(err, context.Canceled) {
		t.Errorf("a silent launcher: %v", err)
	}
	if <-read; !strings.HasPrefix(line, "cmd=init ") {
		t.Errorf("the launcher read %q, %v", line, failed)
	}
	if flags, err := unix.FcntlInt(uintptr(pair[0]), unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK != 0 {
		t.Errorf("flags %#x, %v: want a blocking socket", flags, err)
	}
	go (&launcher{values: map[string]string{}, size: 1}).serve(server)
	k, err := Open(t.Context(), getenv)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(k.Put(t.Context(), "a", "b"), k.Finalize(t.Context())); err != nil {
		t.Error(err)
	}
}

// TestOpenOwnSocket: a socket that this process has opened under the number of the launcher's is not used.
func TestOpenOwnSocket(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = Open(t.Context(), func(string) (string, bool) { return fmt.Sprint(f.Fd()), true })
	if err == nil || !strings.Contains(err.Error(), "this process has opened it itself") {
		t.Errorf("got %v", err)
	}
}
