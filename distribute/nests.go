package distribute

import (
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// named returns the leaves of a nest and their paths, which must be the same on all replicas.
func named(v Value) (leaves []any, names []string) {
	_, _ = tensor.Zip(func(path string, leaf []any) (any, error) {
		leaves, names = append(leaves, leaf[0]), append(names, path)
		return leaf[0], nil
	}, nil, v)
	return leaves, names
}

// purpose describes a user's call with a nest, whose replicas exchange something first.
func purpose(op string, leaves []any, names []string) string {
	if len(leaves) > 1 {
		return op + " of " + nestText(names)
	}
	leaf, what := leaves[0], "a tensor"
	if s, ok := leaf.(*tensor.IndexedSlices); ok {
		leaf, what = s.Values, "IndexedSlices"
	}
	if names[0] != "" {
		what = names[0]
	}
	t := leaf.(*tensor.Tensor)
	return op + " of " + what + ", " + t.DType().String() + " " + tensor.FormatShape(t.Shape())
}

// leafName names a tensor of a call in errors.
func leafName(i int, name string) string {
	if name == "" {
		return fmt.Sprintf("value %d", i)
	}
	return fmt.Sprintf("value %d (%s)", i, name)
}

func nameAt(names []string, i int) string {
	if names == nil {
		return ""
	}
	return names[i]
}

// knownDense is a cache of nests that had tensors on all replicas. These are reduced without another exchange.
// A replica that has IndexedSlices always exchanges, so the caches of all replicas are equal.
type knownDense map[uint64]struct{}

// knownDenseMax bounds the cache. Programs have fewer different nests; otherwise the cache is cleared and
// filled again.
const knownDenseMax = 4096

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
