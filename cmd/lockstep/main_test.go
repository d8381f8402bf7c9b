package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// asCommand makes the test binary run as lockstep, for tests that start it as a separate process.
const asCommand = "LOCKSTEP_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		injectFaults()
		main()
	}
	if strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe") != "lockstep" { // a script's command
		flag.Parse()
		if err := flag.Set("test.parallel", "4"); err != nil { // the processes mostly wait
			panic(err)
		}
	}
	testscript.Main(m, map[string]func(){"lockstep": main})
}

// lockstepProcess returns the command as a separate process, which is killed at the end of the test.
func lockstepProcess(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	return cmd
}

// exitCode returns the exit code of a process from the error of Wait; -1: it did not exit.
func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}

// skipShort skips a test with -short, and prints why.
func skipShort(t *testing.T, why string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: " + why)
	}
}

// TestScripts runs the scripts in testdata/script.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       os.Getenv("LOCKSTEP_UPDATE") != "",
		RequireUniqueNames:  true,
		RequireExplicitExec: true,
		Condition: func(name string) (bool, error) { // [race]
			if name != "race" {
				return false, fmt.Errorf("unknown condition %q", name)
			}
			return race.Enabled, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"usage":     exits(exitUsage),
			"fails":     exits(exitError),
			"samefield": sameField,
			"sorted":    sortedField,
			"jsonlines": jsonLines,
			"exits":     exitsWith,
			"freeports": freePorts,
		},
	})
}

// exits returns a script command that runs another command and checks its exit code. Standard output may only hold the
// first lines.
func exits(code int) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, _ bool, args []string) {
		err := ts.Exec(args[0], args[1:]...)
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != code {
			ts.Fatalf("%v: got %v, want exit code %d", args, err, code)
		}
	}
}

// freePorts is a script command: freeports NAME... sets variables to ports that stay free until the script ends.
func freePorts(ts *testscript.TestScript, _ bool, args []string) {
	for _, name := range args {
		ts.Setenv(name, strconv.Itoa(freeport.Take(scriptTest{ts}, 1)))
	}
}

// scriptTest is a script as a test.
type scriptTest struct{ *testscript.TestScript }

func (s scriptTest) Helper()          {}
func (s scriptTest) Cleanup(f func()) { s.Defer(f) }

// exitsWith is a script command: exits CODE PROGRAM [ARGUMENT...].
func exitsWith(ts *testscript.TestScript, neg bool, args []string) {
	code, err := strconv.Atoi(args[0])
	ts.Check(err)
	exits(code)(ts, neg, args[1:])
}

// sameField is a script command: samefield A.json B.json FIELD.
func sameField(ts *testscript.TestScript, _ bool, args []string) {
	var values [2]string
	for i := range values {
		var fields map[string]any
		ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[i])), &fields))
		if fields[args[2]] == nil {
			ts.Fatalf("%s has no field %s", args[i], args[2])
		}
		values[i] = fmt.Sprint(fields[args[2]])
	}
	if values[0] != values[1] {
		ts.Fatalf("%s: %s in %s, %s in %s", args[2], values[0], args[0], values[1], args[1])
	}
}

// sortedField is a script command: sorted FILE FIELD wants a number in each line's object that is no less than that of
// the line before, and several different ones.
func sortedField(ts *testscript.TestScript, _ bool, args []string) {
	var numbers []float64
	for line := range strings.Lines(ts.ReadFile(args[0])) {
		var fields map[string]any
		ts.Check(json.Unmarshal([]byte(line), &fields))
		x, ok := fields[args[1]].(float64)
		if !ok {
			ts.Fatalf("%s: no number %s", line, args[1])
		}
		numbers = append(numbers, x)
	}
	if !slices.IsSorted(numbers) || len(slices.Compact(slices.Clone(numbers))) < 3 {
		ts.Fatalf("%s: %s is %v, want several numbers that grow", args[0], args[1], numbers)
	}
}
