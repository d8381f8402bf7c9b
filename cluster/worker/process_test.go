//go:build unix

package worker_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// A test with real processes runs this test binary again, as a worker.
const childEnv = "LOCKSTEP_WORKER_TEST_CHILD"

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(childEnv); ok {
		childMain(text)
		return
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil { // the processes mostly wait
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// child describes what a process of a test does.
type child struct {
	Worker, Workers, Replicas int
	Store, Job                string
	Secret                    string
	Epoch                     uint32
	Rendezvous, Heartbeat     time.Duration
	Progress, Timeout         time.Duration
	Plain, Apart              bool
	Build                     string
	Steps                     int
	At                        int    // step at which it does something
	Do                        string // what
	Facts                     []rendezvous.Fact
	BytesPerPack              int      // of the strategy
	TCP                       bool     // no shared memory
	Records                   string   // LOCKSTEP_RECORDS
	Temporary                 bool     // the store is removed
	Hosted                    bool     // the test serves the store
	Strategy                  bool     // it trains by a strategy's Runs
	Addresses                 []string // of all workers, as TF_CONFIG lists them
	Quiet                     bool     // its log is printed only if the test fails
}

// config returns the child's configuration.
func (c *child) config() (worker.Config, error) {
	cfg := worker.Config{
		Job: &cluster.Job{
			Source: "a test", ID: c.Job, Worker: c.Worker, Workers: c.Workers, Store: c.Store,
			Epoch: c.Epoch, LocalWorker: -1, StoreTemporary: c.Temporary, Hosted: c.Hosted,
		},
		Replicas: c.Replicas, RendezvousTimeout: c.Rendezvous, HeartbeatTimeout: c.Heartbeat, ProgressTimeout: c.Progress,
		DataPlaintext: c.Plain, Build: c.Build, NoSharedMemory: c.TCP,
		Collective: collective.Config{Timeout: c.Timeout},
		Logger:     slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Getenv: func(name string) (string, bool) {
			if name != cluster.EnvRecords || c.Records == "" {
				return "", false
			}
			return c.Records, true
		},
	}
	if c.Addresses != nil {
		cfg.Job.Spec, cfg.Job.Task = cluster.NewSpec(map[string][]string{cluster.Worker: c.Addresses}),
			cluster.Task{Type: cluster.Worker, Index: c.Worker}
	}
	if c.Apart {
		cfg.Apart = fmt.Sprint(c.Worker)
	}
	if c.Secret != "" {
		var err error
		if cfg.Secret, err = secret.Parse(c.Secret); err != nil {
			return cfg, err
		}
	}
	return cfg, nil
}

// childMain joins, imitates training, and prints the outcome: "joined", then "done" and a result, or "error" and its
// text.
func childMain(text string) {
	var c child
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		panic(err)
	}
	result, err := c.work()
	if err != nil {
		fmt.Println("kinds", kinds(err))
		fmt.Println("error", strconv.Quote(err.Error()))
		os.Exit(1)
	}
	fmt.Println("done", strconv.Quote(result))
}

// kinds lists the kinds that an error matches.
func kinds(err error) string {
	var out []string
	for name, kind := range map[string]error{
		"collective.ErrPeerLost": collective.ErrPeerLost, "collective.ErrTimeout": collective.ErrTimeout,
		"collective.ErrAborted": collective.ErrAborted,
		"worker.ErrDiffer":      worker.ErrDiffer, "worker.ErrNoSecret": worker.ErrNoSecret,
		"context.DeadlineExceeded": context.DeadlineExceeded,
	} {
		if errors.Is(err, kind) {
			out = append(out, name)
		}
	}
	if join := (*rendezvous.JoinError)(nil); errors.As(err, &join) {
		out = append(out, "rendezvous.JoinError "+string(join.Kind))
	}
	return strings.Join(out, ", ")
}

func (c *child) work() (result string, err error) {
	ctx := context.Background()
	cfg, err := c.config()
	if err != nil {
		return "", err
	}
	begin := time.Now()
	w, err := worker.Join(ctx, cfg)
	if err != nil {
		return "", err
	}
	joined := time.Since(begin)
	fmt.Println("joined", os.Getpid())
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Fail(err))
		}
		err = errors.Join(err, w.Close())
	}()
	if c.Facts != nil {
		if err := w.Compare(ctx, "job", c.Facts); err != nil {
			return "", err
		}
	}
	switch {
	case c.Do == "barriers":
		return c.barriers(ctx, w, joined)
	case c.Strategy:
		return c.run(ctx, w)
	}
	return c.train(ctx, w)
}

