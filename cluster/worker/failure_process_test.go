//go:build unix

package worker_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// Whatever happens to one of three workers, the others' errors name it, its host, and its last known position.
func TestFailures(t *testing.T) {
	t.Parallel()
	failures := readFailures(t)
	for _, test := range []struct {
		name   string
		do     string
		who    int // the worker that it happens to
		change func(*child)
		kind   string // of their records
		own    string // of its record, if it can leave one
	}{
		{name: "killed", do: "kill", who: 2, kind: "lost"},
		{name: "killed, by TCP", do: "kill", who: 1, change: func(c *child) { c.TCP = true }, kind: "lost"},
		{name: "the worker that serves the store is killed", do: "kill", who: 0, kind: "lost"},
		{name: "exits", do: "exit", who: 1, kind: "lost"},
		{name: "panics", do: "panic", who: 1, kind: "lost", own: "panic"},
		{
			name: "stopped", do: "stop", who: 2, change: func(c *child) { c.Heartbeat = 5 * time.Second }, kind: "lost",
		},
		{
			name: "the worker that serves the store is stopped", do: "stop", who: 0,
			change: func(c *child) { c.Heartbeat = 5 * time.Second }, kind: "lost",
		},
		{
			name: "in an endless loop, found by the deadline", do: "sleep", who: 1,
			change: func(c *child) { c.Timeout = 5 * time.Second }, kind: "timeout",
		},
		{
			name: "in an endless loop, found by its progress", do: "loop", who: 2, kind: "lost",
			change: func(c *child) { c.Heartbeat, c.Progress = 5*time.Second, 6*time.Second },
		},
		{
			name: "a replica panics", do: "panic", who: 1, change: strategy, kind: "error", own: "panic",
		},
		{
			name: "a replica returns an error", do: "error", who: 2, change: strategy, kind: "error", own: "error",
		},
		{name: "killed in its step function", do: "kill", who: 2, change: strategy, kind: "lost"},
		{
			name: "in an endless loop in its step function", do: "sleep", who: 1, kind: "timeout",
			change: func(c *child) { c.Strategy, c.Timeout = true, 5*time.Second },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			const workers = 3
			records := t.TempDir()
			store := freeStore(t)
			var all []*process
			for i := range workers {
				c := child{
					Worker: i, Workers: workers, Replicas: 1, Store: store, Job: "failures", Steps: 6, At: -1,
					Timeout: testWait, Records: records,
				}
				if i == test.who {
					c.At, c.Do = 3, test.do
				}
				if test.change != nil {
					test.change(&c)
				}
				all = append(all, start(t, c))
			}
			pid := all[test.who].says(t, "joined")
			since := time.Time{}
			if test.do == "kill" {
				all[test.who].ends(t)
				since = time.Now()
			}
			for i, p := range all {
				if i == test.who {
					continue
				}
				text := p.says(t, "error")
				if !since.IsZero() {
					t.Logf("worker %d leaves %v after the end of worker %d", i,
						time.Since(since).Round(time.Millisecond), test.who)
				}
				failures.check(t, test.name, p.kinds, text)
				if who := fmt.Sprintf("worker %d (rank %d, host %s, pid %s)", test.who, test.who, hostName(t),
					pid); !strings.Contains(text, who) {
					t.Errorf("worker %d does not say that it was %s:\n%s", i, who, text)
				}
			}
			if test.own != "" {
				all[test.who].ends(t)
			}
			checkRecords(t, records, test.who, workers, test.kind, test.own)
		})
	}
}

// A slow worker does not fail the job: the workers that wait for it log that.
func TestSlow(t *testing.T) {
	t.Parallel()
	race.SkipShort(t, "a worker waits 5 s before it reports another one as slow")
	failures := readFailures(t)
	store := freeStore(t)
	var all []*process
	for i, do := range []string{"", "wait"} {
		all = append(all, start(t, child{
			Worker: i, Workers: 2, Replicas: 1, Store: store, Job: "slow", Steps: 5, At: 3, Do: do, Timeout: testWait,
			Heartbeat: 5 * time.Second,
		}))
	}
	all[0].logged(t, failures["slow"].says)
	if err := all[1].goOn.Close(); err != nil {
		t.Error(err)
	}
	for i, p := range all {
		if got := p.says(t, "done"); got != "45" {
			t.Errorf("worker %d: %s, want 45", i, got)
		}
	}
}

