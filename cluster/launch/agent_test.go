//go:build unix

package launch

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// asGuard and asAgent make the test binary a process of another kind.
const (
	asGuard    = "LAUNCH_TEST_GUARD"
	asAgent    = "LAUNCH_TEST_AGENT"
	asFollower = "LAUNCH_TEST_FOLLOWER"
	asRemote   = "LAUNCH_TEST_REMOTE"
	asNode     = "LAUNCH_TEST_NODE"
	asCutNode  = "LAUNCH_TEST_CUT_NODE"
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(asGuard) != "":
		Guard(os.Stdin)
		return
	case os.Getenv(asAgent) != "":
		agentMain(os.Getenv(asAgent))
		return
	case os.Getenv(asNode) != "":
		nodeMain(os.Getenv(asNode))
		return
	case os.Getenv(asCutNode) != "":
		cutNodeMain(os.Getenv(asCutNode))
		return
	case os.Getenv(asFollower) != "":
		signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // its launcher may be gone
		code, err := Follow(context.Background(), os.Stdin, os.Stdout, os.Stderr, guardCommand(), slog.Default())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		os.Exit(code)
	case os.Getenv(asRemote) != "":
		r := Remote{
			Config: Config{
				Command: []string{"sh", "-c", `trap "" TERM INT HUP; echo "child $$"; while :; do sleep 0.02; done`},
				Dir:     "/", ID: "job", RendezvousTimeout: patience, HeartbeatTimeout: 5 * time.Second, Grace: time.Minute,
				Stdout: os.Stdout, Stderr: os.Stderr,
			},
			Hosts: []Host{{"a", 2}, {"b", 1}}, SSH: []string{os.Getenv(asRemote)},
			Agent: followCommand(), Address: "127.0.0.1:0", Secret: secret.New(),
		}
		fmt.Println(r.Run(context.Background()))
		return
	}
	// as by what a shell starts in the background; a shell that inherits that cannot catch it
	if signal.Ignored(os.Interrupt) {
		signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // the processes mostly wait
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// guardCommand is the command of a guard.
func guardCommand() []string { return []string{"/usr/bin/env", asGuard + "=1", os.Args[0]} }

// agentMain is an agent with two workers that run a script.
func agentMain(script string) {
	a, err := New(Config{
		Command: []string{"sh", "-c", script}, Workers: 2, Guard: guardCommand(), Stdout: os.Stdout,
		Stderr: os.Stderr, Env: os.Environ(),
	})
	if err != nil {
		panic(err)
	}
	o, err := a.Run(context.Background())
	fmt.Println(o, err)
	os.Exit(o.Code)
}

// output collects what an agent writes.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// await waits until a text was written.
func (o *output) await(t *testing.T, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%q to be written", text), func() bool { return strings.Contains(o.String(), text) })
}

// eventually waits for a condition, which must come true at some time.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

type started struct {
	agent   *Agent
	out     *output
	err     *output
	outcome chan Outcome
}

// launchScript starts an agent whose workers run a script.
func launchScript(t *testing.T, script string, change func(*Config)) *started {
	t.Helper()
	s := &started{out: &output{}, err: &output{}, outcome: make(chan Outcome, 1)}
	cfg := Config{
		Command: []string{"sh", "-c", script}, Workers: 2, Stdout: s.out, Stderr: s.err,
		Settle: 50 * time.Millisecond, RestartDelay: time.Millisecond,
	}
	if change != nil {
		change(&cfg)
	}
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.agent = a
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		o, err := a.Run(ctx)
		if err != nil {
			t.Error(err)
		}
		s.outcome <- o
	}()
	return s
}

func (s *started) wait(t *testing.T) Outcome {
	t.Helper()
	select {
	case o := <-s.outcome:
		return o
	case <-time.After(patience):
		t.Fatalf("the agent does not return; it has written:\n%s%s", s.out, s.err)
		return Outcome{}
	}
}

// awaitOthers is a part of a script: it waits until both workers have reached it.
const awaitOthers = `until [ -e $LOCKSTEP_RECORDS/ready0 ] && [ -e $LOCKSTEP_RECORDS/ready1 ]; do sleep 0.02; done; `

