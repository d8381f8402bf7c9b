package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// flagValues returns the values that shells complete, by command and flag. A command also has the values of its parent.
func flagValues() map[string]map[string][]string {
	training := map[string][]string{
		"data": sorted(dataSets), "model": modelNames, "optimizer": sorted(optimizers), "engine": gomlx.Names,
		"format":    {"plain", "table", "json"},
		"precision": precisions(),
		"strategy":  {"mirrored", multiWorker, "one-device"}, "implementation": {"auto", "ring", "nccl", "mpi"},
		"schedule": schedules, "progress": progressModes,
	}
	return map[string]map[string][]string{
		"lockstep train":       training,
		"lockstep bench train": training,
		"lockstep eval":        {"engine": gomlx.Names, "format": {"table", "json"}},
		"lockstep predict":     {"engine": gomlx.Names, "format": {"plain", "json"}},
		"lockstep generate":    {"engine": gomlx.Names},
		"lockstep run": {
			"rdzv-backend": {"tcp", "file", "etcd"}, "tee": {"both", "stdout", "stderr", "none"},
			"bind-to": {"share", "core", "numa", "none"}, "nproc-per-node": {"auto", "cpu", "gpu"},
			"progress": runProgressModes,
		},
		"lockstep bench": {
			"format": {"plain", "table", "json"}, "transport": {"mem", "shm", "tcp"},
			"transports": {"mem", "shm", "tcp"}, "buffers": {"shared", "ordinary"}, "dtype": benchTypes(),
			"reduce": {"sum", "mean", "min", "max", "prod", allValues}, "average": {"avg", "min", "max", "rank0"},
		},
		"lockstep bench data": {"format": {"plain", "json"}},
		"lockstep simulate": {
			"op": sorted(simulateOps), "format": {"table", "json"},
			"memory": {"inplace", "private", "none"},
		},
		"lockstep plan": {
			"algorithm": append([]string{"auto"}, chooser.Names()...), "format": planFormats,
			"memory": {"inplace", "private", "none"}, "reduce": {"sum", "prod", "min", "max", "mean"},
		},
		"lockstep check":      {"format": {"table", "json"}},
		"lockstep doctor":     {"format": {"plain", "table", "json"}},
		"lockstep version":    {"format": {"plain", "json"}},
		"lockstep render mpi": {"launcher": {"openmpi", "mpich"}},
	}
}

// completeValues registers the values of flags for shell completion, for a command and its subcommands.
func completeValues(cmd *cobra.Command, values map[string][]string, all map[string]map[string][]string) {
	if own, ok := all[cmd.CommandPath()]; ok {
		values = own
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if v := values[f.Name]; v != nil {
			// fails only if the flag already has a function
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(v, cobra.ShellCompDirectiveNoFileComp))
		}
	})
	for _, c := range cmd.Commands() {
		completeValues(c, values, all)
	}
}

// wantCommand is the Args of a command that only has subcommands.
func wantCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	if name := closest(args[0], names); name != "" {
		return usagef("unknown command %q for %q: did you mean %s?", args[0], cmd.CommandPath(), name)
	}
	return usagef("unknown command %q for %q: want one of %s", args[0], cmd.CommandPath(), strings.Join(names, ", "))
}

// keepOrder makes help list flags in the order of their definitions, which groups related flags.
func keepOrder(cmd *cobra.Command) {
	cmd.Flags().SortFlags = false
	for _, c := range cmd.Commands() {
		keepOrder(c)
	}
}