// failureTable holds the rows of docs/failure.md, by event.
type failureTable map[string]documented

// testProgram replaces what the page says of any program by what the tests' program has there.
var testProgram = strings.NewReplacer("(main.", "(worker_test.", "panicked: …", "panicked: it went wrong …",
	"returned an error: …", "returned an error: it is not right …")

type documented struct{ matches, says string }

// rowName matches the comment in a row of docs/failure.md that holds the row's name in the tests.
var rowName = regexp.MustCompile(`<!-- (.*?) -->`)

func readFailures(t *testing.T) failureTable {
	t.Helper()
	page, err := os.ReadFile("../../docs/failure.md")
	if err != nil {
		t.Fatal(err)
	}
	out := failureTable{}
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if name := rowName.FindStringSubmatch(line); name != nil && len(cells) == 5 {
			out[name[1]] = documented{strings.TrimSpace(cells[2]), strings.TrimSpace(cells[3])}
		}
	}
	return out
}

// check compares an error with its row.
func (f failureTable) check(t *testing.T, name, kinds, text string) {
	t.Helper()
	row, ok := f[name]
	if !ok {
		t.Errorf("docs/failure.md has no row %q", name)
		return
	}
	for kind := range strings.SplitSeq(row.matches, ", ") {
		if kind = strings.Trim(kind, "`"); !slices.Contains(strings.Split(kinds, ", "), kind) {
			t.Errorf("the error matches %s, want %s:\n%s", kinds, kind, text)
		}
	}
	rest := text
	says := testProgram.Replace(row.says)
	for part := range strings.SplitSeq(says, "…") {
		_, after, found := strings.Cut(rest, strings.TrimSpace(part))
		if !found {
			t.Errorf("the error does not say %q (there):\n%s", part, text)
			return
		}
		rest = after
	}
}

func hostName(t *testing.T) string {
	t.Helper()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	return host
}

// strategy makes a child train by a strategy.
func strategy(c *child) { c.Strategy = true }

// checkRecords: every other worker has left a record that blames the failed one, which has left one that blames no
// worker, if it could.
func checkRecords(t *testing.T, folder string, who, workers int, kind, own string) {
	t.Helper()
	records, err := failure.Read(folder, 0)
	if err != nil {
		t.Error(err)
	}
	seen := 0
	for _, r := range records {
		switch {
		case r.Worker == who && (r.Kind != own || len(r.Blames) > 0):
			t.Errorf("worker %d: kind %q, blames %v; want %q, no worker: %s", r.Worker, r.Kind, r.Blames, own, r.Message)
		case r.Worker != who && (r.Kind != kind || len(r.Blames) != 1 || r.Blames[0] != who):
			t.Errorf("worker %d: kind %q, blames %v; want %q, worker %d: %s", r.Worker, r.Kind, r.Blames, kind, who, r.Message)
		case r.Worker != who || own != "":
			seen++
		}
	}
	want := workers - 1
	if own != "" {
		want++
	}
	if seen != want {
		left, _ := filepath.Glob(filepath.Join(folder, "*"))
		t.Errorf("%d records of %d workers: %v", seen, workers, left)
	}
}

