package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/tensor"
)

const workerVariable = "BENCH_TEST_WORKER"

// TestMain runs a process of a measurement if a test started this program as one.
func TestMain(m *testing.M) {
	if job, ok := os.LookupEnv(workerVariable); ok {
		if err := bench.Work(context.Background(), job, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func worker(ctx context.Context, job string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), workerVariable+"="+job)
	return cmd
}

func TestPlain(t *testing.T) {
	for _, transport := range []string{"mem", "pipe"} {
		var out bytes.Buffer
		_, err := bench.Run(t.Context(), &out, bench.Options{Transport: transport, Ranks: 3, Sizes: []int{4, 4096}, Calls: 5})
		want := regexp.MustCompile(`^lockstep-` + transport + ` ranks=3 bytes=4 us=[0-9]+\.[0-9] average=avg\nlockstep-` +
			transport + ` ranks=3 bytes=4096 us=[0-9]+\.[0-9] average=avg\n$`)
		if err != nil || !want.MatchString(out.String()) {
			t.Errorf("%v, printed:\n%swant lines like %s", err, out.String(), want)
		}
	}
}

// TestAll measures every operation over every transport. The measurement itself checks the results.
func TestAll(t *testing.T) {
	for transport := range bench.Transports {
		for name, op := range bench.Ops {
			for _, dtype := range []collective.DType{tensor.Float32, tensor.BFloat16, tensor.Int8} {
				if testing.Short() && dtype != tensor.Float32 {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%v", transport, name, dtype), func(t *testing.T) {
					results, err := bench.Run(t.Context(), io.Discard, bench.Options{
						Op: op, Transport: transport, Type: dtype, Ranks: 3, Root: 1, Sizes: []int{96, 96 << 10}, Calls: 3,
						Worker: worker,
					})
					if err != nil {
						t.Fatal(err)
					}
					want := 2
					if op == collective.Barrier {
						want = 1
					}
					for _, r := range results {
						if r.Median <= 0 || r.Calls != 3 || r.Ranks != 3 || r.Transport != transport {
							t.Errorf("%+v", r)
						}
					}
					if len(results) != want {
						t.Errorf("%d results, want %d", len(results), want)
					}
				})
			}
		}
	}
}

// TestTypesAndReductions reduces elements of every type by every reduction, in misaligned buffers too.
func TestTypesAndReductions(t *testing.T) {
	var list []bench.Options
	for _, dtype := range tensor.DTypes {
		for op := collective.Sum; op <= collective.Prod && dtype.IsNumeric(); op++ {
			if op == collective.Mean && !dtype.IsFloat() {
				continue
			}
			for _, unaligned := range []int{0, 3} {
				list = append(list, bench.Options{
					Reduce: op, Type: dtype, Ranks: 5, Sizes: []int{dtype.Bytes(), 4000}, Calls: 1, Check: 2,
					Unaligned: unaligned,
				})
			}
		}
	}
	var out bytes.Buffer
	results, err := bench.Run(t.Context(), &out, list...)
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != 2*len(list) || !strings.Contains(out.String(), " op=all_reduce dtype=bfloat16 reduce=prod\n") {
		t.Errorf("%d results of %d measurements, printed:\n%s", len(results), len(list), out.String())
	}
	for _, r := range results {
		if r.Checks != 2 || r.Wrong == nil || *r.Wrong != 0 {
			t.Errorf("%+v", r)
		}
	}
}

// opsOver returns the operations to test over a transport: in short tests only one over processes, which cost time.
func opsOver(transport string) []collective.Op {
	if testing.Short() && !bench.Transports[transport].Goroutines() {
		return []collective.Op{collective.AllReduce}
	}
	return slices.Collect(maps.Values(bench.Ops))
}

// TestUnaligned makes every operation in misaligned buffers.
func TestUnaligned(t *testing.T) {
	for transport := range bench.Transports {
		for _, buffers := range []string{"shared", "ordinary"} {
			var list []bench.Options
			for _, op := range opsOver(transport) {
				list = append(list, bench.Options{
					Op: op, Transport: transport, Ranks: 3, Sizes: []int{96 << 10}, Calls: 1, Unaligned: 5, Buffers: buffers,
					Worker: worker,
				})
			}
			if _, err := bench.Run(t.Context(), io.Discard, list...); err != nil {
				t.Errorf("%s, %s: %v", transport, buffers, err)
			}
		}
	}
}

