package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"sync"

	"github.com/lockstep-ml/lockstep/tensor"
)

// readersOf opens datasets with random access.
func readersOf(ctx context.Context, parts []Pipeline) ([]Reader, error) {
	readers := make([]Reader, len(parts))
	for i, p := range parts {
		r, err := Open(ctx, p)
		if err != nil {
			return nil, err
		}
		if readers[i] = r; r == nil {
			return nil, fmt.Errorf("data: part %d is a stream, which has no random access", i)
		}
	}
	return readers, nil
}

// seekableParts panics unless all parts have random access.
func seekableParts(method string, parts []Pipeline) {
	for i, p := range parts {
		if p.ds != nil && !randomAccess(p) {
			panic(fmt.Sprintf("data: %s: part %d is a stream: want random access", method, i))
		}
	}
}

// randomAccess reports whether a dataset can be opened by position, without opening it.
func randomAccess(ds Dataset) bool {
	t := traitsOf(ds)
	switch {
	case t.stream:
		return false
	case t.src != nil:
		return randomAccess(t.src)
	}
	_, seekable := ds.(Seekable)
	_, indexed := ds.(Indexed)
	return seekable || indexed
}

// joined is the dataset of Concat.
type joined struct{ parts []Pipeline }

// Concat returns the elements of all parts, one part after the other. They need random access, which the result has.
func Concat(parts ...Pipeline) Pipeline {
	seekableParts("Concat", parts)
	return Pipeline{&view{base: &joined{slices.Clone(parts)}}}
}

// Len implements [Dataset].
func (j *joined) Len() int { return sumOfLens(j.parts) }

// sumOfLens returns the number of elements of all parts, negative if one is unknown.
func sumOfLens(parts []Pipeline) int {
	n := 0
	for _, p := range parts {
		k := p.Len()
		if k < 0 {
			return -1
		}
		n += k
	}
	return n
}

// Iter implements [Dataset].
func (j *joined) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, j) }

// Open implements [Seekable].
func (j *joined) Open(ctx context.Context) (Reader, error) {
	readers, err := readersOf(ctx, j.parts)
	if err != nil {
		return nil, err
	}
	ends, n := make([]int, len(readers)), 0
	for i, r := range readers {
		n += r.Len()
		ends[i] = n
	}
	return &partsReader{readers, n, func(p int) (part, at int) {
		if part = sort.SearchInts(ends, p+1); part > 0 {
			p -= ends[part-1]
		}
		return part, p
	}}, nil
}

// Fingerprint implements [Fingerprinted].
func (j *joined) Fingerprint() uint64 { return partsFingerprint("Concat", j.parts) }

func partsFingerprint(text string, parts []Pipeline) uint64 {
	h := describe(0, text)
	for _, p := range parts {
		h = describe(h, fmt.Sprint(Fingerprint(p)))
	}
	return h
}

// partsReader reads several readers: where returns the part and the position in it.
type partsReader struct {
	parts []Reader
	n     int
	where func(p int) (part, at int)
}

// Len implements [Reader].
func (r *partsReader) Len() int { return r.n }

// At implements [Reader].
func (r *partsReader) At(ctx context.Context, p int) (Element, error) {
	part, at := r.where(p)
	return r.parts[part].At(ctx, at)
}

// ID implements [Reader]. Examples of different parts have different identities.
func (r *partsReader) ID(p int) uint64 {
	part, at := r.where(p)
	return partID(part, r.parts[part].ID(at))
}

// partID returns the identity of an example of a part. That of the first part is unchanged.
func partID(part int, id uint64) uint64 { return id ^ mix(uint64(part)) ^ mix(0) }

// mixed is the dataset of Mix.
type mixed struct {
	n     int
	seed  int64
	quota []int // of each part in mixBlock elements
	parts []Pipeline
}

// mixBlock is the number of elements in which each part has its exact share.
const mixBlock = 1024

