package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// feeder reads a dataset in the background: while the replicas compute on one global batch, it copies the next one into
// the padded tensors of another, which are used again and again.
type feeder struct {
	ready  chan *globalBatch // closed at the end, or after err was set
	free   chan *globalBatch
	err    error // why ready was closed; nil: the dataset ended
	cancel context.CancelFunc
	reader *reader
	stuck  bool // next has given up

	t   *Trainer
	all []*globalBatch

	mu     sync.Mutex // held while a batch is filled
	closed bool       // no batch may be filled any more
}

// feederDepth is how many global batches there are: one that is computed on, one that waits, one that is being filled.
const feederDepth = 3

// feedConfig says how a dataset is read.
type feedConfig struct {
	epoch  int  // of the first pass; the next ones count on
	skip   int  // batches at the start of the first pass that are left out
	repeat bool // start again at the dataset's end
	limit  int  // batches at most; negative: no limit
	labels bool // false: the batches' labels are not looked at
}

var errNoDataset = errors.New("the dataset is nil")

// feed starts reading ds. The caller must close the feeder. No replica may be in a step.
func (t *Trainer) feed(ctx context.Context, ds data.Dataset, cfg feedConfig) (*feeder, error) {
	if ds == nil {
		return nil, errNoDataset
	}
	if err := t.refuseShard(ds); err != nil {
		return nil, err
	}
	f := &feeder{ready: make(chan *globalBatch), free: make(chan *globalBatch, feederDepth), t: t}
	for range feederDepth {
		g, err := t.borrow(cfg.labels)
		if err != nil {
			t.giveBack(f.all...)
			return nil, err
		}
		f.all = append(f.all, g)
		f.free <- g
	}
	ctx, f.cancel = context.WithCancel(ctx)
	f.reader = read(func() error { return f.read(ctx, ds, cfg) }, func(err error) {
		f.err = err
		close(f.ready)
	})
	return f, nil
}

// refuseShard returns an error if ds keeps a part of its data only, and there are other workers: then every worker
// reads the whole global batches, and computes on its replicas' shares of them.
func (t *Trainer) refuseShard(ds data.Dataset) error {
	index, count, ok := data.Sharded(ds)
	if !ok || !t.others() {
		return nil
	}
	return fmt.Errorf("the dataset has Shard(%d, %d), so this worker would train on a part of its share only: "+
		"every worker reads the whole global batches, and the strategy gives each replica its share. "+
		"Leave out Shard; for a part of the data, the same on all workers, use Take, Skip or Split", index, count)
}

// next returns the next global batch, or nil at the end. The caller hands it back with release.
func (f *feeder) next(ctx context.Context) (*globalBatch, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	select {
	case g, ok := <-f.ready:
		return f.got(g, ok)
	default:
	}
	deadline, stop := after(f.t.config.DataTimeout)
	defer stop()
	select {
	case g, ok := <-f.ready:
		return f.got(g, ok)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-deadline:
		select { // both, after a pause of the whole process
		case g, ok := <-f.ready:
			return f.got(g, ok)
		default:
		}
		f.stuck = true
		return nil, f.reader.late(f.t.config.DataTimeout)
	}
}

func (f *feeder) got(g *globalBatch, ok bool) (*globalBatch, error) {
	if !ok {
		return nil, f.err
	}
	return g, nil
}

func (f *feeder) release(g *globalBatch) { f.free <- g }

// close stops reading and waits until the dataset is no longer touched. Nobody may use a batch of the feeder
// any more. A dataset that ignores the end of its context is left alone after a while, with an error; its
// goroutine stays until the dataset returns.
func (f *feeder) close() error {
	f.cancel()
	returned := f.reader.wait(endTimeout)
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.t.giveBack(f.all...)
	if returned || f.stuck { // next has told
		return nil
	}
	return f.reader.ignorant()
}

// closeFeed closes f, and returns err or else what was wrong with that, of which the other workers learn.
func (t *Trainer) closeFeed(ctx context.Context, f *feeder, err error) error {
	closing := f.close()
	if closing != nil && (err == nil || errors.Is(err, ErrStop)) {
		t.tellOthers(ctx, closing)
	}
	return graver(err, closing)
}

