package data

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Padding specifies how examples of different lengths become a batch. An example is a [Batch], or another nest of
// tensors. Its length is the first dimension of its first tensor, which is padded at its end.
type Padding struct {
	// Also has the numbers of the other tensors whose first dimension is the length, and which are padded too, such as a
	// label for each element of a sequence: of a Batch, the inputs count from 0, and the labels follow. It is an error if
	// one of them has another length. All other tensors, such as a label for the whole sequence, stay as they are and
	// must have one shape.
	Also []int
	// Value is the padding of every tensor ("" for strings). It must be a value of each tensor's type.
	Value float64
	// Label, if not nil, is the padding of the labels of a [Batch]: for example -1, or the number of a class that the loss
	// ignores.
	Label *float64
	// Mask appends a float32 mask [rows, length] to the inputs of a [Batch], and LabelMask to its labels: 1 for elements,
	// 0 for padding. The model has to use it: a layer that combines elements multiplies by it, and the loss of an example
	// is the mean over its elements, not over the padding. The weights of examples do not change: an example counts as
	// one, whatever its length.
	Mask, LabelMask bool
}

// PaddedBatch is Batch for examples of different lengths, which it pads to a length. Without one (0), a batch has the
// length of its longest example (as TensorFlow's padded_batch): then the shape of a batch depends on all of its rows,
// so each worker reads all of them, and train accepts only the lengths that its Config lists. To train, give a length,
// or use [Pipeline.BucketByLength]. A longer example is an error: leave it out, or truncate it by a Map.
func (p Pipeline) PaddedBatch(n, length int, pad Padding) Pipeline {
	if n < 1 || length < 0 {
		panic(fmt.Sprintf("data: PaddedBatch of %d elements and length %d: want at least 1, and 0 for the longest", n,
			length))
	}
	if length > 0 {
		return Pipeline{&batches{p.padTo(length, pad), n, false}}
	}
	return Pipeline{&longest{p, n, pad}}
}

// text describes the padding for a fingerprint.
func (pad Padding) text() string {
	label := "value"
	if pad.Label != nil {
		label = fmt.Sprint(*pad.Label)
	}
	return fmt.Sprint(pad.Value, label, pad.Mask, pad.LabelMask, pad.Also)
}

// padTo pads every element to a length.
func (p Pipeline) padTo(length int, pad Padding) Pipeline {
	return p.mapWith(0, func(_ context.Context, i int, e Element) (Element, error) {
		e, err := pad.pad(e, length)
		if err != nil {
			return nil, fmt.Errorf("data: element %d: %w", i, err)
		}
		return e, nil
	})
}

// lengthOf returns the length of an element.
func lengthOf(e Element) (int, error) {
	list, err := leaves(nil, e)
	if err != nil {
		return 0, err
	}
	if len(list) == 0 || list[0].Rank() == 0 {
		return 0, fmt.Errorf("its first tensor is missing or a scalar: want a first dimension, which is its length")
	}
	return list[0].Shape()[0], nil
}

