package rendezvous_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// Tests with real processes run this test binary again, with the task in roleEnv: a word and its arguments.
const roleEnv = "LOCKSTEP_TEST_RENDEZVOUS"

// play does the task of this process.
func play(role string) (code int) {
	args := strings.Fields(role)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := map[string]func(context.Context, []string) error{
		"join": playJoin, "count": playCount, "write": playWrite,
	}[args[0]](ctx, args[1:])
	if err != nil {
		fmt.Println("error:", err)
		return 1
	}
	return 0
}

// playJoin is worker args[1] of args[2] on the store args[0]. It joins, prints that, and exchanges its pid.
func playJoin(ctx context.Context, args []string) error {
	worker, _ := strconv.Atoi(args[1])
	workers, _ := strconv.Atoi(args[2])
	s, err := rendezvous.Open(ctx, args[0], rendezvous.Config{Logger: quiet})
	if err != nil {
		return err
	}
	defer s.Close()
	registrations, err := rendezvous.Join(ctx, s, rendezvous.Registration{Worker: worker, Workers: workers})
	if err != nil {
		return err
	}
	fmt.Println("met")
	io.Copy(io.Discard, os.Stdin) // until the parent closes it
	pids, err := rendezvous.Exchange(ctx, s, registrations[worker].Key("pids"), worker, workers,
		[]byte(strconv.Itoa(os.Getpid())))
	if err != nil {
		return err
	}
	for w, pid := range pids {
		if string(pid) != strconv.Itoa(registrations[w].PID) {
			return fmt.Errorf("worker %d's registration has pid %d, its output %s", w, registrations[w].PID, pid)
		}
	}
	return rendezvous.Leave(ctx, s, registrations[worker])
}

// playCount increments a counter on the store args[0] repeatedly, and prints a line each time.
func playCount(ctx context.Context, args []string) error {
	s, err := rendezvous.Open(ctx, args[0], rendezvous.Config{Logger: quiet})
	for err == nil {
		var text []byte
		var revision uint64
		if text, revision, err = s.Get(ctx, "count"); err != nil {
			break
		}
		n, _ := strconv.Atoi(string(text))
		var swapped bool
		if swapped, err = s.Swap(ctx, "count", revision, []byte(strconv.Itoa(n+1))); swapped {
			fmt.Println("+1")
		}
	}
	return err
}

// playWrite is a process of epoch args[1] of a job that writes to the store args[0] until that refuses it.
func playWrite(ctx context.Context, args []string) error {
	raw, err := rendezvous.Open(ctx, args[0], rendezvous.Config{Logger: quiet})
	if err != nil {
		return err
	}
	defer raw.Close()
	epoch, _ := strconv.Atoi(args[1])
	s := rendezvous.Fence(raw, "job", uint32(epoch))
	for n := 0; ; n++ {
		if err := s.Set(ctx, "text", []byte(strconv.Itoa(n))); err != nil {
			return err
		}
		fmt.Println("wrote", n)
	}
}

// child is a process that a test has started.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
}

func start(t *testing.T, role ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0]), lines: make(chan string, 1<<16)}
	c.cmd.Env = append(os.Environ(), roleEnv+"="+strings.Join(role, " "))
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.in = in
	go func() {
		defer close(c.lines)
		for r := bufio.NewScanner(out); r.Scan(); {
			c.lines <- r.Text()
		}
	}()
	return c
}

// end waits until the process has ended, and returns the output that was not read.
func (c *child) end() (lines []string, err error) {
	for line := range c.lines {
		lines = append(lines, line)
	}
	return lines, c.cmd.Wait()
}

// TestProcesses: workers in separate processes join over a server and in a folder, exchange their pids, and leave.
func TestProcesses(t *testing.T) {
	urls := map[string]string{
		"tcp":  serve(t, rendezvous.ServerConfig{}).URL(),
		"file": "file://" + filepath.ToSlash(filepath.Join(t.TempDir(), "store")),
	}
	for name, url := range urls {
		t.Run(name, func(t *testing.T) {
			var all []*child
			for w := range 3 {
				all = append(all, start(t, "join", url, strconv.Itoa(w), "3"))
			}
			for w, c := range all {
				if line := <-c.lines; line != "met" {
					t.Errorf("worker %d says %q", w, line)
				}
			}
			// Another process that registers as worker 1 is refused, and the others are not affected.
			lines, err := start(t, "join", url, "1", "3").end()
			if want := fmt.Sprintf("as pid %d", all[1].cmd.Process.Pid); err == nil || len(lines) != 1 ||
				!strings.Contains(lines[0], want) || !strings.Contains(lines[0], "joined twice") {
				t.Errorf("a duplicate: %q, %v, want %q in it", lines, err, want)
			}
			for _, c := range all {
				c.in.Close()
			}
			for w, c := range all {
				if lines, err := c.end(); err != nil {
					t.Errorf("worker %d: %v: %q", w, err, lines)
				}
			}
		})
	}
}

// TestKilledWriters: processes that are killed while they write, over a server and in a folder, leave a usable store,
// in which each confirmed change was made once.
func TestKilledWriters(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	kills := 25
	if testing.Short() {
		kills = 6
		t.Log("-short: 6 processes are killed instead of 25")
	}
	urls := map[string]string{
		"tcp":  serve(t, rendezvous.ServerConfig{}).URL(),
		"file": "file://" + filepath.ToSlash(t.TempDir()),
	}
	for name, url := range urls {
		t.Run(name, func(t *testing.T) {
			s := open(t, url, rendezvous.Config{})
			defer s.Close()
			if err := s.Set(t.Context(), "count", []byte("0")); err != nil {
				t.Fatal(err)
			}
			confirmed, mu := 0, sync.Mutex{}
			var work sync.WaitGroup
			for range 2 {
				r := rand.New(rand.NewPCG(random.Uint64(), 1))
				work.Go(func() {
					for range kills {
						c := start(t, "count", url)
						for range 1 + r.IntN(30) {
							if <-c.lines == "+1" {
								mu.Lock()
								confirmed++
								mu.Unlock()
							}
						}
						c.cmd.Process.Kill()
						rest, _ := c.end()
						mu.Lock()
						confirmed += len(rest)
						mu.Unlock()
					}
				})
			}
			work.Wait()
			text, _, err := s.Get(t.Context(), "count")
			n, _ := strconv.Atoi(string(text))
			if err != nil || n < confirmed || n > confirmed+2*kills {
				t.Errorf("the count is %q, %v; %d were confirmed, %d processes were killed", text, err, confirmed, 2*kills)
			}
			t.Logf("the count is %d, of which %d were confirmed", n, confirmed)
		})
	}
}