func TestRunsWorkers(t *testing.T) {
	logs := t.TempDir()
	s := launchScript(t, `echo "I am $RANK of $WORLD_SIZE, $LOCKSTEP_WORKER"; echo "warning $RANK" >&2; printf 'no newline'`, func(c *Config) { c.Workers, c.Logs = 3, logs })
	if o := s.wait(t); o.Code != 0 || o.Report != nil || o.Restarts != 0 {
		t.Errorf("outcome %+v", o)
	}
	for rank := range 3 {
		for stream, want := range map[string]string{
			"stdout": fmt.Sprintf("I am %d of 3, %d\nno newline", rank, rank),
			"stderr": fmt.Sprintf("warning %d\n", rank),
		} {
			got, err := os.ReadFile(filepath.Join(logs, "epoch0", fmt.Sprintf("rank%d.%s.log", rank, stream)))
			if err != nil || string(got) != want {
				t.Errorf("log of rank %d, %s: %q, %v; want %q", rank, stream, got, err, want)
			}
			shown := s.out
			if stream == "stderr" {
				shown = s.err
			}
			for line := range strings.Lines(want) {
				if want := fmt.Sprintf("[rank%d] %s\n", rank, strings.TrimSpace(line)); !strings.Contains(shown.String(), want) {
					t.Errorf("%s was not shown:\n%s", want, shown)
				}
			}
		}
	}
}

// TestLinesNeverMix: while all workers write at the same time, each line on the screen is one worker's.
func TestLinesNeverMix(t *testing.T) {
	all := &output{} // both streams go to one place, as on a terminal
	s := launchScript(t,
		`i=0; while [ $i -lt 300 ]; do printf "out $RANK "; echo "$i end"; echo "err $RANK $i end" >&2; i=$((i+1)); done`,
		func(c *Config) { c.Stdout, c.Stderr, c.Workers = all, all, 3 })
	s.wait(t)
	seen := map[string]bool{}
	for line := range strings.Lines(all.String()) {
		seen[strings.TrimSpace(line)] = true
	}
	for rank := range 3 {
		for i := range 300 {
			for _, stream := range []string{"out", "err"} {
				if want := fmt.Sprintf("[rank%d] %s %d %d end", rank, stream, rank, i); !seen[want] {
					t.Fatalf("no line %q", want)
				}
			}
		}
	}
	if len(seen) != 3*300*2 {
		t.Errorf("%d different lines, want %d", len(seen), 3*300*2)
	}
}

// TestLeftoverHoldsOutput: a process that a worker left behind outside of its process group, and that still has the
// worker's output open, delays nothing.
func TestLeftoverHoldsOutput(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	out, ended, done := &output{}, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		copyStream(read, ended, out)
	}()
	if _, err := write.WriteString("before"); err != nil {
		t.Fatal(err)
	}
	out.await(t, "before") // and now it waits for more
	close(ended)
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("it still reads")
	}
}

func TestShowsWhatIsAskedFor(t *testing.T) {
	s := launchScript(t, `echo out; echo err >&2`, func(c *Config) {
		c.Show = &Shown{Streams: [2]bool{Stdout: true}, Ranks: []int{1}}
	})
	s.wait(t)
	if s.out.String() != "[rank1] out\n" || s.err.String() != "" {
		t.Errorf("shown: %q and %q", s.out, s.err)
	}
}

// TestRootCause: worker 1 fails in many ways while the others run on.
func TestRootCause(t *testing.T) {
	for _, c := range []struct {
		name, script string
		code         int
		kind         string
		says         []string
	}{
		{"exit code", `echo first >&2; exit 7`, 7, "exit", []string{
			"ended with exit code 7", "stderr  first",
			"worker 1 of 3", "workers 0, 2: asked to exit, and ended with SIGTERM",
		}},
		{"killed", `kill -9 $$`, 137, "signal", []string{"killed by SIGKILL, which lockstep run did not send"}},
		{"a signal", `kill -SEGV $$`, 139, "signal", []string{"ended by SIGSEGV"}},
		{
			"panic", `echo 'panic: boom' >&2; echo; echo 'goroutine 1 [running]:' >&2; exit 2`, 2, "panic",
			[]string{"what    panic: boom", "goroutine 1 [running]:"},
		},
		{"traceback", `echo 'Traceback (most recent call last):
  File "x"
ValueError: v' >&2; exit 1`, 1, "error", []string{"what    ValueError: v"}},
		{
			"its own record",
			`echo '{"epoch":0,"worker":1,"kind":"disk","message":"disk full: /x","step":12,"phase":"snapshot","ranks":[2,3],"time":"2026-01-02T03:04:05Z","exit_code":-1}' > $LOCKSTEP_RECORDS/failure-0-1.json; exit 3`,
			3, "disk",
			[]string{"disk full: /x", "in step 12 (snapshot)", "replicas [2 3]"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := launchScript(t, `[ $RANK = 1 ] || while :; do sleep 0.05; done
`+c.script, func(cfg *Config) { cfg.Workers = 3 })
			o := s.wait(t)
			if o.Code != c.code || o.Report == nil || o.Report.Root.Worker != 1 || o.Report.Root.Kind != c.kind ||
				len(o.Report.Others) != 2 {
				t.Fatalf("outcome %+v, report %+v; want worker 1, %s, exit code %d", o, o.Report, c.kind, c.code)
			}
			for _, want := range c.says {
				if !strings.Contains(s.err.String(), want) {
					t.Errorf("missing: %q in\n%s", want, s.err)
				}
			}
		})
	}
}

