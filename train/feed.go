package train

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// feeder reads a dataset in the background. While the replicas compute on one global batch, it copies the
// next ones into the padded tensors of others. The tensors are reused.
type feeder struct {
	ready  chan *globalBatch // has room for all batches; closed at the end, or after err was set
	free   chan *globalBatch // likewise
	used   []*globalBatch    // released, but not yet sent to free: see refill
	err    error             // why ready was closed; nil: the dataset ended
	cancel context.CancelFunc
	reader *reader
	stuck  bool        // next timed out
	timer  *time.Timer // of next; nil: it has not waited yet

	labels, evaluation bool // of feedConfig

	t   *Trainer
	all []*globalBatch

	mu     sync.Mutex // held while a batch is filled
	closed bool       // no batch may be filled from now on
}

// feedConfig configures feed.
type feedConfig struct {
	epoch  int  // of the first pass; later passes count up from it
	skip   int  // batches to skip at the start of the first pass
	repeat bool // start another pass when the dataset ends
	limit  int  // batches at most; negative: no limit
	labels bool // false: ignore the batches' labels
	// evaluation allows the shapes that are not for training.
	evaluation bool
	// together is the number of batches that are in use at the same time. As many and one more are read ahead. 0: 1.
	together int
}

var errNoDataset = errors.New("the dataset is nil")

// feed starts reading ds. The caller must close the feeder. No step may be running.
func (t *Trainer) feed(ctx context.Context, ds data.Dataset, cfg feedConfig) (*feeder, error) {
	if ds == nil {
		return nil, errNoDataset
	}
	if err := t.rejectShard(ds); err != nil {
		return nil, err
	}
	depth := 2*max(cfg.together, 1) + 1
	f := &feeder{ready: make(chan *globalBatch, depth), free: make(chan *globalBatch, depth), t: t}
	for range depth {
		g, err := t.borrow(cfg.labels, cfg.evaluation)
		if err != nil {
			t.giveBack(f.all...)
			return nil, err
		}
		f.all = append(f.all, g)
		f.free <- g
	}
	f.labels, f.evaluation = cfg.labels, cfg.evaluation
	ctx, f.cancel = context.WithCancel(ctx)
	f.reader = read(func() error { return f.read(ctx, ds, cfg) }, func(err error) {
		f.err = err
		close(f.ready)
	})
	return f, nil
}

// rejectShard returns an error if ds has only a part of its data and the job has other workers. With several
// workers, the dataset of every worker is that of the complete global batches, of which it reads its replicas' rows.
func (t *Trainer) rejectShard(ds data.Dataset) error {
	index, count, ok := data.Sharded(ds)
	if !ok || !t.others() {
		return nil
	}
	return fmt.Errorf("the dataset has Shard(%d, %d), so this worker would train on only a part of its share: "+
		"every worker gets the complete dataset, and the strategy gives each replica its share. "+
		"Leave out Shard; for a part of the data, the same on all workers, use Take, Skip or Split", index, count)
}

// next returns the next global batch, or nil at the end. The caller returns it with release.
func (f *feeder) next(ctx context.Context) (*globalBatch, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	select {
	case g, ok := <-f.ready:
		return f.got(ctx, g, ok)
	default:
	}
	f.refill()
	var deadline <-chan time.Time
	if d := f.t.config.DataTimeout; d > 0 {
		if f.timer == nil {
			f.timer = time.NewTimer(d)
		} else {
			f.timer.Reset(d)
		}
		defer f.timer.Stop()
		deadline = f.timer.C
	}
	select {
	case g, ok := <-f.ready:
		return f.got(ctx, g, ok)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-deadline:
		select { // both may be ready after the process was paused
		case g, ok := <-f.ready:
			return f.got(ctx, g, ok)
		default:
		}
		f.stuck = true
		return nil, f.reader.noBatchError(f.t.config.DataTimeout)
	}
}

func (f *feeder) got(ctx context.Context, g *globalBatch, ok bool) (*globalBatch, error) {
	if !ok {
		return nil, f.err
	}
	f.t.feeding = f
	return g, f.t.compileShape(ctx, g.batchShape)
}

// release lets the reader fill batches again that are no longer in use, after the next refill.
func (f *feeder) release(list ...*globalBatch) { f.used = append(f.used, list...) }

