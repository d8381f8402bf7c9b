package shm

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
)

func TestRoomOf(t *testing.T) {
	const own, shared = waiting.Own, waiting.Shared
	for _, c := range []struct {
		name string
		cpus [][]int // by rank
		want []waiting.Room
	}{
		{"a CPU each", [][]int{{0}, {1}}, []waiting.Room{own, own}},
		{"not bound", [][]int{{0, 1}, {0, 1}}, []waiting.Room{own, own}},
		{"more ranks than CPUs", [][]int{{0, 1}, {0, 1}, {0, 1}}, []waiting.Room{shared, shared, shared}},
		{"two on one CPU, others free", [][]int{{0}, {0}, {0, 1, 2}}, []waiting.Room{shared, shared, own}},
		{"crowded on two of four CPUs", [][]int{{0, 1}, {0, 1}, {0, 1}, {2, 3}}, []waiting.Room{shared, shared, shared, own}},
		{"beyond 64 and 1,024 CPUs", [][]int{{64}, {1024}, {8191}}, []waiting.Room{own, own, own}},
		{"a rank with unknown CPUs", [][]int{{0}, nil, {1, 2}}, []waiting.Room{shared, shared, own}},
		{"beyond the sets", [][]int{{1 << 20}, {1}}, []waiting.Room{shared, shared}},
	} {
		sets := make([]*cpuSet, len(c.cpus))
		for r, cpus := range c.cpus {
			sets[r] = new(cpuSet)
			sets[r].store([]int{0, 5, 7000}) // of before
			sets[r].store(cpus)
		}
		var got []waiting.Room
		for r := range sets {
			got = append(got, roomOf(sets, r))
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestLacksTime(t *testing.T) {
	type limits = []affinity.Limit
	for _, c := range []struct {
		name  string
		ranks []limits
		want  []bool
	}{
		{"no limit", []limits{nil, nil}, []bool{false, false}},
		{"one CPU for two", []limits{{{Group: 7, CPUs: 1}}, {{Group: 7, CPUs: 1}}}, []bool{true, true}},
		{"two CPUs for two", []limits{{{Group: 7, CPUs: 2}}, {{Group: 7, CPUs: 2}}}, []bool{false, false}},
		{"one CPU each", []limits{{{Group: 7, CPUs: 1}}, {{Group: 8, CPUs: 1}}}, []bool{false, false}},
		{"one CPU for two of three", []limits{{{Group: 7, CPUs: 1}}, {{Group: 7, CPUs: 1}}, nil}, []bool{true, true, false}},
		{"enough each, too little together", []limits{
			{{Group: 7, CPUs: 2}, {Group: 1, CPUs: 2}},
			{{Group: 8, CPUs: 2}, {Group: 1, CPUs: 2}},
			{{Group: 9, CPUs: 2}, {Group: 1, CPUs: 2}},
		}, []bool{true, true, true}},
		{"unknown groups", []limits{{{CPUs: 1}}, {{CPUs: 1}}}, []bool{true, true}},
	} {
		sets := make([]*limitSet, len(c.ranks))
		for r, l := range c.ranks {
			sets[r] = new(limitSet)
			sets[r].store(limits{{Group: 99, CPUs: 1}}) // of before
			sets[r].store(l)
		}
		for r, l := range c.ranks {
			if got := lacksTime(l, sets); got != c.want[r] {
				t.Errorf("%s: rank %d: %v, want %v", c.name, r, got, c.want[r])
			}
		}
	}
}

// TestRoomAgain checks that a rank that lacked CPU time notices when there is enough, after a while.
func TestRoomAgain(t *testing.T) {
	a, _ := two(t)
	now := time.Now()
	want := a.compare() // waiting.None on a machine with one CPU
	a.g.crowded = false
	a.counted, a.counts = now, waiting.None
	if got := a.room(now.Add(countEvery)); got != waiting.None {
		t.Errorf("the room is %v before %v have passed, want it unchanged", got, countEvery)
	}
	if got := a.room(now.Add(2 * countEvery)); got != want {
		t.Errorf("the room is %v, want %v", got, want)
	}
	if a.g.crowded = true; a.room(now.Add(2*countEvery)) != waiting.None {
		t.Error("a rank polls although the awaited one may need its processor of Go's scheduler")
	}
}
