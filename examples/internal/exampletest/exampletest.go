// Package exampletest runs the main function of an example in a separate process, from the example's test.
package exampletest

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
)

// asProgram is the environment variable that makes the test binary run the program.
const asProgram = "LOCKSTEP_EXAMPLE_AS_PROGRAM"

// Main runs the tests of an example or, in a process that [Command] started, the program. TestMain must call it.
func Main(m *testing.M, program func()) {
	if os.Getenv(asProgram) != "" {
		program()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Command returns the example as a process that is killed at the end of the test, and its output.
func Command(t *testing.T, env []string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(append(os.Environ(), asProgram+"=1"), env...)
	out := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, out
	return cmd, out
}

// Run runs the example until it exits, and returns its output.
func Run(t *testing.T, args ...string) string {
	t.Helper()
	cmd, out := Command(t, nil, args...)
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return out.String()
}
