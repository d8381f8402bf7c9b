package main

import (
	"regexp"
	"strconv"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

var result = regexp.MustCompile(`(?m)^test loss [0-9.]+, accuracy ([0-9.]+)$`)

// Two workers train as one process does, and print the same numbers. The program compares the bits of their weights.
func TestProgram(t *testing.T) {
	outs := exampletest.Workers(t, 2, "-steps", "150", "-batch", "16", "-checkpoint", t.TempDir())
	outs = append(outs, exampletest.Run(t, "-steps", "150"))
	for i, out := range outs {
		got := result.FindStringSubmatch(out)
		if got == nil {
			t.Fatalf("got\n%s", out)
		}
		if accuracy, err := strconv.ParseFloat(got[1], 64); err != nil || accuracy < 0.8 {
			t.Errorf("the accuracy is %s, want at least 0.8", got[1])
		}
		if first := result.FindString(outs[0]); i == 1 && got[0] != first {
			t.Errorf("worker 1 prints %q, worker 0 %q", got[0], first)
		}
	}
}