func TestCannotBeStarted(t *testing.T) {
	s := launchScript(t, "", func(c *Config) { c.Command = []string{"./no-such-program"} })
	if o := s.wait(t); o.Code != 127 || !strings.Contains(s.err.String(), "could not be started") {
		t.Errorf("outcome %+v:\n%s", o, s.err)
	}
}

// TestConsequenceIsNotTheRoot: worker 0 loses worker 1 before the launcher sees that worker 1 was killed.
func TestConsequenceIsNotTheRoot(t *testing.T) {
	s := launchScript(t, `if [ $RANK = 1 ]; then until [ -s $LOCKSTEP_RECORDS/failure-0-0.json ]; do sleep 0.02; done; kill -9 $$; fi
echo '{"epoch":0,"worker":0,"kind":"lost","message":"lost worker 1","blames":[1],"time":"2026-01-02T03:04:05Z"}' > $LOCKSTEP_RECORDS/failure-0-0.json
while :; do sleep 0.05; done`, nil)
	o := s.wait(t)
	if o.Code != 137 || o.Report.Root.Worker != 1 || len(o.Report.Others) != 1 ||
		!strings.Contains(s.err.String(), "then    worker 0: lost worker 1\n") {
		t.Errorf("outcome %+v, report %+v:\n%s", o, o.Report, s.err)
	}
}

// TestRecoveredFailure: a failure that a worker has reported and continued from fails no job, and is shown. If another
// worker fails because of it, it is the root cause.
func TestRecoveredFailure(t *testing.T) {
	const reports = `if [ $RANK = 1 ]; then
echo '{"epoch":0,"worker":1,"kind":"disk","message":"disk full: /x","time":"2026-01-02T03:04:05Z"}' > $LOCKSTEP_RECORDS/failure-0-1.json
exit 0; fi
`
	s := launchScript(t, reports+`exit 0`, nil)
	if o := s.wait(t); o.Code != 0 || o.Report != nil ||
		!strings.Contains(s.err.String(), "worker 1 exited with code 0 after it reported a failure: disk full: /x\n") {
		t.Errorf("outcome %+v:\n%s", o, s.err)
	}
	s = launchScript(t, reports+
		`echo '{"epoch":0,"worker":0,"kind":"lost","message":"lost worker 1","blames":[1],"time":"2026-01-02T03:04:05Z"}' > $LOCKSTEP_RECORDS/failure-0-0.json
exit 3`, nil)
	if o := s.wait(t); o.Code == 0 || o.Report == nil || o.Report.Root.Worker != 1 ||
		o.Report.Root.Message != "disk full: /x" {
		t.Errorf("outcome %+v:\n%s", o, s.err)
	}
}

// TestEndedTooSoon: a worker that exits with code 0 is named with its process when another has lost it.
func TestEndedTooSoon(t *testing.T) {
	s := launchScript(t, `if [ $RANK = 1 ]; then echo "worker 1 is $$"; exit 0; fi
echo '{"epoch":0,"worker":0,"kind":"lost","message":"lost worker 1","blames":[1],"time":"2026-01-02T03:04:05Z"}' > $LOCKSTEP_RECORDS/failure-0-0.json
exit 1`, func(c *Config) { c.Settle = time.Minute }) // both end by themselves, in any order
	o := s.wait(t)
	_, pid, _ := strings.Cut(strings.TrimSpace(s.out.String()), "worker 1 is ")
	root := o.Report.Root
	if want := "exited with code 0 while others still waited for it; worker 0 reported: lost worker 1"; o.Code != 1 ||
		root.Worker != 1 || fmt.Sprint(root.PID) != pid || root.Host == "" || root.Message != want {
		t.Errorf("outcome %+v, root %+v, want process %s and %q:\n%s", o, root, pid, want, s.err)
	}
}