// TestOverlap measures the overlap of every operation. Its share depends on the machine.
func TestOverlap(t *testing.T) {
	for transport := range bench.Transports {
		var list []bench.Options
		for _, op := range opsOver(transport) {
			list = append(list, bench.Options{
				Op: op, Transport: transport, Ranks: 3, Root: 1, Sizes: []int{96 << 10}, Calls: 3, Overlap: true, Worker: worker,
			})
		}
		var out bytes.Buffer
		results, err := bench.Run(t.Context(), &out, list...)
		if err != nil || len(results) != len(list) {
			t.Errorf("%s: %d results of %d, %v", transport, len(results), len(list), err)
		}
		for _, r := range results {
			o := r.Overlap
			if o == nil || o.Compute <= 0 || o.During <= 0 || o.Overall <= 0 || !(o.Share >= 0 && o.Share <= 1) {
				t.Errorf("%+v, %+v", r, o)
			}
		}
		if !regexp.MustCompile(`(?m) compute_us=\d+\.\d overall_us=\d+\.\d overlap=\d+\.\d%$`).MatchString(out.String()) {
			t.Errorf("printed:\n%s", out.String())
		}
	}
}

// TestGroups measures in groups of different sizes.
func TestGroups(t *testing.T) {
	for transport := range bench.Transports {
		split, err := bench.ParseSplit("mod:2")
		if err != nil {
			t.Fatal(err)
		}
		var list []bench.Options
		for _, op := range opsOver(transport) {
			list = append(list, bench.Options{
				Op: op, Transport: transport, Ranks: 5, Root: 1, Split: split, Sizes: []int{4 << 10}, Calls: 2, Worker: worker,
			})
		}
		results, err := bench.Run(t.Context(), io.Discard, list...)
		if err != nil || len(results) != len(list) {
			t.Errorf("%s: %d results of %d, %v", transport, len(results), len(list), err)
		}
		for _, r := range results {
			if r.Ranks != 3 || r.Groups != 2 || r.Op == "all_gather" && r.Bytes%12 != 0 {
				t.Errorf("%+v", r)
			}
		}
	}
}

// TestSeveralRanksInAProcess spreads five ranks over two and three processes, and measures the limit of each.
func TestSeveralRanksInAProcess(t *testing.T) {
	for _, o := range []bench.Options{
		{Transport: "shm", Processes: 2},
		{Transport: "tcp", Processes: 2},
		{Transport: "tcp", Processes: 3},
		{Transport: "tcp", Processes: 2, Overlap: true},
		{Transport: "tcp", Processes: 2, TLS: true},
	} {
		o.Ranks, o.Sizes, o.Calls, o.Limit, o.Worker = 5, []int{40000, 80000}, 3, true, worker
		results, err := bench.Run(t.Context(), io.Discard, o)
		if err != nil || len(results) != 2 || results[1].Processes != o.Processes || results[1].Limit <= 0 ||
			results[1].TLS != o.TLS {
			t.Errorf("%s: %+v, %v", o.Transport, results, err)
		}
	}
}

// TestAverages checks by runs over each transport that the times of all ranks count.
func TestAverages(t *testing.T) {
	for _, test := range []struct {
		transport string
		averages  []bench.Average
	}{
		{"mem", bench.Averages},
		{"shm", []bench.Average{bench.AverageAvg, bench.AverageMax}},
		{"tcp", []bench.Average{bench.AverageMin, bench.AverageRank0}},
	} {
		for i, average := range test.averages {
			o := bench.Options{
				Transport: test.transport, Ranks: 2 + 2*(i%2), Sizes: []int{4, 64 << 10}, Calls: 7, Average: average,
				Limit: test.transport == "tcp", Worker: worker,
			}
			results, err := bench.Run(t.Context(), io.Discard, o)
			if err != nil || len(results) != 2 {
				t.Errorf("%s, %s: %v, %v", test.transport, average, results, err)
			}
			for _, r := range results {
				m := r.Medians
				selected := []time.Duration{m.Rank0, m.Avg, m.Min, m.Max}[slices.Index(bench.Averages, average)]
				if r.Average != average || r.Median != selected || r.Calls != o.Calls {
					t.Errorf("%s, %s: %+v", test.transport, average, r)
				}
				if m.Min < 0 || m.Min > m.Avg || m.Avg > m.Max || m.Min > m.Rank0 || m.Rank0 > m.Max {
					t.Errorf("%s, %d ranks: not in order: %+v", test.transport, o.Ranks, m)
				}
			}
		}
	}
}

