package shm

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

func TestPollsWith(t *testing.T) {
	for _, c := range []struct {
		name string
		cpus [][]int // by rank
		want []int
	}{
		{"a CPU each", [][]int{{0}, {1}}, []int{pollsFirst, pollsFirst}},
		{"not bound", [][]int{{0, 1}, {0, 1}}, []int{pollsFirst, pollsFirst}},
		{"more ranks than CPUs", [][]int{{0, 1}, {0, 1}, {0, 1}}, []int{pollsEach, pollsEach, pollsEach}},
		{"two on one CPU, others free", [][]int{{0}, {0}, {0, 1, 2}}, []int{pollsEach, pollsEach, pollsFirst}},
		{"crowded on two of four CPUs", [][]int{{0, 1}, {0, 1}, {0, 1}, {2, 3}}, []int{
			pollsEach, pollsEach, pollsEach, pollsFirst,
		}},
		{"beyond 64 and 1,024 CPUs", [][]int{{64}, {1024}, {8191}}, []int{pollsFirst, pollsFirst, pollsFirst}},
		{"a rank with unknown CPUs", [][]int{{0}, nil, {1, 2}}, []int{pollsEach, pollsEach, pollsFirst}},
		{"beyond the sets", [][]int{{1 << 20}, {1}}, []int{pollsEach, pollsEach}},
	} {
		sets := make([]*cpuSet, len(c.cpus))
		for r, cpus := range c.cpus {
			sets[r] = new(cpuSet)
			sets[r].store([]int{0, 5, 7000}) // of before
			sets[r].store(cpus)
		}
		var got []int
		for r := range sets {
			got = append(got, pollsWith(sets, r))
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

// TestPollsAgain checks that a rank that blocked at once, for want of CPU time, polls when there is enough.
func TestPollsAgain(t *testing.T) {
	a, _ := two(t)
	a.want = want{rank: -1, target: 1}
	a.calls = 1
	a.countCPUs(time.Now())
	want := a.polls // pollsNot on a machine with one CPU
	a.counted = time.Now().Add(-2 * countEvery)
	a.polls = pollsNot
	for range separateEvery {
		a.spin()
	}
	if a.polls != want {
		t.Errorf("it polls %d times, want %d", a.polls, want)
	}
}

// TestParkedNowhere checks that a rank that is parked takes no CPU from the others' choice.
func TestParkedNowhere(t *testing.T) {
	a, _ := two(t)
	a.separate()
	if a.mine.at.Load() == 0 {
		t.Skip("the CPU is unknown")
	}
	a.park(parkedLong)
	if at := a.mine.at.Load(); at != 0 {
		t.Errorf("parked on CPU %d, want on none", at-1)
	}
	a.unpark()
}
