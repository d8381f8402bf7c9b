// Package exampletest runs the main function of an example in a separate process, from the example's test.
package exampletest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/freeport"
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

// Workers runs the example as n workers of a job that TF_CONFIG describes, until all exit, and returns their outputs.
func Workers(t *testing.T, n int, args ...string) []string {
	t.Helper()
	addresses := ""
	for i := range n {
		if i > 0 {
			addresses += ", "
		}
		addresses += fmt.Sprintf(`"127.0.0.1:%d"`, freeport.Take(t, 2))
	}
	var workers []*exec.Cmd
	var outs []*bytes.Buffer
	for i := range n {
		config := fmt.Sprintf(`{"cluster": {"worker": [%s]}, "task": {"type": "worker", "index": %d}}`, addresses, i)
		cmd, out := Command(t, []string{"TF_CONFIG=" + config}, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		workers, outs = append(workers, cmd), append(outs, out)
	}
	list := make([]string, n)
	for i, cmd := range workers {
		err := cmd.Wait()
		list[i] = outs[i].String()
		if err != nil {
			t.Errorf("worker %d: %v\n%s", i, err, list[i])
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return list
}