// run is train by a strategy.
func (c *child) run(ctx context.Context, w *worker.Worker) (result string, err error) {
	devices := make([]string, c.Replicas)
	for i := range devices {
		devices[i] = fmt.Sprintf("CPU:%d", i)
	}
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Worker: w, Devices: devices, LogicalCPUs: c.Replicas,
		Options: distribute.Options{Timeout: c.Timeout, BytesPerPack: c.BytesPerPack},
	})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	total := float32(0)
	for step := range c.Steps {
		w.Progress(int64(step), "compute")
		sums, err := distribute.Run(ctx, s, func(ctx context.Context, r *distribute.Replica, _ int) (float32, error) {
			if step == c.At && r.ID()+1 == w.Members()[c.Worker].First+c.Replicas {
				if err := c.shown(ctx, w, step); err != nil {
					return 0, err
				}
				if c.Do == "error" {
					return 0, errors.New("it is not right")
				}
				act(c.Do)
			}
			return distribute.AllReduce(ctx, r, distribute.Sum, float32(r.ID()+1)*float32(step+1))
		}, nil)
		if err != nil {
			return "", err
		}
		total += sums[0]
	}
	return fmt.Sprint(total), nil
}

// train sums, over all replicas, a number that depends on the replica and the step.
func (c *child) train(ctx context.Context, w *worker.Worker) (string, error) {
	total := float32(0)
	local := w.Group().Local()
	for step := range c.Steps {
		w.Progress(int64(step), "compute")
		if step == c.At {
			if err := c.shown(ctx, w, step); err != nil {
				return "", err
			}
			if c.Do != "other" {
				act(c.Do)
			}
		}
		name := "gradient"
		if step == c.At && c.Do == "other" {
			name = "other"
		}
		calls := make([]collective.Call, len(local))
		outs := make([][]float32, len(local))
		for i, comm := range local {
			in := []float32{float32(comm.Rank()+1) * float32(step+1)}
			outs[i] = make([]float32, 1)
			calls[i] = collective.Call{
				Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32, Src: tensor.HostMemory(in),
				Dst:      tensor.HostMemory(outs[i]),
				Manifest: &collective.Manifest{Name: name, Shape: []int{1}},
			}
		}
		w.Progress(int64(step), "reduce")
		if err := w.Group().DoAll(ctx, calls); err != nil {
			return "", err
		}
		total += outs[0][0]
	}
	return fmt.Sprint(total), nil
}

// shown waits until the others can see that this worker has reached a step and, with a strategy, that it is in its
// step function.
func (c *child) shown(ctx context.Context, w *worker.Worker, step int) error {
	for {
		entries, _, err := w.Store().List(ctx, rendezvous.Key(c.Job, c.Epoch, "heartbeats")+"/")
		if err != nil {
			return err
		}
		for _, e := range entries {
			r, err := membership.DecodeReport(e.Value)
			if err != nil {
				return err
			}
			for _, h := range r.Workers {
				if h.Worker == c.Worker && h.Step == int64(step) && h.Phase == "compute" &&
					(!c.Strategy || strings.Contains(h.Text, "in its step function")) {
					return nil
				}
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// process is a running child.
type process struct {
	cmd   *exec.Cmd
	lines chan string    // what it prints; closed at its end
	logs  chan string    // what it logs, as far as there is room; closed at its end
	goOn  io.WriteCloser // its standard input
	last  string
	kinds string // of the error that it printed
}

// start runs a child.
func start(t *testing.T, c child) *process {
	t.Helper()
	return startBy(t, c, nil)
}

// startBy is start of a command that a test changes.
func startBy(t *testing.T, c child, change func(*exec.Cmd)) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(exe), lines: make(chan string, 100), logs: make(chan string, 100)}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	if change != nil {
		change(p.cmd)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.goOn, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var read sync.WaitGroup
	read.Go(func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
	})
	read.Go(func() {
		text := ""
		for s := bufio.NewScanner(errs); s.Scan(); {
			text += s.Text() + "\n"
			select {
			case p.logs <- s.Text():
			default:
			}
		}
		close(p.logs)
		if t.Failed() || testing.Verbose() && !c.Quiet {
			t.Logf("worker %d, pid %d:\n%s", c.Worker, p.cmd.Process.Pid, text)
		}
	})
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may be gone
		for range p.lines {
		}
		read.Wait()
		_ = p.cmd.Wait()
	})
	return p
}

