package run

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster/launch"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
)

// agentCommand is the command that lockstep run -H starts on each host.
const agentCommand = "agent"

// NewAgent returns lockstep agent.
func NewAgent() *cobra.Command {
	return &cobra.Command{
		Use:    agentCommand,
		Short:  "Start the workers of one host for lockstep run -H",
		Hidden: true,
		Args:   cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			guard, err := cli.OwnCommand(guardCommand)
			if err != nil {
				return err
			}
			defer cli.IgnoreSignals()()
			code, err := launch.Follow(cmd.Context(), os.Stdin, os.Stdout, os.Stderr, guard, cli.Warnings(os.Stderr))
			if err != nil {
				return err
			}
			return cli.EndWith(code)
		},
	}
}

// guardCommand is the command that lockstep run starts in addition to the workers.
const guardCommand = "guard"

// NewGuard returns lockstep guard.
func NewGuard() *cobra.Command {
	return &cobra.Command{
		Use:    guardCommand,
		Short:  "Kill the workers when the lockstep run that started this process is gone",
		Hidden: true,
		Args:   cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			launch.Guard(os.Stdin)
			return nil
		},
	}
}
