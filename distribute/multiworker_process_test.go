package distribute_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// A test with real processes runs this test binary again, as a worker: "1 of 1,3 by tcp".
const workerEnv = "LOCKSTEP_DISTRIBUTE_TEST_WORKER"

type twoWays struct {
	io.Reader
	io.Writer
}

// workerMain is the main function of a worker: it runs jobProgram and prints the result.
func workerMain(text string) {
	result, err := workerJob(text)
	if err != nil {
		result = "error: " + err.Error()
	}
	fmt.Println(strconv.Quote(result))
}

func workerJob(text string) (string, error) {
	var worker int
	var layout, by string
	if _, err := fmt.Sscanf(text, "%d of %s by %s", &worker, &layout, &by); err != nil {
		return "", err
	}
	by, dies := strings.CutSuffix(by, deathSuffix)
	var ranks []int
	var tasks []string
	size := 0
	for w, text := range strings.Split(layout, ",") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return "", err
		}
		for range n {
			if w == worker {
				ranks = append(ranks, size)
			}
			size++
		}
		tasks = append(tasks, fmt.Sprintf("host%d:1", w))
	}
	ends, err := mixed.Open(context.Background(), mixed.Config{
		Ranks: ranks, Size: size, Exchange: mixed.Through(twoWays{os.Stdin, os.Stdout}), NoSharedMemory: by == "tcp",
		TCP: tcp.Config{Logger: slog.New(slog.DiscardHandler)},
	})
	if err != nil {
		return "", err
	}
	group, err := collective.Open(ends, collective.Config{Timeout: workerTimeout})
	if err != nil {
		return "", err
	}
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Resolver: &cluster.Simple{
			Cluster: cluster.NewSpec(map[string][]string{"worker": tasks}),
			This:    &cluster.Task{Type: "worker", Index: worker},
		},
		Group: group, LogicalCPUs: len(ranks), Devices: shortNames(len(ranks)),
		Options: distribute.Options{Timeout: workerTimeout},
	})
	if err != nil {
		return "", errors.Join(err, group.Close())
	}
	if dies {
		result, err := dyingProgram(context.Background(), s, worker)
		return result, errors.Join(err, s.Close())
	}
	result, err := jobProgram(context.Background(), s)
	if err == nil {
		fmt.Println(strconv.Quote(result))
		io.Copy(io.Discard, os.Stdin) // until all workers are done
	}
	return "closed", errors.Join(err, s.Close())
}

// deathSuffix of the transport makes a worker run dyingProgram.
const deathSuffix = "+death"

// dyingProgram runs steps with several buckets in flight, in one of which worker 1 kills itself. On other workers it
// returns how that step failed.
func dyingProgram(ctx context.Context, s *distribute.Strategy, worker int) (string, error) {
	const lastStep = 3
	var buckets []distribute.Bucket
	for range 3 {
		buckets = append(buckets, onesBucket(1, 100_000, 7))
	}
	run := func(step int) error {
		_, err := distribute.Run(ctx, s,
			func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
				if err := sumConcurrently(ctx, r); err != nil {
					return struct{}{}, err
				}
				for k, b := range buckets {
					if _, err := r.StartAllReduce(ctx, distribute.Sum, b); err != nil {
						return struct{}{}, err
					}
					if worker == 1 && step == lastStep && k == 1 {
						p, err := os.FindProcess(os.Getpid())
						if err != nil {
							return struct{}{}, err
						}
						return struct{}{}, errors.Join(p.Kill(), errors.New("alive after Kill"))
					}
				}
				return struct{}{}, nil // the Run awaits the buckets
			}, nil)
		return err
	}
	for step := range lastStep {
		if err := run(step); err != nil {
			return "", err
		}
	}
	err := run(lastStep)
	var before []*tensor.Tensor
	for _, b := range buckets {
		before = append(before, b.Dst[0].Clone())
	}
	time.Sleep(20 * time.Millisecond)
	for k, b := range buckets {
		if !b.Dst[0].Equal(before[k]) {
			return "", fmt.Errorf("bucket %d changed after the Run", k)
		}
	}
	if !errors.Is(err, distribute.ErrPeerLost) {
		return "", fmt.Errorf("after the death of worker 1: got %w, want ErrPeerLost", err)
	}
	return "lost", nil
}

// TestWorkerDiesWithBucketsInFlight: a worker process that dies while buckets are in flight fails the step on the other
// worker, whose memory does not change any more.
func TestWorkerDiesWithBucketsInFlight(t *testing.T) {
	for _, by := range []string{"shm", "tcp"} {
		t.Run(by, func(t *testing.T) {
			if by == "shm" && shm.HostID() == "" {
				t.Skip("processes cannot share memory on this system")
			}
			talks, _ := launchWorkers(t, "1,1", by+deathSuffix)
			if got := nextLine(t, bufio.NewReader(talks[0])); got != "lost" {
				t.Errorf("worker 0: %s", got)
			}
		})
	}
}

func shortNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("CPU:%d", i)
	}
	return names
}

// Two processes, over shared memory or a network, get the bits of one process with as many replicas.
func TestWorkerProcesses(t *testing.T) {
	want, err := jobProgram(t.Context(), mirrored(t, 4))
	if err != nil {
		t.Fatal(err)
	}
	for _, by := range []string{"shm", "tcp"} {
		for _, layout := range []string{"2,2", "1,3"} {
			t.Run(by+" "+layout, func(t *testing.T) {
				if by == "shm" && shm.HostID() == "" {
					t.Skip("processes cannot share memory on this system")
				}
				for w, got := range startWorkers(t, layout, by) {
					if got != want {
						t.Errorf("worker %d: got\n%s\nwant\n%s", w, got, want)
					}
				}
			})
		}
	}
}

// launchWorkers runs a process for each worker, and returns how to talk to them and how to end their input.
func launchWorkers(t *testing.T, layout, by string) (talks []io.ReadWriter, ends []func() error) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for w := range strings.Split(layout, ",") {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d of %s by %s", workerEnv, w, layout, by))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill() // it may have exited
			_ = cmd.Wait()
		})
		talks = append(talks, twoWays{out, in})
		ends = append(ends, in.Close)
	}
	if err := mixed.Collect(talks); err != nil {
		t.Fatal(err)
	}
	return talks, ends
}

// startWorkers runs a process for each worker and returns their output.
func startWorkers(t *testing.T, layout, by string) (results []string) {
	talks, ends := launchWorkers(t, layout, by)
	lines := make([]*bufio.Reader, len(talks))
	for w, talk := range talks {
		lines[w] = bufio.NewReader(talk)
		results = append(results, nextLine(t, lines[w]))
	}
	for w, end := range ends {
		if err := end(); err != nil {
			t.Error(err)
		}
		if last := nextLine(t, lines[w]); last != "closed" {
			t.Errorf("worker %d ends with %s", w, last)
		}
	}
	return results
}

func nextLine(t *testing.T, from *bufio.Reader) string {
	line, err := from.ReadString('\n')
	if err != nil {
		t.Fatalf("a worker printed %q and ended: %v", line, err)
	}
	text, err := strconv.Unquote(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("a worker printed %q: %v", line, err)
	}
	return text
}
