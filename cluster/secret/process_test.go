package secret_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// Tests with real processes run this test binary again, as workers: each with one rank, configured by this variable.
const workerEnv = "LOCKSTEP_SECRET_TEST_WORKER"

func TestMain(m *testing.M) {
	if text := os.Getenv(workerEnv); text != "" {
		w := worker{tapes: &tapes{}}
		w.check(json.Unmarshal([]byte(text), &w))
		w.in = bufio.NewReader(os.Stdin)
		switch w.Role {
		case "flood":
			w.flood()
		case "unrelated":
			w.unrelated()
		default:
			w.live()
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// worker is a process of a job, as the process sees itself.
type worker struct {
	Rank, Size int
	Secret     string
	Encrypt    bool       // between hosts
	Host       string     // workers with equal values are on one host
	Listen     string     // address to listen on; empty: loopback
	Network    [][]string // commands that set up its network namespace
	Role       string     // "flood" or "unrelated" instead of a worker

	in       *bufio.Reader
	tapes    *tapes
	hostiles []hostile // of flood
}

const job = "job under test"

func (w *worker) check(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "rank %d: %v\n", w.Rank, err)
		os.Exit(1)
	}
}

// live joins the others, and executes the parent's commands, one a line.
func (w *worker) live() {
	if len(w.Network) > 0 {
		w.line() // the parent has connected its network namespace
		for _, c := range w.Network {
			if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
				w.check(fmt.Errorf("%s: %w: %s", strings.Join(c, " "), err, out))
			}
		}
	}
	ctx := context.Background()
	group := w.join(ctx)
	comm := group.Local()[0]
	x := make([]float32, elements)
	step := 0
	for {
		var word string
		var a, b int
		fmt.Sscan(w.line(), &word, &a, &b)
		switch word {
		case "train":
			// A new group each time, so that new connections are made.
			sub, err := comm.Split(ctx, 0, w.Rank)
			w.check(err)
			for range a {
				w.check(train(ctx, sub, x, step))
				step++
			}
			w.check(sub.Close())
			w.print(digest(x))
		case "reduce":
			text, err := json.Marshal(w.reduce(ctx, comm, a, b))
			w.check(err)
			w.print(string(text))
		case "bare":
			text, err := json.Marshal(w.bare(ctx, a, b))
			w.check(err)
			w.print(string(text))
		case "report":
			text, err := json.Marshal(use())
			w.check(err)
			w.print(string(text))
		case "spent":
			w.print(spent())
		case "tapes":
			w.print(w.tapes.String())
		case "leave":
			w.check(group.Close())
			w.print("left")
		}
	}
}

func (w *worker) line() string {
	text, err := w.in.ReadString('\n')
	if err != nil {
		os.Exit(0) // the parent has ended, or is finished
	}
	return strings.TrimSpace(text)
}

func (w *worker) print(text string) { fmt.Println(text) }

// join makes a communicator as the workers of a job do.
func (w *worker) join(ctx context.Context) collective.Group {
	s, err := secret.Parse(w.Secret)
	w.check(err)
	cfg := mixed.Config{
		Ranks: []int{w.Rank}, Size: w.Size, Apart: w.Host,
		Exchange: mixed.Through(struct {
			io.Reader
			io.Writer
		}{w.in, os.Stdout}),
		TCP: tcp.Config{
			Job: job, Listen: w.Listen, Authenticate: s.Authenticate(secret.Group, job, 0), Dial: w.tapes.dial,
			Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		},
	}
	if w.Encrypt {
		cfg.TCP.TLS, err = s.TLS(job, 0)
		w.check(err)
	}
	ends, err := mixed.Open(ctx, cfg)
	w.check(err)
	group, err := collective.Open(ends, collective.Config{Timeout: time.Minute})
	w.check(err)
	return group
}

// reduce times all-reduces of that many bytes, and returns the seconds of each.
func (w *worker) reduce(ctx context.Context, comm collective.Communicator, bytes, times int) []float64 {
	x := make([]float32, bytes/4)
	call := &collective.Call{
		Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32,
		Src: tensor.HostMemory(x), Dst: tensor.HostMemory(x),
	}
	var took []float64
	for range times {
		since := time.Now()
		w.check(comm.Do(ctx, call))
		took = append(took, time.Since(since).Seconds())
	}
	return took
}

const elements = 100_003

// train is a step that depends on all steps before: the ranks average their sums.
func train(ctx context.Context, comm collective.Communicator, x []float32, step int) error {
	noise := rand.New(rand.NewPCG(uint64(comm.Rank()), uint64(step)))
	for i := range x {
		x[i] += noise.Float32()
	}
	call := &collective.Call{
		Op: collective.AllReduce, Reduce: collective.Mean, Type: tensor.Float32,
		Src: tensor.HostMemory(x), Dst: tensor.HostMemory(x),
	}
	return comm.Do(ctx, call)
}

