package shm

import (
	"fmt"
	"testing"
)

func TestPollsWith(t *testing.T) {
	for _, c := range []struct {
		name  string
		cpus  [][]int // by rank
		quota int
		want  []int
	}{
		{"a CPU each", [][]int{{0}, {1}}, 0, []int{pollsFirst, pollsFirst}},
		{"not bound", [][]int{{0, 1}, {0, 1}}, 0, []int{pollsFirst, pollsFirst}},
		{"more ranks than CPUs", [][]int{{0, 1}, {0, 1}, {0, 1}}, 0, []int{pollsEach, pollsEach, pollsEach}},
		{"two on one CPU, others free", [][]int{{0}, {0}, {0, 1, 2}}, 0, []int{pollsEach, pollsEach, pollsFirst}},
		{"crowded on two of four CPUs", [][]int{{0, 1}, {0, 1}, {0, 1}, {2, 3}}, 0, []int{
			pollsEach, pollsEach, pollsEach, pollsFirst,
		}},
		{"beyond 64 and 1,024 CPUs", [][]int{{64}, {1024}, {8191}}, 0, []int{pollsFirst, pollsFirst, pollsFirst}},
		{"a rank with unknown CPUs", [][]int{{0}, nil, {1, 2}}, 0, []int{pollsEach, pollsEach, pollsFirst}},
		{"beyond the sets", [][]int{{1 << 20}, {1}}, 0, []int{pollsEach, pollsEach}},
		{"the time of one CPU", [][]int{{0, 1}, {0, 1}}, 1, []int{pollsNot, pollsNot}},
		{"the time of two CPUs", [][]int{{0, 1}, {0, 1}}, 2, []int{pollsFirst, pollsFirst}},
	} {
		sets := make([]*cpuSet, len(c.cpus))
		for r, cpus := range c.cpus {
			sets[r] = new(cpuSet)
			sets[r].store([]int{0, 5, 7000}) // of before
			sets[r].store(cpus)
		}
		var got []int
		for r := range sets {
			got = append(got, pollsWith(sets, r, c.quota))
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}
