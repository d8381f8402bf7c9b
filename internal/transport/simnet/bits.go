package simnet

import "math/bits"

// bitSet is a set of ranks. The nil set is empty.
type bitSet []uint64

func (b bitSet) has(rank int) bool { return b != nil && b[rank/64]>>(rank%64)&1 != 0 }

// add adds a rank of a group of a size.
func (b *bitSet) add(rank, size int) {
	if *b == nil {
		*b = make(bitSet, (size+63)/64)
	}
	(*b)[rank/64] |= 1 << (rank % 64)
}

// without returns the lowest rank of b that is not in other, or -1.
func (b bitSet) without(other bitSet) int {
	for i, word := range b {
		if other != nil {
			word &^= other[i]
		}
		if word != 0 {
			return 64*i + bits.TrailingZeros64(word)
		}
	}
	return -1
}
