package train

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// readRows are the rows of a global batch that this worker has read: consecutive ones, which may be all, and perhaps
// more.
type readRows struct {
	batch    data.Batch
	size     int // examples of the global batch
	from     int // the row of the global batch that is the first of batch
	padding  int // the row of batch that is the first of the global batch, if a share of this worker has padding
	identity rowIdentity
	shape    *batchShape // nil: it follows from batch
}

func wholeBatch(b data.Batch) *readRows {
	r := &readRows{batch: b}
	if len(b.Inputs) > 0 && b.Inputs[0] != nil && b.Inputs[0].Rank() > 0 { // otherwise check reports it
		r.size = b.Rows()
	}
	return r
}

// byRows reports whether the workers compare identities instead of contents: each has read only its replicas' rows, or
// could have done so.
func (r *readRows) byRows() bool { return r.identity.predicted != nil && allOnes(r.batch.Weights) }

// rowIdentity records which examples a global batch has, and which of them this worker has read.
type rowIdentity struct {
	order     uint64      // hash of all identities, as the order of the epoch predicts them
	data      uint64      // fingerprint of the dataset
	predicted [][2]uint32 // by replica: sums of the halves of its rows' identities
	read      [][2]uint32 // the same of the rows that were really read, by local replica

	// One row is also read by another worker.
	row, owner, second int    // the row in the batch, and the replicas
	id                 uint64 // of its example
	own, other         int    // the rows of readRows.batch of a worker that has the owner, or the second; negative: none
	hash               uint64 // of the row's contents, if this worker has read it
}

// seen returns a hash of the identity of an example and its row.
func seen(id uint64, row int) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], id)
	binary.LittleEndian.PutUint64(b[8:], uint64(row))
	return xxh3.Hash(b[:])
}

// addHalves adds the halves of x to sums, modulo 2³².
func addHalves(sums *[2]uint32, x uint64) {
	sums[0] += uint32(x)
	sums[1] += uint32(x >> 32)
}

// put adds what a replica contributes to the values that workers compare.
func (d *rowIdentity) put(replica, local int, to []float64) {
	if d.predicted == nil {
		return
	}
	sign := 0.0
	if replica == d.owner {
		sign++
	}
	if replica == d.second {
		sign--
	}
	for i := range 2 {
		to[agreedRead+i] += float64(d.read[local][i])
		to[agreedRow+i] += sign * float64(uint32(d.hash>>(32*i)))
	}
}

// rightRows reports whether the rows that all replicas read are those that the order predicts, and whether the row
// that was read twice has the same contents. sums are the sums of what all replicas put. In an inner step of DiLoCo
// these are the replicas of this worker; endRound compares the contents.
func (t *Trainer) rightRows(r *distribute.Replica, b *stepBatches, sums []float64) bool {
	first, inner := t.firstOf(r)
	var want [2]uint32
	for _, g := range b.list {
		if p := g.identity.predicted; p != nil {
			for _, x := range p[first : first+r.NumReplicas()] {
				want[0], want[1] = want[0]+x[0], want[1]+x[1]
			}
		}
	}
	for i := range 2 {
		if uint32(uint64(sums[agreedRead+i])) != want[i] || !inner && sums[agreedRow+i] != 0 {
			return false
		}
	}
	return true
}

// firstOf returns the id of the first of the replicas that r communicates with, and whether it is in an inner step of
// DiLoCo, where these are only those of this worker.
func (t *Trainer) firstOf(r *distribute.Replica) (first int, inner bool) {
	if inner = r.NumReplicas() < t.strategy.NumReplicasInSync(); inner {
		first, _ = t.strategy.LocalReplicas()
	}
	return first, inner
}

// errContents is the error of a round of DiLoCo in which workers have read different contents of an example.
var errContents = errors.New("in one of the inner steps, two workers have read different contents of the same " +
	"example. All workers must have the same data: use the same files, functions and seeds of random changes")

