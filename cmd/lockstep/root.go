package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitOK          = 0
	exitError       = 1   // something went wrong
	exitUsage       = 2   // the command line is wrong
	exitInterrupted = 130 // Ctrl-C or SIGTERM, as in shells
)

// run runs the command line and returns the exit code.
func run(args []string) int {
	root := newRoot()
	root.SetArgs(args)
	began := false // an error before this is a mistake in the command line
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		began = true
		return checkNumbers(cmd)
	}
	cmd, err := root.ExecuteC()
	var usage *usageError
	var code *codeError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errInterrupted):
		return exitInterrupted
	case errors.As(err, &code):
		return code.code
	case began && !errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "lockstep: %v\n", err)
		return exitError
	}
	fmt.Fprintf(os.Stderr, "lockstep: %v\nRun '%s --help' for usage.\n", err, cmd.CommandPath())
	return exitUsage
}

// helpColumns is the maximum width of a help text.
const helpColumns = 80

// errInterrupted is the error of a command that the user stopped. The command has already reported it.
var errInterrupted = errors.New("interrupted")

// codeError ends the command with an exit code, for example that of another program. The command has already printed
// the reason.
type codeError struct{ code int }

func (e *codeError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// usageError is a mistake in the command line that only the command itself can detect.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

func newRoot() *cobra.Command {
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
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetErrPrefix("lockstep:")
	root.Flags().Bool("version", false, "print the version and how the program was built")
	root.SetVersionTemplate(versionLine() + "\n")
	root.SetFlagErrorFunc(explainFlag)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), "Flags.FlagUsages ",
		fmt.Sprintf("Flags.FlagUsagesWrapped %d ", helpColumns)))
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newTrain(), newEval(), newPredict(), newGenerate(), newRun(), newAgent(), newGuard(), newBench(),
		newSimulate(), newPlan(), newCheck(), newDoctor(), newTop(), newRender(),
		newVersion())
	root.InitDefaultHelpCmd()
	strictHelp(root)
	completeValues(root, nil, flagValues())
	keepOrder(root)
	return root
}