// Mix returns n elements of several datasets with random access, which it has too: of each as many as its weight says,
// to within 1/1024 of all, but at least one in 1024, in a random order that depends on the seed and the epoch
// (TensorFlow's sample_from_datasets). The elements of a part keep their order. A part that ends begins again, with
// another epoch.
// Mix panics unless there is a weight for each part, all of them are positive, and no part is empty.
func Mix(n int, seed int64, weights []float64, parts ...Pipeline) Pipeline {
	seekableParts("Mix", parts)
	sum := 0.0
	for i, w := range weights {
		if !(w > 0) || math.IsInf(w, 1) || i >= len(parts) || parts[i].Len() == 0 {
			panic(fmt.Sprintf("data: Mix: weight %d of %d parts is %v: want positive weights, one for each part, "+
				"and no empty part", i, len(parts), w))
		}
		sum += w
	}
	if len(weights) != len(parts) || len(parts) == 0 || len(parts) > mixBlock || n < 0 {
		panic(fmt.Sprintf("data: Mix of %d elements of %d parts with %d weights: want a weight for each, at most %d", n,
			len(parts), len(weights), mixBlock))
	}
	m := &mixed{n: n, seed: seed, quota: make([]int, len(parts)), parts: slices.Clone(parts)}
	given, rest := 0, make([]int, len(parts)) // the largest remainders get what rounding leaves
	for i, w := range weights {
		m.quota[i] = max(1, int(w/sum*mixBlock))
		given += m.quota[i]
		rest[i] = i
	}
	remainder := func(i int) float64 { return weights[i]/sum*mixBlock - float64(m.quota[i]) }
	for ; given != mixBlock; given += cmp.Compare(mixBlock, given) {
		candidates := rest
		if given > mixBlock { // every part keeps at least one
			candidates = slices.DeleteFunc(slices.Clone(rest), func(i int) bool { return m.quota[i] == 1 })
		}
		i := slices.MaxFunc(candidates, func(a, b int) int {
			return cmp.Compare(mixBlock, given) * cmp.Compare(remainder(a), remainder(b))
		})
		m.quota[i] += cmp.Compare(mixBlock, given)
	}
	return Pipeline{&view{base: m}}
}

// Len implements [Dataset].
func (m *mixed) Len() int { return m.n }

// Iter implements [Dataset].
func (m *mixed) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, m) }

// Fingerprint implements [Fingerprinted].
func (m *mixed) Fingerprint() uint64 {
	return partsFingerprint(fmt.Sprint("Mix ", m.n, m.seed, m.quota), m.parts)
}

// Open implements [Seekable].
func (m *mixed) Open(ctx context.Context) (Reader, error) {
	endless := make([]Pipeline, len(m.parts))
	for i, p := range m.parts {
		endless[i] = p.Repeat(-1)
	}
	readers, err := readersOf(ctx, endless)
	if err != nil {
		return nil, err
	}
	type place struct{ part, rank int }
	epoch := Epoch(ctx)
	var mu sync.Mutex
	blocks := map[int][]place{} // the last ones used
	block := func(k int) []place {
		mu.Lock()
		defer mu.Unlock()
		if b, ok := blocks[k]; ok {
			return b
		}
		var parts []uint32
		for part, quota := range m.quota {
			parts = append(parts, slices.Repeat([]uint32{uint32(part)}, quota)...)
		}
		var g rand.PCG
		reseed(&g, m.seed, forMix, uint64(epoch), uint64(k))
		permute(&g, parts)
		b, ranks := make([]place, len(parts)), make([]int, len(m.quota))
		for i, part := range parts {
			b[i] = place{int(part), ranks[part]}
			ranks[part]++
		}
		if len(blocks) >= 64 {
			clear(blocks)
		}
		blocks[k] = b
		return b
	}
	return &partsReader{readers, m.n, func(p int) (part, at int) {
		w := block(p / mixBlock)[p%mixBlock]
		return w.part, p/mixBlock*m.quota[w.part] + w.rank
	}}, nil
}

// zipped is the dataset of Zip.
type zipped struct {
	parts  []Pipeline
	inputs int
}

// Zip returns a pipeline of [Batch] examples from pipelines of tensors with random access: example i has element i of
// each. Zip panics if they have different lengths.
func Zip(inputs, labels []Pipeline) Pipeline {
	parts := slices.Concat(inputs, labels)
	seekableParts("Zip", parts)
	for i, p := range parts {
		if p.Len() != parts[0].Len() {
			panic(fmt.Sprintf("data: Zip: part %d has %d elements, the first one %d", i, p.Len(), parts[0].Len()))
		}
	}
	return Pipeline{&view{base: &zipped{parts, len(inputs)}}}
}

// Len implements [Dataset].
func (z *zipped) Len() int {
	if len(z.parts) == 0 {
		return 0
	}
	return z.parts[0].Len()
}

// Iter implements [Dataset].
func (z *zipped) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, z) }

// Fingerprint implements [Fingerprinted].
func (z *zipped) Fingerprint() uint64 { return partsFingerprint(fmt.Sprint("Zip ", z.inputs), z.parts) }

