package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster/launch"
)

// guardCommand is the command that lockstep run starts in addition to the workers.
const guardCommand = "guard"

func newGuard() *cobra.Command {
	return &cobra.Command{
		Use:    guardCommand,
		Short:  "Kill the workers when the lockstep run that started this process is gone",
		Hidden: true,
		Args:   noArguments,
		RunE: func(*cobra.Command, []string) error {
			launch.Guard(os.Stdin)
			return nil
		},
	}
}
