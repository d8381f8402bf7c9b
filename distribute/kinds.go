package distribute

import (
	"context"
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/tensor"
)

// knownDense is a cache of nests that had tensors on all replicas. These are reduced without another exchange.
// A replica that has IndexedSlices always exchanges, so the caches of all replicas are equal.
type knownDense map[uint64]struct{}

// knownDenseMax bounds the cache. Programs have fewer different nests; otherwise the cache is cleared and
// filled again.
const knownDenseMax = 4096

// whichSparse returns which leaves are IndexedSlices (1) on which replica: sparse[replica][i], or nil if none
// is. The caller has not acquired the replica.
func (r *Replica) whichSparse(ctx context.Context, run *deadlock.Run, leaves []any, names []string, o Options) (all [][]int64, err error) {
	sparse := make([]int64, 0, 8)
	mine := true
	for _, leaf := range leaves {
		_, dense := leaf.(*tensor.Tensor)
		mine = mine && dense
		sparse = append(sparse, 0)
		if !dense {
			sparse[len(sparse)-1] = 1
		}
	}
	key := nestHash(leaves, names)
	if _, known := r.dense[key]; known && mine {
		return nil, nil
	}
	all, err = r.exchange(ctx, run, sparse, "which are sparse of "+nestText(names), o)
	if err != nil {
		return nil, err
	}
	for _, replica := range all {
		for _, is := range replica {
			if is != 0 {
				return all, nil
			}
		}
	}
	if r.dense == nil || len(r.dense) >= knownDenseMax {
		r.dense = knownDense{}
	}
	r.dense[key] = struct{}{}
	return nil, nil
}

// exchange gathers every replica's numbers on all replicas: all[replica][i]. what describes them in errors. The
// caller has not acquired the replica.
func (r *Replica) exchange(ctx context.Context, run *deadlock.Run, mine []int64, what string, o Options) ([][]int64, error) {
	if err := run.Acquire(r.local); err != nil {
		return nil, err
	}
	defer run.Release(r.local)
	n := len(mine)
	t := tensor.New(tensor.Int64, r.comm().Size()*n)
	numbers := tensor.Data[int64](t)
	copy(numbers[r.comm().Rank()*n:], mine)
	if err := r.do(ctx, run, Sum, t, t, what, o); err != nil {
		return nil, err
	}
	all := make([][]int64, r.comm().Size())
	for i := range all {
		all[i] = numbers[i*n : (i+1)*n]
	}
	return all, nil
}

// nestHash hashes a nest of tensors; equal nests have equal hashes on all replicas.
func nestHash(leaves []any, names []string) uint64 {
	const prime = 1099511628211 // FNV-1a, by words
	h := uint64(14695981039346656037)
	add := func(x uint64) { h = (h ^ x) * prime }
	for i, leaf := range leaves {
		for j := range len(names[i]) {
			add(uint64(names[i][j]))
		}
		add(1 << 32)
		if t, ok := leaf.(*tensor.Tensor); ok {
			add(uint64(t.DType()))
			for _, d := range t.Shape() {
				add(uint64(d))
			}
			add(1 << 33)
		}
	}
	return h
}

// nestText returns the names of a nest's first leaves. They must be the same on all replicas, whatever the
// leaves' types.
func nestText(names []string) string {
	const shown = 4
	if len(names) <= shown {
		return strings.TrimSpace("a nest " + strings.Join(names, " "))
	}
	return fmt.Sprintf("a nest %s and %d more", strings.Join(names[:shown], " "), len(names)-shown)
}
