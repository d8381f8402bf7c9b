package data

import (
	"context"
	"fmt"
	"iter"
	"slices"
)

// interleaved is the dataset of Interleave.
type interleaved struct {
	parts        []Pipeline
	cycle, block int
}

// Interleave reads several parts in turn, as TensorFlow's interleave does with cycle_length and block_length: block
// elements of each of cycle parts, one element after the other ([Pipeline.Prefetch] of a part reads ahead). A part that
// ends is replaced by the next one, when it would be its turn again. The order is always the same. So sorted files are
// mixed without reading all of them. The result has random access if all parts have it. Interleave panics unless cycle
// and block are positive.
func Interleave(cycle, block int, parts ...Pipeline) Pipeline {
	if cycle < 1 || block < 1 {
		panic(fmt.Sprintf("data: Interleave of %d parts and blocks of %d elements: want at least 1 of each", cycle, block))
	}
	x := &interleaved{slices.Clone(parts), cycle, block}
	for _, p := range parts {
		if p.ds != nil && !randomAccess(p) {
			return Pipeline{&interleavedStream{x}}
		}
	}
	return Pipeline{&view{base: x}}
}

// order calls take for each turn: take returns false if a part has ended. It returns false to end.
func (x *interleaved) order(open func(part int) bool, take func(part int) (more, proceed bool)) {
	slots, next, active := slices.Repeat([]int{-1}, x.cycle), 0, 0
	for at, taken := 0, 0; next < len(x.parts) || active > 0; {
		part := slots[at]
		switch {
		case part >= 0:
			more, proceed := take(part)
			if !proceed {
				return
			}
			if taken++; !more {
				slots[at] = -1
				active--
			}
			if !more || taken == x.block {
				at, taken = (at+1)%x.cycle, 0
			}
		case next < len(x.parts):
			if slots[at] = next; !open(next) {
				return
			}
			next++
			active++
		default:
			at = (at + 1) % x.cycle
		}
	}
}

// Len implements [Dataset].
func (x *interleaved) Len() int { return sumOfLens(x.parts) }

// Iter implements [Dataset].
func (x *interleaved) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, x) }

// Fingerprint implements [Fingerprinted].
func (x *interleaved) Fingerprint() uint64 {
	return partsFingerprint(fmt.Sprint("Interleave ", x.cycle, x.block), x.parts)
}

// Open implements [Seekable].
func (x *interleaved) Open(ctx context.Context) (Reader, error) {
	readers, err := readersOf(ctx, x.parts)
	if err != nil {
		return nil, err
	}
	type place struct{ part, at int }
	var places []place
	done := make([]int, len(readers))
	x.order(func(int) bool { return true }, func(part int) (more, proceed bool) {
		if done[part] == readers[part].Len() {
			return false, true
		}
		places = append(places, place{part, done[part]})
		done[part]++
		return true, true
	})
	return &partsReader{readers, len(places), func(p int) (part, at int) { return places[p].part, places[p].at }}, nil
}

// interleavedStream is an interleaved with a part that is a stream.
type interleavedStream struct{ *interleaved }

// Open replaces the method of interleaved, which needs random access.
func (x *interleavedStream) Open(context.Context) (Reader, error) { return nil, nil }

// Iter implements [Dataset].
func (x *interleavedStream) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		next := make([]func() (Element, error, bool), len(x.parts))
		stop := make([]func(), len(x.parts))
		defer func() {
			for _, f := range stop {
				if f != nil {
					f()
				}
			}
		}()
		x.order(func(part int) bool {
			next[part], stop[part] = iter.Pull2(x.parts[part].Iter(ctx))
			return true
		}, func(part int) (more, proceed bool) {
			e, err, ok := next[part]()
			if !ok {
				return false, true
			}
			if err == nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return true, yield(e, err) && err == nil
		})
	}
}
