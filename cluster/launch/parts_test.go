package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/internal/affinity"
)

func TestLines(t *testing.T) {
	long := strings.Repeat("x", lineMax+10)
	for _, c := range []struct {
		name, in string
		want     []string
	}{
		{"whole lines", "a\nb\n", []string{"a", "b"}},
		{"no newline at the end", "a\nb", []string{"a", "b"}},
		{"empty lines stand", "a\n\n\nb\n", []string{"a", "", "", "b"}},
		{"Windows", "a\r\n\r\nb\r\n", []string{"a", "", "b"}},
		{"a progress bar", "\r10%\r20%\r100%\n", []string{"10%", "20%", "100%"}},
		{"too long", long + "\ny\n", []string{long[:lineMax], long[lineMax:], "y"}},
		{"nothing", "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, piece := range []int{1, 2, 3, 7, len(c.in) + 1} { // in pieces of any size
				var got []string
				l := &lines{emit: func(b []byte) { got = append(got, string(b)) }}
				for p := range slices.Chunk([]byte(c.in), piece) {
					l.Write(p)
				}
				l.flush()
				want := c.want
				if c.name == "Windows" { // a lone carriage return ends no empty line
					want = []string{"a", "b"}
				}
				if !slices.Equal(got, want) {
					t.Fatalf("in pieces of %d bytes: got %q, want %q", piece, got, want)
				}
			}
		})
	}
}

func TestCrashed(t *testing.T) {
	for _, c := range []struct{ name, stderr, kind, message string }{
		{
			"Go", "panic: boom\n\ngoroutine 1 [running]:\nmain.main()\n\t/x/main.go:3 +0x1\nexit status 2\n", "panic",
			"panic: boom",
		},
		{
			"Go's runtime", "fatal error: all goroutines are asleep - deadlock!\n\ngoroutine 1 [select]:\n", "panic",
			"fatal error: all goroutines are asleep - deadlock!",
		},
		{"Python", "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n    1/0\nZeroDivisionError: " +
			"division by zero\n", "error", "ZeroDivisionError: division by zero"},
		{"Python, one after another", "Traceback (most recent call last):\n  x\nKeyError: 1\n\nDuring " +
			"handling:\n\nTraceback (most recent call last):\n  y\nValueError: 2\n", "error", "ValueError: 2"},
		{"Rust", "thread 'main' panicked at src/main.rs:2:5:\nboom\n", "panic", "thread 'main' panicked at src/main.rs:2:5:"},
		{
			"C++", "terminate called after throwing an instance of 'std::bad_alloc'\n", "panic",
			"terminate called after throwing an instance of 'std::bad_alloc'",
		},
		{
			"a full disk", "Traceback (most recent call last):\n  f\nOSError: [Errno 28] No space left on device\n", "disk",
			"OSError: [Errno 28] No space left on device",
		},
		{
			"a failed check in C++", read(t, "sigabrt.txt"), "signal",
			"SIGABRT: abort, in native code: F0000 00:00:1763812345.123456    1234 buffer.cc:57] Check failed: size >= 0 (-1 " +
				"vs. 0) negative size",
		},
		{
			"a wild pointer in C", "epoch 1/3\n" + read(t, "sigsegv.txt"), "signal",
			"SIGSEGV: segmentation violation, in native code; the line before: epoch 1/3",
		},
		{
			"the C++ runtime",
			"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n" + read(t,
				"sigsegv.txt"), "signal",
			"SIGSEGV: segmentation violation, in native code: terminate called after throwing an instance of 'std::bad_alloc'",
		},
		{"no signal", "SIGABRT: abort\nis what it says when it aborts\n", "", ""},
		{"no crash", "thread 'a' is slow\nwarning: panic: not\n", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			tl := &tail{}
			for line := range strings.Lines("before\n" + c.stderr) {
				tl.add([]byte(strings.TrimSuffix(line, "\n")))
			}
			_, crash := tl.lines()
			for _, l := range crash {
				if signalRegister.MatchString(l) {
					t.Errorf("a register: %q", l)
				}
			}
			if kind, message := crashed(crash); kind != c.kind || message != c.message {
				t.Errorf("got %q, %q; want %q, %q", kind, message, c.kind, c.message)
			}
		})
	}
}