// refill wakes the reader, if it has no batch to fill, with those that were released. The first replica calls it when
// a step begins: a reader that is woken before the replicas' goroutines runs before one of them, which begins its step
// later by the time of a copy.
func (f *feeder) refill() {
	for _, g := range f.used {
		f.free <- g // has room for all
	}
	f.used = f.used[:0]
}

// step sets b to the next n batches, or to fewer at the end, as next returns them.
func (f *feeder) step(ctx context.Context, b *stepBatches, n int) error {
	b.set()
	for range n {
		g, err := f.next(ctx)
		if g == nil || err != nil {
			return err
		}
		b.add(g)
	}
	return nil
}

// close stops reading and waits until the dataset has returned. The feeder's batches must not be used
// afterwards. If the dataset ignores the end of its context, close returns an error after endTimeout; the
// goroutine remains until the dataset returns.
func (f *feeder) close() error {
	f.cancel()
	timeout := endTimeout
	if f.stuck {
		timeout = stuckTimeout
	}
	returned := f.reader.wait(timeout)
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.t.giveBack(f.all...)
	if f.t.feeding == f {
		f.t.feeding = nil
	}
	if returned || f.stuck { // next has reported it
		return nil
	}
	return f.reader.notReturnedError()
}

// closeFeed closes f. It returns err, or otherwise the error of closing, which it reports to the other
// workers.
func (t *Trainer) closeFeed(ctx context.Context, f *feeder, err error) error {
	closing := f.close()
	if closing != nil && (err == nil || errors.Is(err, ErrStop)) {
		t.failOthers(ctx, closing)
	}
	return moreSevere(err, closing)
}

func (f *feeder) read(ctx context.Context, ds data.Dataset, cfg feedConfig) error {
	sent := 0
	for pass, skip := cfg.epoch, cfg.skip; sent != cfg.limit; pass, skip = pass+1, 0 {
		batch := 0
		seq, seeks, err := f.pass(data.WithEpoch(ctx, pass), ds, skip)
		if err != nil {
			return err
		}
		if seeks {
			batch = skip
		}
		for element, err := range seq {
			if err != nil {
				return err
			}
			if batch++; batch <= skip {
				continue
			}
			if err := f.send(ctx, element, batchPosition{pass, batch - 1}); err != nil {
				return fmt.Errorf("batch %d of the dataset: %w", batch, err)
			}
			if sent++; sent == cfg.limit {
				return nil
			}
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
		switch {
		case batch == 0:
			return errors.New("the dataset is empty")
		case batch < skip:
			return skippedTooFarError(batch, skip)
		}
		if !cfg.repeat {
			return nil
		}
	}
	return nil
}

func skippedTooFarError(batches, skip int) error {
	return fmt.Errorf("resuming: the dataset has %d batches, but the snapshot was taken after %d: use the same dataset",
		batches, skip)
}

// pass returns the batches of the pass of the epoch in ctx. seeks reports that it starts after the skipped ones,
// without reading them. With other workers, it reads only the rows of this worker's replicas, as [readRows], if ds can
// do that.
func (f *feeder) pass(ctx context.Context, ds data.Dataset, skip int) (seq iter.Seq2[data.Element, error], seeks bool,
	err error,
) {
	if skip == 0 && !f.t.others() {
		return ds.Iter(ctx), false, nil
	}
	r, err := data.Open(ctx, ds)
	switch {
	case err != nil:
		return nil, false, err
	case r == nil:
		return ds.Iter(ctx), false, nil
	case r.Len() < skip:
		return nil, false, skippedTooFarError(r.Len(), skip)
	}
	if rows, ok := r.(data.RowReader); ok && f.t.others() {
		return f.t.rowsOf(ctx, ds, rows, skip, f.labels, f.evaluation), true, nil
	}
	return data.IterReader(ctx, ds, r, skip), true, nil
}

func (f *feeder) send(ctx context.Context, element data.Element, at batchPosition) error {
	b, ok := element.(*readRows)
	if !ok {
		whole, err := batchOf(element)
		if err != nil {
			return err
		}
		b = wholeBatch(whole)
	}
	select {
	case g := <-f.free:
		if err := f.fill(g, b, at); err != nil {
			return err
		}
		select {
		case f.ready <- g:
			return nil
		case <-ctx.Done():
		}
	case <-ctx.Done():
	}
	return context.Cause(ctx)
}

// fill fills g, unless the feeder is closed: g may then be in use elsewhere.
func (f *feeder) fill(g *globalBatch, b *readRows, at batchPosition) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return context.Canceled
	}
	g.position = at
	return g.fill(b)
}

