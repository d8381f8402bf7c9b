package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// traceFlags are the flags of the timeline of a training.
type traceFlags struct {
	file  string
	steps int
}

func (o *traceFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.file, "trace", "", "write a timeline of the last steps of all workers into this `file`, for "+
		"Perfetto at ui.perfetto.dev (worker 0)")
	f.IntVar(&o.steps, "trace-steps", 100, "number of `steps` of --trace")
}

func (o *traceFlags) check(given func(flag string) bool) error {
	switch {
	case given("trace") && o.file == "":
		return usagef("--trace is empty: want a file, such as trace.json")
	case given("trace-steps") && o.steps < 1:
		return usagef("--trace-steps %d: want at least 1", o.steps)
	case given("trace-steps") && o.file == "":
		return usagef("--trace-steps is for --trace: give a file, too")
	}
	return nil
}

// checkWritable returns an error if the file cannot be written.
func (o *traceFlags) checkWritable() error {
	if o.file == "" {
		return nil
	}
	if info, err := os.Stat(filepath.Dir(o.file)); err != nil || !info.IsDir() {
		return fmt.Errorf("--trace %s: the folder %s does not exist", o.file, filepath.Dir(o.file))
	}
	if err := checkpoint.CheckWritable(o.file); err != nil {
		return fmt.Errorf("--trace %s: %w", o.file, err)
	}
	return nil
}

// config returns the trace of the trainer; nil: none.
func (o *traceFlags) config() *train.Trace {
	if o.file == "" {
		return nil
	}
	return &train.Trace{Path: o.file, Steps: o.steps}
}

// String returns the flags that must be the same on all workers.
func (o *traceFlags) String() string { return fmt.Sprint(o.file != "", o.steps) }