func (f *feeder) read(ctx context.Context, ds data.Dataset, cfg feedConfig) error {
	sent := 0
	for pass, skip := cfg.epoch, cfg.skip; sent != cfg.limit; pass, skip = pass+1, 0 {
		batch := 0
		for element, err := range ds.Iter(data.WithEpoch(ctx, pass)) {
			if err != nil {
				return err
			}
			if batch++; batch <= skip {
				continue
			}
			if err := f.send(ctx, element, place{pass, batch - 1}); err != nil {
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
			return fmt.Errorf("the dataset has %d batches, but the training that goes on here had read %d: it is another dataset", batch, skip)
		}
		if !cfg.repeat {
			return nil
		}
	}
	return nil
}

func (f *feeder) send(ctx context.Context, element data.Element, at place) error {
	b, err := batchOf(element)
	if err != nil {
		return err
	}
	select {
	case g := <-f.free:
		if err := f.fill(g, b); err != nil {
			return err
		}
		g.place = at
		select {
		case f.ready <- g:
			return nil
		case <-ctx.Done():
		}
	case <-ctx.Done():
	}
	return context.Cause(ctx)
}

// fill fills g, unless it belongs to somebody else by now.
func (f *feeder) fill(g *globalBatch, b data.Batch) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return context.Canceled
	}
	return g.fill(b)
}

// batchOf returns an element as the batch that it must be.
func batchOf(element data.Element) (data.Batch, error) {
	b, ok := element.(data.Batch)
	if !ok {
		return b, fmt.Errorf("it is a %T: want a data.Batch", element)
	}
	return b, nil
}

// globalBatch is one global batch, cut into a padded share for each replica.
type globalBatch struct {
	config    *Config
	labels    bool
	per       int            // rows of a share
	shares    []engine.Batch // of this worker's replicas
	first     int            // the id of the first of them
	rows      []int          // examples by replica, of all workers; the rest of a share is padding
	examples  int            // of all replicas
	weightSum float64        // of all examples
	place     place          // in the dataset
	pass      int64          // of Trainer.Gradients over the step's examples
	hashed    bool           // content is kept, for other workers to compare theirs
	content   content
	stop      bool // this worker wants to stop
	tolerated bool // loss and gradients need not be finite
}

// borrow returns a global batch to fill. They are used again and again, by one pass over a dataset after the other: the memory in which an
// engine reads them is its own.
func (t *Trainer) borrow(labels bool) (*globalBatch, error) {
	if n := len(t.spare); n > 0 {
		g := t.spare[n-1]
		t.spare = t.spare[:n-1]
		g.labels, g.place, g.stop = labels, place{}, false // what was read ahead of a pass that ended early differs among workers
		return g, nil
	}
	n := t.strategy.NumReplicasInSync()
	g := &globalBatch{
		config: &t.config, labels: labels, per: ceilDiv(t.config.GlobalBatch, n), rows: make([]int, n), hashed: t.others(),
	}
	g.first, _ = t.strategy.LocalReplicas()
	for replica := range t.parts {
		share, err := t.newShare(replica, g.per)
		if err != nil {
			return nil, fmt.Errorf("memory for a batch of replica %d: %w", g.first+replica, err)
		}
		g.shares = append(g.shares, share)
	}
	return g, nil
}

// giveBack takes batches that nobody uses any more.
func (t *Trainer) giveBack(list ...*globalBatch) { t.spare = append(t.spare, list...) }

// newShare returns memory for a replica's part of a batch: the engine's, if it lends any.
func (t *Trainer) newShare(replica, rows int) (engine.Batch, error) {
	if p, ok := t.program.(engine.Lender); ok {
		return p.NewBatch(replica)
	}
	return engine.Batch{Inputs: newRows(t.config.Inputs, rows), Labels: newRows(t.config.Labels, rows), Weights: make([]float32, rows)}, nil
}

func newRows(features []engine.Feature, rows int) []*tensor.Tensor {
	var out []*tensor.Tensor
	for _, f := range features {
		out = append(out, tensor.New(f.DType, append([]int{rows}, f.Shape...)...))
	}
	return out
}

