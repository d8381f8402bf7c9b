package distribute

import "testing"

// TestChooseSparse: the choice depends on the numbers of rows and of distinct rows, and on the size of the tensor.
func TestChooseSparse(t *testing.T) {
	const row = 64
	for _, c := range []struct {
		name string
		e    extent
		want Sparse
	}{
		{"lengths alone: it depends on the indices", extent{rows: 40, longest: 10, whole: 1000, rowBytes: row}, SparseAuto},
		{
			"lengths alone: all rows of all replicas",
			extent{rows: 4000, longest: 1000, whole: 1000, rowBytes: row},
			SparseDense,
		},
		{"lengths alone, of a whole that is not known", extent{rows: 4000, longest: 1000, rowBytes: row}, SparseAuto},
		{"no rows at all", extent{whole: 1000, rowBytes: row}, SparseGather},
		{"different rows", extent{rows: 40, distinct: 40, longest: 10, whole: 1000, rowBytes: row}, SparseGather},
		{
			"the same rows on four replicas",
			extent{rows: 40, distinct: 10, longest: 10, whole: 1000, rowBytes: row},
			SparseReduce,
		},
		{
			"the same rows on two replicas",
			extent{rows: 20, distinct: 10, longest: 10, whole: 1000, rowBytes: row},
			SparseGather,
		},
		{
			"the same rows on four replicas, of a small whole",
			extent{rows: 40, distinct: 10, longest: 10, whole: 9, rowBytes: row},
			SparseDense,
		},
		{"each row many times", extent{rows: 4000, distinct: 10, longest: 1000, whole: 100_000, rowBytes: row}, SparseReduce},
	} {
		if got := c.e.choose(); got != c.want {
			t.Errorf("%s: %+v: got %v, want %v", c.name, c.e, got, c.want)
		}
	}
}
