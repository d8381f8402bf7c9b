package failure

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func at(ms int) time.Time {
	return time.Unix(1_000_000, 0).Add(time.Duration(ms) * time.Millisecond).UTC()
}

func TestFind(t *testing.T) {
	for _, c := range []struct {
		name    string
		records []Record
		root    int
		kind    string
		unseen  bool
		others  []int
	}{
		{"one", []Record{{Worker: 2, Kind: "panic", Time: at(1)}}, 2, "panic", false, nil},
		{
			"killed, found late by its launcher",
			[]Record{
				{Worker: 0, Kind: "lost", Blames: []int{1}, Time: at(1)},
				{Worker: 1, Kind: "signal", Time: at(5)},
				{Worker: 2, Kind: "lost", Blames: []int{1}, Time: at(2)},
			},
			1, "signal", false,
			[]int{0, 2},
		},
		{
			"two independent failures: the earlier",
			[]Record{{Worker: 0, Kind: "error", Time: at(9)}, {Worker: 1, Kind: "memory", Time: at(8)}},
			1, "memory", false,
			[]int{0},
		},
		{
			"at the same time: the lower",
			[]Record{{Worker: 3, Kind: "error", Time: at(9)}, {Worker: 1, Kind: "error", Time: at(9)}},
			1, "error", false,
			[]int{3},
		},
		{
			"a whole host is gone",
			[]Record{
				{Worker: 0, Kind: "lost", Blames: []int{2, 3}, Time: at(7)},
				{Worker: 1, Kind: "timeout", Blames: []int{2}, Time: at(6), Step: 12, Phase: "reduce", Message: "m", Stack: "s"},
			},
			2, "timeout", true,
			[]int{0, 1},
		},
		{
			"stuck, and killed for it by its launcher",
			[]Record{
				{Worker: 0, Kind: "timeout", Blames: []int{1}, Time: at(6), Step: 12, Phase: "reduce", Message: "m", Stack: "s"},
				{Worker: 1, Kind: "interrupted", Time: at(9), ExitCode: 137},
			},
			1, "timeout", true,
			[]int{0},
		},
		{
			"each loses the other: the earlier",
			[]Record{
				{Worker: 0, Kind: "lost", Blames: []int{1}, Time: at(7)},
				{Worker: 1, Kind: "lost", Blames: []int{0}, Time: at(6)},
			},
			1, "lost", false,
			[]int{0},
		},
		{
			"two lose each other, and a third that is notified ends first",
			[]Record{
				{Worker: 0, Kind: "lost", Blames: []int{2}, Time: at(7)},
				{Worker: 1, Kind: "lost", Blames: []int{2}, Time: at(6)},
				{Worker: 2, Kind: "lost", Blames: []int{0}, Time: at(9)},
			},
			0, "lost", false,
			[]int{1, 2},
		},
		{
			"cut off from one, and notified by another",
			[]Record{
				{Worker: 0, Kind: "lost", Blames: []int{2}, Time: at(6), Step: 12, Phase: "reduce", Message: "m", Stack: "s"},
				{Worker: 1, Kind: "lost", Blames: []int{2}, Time: at(7)},
				{Worker: 2, Kind: "lost", Time: at(5)},
			},
			2, "lost", true,
			[]int{0, 1},
		},
		{
			"cut off from the store, which it reports itself",
			[]Record{
				{Worker: 0, Kind: "lost", Blames: []int{1}, Time: at(5)},
				{Worker: 1, Kind: "store", Time: at(6)},
				{Worker: 2, Kind: "lost", Blames: []int{1}, Time: at(4)},
			},
			1, "store", false,
			[]int{0, 2},
		},
		{
			"a time-out that blames no worker is still weaker than a failure",
			[]Record{{Worker: 0, Kind: "timeout", Time: at(1)}, {Worker: 1, Kind: "exit", Time: at(6)}},
			1, "exit", false,
			[]int{0},
		},
		{
			"a loss counts for more than an interruption",
			[]Record{{Worker: 0, Kind: "interrupted", Time: at(1)}, {Worker: 1, Kind: "lost", Time: at(6)}},
			1, "lost", false,
			[]int{0},
		},
		{
			"a mismatch, which all report",
			[]Record{{Worker: 1, Kind: "mismatch", Time: at(4)}, {Worker: 0, Kind: "mismatch", Time: at(3)}},
			0, "mismatch", false,
			[]int{1},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			for range 10 { // in any order
				records := slices.Clone(c.records)
				rand.Shuffle(len(records), func(i, j int) { records[i], records[j] = records[j], records[i] })
				rep, ok := Find(records)
				var others []int
				for _, o := range rep.Others {
					others = append(others, o.Worker)
				}
				if !ok || rep.Root.Worker != c.root || rep.Root.Kind != c.kind || rep.Unseen != c.unseen || !slices.Equal(others,
					c.others) {
					t.Fatalf("got root %+v, unseen %v, others %v; want worker %d %s, unseen %v, others %v", rep.Root, rep.Unseen,
						others, c.root, c.kind, c.unseen, c.others)
				}
				if rep.Unseen && (rep.Root.Step != 12 || rep.Root.Phase != "reduce" || !rep.Root.Time.Equal(at(6)) ||
					rep.Root.ExitCode != -1 || rep.Root.Stack != "s" || !strings.HasSuffix(rep.Root.Message, "reported: m")) {
					t.Fatalf("the unseen root is %+v", rep.Root)
				}
			}
		})
	}
	if _, ok := Find(nil); ok {
		t.Error("a root cause of no records")
	}
}

func TestMerge(t *testing.T) {
	got := Merge(Record{Worker: 1, Kind: "panic", Message: "m", ExitCode: -1, Time: at(1)}, Record{
		Worker: 1,
		Kind:   "exit", Host: "h", PID: 7, ExitCode: 2, Time: at(3),
	})
	if got.Kind != "panic" || got.Message != "m" || got.ExitCode != 2 || got.Host != "h" || got.PID != 7 ||
		!got.Time.Equal(at(1)) {
		t.Errorf("got %+v", got)
	}
}
