package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// TestProgram runs the program as one process and as several.
func TestProgram(t *testing.T) {
	for processes := 1; processes <= 2; processes++ {
		out := ""
		if ranks := fmt.Sprint(4 / processes); processes == 1 {
			out = exampletest.Run(t, "-ranks", ranks)
		} else {
			out = strings.Join(exampletest.Workers(t, processes, "-ranks", ranks), "")
		}
		if n := strings.Count(out, ": [6 4 2], in the processes ["); n != 4 {
			t.Errorf("%d processes: %d sums in\n%s", processes, n, out)
		}
	}
}