// Workers that differ do not start, and all report the difference.
func TestMisfits(t *testing.T) {
	t.Parallel()
	failures := readFailures(t)
	for _, test := range []struct {
		name   string
		change func(i int, c *child)
		start  []int // who is started; nil: all
	}{
		{
			name: "one never starts", start: []int{0, 2}, change: func(_ int, c *child) { c.Rendezvous = 8 * time.Second },
		},
		{
			name: "the first never starts", start: []int{1, 2}, change: func(_ int, c *child) { c.Rendezvous = 8 * time.Second },
		},
		{name: "one joins twice", start: []int{0, 1, 1}},
		{name: "another number of workers", change: func(i int, c *child) {
			if i == 2 {
				c.Workers = 4
			}
		}},
		{name: "another program", change: func(i int, c *child) { c.Build = []string{"v1", "v1", "v2"}[i] }},
		{name: "another executable"},
		{
			name:   "other options of a strategy",
			change: func(i int, c *child) { c.Strategy, c.BytesPerPack = true, []int{0, 1024, 0}[i] },
		},
		{name: "another batch size", change: func(i int, c *child) {
			c.Facts = []rendezvous.Fact{
				{Name: "model", Value: "mlp"},
				{Name: "global batch", Value: []string{"64", "32", "64"}[i]},
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			if test.start != nil && len(test.start) < 3 || test.name == "another number of workers" {
				race.SkipShort(t, "it waits 8 s for a worker")
			}
			store := freeStore(t)
			started := test.start
			if started == nil {
				started = []int{0, 1, 2}
			}
			var all []*process
			for _, i := range started {
				c := child{Worker: i, Workers: 3, Replicas: 1, Store: store, Job: "misfits", Steps: 3, At: -1}
				if test.change != nil {
					test.change(i, &c)
				}
				if c.Workers != 3 {
					waitForRegistrations(t, store, c.Job, len(all)) // who came after the end of the joining would find no store
				}
				all = append(all, startBy(t, c, func(cmd *exec.Cmd) {
					if test.name == "another executable" && i == 1 {
						cmd.Path = changedCopy(t, cmd.Path)
					}
				}))
			}
			switch test.name {
			case "one never starts":
				all[0].logged(t, "waiting for worker 1 (2 of 3 joined)")
			case "the first never starts":
				all[0].logged(t, "waiting for worker 0, which serves the store at "+store)
			}
			for _, p := range all {
				text := p.says(t, "error")
				failures.check(t, test.name, p.kinds, text)
			}
		})
	}
}

// waitForRegistrations waits until n workers have registered for a job.
func waitForRegistrations(t *testing.T, store, job string, workers int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testWait)
	defer cancel()
	s := openAsOwn(t, store, job)
	for n := 0; n < workers; time.Sleep(10 * time.Millisecond) {
		entries, _, err := s.List(ctx, rendezvous.Key(job, 0, "worker", "join", "registration")+"/")
		if err != nil {
			t.Fatal(err)
		}
		n = len(entries)
	}
}

// changedCopy makes a copy of an executable with one more byte: another program that does the same. Another process
// writes it, since a file that is open for writing, here or for a moment in a child process, cannot be executed.
func changedCopy(t *testing.T, path string) string {
	t.Helper()
	other := filepath.Join(t.TempDir(), filepath.Base(path))
	if out, err := exec.Command("sh", "-c", `cp "$1" "$2" && echo >>"$2"`, "sh", path,
		other).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return other
}

// A worker with another secret, or none, is refused, and all report that.
func TestSecrets(t *testing.T) {
	t.Parallel()
	failures := readFailures(t)
	secret := strings.Repeat("secret", 6)
	for name, other := range map[string]string{"another secret": strings.Repeat("geheim", 6), "none": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			race.SkipShort(t, "it waits 8 s for a worker")
			store := freeStore(t)
			var all []*process
			for i, s := range []string{secret, secret, other} {
				all = append(all, start(t, child{
					Worker: i, Workers: 3, Replicas: 1, Store: store, Job: "secrets", Secret: s,
					Rendezvous: 8 * time.Second, Steps: 3, At: -1,
				}))
			}
			for i, p := range all {
				text := p.says(t, "error")
				if i < 2 {
					failures.check(t, name, p.kinds, text)
				}
				if !strings.Contains(text, "secret") {
					t.Errorf("worker %d does not mention the secret: %s", i, text)
				}
			}
		})
	}
}
