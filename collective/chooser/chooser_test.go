package chooser

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// table returns a copy of the built-in table that a test may change.
func table(t *testing.T) *Table {
	t.Helper()
	c, err := Parse(builtIn)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// apart places every rank in a separate process and domain, several per host.
func apart(n, perHost int) []plan.Place {
	places := make([]plan.Place, n)
	for i := range places {
		places[i] = plan.Place{Worker: i, Domain: i, Host: i / perHost}
	}
	return places
}

// TestChooseFits checks that the chosen algorithm fits, over memory and without, and is the best of those that fit.
func TestChooseFits(t *testing.T) {
	for _, w := range []Where{{Memory: "mem"}, {Memory: "shm", ElementBytes: 4}, {Frames: "tcp", ElementBytes: 8}} {
		for n := 1; n <= 9; n++ {
			for _, count := range []int{0, 1, 1000, 1 << 20} {
				p := plan.Problem{Op: plan.AllReduce, Size: n, Count: count}
				if w.Memory == "" {
					p.Places = apart(n, n)
				}
				a, err := Default().Choose(p, w)
				if err != nil {
					t.Errorf("%v over %+v: %v", p, w, err)
					continue
				}
				if err := w.fits(a, p); err != nil {
					t.Errorf("%v over %+v: chose %s, which does not fit: %v", p, w, a.Name, err)
				}
				links := Default().links(w)
				for _, other := range plan.Algorithms {
					if a.Name == Default().rule(p, w, count*max(1, w.ElementBytes)) {
						break // that was measured
					}
					if w.fits(other, p) == nil && other.Cost(p, links) < a.Cost(p, links) {
						t.Errorf("%v over %+v: chose %s, which costs %v; %s costs %v", p, w, a.Name, a.Cost(p, links), other.Name,
							other.Cost(p, links))
					}
				}
			}
		}
	}
}

func TestNoMemory(t *testing.T) {
	p := plan.Problem{Op: plan.AllReduce, Size: 2, Count: 5}
	if _, err := Named("direct", p, Where{Frames: "tcp"}); err == nil ||
		!strings.Contains(err.Error(), "no peer's memory is accessible") {
		t.Errorf("direct over frames: %v", err)
	}
	if _, err := Named("direct", p, Where{Memory: "mem"}); err != nil {
		t.Errorf("direct over memory: %v", err)
	}
	if _, err := Named("magic", p, Where{Memory: "mem"}); err == nil ||
		!strings.Contains(err.Error(), `no algorithm "magic": want one of`) {
		t.Errorf("magic: %v", err)
	}
}

// TestMeasured compares the built-in table's choices for two and four ranks with measurements. A cost function cannot
// know how long a second synchronisation takes if the peer was not quite ready.
func TestMeasured(t *testing.T) {
	stage := (512 << 10) / 4 // elements; of ranks that share memory
	for _, test := range []struct {
		ranks    int
		bytes    int
		over     Where
		private  bool // memory that the peer does not reach
		row      string
		instead  string // what is predicted to be better, or nearly as good
		measured string // how many times as long that took
	}{
		{2, 1 << 10, Where{Memory: "mem", ElementBytes: 4}, false, "eager", "direct", "1.4"},
		{2, 16 << 10, Where{Memory: "mem", ElementBytes: 4}, false, "direct", "eager", "3.3"},
		{4, 4 << 10, Where{Memory: "mem", ElementBytes: 4}, false, "eager", "direct", "1.4"},
		{2, 1 << 20, Where{Memory: "mem", ElementBytes: 4}, false, "direct", "eager", "does not fit"},
		{2, 4, Where{Memory: "shm", ElementBytes: 4}, false, "eager", "direct", "1.0"},
		{2, 16 << 10, Where{Memory: "shm", ElementBytes: 4}, false, "direct", "eager", "3.4"},
		{2, 512 << 10, Where{Memory: "shm", ElementBytes: 4}, false, "direct", "eager", "5"},
		{2, 64 << 10, Where{Memory: "shm", ElementBytes: 4}, true, "eager", "staged", "1.5"},
		{2, 1 << 20, Where{Memory: "shm", ElementBytes: 4}, true, "staged", "eager", "1.5"},
		{2, 512 << 10, Where{Frames: "tcp", ElementBytes: 4}, false, "recursive_doubling", "direct_frames", "1.1"},
		{2, 4 << 20, Where{Frames: "tcp", ElementBytes: 4}, false, "direct_frames", "recursive_doubling", "1.2"},
	} {
		p := plan.Problem{Op: plan.AllReduce, Size: test.ranks, Count: test.bytes / 4, Stage: stage, Private: test.private}
		if test.over.Memory == "mem" {
			p.Stage = 32 << 10 / 4
		}
		if test.over.Memory == "" {
			p.Places = apart(test.ranks, test.ranks)
		}
		if a, err := Default().Choose(p, test.over); err != nil || a.Name != test.row {
			t.Errorf("%v, %d bytes over %+v: chose %s (%v), want %s: %s takes %s times as long", p, test.bytes, test.over,
				a.Name, err, test.row, test.instead, test.measured)
		}
	}
}

// TestCrowdedRules checks that the built-in table takes the algorithm with the fewest frames where ranks share
// processors, and only there. docs/experiments.md has the measurements.
func TestCrowdedRules(t *testing.T) {
	for _, test := range []struct {
		ranks, hosts, cores, bytes int
		crowded                    bool
	}{
		{4, 1, 2, 4, true},
		{4, 1, 2, 1 << 20, true},
		{4, 1, 2, 4 << 20, false},
		{4, 1, 3, 4, false},
		{4, 1, 4, 4, false},
		{4, 1, 0, 4, false}, // unknown
		{3, 1, 2, 64 << 10, true},
		{2, 1, 1, 4, false}, // one exchange
		{8, 1, 2, 1 << 20, true},
		{16, 1, 2, 1 << 20, true},
		{16, 1, 8, 64 << 10, true},
		{16, 1, 8, 1 << 20, false}, // the bytes of a tree pass through few of the processors
		{64, 1, 64, 4, false},
		{8, 4, 1, 4, false}, // over a network
	} {
		w := Where{Frames: "tcp", ElementBytes: 4, Cores: test.cores}
		p := plan.Problem{Op: plan.AllReduce, Size: test.ranks, Count: test.bytes / 4}
		p.Places = apart(test.ranks, test.ranks/test.hosts)
		a, err := Default().Choose(p, w)
		if crowded := a.Name == "reduce_broadcast"; err != nil || crowded != test.crowded {
			t.Errorf("%+v: chose %s, %v", test, a.Name, err)
		}
	}
}

// TestRules checks that the first rule that applies and fits decides, and that a rule that does not fit is skipped.
func TestRules(t *testing.T) {
	x := table(t)
	x.Rules = []Rule{
		{Operation: "all_reduce", Over: "tcp", Algorithm: "direct"}, // never fits there
		{Operation: "all_reduce", Over: "mem", RanksMin: 3, BytesMax: 4096, Algorithm: "recursive_doubling"},
	}
	for _, test := range []struct {
		n, count int
		rule     bool
	}{{2, 10, false}, {3, 10, true}, {4, 1024, true}, {4, 1025, false}} {
		w := Where{Memory: "mem", ElementBytes: 4}
		first := x.Rank(plan.Problem{Op: plan.AllReduce, Size: test.n, Count: test.count}, w)[0]
		if first.Rule != test.rule || test.rule && first.Algorithm.Name != "recursive_doubling" {
			t.Errorf("%d elements over %d ranks: %s, by a rule: %v, want %v", test.count, test.n, first.Algorithm.Name,
				first.Rule, test.rule)
		}
	}
	p := plan.Problem{Op: plan.AllReduce, Size: 4, Count: 10, Places: apart(4, 4)}
	if first := x.Rank(p, Where{Frames: "tcp"})[0]; first.Rule || first.Err != nil {
		t.Errorf("over tcp: %s by a rule, %v", first.Algorithm.Name, first.Err)
	}
}

func TestCorrections(t *testing.T) {
	x := table(t)
	for _, c := range []struct {
		bytes  int
		factor float64
	}{{1 << 20, 4}, {1 << 10, 2}} {
		x.Corrections = append(x.Corrections, Correction{
			Algorithm: "direct", Operation: "all_reduce", Over: "mem",
			Bytes: c.bytes, Factor: c.factor,
		})
	}
	for _, test := range []struct {
		bytes  int
		factor float64
	}{{0, 2}, {1 << 10, 2}, {1 << 15, 3}, {1 << 20, 4}, {1 << 30, 4}} {
		if got := x.factor("direct", plan.AllReduce, "mem", test.bytes); got < test.factor-0.01 || got > test.factor+0.01 {
			t.Errorf("%d bytes: factor %v, want %v", test.bytes, got, test.factor)
		}
	}
	if got := x.factor("direct", plan.Broadcast, "mem", 1); got != 1 {
		t.Errorf("an operation without corrections: factor %v, want 1", got)
	}
	// A correction changes the choice if no rule does.
	x.Rules = nil
	p, w := plan.Problem{Op: plan.AllReduce, Size: 2, Count: 1 << 20}, Where{Memory: "mem", ElementBytes: 4}
	first, _ := x.Choose(p, w)
	x.Corrections = []Correction{{
		Algorithm: first.Name, Operation: "all_reduce", Over: "mem", Bytes: 1 << 22,
		Factor: 1e6,
	}}
	if second, _ := x.Choose(p, w); second.Name == first.Name {
		t.Errorf("%s was chosen although it takes a million times as long", first.Name)
	}
}

func TestOver(t *testing.T) {
	pairs := []plan.Place{
		{Worker: 0, Domain: 0},
		{Worker: 0, Domain: 0},
		{Worker: 1, Domain: 1, Host: 1},
		{Worker: 1, Domain: 1, Host: 1},
	}
	for _, test := range []struct {
		p    plan.Problem
		w    Where
		want string
	}{
		{plan.Problem{Size: 2}, Where{Memory: "mem"}, "mem"},
		{plan.Problem{Size: 2, Places: apart(2, 2)}, Where{Frames: "tcp"}, "tcp"},
		{plan.Problem{Size: 2, Places: apart(2, 1)}, Where{Frames: "tcp"}, "network"},
		{plan.Problem{Size: 4, Places: pairs}, Where{Memory: "shm", Frames: "tcp"}, "shm+network"},
	} {
		if got := test.w.over(test.p); got != test.want {
			t.Errorf("%+v over %+v: %q, want %q", test.p, test.w, got, test.want)
		}
	}
}

func TestSaveAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table.json")
	x := table(t)
	x.Machine = "a test"
	if err := x.Save(path); err != nil {
		t.Fatal(err)
	}
	if y, err := Load(path); err != nil || !reflect.DeepEqual(x, y) {
		t.Errorf("%v; wrote\n%+v\nread\n%+v", err, x, y)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("%v; beside the table lies %v", err, left)
	}
	if err := x.Save(filepath.Join(path, "below a file")); err == nil {
		t.Error("a table was written below a file")
	}
	if _, err := Load(path + ".missing"); err == nil {
		t.Error("a missing table was read")
	}
}