// Open implements [Seekable].
func (z *zipped) Open(ctx context.Context) (Reader, error) {
	readers, err := readersOf(ctx, z.parts)
	if err != nil {
		return nil, err
	}
	n := 0
	for i, r := range readers {
		if i == 0 {
			n = r.Len()
		}
		if r.Len() != n {
			return nil, fmt.Errorf("data: Zip: in epoch %d part %d has %d elements, the first one %d", Epoch(ctx), i, r.Len(), n)
		}
	}
	return &zippedReader{readers, z.inputs, n}, nil
}

// zippedReader is a Reader of the elements of several readers.
type zippedReader struct {
	parts  []Reader
	inputs int
	n      int
}

// Len implements [Reader].
func (z *zippedReader) Len() int { return z.n }

// ID implements [Reader].
func (z *zippedReader) ID(p int) (id uint64) {
	for i, r := range z.parts {
		if id ^= r.ID(p); i < len(z.parts)-1 {
			id = mix(id)
		}
	}
	return id
}

// At implements [Reader].
func (z *zippedReader) At(ctx context.Context, p int) (Element, error) {
	return z.collect(func(r Reader) (Element, error) { return r.At(ctx, p) })
}

func (z *zippedReader) gathers() bool {
	return !slices.ContainsFunc(z.parts, func(r Reader) bool {
		g, ok := r.(gatherReader)
		return !ok || !g.gathers()
	})
}

func (z *zippedReader) gather(ctx context.Context, positions []int) (Element, bool, error) {
	if !z.gathers() {
		return nil, false, nil
	}
	e, err := z.collect(func(r Reader) (Element, error) {
		e, _, err := r.(gatherReader).gather(ctx, positions)
		return e, err
	})
	return e, true, err
}

// collect returns the example that get's tensors make.
func (z *zippedReader) collect(get func(r Reader) (Element, error)) (Element, error) {
	var b Batch
	for i, r := range z.parts {
		e, err := get(r)
		if err != nil {
			return nil, err
		}
		t, ok := e.(*tensor.Tensor)
		switch {
		case !ok:
			return nil, fmt.Errorf("data: Zip: an element of part %d is a %T: want *tensor.Tensor", i, e)
		case i < z.inputs:
			b.Inputs = append(b.Inputs, t)
		default:
			b.Labels = append(b.Labels, t)
		}
	}
	return b, nil
}

// cached is the dataset of Cache.
type cached struct {
	src   Pipeline
	limit int64

	mu       sync.Mutex
	elements map[uint64]Element // by identity
	bytes    int64
}

// Cache keeps elements in memory after they were read for the first time, until they have limit bytes; the others are
// read every time. It needs random access, which it has too, and an element must not depend on the epoch: put it
// after the source or a Map, and before MapRandom. Each worker keeps only the elements that it reads.
func (p Pipeline) Cache(limit int64) Pipeline {
	if limit < 0 {
		panic(fmt.Sprintf("data: Cache of %d bytes: want at least 0", limit))
	}
	seekableParts("Cache", []Pipeline{p})
	return Pipeline{&view{base: &cached{src: p, limit: limit, elements: map[uint64]Element{}}}}
}

// Len implements [Dataset].
func (c *cached) Len() int { return c.src.Len() }

// Iter implements [Dataset].
func (c *cached) Iter(ctx context.Context) iter.Seq2[Element, error] { return iterate(ctx, c) }

// Fingerprint implements [Fingerprinted].
func (c *cached) Fingerprint() uint64 { return Fingerprint(c.src) }

// Open implements [Seekable].
func (c *cached) Open(ctx context.Context) (Reader, error) {
	r, err := Open(ctx, c.src)
	if err == nil && r == nil {
		err = errors.New("data: Cache of a stream")
	}
	return &cachedReader{r, c}, err
}

type cachedReader struct {
	Reader
	c *cached
}

// At implements [Reader].
func (r *cachedReader) At(ctx context.Context, p int) (Element, error) {
	id := r.ID(p)
	r.c.mu.Lock()
	e, ok := r.c.elements[id]
	r.c.mu.Unlock()
	if ok {
		return e, nil
	}
	e, err := r.Reader.At(ctx, p)
	if err != nil {
		return nil, err
	}
	ts, err := leaves(nil, e)
	if err != nil {
		return nil, err
	}
	size := int64(0)
	for _, t := range ts {
		size += int64(t.Memory().Bytes)
		for _, s := range t.StringData() {
			size += int64(len(s))
		}
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if _, ok := r.c.elements[id]; !ok && r.c.bytes+size <= r.c.limit {
		r.c.elements[id] = e
		r.c.bytes += size
	}
	return e, nil
}
