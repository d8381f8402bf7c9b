package root

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// quickly are the commands whose numbers are tested, with flags that make them fast.
var quickly = [][]string{
	{"bench", "allreduce", "--sizes=4", "--calls=1"},
	{"bench", "allreduce", "--transport=shm", "--sizes=4", "--calls=1"},
	{"bench", "broadcast", "--transport=tcp", "--sizes=4", "--calls=1"},
	{"bench", "train", "--replicas=1", "--global-batch=1", "--steps=20"},
	{"train", "--replicas=1", "--steps=1", "--global-batch=8", "--progress=none"},
	{"train", "--replicas=1", "--batch-per-replica=8", "--epochs=0", "--progress=none"},
	{"train", "--strategy=multi-worker", "--replicas=1", "--epochs=0", "--progress=none"},
	{"simulate", "--ranks=4", "--hosts=2", "--bytes=4KiB"},
	{"run", "--nproc-per-node=1", "--", "true"},
}

// muchWork are flags that accept large numbers, and then work for a correspondingly long time.
var muchWork = map[string]string{"steps": "1000000000000", "epochs": "1000000000000", "max-restarts": ""}

// extremes are values that a flag of a type must accept or refuse.
func extremes(f *pflag.Flag) []string {
	numbers := []string{
		"-9223372036854775808", "9223372036854775807", "9223372036854775808", "1000000000000", "-1", "0",
		"x", "",
	}
	switch f.Value.Type() {
	case "int", "int64":
		return numbers
	case "float64":
		return []string{"NaN", "+Inf", "-Inf", "1e308", "1e-320", "-1", "x", ""}
	case "duration":
		return []string{"2562047h47m", "-2562047h47m", "0s", "1ns", "x", ""}
	case "size", "rate":
		return []string{"1024TiB", "NaN", "Inf", "-1", "1e308TiB", "0", "NaN/s", "1024TB/s", "1e-300B/s", "NaNGB/s", "x", ""}
	}
	return map[string][]string{
		"sizes":          {"1024TiB", "64TiB", "NaN", "-4", "0", "3", "1e308GiB"},
		"straggler":      {"0:NaN", "0:Inf", "0:1e308", "0:-1", "9223372036854775807:1"},
		"late":           {"0:2562047h47m", "0:-1ns", "-1:1s"},
		"link":           {"inside=2562047h,1GB/s", "outside=1us,NaNGB/s", "outside=0s,1e-300B/s"},
		"nproc-per-node": numbers, "nnodes": numbers,
		"devices": {"CPU:9223372036854775807", "CPU:-1", "CPU:99999999999999999999"},
	}[f.Name]
}

// Every sixth number is tested, and the second of every flag. If the environment variable is set, all are.
const (
	allExtremes   = "LOCKSTEP_TEST_EXTREMES"
	extremesShare = 6
)

// TestExtremeNumbers sets every numeric flag of bench, train, simulate and run to extreme numbers. Each is soon
// accepted or refused with a reason, without a panic, and without allocating memory for it.
func TestExtremeNumbers(t *testing.T) {
	race.SkipTimed(t, "some 200 command lines")
	var trials [][]string
	turn := 0
	for _, base := range quickly {
		root := New()
		cmd, _, err := root.Find(slices.DeleteFunc(slices.Clone(base),
			func(s string) bool { return strings.HasPrefix(s, "-") || s == "true" }))
		if err != nil {
			t.Fatal(err)
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			for i, text := range extremes(f) {
				turn++
				if os.Getenv(allExtremes) == "" && turn%extremesShare != 0 && i != 1 {
					continue
				}
				if text != "" && muchWork[f.Name] == text {
					continue
				}
				flags := base[:1:1]
				if base[0] == "bench" {
					flags = base[:2:2]
				}
				rest := slices.DeleteFunc(slices.Clone(base[len(flags):]),
					func(s string) bool { return strings.HasPrefix(s, "--"+f.Name+"=") })
				trials = append(trials, slices.Concat(flags, []string{"--" + f.Name + "=" + text}, rest))
			}
		})
	}
	if len(trials) < 100 {
		t.Fatalf("%d trials: are there no numeric flags any more?", len(trials))
	}
	slots := make(chan struct{}, 2)
	var all sync.WaitGroup
	for _, args := range trials {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			tryExtreme(t, args)
		})
	}
	all.Wait()
	t.Logf("%d command lines", len(trials))
}

// tryExtreme runs a command line as a process.
func tryExtreme(t *testing.T, args []string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), clitest.AsCommand+"=1")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	line := fmt.Sprintf("lockstep %s", strings.Join(args, " "))
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		t.Errorf("%s: no end within a minute:\n%s", line, clipText(out.String()))
	case err != nil && !errors.As(err, &exit):
		t.Errorf("%s: %v", line, err)
	case err != nil && exit.ExitCode() != cli.ExitError && exit.ExitCode() != cli.ExitUsage:
		t.Errorf("%s: %v, want exit code 0, %d or %d:\n%s", line, err, cli.ExitError, cli.ExitUsage, clipText(out.String()))
	case err != nil && (!strings.Contains(out.String(), "lockstep: ") || strings.Contains(out.String(), "goroutine ") ||
		strings.Contains(out.String(), "strconv")):
		t.Errorf("%s: %v, without a plain reason:\n%s", line, err, clipText(out.String()))
	}
	if usage := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss; usage > extremeMemory {
		t.Errorf("%s: took %d KiB of memory", line, usage)
	}
}

// extremeMemory bounds the memory, in KiB, of a refused command and of one that did a little work.
const extremeMemory = 1 << 20

func clipText(s string) string { return s[:min(len(s), 2000)] }
