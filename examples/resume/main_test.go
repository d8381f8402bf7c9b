package main

import (
	"regexp"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

var last = regexp.MustCompile(`(?m)^(\d+) steps, weights ([0-9a-f]{64})$`)

// A training that stopped in the middle and was restarted ends with the weights of an uninterrupted one.
func TestProgram(t *testing.T) {
	interrupted, uninterrupted := t.TempDir(), t.TempDir()
	first := last.FindStringSubmatch(exampletest.Run(t, "-dir", interrupted, "-steps", "130"))
	second := last.FindStringSubmatch(exampletest.Run(t, "-dir", interrupted))
	whole := last.FindStringSubmatch(exampletest.Run(t, "-dir", uninterrupted))
	if first == nil || second == nil || whole == nil {
		t.Fatalf("a run printed no hash: %v, %v, %v", first, second, whole)
	}
	if first[1] != "130" || second[1] != "600" || second[0] != whole[0] || first[2] == second[2] {
		t.Errorf("got %q, then %q; uninterrupted %q", first[0], second[0], whole[0])
	}
}
