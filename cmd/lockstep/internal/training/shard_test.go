//go:build unix

package training

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestShardedWorkers checks that four processes with a sharded optimizer make the weights of four without, and of one
// process. One of them is killed while it writes its part of a snapshot: the others end with an error that names it,
// the earlier snapshots stay valid, and the job resumes from them to the same weights.
func TestShardedWorkers(t *testing.T) {
	race.SkipTimed(t, "jobs of four processes")
	dir := t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	training := func(more ...string) (args []string, summary string) {
		files++
		summary = filepath.Join(dir, strconv.Itoa(files))
		return append([]string{
			"train", "--data", "text", "--layers", "2", "--width", "192", "--positions", "16", "--global-batch", "8",
			"--steps", "6", "--test-split", "0.001", "--progress", "none", "--summary", summary,
		}, more...), summary
	}
	workers := func(more ...string) (args []string, summary string) {
		args, summary = training(append(more, "--replicas", "1", "--strategy", "multi-worker")...)
		return append([]string{"run", "--nproc-per-node", "4", "--", exe}, args...), summary
	}
	finish := func(args []string, summary string) (s summary) {
		if out, err := clitest.Process(t, args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		text, err := os.ReadFile(summary)
		if err == nil {
			err = json.Unmarshal(text, &s)
		}
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	want := finish(training("--replicas", "4"))
	off := finish(workers("--shard-optimizer", "off"))
	if off.ShardOptimizer || off.WeightsHash != want.WeightsHash {
		t.Errorf("four workers: %+v, want the weights of one process: %s", off, want.WeightsHash)
	}

	snapshots := filepath.Join(dir, "snapshots")
	sharded := []string{"--shard-optimizer", "on", "--checkpoint-dir", snapshots, "--save-every", "1", "--keep", "-1"}
	const victim = 2
	args, _ := workers(sharded...)
	out, before := killWhileWriting(t, victim, snapshots, args)
	for w := range 4 {
		if w != victim && !regexp.MustCompile(`\[rank`+strconv.Itoa(w)+`\].*worker 2`).MatchString(out) {
			t.Errorf("worker %d does not name worker %d:\n%s", w, victim, out)
		}
	}
	after, err := checkpoint.List(snapshots)
	if err != nil || !slices.Equal(after, before) {
		t.Errorf("the snapshots are %v, %v, want %v", after, err, before)
	}
	for _, path := range after {
		if _, err := checkpoint.ReadSnapshot(path); err != nil {
			t.Error(err)
		}
	}

	on := finish(workers(sharded...))
	if !on.ShardOptimizer || on.WeightsHash != want.WeightsHash || on.Steps != want.Steps {
		t.Errorf("resumed: %+v, want the weights of one process: %s", on, want.WeightsHash)
	}
	if share := float64(on.OptimizerBytes) / float64(off.OptimizerBytes); share < 0.2 || share > 0.3 {
		t.Errorf("%d bytes of slots, want about a quarter of %d", on.OptimizerBytes, off.OptimizerBytes)
	}
	if s, refused, err := checkpoint.Latest(snapshots); err != nil || refused != nil || s.Step != int64(want.Steps) {
		t.Errorf("the newest snapshot is %+v, refused %v, %v", s, refused, err)
	}
	if left, _ := filepath.Glob(filepath.Join(snapshots, ".snapshot*")); left != nil {
		t.Errorf("%v is left", left)
	}
}

// killWhileWriting runs a job, and kills a worker while it writes its part of a snapshot that is not the first. It
// returns the output of the job, which must fail, and the snapshots that were complete when the worker was killed.
func killWhileWriting(t *testing.T, victim int, dir string, args []string) (out string, complete []string) {
	t.Helper()
	cmd := clitest.Process(t, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	worker := regexp.MustCompile(fmt.Sprintf(`worker %d \(rank \d, host .*, pid (\d+)\)$`, victim))
	ctx, ended := context.WithCancel(t.Context())
	var killing sync.WaitGroup
	var lines []string
	for s := bufio.NewScanner(stdout); s.Scan(); {
		lines = append(lines, s.Text())
		if m := worker.FindStringSubmatch(s.Text()); m != nil {
			pid, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			killing.Go(func() { complete = killWriter(ctx, pid, dir, fmt.Sprintf("state-%05d.safetensors", victim)) })
		}
	}
	ended()
	killing.Wait()
	err = cmd.Wait()
	out = strings.Join(lines, "\n") + "\n" + stderr.String()
	if complete == nil {
		t.Fatalf("the job ended before worker %d was seen writing: %v\n%s", victim, err, out)
	}
	if err == nil {
		t.Errorf("the job succeeded without worker %d:\n%s", victim, out)
	}
	return out, complete
}

// killWriter kills a process that has created its file of the given name in a new snapshot, and has not yet written all
// of it. It returns the snapshots that are complete then, or nil if ctx ended before.
func killWriter(ctx context.Context, pid int, dir, name string) []string {
	for ; ctx.Err() == nil; time.Sleep(100 * time.Microsecond) {
		complete, _ := checkpoint.List(dir)
		writing, _ := filepath.Glob(filepath.Join(dir, ".snapshot*", name))
		if len(complete) == 0 || len(writing) == 0 || syscall.Kill(pid, syscall.SIGSTOP) != nil {
			continue
		}
		time.Sleep(time.Millisecond) // a write in progress ends
		whole, err := os.Stat(filepath.Join(complete[0], name))
		part, err2 := os.Stat(writing[0])
		if err == nil && err2 == nil && part.Size() < whole.Size() {
			complete, _ = checkpoint.List(dir) // the one before may have been completed meanwhile
			_ = syscall.Kill(pid, syscall.SIGKILL)
			return complete
		}
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	return nil
}
