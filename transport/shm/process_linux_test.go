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
// reports on its standard output, line by line, and continues when the test writes a line to it.

// parts are the functions that a child can run, by name. If one fails, the last line that the child prints is its
// error.
var parts = map[string]func(c *child) error{}

// child is the child's side of a child process.
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

// started is the parent's side of a child process.
type started struct {
	t   testing.TB
	cmd *exec.Cmd
	out *bufio.Scanner
	in  func()
}

// start starts a child. line reads what it prints.
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

// line returns the child's next line, and fails the test if the child ends instead.
func (s *started) line() string {
	s.t.Helper()
	if !s.out.Scan() {
		s.t.Fatalf("the child printed no more: %v", s.cmd.Wait())
	}
	return s.out.Text()
}

// says fails the test unless the child's next line contains the texts.
func (s *started) says(texts ...string) {
	s.t.Helper()
	line := s.line()
	for _, text := range texts {
		if !strings.Contains(line, text) {
			s.t.Fatalf("the child printed %q, want %q in it", line, text)
		}
	}
}

// config returns the configuration of a group whose name is unique to this test.
func config(t testing.TB, size int, ranks ...int) shm.Config {
	return shm.Config{Name: t.Name() + rand.Text(), Job: "job", Epoch: 3, Size: size, Ranks: ranks, ArenaBytes: 256 << 20}
}

// soon returns a context for operations that should not take long.
func soon() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 2*time.Minute)
}