// testWait bounds waits for events that must happen: a slow machine must not fail a test.
const testWait = 90 * time.Second

// says waits for the next line that begins with a word, and returns the rest.
func (p *process) says(t *testing.T, word string) string {
	t.Helper()
	timer := time.NewTimer(testWait)
	defer timer.Stop()
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				t.Fatalf("pid %d ended without %q; it last said %q", p.cmd.Process.Pid, word, p.last)
			}
			p.last = line
			first, rest, _ := strings.Cut(line, " ")
			if first == "kinds" {
				p.kinds = rest
			}
			if first == word {
				if text, err := strconv.Unquote(rest); err == nil {
					return text
				}
				return rest
			}
		case <-timer.C:
			t.Fatalf("pid %d does not say %q; it last said %q", p.cmd.Process.Pid, word, p.last)
		}
	}
}

// logged waits until the process logs something that contains a text.
func (p *process) logged(t *testing.T, text string) {
	t.Helper()
	timer := time.NewTimer(testWait)
	defer timer.Stop()
	for {
		select {
		case line, ok := <-p.logs:
			if !ok {
				t.Fatalf("pid %d ended without logging %q", p.cmd.Process.Pid, text)
			}
			if strings.Contains(line, text) {
				return
			}
		case <-timer.C:
			t.Fatalf("pid %d does not log %q", p.cmd.Process.Pid, text)
		}
	}
}

// ends waits until the process has exited.
func (p *process) ends(t *testing.T) {
	t.Helper()
	timer := time.NewTimer(testWait)
	defer timer.Stop()
	for {
		select {
		case _, ok := <-p.lines:
			if !ok {
				return
			}
		case <-timer.C:
			t.Fatalf("pid %d does not end", p.cmd.Process.Pid)
		}
	}
}

// TestJoin: processes join, train and leave.
func TestJoin(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		replicas []int
		change   func(*child)
		file     bool
		named    bool // the store's host is this one's name
		want     string
	}{
		{name: "two workers", replicas: []int{1, 1}, want: "45"},
		{name: "unequal workers, by TCP", replicas: []int{2, 1, 3}, change: func(c *child) { c.TCP = true }, want: "315"},
		{name: "by a folder", replicas: []int{1, 1}, file: true, want: "45"},
		{name: "by this host's name", replicas: []int{1, 1}, named: true, want: "45"},
		{name: "by a strategy", replicas: []int{2, 1}, change: func(c *child) { c.Strategy = true }, want: "90"},
		{
			name: "with a secret", replicas: []int{1, 1},
			change: func(c *child) { c.Secret = strings.Repeat("secret", 6); c.TCP = true }, want: "45",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := freeStore(t)
			folder := filepath.Join(t.TempDir(), "store")
			if test.named {
				host, err := os.Hostname()
				if _, e := net.LookupHost(host); err != nil || e != nil {
					t.Skipf("this host does not know its own name: %v, %v", err, e)
				}
				store = strings.Replace(store, "127.0.0.1", host, 1)
			}
			if test.file {
				store = "file://" + folder
			}
			var all []*process
			for i, n := range test.replicas {
				c := child{
					Worker: i, Workers: len(test.replicas), Replicas: n, Store: store, Job: "join", Steps: 5, At: -1,
					Temporary: test.file,
				}
				if test.change != nil {
					test.change(&c)
				}
				all = append(all, start(t, c))
			}
			for i, p := range all {
				if got := p.says(t, "done"); got != test.want {
					t.Errorf("worker %d: %s, want %s", i, got, test.want)
				}
			}
			all[0].ends(t)
			if _, err := os.Stat(folder); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("left behind: %s, %v", folder, err)
			}
		})
	}
}
