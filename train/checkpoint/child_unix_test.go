//go:build linux || darwin

package checkpoint

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"log/slog"
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

// childMain saves snapshots of the steps 1, 2, … into a folder, and prints each step that is saved. text is "DIR KILL
// SAVES LIMIT KEEP": the process kills itself before disk operation KILL (0: never), and ends after SAVES saves (0:
// never); LIMIT is the longest file that it may write, in bytes (0: any); KEEP is Config.Keep (default 2). After an
// error it prints which snapshot can be read.
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
	m, err := Open(Config{Dir: dir, Keep: keep, Job: "child", watch: func(string, string) error {
		if steps++; steps == kill {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // the signal arrives at once
		}
		return nil
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

// survives checks what a killed process left: the newest snapshot is unchanged, and is the last one that the process
// reported or a newer one; and a new process can continue.
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
	m := open(t, Config{Dir: dir, Keep: 2})
	save(t, m, 1000)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if s, _ := latest(t, dir); s.Step != 1000 {
		t.Errorf("after the next save, %s is the latest", s.Path)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if got := len(bases(t, dir)); got > 2 {
		t.Errorf("%d snapshots are kept", got)
	}
}

// TestKilledAtEveryStep kills a process before each of its disk operations; and so that the machine crashes with it,
// which loses what was not synced.
func TestKilledAtEveryStep(t *testing.T) {
	const saves = 3
	var trace []diskStep
	dir := t.TempDir()
	count := open(t, Config{Dir: dir, Keep: 2, watch: func(op, path string) error {
		rel, err := filepath.Rel(dir, path)
		trace = append(trace, diskStep{op, rel})
		return err
	}})
	save(t, count, 1, 2, 3)
	every := 1
	if testing.Short() {
		every = 5
		t.Logf("-short: every %dth step of %d", every, len(trace))
	}
	g := seeded(t)
	for kill := 1; kill <= len(trace); kill += every {
		for _, machine := range []bool{false, true} {
			dir := t.TempDir()
			out, err := child(t, dir, kill, saves, 0).Output()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("step %d: it was not killed: %v, %s", kill, err, out)
			}
			if machine {
				powerLoss(t, g, dir, trace[:kill-1])
			}
			survives(t, dir, out)
			if t.Failed() {
				t.Fatalf("killed before step %d of %d on the disk, with a power failure: %v", kill, len(trace), machine)
			}
		}
	}
}

// diskStep is a disk operation, with a path in the folder.
type diskStep struct{ op, path string }

// powerLoss changes the files that a process left after some disk operations to a state that a crash of the machine may
// leave: any part of a file that was not synced, and either name of a folder that was renamed in a parent that was not
// synced since.
func powerLoss(t *testing.T, g *rand.Rand, dir string, done []diskStep) {
	t.Helper()
	unsynced, renamed := map[string]bool{}, ""
	for _, s := range done {
		switch s.op {
		case "create":
			unsynced[s.path] = true
		case "sync":
			delete(unsynced, s.path)
			if s.path == "." {
				renamed = ""
			}
		case "rename":
			renamed = s.path
		}
	}
	for file := range unsynced {
		path := filepath.Join(dir, file)
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, g.Int64N(info.Size()+1)); err != nil {
			t.Fatal(err)
		}
	}
	if renamed != "" && g.IntN(2) == 0 {
		if err := os.Rename(filepath.Join(dir, renamed), filepath.Join(dir, "."+renamed)); err != nil {
			t.Fatal(err)
		}
	}
}

// seeded returns a random generator, and logs its seed.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("LOCKSTEP_TEST_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("LOCKSTEP_TEST_SEED=%d repeats it", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// TestFailsAtEveryStep makes each disk operation fail, permanently or once. Earlier snapshots remain, the error names
// the newest, and the next process can continue. A disk that is full once loses nothing if an old snapshot can be
// removed.
func TestFailsAtEveryStep(t *testing.T) {
	steps := 0
	save(t, open(t, Config{Dir: t.TempDir(), Keep: 2, watch: func(string, string) error { steps++; return nil }}), 1, 2, 3)
	every := 1
	if testing.Short() {
		every = 5
		t.Logf("-short: every %dth step of %d", every, steps)
	}
	for _, fault := range []struct {
		name string
		err  error
		once bool
	}{{"broken once", syscall.EIO, true}, {"full", syscall.ENOSPC, false}, {"full once", syscall.ENOSPC, true}} {
		for at := 1; at <= steps; at += every {
			dir, n, op := t.TempDir(), 0, ""
			m := open(t, Config{Dir: dir, Keep: 2, Logger: slog.New(slog.DiscardHandler), watch: func(now, _ string) error {
				// files can be removed from a full disk
				if n++; n == at || n > at && !fault.once && now != "unname" && now != "remove" {
					if n == at {
						op = now
					}
					return fault.err
				}
				return nil
			}})
			var said []byte
			var err error
			for step := int64(1); step <= 3 && err == nil; step++ {
				if err = m.Save(contents(step)); err == nil {
					said = fmt.Appendln(said, step)
				}
			}
			removing := op == "unname" || op == "remove"
			switch {
			case fault.err == syscall.ENOSPC && fault.once && !removing && len(said) == 6: // it has removed an old snapshot
			case err == nil && len(said) != 6, !errors.Is(err, fault.err):
				t.Errorf("%s at step %d, %s: %v", fault.name, at, op, err)
			case len(said) > 0 && !removing && !strings.Contains(err.Error(),
				fmt.Sprintf("the last one before it is snapshot-%06d-step-%d", len(said)/2, len(said)/2)):
				t.Errorf("%s at step %d, %s: after %q, %v", fault.name, at, op, said, err)
			}
			if err := m.lock.release(); err != nil {
				t.Error(err)
			}
			survives(t, dir, said)
		}
	}
}

// TestKilledAnyTime kills a process that saves in an endless loop, at a random moment.
func TestKilledAnyTime(t *testing.T) {
	g := seeded(t)
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
		first, err := lines.ReadBytes('\n') // the first is saved; from now on the process may be killed
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

// TestFilesTooLong checks that a file that cannot be written completely is an error with this reason, and that earlier
// snapshots remain.
func TestFilesTooLong(t *testing.T) {
	dir := t.TempDir()
	m := open(t, Config{Dir: dir})
	save(t, m, 1)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	out, err := child(t, dir, 0, 1, 300).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"state.safetensors: file too large",
		"snapshot-000002-step-1 could not be written (the last one before it is snapshot-000001-step-1)",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("got %s, want %q", out, want)
		}
	}
	if got := bases(t, dir); len(got) != 1 {
		t.Errorf("it left %v", got)
	}
	latest(t, dir)
}

// TestPipe checks that a file that would block the reader is rejected.
func TestPipe(t *testing.T) {
	dir := t.TempDir()
	save(t, open(t, Config{Dir: dir}), 1)
	path := dir + "/snapshot-000001-step-1/" + tensorsFile
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o666)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Latest(dir); err == nil || !strings.Contains(err.Error(), tensorsFile+" is not a regular file") {
		t.Errorf("got %v", err)
	}
}
