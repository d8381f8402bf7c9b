// Package inspect has the commands that look at plans, machines and jobs without training: plan, simulate, check and
// doctor.
package inspect

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/doctor"
	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/run"
	"github.com/lockstep-ml/lockstep/internal/kernel"
)

// doctorFlags are the flags of lockstep doctor.
type doctorFlags struct {
	format      string
	html        string
	environment bool
	epoch       int
	workers     int
	bytes       cli.BytesValue
	time        time.Duration
	timeout     time.Duration
	wait        time.Duration
	plaintext   bool
}

// NewDoctor returns lockstep doctor.
func NewDoctor() *cobra.Command {
	var o doctorFlags
	cmd := &cobra.Command{
		Use:   "doctor [DIR]",
		Short: "Test the workers of a job before training, or explain a failure",
		Long: `Doctor tests a job before it trains, or explains why it failed.

To test a job, run doctor instead of the program, under any launcher. It joins
the job and tests every pair of workers: the transport between them, the
round-trip time, the bandwidth in each direction, and the clock offset. It
compares the workers' versions and vector instructions, and each worker computes
a known answer on every CPU that it may use. The chief prints the results and
the problems, and names every pair that does not answer. Without a launcher,
doctor tests a small job of processes on this machine. The exit code is 1 if
there is a problem.

With a folder it reads the records that the workers of a failed job left there:
their last collectives (flight-*.jsonl), which every worker always records, and
their failures (failure-*.json). It names the last call that all workers
completed, and what each worker did next: which one is missing, which called
something else, which is slow. Workers write records into the folder that
LOCKSTEP_RECORDS names when one of them fails, or when they get SIGUSR1.
lockstep run creates this folder, and prints its name when the job has failed.
For a job on several hosts, copy all records into one folder first.

With --env it lists the environment variables that Lockstep reads.`,
		Example: `  lockstep doctor
  lockstep run --nproc-per-node 4 -- lockstep doctor
  srun lockstep doctor --bytes 64MiB --format json
  lockstep doctor /tmp/lockstep-records-1234
  lockstep doctor /tmp/lockstep-records-1234 --html records.html`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(cmd, args); err != nil {
				return err
			}
			switch {
			case o.environment:
				return printEnvironment(cmd.OutOrStdout(), o.format, os.LookupEnv)
			case len(args) == 1:
				return explainRecords(cmd.OutOrStdout(), args[0], o.format, o.html, o.epoch)
			}
			return o.examine(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	o.bytes = 4 << 20
	cli.ChoiceVar(f, &o.format, "format", "table", "plain (lines for other programs), table or json", "plain", "table",
		"json")
	f.StringVar(&o.html, "html", "", "also write a page into this `file`: a lane per rank with a folder, else heat maps "+
		"of the pairs")
	f.Var(&o.bytes, "bytes", "size of the messages that measure bandwidth")
	f.DurationVar(&o.time, "time", 200*time.Millisecond, "approximate time of the measurement of each direction of a pair")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "how long to wait for the answer of a pair")
	f.DurationVar(&o.wait, "rdzv-timeout", time.Minute, "how long the workers wait for one another to join")
	f.BoolVar(&o.plaintext, "data-plaintext", false,
		"do not encrypt the data, as in the training: for trusted networks only")
	f.IntVar(&o.workers, "workers", 2, "number of processes on this machine, without a launcher")
	f.IntVar(&o.epoch, "epoch", -1, "which start of the job to read records of, from 0 (default the last one)")
	f.Lookup("epoch").DefValue = "0" // so that help does not show -1
	f.BoolVar(&o.environment, "env", false, "list the environment variables that Lockstep reads")
	cli.Limit(f, "[1B,1GiB]", "bytes")
	cli.Limit(f, "(0s,)", "time", "timeout", "rdzv-timeout")
	cli.Limit(f, "[1,64]", "workers")
	return cmd
}

func (o *doctorFlags) check(cmd *cobra.Command, args []string) error {
	switch {
	case o.environment && o.html != "":
		return cli.Usagef("--env lists variables: leave out --html")
	case o.environment && len(args) > 0:
		return cli.Usagef("--env lists variables: leave out the folder %s", args[0])
	case cmd.Flags().Changed("epoch") && (o.epoch < 0 || len(args) == 0):
		return cli.Usagef("--epoch %d: want 0 or more, and the folder of the records", o.epoch)
	}
	return nil
}

// examine tests the job that this process is a worker of, or starts one.
func (o *doctorFlags) examine(ctx context.Context, out io.Writer) error {
	job, err := cluster.Discover(cluster.Discovery{})
	if err != nil {
		return err
	}
	if job.Source == "none" {
		return o.start(ctx, out)
	}
	logger := cli.Warnings(os.Stderr)
	in := cli.CatchInterrupts(ctx)
	defer in.Close()
	report, err := doctor.Examine(in, doctor.Config{
		Bytes: int(o.bytes), Time: o.time, Timeout: o.timeout, Facts: facts(),
		Join: worker.Config{
			Job: job, RendezvousTimeout: o.wait, DataPlaintext: o.plaintext, MixedBuilds: true,
			Logger: logger,
		},
	})
	switch {
	case in.Interrupted.Load():
		return cli.ErrInterrupted
	case report == nil:
		return err
	case report.Chief:
		if o.html != "" {
			if e := writePairsPage(o.html, report); e != nil {
				return fmt.Errorf("--html: %w", e)
			}
		}
		if e := o.print(out, report); e != nil {
			return e
		}
	}
	if err == nil && !report.Healthy() {
		return cli.EndWith(cli.ExitError)
	}
	return err
}

func (o *doctorFlags) print(out io.Writer, r *doctor.Report) error {
	switch o.format {
	case "json":
		return cli.WriteJSON(out, r)
	case "plain":
		return r.PrintPlain(out)
	}
	return r.Print(out)
}

// facts describes this process.
func facts() []doctor.Fact {
	return []doctor.Fact{
		{Name: "version", Value: cli.Version(), Alike: true},
		{Name: "go", Value: runtime.Version(), Alike: true},
		{Name: "platform", Value: runtime.GOOS + "/" + runtime.GOARCH, Alike: true},
		{Name: "instruction set", Value: kernel.Level(), Alike: true},
		{Name: "build", Value: buildHash(), Alike: true},
		{Name: "processors", Value: strconv.Itoa(runtime.GOMAXPROCS(0)), Number: true},
		answers(),
	}
}

// buildHash identifies this executable.
func buildHash() string {
	hash, err := worker.Executable()
	if err != nil {
		return "unknown"
	}
	return hash
}

// start runs this command as the workers of a job on this machine.
func (o *doctorFlags) start(ctx context.Context, out io.Writer) error {
	cfg := launch.Config{Workers: o.workers, RendezvousTimeout: o.wait, Grace: o.timeout, Quiet: true}
	return run.Local(ctx, out, cfg, "doctor", "--format", o.format, "--bytes", strconv.Itoa(int(o.bytes)), "--time",
		o.time.String(), "--timeout", o.timeout.String(), "--rdzv-timeout", o.wait.String(), "--html", o.html)
}
