package shm_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/transport/shm"
)

// The tests of this file run in real processes: the test binary starts itself, with a part of [parts] to play. A child
// tells the test what happens on its standard output, line by line, and goes on when the test writes a line to it.

// parts are what a child can do, by name. An error is what the child says last.
var parts = map[string]func(c *child) error{}

// child is a process that the test has started, seen from inside.
type child struct {
	cfg shm.Config
	arg int
	in  *bufio.Scanner
}

func (c *child) say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// wait waits for the test's next line.
func (c *child) wait() { c.in.Scan() }

const partEnv = "LOCKSTEP_SHM_TEST_PART"

func TestMain(m *testing.M) {
	text := os.Getenv(partEnv)
	if text == "" {
		goleak.VerifyTestMain(m)
		return
	}
	var play struct {
		Part string
		Arg  int
		Cfg  shm.Config
	}
	if err := json.Unmarshal([]byte(text), &play); err != nil {
		panic(err)
	}
	c := &child{cfg: play.Cfg, arg: play.Arg, in: bufio.NewScanner(os.Stdin)}
	if err := parts[play.Part](c); err != nil {
		c.say("error: %v", err)
	}
}

// started is a child, seen from the test.
type started struct {
	t   testing.TB
	cmd *exec.Cmd
	out *bufio.Scanner
	in  func()
}

// start starts a child. What it says is read with line.
func start(t testing.TB, part string, arg int, cfg shm.Config) *started {
	t.Helper()
	s, err := startIn(t, part, arg, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// startIn is start with attributes of the process. It returns the error of starting it.
func startIn(t testing.TB, part string, arg int, cfg shm.Config, attributes *syscall.SysProcAttr) (*started, error) {
	t.Helper()
	encodable := struct {
		shm.Config
		Authenticate *int // hides the function, which has no encoding
	}{Config: cfg}
	text, err := json.Marshal(map[string]any{"Part": part, "Arg": arg, "Cfg": encodable})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), partEnv+"="+string(text))
	cmd.Stderr, cmd.SysProcAttr = os.Stderr, attributes
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &started{t: t, cmd: cmd, out: bufio.NewScanner(out), in: func() { fmt.Fprintln(in) }}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return s, nil
}

// line returns what the child says next, and fails the test if it ends instead.
func (s *started) line() string {
	s.t.Helper()
	if !s.out.Scan() {
		s.t.Fatalf("the child said no more: %v", s.cmd.Wait())
	}
	return s.out.Text()
}

// says fails the test unless the child's next line holds the texts.
func (s *started) says(texts ...string) {
	s.t.Helper()
	line := s.line()
	for _, text := range texts {
		if !strings.Contains(line, text) {
			s.t.Fatalf("the child said %q, want %q in it", line, text)
		}
	}
}

// config is of a group that only this test knows.
func config(t testing.TB, size int, ranks ...int) shm.Config {
	return shm.Config{Name: t.Name() + rand.Text(), Job: "job", Epoch: 3, Size: size, Ranks: ranks, ArenaBytes: 256 << 20}
}

// soon is a context for what should not take long.
func soon() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 2*time.Minute)
}