// batchOf converts an element to a batch, or returns an error if it is none.
func batchOf(element data.Element) (data.Batch, error) {
	b, ok := element.(data.Batch)
	if !ok {
		return b, fmt.Errorf("it is a %T: want a data.Batch", element)
	}
	return b, nil
}

// globalBatch is one global batch, split into a padded share for each replica.
type globalBatch struct {
	*batchShape // of the batch

	t          *Trainer
	memory     map[*batchShape][]engine.Batch // of shares
	labels     bool
	evaluation bool // shapes that are not for training are allowed

	shares    []engine.Batch // of this worker's replicas
	rows      []int          // examples by replica, of all workers; the rest of a share is padding
	examples  int            // of all replicas
	weightSum float64        // of all examples
	position  batchPosition  // in the dataset
	hashed    bool           // content and identity are set, for comparison between workers
	content   content
	identity  rowIdentity
}

// borrow returns a global batch to fill. Batches are reused from pass to pass, because their memory may
// belong to the engine, which reads them in place.
func (t *Trainer) borrow(labels, evaluation bool) (*globalBatch, error) {
	if n := len(t.spare); n > 0 {
		g := t.spare[n-1]
		t.spare = t.spare[:n-1]
		// Leftovers of batches that were read ahead differ between workers.
		g.labels, g.evaluation, g.position = labels, evaluation, batchPosition{}
		return g, nil
	}
	n := t.strategy.NumReplicasInSync()
	g := &globalBatch{
		batchShape: t.shapes[0], t: t, memory: map[*batchShape][]engine.Batch{}, labels: labels, evaluation: evaluation,
		rows: make([]int, n), hashed: t.others(),
	}
	for local, replica := range t.ids() {
		share, err := t.program.NewBatch(local)
		if err != nil {
			return nil, fmt.Errorf("memory for a batch of replica %d: %w", replica, err)
		}
		g.shares = append(g.shares, share)
	}
	g.memory[g.batchShape] = g.shares
	return g, nil
}

// giveBack lets borrow reuse batches that are no longer in use.
func (t *Trainer) giveBack(list ...*globalBatch) { t.spare = append(t.spare, list...) }

// fill copies b into the shares. Padding is a copy of the batch's first example, with weight 0. Zeros would
// turn into NaN in a model that divides by a norm, for example, and a weight of 0 does not remove a NaN.
func (g *globalBatch) fill(b *readRows) error {
	if g.batchShape = b.shape; g.batchShape == nil {
		g.batchShape = g.t.shapeOf(b.batch, b.size, g.labels, g.evaluation)
	}
	if err := g.check(b.batch, b.size); err != nil {
		return g.t.noShapeError(err)
	}
	g.shares = g.sharesFor(g.batchShape)
	g.examples = b.size
	g.weightSum = 0
	weight := func(i int) float32 {
		if b.batch.Weights == nil {
			return 1
		}
		return tensor.Data[float32](b.batch.Weights)[i]
	}
	for i := range g.examples {
		g.weightSum += float64(weight(i))
	}
	for replica := range g.rows {
		lo, hi := g.share(replica, b.size)
		g.rows[replica] = hi - lo
	}
	for local, replica := range g.t.ids() {
		lo, hi := g.share(replica, b.size)
		from := lo // in b.batch
		if b.starts != nil {
			from = b.starts[local]
		}
		share := &g.shares[local]
		share.Padding = g.per - (hi - lo)
		for i, dst := range share.Inputs {
			copyRows(dst, b.batch.Inputs[i], from, from+hi-lo, b.padding)
		}
		if g.labels {
			for i, dst := range share.Labels {
				copyRows(dst, b.batch.Labels[i], from, from+hi-lo, b.padding)
			}
		}
		clear(share.Weights)
		for i := range hi - lo {
			share.Weights[i] = weight(lo + i)
		}
	}
	if g.hashed {
		g.content, g.identity = content{}, b.identity
		if !b.byRows() {
			g.content, g.identity = contentOf(b.batch, g.labels), rowIdentity{}
		} else {
			g.identity.hashCompared(b, g.labels)
		}
	}
	return nil
}

// copyRows copies the rows [lo, hi) of src to the start of dst, and the row padding of src to the rest of dst.
func copyRows(dst, src *tensor.Tensor, lo, hi, padding int) {
	to, from := dst.Memory().HostBytes(), src.Memory().HostBytes()
	if src.Len() == 0 { // no examples, or empty examples
		clear(to)
		return
	}
	row := len(from) / src.Shape()[0]
	at := 0
	if lo < hi {
		at = copy(to, from[lo*row:hi*row])
	}
	for at < len(to) {
		at += copy(to[at:], from[padding*row:(padding+1)*row])
	}
}

