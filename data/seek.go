package data

import (
	"context"
	"fmt"
	"iter"
	"math"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Seekable is a [Dataset] that can be read from any position. Every stage of this package is Seekable if its
// source is, except ShuffleBuffer and Through.
type Seekable interface {
	Dataset
	// Open prepares to read the pass of the epoch in ctx. It returns a nil Reader if the dataset is a stream: a stage
	// whose source is not Seekable.
	Open(ctx context.Context) (Reader, error)
}

// Reader reads one pass over a dataset by position. Several goroutines may use it concurrently. It holds no
// resources that must be released.
type Reader interface {
	// Len returns the number of elements of the pass; math.MaxInt for one without end.
	Len() int
	// At returns the element at position p, 0 ≤ p < Len().
	At(ctx context.Context, p int) (Element, error)
	// ID returns the identity of the element at position p: that of an example is its index in its source, whatever
	// the order of the epoch.
	ID(p int) uint64
}

// RowReader is a [Reader] of batches, of which it can read some rows without the others.
type RowReader interface {
	Reader
	// Rows returns the number of rows of the batch at position p.
	Rows(p int) int
	// RowID returns the identity of a row.
	RowID(p, row int) uint64
	// ReadRows returns the given rows of the batch at position p, in this order, as a batch, and the identities of the
	// rows that it has read. The list is not empty.
	ReadRows(ctx context.Context, p int, rows []int) (Element, []uint64, error)
}

// Uniform reports whether all examples of r are known to have one structure, with the same dtypes and shapes, because
// they are rows of tensors or files that have one. A worker that reads only its rows of other batches does not notice
// that the rows of another worker do not fit.
func Uniform(r RowReader) bool {
	switch r := r.(type) {
	case *batchReader:
		g, ok := r.src.(gatherReader)
		return ok && g.gathers()
	case *relocatedRows:
		return Uniform(r.rows)
	case repeatedRows:
		pass, err := r.pass(0)
		return err == nil && Uniform(pass.(RowReader))
	}
	return false
}

// Open returns a reader of the pass of the epoch in ctx. It returns nil if ds is a stream, which can only be read
// from its start.
func Open(ctx context.Context, ds Dataset) (Reader, error) {
	switch d := ds.(type) {
	case Pipeline:
		if d.ds == nil {
			return Open(ctx, &function{})
		}
		return Open(ctx, d.ds)
	case Seekable:
		return d.Open(ctx)
	case Indexed:
		return newView(d).Open(ctx)
	}
	return nil, nil
}

// IterFrom reads ds from position from, which costs nothing if ds is [Seekable]. Otherwise it reads the elements
// before it too.
func IterFrom(ctx context.Context, ds Dataset, from int) iter.Seq2[Element, error] {
	if from == 0 {
		return ds.Iter(ctx)
	}
	return func(yield func(Element, error) bool) {
		r, err := Open(ctx, ds)
		switch {
		case err != nil:
			yield(nil, err)
		case r == nil:
			(&skipped{ds, from}).Iter(ctx)(yield)
		default:
			IterReader(ctx, ds, r, from)(yield)
		}
	}
}

// IterReader reads the elements of r, a reader of ds, from position from. It has as many goroutines and reads as far
// ahead as ds has.
func IterReader(ctx context.Context, ds Dataset, r Reader, from int) iter.Seq2[Element, error] {
	var seq Dataset = &sequence{-1, func(ctx context.Context) iter.Seq2[Element, error] { return readAll(ctx, r, from) }}
	ahead := 0
	for ; ds != nil; ds = traitsOf(ds).src {
		switch d := ds.(type) {
		case *prefetch:
			ahead = max(ahead, d.n)
		case *pooled:
			ctx = withWorkers(ctx, d.n)
		case *view:
			ctx = withWorkers(ctx, max(d.workers, workersOf(ctx)))
		}
	}
	if ahead > 0 {
		seq = &prefetch{seq, ahead}
	}
	return seq.Iter(ctx)
}

// ReadAhead reads seq, which reads parts of the elements of ds, as far ahead as the last [Pipeline.Prefetch] of ds
// does. seq must satisfy the contract of [Dataset].
func ReadAhead(ctx context.Context, ds Dataset, seq func(context.Context) iter.Seq2[Element, error],
) iter.Seq2[Element, error] {
	all := FromSeq(-1, seq)
	for ; ds != nil; ds = traitsOf(ds).src {
		if p, ok := ds.(*prefetch); ok {
			return all.Prefetch(p.n).Iter(ctx)
		}
	}
	return all.Iter(ctx)
}

// iterate reads a Seekable dataset in order, by the number of goroutines in ctx.
func iterate(ctx context.Context, ds Seekable) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		r, err := ds.Open(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		readAll(ctx, r, 0)(yield)
	}
}

