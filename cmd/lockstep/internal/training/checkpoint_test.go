//go:build unix

package training

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// shortTraining has 4 steps an epoch.
var shortTraining = []string{
	"train", "--model", "mlp", "--replicas", "2", "--global-batch", "100",
	"--validation-split", "0.9", "--schedule", "constant",
}

// finished runs lockstep train to its end and returns its summary without the measured times.
func finished(t *testing.T, args ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "summary.json")
	cmd := clitest.Process(t,
		append(append(shortTraining[:len(shortTraining):len(shortTraining)], "--progress", "none", "--summary", file),
			args...)...)
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
	for _, measured := range []string{"examples_per_second", "reduce_share", "wait_share", "seconds", "config"} {
		delete(fields, measured)
	}
	text, err = json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestKilledTraining: a training that is killed at random moments and restarted each time ends like an uninterrupted
// one.
func TestKilledTraining(t *testing.T) {
	race.SkipTimed(t, "trainings that are killed and restarted")
	g := seeded(t)
	length := []string{"--epochs", "3"}
	want := finished(t, length...)
	dir := t.TempDir()
	saving := append(length, "--checkpoint-dir", dir, "--save-every", "1", "--keep", "2")
	for range 4 {
		before, _ := checkpoint.List(dir)
		cmd := clitest.Process(t, append(shortTraining[:len(shortTraining):len(shortTraining)], saving...)...)
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
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Fatal(err)
		}
		<-done
	}
	if got := finished(t, saving...); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}

// TestInterruptedTraining: SIGTERM leaves a snapshot of the finished step, from which training resumes.
func TestInterruptedTraining(t *testing.T) {
	race.SkipTimed(t, "trainings of many seconds")
	dir := t.TempDir()
	cmd := clitest.Process(t, append(shortTraining[:len(shortTraining):len(shortTraining)], "--epochs", "1000",
		"--progress", "plain", "--checkpoint-dir", dir, "--save-every", "1000000")...)
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
	if code := clitest.ExitCode(cmd.Wait()); code != cli.ExitInterrupted {
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

// TestKilledWorkers: lockstep run restarts a job each time one of its workers is killed, including the chief. The job
// resumes, and ends like an uninterrupted training: one of a process or, with DiLoCo, of as many workers.
func TestKilledWorkers(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it starts jobs of three processes several times")
	}
	t.Run("synchronous", func(t *testing.T) { killWorkers(t, "--accumulate", "1") })
	t.Run("DiLoCo", func(t *testing.T) { killWorkers(t, "--diloco", "3") })
}

// killWorkers trains with a flag of lockstep train.
func killWorkers(t *testing.T, flag ...string) {
	g := seeded(t)
	fields := func(file string) (out [4]any) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var all map[string]any
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatal(err)
		}
		for i, name := range []string{"weights_hash", "train_loss", "test_loss", "steps"} {
			out[i] = all[name]
		}
		return out
	}
	dir := t.TempDir()
	length := append(flag, "--global-batch", "100", "--validation-split", "0.9", "--model", "mlp", "--epochs", "12",
		"--progress", "none", "--summary")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	whole := slices.Concat([]string{"train"}, length, []string{filepath.Join(dir, "whole"), "--replicas"})
	if flag[0] == "--diloco" {
		whole = slices.Concat([]string{"run", "--nproc-per-node", "3", "--", exe}, whole,
			[]string{"1", "--strategy", "multi-worker"})
	} else {
		whole = append(whole, "3")
	}
	if out, err := clitest.Process(t, whole...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	snapshots := filepath.Join(dir, "snapshots")
	cmd := clitest.Process(t,
		slices.Concat([]string{"run", "--nproc-per-node", "3", "--max-restarts", "2", "--", exe, "train"}, length,
			[]string{
				filepath.Join(dir, "again"), "--replicas", "1", "--strategy", "multi-worker", "--checkpoint-dir", snapshots,
				"--save-every", "1",
			})...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	targets, started := []int{0, 1 + g.IntN(2)}, 0 // one of each start
	worker := regexp.MustCompile(`worker (\d) \(rank \d, host .*, pid (\d+)\)$`)
	var killing sync.WaitGroup
	jobEnded, endJob := context.WithCancel(t.Context())
	defer endJob()
	var lines []string
	for s := bufio.NewScanner(stdout); s.Scan(); {
		lines = append(lines, s.Text())
		if strings.Contains(s.Text(), "(the chief), by lockstep run") {
			started++
		}
		m := worker.FindStringSubmatch(s.Text())
		if m == nil || started > len(targets) || m[1] != strconv.Itoa(targets[started-1]) {
			continue
		}
		pid, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		before, _ := checkpoint.List(snapshots)
		delay := time.Duration(g.Int64N(int64(30 * time.Millisecond)))
		killing.Go(func() { // after the first snapshot
			for jobEnded.Err() == nil {
				if now, _ := checkpoint.List(snapshots); len(now) > 0 &&
					(len(before) == 0 || now[len(now)-1] != before[len(before)-1]) {
					break
				}
				time.Sleep(time.Millisecond)
			}
			time.Sleep(delay)
			if jobEnded.Err() == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		})
	}
	endJob()
	killing.Wait()
	out := strings.Join(lines, "\n")
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, stderr.String())
	}
	if got, want := fields(filepath.Join(dir, "again")), fields(filepath.Join(dir, "whole")); got != want {
		t.Errorf("got %v, want %v\n%s\n%s", got, want, out, stderr.String())
	}
	if n := strings.Count(out, "resumed "); n != 2 {
		t.Errorf("it resumed %d times, want 2\n%s\n%s", n, out, stderr.String())
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
