package main

import (
	"encoding/csv"
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

	library "github.com/parquet-go/parquet-go"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/root"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
)

func TestMain(m *testing.M) {
	if os.Getenv(clitest.AsCommand) != "" {
		injectFaults()
		main()
	}
	clitest.Commands = root.New
	if strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe") != "lockstep" { // a script's command
		flag.Parse()
		if err := flag.Set("test.parallel", "4"); err != nil { // the processes mostly wait
			panic(err)
		}
	}
	testscript.Main(m, map[string]func(){"lockstep": main})
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
			"usage":     exits(cli.ExitUsage),
			"fails":     exits(cli.ExitError),
			"samefield": sameField,
			"sorted":    sortedField,
			"jsonlines": jsonLines,
			"exits":     exitsWith,
			"freeports": freePorts,
			"parquet":   writeParquet,
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

// writeParquet is a script command: parquet A.csv B.parquet writes the rows as Parquet, in row groups of 4. A column
// whose fields are all integers has integers, one of numbers doubles, others texts; empty fields are nulls.
func writeParquet(ts *testscript.TestScript, _ bool, args []string) {
	lines, err := csv.NewReader(strings.NewReader(ts.ReadFile(args[0]))).ReadAll()
	ts.Check(err)
	names, lines := lines[0], lines[1:]
	group, parse := library.Group{}, make([]func(string) any, len(names))
	for i, name := range names {
		group[name], parse[i] = library.Optional(library.Int(64)), func(s string) any {
			n, _ := strconv.ParseInt(s, 10, 64)
			return n
		}
		for _, line := range lines {
			if _, err := strconv.ParseInt(line[i], 10, 64); err == nil || line[i] == "" {
				continue
			}
			if _, err := strconv.ParseFloat(line[i], 64); err != nil {
				group[name], parse[i] = library.Optional(library.String()), func(s string) any { return s }
				break
			}
			group[name] = library.Optional(library.Leaf(library.DoubleType))
			parse[i] = func(s string) any {
				x, _ := strconv.ParseFloat(s, 64)
				return x
			}
		}
	}
	f, err := os.Create(ts.MkAbs(args[1]))
	ts.Check(err)
	w := library.NewGenericWriter[map[string]any](f, library.NewSchema("row", group))
	for chunk := range slices.Chunk(lines, 4) {
		for _, line := range chunk {
			row := map[string]any{}
			for i, field := range line {
				if field != "" {
					row[names[i]] = parse[i](field)
				}
			}
			_, err = w.Write([]map[string]any{row})
			ts.Check(err)
		}
		ts.Check(w.Flush())
	}
	ts.Check(w.Close())
	ts.Check(f.Close())
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
