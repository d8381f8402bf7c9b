//go:build unix

package worker_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// Whatever becomes of one of three workers, the others' errors say which it was, where, and what it was last seen doing.
func TestFailures(t *testing.T) {
	for _, test := range []struct {
		name   string
		do     string
		who    int // to whom it happens
		change func(*child)
		says   []string // by all others
		kind   string   // of their records
		own    string   // of its own, if it can leave one
	}{
		{name: "killed", do: "kill", who: 2, says: []string{"peer lost", "at step 3, compute"}, kind: "lost"},
		{name: "killed, by TCP", do: "kill", who: 1, change: func(c *child) { c.TCP = true }, says: []string{"peer lost", "at step 3, compute"}, kind: "lost"},
		{name: "the one who serves the store is killed", do: "kill", who: 0, says: []string{"peer lost"}, kind: "lost"},
		{name: "exits", do: "exit", who: 1, says: []string{"peer lost", "at step 3, compute"}, kind: "lost"},
		{name: "panics", do: "panic", who: 1, says: []string{"peer lost"}, kind: "lost"},
		{
			name: "stopped", do: "stop", who: 2, change: func(c *child) { c.Heartbeat = 3 * time.Second }, kind: "lost",
			says: []string{"peer lost", "no sign of life", "at step 3, compute"},
		},
		{
			name: "the one who serves the store is stopped", do: "stop", who: 0, change: func(c *child) { c.Heartbeat = 3 * time.Second }, kind: "lost",
			says: []string{"peer lost", "has not answered", "worker 0, which serves it"},
		},
		{
			name: "in an endless loop, found by the deadline", do: "loop", who: 1, change: func(c *child) { c.Timeout = 3 * time.Second }, kind: "timeout",
			says: []string{"deadline exceeded", "at step 3, compute", "worker_test.endless"},
		},
		{
			name: "in an endless loop, found by its progress", do: "loop", who: 2, kind: "lost",
			change: func(c *child) { c.Heartbeat, c.Progress = 2*time.Second, 3*time.Second },
			says:   []string{"peer lost", "has come no further", "at step 3, compute", "worker_test.endless"},
		},
		{
			name: "a replica panics", do: "panic", who: 1, change: strategy, kind: "error", own: "panic",
			says: []string{"replica 1 (CPU:0) panicked: it went wrong", "at step 3, compute"},
		},
		{
			name: "a replica returns an error", do: "error", who: 2, change: strategy, kind: "error", own: "error",
			says: []string{"replica 2 (CPU:0) returned an error: it is not right", "at step 3, compute"},
		},
		{name: "killed in its step function", do: "kill", who: 2, change: strategy, kind: "lost", says: []string{"peer lost", "at step 3, compute, in its step function"}},
		{
			name: "in an endless loop in its step function", do: "loop", who: 1, kind: "timeout",
			change: func(c *child) { c.Strategy, c.Timeout = true, 3*time.Second },
			says:   []string{"deadline exceeded", "at step 3, compute, in its step function", "worker_test.endless", "replica"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			const workers = 3
			records := t.TempDir()
			store := freeStore(t)
			var all []*process
			for i := range workers {
				c := child{Worker: i, Workers: workers, Replicas: 1, Store: store, Job: "failures", Steps: 6, At: -1, Timeout: testWait, Records: records}
				if i == test.who {
					c.At, c.Do = 3, test.do
				}
				if test.change != nil {
					test.change(&c)
				}
				all = append(all, start(t, c))
			}
			pid := all[test.who].says(t, "joined")
			for i, p := range all {
				if i == test.who {
					continue
				}
				text := p.says(t, "error")
				who := fmt.Sprintf("worker %d (rank %d, host %s, pid %s)", test.who, test.who, hostName(t), pid)
				for _, want := range append(test.says, who) {
					if !strings.Contains(text, want) {
						t.Errorf("worker %d does not say %q:\n%s", i, want, text)
					}
				}
			}
			if test.own != "" {
				all[test.who].says(t, "error")
			}
			checkRecords(t, records, test.who, workers, test.kind, test.own)
		})
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

// checkRecords: all other workers have left a record that blames that one, which has left one that blames nobody if it could.
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
			t.Errorf("worker %d: kind %q, blames %v; want %q, nobody: %s", r.Worker, r.Kind, r.Blames, own, r.Message)
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

// Workers that do not fit together do not begin, and all say why.
func TestMisfits(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(i int, c *child)
		start  []int    // who is started; nil: all
		says   []string // by all that are started
	}{
		{
			name: "one never starts", start: []int{0, 2}, change: func(_ int, c *child) { c.Rendezvous = 2 * time.Second },
			says: []string{"worker 1 of job", "did not come", "of 3 came worker 0"},
		},
		{
			name: "the first never starts", start: []int{1, 2}, change: func(_ int, c *child) { c.Rendezvous = 2 * time.Second },
			says: []string{"worker 0, which serves the store", "was not reached"},
		},
		{name: "one is there twice", start: []int{0, 1, 1}, says: []string{"worker 1 of job", "is there twice"}},
		{name: "another number of workers", change: func(i int, c *child) {
			if i == 2 {
				c.Workers = 4
			}
		}, says: []string{"worker 2", "of 4", "of 3"}},
		{name: "another program", change: func(i int, c *child) { c.Build = []string{"v1", "v1", "v2"}[i] }, says: []string{"differ", "runs v1", "worker 2", "runs v2"}},
		{name: "another batch size", change: func(i int, c *child) {
			c.Facts = []rendezvous.Fact{{Name: "model", Value: "mlp"}, {Name: "global batch", Value: []string{"64", "32", "64"}[i]}}
		}, says: []string{"differ", "global batch", `"64" for worker 0`, `"32" for worker 1`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
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
				all = append(all, start(t, c))
			}
			for i, p := range all {
				text := p.says(t, "error")
				for _, want := range test.says {
					if !strings.Contains(text, want) {
						t.Errorf("worker %d does not say %q:\n%s", started[i], want, text)
					}
				}
			}
		})
	}
}

// A worker with another secret, or none, does not get in, and all say so.
func TestSecrets(t *testing.T) {
	secret := strings.Repeat("secret", 6)
	for name, other := range map[string]string{"another secret": strings.Repeat("geheim", 6), "none": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := freeStore(t)
			var all []*process
			for i, s := range []string{secret, secret, other} {
				all = append(all, start(t, child{Worker: i, Workers: 3, Replicas: 1, Store: store, Job: "secrets", Secret: s, Rendezvous: 4 * time.Second, Steps: 3, At: -1}))
			}
			for i, p := range all {
				text := p.says(t, "error")
				if i < 2 && (!strings.Contains(text, "worker 2 of job") || !strings.Contains(text, "refused a connection from 127.0.0.1")) {
					t.Errorf("worker %d: %s", i, text)
				}
				if !strings.Contains(text, "secret") {
					t.Errorf("worker %d does not speak of the secret: %s", i, text)
				}
			}
		})
	}
}