// TestStoppedWorker: a worker that is stopped is the root cause of another's loss, and it is ended too.
func TestStoppedWorker(t *testing.T) {
	if _, err := fs.Stat(os.DirFS("/"), "proc/self/stat"); err != nil {
		t.Skip("needs /proc to see that a process is stopped")
	}
	s := launchScript(t, `echo $$ > $LOCKSTEP_RECORDS/pid$RANK; [ $RANK = 1 ] && kill -STOP $$
until grep -q ') T ' /proc/$(cat $LOCKSTEP_RECORDS/pid1)/stat; do sleep 0.02; done
echo '{"epoch":0,"worker":0,"kind":"timeout","message":"no word from worker 1","blames":[1],"time":"2026-01-02T03:04:05Z"}' > $LOCKSTEP_RECORDS/failure-0-0.json
exit 1`, nil)
	o := s.wait(t)
	if o.Code != codeStopped || o.Report.Root.Worker != 1 ||
		!strings.Contains(s.err.String(), "stopped (by SIGSTOP or a debugger)") {
		t.Errorf("outcome %+v, report %+v:\n%s", o, o.Report, s.err)
	}
}

// TestSettling: workers that exit after another's failure before they are asked to are not root causes.
func TestSettling(t *testing.T) {
	s := launchScript(t, `trap 'echo asked' TERM; echo $$ > $LOCKSTEP_RECORDS/pid$RANK
until [ -s $LOCKSTEP_RECORDS/pid1 ]; do sleep 0.01; done; pid=$(cat $LOCKSTEP_RECORDS/pid1)
[ $RANK = 1 ] && kill -9 $$
while kill -0 $pid 2>/dev/null; do sleep 0.01; done; exit 3`, func(c *Config) { c.Workers, c.Settle = 3, time.Minute })
	o := s.wait(t)
	if o.Code != 137 || o.Report.Root.Worker != 1 || strings.Contains(s.out.String(), "asked") ||
		!strings.Contains(s.err.String(), "then    workers 0, 2: ended with exit code 3\n") {
		t.Errorf("outcome %+v:\n%s%s", o, s.out, s.err)
	}
	for _, r := range o.Report.Others {
		if len(r.Blames) != 1 || r.Blames[0] != 1 {
			t.Errorf("worker %d blames %v, want [1]", r.Worker, r.Blames)
		}
	}
}

// TestKilledAfterGrace: a worker that does not exit when it is asked to is killed.
func TestKilledAfterGrace(t *testing.T) {
	s := launchScript(t, `trap '' TERM; touch $LOCKSTEP_RECORDS/ready$RANK; `+awaitOthers+`[ $RANK = 1 ] && exit 3
while :; do sleep 0.05; done`, func(c *Config) { c.Grace = 200 * time.Millisecond })
	if o := s.wait(t); o.Code != 3 ||
		!strings.Contains(s.err.String(), "then    worker 0: killed, since it had not exited 200ms after it was asked to") {
		t.Errorf("outcome %+v:\n%s", o, s.err)
	}
}

