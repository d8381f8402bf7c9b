package train

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/timeline"
)

// slowEnv makes TestStragglerProcesses run as one worker of a job, and names what becomes slow in it: "input",
// "computation" or "nothing".
const slowEnv = "LOCKSTEP_TEST_SLOW"

const (
	slowStep   = 50 * time.Millisecond // the computation of a step, which sleeps: the workers do not compete for cores
	slowExcess = slowStep / 5
	slowFrom   = 45 // the first slow step: the detector measures the noise of the first 35
	// A reader that is slower than the steps first uses up what it has read ahead: two batches, and the one that it
	// has begun. Each lasts for so many steps.
	slowInputFrom = slowFrom + 3*int64((slowStep+slowExcess)/slowExcess)
	slowUntil     = 400
)

// slowWorker trains as one worker until a straggler is named, which the chief prints.
func slowWorker(slow string) error {
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Engine: fakeEngine{1}, Devices: []string{"CPU:0"},
	})
	if err != nil {
		return err
	}
	defer s.Close()
	step := 0
	model := fakeModel{rate: 1.0 / 1024, fail: func(phase string, _ int) error {
		if phase != "gradients" {
			return nil
		}
		step++
		if slow == "computation" && step >= slowFrom {
			time.Sleep(slowExcess)
		}
		time.Sleep(slowStep)
		return nil
	}}
	ctx := context.Background()
	t, err := New(ctx, s, model, fakeConfig(4))
	if err != nil {
		return err
	}
	defer t.Close()
	one := lineExamples(4)
	read := data.FromSeq(slowUntil, func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for i := range slowUntil {
				if slow == "input" && i >= slowFrom { // read while the step before is computed
					time.Sleep(slowStep + slowExcess)
				}
				if !yield(one, nil) {
					return
				}
			}
		}
	})
	named := Callback{OnStepEnd: func(_ context.Context, s Step) error {
		if s.Straggler != nil {
			text, err := json.Marshal(s.Straggler)
			fmt.Printf("straggler: %s\n", text)
			t.Stop()
			return err
		}
		return nil
	}}
	_, err = t.Fit(ctx, read, FitConfig{Epochs: 1, Callbacks: []Callback{named}})
	return err
}

// TestStragglerProcesses: of four real workers, one whose steps take 20 % longer from some step on is named with the
// cause, within 20 of them.
func TestStragglerProcesses(t *testing.T) {
	if slow := os.Getenv(slowEnv); slow != "" {
		if err := slowWorker(slow); err != nil {
			t.Fatal(err)
		}
		return
	}
	race.SkipTimed(t, "it trains 80 steps of 50 ms, by two causes")
	const workers, slowest = 4, 2
	for _, cause := range []string{"computation", "input"} {
		t.Run(cause, func(t *testing.T) {
			t.Parallel()
			until := 20 + map[string]int64{"computation": slowFrom, "input": slowInputFrom}[cause]
			var why string
			for range 3 { // a busy machine may delay the steps of any worker
				s, out := stragglerOf(t, workers, slowest, cause)
				if s != nil && s.Worker == slowest && strings.HasPrefix(s.Cause, cause) && s.Step <= until {
					t.Log(s)
					return
				}
				why = fmt.Sprintf("named %v\n%s", s, out)
			}
			t.Errorf("want worker %d by %s until step %d: %s", slowest, cause, until, why)
		})
	}
}

// stragglerOf returns the worker that is named in a job of several processes, in one of which something becomes slow.
func stragglerOf(t *testing.T, workers, slowest int, cause string) (*timeline.Straggler, string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var addresses []string
	for range workers {
		addresses = append(addresses, fmt.Sprintf("%q", fmt.Sprintf("127.0.0.1:%d", freeport.Take(t, 1))))
	}
	commands, outs := make([]*exec.Cmd, workers), make([]bytes.Buffer, workers)
	for w := range commands {
		slow := "nothing"
		if w == slowest {
			slow = cause
		}
		cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestStragglerProcesses$")
		cmd.Env = append(os.Environ(), slowEnv+"="+slow,
			fmt.Sprintf(`TF_CONFIG={"cluster":{"worker":[%s]},"task":{"type":"worker","index":%d}}`,
				strings.Join(addresses, ","), w))
		cmd.Stdout, cmd.Stderr = &outs[w], &outs[w]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		commands[w] = cmd
	}
	for w, cmd := range commands {
		if err := cmd.Wait(); err != nil {
			t.Fatalf("worker %d: %v\n%s", w, err, &outs[w])
		}
	}
	for line := range strings.Lines(outs[0].String()) {
		if text, ok := strings.CutPrefix(line, "straggler: "); ok {
			s := &timeline.Straggler{}
			if err := json.Unmarshal([]byte(text), s); err != nil {
				t.Fatal(err)
			}
			return s, outs[0].String()
		}
	}
	return nil, outs[0].String()
}
