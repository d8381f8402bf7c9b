package main

import (
	"regexp"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

var last = regexp.MustCompile(`(?m)^2 replicas, weights ([0-9a-f]{64})$`)

// One process of two replicas, and two processes of one replica that TF_CONFIG lists, train the same weights.
func TestProgram(t *testing.T) {
	alone, out := exampletest.Command(t, nil, "-replicas", "2")
	if err := alone.Run(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := last.FindSubmatch(out.Bytes())
	if want == nil {
		t.Fatalf("got\n%s", out)
	}
	outs := exampletest.Workers(t, 2)
	if got := last.FindStringSubmatch(outs[0]); got == nil || got[1] != string(want[1]) {
		t.Errorf("got\n%s, want the weights %s", outs[0], want[1])
	}
	if last.MatchString(outs[1]) {
		t.Errorf("a worker that is not the chief printed\n%s", outs[1])
	}
}
