package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersion() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version and how the program was built",
		Long: `Version prints the program's version, the Go release that built it, its
platform, and whether the Go engine uses vector instructions (simd).`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch format {
			case "plain":
				_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
				return err
			case "json":
				return writeJSON(cmd.OutOrStdout(), thisBuild())
			}
			return usagef("--format %s: want plain or json", format)
		},
	}
	cmd.Flags().StringVar(&format, "format", "plain", "plain (one line) or json")
	return cmd
}

// build is this program as JSON.
type build struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	SIMD    bool   `json:"simd"`
}

func thisBuild() build {
	return build{version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, withSIMD}
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
