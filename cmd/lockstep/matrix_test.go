//go:build unix

package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
)

var matrixEngine = flag.String("engine", "go", "engine of TestMatrix; another one has one row only")

// placement is the distribution of the replicas of a job over its processes.
type placement struct {
	name      string
	replicas  int
	processes int
	own       string // of one process, as its shell counts it
}

// matrixRows are the placements of a number of replicas: processes x replicas.
var matrixRows = []placement{
	{"1x4", 4, 1, "4"},
	{"2x2", 4, 2, "2"},
	{"4x1", 4, 4, "1"},
	{"1x5", 5, 1, "5"},
	{"2+3", 5, 2, "$((2 + LOCKSTEP_WORKER))"},
	{"5x1", 5, 5, "1"},
	{"1x6", 6, 1, "6"},
	{"2x3", 6, 2, "3"},
	{"3x2", 6, 3, "2"},
	{"6x1", 6, 6, "1"},
}

// way is the connection between the processes of a job.
type way struct {
	name     string
	hosts    int
	secret   bool
	run      []string // flags of lockstep run
	train    []string // of lockstep train
	links    string   // what the chief must print about its links
	notLinks string   // what it must not print
}

var matrixWays = []way{
	{name: "shared memory", hosts: 1, links: "shm with worker", notLinks: "tcp"},
	{
		name: "TCP", hosts: 1, train: []string{"--no-shared-memory", "--bucket-bytes", "64KiB"}, links: "tcp with worker",
		notLinks: "shm",
	},
	{name: "two hosts, TLS", hosts: 2, secret: true, links: "tcp+tls with worker"},
	{
		name: "two hosts, plain", hosts: 2, run: []string{"--data-plaintext"}, train: []string{"--data-plaintext"},
		links: "tcp with worker", notLinks: "tls",
	},
}

// TestMatrix: a number of replicas gives the same bits in any number of processes, with any connection. It prints the
// hashes.
func TestMatrix(t *testing.T) {
	t.Parallel()
	rows, ways := matrixRows, matrixWays
	switch {
	case *matrixEngine != "go":
		rows, ways = rows[:3], ways[:1]
	case testing.Short():
		rows, ways = rows[:2], ways[:2]
		t.Log("-short: one spread on one host only, each other one takes as long")
	}
	var hosts *twoHosts
	if len(ways) > 2 {
		var why string
		if hosts, why = openHosts(t); hosts == nil {
			t.Logf("two hosts are skipped: %s", why)
			ways = ways[:2]
		}
	}
	var table strings.Builder
	fmt.Fprintf(&table, "\n%-14s%-18s", "placement", "one process")
	for _, w := range ways {
		fmt.Fprintf(&table, "%-18s", w.name)
	}
	want := map[int]string{}
	for _, p := range rows {
		fmt.Fprintf(&table, "\n%-14s", p.name)
		if p.processes == 1 {
			s, _ := clitest.Train(t, append([]string{"--replicas", p.own, "--engine", *matrixEngine}, small...)...)
			want[p.replicas] = s["weights_hash"].(string)
			fmt.Fprintf(&table, "%.14s", want[p.replicas])
			continue
		}
		fmt.Fprintf(&table, "%-18s", "")
		for _, w := range ways {
			hash := "failed"
			t.Run(p.name+"/"+w.name, func(t *testing.T) { hash = placed(t, hosts, p, w, want[p.replicas]) })
			fmt.Fprintf(&table, "%-18.14s", hash)
		}
	}
	t.Log(table.String())
}

var transportRow = regexp.MustCompile(`transport +(.*)`)

// placed trains with a placement, under lockstep run, and returns the hash of the weights.
func placed(t *testing.T, hosts *twoHosts, p placement, w way, want string) string {
	t.Helper()
	dir := t.TempDir()
	all := make([]*workerProcess, w.hosts)
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "LOCKSTEP_SECRET") })
	env = append(env, clitest.AsCommand+"=1", "GOMAXPROCS=1")
	if w.secret {
		env = append(env, "LOCKSTEP_SECRET="+secret.New().Text())
	}
	for host := range all {
		args := placedCommand(t, p, w, host, filepath.Join(dir, "summary.json"))
		if w.hosts > 1 {
			args = append(hosts.at(host), args...)
		}
		o := &workerProcess{cmd: exec.CommandContext(t.Context(), args[0], args[1:]...)}
		o.cmd.Env, o.cmd.Stdout, o.cmd.Stderr = env, &o.stdout, &o.stderr
		o.cmd.Cancel = func() error { return o.cmd.Process.Signal(syscall.SIGTERM) } // ends the workers too
		o.cmd.WaitDelay = 20 * time.Second
		if err := o.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all[host] = o
	}
	output := ""
	for _, o := range all {
		o.code = clitest.ExitCode(o.cmd.Wait())
		output += o.String() + "\n"
		if o.code != 0 {
			t.Errorf("exit code %d", o.code)
		}
	}
	if n := strings.Count(output, "weights hash "+want) + strings.Count(output, "weights hash   "+want); n != p.processes {
		t.Errorf("%d of %d workers have the weights hash %s", n, p.processes, want)
	}
	links := transportRow.FindStringSubmatch(output)
	if links == nil || !strings.Contains(links[1], w.links) || w.notLinks != "" && strings.Contains(links[1], w.notLinks) {
		t.Errorf("the chief's transport is %q, want %q, and not %q", links, w.links, w.notLinks)
	}
	if t.Failed() {
		t.Log(output)
		return "failed"
	}
	return summaryHash(t, filepath.Join(dir, "summary.json"))
}

// placedCommand returns lockstep run on one host.
func placedCommand(t *testing.T, p placement, w way, host int, summary string) []string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	here := (p.processes + w.hosts - 1 - host) / w.hosts
	args := append([]string{exe, "run", "--nproc-per-node", fmt.Sprint(here)}, w.run...)
	if w.hosts > 1 {
		args = append(args, "--nnodes", fmt.Sprint(w.hosts), "--node-rank", fmt.Sprint(host), "--rdzv-endpoint",
			hostsAddress+":29400")
	}
	args = append(args, "--", "sh", "-c", `exec "$0" "$@" --replicas `+p.own, exe, "train", "--strategy", "multi-worker",
		"--engine", *matrixEngine, "--progress", "none", "--heartbeat-timeout", "5m", "--summary", summary)
	return append(append(args, small...), w.train...)
}