// read returns a text of testdata.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTailKeepsTheEnd(t *testing.T) {
	tl := &tail{}
	for i := range 100 {
		tl.add(fmt.Appendf(nil, "%d %s", i, strings.Repeat("y", 10*i)))
	}
	last, _ := tl.lines()
	if len(last) != tailLines || !strings.HasPrefix(last[0], "88 ") || !strings.HasPrefix(last[tailLines-1], "99 ") ||
		len(last[tailLines-1]) != tailLine+len("…") {
		t.Errorf("got %q", last)
	}
}

func TestPlace(t *testing.T) {
	slots := []nodeSlot{
		{registration: registration{Workers: 2, Address: "10.0.0.1", MasterPort: 77, Ports: []int{1, 2}}},
		{registration: registration{Workers: 1, Address: "fd00::2", MasterPort: 78, Ports: []int{3}}},
	}
	l := lay(slots, 1)
	p := l.assign(0)
	p.id, p.epoch, p.restartsMax, p.store, p.secret, p.record = "job", 2, 3, "tcp://10.0.0.1:9", "s", "/r"
	got := map[string]string{}
	for _, kv := range p.variables() {
		name, value, _ := strings.Cut(kv, "=")
		if _, twice := got[name]; twice {
			t.Errorf("%s is set twice", name)
		}
		got[name] = value
	}
	want := map[string]string{
		"LOCKSTEP_JOB": "job", "LOCKSTEP_WORKER": "2", "LOCKSTEP_WORKERS": "3", "LOCKSTEP_LOCAL_WORKER": "0",
		"LOCKSTEP_LOCAL_WORKERS": "1", "LOCKSTEP_NODE": "1",
		"LOCKSTEP_EPOCH": "2", "LOCKSTEP_STORE": "tcp://10.0.0.1:9", "LOCKSTEP_SECRET": "s", "LOCKSTEP_RECORDS": "/r",
		"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
		"GROUP_WORLD_SIZE": "2",
		"ROLE_NAME":        "default", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "3",
		"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77",
		"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3",
		"TF_CONFIG": `{"cluster":{"worker":["10.0.0.1:1","10.0.0.1:2","[fd00::2]:3"]},"task":{"type":"worker","index":2}}`,
	}
	if !reflect.DeepEqual(got, want) {
		a, _ := json.MarshalIndent(got, "", " ")
		b, _ := json.MarshalIndent(want, "", " ")
		t.Errorf("got %s\nwant %s", a, b)
	}
	if l.nodeOf(0) != 0 || l.nodeOf(1) != 0 || l.nodeOf(2) != 1 || l.nodeOf(3) != -1 {
		t.Error("nodeOf")
	}
	resolver := &cluster.TFConfig{Lookup: func(name string) (string, bool) { v, ok := got[name]; return v, ok }}
	if task, err := resolver.Task(); err != nil || task.Type != "worker" || task.Index != 2 {
		t.Errorf("our own TF_CONFIG is read as task %v, %v", task, err)
	}
}

