package plan

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// TestExplain holds the texts of some plans: a change of an algorithm shows here, and docs/algorithms.md points here.
// Rewrite them with: go test -run TestExplain -update
func TestExplain(t *testing.T) {
	for _, c := range []struct {
		file    string
		of      Algorithm
		problem Problem
	}{
		{"direct_all_reduce_3", direct, Problem{Op: AllReduce, Size: 3, Count: 1000}},
		{"direct_all_reduce_mean_2", direct, Problem{Op: AllReduce, Reduce: Mean, Size: 2, Count: 100}},
		{"direct_broadcast_3", direct, Problem{Op: Broadcast, Size: 3, Count: 10, Root: 2}},
		{"direct_barrier_2", direct, Problem{Op: Barrier, Size: 2}},
		{"recursive_doubling_all_reduce_1", recursiveDoubling, Problem{Op: AllReduce, Size: 1, Count: 10}},
		{"recursive_doubling_all_reduce_4", recursiveDoubling, Problem{Op: AllReduce, Size: 4, Count: 10}},
		{"recursive_doubling_all_reduce_mean_5", recursiveDoubling, Problem{Op: AllReduce, Reduce: Mean, Size: 5, Count: 10}},
		{"recursive_doubling_all_reduce_7", recursiveDoubling, Problem{Op: AllReduce, Size: 7, Count: 10}},
		{"recursive_doubling_all_reduce_11", recursiveDoubling, Problem{Op: AllReduce, Size: 11, Count: 10}},
		{"recursive_doubling_broadcast_6", recursiveDoubling, Problem{Op: Broadcast, Size: 6, Count: 10, Root: 4}},
		{"recursive_doubling_barrier_5", recursiveDoubling, Problem{Op: Barrier, Size: 5}},
	} {
		t.Run(c.file, func(t *testing.T) {
			got, err := Explain(c.of, c.problem)
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", c.file+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s is now:\n%s\nwant:\n%s", file, got, want)
			}
		})
	}
}

func TestExplainRefuses(t *testing.T) {
	if text, err := Explain(direct, Problem{Op: AllReduce}); err == nil {
		t.Errorf("Explain of no ranks = %q, want an error", text)
	}
}
