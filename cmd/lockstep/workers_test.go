//go:build unix

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/root"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// workerProcess is one worker of a job, and its result.
type workerProcess struct {
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer
	code           int
	took           time.Duration
}

// job configures how a test starts lockstep train as several workers.
type job struct {
	flags []string                  // of all workers
	own   func(worker int) []string // flags of one
	env   func(worker int) []string // environment that describes the job to a worker
	watch func(worker int, line string, p *workerProcess)
}

// start runs the workers of a job and returns when all have exited.
func (j job) start(t *testing.T, workers int) []*workerProcess {
	t.Helper()
	var done sync.WaitGroup
	all := make([]*workerProcess, workers)
	for w := range all {
		args := append([]string{"train", "--strategy", "multi-worker", "--rdzv-timeout", "5m"}, j.flags...)
		if j.own != nil {
			args = append(args, j.own(w)...)
		}
		p := &workerProcess{cmd: clitest.Process(t, args...)}
		p.cmd.Env = append(p.cmd.Env, "GOMAXPROCS=1")
		if j.env != nil {
			p.cmd.Env = append(p.cmd.Env, j.env(w)...)
		}
		p.cmd.Stderr = &p.stderr
		out, err := p.cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if err := p.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all[w] = p
		done.Go(func() {
			for s := bufio.NewScanner(out); s.Scan(); {
				fmt.Fprintln(&p.stdout, s.Text())
				if j.watch != nil {
					j.watch(w, s.Text(), p)
				}
			}
			p.code, p.took = clitest.ExitCode(p.cmd.Wait()), time.Since(begin)
		})
	}
	done.Wait()
	return all
}

func (p *workerProcess) String() string {
	return fmt.Sprintf("exit code %d after %v, standard output:\n%s\nstandard error:\n%s", p.code, p.took, &p.stdout,
		&p.stderr)
}

// tfConfig describes a job to its workers by TF_CONFIG.
func tfConfig(t *testing.T, workers int) func(int) []string {
	t.Helper()
	var addresses []string
	for range workers {
		addresses = append(addresses, fmt.Sprintf("127.0.0.1:%d", freeport.Take(t, 2)))
	}
	return func(w int) []string {
		text, err := json.Marshal(map[string]any{
			"cluster": map[string][]string{"worker": addresses},
			"task":    map[string]any{"type": "worker", "index": w},
		})
		if err != nil {
			t.Error(err)
		}
		return []string{"TF_CONFIG=" + string(text)}
	}
}

// small is a short training, whose batches do not divide evenly.
var small = []string{"--model", "mlp", "--hidden", "64", "--global-batch", "61", "--steps", "2"}

// hashOfOne trains in one process.
func hashOfOne(t *testing.T, replicas int) string {
	t.Helper()
	s, _ := clitest.Train(t, append([]string{"--replicas", fmt.Sprint(replicas)}, small...)...)
	return s["weights_hash"].(string)
}

