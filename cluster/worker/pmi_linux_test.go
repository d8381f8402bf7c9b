package worker

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/cluster"
)

// TestLauncherBarrier joins by a launcher at whose barrier the other worker never arrives: worker 0 has published its
// address, which is at Config.Listen, and the error says what it waited for.
func TestLauncherBarrier(t *testing.T) {
	for listen, want := range map[string]string{
		"127.0.0.3": "127.0.0.3", "0.0.0.0": ownAddress(t.Context()), "": ownAddress(t.Context()),
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(pair[0])
		server := os.NewFile(uintptr(pair[1]), "launcher")
		put := make(chan string, 1)
		go func() {
			defer close(put)
			for lines := bufio.NewScanner(server); lines.Scan(); {
				command, _, _ := strings.Cut(strings.TrimPrefix(lines.Text(), "cmd="), " ")
				switch command {
				case "init":
					fmt.Fprintln(server, "cmd=response_to_init rc=0")
				case "get_maxes":
					fmt.Fprintln(server, "cmd=maxes keylen_max=64 vallen_max=1024")
				case "get_my_kvsname":
					fmt.Fprintln(server, "cmd=my_kvsname kvsname=k")
				case "put":
					fmt.Fprintln(server, "cmd=put_result rc=0")
					_, address, _ := strings.Cut(lines.Text(), "value=")
					put <- address
				}
			}
		}()
		fd := fmt.Sprint(pair[0])
		_, err = Join(t.Context(), Config{
			Job: &cluster.Job{ID: "j", Workers: 2, Store: cluster.StorePMI}, Replicas: 1, Listen: listen,
			RendezvousTimeout: 200 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
			Getenv: func(name string) (string, bool) {
				if name == "PMI_FD" {
					return fd, true
				}
				return "", false
			},
		})
		host, port, split := net.SplitHostPort(<-put)
		if split != nil || host != want || port == "0" {
			t.Errorf("Listen %q: published %s:%s, want %s", listen, host, port, want)
		}
		const text = "rendezvous timed out after 200ms: not all of the 2 workers have reached the launcher's barrier (PMI)"
		if err == nil || !strings.Contains(err.Error(), text) || context.Cause(t.Context()) != nil {
			t.Errorf("got %v, want %q", err, text)
		}
		server.Close()
	}
}
