package train

import (
	"encoding/csv"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLoggers checks the rows of both loggers, and that a training that resumes at any step leaves the files of an
// uninterrupted one.
func TestLoggers(t *testing.T) {
	values := []float64{0.5, math.Inf(1), 0.25, 0.125}
	fit := func(dir string, steps, from int, backup bool) {
		f := scriptedFit{
			values: values, from: from, cfg: FitConfig{Epochs: 2, Steps: steps},
			callbacks: func(trainer *Trainer) ([]Callback, error) {
				trainer.config.NotFinite = WarnNotFinite
				c, err := NewCSVLogger(trainer, LoggerConfig{Path: filepath.Join(dir, "log.csv"), EverySteps: 1})
				if err != nil {
					return nil, err
				}
				j, err := NewJSONLogger(trainer, LoggerConfig{Path: filepath.Join(dir, "log.jsonl"), EverySteps: 3})
				return []Callback{c, j}, err
			},
		}
		if backup {
			f.backup, f.every = filepath.Join(dir, "backup"), 1000
		}
		f.run(t, []int{1, 1})
	}
	read := func(dir, name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	whole := t.TempDir()
	fit(whole, 0, 0, false)
	want := "event,epoch,step,learning_rate,loss,val_loss\n" +
		"step,1,1,0.5,1,\nstep,1,2,0.5,1,\nepoch,1,2,0.5,1,0.5\nstep,2,3,0.5,1,\nstep,2,4,0.5,1,\nepoch,2,4,0.5,1,+Inf\n"
	if got := read(whole, "log.csv"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if rows, err := csv.NewReader(strings.NewReader(want)).ReadAll(); err != nil || len(rows) != 7 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
	lines := strings.Split(strings.TrimSpace(read(whole, "log.jsonl")), "\n")
	var last map[string]any
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || len(lines) != 3 ||
		last["event"] != "epoch" || last["step"] != 4.0 || last["val_loss"] != "+Inf" {
		t.Errorf("%v, %v", lines, err)
	}
	for _, cut := range []int{1, 3} {
		dir := t.TempDir()
		fit(dir, cut, 0, true)
		fit(dir, 0, cut/2, true)
		for _, name := range []string{"log.csv", "log.jsonl"} {
			if got, want := read(dir, name), read(whole, name); got != want {
				t.Errorf("%s, resumed after %d steps:\n%s\nwant\n%s", name, cut, got, want)
			}
		}
	}
	trainer, _ := newFake(t, 1, 7, fakeModel{})
	if _, err := NewCSVLogger(trainer, LoggerConfig{}); err == nil || !strings.Contains(err.Error(), `Path ""`) {
		t.Errorf("no path: %v", err)
	}
}