// pad returns e, padded to a length.
func (pad Padding) pad(e Element, length int) (Element, error) {
	n, err := lengthOf(e)
	if err != nil {
		return nil, err
	}
	if n > length {
		return nil, fmt.Errorf("its length is %d, which is more than the %d to which it is padded: leave it out, truncate "+
			"it by Map, or add a boundary", n, length)
	}
	b, isBatch := e.(Batch)
	if (pad.Mask || pad.LabelMask) && !isBatch {
		return nil, fmt.Errorf("a mask for a %T: want a data.Batch", e)
	}
	inputs, err := leaves(nil, Batch{Inputs: b.Inputs})
	if err != nil {
		return nil, err
	}
	list, err := leaves(nil, e)
	if err != nil {
		return nil, err
	}
	for k, i := range append([]int{0}, pad.Also...) {
		if slices.Contains(pad.Also[:max(k-1, 0)], i) || k > 0 && i == 0 {
			continue // listed twice
		}
		if i < 0 || i >= len(list) || isBatch && list[i] == b.Weights {
			return nil, fmt.Errorf("Padding.Also has tensor %d: it has %d tensors, the first with number 0", i, len(list))
		}
		t, value := list[i], pad.Value
		if t.Rank() == 0 || t.Shape()[0] != n {
			return nil, fmt.Errorf("tensor %d has the shape %v, and Padding.Also says that its first dimension is the "+
				"example's length, %d", i, t.Shape(), n)
		}
		if isBatch && pad.Label != nil && i >= len(inputs) {
			value = *pad.Label
		}
		if list[i], err = padded(t, length, value); err != nil {
			return nil, fmt.Errorf("tensor %d: %w", i, err)
		}
	}
	e = rebuild(e, list)
	if pad.Mask || pad.LabelMask {
		mask := tensor.New(tensor.Float32, length)
		for i := range n {
			tensor.Data[float32](mask)[i] = 1
		}
		b = e.(Batch)
		if pad.Mask {
			b.Inputs = append(slices.Clip(b.Inputs), mask)
		}
		if pad.LabelMask {
			b.Labels = append(slices.Clip(b.Labels), mask)
		}
		e = b
	}
	return e, nil
}

// padded returns t with the first dimension length. The new elements have a value.
func padded(t *tensor.Tensor, length int, value float64) (*tensor.Tensor, error) {
	if t.Shape()[0] == length {
		return t, nil
	}
	out := tensor.New(t.DType(), append([]int{length}, t.Shape()[1:]...)...)
	if t.DType() == tensor.String {
		copy(out.StringData(), t.StringData())
		return out, nil
	}
	bytes := out.Memory().HostBytes()
	n := copy(bytes, t.Memory().HostBytes())
	if value == 0 {
		return out, nil
	}
	one, err := valueOf(t.DType(), value)
	if err != nil {
		return nil, err
	}
	for n < len(bytes) {
		n += copy(bytes[n:], one)
	}
	return out, nil
}

// valueOf returns the bytes of an element of a type with a value.
func valueOf(dtype tensor.DType, value float64) ([]byte, error) {
	one := tensor.New(dtype, 1)
	switch dtype {
	case tensor.Int8:
		tensor.Data[int8](one)[0] = int8(value)
	case tensor.Int16:
		tensor.Data[int16](one)[0] = int16(value)
	case tensor.Int32:
		tensor.Data[int32](one)[0] = int32(value)
	case tensor.Int64:
		tensor.Data[int64](one)[0] = int64(value)
	case tensor.Uint8:
		tensor.Data[uint8](one)[0] = uint8(int64(value))
	case tensor.Uint16:
		tensor.Data[uint16](one)[0] = uint16(int64(value))
	case tensor.Uint32:
		tensor.Data[uint32](one)[0] = uint32(int64(value))
	case tensor.Uint64:
		tensor.Data[uint64](one)[0] = uint64(int64(value))
	case tensor.Float16:
		tensor.Data[tensor.F16](one)[0] = tensor.F16From(float32(value))
	case tensor.BFloat16:
		tensor.Data[tensor.BF16](one)[0] = tensor.BF16From(float32(value))
	case tensor.Float32:
		tensor.Data[float32](one)[0] = float32(value)
	case tensor.Float64:
		tensor.Data[float64](one)[0] = value
	case tensor.Bool:
		tensor.Data[bool](one)[0] = value != 0
	}
	float := dtype == tensor.Float16 || dtype == tensor.BFloat16 || dtype == tensor.Float32 || dtype == tensor.Float64
	if got := one.Float64s()[0]; !float && got != value {
		return nil, fmt.Errorf("padding of %v in a tensor of %v: want a value of that type", value, dtype)
	}
	return one.Memory().HostBytes(), nil
}

// longest is PaddedBatch without a length.
type longest struct {
	src Pipeline
	n   int
	pad Padding
}

// Len implements [Dataset].
func (l *longest) Len() int { return (&batches{l.src, l.n, false}).Len() }