func TestRefused(t *testing.T) {
	for _, test := range []struct{ change, to, want string }{
		{`"version": 1`, `"version": 2`, "this build reads version 1"},
		{`"copy_bytes_per_second"`, `"copy_byts_per_second"`, "unknown field"},
		{`1.2e10`, `0`, "want positive numbers"},
		{`"frame_ns": 8000`, `"frame_ns": -8000`, `transport "unix" has a negative`},
		{`"network"`, `"internet"`, `no transport "network"`},
		{`"rules": [`, `"rules": [{"algorithm": "magic"},`, `rule 0: no algorithm "magic"`},
		{`"rules": [`, `"rules": [{"algorithm": "direct", "operation": "sum"},`, `rule 0: no operation "sum"`},
		{`"rules": [`, `"rules": [{"algorithm": "direct", "bytes_min": 9, "bytes_max": 8},`, "an empty range"},
		{
			`"version": 1,`,
			`"version": 1, "corrections": [{"algorithm": "direct", "operation": "reduce", "over": "mem", ` +
				`"bytes": 1, "factor": 0}],`,
			"correction 0",
		},
	} {
		text := strings.Replace(string(builtIn), test.change, test.to, 1)
		if text == string(builtIn) {
			t.Fatalf("the built-in table does not hold %s", test.change)
		}
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.to, err, test.want)
		}
	}
	if _, err := Parse(append(slices.Clone(builtIn), "{}"...)); err == nil {
		t.Error("text after the table was taken")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(builtIn)
	f.Add([]byte(`{"version": 1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		x, err := Parse(text)
		if err != nil {
			return
		}
		// An accepted table can be used.
		for _, n := range []int{1, 2, 5} {
			if _, err := x.Choose(plan.Problem{Op: plan.AllReduce, Size: n, Count: 1000},
				Where{Memory: "mem", ElementBytes: 4}); err != nil {
				t.Errorf("%s: %v", text, err)
			}
		}
	})
}

func TestExplain(t *testing.T) {
	text := Default().Explain(plan.Problem{Op: plan.AllReduce, Size: 4, Count: 1 << 20},
		Where{Memory: "mem", ElementBytes: 4}, "", "")
	for _, want := range []string{"4 MiB, over mem", "built in", "predicted", "the shortest time", "recursive_doubling"} {
		if !strings.Contains(text, want) {
			t.Errorf("the explanation lacks %q:\n%s", want, text)
		}
	}
	x := table(t)
	x.Rules = []Rule{{Algorithm: "recursive_doubling"}}
	text = x.Explain(plan.Problem{Op: plan.AllReduce, Size: 4, Count: 8, Places: apart(4, 4)}, Where{Frames: "tcp"}, "",
		"")
	if !strings.Contains(text, "a rule of the table names it") || !strings.Contains(text, "direct  ") {
		t.Errorf("the explanation lacks the rule, or what does not fit:\n%s", text)
	}
}

func TestRounded(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0s", 999: "999ns", 123456: "123µs", 1234567890: "1.23s"} {
		if got := rounded(d).String(); got != want {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
}
