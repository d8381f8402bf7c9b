package data

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
)

// stage transforms an order: a function from positions to indices.
type stage interface {
	// length returns the number of positions after it, where there were n.
	length(n int) int
	// order returns the order after it, where at is that of n positions.
	order(n, epoch int, at func(int) int) func(int) int
	// String describes it for [Fingerprint].
	String() string
}

// shuffled is the stage of Shuffle.
type shuffled struct{ seed int64 }

// listedMax is the largest number of elements whose order Shuffle computes as a list.
const listedMax = 1 << 26

func (s shuffled) length(n int) int { return n }

func (s shuffled) String() string { return fmt.Sprintf("Shuffle(%d)", s.seed) }

func (s shuffled) order(n, epoch int, at func(int) int) func(int) int {
	var g rand.PCG
	reseed(&g, s.seed, forShuffle, uint64(epoch))
	if n > listedMax {
		p := newPermutation(&g, uint64(n))
		return func(i int) int { return at(int(p.at(uint64(i)))) }
	}
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(i)
	}
	permute(&g, list)
	return func(i int) int { return at(int(list[i])) }
}

// first is the stage of Take.
type first struct{ n int }

func (s first) length(n int) int { return min(n, s.n) }

func (s first) String() string { return fmt.Sprintf("Take(%d)", s.n) }

func (s first) order(_, _ int, at func(int) int) func(int) int { return at }

// rest is the stage of Skip.
type rest struct{ n int }

func (s rest) length(n int) int { return n - min(n, s.n) }

func (s rest) String() string { return fmt.Sprintf("Skip(%d)", s.n) }

func (s rest) order(_, _ int, at func(int) int) func(int) int {
	return func(i int) int { return at(i + s.n) }
}

// every is the stage of Shard.
type every struct{ index, count int }

func (s every) length(n int) int { return shardLen(n, s.index, s.count) }

func (s every) String() string { return fmt.Sprintf("Shard(%d, %d)", s.index, s.count) }

func (s every) order(_, _ int, at func(int) int) func(int) int {
	return func(i int) int { return at(s.index + i*s.count) }
}

// permutation is a random permutation of the numbers below n that needs no list: a Feistel network over the
// smallest even number of bits that holds them. A result that is not below n is permuted again, which ends
// because the permutation is a cycle that contains the argument (cycle walking, Black and Rogaway 2002).
type permutation struct {
	n    uint64
	half int // bits
	keys [feistelRounds]uint64
}

// feistelRounds is the number of rounds. Four make a permutation that is pseudorandom if the rounds are (Luby and
// Rackoff 1988); mix is weaker than that, and a round is cheap.
const feistelRounds = 8

func newPermutation(g *rand.PCG, n uint64) *permutation {
	p := &permutation{n: n, half: max(1, (bits.Len64(n-1)+1)/2)}
	for i := range p.keys {
		p.keys[i] = g.Uint64()
	}
	return p
}

// at returns the number at position i < n.
func (p *permutation) at(i uint64) uint64 {
	mask := uint64(1)<<p.half - 1
	for {
		left, right := i>>p.half, i&mask
		for _, key := range p.keys {
			left, right = right, left^mix(right^key)&mask
		}
		if i = left<<p.half | right; i < p.n {
			return i
		}
	}
}
