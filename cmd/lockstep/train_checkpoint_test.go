//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// shortTraining has 4 steps an epoch.
var shortTraining = []string{"train", "--model", "mlp", "--replicas", "2", "--global-batch", "100", "--validation-split", "0.9", "--schedule", "constant"}

// finished runs lockstep train to its end and returns its summary without what is told by the clock.
func finished(t *testing.T, args ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "summary.json")
	cmd := lockstepProcess(t, append(append(shortTraining[:len(shortTraining):len(shortTraining)], "--progress", "none", "--summary", file), args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	for _, measured := range []string{"images_per_second", "reduce_share", "wait_share", "seconds"} {
		delete(fields, measured)
	}
	text, err = json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestKilledTraining: a training that is killed at random moments, and started again each time, ends like one that was not.
func TestKilledTraining(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("LOCKSTEP_TEST_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("LOCKSTEP_TEST_SEED=%d repeats the moments", seed)
	g := rand.New(rand.NewPCG(seed, 0))
	kills := 4
	if testing.Short() {
		kills = 1
		t.Log("-short: one kill only")
	}
	length := []string{"--epochs", "3"}
	want := finished(t, length...)
	dir := t.TempDir()
	saving := append(length, "--checkpoint-dir", dir, "--save-every", "1", "--keep", "2")
	for range kills {
		before, _ := checkpoint.List(dir)
		cmd := lockstepProcess(t, append(shortTraining[:len(shortTraining):len(shortTraining)], saving...)...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		ended := false
		for !ended { // until there is one more
			select {
			case err := <-done:
				ended = true
				if err != nil {
					t.Fatal(err)
				}
			case <-time.After(time.Millisecond):
			}
			if now, _ := checkpoint.List(dir); len(now) > 0 && (len(before) == 0 || now[len(now)-1] != before[len(before)-1]) {
				break
			}
		}
		if ended {
			break
		}
		time.Sleep(time.Duration(g.Int64N(int64(50 * time.Millisecond))))
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-done
	}
	if got := finished(t, saving...); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}

// TestInterruptedTraining: SIGTERM leaves a snapshot of the step that ended, from which training goes on.
func TestInterruptedTraining(t *testing.T) {
	dir := t.TempDir()
	cmd := lockstepProcess(t, append(shortTraining[:len(shortTraining):len(shortTraining)], "--epochs", "1000", "--progress", "plain", "--checkpoint-dir", dir, "--save-every", "1000000")...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var trained string
	for s := bufio.NewScanner(stdout); s.Scan(); {
		if strings.HasPrefix(s.Text(), "epoch 1/1000:") {
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
		if strings.HasPrefix(s.Text(), "trained") {
			trained = s.Text()
		}
	}
	if code := exitCode(cmd.Wait()); code != exitInterrupted {
		t.Errorf("exit code %d", code)
	}
	s, _, err := checkpoint.Latest(dir)
	if err != nil || s == nil || !strings.Contains(trained, fmt.Sprintf(" %d steps in ", s.Step)) {
		t.Fatalf("%q, and the snapshot is %+v, %v", trained, s, err)
	}
	length := []string{"--epochs", "1000", "--steps", fmt.Sprint(s.Step + 2)}
	want := finished(t, length...)
	if got := finished(t, append(length, "--checkpoint-dir", dir)...); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}