// joinPadded makes a batch of elements, of which number returns the number in the dataset.
func (pad Padding) joinPadded(list []Element, number func(i int) int, length int) (Element, error) {
	for i, e := range list {
		n, err := lengthOf(e)
		if err != nil {
			return nil, fmt.Errorf("data: element %d: %w", number(i), err)
		}
		length = max(length, n)
	}
	var s stacker
	for i, e := range list {
		e, err := pad.pad(e, length)
		if err != nil {
			return nil, fmt.Errorf("data: element %d: %w", number(i), err)
		}
		if err := s.add(e, number(i), len(list)); err != nil {
			return nil, err
		}
	}
	return s.take(), nil
}

// Iter implements [Dataset].
func (l *longest) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		var list []Element
		at := 0
		for e, err := range l.src.Iter(ctx) {
			if err != nil {
				yield(nil, err)
				return
			}
			if list = append(list, e); len(list) < l.n {
				continue
			}
			b, err := l.pad.joinPadded(list, func(i int) int { return at + i }, 0)
			if !yield(b, err) || err != nil {
				return
			}
			at, list = at+len(list), nil
		}
		if len(list) > 0 {
			yield(l.pad.joinPadded(list, func(i int) int { return at + i }, 0))
		}
	}
}

// Open implements [Seekable].
func (l *longest) Open(ctx context.Context) (Reader, error) {
	src, err := Open(ctx, l.src)
	if src == nil || err != nil {
		return nil, err
	}
	return &longestReader{src, &batchReader{src: src, n: l.n}, l.pad}, nil
}

// longestReader is a Reader of padded batches. It does not implement RowReader: the length of a batch is that of its
// longest row.
type longestReader struct {
	src  Reader
	rows *batchReader
	pad  Padding
}

// Len implements [Reader].
func (l *longestReader) Len() int { return l.rows.Len() }

// ID implements [Reader].
func (l *longestReader) ID(p int) uint64 { return l.rows.ID(p) }

// At implements [Reader].
func (l *longestReader) At(ctx context.Context, p int) (Element, error) {
	list := make([]Element, l.rows.Rows(p))
	if err := together(ctx, workersOf(ctx), len(list), func(i int) (err error) {
		list[i], err = l.src.At(ctx, p*l.rows.n+i)
		return err
	}); err != nil {
		return nil, err
	}
	return l.pad.joinPadded(list, func(i int) int { return p*l.rows.n + i }, 0)
}

// Buckets configure [Pipeline.BucketByLength].
type Buckets struct {
	// Boundaries are the lengths to which examples are padded, ascending: an example is in the first bucket whose boundary
	// is not smaller than its length. A longer one is an error.
	Boundaries []int
	// Rows are the numbers of examples of the batches of each bucket, or one number for all. Longer examples need more
	// memory, so their batches may be smaller.
	Rows []int
	// Full drops the last batch of a bucket if it has fewer examples.
	Full bool
	// Lengths are the lengths of the examples, by their number in the source, before Shuffle. Without it, a pipeline with
	// random access reads all examples once, when it is first used.
	Lengths []int
	Padding
}

// rows returns the number of examples of a batch of a bucket.
func (b *Buckets) rows(bucket int) int {
	if len(b.Rows) == 1 {
		return b.Rows[0]
	}
	return b.Rows[bucket]
}

// bucket returns the bucket of a length.
func (b *Buckets) bucket(length int) (int, error) {
	i, _ := slices.BinarySearch(b.Boundaries, length)
	if i == len(b.Boundaries) {
		return 0, fmt.Errorf("its length is %d: want at most the last boundary, %d: leave it out, truncate it by Map, or "+
			"add a boundary", length, b.Boundaries[i-1])
	}
	return i, nil
}