// TestGroupsOfOtherSizes measures in groups whose vectors are rounded to both sides of a limit of the number of calls.
func TestGroupsOfOtherSizes(t *testing.T) {
	results, err := bench.Run(t.Context(), io.Discard, bench.Options{
		Op: collective.AllGather, Ranks: 5, Split: bench.Split{By: "mod", N: 2}, Sizes: []int{1 << 20},
	})
	if err != nil || len(results) != 1 || results[0].Bytes >= 1<<20 {
		t.Errorf("%+v, %v", results, err)
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	gather := bench.Options{
		Op: collective.AllGather, Sizes: []int{1 << 10, 1 << 20}, Format: "table", Limit: true, Calls: 5, Check: 3,
	}
	half := gather
	half.Type = tensor.BFloat16
	results, err := bench.Run(t.Context(), &out, gather, half, bench.Options{
		Op: collective.Reduce, Reduce: collective.Max, Sizes: []int{4}, Calls: 1, Check: -1,
	}, bench.Options{Op: collective.Barrier, Calls: 1})
	if err != nil || len(results) != 6 {
		t.Fatal(results, err)
	}
	mean := 0.0
	for _, r := range results[:4] {
		mean += r.BusBW / 4
	}
	for _, want := range []string{
		`^# all_gather, 2 ranks in 1 process over mem, algorithm chosen by size, \d+ processors\n# shared buffers\n` +
			`# times are the average of each call over the ranks\n`,
		`\n#   size    count     type redop     time     best      p99  algbw  busbw #wrong    limit share\n#  bytes elem`,
		`\n 1048576   262144  float32  none +\d+\.\d +\d+\.\d +\d+\.\d +\d+\.\d\d +\d+\.\d\d      0 `,
		`\n 1048576   524288 bfloat16  none `,
		`\n# wrong elements: 0 in 12 checked calls\n# average bus bandwidth: ` + fmt.Sprintf("%.3f", mean) +
			` GB/s\n\n# reduce, root 0, 2 ranks in `,
		`\n       4        1  float32   max .* N/A\n# wrong elements: not checked\n`,
		`\n       0        0     none  none .* N/A\n$`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %s in:\n%s", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "# all_gather"); n != 1 {
		t.Errorf("%d heads of one operation:\n%s", n, out.String())
	}
}

func TestJSON(t *testing.T) {
	var out bytes.Buffer
	_, err := bench.Run(t.Context(), &out, bench.Options{
		Op: collective.AllGather, Sizes: []int{1 << 20}, Format: "json", Limit: true, Calls: 5,
	})
	var r bench.Result
	if e := json.Unmarshal(out.Bytes(), &r); err != nil || e != nil || r.Op != "all_gather" || r.Bytes != 1<<20 ||
		r.Limit <= 0 || r.Share() <= 0 || r.Best > r.Median || r.Median > r.P99 || r.Wrong == nil || r.Reduce != "" ||
		r.Groups != 1 || r.Overlap != nil || r.Average != bench.AverageAvg || r.Medians.Avg != r.Median {
		t.Errorf("%v, %v, printed:\n%s", err, e, out.String())
	}
	if busbw := r.AlgBW / 2; r.BusBW < busbw*0.99 || r.BusBW > busbw*1.01 {
		t.Errorf("busbw %v of algbw %v: an all-gather of two ranks carries half", r.BusBW, r.AlgBW)
	}
	want := regexp.MustCompile(`"average":"avg","median_ns":\d+,"best_ns":\d+,"p99_ns":\d+,"medians":\{"rank0_ns":\d+,` +
		`"avg_ns":\d+,"min_ns":\d+,"max_ns":\d+\},"calls":5,`)
	if !want.MatchString(out.String()) {
		t.Errorf("no %s in:\n%s", want, out.String())
	}
}

// TestDefaultSizes checks that the smallest default size holds an element.
func TestDefaultSizes(t *testing.T) {
	texts, err := bench.Explain(bench.Options{Type: tensor.Float64})
	if err != nil || len(texts) != len(bench.Sizes) || bench.Sizes[0] != 4 {
		t.Errorf("%d texts, %v", len(texts), err)
	}
}

func TestWrongOptions(t *testing.T) {
	for _, test := range []struct {
		opts bench.Options
		text string
	}{
		{bench.Options{Transport: "pigeon"}, `unknown transport "pigeon": want`},
		{bench.Options{Ranks: -1}, "-1 ranks"},
		{bench.Options{Sizes: []int{5}}, "size 5: want a multiple of 4"},
		{bench.Options{Sizes: []int{0}}, "size 0: want a multiple of 4"},
		{bench.Options{Format: "poem"}, `unknown format "poem": want plain, table or json`},
		{bench.Options{Sizes: []int{4}, Algorithm: "magic"}, `no algorithm "magic"`},
		{bench.Options{Op: collective.Send, Ranks: 1}, "a send needs two"},
		{bench.Options{Op: collective.Broadcast, Root: 2}, "root 2 of 2 ranks"},
		{bench.Options{Type: tensor.Bool}, "want a numeric dtype"},
		{bench.Options{Transport: "mem", Processes: 2}, "not 2 processes"},
		{bench.Options{Transport: "tcp"}, "Options.Worker is not set"},
		{bench.Options{Transport: "tcp", Processes: 3, Worker: worker}, "at least one rank a process"},
		{bench.Options{TLS: true}, "TLS for 1 processes over mem: want at least 2 over tcp"},
		{bench.Options{Transport: "tcp", Processes: 1, TLS: true, Worker: worker}, "TLS for 1 processes over tcp"},
		{bench.Options{Warmup: bench.CallsMax + 1}, "calls to warm up"},
		{bench.Options{Check: bench.CallsMax + 1}, "checked calls"},
		{bench.Options{Unaligned: 64}, "buffers 64 bytes after a boundary: want 0 to 63"},
		{bench.Options{Split: bench.Split{By: "or", N: 1}}, "split or:1: want mod:N or div:N"},
		{bench.Options{Split: bench.Split{By: "mod", N: 2}, Limit: true}, "a limit for split mod:2"},
		{
			bench.Options{Split: bench.Split{By: "div", N: 2}, Ranks: 3, Op: collective.Broadcast, Root: 1},
			"root 1 of 1 ranks",
		},
		{bench.Options{Split: bench.Split{By: "mod", N: 2}, Op: collective.Send}, "a send needs two"},
		{bench.Options{Buffers: "fluffy"}, `unknown buffers "fluffy"`},
		{bench.Options{Average: "median"}, `unknown average "median" over the ranks: want rank0, avg, min or max`},
		{bench.Options{Reduce: collective.Mean, Type: tensor.Int32, Sizes: []int{4}}, "integers have no true mean"},
	} {
		_, err := bench.Run(t.Context(), io.Discard, test.opts)
		if err == nil || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%+v: %v, want %q", test.opts, err, test.text)
		}
	}
}

