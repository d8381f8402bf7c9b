package train

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// readRows are the rows of a global batch that this worker has read: all, or the shares of its replicas one after the
// other, and perhaps more.
type readRows struct {
	batch    data.Batch
	size     int   // examples of the global batch
	starts   []int // by local replica, the row of batch that is the first of its share; nil: batch has all rows
	padding  int   // the row of batch that is the first of the global batch, if a share of this worker has padding
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
	var want [2]uint32
	for _, g := range b.list {
		if p := g.identity.predicted; p != nil {
			for i := range r.NumReplicas() {
				x := p[t.memberID(r, i)]
				want[0], want[1] = want[0]+x[0], want[1]+x[1]
			}
		}
	}
	for i := range 2 {
		if uint32(uint64(sums[agreedRead+i])) != want[i] || t.withOthers(r) && sums[agreedRow+i] != 0 {
			return false
		}
	}
	return true
}

// withOthers reports whether r communicates with the replicas of all workers, as it does except in an inner step of
// DiLoCo.
func (t *Trainer) withOthers(r *distribute.Replica) bool {
	return r.NumReplicas() == t.strategy.NumReplicasInSync()
}

// memberID returns the id of replica number i of those that r communicates with.
func (t *Trainer) memberID(r *distribute.Replica, i int) int {
	if t.withOthers(r) {
		return i
	}
	return t.ids()[i]
}

// errContents is the error of a round of DiLoCo in which workers have read different contents of an example.
var errContents = errors.New("in one of the inner steps, two workers have read different contents of the same " +
	"example. All workers must have the same data: use the same files, functions and seeds of random changes")

// compareRows gathers which rows the replicas have read. It returns an error that names the worker that has read
// others than the order predicts, or the workers that have read different contents of one row.
func (t *Trainer) compareRows(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	type rowsRead struct {
		Worker int
		Read   [][2]uint32 // by batch: agreedRead
		Row    [][2]int64  // by batch: agreedRow
	}
	mine := rowsRead{Worker: t.worker}
	for _, g := range b.list {
		list := make([]float64, agreed)
		g.identity.put(t.replicaID(r), r.LocalID(), list)
		mine.Read = append(mine.Read, [2]uint32{uint32(list[agreedRead]), uint32(list[agreedRead+1])})
		mine.Row = append(mine.Row, [2]int64{int64(list[agreedRow]), int64(list[agreedRow+1])})
	}
	all, err := fromReplicas(ctx, r, mine) // by replica of the call
	if err != nil {
		return fmt.Errorf("the workers have not read the rows of this step, and comparing them failed: %w", err)
	}
	for i, g := range b.list {
		d := &g.identity
		where := fmt.Sprintf("batch %d of pass %d over the data, of %d examples", g.position.batch+1, g.position.pass+1,
			g.examples)
		var row [2]int64
		if d.predicted == nil {
			continue
		}
		for at, of := range all {
			replica := t.memberID(r, at)
			if of.Read[i] != d.predicted[replica] {
				lo, hi := g.share(replica, g.examples)
				name := fmt.Sprint("worker ", of.Worker)
				if !t.withOthers(r) {
					name = "this worker"
				}
				return fmt.Errorf("%s has not read the examples at the rows %d to %d of %s, which replica %d has to "+
					"train on, but others: examples would be missing or doubled. Its data.RowReader returns other identities "+
					"from ReadRows than from RowID", name, lo, hi-1, where, replica)
			}
			row[0], row[1] = row[0]+of.Row[i][0], row[1]+of.Row[i][1]
		}
		if t.withOthers(r) && row != [2]int64{} {
			return fmt.Errorf("worker %d and worker %d read different contents of the same example, number %d of the source "+
				"(counted from 0), in row %d of %s. All workers must have the same data: use the same files, functions and "+
				"seeds of random changes", all[d.owner].Worker, all[d.second].Worker, d.id, d.row, where)
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
	s.data = data.Fingerprint(ds)
	return data.ReadAhead(ctx, ds, func(ctx context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			weighted := false
			for batch := skip; batch < r.Len(); batch++ {
				b, err := s.read(ctx, r, batch, &weighted)
				if !yield(b, err) || err != nil {
					return
				}
			}
		}
	})
}

// rowSelection selects the rows that a worker reads.
type rowSelection struct {
	t          *Trainer
	labels     bool
	evaluation bool
	shape      *batchShape // of the current batch
	replicas   int         // of all workers
	pass       int
	data       uint64 // fingerprint of the dataset
	rows       []int  // scratch
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
		b, err := s.readShape(ctx, r, batch, expected, weighted)
		if err != nil || !s.t.several() {
			return b, err
		}
		shape := s.t.shapeOf(b.batch, b.size, s.labels, s.evaluation)
		if shape.per == expected.per {
			b.shape = shape
			return b, nil
		}
		expected = shape
	}
	return nil, fmt.Errorf("train: batch %d has rows of different shapes: want batches of one shape each, as "+
		"data.Pipeline.BucketByLength and PaddedBatch make them", batch)
}

