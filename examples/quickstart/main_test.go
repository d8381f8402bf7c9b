package main

import (
	"regexp"
	"strconv"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestProgram(t *testing.T) {
	out := exampletest.Run(t)
	found := regexp.MustCompile(`(?m)^MirroredStrategy\(.*\): test accuracy (\S+) %$`).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("got\n%s", out)
	}
	if accuracy, err := strconv.ParseFloat(found[1], 64); err != nil || accuracy < 92 {
		t.Errorf("test accuracy %s %%, want at least 92\n%s", found[1], out)
	}
}
