package etcd_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/etcd"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// buildLockstep builds the command as released.
func buildLockstep(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lockstep")
	build := exec.Command("go", "build", "-o", path, "./cmd/lockstep")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// output collects what processes write.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *output) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *output) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestNode0IsReplaced: with everything in etcd, the loss of node 0 does not end a job: another agent takes its place,
// and the training ends with the weights of an undisturbed one.
func TestNode0IsReplaced(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs a system on which workers end with their lockstep run")
	}
	if testing.Short() {
		t.Skip("builds the command, trains twice and waits until a node is lost; go test ./... in this module runs it, as " +
			".ci/run does")
	}
	lockstep, dir := buildLockstep(t), t.TempDir()
	training := []string{"train", "--model", "mlp", "--global-batch", "24", "--steps", "500", "--progress", "none"}
	alone := filepath.Join(dir, "alone.json")
	if out, err := exec.Command(lockstep, append(training, "--replicas", "2", "--summary",
		alone)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	address, key := cluster(t), secret.New().Text()
	snapshots, summary := filepath.Join(dir, "snapshots"), filepath.Join(dir, "summary.json")
	node := func(n int) (*exec.Cmd, *output) {
		args := []string{
			"run", "--nnodes", "2", "--node-rank", fmt.Sprint(n), "--rdzv-backend", "etcd", "--rdzv-endpoint", address,
			"--local-addr", "127.0.0.1", "--max-restarts", "3",
			"--heartbeat-timeout", "5s", "--grace", "1s", "--", lockstep,
		}
		args = append(append(args, training...), "--strategy", "multi-worker", "--replicas", "1", "--heartbeat-timeout", "5s",
			"--summary", summary, "--checkpoint-dir", snapshots, "--save-every", "10")
		cmd, out := exec.CommandContext(t.Context(), lockstep, args...), &output{}
		cmd.Env = append(os.Environ(), "LOCKSTEP_SECRET="+key)
		cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, time.Minute
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, out
	}
	first, firstSaid := node(0)
	second, secondSaid := node(1)
	for {
		if found, _ := filepath.Glob(filepath.Join(snapshots, "snapshot-*-step-*")); len(found) > 0 {
			break
		}
		if time.Sleep(10 * time.Millisecond); first.ProcessState != nil {
			t.Fatalf("it does not train:\n%s\n%s", firstSaid, secondSaid)
		}
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	other, otherSaid := node(0)
	for n, cmd := range []*exec.Cmd{other, second} {
		if err := cmd.Wait(); err != nil {
			t.Errorf("node %d: %v", n, err)
		}
	}
	if got, want := weightsHash(t, summary), weightsHash(t, alone); got != want {
		t.Errorf("weights %s, want %s", got, want)
	}
	for _, want := range []string{fmt.Sprintf("pid %d) is lost", first.Process.Pid), "restart 1 of 3"} {
		if !strings.Contains(secondSaid.String(), want) {
			t.Errorf("not output: %q", want)
		}
	}
	if !strings.Contains(otherSaid.String(), "resumed") {
		t.Error("the new node 0 has not resumed the training")
	}
	if t.Failed() {
		t.Logf("node 0:\n%s\nits successor:\n%s\nnode 1:\n%s", firstSaid, otherSaid, secondSaid)
	}
	s, err := rendezvous.Open(t.Context(), "etcd://"+address+"/lockstep", rendezvous.Config{Schemes: etcd.Schemes()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if left, _, err := s.List(t.Context(), ""); err != nil || len(left) != 1 ||
		left[0].Key != "=launch/lockstep/event/ended" {
		t.Errorf("left in etcd: %v, %v; want how the job ended", left, err)
	}
}

func weightsHash(t *testing.T, file string) string {
	t.Helper()
	var s struct {
		WeightsHash string `json:"weights_hash"`
	}
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil || s.WeightsHash == "" {
		t.Errorf("no hash in %s: %v, %s", file, err, text)
	}
	return s.WeightsHash
}