// TestLargeCluster: a process of a job whose TF_CONFIG is too long for the environment starts, and reads the cluster
// from a file.
func TestLargeCluster(t *testing.T) {
	const nodes, each = 4096, 8
	var slots []nodeSlot
	for n := range nodes {
		slots = append(slots, nodeSlot{registration: registration{
			Workers: each, MasterPort: 77, Ports: slices.Repeat([]int{50000 + n}, each),
			Address: fmt.Sprintf("2001:db8:1234:5678:9abc:def0:1234:%x", 0x1000+n),
		}})
	}
	l := lay(slots, nodes-1)
	file, folder, err := l.clusterFile()
	if err != nil || file == "" {
		t.Fatal(file, err)
	}
	defer os.RemoveAll(folder)
	p := l.assign(each - 1)
	p.id, p.store, p.clusterFile = "job", "tcp://10.0.0.1:9", file
	cmd := exec.Command("sh", "-c", `printf '%s\n%s' "$LOCKSTEP_TF_CONFIG_FILE" "$TF_CONFIG"`)
	cmd.Env = environment(nil, p.variables(), nil)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	name, text, _ := strings.Cut(string(out), "\n")
	got := map[string]string{cluster.EnvTFConfigFile: name, "TF_CONFIG": text}
	job, err := cluster.Discover(cluster.Discovery{
		Getenv: func(name string) (string, bool) { v, ok := got[name]; return v, ok },
	})
	if err != nil || job.Workers != nodes*each || job.Worker != nodes*each-1 || len(job.Spec["worker"]) != nodes*each {
		t.Errorf("got %v, %v", job, err)
	}
	if p.clusterFile = ""; runtime.GOOS == "linux" {
		cmd := exec.Command("true")
		cmd.Env = p.variables()
		if err := cmd.Run(); !errors.Is(err, syscall.E2BIG) {
			t.Errorf("with all in TF_CONFIG: %v, want %v", err, syscall.E2BIG)
		}
	}
	small := lay(slots[:1], 0)
	if file, _, err := small.clusterFile(); file != "" || err != nil {
		t.Errorf("a small cluster: %q, %v", file, err)
	}
}

