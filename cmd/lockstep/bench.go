package main

import "github.com/spf13/cobra"

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure collectives and training on this machine",
		Long: `Bench measures this machine, in the way of other libraries' benchmarks, so that
the numbers can stand side by side.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newBenchAllReduce(), newBenchTrain())
	return cmd
}
