// Package clitest helps the tests of commands: it runs them in the process of the test or in others, and reads what
// they write.
package clitest

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/spf13/cobra"
)

// AsCommand makes the test binary run as lockstep, for tests that start it as a separate process.
const AsCommand = "LOCKSTEP_TEST_AS_COMMAND"

// Process returns the command as a separate process, which is killed at the end of the test.
func Process(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(os.Environ(), AsCommand+"=1")
	return cmd
}

// ExitCode returns the exit code of a process from the error of Wait; -1: it did not exit.
func ExitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}

// Commands returns lockstep's command tree. TestMain sets it: this package cannot import that of the commands, which
// import the packages that are tested.
var Commands func() *cobra.Command

// Main runs the tests of a package or, in a process that a test has started, lockstep.
func Main(m *testing.M, root func() *cobra.Command, lockstep func(args []string) int) {
	if os.Getenv(AsCommand) != "" {
		os.Exit(lockstep(os.Args[1:]))
	}
	Commands = root
	os.Exit(m.Run())
}
