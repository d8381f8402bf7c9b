package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
	"github.com/lockstep-ml/lockstep/internal/freeport"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// Two processes train with rare, compressed exchanges; the chief prints the loss, which is less than that of guessing.
func TestProgram(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte(strings.Repeat("the cat sat on the mat. ", 400)), 0o600); err != nil {
		t.Fatal(err)
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
		cmd, out := exampletest.Command(t, []string{"TF_CONFIG=" + config}, "-text", text, "-steps", "12",
			"-inner-steps", "4", "-batch", "8", "-width", "16", "-blocks", "1")
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
	line := regexp.MustCompile(`(?m)^inner_steps=4 compress=bfloat16 workers=2 steps=12 loss=([0-9.]+) `)
	m := line.FindSubmatch(outs[0].Bytes())
	if m == nil || outs[1].Len() > 0 && line.Match(outs[1].Bytes()) {
		t.Fatalf("got\n%s\n%s", outs[0], outs[1])
	}
	var loss float64
	if _, err := fmt.Sscan(string(m[1]), &loss); err != nil || loss > 5 { // ln 256 = 5.55
		t.Errorf("the loss is %s: %v", m[1], err)
	}
}
