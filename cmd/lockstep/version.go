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
		Long: `Version prints the program's version, the Go release that built it, its
platform, and whether the Go engine uses vector instructions (simd).`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			return err
		},
	}
}

// versionLine returns the line that lockstep version and lockstep --version print.
func versionLine() string {
	simd := "without simd"
	if withSIMD {
		simd = "with simd"
	}
	return fmt.Sprintf("lockstep %s %s %s/%s, built %s", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, simd)
}

// version returns the module's version, including the commit if the build knows it.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