// BucketByLength batches examples of similar lengths, padded to the boundary of their bucket, as TensorFlow's
// bucket_by_sequence_length does with pad_to_bucket_boundary. So batches have as many shapes as there are buckets, and
// little padding. Examples are taken in the order of the epoch, and each goes to its bucket; a batch comes when its
// bucket is full, and the batches that are not full come at the end, the shortest first. A pipeline with random access
// keeps it: each worker reads only its rows, and resuming seeks. (Batches are of one bucket each, so all replicas get
// the same shape.)
//
// train.Config finds the shapes of its Data, and compiles a program for each.
//
// It panics unless the boundaries are positive and ascending, and Rows are positive, one or as many as boundaries.
func (p Pipeline) BucketByLength(b Buckets) Pipeline {
	last := 0
	for _, x := range b.Boundaries {
		if x <= last {
			panic(fmt.Sprintf("data: BucketByLength with the boundaries %v: want positive, ascending ones", b.Boundaries))
		}
		last = x
	}
	if len(b.Boundaries) == 0 || len(b.Rows) != 1 && len(b.Rows) != len(b.Boundaries) || slices.Min(b.Rows) < 1 {
		panic(fmt.Sprintf("data: BucketByLength with the boundaries %v and %v rows: want at least one boundary, and "+
			"positive rows, one or as many as boundaries", b.Boundaries, b.Rows))
	}
	b.Boundaries, b.Rows = slices.Clone(b.Boundaries), slices.Clone(b.Rows)
	return Pipeline{&bucketed{src: p, b: b, lengths: &bucketLengths{list: b.Lengths}}}
}

// bucketed is BucketByLength.
type bucketed struct {
	src     Pipeline
	b       Buckets
	lengths *bucketLengths
}

// bucketLengths are the lengths of the examples by identity, which is the index in a source. They are known after the
// first Open.
type bucketLengths struct {
	mu   sync.Mutex
	list []int          // by index
	byID map[uint64]int // if they are not indices

	once    sync.Once
	batches int // of epoch 0, after once
}

// Len implements [Dataset]. It is not known before the lengths are.
func (b *bucketed) Len() int {
	b.lengths.mu.Lock()
	known := b.lengths.list != nil || b.lengths.byID != nil
	b.lengths.mu.Unlock()
	if !known {
		return -1
	}
	b.lengths.once.Do(func() {
		b.lengths.batches = -1
		if r, err := b.Open(context.Background()); err == nil && r != nil {
			b.lengths.batches = r.Len()
		}
	})
	return b.lengths.batches
}

// Iter implements [Dataset].
func (b *bucketed) Iter(ctx context.Context) iter.Seq2[Element, error] {
	if randomAccess(b.src) {
		return iterate(ctx, b)
	}
	return func(yield func(Element, error) bool) {
		lists, numbers := make([][]Element, len(b.b.Boundaries)), make([][]int, len(b.b.Boundaries))
		batch := func(k int) bool {
			e, err := b.b.joinPadded(lists[k], func(i int) int { return numbers[k][i] }, b.b.Boundaries[k])
			lists[k], numbers[k] = nil, nil
			return yield(e, err) && err == nil
		}
		at := 0
		for e, err := range b.src.Iter(ctx) {
			var n, k int
			if err == nil {
				if n, err = lengthOf(e); err == nil {
					k, err = b.b.bucket(n)
				}
				if err != nil {
					err = fmt.Errorf("data: BucketByLength: element %d: %w", at, err)
				}
			}
			if err != nil {
				yield(nil, err)
				return
			}
			numbers[k] = append(numbers[k], at)
			at++
			if lists[k] = append(lists[k], e); len(lists[k]) == b.b.rows(k) && !batch(k) {
				return
			}
		}
		for k, list := range lists {
			if len(list) > 0 && !b.b.Full && !batch(k) {
				return
			}
		}
	}
}