// readAll reads the elements of r from a position on.
func readAll(ctx context.Context, r Reader, from int) iter.Seq2[Element, error] {
	_, batches := r.(RowReader) // whose rows are read by several goroutines
	return func(yield func(Element, error) bool) {
		if n := workersOf(ctx); n > 1 && !batches {
			parallel(ctx, n, func(yield func(func() (Element, error), error) bool) {
				for p := from; p < r.Len(); p++ {
					if !yield(func() (Element, error) { return r.At(ctx, p) }, nil) {
						return
					}
				}
			})(yield)
			return
		}
		for p := from; p < r.Len(); p++ {
			if ctx.Err() != nil {
				yield(nil, context.Cause(ctx))
				return
			}
			e, err := r.At(ctx, p)
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// indexed is a Seekable view of an Indexed dataset.
type indexed struct{ Indexed }

// Open implements [Seekable].
func (i indexed) Open(context.Context) (Reader, error) { return indexedReader(i), nil }

// indexedReader reads an Indexed dataset in its own order.
type indexedReader struct{ Indexed }

// ID implements [Reader].
func (r indexedReader) ID(p int) uint64 { return uint64(p) }

// gather implements gatherReader.
func (r indexedReader) gather(ctx context.Context, positions []int) (Element, bool, error) {
	g, ok := r.Indexed.(Gatherer)
	if !ok {
		return nil, false, nil
	}
	e, err := g.Gather(ctx, positions)
	return e, true, err
}

// gathers reports whether gather can read several elements together.
func (r indexedReader) gathers() bool {
	_, ok := r.Indexed.(Gatherer)
	return ok
}

func (r *relocated) gathers() bool {
	g, ok := r.src.(gatherReader)
	return ok && g.gathers()
}

// gatherReader is a Reader that may read several elements together.
type gatherReader interface {
	gathers() bool
	// gather returns the elements at the positions as one batch; false: they must be read one by one.
	gather(ctx context.Context, positions []int) (Element, bool, error)
}

// relocate returns a reader of n elements of src: position p reads src at the position at(p).
func relocate(src Reader, n int, at func(p int) int) Reader {
	m := relocated{src, n, at}
	if rows, ok := src.(RowReader); ok {
		return &relocatedRows{m, rows}
	}
	return &m
}

type relocated struct {
	src Reader
	n   int
	at  func(p int) int
}

// Len implements [Reader].
func (r *relocated) Len() int { return r.n }

// At implements [Reader].
func (r *relocated) At(ctx context.Context, p int) (Element, error) { return r.src.At(ctx, r.at(p)) }

// ID implements [Reader].
func (r *relocated) ID(p int) uint64 { return r.src.ID(r.at(p)) }

func (r *relocated) gather(ctx context.Context, positions []int) (Element, bool, error) {
	g, ok := r.src.(gatherReader)
	if !ok {
		return nil, false, nil
	}
	at := make([]int, len(positions))
	for i, p := range positions {
		at[i] = r.at(p)
	}
	return g.gather(ctx, at)
}

type relocatedRows struct {
	relocated
	rows RowReader
}

// Rows implements [RowReader].
func (r *relocatedRows) Rows(p int) int { return r.rows.Rows(r.at(p)) }

// RowID implements [RowReader].
func (r *relocatedRows) RowID(p, row int) uint64 { return r.rows.RowID(r.at(p), row) }

// Size implements [SizedReader].
func (r *relocatedRows) Size(p int) int { return sizeOfRows(r.rows, r.at(p)) }

// sizeOfRows returns the largest number of rows of batches like that at position p, as far as it is known.
func sizeOfRows(r RowReader, p int) int {
	if s, ok := r.(SizedReader); ok {
		return s.Size(p)
	}
	return r.Rows(p)
}

// ReadRows implements [RowReader].
func (r *relocatedRows) ReadRows(ctx context.Context, p int, rows []int) (Element, []uint64, error) {
	return r.rows.ReadRows(ctx, r.at(p), rows)
}

// mappedReader is a Reader of the results of a Map.
type mappedReader struct {
	Reader
	f     mapFunc
	epoch int
}

// At implements [Reader].
func (r *mappedReader) At(ctx context.Context, p int) (Element, error) {
	e, err := r.Reader.At(ctx, p)
	if err != nil {
		return nil, err
	}
	return r.f(WithEpoch(ctx, r.epoch), p, e)
}

// repeatedReader is a Reader of several passes.
type repeatedReader struct {
	open func(pass int) (Reader, error)
	each int // elements of a pass
	n    int

	mu     sync.Mutex
	passes map[int]Reader // the last ones used
}

// passesOpen is the number of passes that are kept open.
const passesOpen = 2

// pass returns the reader of pass k.
func (r *repeatedReader) pass(k int) (Reader, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p, ok := r.passes[k]; ok {
		return p, nil
	}
	p, err := r.open(k)
	if err != nil {
		return nil, err
	}
	if p.Len() != r.each { // Shuffle, Take and BucketByLength
		return nil, fmt.Errorf("data: Repeat or Mix: pass %d has %d elements, the first one %d: want passes of one length, "+
			"so put Repeat before BucketByLength, or leave it out (FitConfig.Epochs repeats the data)", k, p.Len(), r.each)
	}
	if len(r.passes) >= passesOpen {
		oldest := k
		for other := range r.passes {
			oldest = min(oldest, other)
		}
		delete(r.passes, oldest)
	}
	r.passes[k] = p
	return p, nil
}

// Len implements [Reader].
func (r *repeatedReader) Len() int { return r.n }

// At implements [Reader].
func (r *repeatedReader) At(ctx context.Context, p int) (Element, error) {
	pass, err := r.pass(p / r.each)
	if err != nil {
		return nil, err
	}
	return pass.At(ctx, p%r.each)
}

// ID implements [Reader]. A pass that cannot be opened has no identities: reading it reports why.
func (r *repeatedReader) ID(p int) uint64 {
	if pass, err := r.pass(p / r.each); err == nil {
		return pass.ID(p % r.each)
	}
	return 0
}

// repeatedRows is a repeatedReader of batches.
type repeatedRows struct{ *repeatedReader }

// Rows implements [RowReader].
func (r repeatedRows) Rows(p int) int {
	if pass, err := r.pass(p / r.each); err == nil {
		return pass.(RowReader).Rows(p % r.each)
	}
	return 0
}

// Size implements [SizedReader].
func (r repeatedRows) Size(p int) int {
	if pass, err := r.pass(p / r.each); err == nil {
		return sizeOfRows(pass.(RowReader), p%r.each)
	}
	return 0
}

// RowID implements [RowReader].
func (r repeatedRows) RowID(p, row int) uint64 {
	if pass, err := r.pass(p / r.each); err == nil {
		return pass.(RowReader).RowID(p%r.each, row)
	}
	return 0
}

// ReadRows implements [RowReader].
func (r repeatedRows) ReadRows(ctx context.Context, p int, rows []int) (Element, []uint64, error) {
	pass, err := r.pass(p / r.each)
	if err != nil {
		return nil, nil, err
	}
	return pass.(RowReader).ReadRows(ctx, p%r.each, rows)
}

// batchReader is a Reader of batches of n elements of src.
type batchReader struct {
	src     Reader
	n       int
	full    bool
	workers int
}

// Len implements [Reader].
func (b *batchReader) Len() int {
	n := b.src.Len()
	if b.full || n == math.MaxInt {
		return n / b.n
	}
	return (n + b.n - 1) / b.n
}

// Rows implements [RowReader].
func (b *batchReader) Rows(p int) int { return min(b.n, b.src.Len()-p*b.n) }

// ID implements [Reader]: a hash of the identities of its rows, or that of a single one. Batches of several shuffled
// passes may begin with the same row.
func (b *batchReader) ID(p int) uint64 {
	id := b.RowID(p, 0)
	for row := 1; row < b.Rows(p); row++ {
		id = mix(id) ^ b.RowID(p, row)
	}
	return id
}

// RowID implements [RowReader].
func (b *batchReader) RowID(p, row int) uint64 { return b.src.ID(p*b.n + row) }

// At implements [Reader].
func (b *batchReader) At(ctx context.Context, p int) (Element, error) {
	positions := make([]int, b.Rows(p))
	for i := range positions {
		positions[i] = p*b.n + i
	}
	return b.read(ctx, positions)
}

// ReadRows implements [RowReader].
func (b *batchReader) ReadRows(ctx context.Context, p int, rows []int) (Element, []uint64, error) {
	positions, ids := make([]int, len(rows)), make([]uint64, len(rows))
	for i, row := range rows {
		positions[i] = p*b.n + row
		ids[i] = b.src.ID(positions[i])
	}
	if src, ok := b.src.(RowReader); ok { // batches of batches: the rows that are not read must have the same shape too
		for row := 1; row < b.Rows(p); row++ {
			if src.Rows(p*b.n+row) == src.Rows(p*b.n) {
				continue
			}
			if _, err := b.At(ctx, p); err != nil {
				return nil, nil, err
			}
		}
	}
	e, err := b.read(ctx, positions)
	return e, ids, err
}

func (b *batchReader) read(ctx context.Context, positions []int) (Element, error) {
	if g, ok := b.src.(gatherReader); ok {
		if e, ok, err := g.gather(ctx, positions); ok || err != nil {
			return e, err
		}
	}
	if b.workers < 2 || len(positions) < 2 {
		var s stacker
		for _, p := range positions {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			e, err := b.src.At(ctx, p)
			if err == nil {
				err = s.add(e, p, len(positions))
			}
			if err != nil {
				return nil, err
			}
		}
		return s.take(), nil
	}
	elements := make([]Element, len(positions))
	if err := together(ctx, b.workers, len(positions), func(i int) (err error) {
		elements[i], err = b.src.At(ctx, positions[i])
		return err
	}); err != nil {
		return nil, err
	}
	var s stacker
	for i, e := range elements {
		if err := s.add(e, positions[i], len(positions)); err != nil {
			return nil, err
		}
	}
	return s.take(), nil
}

type workersKey struct{}

// withWorkers returns a context in which n goroutines read the elements of a dataset.
func withWorkers(ctx context.Context, n int) context.Context {
	return context.WithValue(ctx, workersKey{}, n)
}

// workersOf returns the number of goroutines that read the elements of a dataset.
func workersOf(ctx context.Context) int {
	n, _ := ctx.Value(workersKey{}).(int)
	return max(n, 1)
}

// pooled is Workers.
type pooled struct {
	src Dataset
	n   int
}

// Len implements [Dataset].
func (p *pooled) Len() int { return p.src.Len() }

// Iter implements [Dataset].
func (p *pooled) Iter(ctx context.Context) iter.Seq2[Element, error] {
	return p.src.Iter(withWorkers(ctx, p.n))
}

// Open implements [Seekable].
func (p *pooled) Open(ctx context.Context) (Reader, error) { return Open(withWorkers(ctx, p.n), p.src) }

// together calls f for the numbers below n from several goroutines. It returns the error of the smallest number
// that failed.
func together(ctx context.Context, workers, n int, f func(i int) error) error {
	var next atomic.Int64
	var mu sync.Mutex
	failed, failure := n, error(nil)
	var group sync.WaitGroup
	for range min(workers, n) {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				err := context.Cause(ctx)
				if err == nil {
					err = recovered(func() error { return f(i) })
				}
				if err != nil {
					next.Store(int64(n)) // those before i have begun
					mu.Lock()
					if i < failed {
						failed, failure = i, err
					}
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return failure
}

// recovered calls f and returns its error, or its panic as an error.
func recovered(f func() error) (err error) {
	err = fmt.Errorf("data: the pipeline called runtime.Goexit")
	defer func() {
		if v := recover(); v != nil {
			err = panicError(v, debug.Stack())
		}
	}()
	return f()
}

// parallel calls the functions of a sequence from several goroutines and yields their results in order. At most
// 2·workers results wait to be yielded. All goroutines have ended when the loop ends.
func parallel(ctx context.Context, workers int, src iter.Seq2[func() (Element, error), error],
) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		inner, cancel := context.WithCancel(ctx)
		jobs, queue := make(chan parallelJob), make(chan chan result, 2*workers)
		var group sync.WaitGroup
		defer group.Wait()
		defer cancel()
		for range workers {
			group.Go(func() {
				for j := range jobs {
					var r result
					r.err = recovered(func() (err error) {
						r.e, err = j.f()
						return err
					})
					j.out <- r
				}
			})
		}
		group.Go(func() { feedJobs(inner, src, jobs, queue) })
		for {
			var out chan result
			var more bool
			select {
			case out, more = <-queue:
			case <-ctx.Done():
				yield(nil, context.Cause(ctx))
				return
			}
			if !more {
				if ctx.Err() != nil { // the goroutine may have ended for the same reason
					yield(nil, context.Cause(ctx))
				}
				return
			}
			select {
			case r := <-out:
				if !yield(r.e, r.err) || r.err != nil {
					return
				}
			case <-ctx.Done():
				yield(nil, context.Cause(ctx))
				return
			}
		}
	}
}

// parallelJob is one call of [parallel].
type parallelJob struct {
	f   func() (Element, error)
	out chan result // of capacity 1
}

// feedJobs passes the functions of src to the workers, and where their results will be to queue, in order. It closes
// both. An error of src is the last result.
func feedJobs(ctx context.Context, src iter.Seq2[func() (Element, error), error], jobs chan<- parallelJob,
	queue chan<- chan result,
) {
	defer close(queue)
	defer close(jobs)
	enqueue := func(out chan result) bool {
		select {
		case queue <- out:
			return true
		case <-ctx.Done():
			return false
		}
	}
	if err := recovered(func() error {
		for f, err := range src {
			if err != nil {
				return err
			}
			j := parallelJob{f, make(chan result, 1)}
			if !enqueue(j.out) {
				return nil
			}
			select {
			case jobs <- j:
			case <-ctx.Done():
				j.out <- result{err: context.Cause(ctx)}
				return nil
			}
		}
		return nil
	}); err != nil {
		out := make(chan result, 1)
		out <- result{err: err}
		enqueue(out)
	}
}

// Open implements [Seekable].
func (b *batches) Open(ctx context.Context) (Reader, error) {
	workers := workersOf(ctx)
	if v, ok := b.src.ds.(*view); ok && v.workers > 0 {
		workers = v.workers
	}
	src, err := Open(ctx, b.src)
	if src == nil || err != nil {
		return nil, err
	}
	return &batchReader{src, b.n, b.full, workers}, nil
}

// Open implements [Seekable].
func (m *mapped) Open(ctx context.Context) (Reader, error) {
	src, err := Open(ctx, m.src)
	if src == nil || err != nil {
		return nil, err
	}
	return &mappedReader{src, m.f, Epoch(ctx)}, nil
}

// Open implements [Seekable].
func (r *repeated) Open(ctx context.Context) (Reader, error) {
	passes, epoch := r.n, Epoch(ctx)
	if passes < 0 {
		passes = endlessPasses
	}
	open := func(k int) (Reader, error) { return Open(WithEpoch(ctx, epoch*passes+k), r.src) }
	first, err := open(0)
	if first == nil || err != nil {
		return nil, err
	}
	all := &repeatedReader{open: open, each: first.Len(), passes: map[int]Reader{0: first}}
	switch {
	case r.n < 0 && all.each > 0 || all.each > 0 && passes > math.MaxInt/all.each:
		all.n = math.MaxInt
	default:
		all.n = passes * all.each
	}
	if _, ok := first.(RowReader); ok {
		return repeatedRows{all}, nil
	}
	return all, nil
}

// openMoved opens src and moves its positions. length and at have the number of its elements.
func openMoved(ctx context.Context, src Dataset, length func(n int) int, at func(p int) int) (Reader, error) {
	r, err := Open(ctx, src)
	if r == nil || err != nil {
		return nil, err
	}
	return relocate(r, length(r.Len()), at), nil
}

// Open implements [Seekable].
func (t *taken) Open(ctx context.Context) (Reader, error) {
	return openMoved(ctx, t.src, func(n int) int { return min(n, t.n) }, func(p int) int { return p })
}

// Open implements [Seekable].
func (s *skipped) Open(ctx context.Context) (Reader, error) {
	return openMoved(ctx, s.src, rest{s.n}.length, func(p int) int { return p + s.n })
}

// Open implements [Seekable].
func (s *sharded) Open(ctx context.Context) (Reader, error) {
	return openMoved(ctx, s.src, every{s.index, s.count}.length, func(p int) int { return s.index + p*s.count })
}

// Open implements [Seekable].
func (h *hinted) Open(ctx context.Context) (Reader, error) { return Open(ctx, h.src) }

// Open implements [Seekable].
func (p *prefetch) Open(ctx context.Context) (Reader, error) { return Open(ctx, p.src) }