func TestEnvironment(t *testing.T) {
	base := []string{"PATH=/bin", "RANK=9", "LOCKSTEP_SECRET_FILE=/x", "OMP_NUM_THREADS=7"}
	got := environment(base, []string{"RANK=1"}, threads(2))
	if want := []string{"PATH=/bin", "OMP_NUM_THREADS=7", "GOMAXPROCS=2", "RANK=1"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestThreadShare(t *testing.T) {
	node := []int{0, 1, 2, 3}
	for _, c := range []struct {
		name  string
		cores int
		bound [][]int
		want  int
	}{
		{"a share of the cores", 8, make([][]int, 3), 2},
		{"more workers than cores", 2, make([][]int, 5), 1},
		{"one core of two threads each", 16, [][]int{{0, 8}, {1, 9}}, 2},
		{"one CPU each", 8, [][]int{{0}, {1}}, 1},
		{"a worker on one of two nodes", 8, [][]int{node}, 4},
		{"three workers on two nodes", 8, [][]int{node, node, {4, 5, 6, 7}}, 2},
		{"nodes of several sizes", 12, [][]int{node, {4, 5, 6, 7, 8, 9, 10, 11}}, 4},
		{"not bound: more workers than CPUs", 1, [][]int{{}, {}}, 1},
		{"less time than CPUs", 2, [][]int{{0, 1}, {2, 3}}, 1}, // by the limit of the control group
	} {
		if got := threadShare(c.cores, c.bound); got != c.want {
			t.Errorf("%s: %d threads each, want %d", c.name, got, c.want)
		}
	}
}

func TestParseRanks(t *testing.T) {
	for _, c := range []struct {
		in   string
		want []int
	}{
		{"0", []int{0}},
		{"0,2-4, 7", []int{0, 2, 3, 4, 7}},
		{"", nil},
		{"a", nil},
		{"3-1", nil},
		{"-1", nil},
		{"1-", nil},
		{"0-99999999", nil},
		{"4294967295", nil},
	} {
		if got, err := ParseRanks(c.in); !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) {
			t.Errorf("%q: got %v, %v; want %v", c.in, got, err, c.want)
		}
	}
}

func FuzzParseRanks(f *testing.F) {
	f.Add("0,2-4")
	f.Fuzz(func(t *testing.T, s string) {
		if got, err := ParseRanks(s); err == nil && (len(got) == 0 || len(got) > 2*affinity.ListMax) {
			t.Errorf("%q: %d numbers", s, len(got))
		}
	})
}

func TestProc(t *testing.T) {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	root := fstest.MapFS{
		"proc/self/cgroup": file("3:memory:/a/b\n0::/u\n"),
		"proc/vmstat":      file("pgfault 3\noom_kill 41\n"),
		"proc/7/stat":      file("7 (a) b) T 1 7 7 0"),
		"proc/8/stat":      file("8 (x) Z 1 8 8 0"),
		"proc/9/stat":      file("9 (x) S 1 7 7 0"),
		"proc/10/stat":     file("torn"),
	}
	if !stopped(root, 7) || stopped(root, 9) || stopped(root, 10) || stopped(root, 11) {
		t.Error("stopped")
	}
	for group, want := range map[int]string{5: "[] 0", 7: "[7 9] 0", 8: "[] 1"} {
		if running, dead := groupMembers(root, group); fmt.Sprint(running, dead) != want {
			t.Errorf("group %d: running %v, %d dead, want %s", group, running, dead, want)
		}
	}
	for _, step := range []struct {
		file, text string
		want       int
		where      string
	}{
		{"proc/vmstat", "pgfault 3\noom_kill 41\n", 41, "this machine"},
		{"sys/fs/cgroup/memory.events", "low 0\noom 5\noom_kill 4\n", 4, "this control group"},
		{"sys/fs/cgroup/u/memory.events", "low 0\noom 3\noom_kill 3\n", 3, "this control group"},
		{
			"sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 2,
			"this control group",
		},
	} {
		root[step.file] = file(step.text)
		if got, ok := readMemoryKills(root); !ok || got.count != step.want || got.where != step.where {
			t.Errorf("with %s: got %+v, %v", step.file, got, ok)
		}
	}
	if _, ok := readMemoryKills(fstest.MapFS{}); ok {
		t.Error("a counter where there is none")
	}
}

func TestOthersAreShort(t *testing.T) {
	lost := "peer lost: rank 2 is down\n  replica 0 waits in x\n  worker 2 (rank 2, host h, pid 7) was last seen 1s " +
		"ago at step 3\n  worker 0 (rank 0), which reports this, is at step 4"
	var b strings.Builder
	others(&b, []failure.Record{
		{Worker: 0, Message: lost},
		{Worker: 1, Message: lost},
		{Worker: 3, Message: strings.Repeat("é", 200)},
	})
	want := "  then    workers 0, 1: peer lost: rank 2 is down\n          worker 2 (rank 2, host h, pid 7) was last " +
		"seen 1s ago at step 3\n" +
		"  then    worker 3: " + strings.Repeat("é", 120) + "…\n"
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	var many []failure.Record
	for i := range 20 {
		many = append(many, failure.Record{Worker: i, Message: fmt.Sprint("m", i)})
	}
	if others(&b, many); !strings.HasSuffix(b.String(), "  then    worker 7: m7\n  and 12 more\n") {
		t.Errorf("got\n%s", b.String())
	}
}

// TestFirstIsByTime: the worker that exited first is the one that failed first, not the one whose event arrived
// first.
func TestFirstIsByTime(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	e := &epoch{failing: true, cause: 4, causeAt: start.Add(2 * time.Second)}
	add := func(rank int, after time.Duration, signalled bool) {
		r := failure.Record{Worker: rank, Time: start.Add(after)}
		e.exits = append(e.exits, exit{Record: r, failed: true, signalled: signalled})
	}
	add(3, 3*time.Second, false)
	add(4, 2*time.Second, false)
	add(5, time.Second, false)
	add(6, 0, true)
	e.order()
	for _, x := range e.exits {
		e.attribute(&x)
		if blames := x.Worker < 5; blames != slices.Equal(x.Blames, []int{5}) || !blames && len(x.Blames) > 0 {
			t.Errorf("worker %d blames %v; first was worker %d", x.Worker, x.Blames, e.cause)
		}
	}
}

// TestBeyond: the lines of a crash are not shown twice.
func TestBeyond(t *testing.T) {
	lines := []string{"joining", "panic: x", "", "goroutine 1 [running]:"}
	if got := beyond(lines, "panic: x\n\ngoroutine 1 [running]:\nmain.main()"); !slices.Equal(got, []string{"joining"}) {
		t.Errorf("got %q", got)
	}
	if got := beyond(lines, ""); !slices.Equal(got, lines) {
		t.Errorf("without a stack: got %q", got)
	}
}
