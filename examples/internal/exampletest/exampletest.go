// Package exampletest runs an example's main as a process of its own, from the example's test.
package exampletest

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
)

// asProgram makes the test binary be the program.
const asProgram = "LOCKSTEP_EXAMPLE_AS_PROGRAM"

// Main is what the TestMain of an example calls: it runs the tests, or, in a process that [Command] starts, the program.
func Main(m *testing.M, program func()) {
	if os.Getenv(asProgram) != "" {
		program()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Command returns the example as a process that ends with the test, and what it prints.
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

// Run runs the example to its end and returns what it printed.
func Run(t *testing.T, args ...string) string {
	t.Helper()
	cmd, out := Command(t, nil, args...)
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return out.String()
}
