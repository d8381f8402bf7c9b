package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/dashboard"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// watchedJob is a training without an end, of two workers, with a page.
type watchedJob struct {
	t    *testing.T
	p    *workerProcess
	temp string // its folder for temporary files
	page string // address
}

// startWatched starts a job by lockstep run with these flags.
func startWatched(t *testing.T, flags ...string) *watchedJob {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	temp, err := os.MkdirTemp("", "w") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(temp) })
	j := &watchedJob{t: t, temp: temp, p: &workerProcess{}}
	args := slices.Concat([]string{"run", "--dashboard", "127.0.0.1:0"}, flags, []string{
		"--", exe, "train", "--model", "mlp", "--strategy", "multi-worker", "--replicas", "1", "--epochs", "100000",
		"--global-batch", "64",
	})
	j.p.cmd = clitest.Process(t, args...)
	j.p.cmd.Env = append(j.p.cmd.Environ(), "TMPDIR="+temp)
	j.p.cmd.Stdout = io.Discard
	stderr, err := j.p.cmd.StderrPipe()
	if err == nil {
		err = j.p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stderr)
	for j.page == "" && lines.Scan() {
		_, j.page, _ = strings.Cut(lines.Text(), "dashboard at ")
	}
	if j.page == "" {
		t.Fatalf("the address of the page is not printed: %v", j.p.cmd.Wait())
	}
	go func() { _, _ = io.Copy(io.Discard, stderr) }()
	return j
}

// top runs lockstep top and returns its output and exit code.
func (j *watchedJob) top(args ...string) (string, int) {
	cmd := clitest.Process(j.t, append([]string{"top", "--once"}, args...)...)
	cmd.Env = append(cmd.Environ(), "TMPDIR="+j.temp)
	out, err := cmd.CombinedOutput()
	return string(out), clitest.ExitCode(err)
}

// await waits until both workers have published steps, as lockstep top shows them.
func (j *watchedJob) await(args ...string) status.Job {
	j.t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		out, code := j.top(append(args, "--format", "json")...)
		var m dashboard.Message
		err := json.Unmarshal([]byte(out), &m)
		if w := m.Job.Workers; len(w) == 2 && w[0].OwnSeconds > 0 && w[1].OwnSeconds > 0 {
			return m.Job
		}
		if time.Since(begin) > time.Minute {
			j.t.Fatalf("exit code %d, %v:\n%s", code, err, out)
		}
	}
}

// end stops the job as its user does.
func (j *watchedJob) end() {
	j.t.Helper()
	if err := j.p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		j.t.Fatal(err)
	}
	if code := clitest.ExitCode(j.p.cmd.Wait()); code != 130 {
		j.t.Errorf("exit code %d, want 130", code)
	}
}

// TestWatch watches a job of two processes: by its page, and by lockstep top with its name, a part of it, nothing, and
// the address of the page.
func TestWatch(t *testing.T) {
	race.SkipTimed(t, "a whole job")
	j := startWatched(t, "--nproc-per-node", "2", "--rdzv-id", "watched")
	job := j.await("watched")
	if job.Job != "watched" || job.Workers[1].State != "running" || job.Training == nil || job.ExamplesPerSecond <= 0 {
		t.Errorf("got %+v", job)
	}
	for _, args := range [][]string{{}, {"watch"}, {j.page}} {
		if out, code := j.top(args...); code != 0 || !strings.Contains(out, "watched: step ") ||
			!strings.Contains(out, "images/s") || strings.Count(out, "running") != 2 {
			t.Errorf("top %v: exit code %d:\n%s", args, code, out)
		}
	}
	if out, code := j.top("other"); code != cli.ExitUsage || !strings.Contains(out,
		"no job other of this user runs on this "+"host, but watched") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	answer, err := http.Get(j.page)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(answer.Body)
	answer.Body.Close()
	if err != nil || !strings.Contains(string(text), `<table id="workers">`) {
		t.Errorf("%v: the page is\n%s", err, text)
	}
	j.end()
	if out, code := j.top(); code != cli.ExitError || !strings.Contains(out, "no job of this user runs on this host") {
		t.Errorf("after the end: exit code %d:\n%s", code, out)
	}
}

// TestWatchHosts watches a job that -H starts on two hosts.
func TestWatchHosts(t *testing.T) {
	race.SkipTimed(t, "a whole job over ssh")
	ssh := serveSSH(t)
	j := startWatched(t, "-H", "far1:1,far2:1", "--ssh", ssh, "--rdzv-endpoint", "127.0.0.1", "--rdzv-id", "hosts")
	if job := j.await(j.page); job.Job != "hosts" || job.Training == nil {
		t.Errorf("got %+v", job)
	}
	j.end()
}

// TestTableOnATerminal: lockstep run shows a table of the workers on a terminal, below their output, which it leaves as
// it is; and nothing remains of the table.
func TestTableOnATerminal(t *testing.T) {
	race.SkipTimed(t, "whole jobs")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"auto", "none", "piped"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			terminal, out := openTerminal(t)
			progress := strings.Replace(mode, "piped", "auto", 1)
			cmd := clitest.Process(t, "run", "--nproc-per-node", "2", "--progress", progress, "--", exe, "train", "--model",
				"mlp", "--strategy", "multi-worker", "--replicas", "1", "--epochs", "2", "--global-batch", "64")
			cmd.Env = append(cmd.Environ(), "TERM=xterm", "TMPDIR="+t.TempDir())
			cmd.Stdout, cmd.Stderr = out, out
			if mode == "piped" { // as to tee: another process writes to the same terminal
				read, write, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				cat := exec.Command("cat")
				cat.Stdin, cat.Stdout, cmd.Stdout = read, out, write
				if err := cat.Start(); err != nil {
					t.Fatal(err)
				}
				read.Close()
				defer func() {
					if err := cat.Wait(); err != nil {
						t.Error(err)
					}
				}()
				defer write.Close() // again, if the command did not start
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			out.Close()
			if w, ok := cmd.Stdout.(*os.File); ok {
				w.Close()
			}
			raw, _ := io.ReadAll(terminal) // it ends with EIO when the other end is closed
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v:\n%s", err, raw)
			}
			text := strings.ReplaceAll(string(raw), "\r\n", "\n")
			if drawn := strings.Contains(text, "\nworker  host"); drawn != (mode == "auto") {
				t.Errorf("a table was drawn: %v:\n%s", drawn, text)
			}
			e := &clitest.Emulator{T: t, Columns: 80, Lines: []string{""}}
			_, _ = e.Write([]byte(text)) // it returns no error
			screen := strings.Join(e.Lines, "\n")
			if strings.Contains(screen, "\nworker  host") || !strings.Contains(screen, "[rank0] epoch 2/2: ") ||
				!strings.Contains(screen, "weights hash") {
				t.Errorf("the screen at the end:\n%s", screen)
			}
		})
	}
}
