//go:build unix

package training

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestInterrupt: Ctrl-C stops an endless run after its step, and the results so far are written.
func TestInterrupt(t *testing.T) {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if testing.Short() {
		signals = signals[:1]
	}
	for _, sig := range signals {
		t.Run(sig.String(), func(t *testing.T) {
			dir := t.TempDir()
			cmd := clitest.Process(t, slices.Concat([]string{"train"}, clitest.TinyTable(t), []string{
				"--global-batch", "20", "--epochs", "1000000", "--progress", "plain", "--out", dir,
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
			var lines []string
			sent := false
			for s := bufio.NewScanner(stdout); s.Scan(); {
				lines = append(lines, s.Text())
				if strings.HasPrefix(s.Text(), "epoch 1/1000000") && !sent {
					sent = true
					if err := cmd.Process.Signal(sig); err != nil {
						t.Fatal(err)
					}
				}
			}
			if code := clitest.ExitCode(cmd.Wait()); code != 130 {
				t.Errorf("exit code %d, want 130", code)
			}
			out := strings.Join(lines, "\n")
			if !strings.Contains(stderr.String(), "stopping after this step") ||
				!strings.Contains(out, "not measured: interrupted") {
				t.Errorf("standard output:\n%s\nstandard error:\n%s", out, stderr.String())
			}
			var s struct {
				Interrupted  bool
				Steps        int
				TestAccuracy *float64 `json:"test_accuracy"`
				WeightsHash  string   `json:"weights_hash"`
			}
			text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(text, &s); err != nil {
				t.Fatal(err)
			}
			if !s.Interrupted || s.Steps < 1 || s.TestAccuracy != nil || len(s.WeightsHash) != 64 {
				t.Errorf("summary: %s", text)
			}
			weights, _, err := checkpoint.Load(filepath.Join(dir, "weights.safetensors"))
			if err != nil || len(weights) != 6 {
				t.Errorf("%d weights, error %v", len(weights), err)
			}
		})
	}
}

// TestSecondInterrupt: the second Ctrl-C ends a process that cannot react to the first, because it waits for data
// that never arrive.
func TestSecondInterrupt(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "train-images-idx3-ubyte")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := clitest.Process(t, "train", "--data", "mnist", "--data-dir", dir, "--out", filepath.Join(dir, "out"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	w, err := os.OpenFile(pipe, os.O_WRONLY, 0) // opens when the process reads; by then it catches signals
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for sent := 0; ; { // repeatedly: two signals count as one if the second arrives before the first is handled
		if err := cmd.Process.Signal(os.Interrupt); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Fatal(err)
		}
		sent++
		select {
		case err := <-done:
			if sent == 1 {
				t.Fatalf("one signal ended it: %v", err)
			}
			if code := clitest.ExitCode(err); code != 130 {
				t.Errorf("exit code %d, want 130", code)
			}
			if _, err := os.Stat(filepath.Join(dir, "out", "summary.json")); err == nil {
				t.Error("a summary was written")
			}
			return
		case <-time.After(200 * time.Millisecond):
		}
		if sent == 1000 {
			t.Fatal("a thousand signals did not end it")
		}
	}
}
