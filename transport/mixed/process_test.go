package mixed_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// A test with real processes runs this test binary again, as a rank: "RANK of SIZE".
const childEnv = "LOCKSTEP_MIXED_TEST_RANK"

func TestMain(m *testing.M) {
	if text := os.Getenv(childEnv); text != "" {
		var rank, size int
		fmt.Sscanf(text, "%d of %d", &rank, &size)
		fmt.Fprintln(os.Stdout, turn(rank, size))
		io.Copy(io.Discard, os.Stdin) // keeps this process alive, so that the others do not see its end instead
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

type twoWays struct {
	io.Reader
	io.Writer
}

// turn is a rank's life: with its neighbour it passes marks, with a rank of the other host it exchanges frames, until
// an error comes or somebody is down.
func turn(rank, size int) error {
	ends, err := mixed.Open(context.Background(), mixed.Config{
		Ranks: []int{rank}, Size: size, Exchange: mixed.Through(twoWays{
			os.Stdin,
			os.Stdout,
		}), Apart: string(rune('a' + rank/2)),
		TCP: tcp.Config{Logger: slog.New(slog.DiscardHandler)},
	})
	if err != nil {
		return err
	}
	e := ends[0]
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		d := <-e.Down()
		cancel(&d)
	}()
	out, in := make([]byte, 50_000), make([]byte, 50_000)
	peer, memory, posts := (rank+2)%size, e.Memory(), e.Posts()
	for seq := uint64(0); ; seq++ {
		if seq == 10 {
			fmt.Fprintln(os.Stdout, "turning")
		}
		h := transport.Header{Seq: seq}
		memory.Publish(&transport.Slot{Header: h})
		for mark := range 2 {
			if err := memory.Signal(mark); err != nil {
				return err
			}
			if err := memory.Await(ctx, -1, mark); err != nil {
				return err
			}
		}
		err := errors.Join(posts.Post(peer, transport.Frame{Header: h, Data: out}, peer, in), posts.Complete(ctx))
		if err != nil {
			return err
		}
	}
}

// TestKill: two hosts of two processes; when one is killed, all others have an error that names its rank, whatever they
// waited for.
func TestKill(t *testing.T) {
	if shm.HostID() == "" {
		t.Skip("processes cannot share memory on this system")
	}
	const size, victim = 4, 3
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var children []*exec.Cmd
	var talks []io.ReadWriter
	for r := range size {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d of %d", childEnv, r, size))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		children, talks = append(children, cmd), append(talks, twoWays{out, in})
	}
	if err := mixed.Collect(talks); err != nil {
		t.Fatal(err)
	}
	const ready = "turning\n"
	for r, c := range talks {
		b := make([]byte, len(ready))
		if _, err := io.ReadFull(c, b); err != nil || string(b) != ready {
			t.Fatalf("rank %d says %q, %v", r, b, err)
		}
	}
	killed := time.Now()
	children[victim].Process.Kill()
	for r, c := range talks {
		if r == victim {
			continue
		}
		text, err := bufio.NewReader(c).ReadString('\n')
		if want := fmt.Sprintf("rank %d is down", victim); err != nil || !strings.Contains(text, want) {
			t.Errorf("rank %d ends with %q, %v; want that %s", r, text, err, want)
		}
	}
	t.Logf("all knew after %v", time.Since(killed).Round(time.Millisecond))
}
