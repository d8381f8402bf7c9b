package train

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/lockstep-ml/lockstep/engine"
)

// replay reports two epochs, of steps that take half a second each, to a progress callback.
func replay(t *testing.T, cfg ProgressConfig, steps, known int) string {
	var out strings.Builder
	cfg.Out = &out
	synctest.Test(t, func(t *testing.T) {
		c := NewProgress(cfg)
		ctx := t.Context()
		for epoch := range 2 {
			begin := EpochBegin{Epoch: epoch, Epochs: 2, Steps: known}
			check(t, c.OnEpochBegin(ctx, begin))
			m := newMean([]metric{{"accuracy", engine.Summary{Sums: 1}}}, WeightedMean)
			for step := 1; step <= steps; step++ {
				time.Sleep(500 * time.Millisecond)
				m.loss, m.weight = float64(64*step)*0.2512, float64(64*step)
				m.examples, m.sums[0] = int64(64*step), float64(48*step)
				check(t, c.OnStepEnd(ctx, Step{
					EpochBegin: begin, Step: step, Examples: 64, Duration: 500 * time.Millisecond,
					mean: m,
				}))
			}
			e := Epoch{Result: m.result(), Epoch: epoch, Steps: steps, Duration: time.Duration(steps) * 500 * time.Millisecond}
			if epoch == 1 {
				e.Validation = &Result{Loss: 0.5125, Metrics: map[string]float64{"accuracy": 0.625}}
			}
			check(t, c.OnEpochEnd(ctx, e))
		}
		c.OnTrainEnd(ctx, nil, nil)
	})
	return out.String()
}

func check(t *testing.T, err error) {
	if err != nil {
		t.Error(err)
	}
}

