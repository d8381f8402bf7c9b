//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestUnderLaunchers: the same training under lockstep run and under mpirun gives the bits of one process, and prints
// its launcher.
func TestUnderLaunchers(t *testing.T) {
	race.SkipTimed(t, "a job for each launcher")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want := hashOfOne(t, 4)
	for _, c := range []struct {
		name    string
		command []string
		source  string
	}{
		{
			"lockstep run, 2x2",
			[]string{exe, "run", "--nproc-per-node", "2", "--", exe, "train", "--replicas", "2"},
			"worker 1 of 2, by lockstep run",
		},
		{
			"lockstep run, 4x1",
			[]string{exe, "run", "--nproc-per-node", "4", "--", exe, "train", "--replicas", "1"},
			"worker 3 of 4, by lockstep run",
		},
		{"mpirun, 2x2", []string{"mpirun", "-np", "2", exe, "train", "--replicas", "2"}, "worker 1 of 2, by "},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := exec.LookPath(c.command[0]); err != nil {
				t.Skipf("%s is not installed", c.command[0])
			}
			dir := t.TempDir()
			args := append(c.command[1:], "--strategy", "multi-worker", "--progress", "none", "--out", dir)
			cmd := exec.CommandContext(t.Context(), c.command[0], append(args, small...)...)
			// two concurrent mpiruns may both create their folder
			cmd.Env = append(os.Environ(), clitest.AsCommand+"=1", "TMPDIR="+t.TempDir(),
				"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1",
				"PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe")
			out, err := cmd.CombinedOutput()
			summary, _ := os.ReadFile(filepath.Join(dir, "summary.json"))
			if err != nil || !strings.Contains(string(out), c.source) ||
				!strings.Contains(string(summary), `"weights_hash": "`+want) {
				t.Errorf("%v\n%s\nwant %q and the weights hash %s, the chief wrote %s", err, out, c.source, want, summary)
			}
			report, err := os.ReadFile(filepath.Join(dir, "report.html"))
			if err != nil || !strings.Contains(string(report), "bus bandwidth") {
				t.Errorf("%v: the report has no time of the all-reduce", err)
			}
		})
	}
}
