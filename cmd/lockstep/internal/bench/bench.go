// Package bench is lockstep bench: it measures collectives, training steps and the reading of data.
package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/collective/chooser"
)

// New returns lockstep bench.
func New() *cobra.Command {
	var calibrate bool
	var out string
	var transports []string
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure collectives and training on this machine",
		Long: `Bench measures collectives and training steps on this machine. It follows the
benchmarks of other libraries, so the numbers can be compared.

With --calibrate it measures how fast this machine moves, copies and reduces
bytes over each transport, and how far the predicted times of the algorithms are
off. It writes a table from which algorithms are chosen. Programs read the table
that the environment variable LOCKSTEP_TABLE names. Calibration takes some
minutes and needs an idle machine.`,
		Example: `  lockstep bench allreduce --ranks 2
  lockstep bench allreduce --explain
  lockstep bench all --transport shm --dtype all --reduce all --sizes 1MiB
  lockstep bench --calibrate --out table.json`,
		Args: cli.WantCommand,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !calibrate {
				return cmd.Help()
			}
			return cli.Interruptible(cmd, func(ctx context.Context, stdout io.Writer) error {
				return runCalibrate(ctx, stdout, cmd.ErrOrStderr(), transports, out)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&calibrate, "calibrate", false, "measure this machine and write a table from which algorithms are chosen")
	f.StringVar(&out, "out", "lockstep-table.json", "with --calibrate, the `file` to write")
	f.StringSliceVar(&transports, "transports", []string{"mem", "shm", "tcp"},
		"with --calibrate, the transports to measure")
	cli.Suggest(f, "transports", "mem", "shm", "tcp")
	for _, name := range cli.Sorted(benchAbout) {
		cmd.AddCommand(newBenchCollective(name))
	}
	cmd.AddCommand(newBenchTrain(), newBenchData(), newBenchProducts(), newBenchWorker())
	return cmd
}

// runCalibrate measures this machine and writes the table into the file out.
func runCalibrate(ctx context.Context, stdout, progress io.Writer, transports []string, out string) error {
	for _, name := range transports {
		if !slices.Contains([]string{"mem", "shm", "tcp"}, name) {
			return cli.Usagef("--transports %s: want a list of mem, shm, tcp", name)
		}
	}
	f, err := os.CreateTemp(filepath.Dir(out), ".table-*") // fails before minutes of work, not after
	if err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	f.Close()
	os.Remove(f.Name())
	measured, err := bench.Calibrate(ctx, bench.Calibration{
		Transports: transports, Worker: benchWorker, Machine: machineName(),
		Progress: func(format string, args ...any) { fmt.Fprintf(progress, format+"\n", args...) },
	})
	if err != nil {
		return err
	}
	if err := measured.Save(out); err != nil {
		return err
	}
	var t cli.Table
	t.Row("reduce", "%s", cli.FormatRate(measured.Combine))
	t.Row("copy", "%s", cli.FormatRate(measured.Copy))
	for _, name := range measured.Over() {
		t.Row(name, "%s", describeTransport(measured.Transports[name]))
	}
	t.Row("corrections", "%d", len(measured.Corrections))
	if err := t.Print(stdout); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "\nwritten to %s: set LOCKSTEP_TABLE to this file on every host of a job\n",
		out)
	return err
}

func describeTransport(t chooser.Transport) string {
	var parts []string
	if t.Read > 0 {
		parts = append(parts, fmt.Sprintf("synchronisation %d ns, reads %s", t.Sync, cli.FormatRate(t.Read)))
	}
	if t.Send > 0 {
		parts = append(parts, fmt.Sprintf("frame %d ns, %s", t.Frame, cli.FormatRate(t.Send)))
	}
	return strings.Join(parts, "; ")
}

// machineName describes the machine that a table was measured on.
func machineName() string {
	return fmt.Sprintf("%d processors, %s", runtime.NumCPU(), machine.Vectors())
}