// fill copies b into the shares. Padding is a copy of the batch's first example with weight 0: a model that cannot take zeros
// (it divides by a norm, say) would make a NaN of them, which no weight takes away again.
func (g *globalBatch) fill(b data.Batch) error {
	if err := g.check(b); err != nil {
		return err
	}
	g.examples = b.Rows()
	g.weightSum = 0
	weight := func(i int) float32 {
		if b.Weights == nil {
			return 1
		}
		return tensor.Data[float32](b.Weights)[i]
	}
	for i := range g.examples {
		g.weightSum += float64(weight(i))
	}
	for replica := range g.rows {
		lo := min(replica*g.per, g.examples)
		hi := min(lo+g.per, g.examples)
		g.rows[replica] = hi - lo
		if replica < g.first || replica >= g.first+len(g.shares) {
			continue // another worker's
		}
		share := &g.shares[replica-g.first]
		share.Padding = g.per - (hi - lo)
		for i, dst := range share.Inputs {
			copyRows(dst, b.Inputs[i], lo, hi)
		}
		if g.labels {
			for i, dst := range share.Labels {
				copyRows(dst, b.Labels[i], lo, hi)
			}
		}
		clear(share.Weights)
		for i := range hi - lo {
			share.Weights[i] = weight(lo + i)
		}
	}
	if g.hashed {
		g.content = contentOf(b, g.labels)
	}
	return nil
}

// copyRows copies the rows [lo, hi) of src to the start of dst, and src's first row to the rest of dst.
func copyRows(dst, src *tensor.Tensor, lo, hi int) {
	to, from := dst.Memory().HostBytes(), src.Memory().HostBytes()
	if src.Len() == 0 { // no examples, or examples without elements
		clear(to)
		return
	}
	row := len(from) / src.Shape()[0]
	for at := copy(to, from[lo*row:hi*row]); at < len(to); {
		at += copy(to[at:], from[:row])
	}
}

func (g *globalBatch) check(b data.Batch) error {
	if len(b.Inputs) != len(g.config.Inputs) {
		return fmt.Errorf("it has %d inputs: want %d", len(b.Inputs), len(g.config.Inputs))
	}
	if b.Inputs[0] == nil || b.Inputs[0].Rank() == 0 {
		return errors.New("input 0 is missing or a scalar: want a first dimension that counts examples, as data.Pipeline.Batch makes it")
	}
	if err := checkBatched("input", b.Inputs, g.config.Inputs); err != nil {
		return err
	}
	rows := b.Rows()
	if rows > g.config.GlobalBatch {
		return fmt.Errorf("it has %d examples: want at most the global batch of %d that the model was compiled for", rows, g.config.GlobalBatch)
	}
	if err := checkFeatures("input", b.Inputs, g.config.Inputs, rows); err != nil {
		return err
	}
	if g.labels {
		if len(b.Labels) != len(g.config.Labels) {
			return fmt.Errorf("it has %d labels: want %d", len(b.Labels), len(g.config.Labels))
		}
		if err := checkBatched("label", b.Labels, g.config.Labels); err != nil {
			return err
		}
		if err := checkFeatures("label", b.Labels, g.config.Labels, rows); err != nil {
			return err
		}
	}
	return checkWeights(b.Weights, rows)
}

// checkBatched returns an error if tensors have the shape of one example, or of batches of batches.
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
		if err := fits(tensors[i], f.DType, append([]int{rows}, f.Shape...)); err != nil {
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

// fits returns an error unless t is a host tensor of that type and shape.
func fits(t *tensor.Tensor, dtype tensor.DType, shape []int) error {
	switch {
	case t == nil:
		return fmt.Errorf("missing: want %v%s", dtype, tensor.FormatShape(shape))
	case t.DType() != dtype || !slices.Equal(t.Shape(), shape):
		return fmt.Errorf("got %v%s, want %v%s", t.DType(), tensor.FormatShape(t.Shape()), dtype, tensor.FormatShape(shape))
	case t.Memory().Kind == tensor.Device:
		return errors.New("it lies in device memory: want host memory")
	}
	return nil
}