// measure returns the length of the example at each position of r.
func (l *bucketLengths) measure(ctx context.Context, r Reader) (func(p int) (int, bool), error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.list == nil && l.byID == nil {
		lengths := make([]int, r.Len())
		if err := together(ctx, workersOf(ctx), r.Len(), func(p int) error {
			e, err := r.At(ctx, p)
			if err == nil {
				lengths[p], err = lengthOf(e)
			}
			return err
		}); err != nil {
			return nil, err
		}
		l.byID = make(map[uint64]int, len(lengths))
		for p, n := range lengths {
			l.byID[r.ID(p)] = n
		}
	}
	return func(p int) (n int, ok bool) {
		id := r.ID(p)
		if l.list != nil {
			if id >= uint64(len(l.list)) {
				return 0, false
			}
			return l.list[id], true
		}
		n, ok = l.byID[id]
		return n, ok
	}, nil
}

// Open implements [Seekable].
func (b *bucketed) Open(ctx context.Context) (Reader, error) {
	src, err := Open(ctx, b.src)
	if src == nil || err != nil {
		return nil, err
	}
	length, err := b.lengths.measure(ctx, src)
	if err != nil {
		return nil, err
	}
	r := &bucketReader{b: &b.b, workers: workersOf(ctx)}
	for _, boundary := range b.b.Boundaries {
		r.src = append(r.src, &mappedReader{src, func(_ context.Context, i int, e Element) (Element, error) {
			e, err := b.b.pad(e, boundary)
			if err != nil {
				return nil, fmt.Errorf("data: element %d: %w", i, err)
			}
			return e, nil
		}, Epoch(ctx)})
	}
	lists := make([][]int, len(b.b.Boundaries))
	for p := range src.Len() {
		n, ok := length(p)
		if !ok {
			return nil, fmt.Errorf("data: BucketByLength: element %d is number %d of the source, for which Buckets.Lengths, of "+
				"%d, has no length (without it, the examples must be the same in every epoch)", p, src.ID(p), len(b.b.Lengths))
		}
		k, err := b.b.bucket(n)
		if err != nil {
			return nil, fmt.Errorf("data: BucketByLength: element %d: %w", p, err)
		}
		if lists[k] = append(lists[k], p); len(lists[k]) == b.b.rows(k) {
			r.add(k, lists[k])
			lists[k] = lists[k][:0]
		}
	}
	for k, list := range lists {
		if len(list) > 0 && !b.b.Full {
			r.add(k, list)
		}
	}
	return r, nil
}

// bucketReader is a Reader of batches of buckets.
type bucketReader struct {
	b         *Buckets
	src       []Reader // by bucket: of examples that are padded to its boundary
	bucket    []uint16 // by batch
	ends      []int    // by batch: in positions
	positions []int    // of the examples of all batches
	workers   int
}

func (r *bucketReader) add(bucket int, list []int) {
	r.bucket = append(r.bucket, uint16(bucket))
	r.positions = append(r.positions, list...)
	r.ends = append(r.ends, len(r.positions))
}

// of returns the positions of a batch's examples.
func (r *bucketReader) of(p int) []int {
	lo := 0
	if p > 0 {
		lo = r.ends[p-1]
	}
	return r.positions[lo:r.ends[p]]
}

// Len implements [Reader].
func (r *bucketReader) Len() int { return len(r.ends) }

// Rows implements [RowReader].
func (r *bucketReader) Rows(p int) int { return len(r.of(p)) }

// Size implements [SizedReader].
func (r *bucketReader) Size(p int) int { return r.b.rows(int(r.bucket[p])) }

// RowID implements [RowReader].
func (r *bucketReader) RowID(p, row int) uint64 { return r.src[0].ID(r.of(p)[row]) }

// ID implements [Reader].
func (r *bucketReader) ID(p int) uint64 {
	id := r.RowID(p, 0)
	for row := 1; row < r.Rows(p); row++ {
		id = mix(id) ^ r.RowID(p, row)
	}
	return id
}

// At implements [Reader].
func (r *bucketReader) At(ctx context.Context, p int) (Element, error) {
	return r.read(ctx, p, r.of(p))
}