// wantHash compares the summary of a job's chief, and the output of all workers, with a hash.
func wantHash(t *testing.T, all []*workerProcess, dir, want string) {
	t.Helper()
	for w, p := range all {
		if p.code != 0 || !strings.Contains(p.stdout.String(), want) {
			t.Errorf("worker %d: %v\nwant the weights hash %s", w, p, want)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil || !strings.Contains(string(text), `"weights_hash": "`+want) {
		t.Errorf("the chief wrote %s, %v", text, err)
	}
}

// summaryHash reads the hash of the weights from a summary.
func summaryHash(t *testing.T, file string) string {
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

// TestSources: workers join one job by every source of its description, and each worker prints its source.
func TestSources(t *testing.T) {
	race.SkipTimed(t, "a job for each launcher")
	port := freeport.Take(t, 2)
	endpoint := fmt.Sprintf("127.0.0.1:%d", port)
	want := hashOfOne(t, 2)
	for _, c := range []struct {
		by     string
		source string
		env    func(w int) []string
		own    func(w int) []string
	}{
		{"TF_CONFIG", "by TF_CONFIG", tfConfig(t, 2), nil},
		{"Slurm", "by Slurm", func(w int) []string {
			return []string{
				"SLURM_JOB_ID=" + fmt.Sprint(os.Getpid()), "SLURM_STEP_ID=0", fmt.Sprintf("SLURM_PROCID=%d", w),
				"SLURM_STEP_NUM_TASKS=2", "SLURM_NTASKS=2",
				fmt.Sprintf("SLURM_LOCALID=%d", w), "SLURM_NODEID=0", "SLURM_STEP_NUM_NODES=1", "SLURM_STEP_TASKS_PER_NODE=2",
				"SLURM_STEP_NODELIST=localhost",
			}
		}, nil},
		{"flags", "by flags", nil, func(w int) []string {
			return []string{"--worker", fmt.Sprint(w), "--workers", "2", "--rdzv-endpoint", endpoint}
		}},
		{"torchrun", "by torchrun", func(w int) []string {
			return []string{
				fmt.Sprintf("RANK=%d", w), "WORLD_SIZE=2", fmt.Sprintf("LOCAL_RANK=%d", w), "LOCAL_WORLD_SIZE=2",
				"MASTER_ADDR=127.0.0.1",
				fmt.Sprintf("MASTER_PORT=%d", port), "TORCHELASTIC_RUN_ID=test",
			}
		}, nil},
	} {
		t.Run(c.by, func(t *testing.T) {
			dir := t.TempDir()
			all := job{
				flags: append([]string{"--replicas", "1", "--progress", "none", "--out", dir}, small...), own: c.own, env: c.env,
			}.start(t, 2)
			wantHash(t, all, dir, want)
			for w, p := range all {
				if first, _, _ := strings.Cut(p.stdout.String(), "\n"); !strings.HasPrefix(first,
					fmt.Sprintf("worker %d of 2", w)) || !strings.HasSuffix(first, c.source) {
					t.Errorf("worker %d begins with %q", w, first)
				}
			}
		})
	}
}

// TestWorkersThatDiffer: different options, data or models are an error on every worker, which names the difference and
// the worker.
func TestWorkersThatDiffer(t *testing.T) {
	t.Parallel()
	weights := filepath.Join(t.TempDir(), "weights")
	root := root.New()
	root.SetOut(&strings.Builder{})
	root.SetArgs([]string{
		"train", "--replicas", "1", "--model", "cnn", "--steps", "1", "--global-batch", "8",
		"--progress", "none", "--out", weights,
	})
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		flags []string // of worker 1
		want  string
	}{
		{
			[]string{"--global-batch", "60"},
			`--global-batch is "61" for worker 0 (host HOST, pid PID) and worker 2 (host HOST, pid PID), ` +
				`but "60" for worker 1 (host HOST, pid PID)`,
		},
		{[]string{"--weights", filepath.Join(weights, "weights.safetensors")}, `--weights is "not given" for worker 0`},
		{[]string{"--data", "mnist", "--data-dir", "absent"}, `--data is "digits" for worker 0`},
		{[]string{"--hidden", "32"}, `--hidden is "[64]" for worker 0`},
		{[]string{"--seed", "2"}, `--seed is "1" for worker 0`},
	}
	if testing.Short() {
		cases = cases[:2]
	}
	for _, c := range cases {
		t.Run(c.flags[0], func(t *testing.T) {
			all := job{
				flags: append([]string{"--replicas", "1"}, small...), env: tfConfig(t, 3),
				own: func(w int) []string {
					if w == 1 {
						return c.flags
					}
					return nil
				},
			}.start(t, 3)
			for w, p := range all {
				text := hostAndPID.ReplaceAllString(p.stderr.String(), "(host HOST, pid PID)")
				if p.code != cli.ExitError || !strings.Contains(text, c.want) {
					t.Errorf("worker %d: %v\nwant %s", w, p, c.want)
				}
			}
		})
	}
}

var hostAndPID = regexp.MustCompile(`\(host [^,]+, pid \d+\)`)

// TestFailingWorker: the failure of one worker ends the waits of the others, with its reason.
func TestFailingWorker(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		bad   int
		flags []string // of that worker
		want  string
	}{
		{"the chief cannot write", 0, []string{"--out", "/dev/null/out"}, "/dev/null: not a directory"},
		{"no weights", 1, []string{"--weights", "absent"}, "stat absent: no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := job{
				flags: append([]string{"--replicas", "1"}, small...), env: tfConfig(t, 2),
				own: func(w int) []string {
					if w == c.bad {
						return c.flags
					}
					if c.name == "no weights" {
						return []string{"--weights", "absent"}
					}
					return nil
				},
			}.start(t, 2)
			for w, p := range all {
				if p.code != cli.ExitError || !strings.Contains(p.stderr.String(), c.want) || p.took > 3*time.Minute {
					t.Errorf("worker %d: %v\nwant %s", w, p, c.want)
				}
			}
		})
	}
}