// TestWorkerFails checks that a process that fails is an error with its output, and that no process remains.
func TestWorkerFails(t *testing.T) {
	started := []*exec.Cmd{}
	broken := func(ctx context.Context, job string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), workerVariable+`={"Options":{"Ranks":2,"Processes":2,"Transport":"pigeon"}}`)
		if len(started) == 0 {
			cmd.Env = append(os.Environ(), workerVariable+"="+job) // it waits for the other
		}
		started = append(started, cmd)
		return cmd
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := bench.Run(ctx, io.Discard, bench.Options{Transport: "tcp", Sizes: []int{4}, Worker: broken})
	if err == nil || !strings.Contains(err.Error(), `invalid job for process 0 of 2 with 2 ranks over "pigeon"`) {
		t.Errorf("%v", err)
	}
	for _, cmd := range started {
		if cmd.ProcessState == nil {
			t.Errorf("process %d is left behind", cmd.Process.Pid)
		}
	}
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, transport := range []string{"mem", "tcp"} {
		o := bench.Options{Transport: transport, Sizes: []int{4}, Worker: worker}
		if _, err := bench.Run(ctx, io.Discard, o); err == nil {
			t.Errorf("%s: a run with a context that is over gave results", transport)
		}
	}
}

func TestExplain(t *testing.T) {
	texts, err := bench.Explain(bench.Options{Ranks: 4, Sizes: []int{4, 4 << 20}})
	if err != nil || len(texts) != 2 || !strings.Contains(texts[1], "4 MiB, over mem") {
		t.Errorf("%v\n%s", err, texts)
	}
}

