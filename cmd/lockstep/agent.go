package main

import (
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster/launch"
)

// agentCommand is the command that lockstep run -H starts on each host.
const agentCommand = "agent"

func newAgent() *cobra.Command {
	return &cobra.Command{
		Use:    agentCommand,
		Short:  "Start the workers of one host for lockstep run -H",
		Hidden: true,
		Args:   noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			guard, err := ownCommand(guardCommand)
			if err != nil {
				return err
			}
			defer ignoreSignals()()
			code, err := launch.Follow(cmd.Context(), os.Stdin, os.Stdout, os.Stderr, guard, runLogger(os.Stderr))
			if err != nil {
				return err
			}
			return endWith(code)
		},
	}
}

// runLogger returns a logger of the launcher's warnings.
func runLogger(out io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelWarn}))
}
