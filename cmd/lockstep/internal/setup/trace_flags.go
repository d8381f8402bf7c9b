package setup

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TraceFlags are the flags of the timeline of a training.
type TraceFlags struct {
	File  string
	steps int
}

// Add adds the flags.
func (o *TraceFlags) Add(f *pflag.FlagSet) {
	f.StringVar(&o.File, "trace", "", "write a timeline into this `file`")
	f.IntVar(&o.steps, "trace-steps", 100, "number of `steps` of --trace")
	cli.Limit(f, "[1,)", "trace-steps")
	cli.ComparedIfGiven(f, "trace")
}

// Check validates the flags.
func (o *TraceFlags) Check(given func(flag string) bool) error {
	switch {
	case given("trace") && o.File == "":
		return cli.Usagef("--trace is empty: want a file, such as trace.json")
	case given("trace-steps") && o.File == "":
		return cli.Usagef("--trace-steps is for --trace: give a file, too")
	}
	return nil
}

// CheckWritable returns an error if the file cannot be written.
func (o *TraceFlags) CheckWritable() error {
	if o.File == "" {
		return nil
	}
	if info, err := os.Stat(filepath.Dir(o.File)); err != nil || !info.IsDir() {
		return fmt.Errorf("--trace %s: the folder %s does not exist", o.File, filepath.Dir(o.File))
	}
	if err := checkpoint.CheckWritable(o.File); err != nil {
		return fmt.Errorf("--trace %s: %w", o.File, err)
	}
	return nil
}

// Config returns the trace of the trainer; nil: none.
func (o *TraceFlags) Config() *train.Trace {
	if o.File == "" {
		return nil
	}
	return &train.Trace{Path: o.File, Steps: o.steps}
}