// ReadRows implements [RowReader].
func (r *bucketReader) ReadRows(ctx context.Context, p int, rows []int) (Element, []uint64, error) {
	positions, ids := make([]int, len(rows)), make([]uint64, len(rows))
	for i, row := range rows {
		positions[i] = r.of(p)[row]
		ids[i] = r.src[0].ID(positions[i])
	}
	e, err := r.read(ctx, p, positions)
	return e, ids, err
}

func (r *bucketReader) read(ctx context.Context, p int, positions []int) (Element, error) {
	b := batchReader{src: r.src[r.bucket[p]], n: len(positions), workers: r.workers}
	return b.read(ctx, positions)
}

// SizedReader is a [RowReader] whose batches may have different largest numbers of rows, such as those of the buckets
// of [Pipeline.BucketByLength].
type SizedReader interface {
	RowReader
	// Size returns the largest number of rows of batches like that at position p.
	Size(p int) int
}

// Sample is an example of the batches of one shape.
type Sample struct {
	Element Element // a batch
	Rows    int     // the largest number of examples of such a batch
}

// Shapes returns a sample of the batches of each shape of ds, in the order of the buckets of its
// [Pipeline.BucketByLength], also if [Concat], [Mix] or [Interleave] join several pipelines with buckets. A bucket
// without examples has none. It returns nil if ds has no buckets, or no random access.
func Shapes(ctx context.Context, ds Dataset) ([]Sample, error) {
	for at := ds; ; {
		var samples []Sample
		var err error
		t := traitsOf(at)
		if b, ok := at.(*bucketed); ok {
			samples, err = b.samples(ctx)
		} else if v, ok := at.(*view); !ok || !v.zips() {
			samples, err = samplesOf(ctx, t.parts)
		}
		if err != nil {
			return nil, err
		}
		if samples != nil {
			return after(ctx, ds, at, samples)
		}
		if t.src == nil {
			return nil, nil
		}
		at = t.src
	}
}

// samplesOf returns the samples of all parts, of each shape and number of rows once.
func samplesOf(ctx context.Context, parts []Pipeline) (list []Sample, err error) {
	seen := map[string]bool{}
	for _, p := range parts {
		samples, err := Shapes(ctx, p)
		if err != nil {
			return nil, err
		}
		for _, s := range samples {
			tensors, err := leaves(nil, s.Element)
			if err != nil {
				return nil, err
			}
			text := fmt.Sprint(s.Rows)
			for _, t := range tensors {
				text += fmt.Sprint(" ", t.DType(), t.Shape()[1:])
			}
			if !seen[text] {
				seen[text], list = true, append(list, s)
			}
		}
	}
	return list, nil
}

// samples returns a batch of each bucket that has one.
func (b *bucketed) samples(ctx context.Context) ([]Sample, error) {
	r, err := b.Open(ctx)
	if r == nil || err != nil {
		return nil, err
	}
	reader, samples := r.(*bucketReader), []Sample{}
	for k := range b.b.Boundaries {
		p := slices.Index(reader.bucket, uint16(k))
		if p < 0 {
			continue
		}
		e, err := reader.At(ctx, p)
		if err != nil {
			return nil, err
		}
		samples = append(samples, Sample{e, b.b.rows(k)})
	}
	return samples, nil
}

// after applies the stages of ds after the stage at, which may change elements, to its samples.
func after(ctx context.Context, ds, at Dataset, samples []Sample) (list []Sample, err error) {
	list = []Sample{}
	for _, s := range samples {
		r, err := Open(ctx, rewrite(ds, func(d Dataset) Dataset {
			if d != at {
				return nil
			}
			only := FromFunc(1, func(context.Context, int) (Element, error) { return s.Element, nil })
			if v, ok := at.(*view); ok {
				return v.mapping(only)
			}
			return only
		}))
		if err != nil {
			return nil, err
		}
		if r == nil || r.Len() == 0 {
			continue
		}
		e, err := r.At(ctx, 0)
		if err != nil {
			return nil, err
		}
		list = append(list, Sample{e, s.Rows})
	}
	return list, nil
}