func digest(x []float32) string {
	sum := sha256.New()
	binary.Write(sum, binary.LittleEndian, x)
	return hex.EncodeToString(sum.Sum(nil))
}

// trained returns the digest that the ranks of one process have after that many steps.
func trained(t *testing.T, ranks, steps int) string {
	t.Helper()
	group, err := collective.Open(mem.New(ranks), collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	out := make([]string, ranks)
	var wg sync.WaitGroup
	for r, comm := range group.Local() {
		wg.Go(func() {
			x := make([]float32, elements)
			for step := range steps {
				if err := train(context.Background(), comm, x, step); err != nil {
					t.Error(err)
				}
			}
			out[r] = digest(x)
		})
	}
	wg.Wait()
	if slices.ContainsFunc(out, func(s string) bool { return s != out[0] }) {
		t.Fatalf("ranks of one process differ: %v", out)
	}
	return out[0]
}

// usage is the use of resources that hostile connections could exhaust.
type usage struct {
	Memory     uint64 // bytes of the heap and of stacks
	Goroutines int
	Files      int
}

func use() usage {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, _ := os.ReadDir("/proc/self/fd") // none on other systems
	return usage{Memory: m.HeapInuse + m.StackInuse, Goroutines: runtime.NumGoroutine(), Files: len(files)}
}

// tapes record the first bytes that a worker sent on the connections that it dialed.
type tapes struct {
	mu  sync.Mutex
	all []*tape
}

type tape struct {
	*net.TCPConn
	to    string
	mu    sync.Mutex
	wrote []byte
}

const tapeMax = 64 << 10

func (t *tapes) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conn := &tape{TCPConn: c.(*net.TCPConn), to: address}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = append(t.all, conn)
	return conn, nil
}

func (c *tape) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.wrote = append(c.wrote, p[:min(len(p), tapeMax-len(c.wrote))]...)
	c.mu.Unlock()
	return c.TCPConn.Write(p)
}

// String writes the tapes in one line: "address hex address hex …".
func (t *tapes) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	for _, c := range t.all {
		c.mu.Lock()
		fmt.Fprintf(&b, "%s %x ", c.to, c.wrote)
		c.mu.Unlock()
	}
	return b.String()
}

// process is a worker, as the test sees it.
type process struct {
	t      testing.TB
	worker worker
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	addr   string // where it listens
	log    lines
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start starts a worker's process. It ends with the test, at the latest.
func start(t testing.TB, w worker, change func(*exec.Cmd)) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, worker: w, cmd: exec.Command(exe)}
	p.cmd.Env = append(os.Environ(), workerEnv+"="+string(text))
	p.cmd.Stderr = &p.log
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if change != nil {
		change(p.cmd)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.in.Close()
		p.cmd.Wait()
		if t.Failed() {
			t.Logf("rank %d logged: %s", w.Rank, p.log.String())
		}
	})
	return p
}

var address = regexp.MustCompile(`"addr":"([^"]*)"`)

// joinAll passes the registrations of the workers to each other, and records their addresses.
func joinAll(t testing.TB, all []*process) {
	t.Helper()
	registrations := make([]bytes.Buffer, len(all))
	var ends []io.ReadWriter
	for i, p := range all {
		ends = append(ends, struct {
			io.Reader
			io.Writer
		}{io.TeeReader(p.out, &registrations[i]), p.in})
	}
	if err := mixed.Collect(ends); err != nil {
		t.Fatal(err)
	}
	for i, p := range all {
		p.addr = string(address.FindSubmatch(registrations[i].Bytes())[1])
	}
}

// ask sends a command to all workers, and returns their answers.
func ask(t testing.TB, all []*process, format string, args ...any) []string {
	t.Helper()
	for _, p := range all {
		fmt.Fprintf(p.in, format+"\n", args...)
	}
	var out []string
	for _, p := range all {
		text, err := p.out.ReadString('\n')
		if err != nil {
			t.Fatalf("rank %d does not answer %q: %v", p.worker.Rank, fmt.Sprintf(format, args...), err)
		}
		out = append(out, strings.TrimSpace(text))
	}
	return out
}

// timed has the workers do something with that many bytes, that many times, and returns the longest time of each, in
// seconds.
func timed(t testing.TB, all []*process, what string, bytes, times int) []float64 {
	t.Helper()
	out := make([]float64, times)
	for _, text := range ask(t, all, "%s %d %d", what, bytes, times) {
		var took []float64
		if err := json.Unmarshal([]byte(text), &took); err != nil || len(took) != times {
			t.Fatalf("%q: %v", text, err)
		}
		for i, seconds := range took {
			out[i] = max(out[i], seconds)
		}
	}
	return out
}
