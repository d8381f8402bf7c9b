package data

import (
	"context"
	"math/bits"
	"math/rand/v2"
)

type epochKey struct{}

// WithEpoch returns a context with the epoch number, from 0. It determines the order and the random choices
// of datasets that are read with the context.
func WithEpoch(ctx context.Context, epoch int) context.Context {
	return context.WithValue(ctx, epochKey{}, epoch)
}

// Epoch returns the number that [WithEpoch] set in ctx, or 0.
func Epoch(ctx context.Context) int {
	epoch, _ := ctx.Value(epochKey{}).(int)
	return epoch
}

// Uses of random numbers. Streams for different uses must differ, even with the same seed and epoch.
const (
	forShuffle uint64 = iota + 1
	forSplit
	forMap
	forMix
)

// reseed starts the stream of random numbers for seed and words.
func reseed(g *rand.PCG, seed int64, words ...uint64) {
	h := mix(uint64(seed))
	for _, w := range words {
		h = mix(h ^ mix(w))
	}
	g.Seed(h, mix(h+1))
}

// mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) over its increment: a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// permute shuffles order (Fisher and Yates). It uses the generator directly, whose output is specified, so
// that orders do not change between Go releases. The bias of n/2^64 is not measurable.
func permute[T int | uint32](g *rand.PCG, order []T) {
	for i := len(order) - 1; i > 0; i-- {
		j, _ := bits.Mul64(g.Uint64(), uint64(i+1))
		order[i], order[j] = order[j], order[i]
	}
}