// TestExplainAsRun checks that the printed choice considers the environment and the memory.
func TestExplainAsRun(t *testing.T) {
	explain := func(o bench.Options) string {
		t.Helper()
		o.Sizes, o.Worker = []int{16 << 20}, worker
		texts, err := bench.Explain(o)
		if err != nil || len(texts) != 1 {
			t.Fatal(texts, err)
		}
		return texts[0]
	}
	chosen := func(text string) string {
		for line := range strings.Lines(text) {
			if rest, ok := strings.CutPrefix(line, ">"); ok {
				return strings.Fields(rest)[0]
			}
		}
		t.Errorf("nothing is chosen:\n%s", text)
		return ""
	}
	if got := chosen(explain(bench.Options{})); got != "direct" {
		t.Errorf("%s is chosen in memory, want direct", got)
	}
	if slices.Contains(strings.Split(bench.TransportNames(), ", "), "shm") {
		if got := chosen(explain(bench.Options{Transport: "shm", Buffers: "ordinary"})); got == "direct" {
			t.Errorf("%s is chosen where memory is not reached", got)
		}
	}
	t.Setenv("LOCKSTEP_ALGORITHM", "recursive_doubling")
	if text := explain(bench.Options{}); chosen(text) != "recursive_doubling" ||
		!strings.Contains(text, "LOCKSTEP_ALGORITHM selects it") {
		t.Errorf("asked for by the environment:\n%s", text)
	}
	if text := explain(bench.Options{Algorithm: "all_reduce:reduce_broadcast"}); chosen(text) != "reduce_broadcast" ||
		!strings.Contains(text, "the configuration selects it") {
		t.Errorf("asked for by the options:\n%s", text)
	}
	table := *chooser.Default()
	table.Machine = "another machine"
	path := t.TempDir() + "/table.json"
	if err := table.Save(path); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LOCKSTEP_TABLE", path)
	if text := explain(bench.Options{}); !strings.Contains(text, "another machine") {
		t.Errorf("by the environment's table:\n%s", text)
	}
	t.Setenv("LOCKSTEP_TABLE", path+"x")
	if _, err := bench.Explain(bench.Options{}); err == nil || !strings.Contains(err.Error(), "LOCKSTEP_TABLE") {
		t.Errorf("a table that is not there: %v", err)
	}
}

func TestCalibrate(t *testing.T) {
	if testing.Short() {
		t.Skip("measures every algorithm")
	}
	var progress []string
	table, err := bench.Calibrate(t.Context(), bench.Calibration{
		Transports: []string{"mem"}, Machine: "a test", Calls: 2, Worker: worker,
		Progress: func(format string, args ...any) { progress = append(progress, fmt.Sprintf(format, args...)) },
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := table.Save(t.TempDir() + "/table.json"); err != nil { // it checks every number
		t.Error(err)
	}
	if len(table.Corrections) < 8 || table.Transports["mem"].Read <= 0 || table.Transports["mem"].Send <= 0 ||
		len(progress) < 3 {
		t.Errorf("%+v, progress %q", table, progress)
	}
}
