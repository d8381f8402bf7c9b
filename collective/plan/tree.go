package plan

import "math/bits"

// canonical folds the values of ranks [lo, lo+n), at least one, along the canonical tree: level by level,
// neighbours 2j and 2j+1 are combined, the lower is always the left operand, and an odd last one moves up
// unchanged. Seen from the root, the first 2^k ranks are the left subtree, where 2^k is the largest power of
// two below n.
func canonical[V any](lo, n int, leaf func(rank int) V, node func(left, right V) V) V {
	if n == 1 {
		return leaf(lo)
	}
	left := 1 << (bits.Len(uint(n-1)) - 1)
	return node(canonical(lo, left, leaf, node), canonical(lo+left, n-left, leaf, node))
}

// isNode reports whether a range of ranks is a node of the canonical tree over size ranks.
func isNode(size int, r Ranks) bool {
	lo, hi := 0, size
	for r.Lo >= lo && r.Hi <= hi && r.Lo < r.Hi {
		if r == (Ranks{lo, hi}) {
			return true
		}
		if hi-lo == 1 {
			break
		}
		if middle := lo + 1<<(bits.Len(uint(hi-lo-1))-1); r.Lo < middle {
			hi = middle
		} else {
			lo = middle
		}
	}
	return false
}

// sibling returns the node with which a node of the canonical tree over size ranks is combined, and their
// parent. The root has none.
func sibling(size int, node Ranks) (other, parent Ranks, ok bool) {
	lo, hi := 0, size
	for (Ranks{lo, hi}) != node {
		middle := lo + 1<<(bits.Len(uint(hi-lo-1))-1)
		parent, ok = Ranks{lo, hi}, true
		if node.Lo < middle {
			other, hi = Ranks{middle, hi}, middle
		} else {
			other, lo = Ranks{lo, middle}, middle
		}
	}
	return other, parent, ok
}
