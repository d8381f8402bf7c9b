package main

import (
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// TestSums runs the program over goroutines and over processes.
func TestSums(t *testing.T) {
	for _, processes := range []string{"1", "2", "4"} {
		out := exampletest.Run(t, "-processes", processes)
		if n := strings.Count(out, ": [6 4 2]\n"); n != ranks {
			t.Errorf("%s processes: %d sums in\n%s", processes, n, out)
		}
	}
	cmd, out := exampletest.Command(t, nil, "-processes", "3")
	if err := cmd.Run(); err == nil || !strings.Contains(out.String(), "want 1, 2 or 4") {
		t.Errorf("3 processes: %v, %s", err, out)
	}
}
