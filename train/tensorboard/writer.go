// Package tensorboard writes event files for TensorBoard: scalars, histograms, text and hyperparameters. [New] is a
// callback of train's Fit (Keras' TensorBoard); a [Writer] is for other numbers (PyTorch's SummaryWriter).
//
//	board, err := tensorboard.New(t, tensorboard.Config{Dir: "logs/run1", HistogramEvery: 1})
//	history, err := t.Fit(ctx, batches, train.FitConfig{Epochs: 10, Callbacks: []train.Callback{board}})
//
// Then "tensorboard --logdir logs" shows the run.
package tensorboard

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/data"
)

// histogramBuckets is the number of buckets of a histogram, of equal width.
const histogramBuckets = 64

// Writer writes one event file. It is not safe for concurrent use. Its methods report the first error that occurred,
// and write nothing after it.
type Writer struct {
	file   *os.File
	buffer *bufio.Writer
	err    error
}

// files counts the writers of this process, so that their files have different names.
var files atomic.Int64

// NewWriter creates an event file in a folder, which it creates if it does not exist.
func NewWriter(dir string) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("tensorboard: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	now := time.Now()
	name := fmt.Sprintf("events.out.tfevents.%010d.%s.%d.%d", now.Unix(), host, os.Getpid(), files.Add(1))
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, fmt.Errorf("tensorboard: %w", err)
	}
	w := &Writer{file: f, buffer: bufio.NewWriter(f)}
	var event message
	event.double(1, seconds(now))
	event.string(3, "brain.Event:2")
	w.record(event)
	return w, w.Flush()
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// record appends an event.
func (w *Writer) record(event message) error {
	if w.err == nil {
		_, err := w.buffer.Write(data.AppendTFRecord(nil, event))
		w.fail(err)
	}
	return w.err
}

func (w *Writer) fail(err error) {
	if w.err == nil && err != nil {
		w.err = fmt.Errorf("tensorboard: %w", err)
	}
}

// event appends an event with one field.
func (w *Writer) event(step int64, field int, content message) error {
	var event message
	event.double(1, seconds(time.Now()))
	event.int(2, step)
	event.sub(field, content)
	return w.record(event)
}

// value appends a summary of one value. fill adds its content.
func (w *Writer) value(step int64, tag string, fill func(*message)) error {
	var value, summary message
	value.string(1, tag)
	fill(&value)
	summary.sub(1, value)
	return w.event(step, 5, summary)
}

// Restart records that the training continues here: TensorBoard drops what an earlier, interrupted process wrote for
// this step and later ones.
func (w *Writer) Restart(step int64) error {
	var session message
	session.int(1, 1) // START
	return w.event(step, 7, session)
}

// Scalar writes a number.
func (w *Writer) Scalar(step int64, tag string, x float64) error {
	return w.value(step, tag, func(m *message) { m.float(2, float32(x)) })
}

// Histogram writes the distribution of numbers, in buckets of equal width. Numbers that are not finite are left out.
func (w *Writer) Histogram(step int64, tag string, list []float64) error {
	low, high, sum, squares, n := math.Inf(1), math.Inf(-1), 0.0, 0.0, 0
	for _, x := range list {
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			low, high, sum, squares, n = min(low, x), max(high, x), sum+x, squares+x*x, n+1
		}
	}
	if n == 0 {
		return w.err
	}
	limits, counts := []float64{high}, []float64{float64(n)}
	if high > low {
		limits, counts = make([]float64, histogramBuckets), make([]float64, histogramBuckets)
		width := high/histogramBuckets - low/histogramBuckets
		for i := range limits {
			limits[i] = low + width*float64(i+1)
		}
		limits[histogramBuckets-1] = high
		for _, x := range list {
			if !math.IsNaN(x) && !math.IsInf(x, 0) {
				counts[min(int(max((x-low)/width, 0)), histogramBuckets-1)]++
			}
		}
	}
	var h message
	for i, x := range []float64{low, high, float64(n), sum, squares} {
		h.double(i+1, x)
	}
	h.doubles(6, limits)
	h.doubles(7, counts)
	return w.value(step, tag, func(m *message) { m.sub(5, h) })
}

// Text writes a text, which TensorBoard shows as Markdown.
func (w *Writer) Text(step int64, tag, text string) error {
	return w.value(step, tag+"/text_summary", func(m *message) {
		var dim, shape, t message
		dim.int(1, 1)
		shape.sub(2, dim)
		t.int(1, 7) // DT_STRING
		t.sub(2, shape)
		t.string(8, text)
		m.sub(8, t)
		m.sub(9, plugin("text", nil))
	})
}

// plugin is the metadata of a value that belongs to a plugin of TensorBoard.
func plugin(name string, content message) message {
	var data, metadata message
	data.string(1, name)
	data.sub(2, content)
	metadata.sub(1, data)
	return metadata
}

// HParams writes the hyperparameters of the run, whose values are numbers, booleans and strings, and the tags of the
// scalars by which runs are compared in TensorBoard's table.
func (w *Writer) HParams(params map[string]any, metrics []string) error {
	var experiment, start, end message
	now := seconds(time.Now())
	experiment.double(3, now)
	for _, name := range slices.Sorted(maps.Keys(params)) {
		value, kind, err := protoValue(params[name])
		if err != nil {
			w.fail(fmt.Errorf("hyperparameter %s: %w", name, err))
			return w.err
		}
		var info, entry message
		info.string(1, name)
		info.int(4, kind)
		experiment.sub(4, info)
		entry.string(1, name)
		entry.sub(2, value)
		start.sub(1, entry)
	}
	for _, tag := range metrics {
		var name, info message
		name.string(2, tag)
		info.sub(1, name)
		experiment.sub(5, info)
	}
	start.double(5, now)
	end.int(1, 1) // STATUS_SUCCESS
	end.double(2, now)
	for i, part := range []struct {
		tag     string
		content message
	}{{"experiment", experiment}, {"session_start_info", start}, {"session_end_info", end}} {
		var content message
		content.int(1, 0) // the version
		content.sub(i+2, part.content)
		w.value(0, "_hparams_/"+part.tag, func(m *message) { m.sub(9, plugin("hparams", content)) })
	}
	return w.err
}

// protoValue returns a google.protobuf.Value, and the type of a hyperparameter.
func protoValue(x any) (value message, kind int64, err error) {
	switch x := x.(type) {
	case string:
		value.string(3, x)
		return value, 1, nil
	case bool:
		n := int64(0)
		if x {
			n = 1
		}
		value.int(4, n)
		return value, 2, nil
	case int:
		value.double(2, float64(x))
	case int64:
		value.double(2, float64(x))
	case float32:
		value.double(2, float64(x))
	case float64:
		value.double(2, x)
	default:
		return nil, 0, fmt.Errorf("it is a %T: want a string, a bool, an int, an int64, a float32 or a float64", x)
	}
	return value, 3, nil
}

// Flush writes all events to the file.
func (w *Writer) Flush() error {
	if w.err == nil {
		w.fail(w.buffer.Flush())
	}
	return w.err
}

// Close flushes and closes the file.
func (w *Writer) Close() error {
	return errors.Join(w.Flush(), w.file.Close())
}
