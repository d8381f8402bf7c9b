package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// NewVersion returns lockstep version.
func NewVersion() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version and how the program was built",
		Long: `Version prints the program's version, the Go release that built it, and its
platform.`,
		Args: NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if format == "json" {
				return WriteJSON(cmd.OutOrStdout(), build{Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH})
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), VersionLine())
			return err
		},
	}
	ChoiceVar(cmd.Flags(), &format, "format", "plain", "plain (one line) or json", "plain", "json")
	return cmd
}

// build is this program as JSON.
type build struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// VersionLine returns the line that lockstep version and lockstep --version print.
func VersionLine() string {
	return fmt.Sprintf("lockstep %s %s %s/%s", Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// Version returns the module's version, including the commit if the build knows it.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
