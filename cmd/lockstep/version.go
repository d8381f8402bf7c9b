package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version and how the program was built",
		Long:  `Version prints the program's version, the Go release and the instruction sets it was built for.`,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "lockstep %s %s %s/%s %s\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, instructions())
			return err
		},
	}
}

// version returns the module's version, and the commit it was built from where the build knows it.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