// check returns an error unless the program can compute b: all rows, or some, of a batch of so many examples.
func (g *globalBatch) check(b data.Batch, examples int) error {
	if len(b.Inputs) != len(g.Inputs) {
		return fmt.Errorf("it has %d inputs: want %d", len(b.Inputs), len(g.Inputs))
	}
	if b.Inputs[0] == nil || b.Inputs[0].Rank() == 0 {
		return errors.New("input 0 is missing or a scalar: want a first dimension that counts examples, as " +
			"data.Pipeline.Batch makes it")
	}
	if err := checkBatched("input", b.Inputs, g.Inputs); err != nil {
		return err
	}
	rows := b.Rows()
	if examples > g.GlobalBatch {
		hint := ""
		if g.evaluation {
			hint = ", or a larger Config.EvaluationBatch"
		}
		return fmt.Errorf("it has %d examples: want at most the global batch of %d that the model was compiled for%s",
			examples, g.GlobalBatch, hint)
	}
	if err := checkFeatures("input", b.Inputs, g.Inputs, rows); err != nil {
		return err
	}
	if g.labels {
		if len(b.Labels) != len(g.Labels) {
			return fmt.Errorf("it has %d labels: want %d", len(b.Labels), len(g.Labels))
		}
		if err := checkBatched("label", b.Labels, g.Labels); err != nil {
			return err
		}
		if err := checkFeatures("label", b.Labels, g.Labels, rows); err != nil {
			return err
		}
	}
	return checkWeights(b.Weights, rows)
}

// checkBatched returns an error if a tensor has the shape of one example, or of a batch of batches.
func checkBatched(kind string, tensors []*tensor.Tensor, features []engine.Feature) error {
	for i, f := range features {
		if tensors[i] == nil {
			continue
		}
		shape := tensors[i].Shape()
		switch more := len(shape) - len(f.Shape); {
		case more == 0 && slices.Equal(shape, f.Shape):
			return fmt.Errorf("%s %d is one example of shape %s: want a first dimension that counts examples: "+
				"call Batch on the pipeline (data.Pipeline.Batch)",
				kind, i, tensor.FormatShape(shape))
		case more == 2 && slices.Equal(shape[2:], f.Shape):
			return fmt.Errorf("%s %d has shape %s, where one example has %s: want one dimension that counts "+
				"examples, not two: call Batch on the pipeline once",
				kind, i, tensor.FormatShape(shape), tensor.FormatShape(f.Shape))
		}
	}
	return nil
}

func checkFeatures(kind string, tensors []*tensor.Tensor, features []engine.Feature, rows int) error {
	for i, f := range features {
		t := tensors[i]
		if t != nil && t.DType() == f.DType && len(t.Shape()) == 1+len(f.Shape) && t.Shape()[0] == rows &&
			slices.Equal(t.Shape()[1:], f.Shape) {
			continue
		}
		if err := fits(t, f.DType, append([]int{rows}, f.Shape...)); err != nil {
			return fmt.Errorf("%s %d: %w", kind, i, err)
		}
	}
	return nil
}

func checkWeights(weights *tensor.Tensor, rows int) error {
	if weights == nil {
		return nil
	}
	if err := fits(weights, tensor.Float32, []int{rows}); err != nil {
		return fmt.Errorf("weights: %w", err)
	}
	for i, w := range tensor.Data[float32](weights) {
		if !(w >= 0) || math.IsInf(float64(w), 1) {
			return fmt.Errorf("weight %d is %v: want a finite number, not negative", i, w)
		}
	}
	return nil
}

// fits returns an error unless t is a host tensor of the given dtype and shape.
func fits(t *tensor.Tensor, dtype tensor.DType, shape []int) error {
	switch {
	case t == nil:
		return fmt.Errorf("missing: want %v%s", dtype, tensor.FormatShape(shape))
	case t.DType() != dtype || !slices.Equal(t.Shape(), shape):
		return fmt.Errorf("got %v%s, want %v%s", t.DType(), tensor.FormatShape(t.Shape()), dtype, tensor.FormatShape(shape))
	case t.Memory().Kind == tensor.Device:
		return errors.New("it is in device memory: want host memory")
	}
	return nil
}