func TestRestarts(t *testing.T) {
	for _, c := range []struct {
		name              string
		max, good         int
		code, restarts    int
		blocks, announces int
	}{
		{"until it works", 5, 2, 0, 2, 2, 2},
		{"until none is left", 1, 2, 4, 1, 2, 1},
		{"not at all", 0, 1, 4, 0, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			logs := t.TempDir()
			s := launchScript(t, fmt.Sprintf(`echo "$LOCKSTEP_EPOCH $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS"
[ $LOCKSTEP_EPOCH = %d ] && exit 0; [ $RANK = 0 ] && exit 4; while :; do sleep 0.05; done`, c.good),
				func(cfg *Config) { cfg.RestartsMax, cfg.Logs = c.max, logs })
			o := s.wait(t)
			if o.Code != c.code || o.Restarts != c.restarts {
				t.Errorf("outcome %+v, want code %d after %d restarts", o, c.code, c.restarts)
			}
			for epoch := range c.restarts + 1 {
				got, err := os.ReadFile(filepath.Join(logs, fmt.Sprintf("epoch%d", epoch), "rank0.stdout.log"))
				if want := fmt.Sprintf("%d %d %d\n", epoch, epoch, c.max); err != nil || string(got) != want {
					t.Errorf("epoch %d: %q, %v; want %q", epoch, got, err, want)
				}
			}
			text := s.err.String()
			if got := strings.Count(text, "root cause: worker 0"); got != c.blocks {
				t.Errorf("%d blocks, want %d:\n%s", got, c.blocks, text)
			}
			if got := strings.Count(text, "starting all 2 workers again: restart "); got != c.announces {
				t.Errorf("%d restarts announced, want %d:\n%s", got, c.announces, text)
			}
		})
	}
}

// TestInterrupt: the first signal is forwarded once, and the workers may finish.
func TestInterrupt(t *testing.T) {
	for _, c := range []struct {
		sig  os.Signal
		name string
	}{{syscall.SIGINT, "INT"}, {syscall.SIGTERM, "TERM"}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := launchScript(t, fmt.Sprintf(`trap 'n=$((n+1))' %s; n=0; echo ready
while [ $n = 0 ]; do sleep 0.02; done; sleep 0.2; echo "ended after $n"; exit 0`, c.name),
				func(cfg *Config) { cfg.RestartsMax = 3 })
			s.out.await(t, "[rank0] ready\n")
			s.out.await(t, "[rank1] ready\n")
			s.agent.Interrupt(c.sig)
			o := s.wait(t)
			if o.Code != 130 || !o.Interrupted || o.Report != nil || o.Restarts != 0 {
				t.Errorf("outcome %+v", o)
			}
			for rank := range 2 {
				s.out.await(t, fmt.Sprintf("[rank%d] ended after 1\n", rank))
			}
			if !strings.Contains(s.err.String(), "forwarded SIG"+c.name+" to the workers") {
				t.Errorf("said:\n%s", s.err)
			}
		})
	}
}

// TestSecondInterrupt: the second signal kills workers that ignore the first.
func TestSecondInterrupt(t *testing.T) {
	s := launchScript(t, `trap 'echo got it' INT; echo ready; while :; do sleep 0.02; done`, nil)
	s.out.await(t, "[rank0] ready\n")
	s.out.await(t, "[rank1] ready\n")
	s.agent.Interrupt(os.Interrupt)
	s.out.await(t, "[rank0] got it\n")
	s.out.await(t, "[rank1] got it\n")
	s.agent.Interrupt(os.Interrupt)
	if o := s.wait(t); o.Code != 130 {
		t.Errorf("outcome %+v", o)
	}
}

// TestContextEnds: the workers are killed when the context ends.
func TestContextEnds(t *testing.T) {
	out := &output{}
	a, err := New(Config{
		Command: []string{"sh", "-c", `trap '' TERM INT; echo ready; while :; do sleep 0.02; done`},
		Workers: 1, Stdout: out,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan Outcome, 1)
	go func() {
		o, _ := a.Run(ctx)
		done <- o
	}()
	out.await(t, "ready")
	cancel()
	select {
	case o := <-done:
		if o.Code == 0 {
			t.Errorf("outcome %+v", o)
		}
	case <-time.After(patience):
		t.Fatal("it does not return")
	}
}

// TestNothingIsLeft: the child processes of a worker end with it, however it ends.
func TestNothingIsLeft(t *testing.T) {
	for name, script := range map[string]string{
		"good":   `sleep 1000 & echo "child $!"; exit 0`,
		"failed": `sleep 1000 & echo "child $!"; [ $RANK = 0 ] && exit 3; wait`,
		"deaf":   `sh -c 'trap "" TERM; echo "child $$"; touch $LOCKSTEP_RECORDS/ready$RANK; while :; do sleep 0.02; done' & ` + awaitOthers + `[ $RANK = 0 ] && exit 3; wait`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := launchScript(t, script, func(c *Config) { c.Grace = 300 * time.Millisecond })
			s.wait(t)
			for _, pid := range pids(t, s.out.String()) {
				if processRuns(pid) {
					t.Errorf("process %d is left", pid)
				}
			}
		})
	}
}

