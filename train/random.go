package train

// randomState returns the initial random state of a replica for one batch of a step. It depends on the arguments
// only. So a replica's dropout masks are the same wherever and however often the step is computed, and differ
// between replicas, steps, the passes of a step and its batches. A pass is one call of [Trainer.Gradients] for
// the step, from 0; the steps of Fit have one. batch is the number of the batch in a step that accumulates the
// gradients of several, from 0.
func randomState(seed, step, pass int64, batch, replica int) [3]uint64 {
	h := mix(uint64(seed))
	h = mix(h ^ uint64(step))
	if pass > 0 {
		h = mix(h ^ uint64(pass)<<32)
	}
	if batch > 0 {
		h = mix(^h ^ uint64(batch)) // differs from that of every pass, whose low bits are 0
	}
	h = mix(h ^ uint64(replica))
	return [3]uint64{mix(h + 1), mix(h + 2), mix(h + 3)}
}

// mix is one step of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): a bijection
// in which every bit of x changes about half of the bits of the result.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
