package main

import (
	"github.com/spf13/cobra"
)

func newDoctor() *cobra.Command {
	var format string
	epoch := -1
	cmd := &cobra.Command{
		Use:   "doctor DIR",
		Short: "Say where the workers of a failed job part",
		Long: `Doctor reads what the workers of a failed job left in a folder: the records of
their last collectives (flight-*.jsonl), which every worker keeps at all times,
and of their failures (failure-*.json). It says which call is the last that all
have completed, and what each did then: who has not come, who called something
else, who is slow.

Workers write them into the folder that LOCKSTEP_RECORDS names when one of them
fails, or when one of them gets the signal USR1. lockstep run makes such a folder,
and names it when the job has failed. Those of several hosts have to be put into
one folder.`,
		Example: `  lockstep doctor /tmp/lockstep-1234
  lockstep doctor records --epoch 2 --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if format != "plain" && format != "json" {
				return usagef("--format %s: want plain or json", format)
			}
			if cmd.Flags().Changed("epoch") && epoch < 0 {
				return usagef("--epoch %d: want 0 or more", epoch)
			}
			return explainRecords(cmd.OutOrStdout(), args[0], format, epoch)
		},
	}
	f := cmd.Flags()
	f.StringVar(&format, "format", "plain", "plain or json")
	f.IntVar(&epoch, "epoch", -1, "which start of the job, from 0 (default the last one)")
	return cmd
}
