package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/doctor"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/internal/kernel"
)

// doctorFlags are the flags of lockstep doctor.
type doctorFlags struct {
	format      string
	environment bool
	epoch       int
	workers     int
	bytes       bytesValue
	time        time.Duration
	timeout     time.Duration
	wait        time.Duration
	plaintext   bool
}

func newDoctor() *cobra.Command {
	var o doctorFlags
	cmd := &cobra.Command{
		Use:   "doctor [DIR]",
		Short: "Test the workers of a job before it trains, or say why it failed",
		Long: `Doctor, put in the place of the program, joins the job as that would, under any
launcher, and tests every pair of workers: how they reach each other, the time of
a round trip, the rate each way, and how far their clocks are apart. It compares
their versions and vector instructions. The chief prints it, and what is wrong; a
pair that does not answer is named. Started by itself, it tests a small job of
processes of this machine. The exit code is 1 if anything is wrong.

With a folder it reads what the workers of a failed job left there: the records
of their last collectives (flight-*.jsonl), which every worker keeps at all times,
and of their failures (failure-*.json). It says which call is the last that all
have completed, and what each did then: who has not come, who called something
else, who is slow. Workers write them into the folder that LOCKSTEP_RECORDS names
when one of them fails, or gets the signal USR1. lockstep run makes such a folder,
and names it when the job has failed. Those of several hosts have to be put into
one folder.

With --env it lists the environment variables that Lockstep reads.`,
		Example: `  lockstep doctor
  lockstep run --nproc-per-node 4 -- lockstep doctor
  srun lockstep doctor --bytes 64MiB --format json
  lockstep doctor /tmp/lockstep-records-1234`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(cmd, args); err != nil {
				return err
			}
			switch {
			case o.environment:
				return printEnvironment(cmd.OutOrStdout(), o.format, os.LookupEnv)
			case len(args) == 1:
				return explainRecords(cmd.OutOrStdout(), args[0], o.format, o.epoch)
			}
			return o.examine(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	o.bytes = 4 << 20
	f.StringVar(&o.format, "format", "table", "plain: lines for other programs; table; json")
	f.Var(&o.bytes, "bytes", "size of the messages by which rates are measured")
	f.DurationVar(&o.time, "time", 200*time.Millisecond, "about how long each direction of a pair is measured")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "how long a pair may take to answer")
	f.DurationVar(&o.wait, "rdzv-timeout", time.Minute, "how long the workers wait for one another")
	f.BoolVar(&o.plaintext, "data-plaintext", false, "leave the data unencrypted, as the training is to do: for trusted networks")
	f.IntVar(&o.workers, "workers", 2, "processes of this machine, where there is no job")
	f.IntVar(&o.epoch, "epoch", -1, "of the records in DIR: which start of the job, from 0 (default the last one)")
	f.BoolVar(&o.environment, "env", false, "list the environment variables that Lockstep reads")
	return cmd
}

func (o *doctorFlags) check(cmd *cobra.Command, args []string) error {
	switch {
	case o.format != "plain" && o.format != "table" && o.format != "json":
		return usagef("--format %s: want plain, table or json", o.format)
	case o.environment && len(args) > 0:
		return usagef("--env lists variables, and reads no folder such as %s", args[0])
	case cmd.Flags().Changed("epoch") && (o.epoch < 0 || len(args) == 0):
		return usagef("--epoch %d: want 0 or more, and the folder of the records", o.epoch)
	case o.bytes < 1 || o.bytes > 1<<30:
		return usagef("--bytes %v: want 1B to 1GiB", &o.bytes)
	case o.time <= 0 || o.timeout <= 0 || o.wait <= 0:
		return usagef("--time %v, --timeout %v, --rdzv-timeout %v: want more than 0s", o.time, o.timeout, o.wait)
	case o.workers < 1 || o.workers > 64:
		return usagef("--workers %d: want 1 to 64", o.workers)
	}
	return nil
}

// examine examines the job that this process is a worker of, or makes one.
func (o *doctorFlags) examine(ctx context.Context, out io.Writer) error {
	job, err := cluster.Discover(cluster.Discovery{})
	if err != nil {
		return err
	}
	if job.Source == "nobody" {
		return o.start(ctx, out)
	}
	logger := runLogger()
	in := catchInterrupts(ctx)
	defer in.close()
	report, err := doctor.Examine(in, doctor.Config{
		Bytes: int(o.bytes), Time: o.time, Timeout: o.timeout, Facts: facts(),
		Join: worker.Config{Job: job, RendezvousTimeout: o.wait, DataPlaintext: o.plaintext, MixedBuilds: true, Logger: logger},
	})
	switch {
	case in.asked.Load():
		return errInterrupted
	case report == nil:
		return err
	case report.Chief:
		if e := o.print(out, report); e != nil {
			return e
		}
	}
	if err == nil && !report.Healthy() {
		return endWith(exitError)
	}
	return err
}

func (o *doctorFlags) print(out io.Writer, r *doctor.Report) error {
	switch o.format {
	case "json":
		return json.NewEncoder(out).Encode(r)
	case "plain":
		return r.PrintPlain(out)
	}
	return r.Print(out)
}

// facts are what this process is.
func facts() []doctor.Fact {
	simd := "no"
	if withSIMD {
		simd = "yes"
	}
	return []doctor.Fact{
		{Name: "version", Value: version(), Alike: true},
		{Name: "go", Value: runtime.Version(), Alike: true},
		{Name: "platform", Value: runtime.GOOS + "/" + runtime.GOARCH, Alike: true},
		{Name: "instruction set", Value: kernel.Level(), Alike: true},
		{Name: "simd", Value: simd, Alike: true},
		{Name: "build", Value: buildHash(), Alike: true},
		{Name: "processors", Value: strconv.Itoa(runtime.GOMAXPROCS(0))},
	}
}

// buildHash tells this executable from others.
func buildHash() string {
	hash, err := worker.Executable()
	if err != nil {
		return "unknown"
	}
	return hash
}

// start runs this command again as the workers of a job of this machine.
func (o *doctorFlags) start(ctx context.Context, out io.Writer) error {
	command, err := ownCommand("doctor", "--format", o.format, "--bytes", strconv.Itoa(int(o.bytes)), "--time", o.time.String(),
		"--timeout", o.timeout.String(), "--rdzv-timeout", o.wait.String())
	if err != nil {
		return err
	}
	run := runFlags{
		perNode: strconv.Itoa(o.workers), nodes: "1", backend: "tcp", timeout: o.wait, heartbeat: agentHeartbeat, grace: o.timeout, tee: "both", affinity: "auto",
		command: command, given: func(string) bool { return false },
	}
	cfg, err := run.config()
	if err != nil {
		return err
	}
	cfg.Stdout, cfg.Quiet = withoutPrefix{run.readers.of(out)}, true
	return run.launch(ctx, cfg)
}

// withoutPrefix writes the lines of the first worker, the chief, without their prefix. Each Write has whole lines.
type withoutPrefix struct{ io.Writer }

func (w withoutPrefix) Write(text []byte) (int, error) {
	const prefix = "[rank0] "
	plain := bytes.ReplaceAll(bytes.TrimPrefix(text, []byte(prefix)), []byte("\n"+prefix), []byte("\n"))
	if _, err := w.Writer.Write(plain); err != nil {
		return 0, err
	}
	return len(text), nil
}
