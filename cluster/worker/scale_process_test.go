//go:build unix

package worker_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/formula"
)

// manyProcesses is how many processes TestManyProcesses starts. 512 take about a minute on two cores.
var manyProcesses = flag.Int("processes", 48, "processes of TestManyProcesses")

// barriersEach is how many barriers each process makes.
const barriersEach = 100

// usage is what a process of TestManyProcesses prints.
type usage struct {
	Join, Barriers time.Duration
	Files          int // open file descriptors after the barriers
	Resident       int // KiB, of which Shared are also other processes'
	Shared         int
}

// barriers makes barriers and returns what the process uses.
func (c *child) barriers(ctx context.Context, w *worker.Worker, joined time.Duration) (string, error) {
	begin := time.Now()
	for range barriersEach {
		if err := w.Group().Local()[0].Do(ctx, &collective.Call{Op: collective.Barrier}); err != nil {
			return "", err
		}
	}
	u := usage{Join: joined, Barriers: time.Since(begin)}
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return "", err
	}
	u.Files = len(files)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		kib := 0
		fmt.Sscanf(value, "%d kB", &kib)
		switch name {
		case "VmRSS":
			u.Resident = kib
		case "RssFile", "RssShmem":
			u.Shared += kib
		}
	}
	text, err := json.Marshal(u)
	return string(text), err
}

// TestManyProcesses starts many processes on this host, which join one job and make barriers. Each has a descriptor for
// each other one, and little memory.
func TestManyProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: many processes")
	}
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc and shared memory")
	}
	n := *manyProcesses
	server, err := rendezvous.Serve(t.Context(), rendezvous.ServerConfig{Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	begin := time.Now()
	var processes []*process
	for i := range n {
		processes = append(processes, startBy(t, child{
			Worker: i, Workers: n, Replicas: 1, Store: "tcp://" + server.Addr(), Hosted: true, Job: t.Name(), Do: "barriers",
			Rendezvous: 5 * time.Minute, Heartbeat: 2 * time.Minute, Timeout: 5 * time.Minute,
			Quiet: true,
		}, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "GOMAXPROCS=1") }))
	}
	var join, barriers []time.Duration
	var files, resident, own []int
	for _, p := range processes {
		var u usage
		if text := p.says(t, "done"); json.Unmarshal([]byte(text), &u) != nil {
			t.Fatalf("a process printed %q", text)
		}
		join, barriers = append(join, u.Join), append(barriers, u.Barriers)
		files, resident, own = append(files, u.Files), append(resident, u.Resident), append(own, u.Resident-u.Shared)
	}
	t.Logf("%d processes, from the first start to the last end: %v", n, time.Since(begin).Round(time.Millisecond))
	t.Logf("join: median %v, longest %v", middle(join).Round(time.Millisecond), slices.Max(join).Round(time.Millisecond))
	t.Logf("%d barriers: longest %v, %v each", barriersEach, slices.Max(barriers).Round(time.Millisecond),
		(slices.Max(barriers) / barriersEach).Round(time.Microsecond))
	t.Logf("open files: median %d, most %d (worker 0 has the connections of the set-up)", middle(files), slices.Max(files))
	t.Logf("resident: median %d KiB, of which %d KiB are not shared; largest %d KiB", middle(resident), middle(own),
		slices.Max(resident))
	formula.Row(t, fmt.Sprintf("%d processes: open files of the median one", n), middle(files), n+40, "at most n + 40")
	formula.Row(t, fmt.Sprintf("%d processes: its memory that is not shared, KiB", n), middle(own), 16<<10+4*n,
		"at most 16 MiB + 4 KiB n")
	if got, most := middle(files), n+40; got > most {
		t.Errorf("%d open files in a process of %d, want at most %d", got, n, most)
	}
	if got, most := middle(own), 16<<10+4*n; got > most {
		t.Errorf("%d KiB of memory in a process of %d, want at most %d: 16 MiB and 4 KiB for each other process", got, n,
			most)
	}
}

func middle[T int | time.Duration](values []T) T {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}