// TestProgressResumes checks that the rate of a resumed epoch is that of all its steps.
func TestProgressResumes(t *testing.T) {
	var out strings.Builder
	c := NewProgress(ProgressConfig{Out: &out, Unit: "images"})
	check(t, c.OnEpochBegin(t.Context(), EpochBegin{Epoch: 1, Epochs: 2, Steps: 30, Done: 20, Elapsed: 10 * time.Second}))
	m := &mean{weight: 64 * 20, examples: 64 * 20}
	for step := 21; step <= 30; step++ {
		m.examples += 64
		check(t, c.OnStepEnd(t.Context(), Step{Step: step, Duration: 500 * time.Millisecond, mean: m}))
	}
	check(t, c.OnEpochEnd(t.Context(), Epoch{Result: m.result(), Epoch: 1, Steps: 30, Duration: 15 * time.Second}))
	if want := "epoch 2/2: 30 steps in 15.0s, 500ms/step, 128 images/s, loss 0\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestProgressPlain(t *testing.T) {
	got := replay(t, ProgressConfig{Unit: "images"}, 30, 30)
	want := `epoch 1/2, step 20/30: 500ms/step, 128 images/s, loss 0.2512, accuracy 0.7500
epoch 1/2: 30 steps in 15.0s, 500ms/step, 128 images/s, loss 0.2512, accuracy 0.7500
epoch 2/2, step 20/30: 500ms/step, 128 images/s, loss 0.2512, accuracy 0.7500
epoch 2/2: 30 steps in 15.0s, 500ms/step, 128 images/s, loss 0.2512, accuracy 0.7500, val_loss 0.5125, val_accuracy 0.6250
`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestProgressBar(t *testing.T) {
	got := replay(t, ProgressConfig{Unit: "images", Width: func() int { return 120 }}, 2, 4)
	if strings.Contains(got, "\r") {
		t.Errorf("plain progress returns to the line's start: %q", got)
	}
	got = replay(t, ProgressConfig{Mode: ProgressBar, Unit: "images", Width: func() int { return 120 }}, 2, 4)
	want := "Epoch 1/2\n" +
		"\r1/4 ━━━━━━────────────────── 500ms/step, 128 images/s, 2.0s left - loss: 0.2512 - accuracy: 0.7500\x1b[K" +
		"\r2/4 ━━━━━━━━━━━━──────────── 500ms/step, 128 images/s, 1.0s left - loss: 0.2512 - accuracy: 0.7500\x1b[K" +
		"\r2/4 ━━━━━━━━━━━━──────────── 1.0s, 500ms/step, 128 images/s - loss: 0.2512 - accuracy: 0.7500\x1b[K\n" +
		"Epoch 2/2\n" +
		"\r1/4 ━━━━━━────────────────── 500ms/step, 128 images/s, 2.0s left - loss: 0.2512 - accuracy: 0.7500\x1b[K" +
		"\r2/4 ━━━━━━━━━━━━──────────── 500ms/step, 128 images/s, 1.0s left - loss: 0.2512 - accuracy: 0.7500\x1b[K" +
		"\r2/4 ━━━━──── 1.0s, 500ms/step, 128 images/s - loss: 0.2512 - accuracy: 0.7500 - val_loss: 0.5125 - " +
		"val_accuracy: 0.6250\x1b[K\n"
	if got != want {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}

// TestProgressBarByWidth checks what is omitted on a narrow terminal: first what the bar also shows, last
// loss and metrics.
func TestProgressBarByWidth(t *testing.T) {
	for width, want := range map[int][3]string{ // a step, and the two lines of the last epoch's end
		80: {
			"2/4 ━━━━━━━━──────── 500ms/step, 128 images/s - loss: 0.2512 - accuracy: 0.7500",
			"2/4 ━━━━━───── 1.0s, 500ms/step, 128 images/s - loss: 0.2512 - accuracy: 0.7500",
			"    val_loss: 0.5125 - val_accuracy: 0.6250",
		},
		60: {
			"2/4 ━━━━━───── 500ms/step - loss: 0.2512 - accuracy: 0.7500",
			"2/4 ━━━━━━━━──────── 1.0s - loss: 0.2512 - accuracy: 0.7500",
			"    val_loss: 0.5125 - val_accuracy: 0.6250",
		},
		45: {
			"2/4 ━━━━──── loss: 0.2512 - accuracy: 0.7500",
			"2/4 ━━━━──── loss: 0.2512 - accuracy: 0.7500",
			"    val_loss: 0.5125 - val_accuracy: 0.6250",
		},
		36: {
			"2/4 loss: 0.2512 - accuracy: 0.7500",
			"2/4 loss: 0.2512 - accuracy: 0.7500",
			"    val_loss: 0.5125 - val_accuracy: 0.6250",
		},
		25: {
			"2/4 loss: 0.2512 - accu…",
			"2/4 loss: 0.2512 - accuracy: 0.7500",
			"    val_loss: 0.5125 - val_accuracy: 0.6250",
		},
	} {
		lines := strings.FieldsFunc(replay(t, ProgressConfig{
			Mode: ProgressBar, Unit: "images",
			Width: func() int { return width },
		}, 2, 4), func(r rune) bool { return r == '\r' || r == '\n' })
		for i, line := range lines[len(lines)-3:] {
			if line = strings.TrimSuffix(line, "\x1b[K"); line != want[i] {
				t.Errorf("%d columns: got\n%q\nwant\n%q", width, line, want[i])
			}
		}
	}
}

// TestProgressFits checks that a line that is drawn again never reaches the last column of a terminal of any width.
func TestProgressFits(t *testing.T) {
	for width := 1; width < 130; width++ {
		for _, line := range strings.FieldsFunc(replay(t,
			ProgressConfig{Mode: ProgressBar, Width: func() int { return width }}, 3, -1),
			func(r rune) bool { return r == '\r' || r == '\n' }) {
			line = strings.TrimSuffix(line, "\x1b[K")
			// of an epoch: it may wrap, because it is not drawn again
			last := strings.HasPrefix(line, "3/3") || strings.HasPrefix(line, "    val_loss")
			if n := utf8.RuneCountInString(line); n >= max(width, 2) && !last && !strings.HasPrefix(line, "Epoch ") {
				t.Fatalf("width %d: %d columns: %q", width, n, line)
			}
		}
	}
}

// TestProgressOfUnfinishedEpoch checks that the last line reports the number of finished steps.
func TestProgressOfUnfinishedEpoch(t *testing.T) {
	for mode, want := range map[ProgressMode]string{
		ProgressPlain: "epoch 1/1, step 2/3: ",
		ProgressBar:   "2/3 ",
	} {
		var out strings.Builder
		trainer, _ := newFake(t, 1, 4, fakeModel{})
		stop := Callback{OnStepEnd: func(_ context.Context, s Step) error {
			if s.Step == 2 {
				return ErrStop
			}
			return nil
		}}
		_, err := trainer.Fit(t.Context(), sizes(lineExamples(12), 4, 4, 4), FitConfig{
			Callbacks: []Callback{NewProgress(ProgressConfig{Out: &out, Mode: mode}), stop},
		})
		if err != nil {
			t.Fatal(err)
		}
		last := out.String()[strings.LastIndexAny(strings.TrimSuffix(out.String(), "\n"), "\n\r")+1:]
		if !strings.HasPrefix(last, want) || !strings.HasSuffix(last, "\n") {
			t.Errorf("the last line is %q, want one that begins with %q", last, want)
		}
	}
}

// TestProgressOfLosses checks that small and large losses are printed with four digits.
func TestProgressOfLosses(t *testing.T) {
	for loss, want := range map[float64]string{
		0.00001234567: "1.235e-05", 2.302585: "2.303", 123456: "1.235e+05", math.NaN(): "NaN",
	} {
		if got := numbers(Result{Loss: loss}, "val_", " ", ""); got != "val_loss "+want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestProgressEndsOpenLine(t *testing.T) {
	var out strings.Builder
	c := NewProgress(ProgressConfig{Out: &out, Mode: ProgressBar})
	trainer, _ := newFake(t, 1, 4, fakeModel{fail: func(at string, _ int) error {
		if at == "gradients" && strings.Contains(out.String(), "1/2") {
			return errors.New("no")
		}
		return nil
	}})
	if _, err := trainer.Fit(context.Background(), sizes(lineExamples(8), 4, 4),
		FitConfig{Callbacks: []Callback{c}}); err == nil {
		t.Fatal("no error")
	}
	if !strings.HasSuffix(out.String(), "\x1b[K\n") {
		t.Errorf("the line was left open: %q", out.String())
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                       "0s",
		830 * time.Microsecond:  "830µs",
		1500 * time.Microsecond: "1.5ms",
		12 * time.Millisecond:   "12ms",
		4100 * time.Millisecond: "4.1s",
		125 * time.Second:       "2m05s",
		3601 * time.Second:      "60m01s",
	} {
		if got := short(d); got != want {
			t.Errorf("%d ns: got %s, want %s", d, got, want)
		}
	}
}