// readShape reads this worker's rows of a batch, if it has a shape.
func (s *rowSelection) readShape(ctx context.Context, r data.RowReader, batch int, shape *batchShape, weighted *bool) (
	*readRows, error,
) {
	size := r.Rows(batch)
	s.shape = shape
	b := &readRows{size: size}
	d := &b.identity
	s.predict(d, r, batch, size)
	d.owner = min(d.row/shape.per, s.replicas-1)
	d.second = s.t.secondReader(d.owner)
	if *weighted {
		return b, b.readAll(ctx, r, batch, s)
	}
	s.rows = s.rows[:0]
	for _, replica := range s.t.ids() {
		b.starts = append(b.starts, len(s.rows))
		lo, hi := shape.share(replica, size)
		for row := lo; row < hi; row++ {
			s.rows = append(s.rows, row)
		}
	}
	shares := len(s.rows)
	d.own, d.other = -1, -1
	if s.t.localOf(d.owner) >= 0 {
		d.own = slices.Index(s.rows, d.row)
	}
	if s.t.localOf(d.second) >= 0 {
		d.other = len(s.rows)
		s.rows = append(s.rows, d.row)
	}
	if shares < len(s.t.ids())*shape.per && s.t.ids()[0] > 0 && size > 0 {
		b.padding = len(s.rows)
		s.rows = append(s.rows, 0)
	}
	e, ids, err := r.ReadRows(ctx, batch, s.rows)
	if err != nil {
		return nil, err
	}
	if b.batch, err = checkRows(e, batch, len(s.rows)); err != nil {
		return nil, err
	}
	if b.batch.Weights != nil {
		*weighted = true
		return b, b.readAll(ctx, r, batch, s)
	}
	d.setRead(s, size, func(at, _ int) uint64 { return ids[at] })
	return b, nil
}

// secondReader returns a replica of another worker than that of the replica owner.
func (t *Trainer) secondReader(owner int) int {
	n := len(t.replicasOf)
	return t.replicasOf[(t.workerOf(owner)+max(1, n/2))%n][0]
}

// readAll reads all rows of a batch.
func (p *readRows) readAll(ctx context.Context, r data.RowReader, batch int, s *rowSelection) error {
	e, err := r.At(ctx, batch)
	if err != nil {
		return err
	}
	if p.batch, err = checkRows(e, batch, p.size); err != nil {
		return err
	}
	p.starts, p.padding = nil, 0
	d := &p.identity
	d.own, d.other = d.row, d.row
	if s.t.localOf(d.owner) < 0 {
		d.own = -1
	}
	if s.t.localOf(d.second) < 0 {
		d.other = -1
	}
	d.setRead(s, p.size, func(_, row int) uint64 { return r.RowID(batch, row) })
	return nil
}

// checkRows returns an element of a dataset as a batch, or an error unless it has so many rows.
func checkRows(e data.Element, batch, rows int) (data.Batch, error) {
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
		addHalves(&d.predicted[min(row/s.shape.per, s.replicas-1)], x)
	}
	d.order = max(1, d.order)
	if size > 0 {
		d.row = int(seen(uint64(s.pass)<<32^uint64(batch), -1) % uint64(min(size, math.MaxInt32)))
		d.id = r.RowID(batch, d.row)
	}
}

// setRead sets the identities of the rows of this worker's replicas. id returns that of each, by its position among
// these rows and its row in the global batch.
func (d *rowIdentity) setRead(s *rowSelection, size int, id func(at, row int) uint64) {
	d.read = make([][2]uint32, len(s.t.ids()))
	at := 0
	for local, replica := range s.t.ids() {
		lo, hi := s.shape.share(replica, size)
		for row := lo; row < hi; row++ {
			addHalves(&d.read[local], seen(id(at, row), row))
			at++
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
