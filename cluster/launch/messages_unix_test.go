//go:build unix

package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"
)

// TestStoppedIsFound: a worker that is stopped, and that no other worker waits for, has failed after a while.
func TestStoppedIsFound(t *testing.T) {
	if _, err := fs.Stat(os.DirFS("/"), "proc/self/stat"); err != nil {
		t.Skip("needs /proc to see that a process is stopped")
	}
	s := launchScript(t, `[ $RANK = 1 ] && kill -STOP $$; while :; do sleep 0.02; done`,
		func(c *Config) { c.HeartbeatTimeout = 300 * time.Millisecond })
	o := s.wait(t)
	if o.Code != codeStopped || o.Report.Root.Worker != 1 || !strings.Contains(s.err.String(),
		"lockstep run: worker 1 (pid ") || !strings.Contains(s.err.String(), "is stopped: resume it with kill -CONT ") {
		t.Errorf("outcome %+v, report %+v:\n%s", o, o.Report, s.err)
	}
}

// TestHostsFindStopped: the agents of other hosts get the time for which a worker may be stopped.
func TestHostsFindStopped(t *testing.T) {
	if _, err := fs.Stat(os.DirFS("/"), "proc/self/stat"); err != nil {
		t.Skip("needs /proc to see that a process is stopped")
	}
	t.Parallel() // it waits for a second
	r := launchRemote(t, `[ $RANK = 1 ] && kill -STOP $$; while :; do sleep 0.02; done`,
		func(r *Remote) { r.Config.HeartbeatTimeout = 10 * time.Second })
	eventually(t, "the message about the stopped worker", func() bool {
		return strings.Contains(r.out.String()+r.err.String(), "it counts as failed after 10s\n")
	})
	r.remote.Interrupt(os.Interrupt)
	r.remote.Interrupt(os.Interrupt)
	if code := r.wait(t); code != 130 {
		t.Errorf("exit code %d, want 130:\n%s\n%s", code, r.out, r.err)
	}
}

// TestLeftoverIsReported: after the user's signal, the child processes that a worker left behind are reported, and
// the second signal kills them.
func TestLeftoverIsReported(t *testing.T) {
	s := launchScript(t, `trap 'exit 0' INT; (trap "" INT; while :; do sleep 0.02; done) & echo ready; while :; do sleep 0.02; done`, func(c *Config) {
		c.Workers, c.Grace = 1, 100*time.Millisecond
	})
	s.out.await(t, "[rank0] ready\n")
	s.agent.Interrupt(os.Interrupt)
	s.err.await(t, "has ended, but its child processes still run: process group ")
	s.agent.Interrupt(os.Interrupt)
	if o := s.wait(t); o.Code != 130 {
		t.Errorf("outcome %+v:\n%s", o, s.err)
	}
}

// TestLogThatCannotBeWritten: the failure of a log is reported when it occurs and at the end; the workers continue.
func TestLogThatCannotBeWritten(t *testing.T) {
	if _, err := os.Stat("/dev/full"); errors.Is(err, fs.ErrNotExist) {
		t.Skip("needs /dev/full")
	}
	logs := t.TempDir()
	if err := os.Mkdir(logs+"/epoch0", 0o700); err != nil {
		t.Fatal(err)
	}
	for r := range 2 {
		if err := os.Symlink("/dev/full", fmt.Sprintf("%s/epoch0/rank%d.stdout.log", logs, r)); err != nil {
			t.Fatal(err)
		}
	}
	s := launchScript(t, `echo one; sleep 0.05; echo two`, func(c *Config) { c.Logs = logs })
	if o := s.wait(t); o.Code != 0 || strings.Count(s.out.String(), "two") != 2 {
		t.Errorf("outcome %+v:\n%s", o, s.out)
	}
	for _, want := range []string{"a log cannot be written, and the workers continue: ", "the logs in " + logs +
		" are incomplete: "} {
		if strings.Count(s.err.String(), want) != 1 {
			t.Errorf("want once %q:\n%s", want, s.err)
		}
	}
}
