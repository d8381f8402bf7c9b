// Package dense computes with tensors in the host's memory: sums along the canonical tree and over axes, division,
// conversion, concatenation along an axis, and operations on rows. It returns new tensors, unless a function says
// otherwise. Arguments have one dtype and fitting shapes where nothing else is said.
package dense
