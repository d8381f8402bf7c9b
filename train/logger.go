package train

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
)

// LoggerConfig configures [NewCSVLogger] and [NewJSONLogger].
type LoggerConfig struct {
	// Path is the file's name. A training that resumes from a snapshot continues the file after the rows of the
	// snapshot; otherwise the file is replaced.
	Path string
	// EverySteps is the number of steps between two rows within an epoch. 0: none.
	EverySteps int
	// Append keeps the rows of an earlier training.
	Append bool
}

// NewCSVLogger returns a callback that writes a row of comma-separated values after every epoch, after every validation
// between steps and after every LoggerConfig.EverySteps steps (Keras' CSVLogger). The columns are event ("epoch",
// "validation" or "step"), epoch (from 1), step (of all epochs), and then, by name, learning_rate, loss, metrics and
// those of the validation, such as val_loss. Loss and metrics are means over the epoch so far. Every worker may have
// the callback; the chief writes.
func NewCSVLogger(t *Trainer, cfg LoggerConfig) (Callback, error) { return newLogger(t, cfg, true) }

// NewJSONLogger is NewCSVLogger with an object of JSON per line. Numbers that are not finite are strings, such as
// "NaN".
func NewJSONLogger(t *Trainer, cfg LoggerConfig) (Callback, error) { return newLogger(t, cfg, false) }

func newLogger(t *Trainer, cfg LoggerConfig, csv bool) (Callback, error) {
	if cfg.Path == "" || cfg.EverySteps < 0 {
		return Callback{}, fmt.Errorf("train: LoggerConfig has Path %q and EverySteps %d: want the name of a file, and 0 or "+
			"more", cfg.Path, cfg.EverySteps)
	}
	l := &logger{t: t, cfg: cfg, csv: csv}
	return Callback{
		OnEpochBegin: func(context.Context, EpochBegin) error { return l.open() },
		OnStepEnd: func(_ context.Context, s Step) error {
			switch steps := t.fitting.Load().history.Steps; {
			case s.Validation != nil:
				return l.row("validation", s.Epoch, numbersOf(s.Mean(), s.Validation))
			case cfg.EverySteps > 0 && steps%cfg.EverySteps == 0:
				return l.row("step", s.Epoch, numbersOf(s.Mean(), nil))
			}
			return nil
		},
		OnEpochEnd: func(_ context.Context, e Epoch) error {
			return l.row("epoch", e.Epoch, numbersOf(e.Result, e.Validation))
		},
		OnTrainEnd: func(context.Context, *History, error) {
			if l.file != nil {
				_ = l.file.Close() // every row is written
				l.file = nil
			}
		},
	}, nil
}

// logger writes one row of numbers at a time.
type logger struct {
	t       *Trainer
	cfg     LoggerConfig
	csv     bool
	file    *os.File
	columns []string // of the numbers
}

// open opens the file of the chief, unless it is open. It keeps the rows up to the position of a resumed Fit.
func (l *logger) open() error {
	if l.file != nil || !l.t.IsChief() {
		return nil
	}
	f := l.t.fitting.Load()
	l.columns = slices.Sorted(maps.Keys(f.known()))
	l.columns = slices.DeleteFunc(l.columns, func(name string) bool { return !f.known()[name] })
	if _, ok := l.t.LearningRate(); ok {
		l.columns = append([]string{"learning_rate"}, l.columns...)
	}
	var kept []byte
	if f.history.Steps > 0 || l.cfg.Append {
		old, err := os.ReadFile(l.cfg.Path)
		if err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("train: the log: %w", err)
		}
		kept = old
		if !l.cfg.Append {
			kept = l.before(old, f)
		}
	}
	var err error
	if l.file, err = os.Create(l.cfg.Path); err != nil {
		return fmt.Errorf("train: the log: %w", err)
	}
	if l.csv && len(kept) == 0 {
		kept = csvRow(append([]string{"event", "epoch", "step"}, l.columns...))
	}
	return l.write(kept)
}

// before returns the rows up to the position of a Fit.
func (l *logger) before(old []byte, f *fit) (kept []byte) {
	lines := bufio.NewScanner(bytes.NewReader(old))
	for lines.Scan() {
		var row struct {
			Event string
			Step  int
		}
		if l.csv {
			fields, err := csv.NewReader(bytes.NewReader(lines.Bytes())).Read()
			if err == nil && len(fields) > 2 {
				row.Event = fields[0]
				row.Step, _ = strconv.Atoi(fields[2]) // the header has no number, and stays
			}
		} else if json.Unmarshal(lines.Bytes(), &row) != nil {
			continue // cut off
		}
		if row.Step > f.history.Steps || row.Step == f.history.Steps && row.Event == "epoch" && f.position.step > 0 {
			continue // it is written again
		}
		kept = append(append(kept, lines.Bytes()...), '\n')
	}
	return kept
}

// row writes a row.
func (l *logger) row(event string, epoch int, numbers map[string]float64) error {
	if l.file == nil {
		return nil
	}
	if rate, ok := l.t.LearningRate(); ok {
		numbers["learning_rate"] = rate
	}
	step := l.t.fitting.Load().history.Steps
	if !l.csv {
		object := map[string]any{"event": event, "epoch": epoch + 1, "step": step}
		for name, x := range numbers {
			object[name] = exact(x)
		}
		text, err := json.Marshal(object)
		if err != nil {
			return fmt.Errorf("train: the log %s: %w", l.cfg.Path, err)
		}
		return l.write(append(text, '\n'))
	}
	fields := []string{event, strconv.Itoa(epoch + 1), strconv.Itoa(step)}
	for _, name := range l.columns {
		field := ""
		if x, ok := numbers[name]; ok {
			field = strconv.FormatFloat(x, 'g', -1, 64)
		}
		fields = append(fields, field)
	}
	return l.write(csvRow(fields))
}

func csvRow(fields []string) []byte {
	var b bytes.Buffer
	w := csv.NewWriter(&b)
	_ = w.Write(fields) // into memory
	w.Flush()
	return b.Bytes()
}

func (l *logger) write(text []byte) error {
	if _, err := l.file.Write(text); err != nil {
		return fmt.Errorf("train: the log: %w", err)
	}
	return nil
}
