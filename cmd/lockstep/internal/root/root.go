// Package root assembles the subcommands to the command lockstep, and runs it.
package root

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/bench"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/engines"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/inspect"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/monitor"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/predict"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/run"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/training"
)

// Run runs the command line and returns the exit code.
func Run(args []string) int {
	root := New()
	root.SetArgs(args)
	began := false // an error before this is a mistake in the command line
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		began = true
		return cli.CheckNumbers(cmd)
	}
	cmd, err := root.ExecuteC()
	var usage *cli.UsageError
	var code *cli.CodeError
	switch {
	case err == nil:
		return cli.ExitOK
	case errors.Is(err, cli.ErrInterrupted):
		return cli.ExitInterrupted
	case errors.As(err, &code):
		return code.Code
	case began && !errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "lockstep: %v\n", err)
		return cli.ExitError
	}
	fmt.Fprintf(os.Stderr, "lockstep: %v\nRun '%s --help' for usage.\n", err, cmd.CommandPath())
	return cli.ExitUsage
}

// New returns the command lockstep with all subcommands.
func New() *cobra.Command {
	root := &cobra.Command{
		Use:   "lockstep",
		Short: "Synchronous data-parallel training",
		Long: `Lockstep trains one model on several replicas, synchronously. After every step
the replicas all-reduce their gradients, so all of them keep the same weights.

Exit codes: 0 success, 1 error, 2 mistake in the command line, 130 stopped by
Ctrl-C or SIGTERM. lockstep run exits with the code of the worker that failed
first.
'lockstep doctor --env' lists the environment variables that Lockstep reads.`,
		Example: `  lockstep train
  lockstep train --data mnist --data-dir DIR --model mlp --epochs 3
  lockstep run --nproc-per-node 2 -- ./prog
  lockstep bench allreduce --ranks 2`,
		Version:       cli.Version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetErrPrefix("lockstep:")
	root.Flags().Bool("version", false, "print the version and how the program was built")
	root.SetVersionTemplate(cli.VersionLine() + "\n")
	root.SetFlagErrorFunc(cli.ExplainFlag)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), "Flags.FlagUsages ",
		fmt.Sprintf("Flags.FlagUsagesWrapped %d ", cli.HelpColumns)))
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(training.New(), predict.NewEval(), predict.NewPredict(), predict.NewGenerate(), run.New(),
		run.NewAgent(), run.NewGuard(), bench.New(), inspect.NewSimulate(), inspect.NewPlan(), inspect.NewCheck(),
		inspect.NewDoctor(), engines.New(), monitor.NewTop(), run.NewRender(), cli.NewVersion())
	root.InitDefaultHelpCmd()
	cli.StrictHelp(root)
	cli.KeepOrder(root)
	cli.CompleteFlags(root)
	return root
}