// pids reads the numbers behind "child".
func pids(t *testing.T, text string) (out []int) {
	t.Helper()
	for line := range strings.Lines(text) {
		if _, number, ok := strings.Cut(strings.TrimSpace(line), "child "); ok {
			pid, err := strconv.Atoi(number)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, pid)
		}
	}
	if len(out) == 0 {
		t.Fatalf("no process in:\n%s", text)
	}
	return out
}

// processRuns reports whether a process runs; one that has ended and that was not waited for does not.
func processRuns(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return false
	}
	state, _ := processState(os.DirFS("/"), strconv.Itoa(pid))
	return state != "Z" && state != "X"
}

// TestAgentKilled: neither the workers nor their child processes outlive an agent that is killed.
func TestAgentKilled(t *testing.T) {
	if _, err := fs.Stat(os.DirFS("/"), "proc/self/stat"); err != nil {
		t.Skip("needs /proc to see which processes live")
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	temp := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+temp,
		asAgent+`=echo "child $$"; (trap "" TERM INT HUP; echo "child $(exec sh -c 'echo $PPID')"; while :; do sleep 0.05; done) & trap '' TERM; while :; do sleep 0.05; done`)
	out := &output{}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "four processes", func() bool {
		return strings.Count(out.String(), "child ") == 4 && strings.HasSuffix(out.String(), "\n")
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.WaitDelay = time.Minute // for its output; nothing of it is left that holds it open
	_ = cmd.Wait()
	for _, pid := range pids(t, out.String()) {
		eventually(t, fmt.Sprintf("process %d to end", pid), func() bool { return !processRuns(pid) })
	}
	eventually(t, "the folder for records to go", func() bool {
		left, err := os.ReadDir(temp)
		return err == nil && len(left) == 0
	})
}

func TestNewRefuses(t *testing.T) {
	for want, cfg := range map[string]Config{
		"no program":              {Workers: 1},
		"0 workers":               {Command: []string{"x"}},
		"node 2 of 2":             {Command: []string{"x"}, Workers: 1, Node: 2, Nodes: 2},
		"need a rendezvous store": {Command: []string{"x"}, Workers: 1, Nodes: 2},
		"-1 restarts":             {Command: []string{"x"}, Workers: 1, RestartsMax: -1},
	} {
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one that says %q", cfg, err, want)
		}
	}
}

// stuckOutput is an output that accepts nothing until it is closed, as a paused terminal or a pager does.
type stuckOutput struct{ open chan struct{} }

func (o stuckOutput) Write(b []byte) (int, error) {
	<-o.open
	return len(b), nil
}

// TestPausedOutput: the user's signals, also the second one, reach the workers although their output is not read.
func TestPausedOutput(t *testing.T) {
	t.Parallel() // it waits for seconds
	for name, which := range map[string][]Stream{"stdout": {Stdout}, "both": {Stdout, Stderr}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			stuck := stuckOutput{make(chan struct{})}
			t.Cleanup(func() { close(stuck.open) })
			script := `trap 'touch ` + dir + `/got$RANK' INT; touch ` + dir + `/ready$RANK; ` +
				`while :; do echo line; echo line >&2; done`
			s := launchScript(t, script, func(c *Config) {
				for _, stream := range which {
					*map[Stream]*io.Writer{Stdout: &c.Stdout, Stderr: &c.Stderr}[stream] = stuck
				}
			})
			both := func(what string) {
				eventually(t, what+" of both workers", func() bool {
					found, _ := filepath.Glob(filepath.Join(dir, what+"*"))
					return len(found) == 2
				})
			}
			both("ready")
			time.Sleep(100 * time.Millisecond) // for the outputs to be stuck
			s.agent.Interrupt(os.Interrupt)
			both("got")
			s.agent.Interrupt(os.Interrupt)
			if o := s.wait(t); o.Code != 130 || !o.Interrupted {
				t.Errorf("outcome %+v", o)
			}
			if said := s.err.String(); len(which) == 1 &&
				!regexp.MustCompile(`the last [0-9]+ lines \([0-9]+ bytes\) of standard output are lost`).MatchString(said) {
				t.Errorf("the lost lines are not reported:\n%.1000s", said)
			}
		})
	}
}
