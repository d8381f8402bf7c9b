package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSums runs the program over goroutines and over processes.
func TestSums(t *testing.T) {
	program := filepath.Join(t.TempDir(), "collective")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, processes := range []string{"1", "2", "4"} {
		out, err := exec.Command(program, "-processes", processes).CombinedOutput()
		if n := strings.Count(string(out), ": [6 4 2]\n"); err != nil || n != ranks {
			t.Errorf("%s processes: %v, %d sums in\n%s", processes, err, n, out)
		}
	}
	if out, err := exec.Command(program, "-processes", "3").CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "want 1, 2 or 4") {
		t.Errorf("3 processes: %v, %s", err, out)
	}
}