// compareRows gathers which rows the replicas have read. It returns an error that names the worker that has read
// others than the order predicts, or the workers that have read different contents of one row.
func (t *Trainer) compareRows(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	const fields = 5
	first, inner := t.firstOf(r)
	var mine []int64
	for _, g := range b.list {
		list := make([]float64, agreed)
		g.identity.put(t.replicaID(r), r.LocalID(), list)
		mine = append(mine, int64(g.first), int64(list[agreedRead]), int64(list[agreedRead+1]), int64(list[agreedRow]),
			int64(list[agreedRow+1]))
	}
	gathered, err := r.AllGather(ctx, tensor.From(mine, 1, len(mine)), 0)
	if err != nil {
		return fmt.Errorf("the workers have not read the rows of this step, and comparing them failed: %w", err)
	}
	all := tensor.Data[int64](gathered.(*tensor.Tensor))
	workers := make([]int, r.NumReplicas()) // by replica of the call
	for replica := 1; replica < len(workers); replica++ {
		workers[replica] = workers[replica-1]
		if all[replica*len(mine)] != all[(replica-1)*len(mine)] {
			workers[replica]++
		}
	}
	for i, g := range b.list {
		d := &g.identity
		where := fmt.Sprintf("batch %d of pass %d over the data, of %d examples", g.position.batch+1, g.position.pass+1,
			g.examples)
		var row [2]int64
		if d.predicted == nil {
			continue
		}
		for at := range workers {
			replica, of := first+at, all[at*len(mine)+i*fields:][:fields]
			p := d.predicted[replica]
			if uint32(of[1]) != p[0] || uint32(of[2]) != p[1] {
				lo, hi := g.share(replica, g.examples)
				name := fmt.Sprint("worker ", workers[at])
				if inner {
					name = "this worker"
				}
				return fmt.Errorf("%s has not read the examples at the rows %d to %d of %s, which replica %d has to "+
					"train on, but others: examples would be missing or doubled. Its data.RowReader returns other identities "+
					"from ReadRows than from RowID", name, lo, hi-1, where, replica)
			}
			row[0], row[1] = row[0]+of[3], row[1]+of[4]
		}
		if !inner && row != [2]int64{} {
			return fmt.Errorf("worker %d and worker %d read different contents of the same example, number %d of the source "+
				"(counted from 0), in row %d of %s. All workers must have the same data: use the same files, functions and "+
				"seeds of random changes", workers[d.owner], workers[d.second], d.id, d.row, where)
		}
	}
	return nil
}

// rowsOf reads the batches of a pass from position skip on: the rows of this worker's replicas, and what they are
// compared with. If a batch has weights, it reads all rows: a step needs the sum of all weights before it begins.
func (t *Trainer) rowsOf(ctx context.Context, ds data.Dataset, r data.RowReader, skip int, labels, evaluation bool,
) iter.Seq2[data.Element, error] {
	s := rowSelection{t: t, labels: labels, evaluation: evaluation, pass: data.Epoch(ctx)}
	s.replicas = t.strategy.NumReplicasInSync()
	s.first, s.local = t.strategy.LocalReplicas()
	s.data = data.Fingerprint(ds)
	p := data.FromSeq(-1, func(ctx context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			weighted := false
			for batch := skip; batch < r.Len(); batch++ {
				part, err := s.read(ctx, r, batch, &weighted)
				if !yield(part, err) || err != nil {
					return
				}
			}
		}
	})
	if n := data.ReadAhead(ds); n > 0 {
		p = p.Prefetch(n)
	}
	return p.Iter(ctx)
}

// rowSelection selects the rows that a worker reads.
type rowSelection struct {
	t            *Trainer
	labels       bool
	evaluation   bool
	per          int // rows of a share of the current batch
	replicas     int // of all workers
	first, local int // of this worker's replicas
	pass         int
	data         uint64 // fingerprint of the dataset
	rows         []int  // scratch
}

// read reads this worker's rows of a batch. weighted is set once a batch has weights. The rows depend on the batch's
// shape, which depends on its rows: if the shape is not the expected one, other rows are read.
func (s *rowSelection) read(ctx context.Context, r data.RowReader, batch int, weighted *bool) (*readRows, error) {
	size := r.Rows(batch)
	any := func(*batchShape) bool { return true }
	if capacity, ok := r.(data.SizedReader); ok {
		size = max(size, min(capacity.Size(batch), s.t.largest(s.evaluation)))
	}
	expected := s.t.smallest(size, s.evaluation, any)
	for range len(s.t.shapes) + 1 {
		part, err := s.readAs(ctx, r, batch, expected, weighted)
		if err != nil || !s.t.several() {
			return part, err
		}
		shape := s.t.shapeOf(part.batch, part.size, s.labels, s.evaluation)
		if shape.per == expected.per {
			part.shape = shape
			return part, nil
		}
		expected = shape
	}
	return nil, fmt.Errorf("train: batch %d has rows of different shapes: want batches of one shape each, as "+
		"data.Pipeline.BucketByLength and PaddedBatch make them", batch)
}

