package training

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/internal/race"
)

func TestReport(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out := filepath.Join(dir, "run")
	cmd := clitest.Process(t, "train", "--replicas", "2", "--steps", "6", "--validation-split", "0.9", "--model", "mlp",
		"--out", out, "--schedule", "cosine", "--progress", "none")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	texts, text := clitest.ReadPage(t, filepath.Join(out, reportFile))
	for _, want := range []string{
		"Training of mlp on digits", "6 steps on 2 replicas of 1 worker", "Loss, as a table", "Learning rate, as a table",
		"Speed, as a table", "exposed communication", "plain copies", "weights hash", "--schedule|cosine",
	} {
		if !strings.Contains(texts, want) {
			t.Errorf("no %q in %s", want, texts)
		}
	}
	var data, others struct {
		Summary json.RawMessage
		History map[string][]float64
		Loss    [][2]float64
		Step    *setup.StepTimes
		Reduce  *reportBound `json:"all_reduce"`
	}
	if err := json.Unmarshal([]byte(text), &data); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	history, err := os.ReadFile(filepath.Join(out, historyFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(history, &others.History); err != nil {
		t.Fatal(err)
	}
	if len(data.Loss) != 6 || data.Loss[5][0] != 6 || data.Step == nil || data.Step.Compute <= 0 {
		t.Errorf("loss %v, step %+v", data.Loss, data.Step)
	}
	sum := 0.0
	for _, p := range data.Loss {
		sum += p[1]
	}
	if got, want := sum/6, others.History["loss"][0]; len(others.History["loss"]) == 1 && math.Abs(got-want) > 1e-3*want {
		t.Errorf("mean loss %v, want %v of history.json", got, want)
	}
	if b := data.Reduce; b == nil || b.Bytes == 0 || b.Time <= 0 || b.BusBW <= 0 || b.Limit <= 0 {
		t.Errorf("all-reduce %+v", b)
	}
}

// TestCurve compares a curve with the values that it was given: it keeps their sum and its ends.
func TestCurve(t *testing.T) {
	for _, n := range []int{0, 1, 5, curvePoints - 1, curvePoints, curvePoints + 1, 3*curvePoints + 7, 10_000} {
		var c curve
		for i := 1; i <= n; i++ {
			c.add(i, float64(i))
		}
		c.add(n+1, math.NaN())
		l := c.line("")
		if len(l.X) > curvePoints || n > 0 && len(l.X) < min(n, curvePoints/2) {
			t.Errorf("%d values: %d points", n, len(l.X))
		}
		last, sum := 0.0, 0.0
		for i, x := range l.X {
			sum += l.Y[i] * (x - last)
			if want := (last + 1 + x) / 2; math.Abs(l.Y[i]-want) > 1e-9*want {
				t.Errorf("%d values: %v at %v, want the mean %v of the steps since %v", n, l.Y[i], x, want, last)
			}
			last = x
		}
		if want := float64(n) * float64(n+1) / 2; math.Abs(sum-want) > 1e-9*want || n > 0 && last != float64(n) {
			t.Errorf("%d values: sum %v up to %v, want %v", n, sum, last, want)
		}
	}
}

func TestReportTexts(t *testing.T) {
	d := reportData{Summary: summary{Replicas: 4, Workers: 2}, Step: &setup.StepTimes{
		Input: time.Millisecond, Compute: 6 * time.Millisecond, Exposed: 2 * time.Millisecond, Update: time.Millisecond,
		Communication: 5 * time.Millisecond,
	}, Reduce: &reportBound{Bytes: 1 << 20, Time: 5 * time.Millisecond, BusBW: 0.3, Limit: time.Millisecond}}
	s := stepOf(d)
	if s.Text != "A mean step takes 10ms on the first replica of worker 0." || s.Parts[2].Percent != "20.0" ||
		s.Hidden != "Alone, the same collective calls take 5ms: 3ms of it is hidden behind the computation." {
		t.Errorf("%+v", s)
	}
	for _, c := range []struct {
		copies time.Duration
		want   string
	}{
		{time.Millisecond, "1ms (the all-reduce takes 5 times as long)"},
		{6 * time.Millisecond, "6ms (the all-reduce takes 0.83 times as long)"}, // it works in place
	} {
		d.Reduce.Limit = c.copies
		if r := fmt.Sprint(reduceOf(d)); !strings.Contains(r, "plain copies "+c.want) || strings.Contains(r, "lower bound") {
			t.Errorf("%s", r)
		}
	}
	d.Step.Communication = time.Millisecond
	if s := stepOf(d); !strings.HasSuffix(s.Hidden, "The rest of the exposed time is waiting for slower replicas.") {
		t.Errorf("%+v", s)
	}
	d.Reduce.Limit = 0
	if r := reduceOf(d); !strings.HasPrefix(r.Rows[2][1], "not known") {
		t.Errorf("%+v", r)
	}
	d.Reduce = nil
	if r := reduceOf(d); r.Text != "One replica: nothing is reduced." {
		t.Errorf("%+v", r)
	}
}

// TestReportOfResumed checks that the curves of a run that resumed have the steps of the whole training.
func TestReportOfResumed(t *testing.T) {
	race.SkipTimed(t, "two trainings")
	dir := t.TempDir()
	out := filepath.Join(dir, "run")
	for epochs := 1; epochs <= 2; epochs++ {
		cmd := clitest.Process(t, "train", "--model", "mlp", "--epochs", strconv.Itoa(epochs), "--global-batch", "400",
			"--checkpoint-dir", filepath.Join(dir, "checkpoints"), "--out", out, "--progress", "none")
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
	}
	texts, text := clitest.ReadPage(t, filepath.Join(out, reportFile))
	var data struct {
		Summary struct{ Steps int }
		Loss    [][2]float64
	}
	if err := json.Unmarshal([]byte(text), &data); err != nil {
		t.Fatal(err)
	}
	steps, n := data.Summary.Steps, len(data.Loss)
	if steps < 2 || n != steps/2 || data.Loss[0][0] != float64(steps/2+1) || data.Loss[n-1][0] != float64(steps) {
		t.Errorf("%d points of the loss, %v, want those of the second half of %d steps", n, data.Loss, steps)
	}
	if want := fmt.Sprintf("Speed|step|training|%d|", steps/2); !strings.Contains(texts, want) {
		t.Errorf("no %q in %s", want, texts)
	}
}
