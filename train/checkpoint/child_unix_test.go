//go:build linux || darwin

package checkpoint

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// childMain saves snapshots of the steps 1, 2, … into a folder, and prints each step that is saved. text is "DIR KILL SAVES LIMIT KEEP": it
// kills itself before step KILL on the disk (0: never), and ends after so many saves (0: never); LIMIT is the longest file that it may
// write, in bytes (0: any), KEEP is Config's, 2 if it is not there. After an error it says which snapshot can be read.
func childMain(text string) {
	var dir string
	var kill, saves int
	var limit uint64
	keep := 2
	if n, err := fmt.Sscan(text, &dir, &kill, &saves, &limit, &keep); n < 4 {
		fmt.Println(err)
		os.Exit(1)
	}
	if limit > 0 {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: limit, Max: limit}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	steps := 0
	m, err := Open(Config{Dir: dir, Keep: keep, watch: func(string, string) {
		if steps++; steps == kill {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // it comes at once
		}
	}})
	for step := int64(1); err == nil && (saves == 0 || step <= int64(saves)); step++ {
		if err = m.Save(contents(step)); err == nil {
			fmt.Println(step)
		}
	}
	if err != nil {
		fmt.Println("error:", err)
		if s, _, err := Latest(dir); err == nil && s != nil {
			fmt.Println("left:", filepath.Base(s.Path))
		}
	}
}

// child returns a process of childMain.
func child(t testing.TB, dir string, kill, saves int, limit uint64) *exec.Cmd {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d %d", childEnv, dir, kill, saves, limit))
	return cmd
}

// survives holds what a killed process left: the last snapshot of which it had said so, or a newer one, as it was written. And one can
// go on.
func survives(t testing.TB, dir string, said []byte) {
	t.Helper()
	last := int64(0)
	for _, line := range strings.Fields(string(said)) {
		n, err := strconv.ParseInt(line, 10, 64)
		if err != nil {
			t.Fatalf("it printed %q", said)
		}
		last = n
	}
	s, refused := latest(t, dir)
	if refused != nil || last > 0 && (s == nil || s.Step < last) || s != nil && s.Step > last+1 {
		t.Errorf("it had saved up to step %d; left is %v, refused %v", last, s, refused)
	}
	save(t, open(t, Config{Dir: dir, Keep: 2}), 1000)
	if s, _ := latest(t, dir); s.Step != 1000 {
		t.Errorf("after the next save, %s is the latest", s.Path)
	}
	for _, name := range bases(t, dir) {
		if strings.HasPrefix(name, ".") {
			t.Errorf("%s was left behind", name)
		}
	}
	if got := len(bases(t, dir)); got > 2 {
		t.Errorf("%d snapshots are kept", got)
	}
}

// TestKilledAtEveryStep kills a process before each of its steps on the disk.
func TestKilledAtEveryStep(t *testing.T) {
	const saves = 3
	steps := 0
	count := open(t, Config{Dir: t.TempDir(), Keep: 2, watch: func(string, string) { steps++ }})
	save(t, count, 1, 2, 3)
	every := 1
	if testing.Short() {
		every = 5
		t.Logf("-short: every %dth step of %d", every, steps)
	}
	for kill := 1; kill <= steps; kill += every {
		dir := t.TempDir()
		out, err := child(t, dir, kill, saves, 0).Output()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("step %d: it was not killed: %v, %s", kill, err, out)
		}
		survives(t, dir, out)
		if t.Failed() {
			t.Fatalf("killed before step %d of %d on the disk", kill, steps)
		}
	}
}

// TestKilledAnyTime kills a process that saves without end, from outside, at a random moment.
func TestKilledAnyTime(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("LOCKSTEP_TEST_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("LOCKSTEP_TEST_SEED=%d repeats the delays", seed)
	g := rand.New(rand.NewPCG(seed, 0))
	rounds := 30
	if testing.Short() {
		rounds = 5
		t.Logf("-short: %d rounds", rounds)
	}
	for range rounds {
		dir := t.TempDir()
		cmd := child(t, dir, 0, 0, 0)
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var said bytes.Buffer
		lines := bufio.NewReader(stdout)
		first, err := lines.ReadBytes('\n') // the first is saved, from now on anything may happen
		if err != nil {
			t.Fatal(err)
		}
		said.Write(first)
		time.Sleep(time.Duration(g.Int64N(int64(20 * time.Millisecond))))
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if _, err := said.ReadFrom(lines); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		text := said.Bytes()
		survives(t, dir, text[:bytes.LastIndexByte(text, '\n')+1])
	}
}

// TestFilesTooLong: a file that cannot be written to its end is an error that says so, and costs no earlier snapshot.
func TestFilesTooLong(t *testing.T) {
	dir := t.TempDir()
	save(t, open(t, Config{Dir: dir}), 1)
	out, err := child(t, dir, 0, 1, 300).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"state.safetensors: file too large", "snapshot-000002-step-1 could not be written (the last one before it is snapshot-000001-step-1)"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("got %s, want %q", out, want)
		}
	}
	if got := bases(t, dir); len(got) != 1 {
		t.Errorf("it left %v", got)
	}
	latest(t, dir)
}

// TestPipe: what would make a reader wait for ever is refused.
func TestPipe(t *testing.T) {
	dir := t.TempDir()
	save(t, open(t, Config{Dir: dir}), 1)
	path := dir + "/snapshot-000001-step-1/" + tensorsFile
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o666)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Latest(dir); err == nil || !strings.Contains(err.Error(), tensorsFile+" is no regular file") {
		t.Errorf("got %v", err)
	}
}
