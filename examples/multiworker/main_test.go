package main

import (
	"bytes"
	"fmt"
	"os/exec"
	"regexp"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
	"github.com/lockstep-ml/lockstep/internal/freeport"
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
	var addresses [2]string
	for i := range addresses {
		addresses[i] = fmt.Sprintf("127.0.0.1:%d", freeport.Take(t, 2))
	}
	var workers []*exec.Cmd
	var outs []*bytes.Buffer
	for i := range addresses {
		config := fmt.Sprintf(`{"cluster": {"worker": [%q, %q]}, "task": {"type": "worker", "index": %d}}`, addresses[0],
			addresses[1], i)
		cmd, out := exampletest.Command(t, []string{"TF_CONFIG=" + config})
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		workers, outs = append(workers, cmd), append(outs, out)
	}
	for i, cmd := range workers {
		if err := cmd.Wait(); err != nil {
			t.Fatalf("worker %d: %v\n%s\n%s", i, err, outs[0], outs[1])
		}
	}
	if got := last.FindSubmatch(outs[0].Bytes()); got == nil || !bytes.Equal(got[1], want[1]) {
		t.Errorf("got\n%s, want the weights %s", outs[0], want[1])
	}
	if last.Match(outs[1].Bytes()) {
		t.Errorf("a worker that is not the chief printed\n%s", outs[1])
	}
}
