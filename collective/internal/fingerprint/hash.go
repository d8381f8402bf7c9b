package fingerprint

import (
	"math/bits"
	"unsafe"
)

// The hash is the same in every process and every build, because it is sent to other processes. It protects
// against mistakes, not against attacks. It multiplies to 128 bits and folds, a word at a time, as wyhash
// does.
const (
	// Seed is the first argument of the first hash of a sequence.
	Seed = 0x9e3779b97f4a7c15 // 2^64 / golden ratio

	hashPrime = 0xd6e8feb86659fd93 // an odd number without pattern (Pelle Evensen's rrmxmx)
)

// Hash returns the hash of a word and of what h is the hash of.
func Hash(h, word uint64) uint64 {
	hi, lo := bits.Mul64(h^word, hashPrime)
	return (hi ^ lo) + Seed
}

// HashInts is Hash for a list of numbers.
func HashInts(h uint64, ns []int) uint64 {
	h = Hash(h, uint64(len(ns)))
	for _, n := range ns {
		h = Hash(h, uint64(n))
	}
	return h
}

// HashString is Hash for a text.
func HashString(h uint64, s string) uint64 {
	h = Hash(h, uint64(len(s)))
	b := unsafe.Slice(unsafe.StringData(s), len(s))
	for len(b) >= 8 {
		h = Hash(h, uint64(b[0])|uint64(b[1])<<8|uint64(b[2])<<16|uint64(b[3])<<24|
			uint64(b[4])<<32|uint64(b[5])<<40|uint64(b[6])<<48|uint64(b[7])<<56)
		b = b[8:]
	}
	var last uint64
	for i, c := range b {
		last |= uint64(c) << (8 * i)
	}
	return Hash(h, last)
}