// readAs reads this worker's rows of a batch that is expected to have a shape.
func (s *rowSelection) readAs(ctx context.Context, r data.RowReader, batch int, shape *batchShape, weighted *bool) (
	*readRows, error,
) {
	size := r.Rows(batch)
	s.per = shape.per
	share := func(replica int) (lo, hi int) {
		lo = min(replica*s.per, size)
		return lo, min(lo+s.per, size)
	}
	lo, _ := share(s.first)
	_, hi := share(s.first + s.local - 1)
	part := &readRows{size: size, from: lo}
	d := &part.identity
	s.predict(d, r, batch, size)
	d.owner = min(d.row/s.per, s.replicas-1)
	d.second = s.t.secondReader(d.owner)
	mine := func(replica int) bool { return replica >= s.first && replica < s.first+s.local }
	d.own, d.other = -1, -1
	if mine(d.owner) {
		d.own = d.row - lo
	}
	if *weighted {
		return part, part.readAll(ctx, r, batch, s)
	}
	s.rows = s.rows[:0]
	for row := lo; row < hi; row++ {
		s.rows = append(s.rows, row)
	}
	if mine(d.second) {
		d.other = len(s.rows)
		s.rows = append(s.rows, d.row)
	}
	if hi-lo < s.local*s.per && lo > 0 {
		part.padding = len(s.rows)
		s.rows = append(s.rows, 0)
	}
	e, ids, err := r.ReadRows(ctx, batch, s.rows)
	if err != nil {
		return nil, err
	}
	if part.batch, err = rowsIn(e, batch, len(s.rows)); err != nil {
		return nil, err
	}
	if part.batch.Weights != nil {
		*weighted = true
		return part, part.readAll(ctx, r, batch, s)
	}
	d.setRead(s, size, func(row int) uint64 { return ids[row-lo] })
	return part, nil
}

// secondReader returns a replica of another worker than that of the replica owner.
func (t *Trainer) secondReader(owner int) int {
	w := 0
	for w+1 < len(t.firsts) && t.firsts[w+1] <= owner {
		w++
	}
	return t.firsts[(w+max(1, len(t.firsts)/2))%len(t.firsts)]
}

// readAll reads all rows of a batch.
func (p *readRows) readAll(ctx context.Context, r data.RowReader, batch int, s *rowSelection) error {
	e, err := r.At(ctx, batch)
	if err != nil {
		return err
	}
	if p.batch, err = rowsIn(e, batch, p.size); err != nil {
		return err
	}
	p.from, p.padding = 0, 0
	d := &p.identity
	for _, at := range []*int{&d.own, &d.other} {
		if *at >= 0 {
			*at = d.row
		}
	}
	if d.second >= s.first && d.second < s.first+s.local {
		d.other = d.row
	}
	d.setRead(s, p.size, func(row int) uint64 { return r.RowID(batch, row) })
	return nil
}

// rowsIn returns the batch that an element is, which must have so many rows.
func rowsIn(e data.Element, batch, rows int) (data.Batch, error) {
	b, err := batchOf(e)
	if got := wholeBatch(b).size; err == nil && got != rows && got > 0 {
		err = fmt.Errorf("its data.RowReader returned %d rows: want %d", got, rows)
	}
	if err != nil {
		return b, fmt.Errorf("batch %d of the dataset: %w", batch+1, err)
	}
	return b, nil
}

// predict sets what the order of the epoch predicts.
func (s *rowSelection) predict(d *rowIdentity, r data.RowReader, batch, size int) {
	d.data = s.data
	d.predicted = make([][2]uint32, s.replicas)
	for row := range size {
		x := seen(r.RowID(batch, row), row)
		d.order = d.order*31 + x
		addHalves(&d.predicted[min(row/s.per, s.replicas-1)], x)
	}
	d.order = max(1, d.order)
	if size > 0 {
		d.row = int(seen(uint64(s.pass)<<32^uint64(batch), -1) % uint64(min(size, math.MaxInt32)))
		d.id = r.RowID(batch, d.row)
	}
}

// setRead sets the identities of the rows of this worker's replicas, of which id returns that of each.
func (d *rowIdentity) setRead(s *rowSelection, size int, id func(row int) uint64) {
	d.read = make([][2]uint32, s.local)
	for local := range s.local {
		lo := min((s.first+local)*s.per, size)
		for row := lo; row < min(lo+s.per, size); row++ {
			addHalves(&d.read[local], seen(id(row), row))
		}
	}
}

// hashCompared hashes the row that two workers read.
func (d *rowIdentity) hashCompared(b *readRows, labels bool) {
	row := max(d.own, d.other)
	if row < 0 {
		return
	}
	one := data.Batch{}
	for _, x := range b.batch.Inputs {
		one.Inputs = append(one.Inputs, x.Rows(row, row+1))
	}
	if labels {
		for _, x := range b.batch.Labels {
			one.Labels = append(one.Labels, x.Rows(row, row+1))
		}
	}
	c := contentOf(one, labels)
	d.hash = c.inputs ^ seen(c.labels, 0)
}

// allOnes reports whether weights are missing or all 1, which is the same.
func allOnes(weights *tensor.Tensor) bool {
	if weights == nil {
		return true
	}
	for _, w := range tensor.Data[float32](weights) {
		if w != 1 {
			return false
		}
	}
	return true
}
