//go:build unix

package launch

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// TestRestartDelays: restarts after attempts without progress wait, longer each time.
func TestRestartDelays(t *testing.T) {
	r := restartDelays{first: time.Second, furthest: -1}
	for i, c := range []struct {
		root, other int64
		seconds     time.Duration
	}{
		{-1, -1, 1},
		{-1, -1, 2},
		{-1, 7, 0}, // the others were at step 7 when a worker was killed
		{7, 6, 1},
		{3, 3, 2},
		{-1, -1, 4},
		{8, -1, 0},
		{8, 8, 1},
		{8, 8, 2},
		{8, 8, 4},
		{8, 8, 8},
		{8, 8, 16},
		{8, 8, 32},
		{8, 8, 60},
		{8, 8, 60},
		{9, 9, 0},
	} {
		report := &failure.Report{Root: failure.Record{Step: c.root}, Others: []failure.Record{{Step: c.other}}}
		if d := r.next(report); d != c.seconds*time.Second {
			t.Errorf("attempt %d: %v, want %ds", i, d, c.seconds)
		}
	}
	if d := r.next(nil); d != 0 {
		t.Errorf("%v after the loss of a node", d)
	}
	long := restartDelays{first: time.Hour, furthest: -1}
	for range 2 {
		if d := long.next(&failure.Report{Root: failure.Record{Step: -1}}); d != time.Hour {
			t.Errorf("%v, want the delay that was asked for", d)
		}
	}
}

// TestRestartPauses: a cause that lasts for a moment does not use up all restarts. Without a pause the workers start
// again within milliseconds.
func TestRestartPauses(t *testing.T) {
	s := launchScript(t, `[ $LOCKSTEP_EPOCH = 2 ] || exit 3`, func(c *Config) {
		c.Workers, c.RestartsMax, c.RestartDelay = 1, 2, 200*time.Millisecond
	})
	began := time.Now()
	if o := s.wait(t); o.Code != 0 || o.Restarts != 2 {
		t.Errorf("outcome %+v", o)
	}
	if took := time.Since(began); took < 600*time.Millisecond {
		t.Errorf("two restarts within %v", took)
	}
	for _, want := range []string{"waiting 200ms before the restart", "waiting 400ms before the restart"} {
		if !strings.Contains(s.err.String(), want) {
			t.Errorf("not reported: %q in\n%s", want, s.err)
		}
	}
}

// TestStoppedBeforeRestart: the user's signal ends the pause before a restart.
func TestStoppedBeforeRestart(t *testing.T) {
	out := &output{}
	a, err := New(Config{
		Command: []string{"sh", "-c", "exit 3"}, Workers: 1, RestartsMax: 2, RestartDelay: time.Hour, Stderr: out,
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for !strings.Contains(out.String(), "waiting 1h0m0s") {
			time.Sleep(time.Millisecond)
		}
		a.Interrupt(sigInterrupt)
	}()
	o, err := a.Run(t.Context())
	if o.Code != codeInterrupted || !o.Interrupted || err == nil || !strings.Contains(err.Error(), "stopped by SIGINT") {
		t.Errorf("outcome %+v, %v", o, err)
	}
}