// TestInterruptOneWorker: a signal to any worker stops an endless training on all workers after the same step, and the
// chief writes the results.
func TestInterruptOneWorker(t *testing.T) {
	t.Parallel()
	for target := range 2 {
		if testing.Short() && target == 0 {
			continue
		}
		t.Run(fmt.Sprintf("worker %d", target), func(t *testing.T) {
			dir := t.TempDir()
			begun := make(chan struct{})
			var once sync.Once
			var processes [2]*os.Process
			var known sync.WaitGroup
			known.Add(2)
			go func() {
				<-begun
				known.Wait()
				if err := processes[target].Signal(syscall.SIGTERM); err != nil {
					t.Error(err)
				}
			}()
			all := job{
				flags: append(clitest.TinyTable(t), "--replicas", "1", "--global-batch", "20", "--epochs", "1000000", "--progress",
					"plain", "--out", dir),
				env: tfConfig(t, 2),
				watch: func(w int, line string, p *workerProcess) {
					if strings.HasPrefix(line, "worker ") && processes[w] == nil {
						processes[w] = p.cmd.Process
						known.Done()
					}
					// both workers have trained an epoch: no worker is still comparing
					if strings.HasPrefix(line, "epoch 1/1000000:") {
						once.Do(func() { close(begun) })
					}
				},
			}.start(t, 2)
			var s struct {
				Interrupted bool
				Steps       int
				WeightsHash string `json:"weights_hash"`
			}
			text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
			if err != nil {
				t.Fatalf("%v\n%v\n%v", err, all[0], all[1])
			}
			if err := json.Unmarshal(text, &s); err != nil {
				t.Fatal(err)
			}
			if p := all[1-target]; !strings.Contains(p.stderr.String(), "stopped by an interrupt of another worker") {
				t.Errorf("worker %d does not report why it stopped: %v", 1-target, p)
			}
			for w, p := range all {
				if p.code != cli.ExitInterrupted || !strings.Contains(p.stdout.String(), s.WeightsHash) {
					t.Errorf("worker %d: %v", w, p)
				}
			}
			if end := fmt.Sprintf("%s, weights hash %s", cli.Count(s.Steps, "step"), s.WeightsHash); !s.Interrupted ||
				!strings.Contains(all[1].stdout.String(), end) {
				t.Errorf("the chief prints %s, the other %v", text, all[1])
			}
		})
	}
}

// TestMissingWorker: the error of a rendezvous timeout names the missing worker.
func TestMissingWorker(t *testing.T) {
	race.SkipTimed(t, "waits until a rendezvous times out")
	by := tfConfig(t, 3)
	all := job{
		flags: append([]string{"--replicas", "1", "--rdzv-timeout", "10s"}, small...),
		env:   func(w int) []string { return by(2 * w) },
	}.start(t, 2)
	for w, p := range all {
		if p.code != cli.ExitError || !strings.Contains(p.stderr.String(), "worker 1") || p.took > 3*time.Minute {
			t.Errorf("worker %d: %v\nwant an error that names worker 1", 2*w, p)
		}
	}
}
