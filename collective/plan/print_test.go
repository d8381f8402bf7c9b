package plan

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// TestDraw compares the texts of some plans with testdata, which docs/algorithms.md links to. Rewrite them with: go
// test -run TestDraw -update
func TestDraw(t *testing.T) {
	for _, c := range []struct {
		file    string
		of      Algorithm
		problem Problem
	}{
		{"direct_all_reduce_3", direct, Problem{Op: AllReduce, Size: 3, Count: 1000}},
		{"direct_all_reduce_mean_2", direct, Problem{Op: AllReduce, Reduce: Mean, Size: 2, Count: 100}},
		{"direct_reduce_3", direct, Problem{Op: Reduce, Size: 3, Count: 1000, Root: 2}},
		{"direct_reduce_scatter_3", direct, Problem{Op: ReduceScatter, Size: 3, Count: 9, Counts: []int{2, 3, 4}}},
		{"direct_all_gather_3", direct, Problem{Op: AllGather, Size: 3, Count: 9, Counts: []int{2, 3, 4}}},
		{"direct_gather_3", direct, Problem{Op: Gather, Size: 3, Count: 9, Root: 1}},
		{"direct_all_to_all_3", direct, Problem{Op: AllToAll, Size: 3, Count: 9}},
		{"direct_broadcast_3", direct, Problem{Op: Broadcast, Size: 3, Count: 10, Root: 2}},
		{"direct_barrier_2", direct, Problem{Op: Barrier, Size: 2}},
		{"eager_all_reduce_3", eager, Problem{Op: AllReduce, Size: 3, Count: 10, Stage: 10}},
		{"eager_scatter_3", eager, Problem{Op: Scatter, Size: 3, Count: 9, Stage: 10}},
		{"staged_all_reduce_2", staged, Problem{Op: AllReduce, Size: 2, Count: 600, Private: true, Stage: 384}},
		{"staged_all_reduce_mean_3", staged, Problem{
			Op: AllReduce, Reduce: Mean, Size: 3, Count: 600, Private: true,
			Stage: 3000,
		}},
		{"staged_reduce_scatter_2", staged, Problem{Op: ReduceScatter, Size: 2, Count: 256, Private: true, Stage: 384}},
		{"staged_broadcast_3", staged, Problem{Op: Broadcast, Size: 3, Count: 500, Private: true, Stage: 576}},
		{"staged_all_to_all_3", staged, Problem{Op: AllToAll, Size: 3, Count: 300, Private: true, Stage: 576}},
		{"direct_frames_all_reduce_2", directFrames, Problem{Op: AllReduce, Size: 2, Count: 1000}},
		{"direct_frames_all_reduce_mean_5", directFrames, Problem{Op: AllReduce, Reduce: Mean, Size: 5, Count: 640}},
		{"direct_frames_reduce_3", directFrames, Problem{Op: Reduce, Size: 3, Count: 192, Root: 1}},
		{"direct_frames_reduce_scatter_4", directFrames, Problem{Op: ReduceScatter, Size: 4, Count: 40}},
		{"direct_frames_broadcast_4", directFrames, Problem{Op: Broadcast, Size: 4, Count: 256, Root: 2}},
		{"direct_frames_all_to_all_4", directFrames, Problem{Op: AllToAll, Size: 4, Count: 16}},
		{"direct_frames_send_3", directFrames, Problem{Op: Send, Size: 3, Count: 10, Root: 2, Peer: 1}},
		{"recursive_doubling_all_reduce_1", recursiveDoubling, Problem{Op: AllReduce, Size: 1, Count: 10}},
		{"recursive_doubling_all_reduce_4", recursiveDoubling, Problem{Op: AllReduce, Size: 4, Count: 10}},
		{"recursive_doubling_all_reduce_mean_5", recursiveDoubling, Problem{Op: AllReduce, Reduce: Mean, Size: 5, Count: 10}},
		{"recursive_doubling_all_reduce_7", recursiveDoubling, Problem{Op: AllReduce, Size: 7, Count: 10}},
		{"recursive_doubling_all_reduce_11", recursiveDoubling, Problem{Op: AllReduce, Size: 11, Count: 10}},
		{"recursive_doubling_broadcast_6", recursiveDoubling, Problem{Op: Broadcast, Size: 6, Count: 10, Root: 4}},
		{"recursive_doubling_reduce_6", recursiveDoubling, Problem{Op: Reduce, Size: 6, Count: 10, Root: 3}},
		{"recursive_doubling_gather_6", recursiveDoubling, Problem{Op: Gather, Size: 6, Count: 12, Root: 3}},
		{"recursive_doubling_scatter_6", recursiveDoubling, Problem{Op: Scatter, Size: 6, Count: 12, Root: 3}},
		{"recursive_doubling_all_gather_5", recursiveDoubling, Problem{Op: AllGather, Size: 5, Count: 10}},
		{"recursive_doubling_barrier_5", recursiveDoubling, Problem{Op: Barrier, Size: 5}},
		{"rabenseifner_all_reduce_4", rabenseifner, Problem{Op: AllReduce, Size: 4, Count: 256}},
		{"rabenseifner_all_reduce_mean_7", rabenseifner, Problem{Op: AllReduce, Reduce: Mean, Size: 7, Count: 448}},
		{"rabenseifner_reduce_5", rabenseifner, Problem{Op: Reduce, Size: 5, Count: 320, Root: 3}},
		{"rabenseifner_reduce_scatter_6", rabenseifner, Problem{Op: ReduceScatter, Size: 6, Count: 60}},
		{"rabenseifner_all_gather_4", rabenseifner, Problem{Op: AllGather, Size: 4, Count: 40}},
		{"rabenseifner_broadcast_5", rabenseifner, Problem{Op: Broadcast, Size: 5, Count: 320, Root: 2}},
		{"double_tree_all_reduce_8", doubleTree, Problem{Op: AllReduce, Size: 8, Count: 128}},
		{"double_tree_all_reduce_segments_5", doubleTree, Problem{Op: AllReduce, Size: 5, Count: 12800}},
		{"double_tree_reduce_6", doubleTree, Problem{Op: Reduce, Size: 6, Count: 128, Root: 1}},
		{"double_tree_broadcast_7", doubleTree, Problem{Op: Broadcast, Size: 7, Count: 128, Root: 2}},
		{"hierarchical_all_reduce_2x2", hierarchical, Problem{Op: AllReduce, Size: 4, Count: 256, Places: shaped(2, 2)}},
		{
			"hierarchical_all_reduce_mean_2x3", hierarchical,
			Problem{Op: AllReduce, Reduce: Mean, Size: 6, Count: 192, Places: shaped(3, 3)},
		},
		{
			"hierarchical_all_reduce_private_2x2", hierarchical,
			Problem{Op: AllReduce, Size: 4, Count: 256, Places: shaped(2, 2), Private: true, Stage: 256},
		},
		{"hierarchical_all_gather_3x2", hierarchical, Problem{Op: AllGather, Size: 6, Count: 60, Places: shaped(2, 2, 2)}},
		{"hierarchical_reduce_3_2", hierarchical, Problem{Op: Reduce, Size: 5, Count: 128, Root: 4, Places: shaped(3, 2)}},
		{"hierarchical_barrier_3_2", hierarchical, Problem{Op: Barrier, Size: 5, Places: shaped(3, 2)}},
		{
			"hierarchical_long_all_reduce_4x2", hierarchicalLong,
			Problem{Op: AllReduce, Size: 8, Count: 512, Places: shaped(2, 2, 2, 2)},
		},
		{
			"hierarchical_long_all_reduce_2x3", hierarchicalLong,
			Problem{Op: AllReduce, Size: 6, Count: 384, Places: shaped(3, 3)},
		},
		{
			"hierarchical_long_reduce_scatter_2x2", hierarchicalLong,
			Problem{Op: ReduceScatter, Size: 4, Count: 40, Places: shaped(2, 2)},
		},
		{
			"hierarchical_long_broadcast_2x2", hierarchicalLong,
			Problem{Op: Broadcast, Size: 4, Count: 256, Root: 1, Places: shaped(2, 2)},
		},
		{"ring_all_reduce_3", ring, Problem{Op: AllReduce, Size: 3, Count: 192, Order: Any}},
		{"ring_reduce_scatter_3", ring, Problem{Op: ReduceScatter, Size: 3, Count: 9, Counts: []int{2, 3, 4}, Order: Any}},
		{"ring_broadcast_3", ring, Problem{Op: Broadcast, Size: 3, Count: 12800, Root: 1}},
		{"reduce_broadcast_all_reduce_6", reduceBroadcast, Problem{Op: AllReduce, Size: 6, Count: 10}},
		{"reduce_broadcast_barrier_5", reduceBroadcast, Problem{Op: Barrier, Size: 5}},
	} {
		t.Run(c.file, func(t *testing.T) {
			d, err := Draw(c.of, c.problem)
			if err != nil {
				t.Fatal(err)
			}
			got := d.String()
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

func TestDrawRefuses(t *testing.T) {
	if d, err := Draw(direct, Problem{Op: AllReduce}); err == nil {
		t.Errorf("Draw of no ranks = %v, want an error", d)
	}
}
