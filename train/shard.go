package train

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// sharded is the exchange of a sharded optimizer: the gradients of each piece of a parameter are summed on the replica
// that updates it, which then sends the new values to all. Compressed gradients are decoded, and so summed, on all
// replicas; only the new values are sent then.
type sharded struct {
	*allReduce
	pieces []engine.Piece // the owner is the replica that updates it: the first of the device with the piece's shard
	leaves []leaf         // of the sums of squares

	// The numbers that replicas exchange after those of every step:
	notFinite int // index in localReplica.scalars: the number of replicas with gradient sums that are not finite
	squares   int // index in localReplica.scalars: by leaf, the sum of squares; -1: there is none

	buckets  []shardedBucket
	replicas []shardedReplica // local ones
}

// shardedBucket has the pieces of a bucket's parameters.
type shardedBucket struct {
	pieces     []engine.Piece
	parameters []int    // of the pieces
	inBucket   []int    // the place of each piece's parameter among those of the bucket
	names      []string // of the pieces
	owners     []int    // the replica that updates each piece
}

// shardedReplica is what a local replica keeps from step to step. By bucket and piece, it has the gradients, those that
// the replica owns (others are nil), and the memory for the new values.
type shardedReplica struct {
	gradients, sums, values [][]*tensor.Tensor
}

// leaf is a range of the blocks of a parameter's squares, whose sum is part of the tree of all (treeSum).
type leaf struct{ parameter, from, to, owner int }

// leavesOf divides each parameter into ranges of a power of two of blocks, so that each belongs to one piece.
func leavesOf(parameters []engine.Variable, pieces []engine.Piece) (list []leaf, err error) {
	unit := make([]int, len(parameters)) // by parameter: of blocks; 0: it is whole
	for _, s := range pieces {
		if s.From%normBlock != 0 {
			return nil, fmt.Errorf("the engine divides %s at element %d: want a multiple of %d", parameters[s.Parameter].Name,
				s.From, normBlock)
		}
		block := s.From / normBlock
		if power := block & -block; block > 0 && (unit[s.Parameter] == 0 || power < unit[s.Parameter]) {
			unit[s.Parameter] = power
		}
	}
	for _, s := range pieces {
		end := normBlocks(s.To)
		n := unit[s.Parameter]
		if n == 0 {
			n = max(end, 1)
		}
		for from := s.From / normBlock; from < end; from += n {
			list = append(list, leaf{s.Parameter, from, min(from+n, end), s.Owner})
		}
	}
	return list, nil
}

// chooses reports whether the engine chooses whether the optimizer is sharded.
func (t *Trainer) chooses() bool { return t.config.Exchange == engineChoice{} }

// shardSpec reports whether the optimizer is sharded, and completes the spec then: each replica has a shard of its id.
// With several workers, every worker calls it, and an error is one on all of them.
func (t *Trainer) shardSpec(ctx context.Context, spec *engine.Spec) (bool, error) {
	_, sharded := t.config.Exchange.(Sharded)
	possible := !t.central && t.strategy.HasCollectives()
	kind := "without shards" // AllReduce and DiLoCo are compared later, with all of their configuration
	if t.chooses() && possible || sharded {
		kind = t.config.Exchange.String()
	}
	all, err := fromWorkers(ctx, t, kind)
	if err != nil {
		return false, fmt.Errorf("comparing the workers' Config.Exchange: %w", err)
	}
	for w, its := range all {
		if its != all[0] {
			return false, fmt.Errorf("Config.Exchange is %s on worker %d and %s on worker 0: want the same on all workers",
				its, w, all[0])
		}
	}
	if spec.Replicas == 1 || !sharded && !(t.chooses() && possible) {
		return false, nil
	}
	switch {
	case t.central:
		return false, fmt.Errorf("Config.Exchange is Sharded, and %v has one copy of the variables, which one device "+
			"updates: use AllReduce, or another strategy", t.strategy)
	case !possible:
		return false, fmt.Errorf("Config.Exchange is Sharded, and %v only reduces: use AllReduce, or a strategy without "+
			"CrossDeviceOps", t.strategy.CrossDeviceOps())
	}
	spec.Shards, spec.ShardIfFaster, spec.ReplicaShards = spec.Replicas, t.chooses(), t.ids()
	return true, nil
}

// shardsChosen reports whether an optimizer that can be sharded is: the engine may have chosen not to.
func (t *Trainer) shardsChosen(ctx context.Context, sharded bool) (bool, error) {
	if !sharded || !t.chooses() {
		return sharded, nil
	}
	chosen := slices.ContainsFunc(t.program.Pieces(), func(p engine.Piece) bool { return p.Owner > 0 })
	return chosen, t.sameChoice(ctx, chosen)
}

// newSharded makes the exchange of a sharded optimizer.
func (t *Trainer) newSharded(ctx context.Context, all *allReduce) (_ *sharded, err error) {
	s := &sharded{allReduce: all, pieces: slices.Clone(t.program.Pieces()), squares: -1}
	first := make([]int, len(t.local)) // of each local replica's device
	for local, device := range t.deviceOf {
		first[local] = t.ids()[t.devices[device].replicas[0]]
	}
	byWorker, err := fromWorkers(ctx, t, first)
	if err != nil {
		return nil, fmt.Errorf("exchanging which replicas share devices: %w", err)
	}
	firstOf := byReplica(t, byWorker)
	for i := range s.pieces {
		s.pieces[i].Owner = firstOf[s.pieces[i].Owner]
	}
	s.notFinite = t.summedScalars()
	if t.config.needsSquares() {
		s.squares = s.notFinite + 1
		if s.leaves, err = leavesOf(t.Parameters(), s.pieces); err != nil {
			return nil, err
		}
	}
	for i := range t.local {
		t.local[i].scalars = make([]float64, s.notFinite+1+len(s.leaves))
	}
	s.plan()
	return s, nil
}

// divideSlots changes the entries of the variables that some replicas' shards do not have: slots. An entry belongs to
// the first of the replicas that have its elements. It checks that each element of every variable is on a device. The
// entries stay as they are if replicas are placed anew.
func (t *Trainer) divideSlots(ctx context.Context) error {
	mine := make([][][2]int, len(t.deviceOf)) // by local replica and variable: the elements from and up to which it has
	for local := range mine {
		for i := range t.variables {
			from, to := t.program.Kept(local, i)
			mine[local] = append(mine[local], [2]int{from, to})
		}
	}
	all, err := fromWorkers(ctx, t, mine)
	if err != nil {
		return fmt.Errorf("comparing the workers' shards: %w", err)
	}
	kept := byReplica(t, all) // then by variable
	for i, v := range t.variables {
		n := elements(v.Shape)
		var entries []entry
		mirrored := true
		t.table[i].shared = false
		for replica, ranges := range kept {
			e := entry{ranges[i][0], ranges[i][1], replica}
			if mirrored = mirrored && e.to-e.from == n; e.from == e.to && n > 0 {
				continue
			}
			updates := func(p engine.Piece) bool { return p.Owner == replica }
			if v.Role == engine.Slot && !slices.ContainsFunc(t.program.Pieces(), updates) {
				return fmt.Errorf("Config.Exchange is Sharded for %d replicas, and the model has %s: replica %d would update "+
					"none, though the model reads %s, which updates change; use AllReduce", len(kept),
					plural(len(t.Parameters()), "parameter"), replica, v.Name)
			}
			if slices.ContainsFunc(entries, func(q entry) bool { return q.from == e.from && q.to == e.to }) {
				t.table[i].shared = true
				continue
			}
			entries = append(entries, e)
		}
		slices.SortFunc(entries, func(a, b entry) int { return a.from - b.from })
		next := 0
		for _, e := range entries {
			if e.from != next {
				break
			}
			next = e.to
		}
		if last := len(entries) - 1; last < 0 || next != n || entries[last].to != n {
			return fmt.Errorf("the engine %s does not keep each element of the %v %s on one device: %v",
				t.strategy.Engine().Name(), v.Role, v.Name, entries)
		}
		if !mirrored {
			t.table[i].entries, t.table[i].mirrored = entries, false
		}
	}
	return nil
}

// sameChoice returns an error if the workers' engines have chosen differently whether the optimizer is sharded: engines
// of two kinds may. All workers get the same result.
func (t *Trainer) sameChoice(ctx context.Context, sharded bool) error {
	all, err := fromWorkers(ctx, t, sharded)
	if err != nil {
		return fmt.Errorf("comparing whether the workers' engines shard the optimizer: %w", err)
	}
	var chosen [2][]int // by worker
	for w, yes := range all {
		i := 0
		if yes {
			i = 1
		}
		chosen[i] = append(chosen[i], w)
	}
	if len(chosen[0]) == 0 || len(chosen[1]) == 0 {
		return nil
	}
	return fmt.Errorf("the engines choose differently whether the optimizer is sharded: yes on %s, no on %s; on this "+
		"worker the engine is %s: use the same on all workers, or set Config.Exchange to Sharded or AllReduce",
		ranges.Text("worker", chosen[1]), ranges.Text("worker", chosen[0]), t.strategy.Engine().Name())
}

// isWhole reports whether a piece is all of its parameter.
func (t *Trainer) isWhole(p engine.Piece) bool {
	v := t.variables[p.Parameter]
	return p.To-p.From == v.Bytes()/v.DType.Bytes()
}

// hasAll reports whether a local replica's shard has all of a variable.
func (t *Trainer) hasAll(local, variable int) bool {
	from, to := t.program.Kept(local, variable)
	return !t.table[variable].divided() || to-from == elements(t.variables[variable].Shape)
}

// Sharded reports whether the optimizer is sharded.
func (t *Trainer) Sharded() bool { return t.shards }

// OptimizerBytes returns the size of the optimizer's slots that this worker's devices keep.
func (t *Trainer) OptimizerBytes() (bytes int) {
	for local := range t.local {
		for i, v := range t.variables {
			if v.Role == engine.Slot && (t.local[local].first || t.table[i].divided()) {
				from, to := t.program.Kept(local, i)
				bytes += (to - from) * v.DType.Bytes()
			}
		}
	}
	return bytes
}

// toOwners reports whether a step that updates sums each gradient on its owner only.
func (s *sharded) toOwners() bool { return s.t.config.Exchange.codec().Method == compress.None }

// plan prepares the buckets.
func (s *sharded) plan() {
	t := s.t
	s.buckets, s.replicas = make([]shardedBucket, len(t.buckets)), make([]shardedReplica, len(t.deviceOf))
	for k := range t.buckets {
		b := &s.buckets[k]
		for _, piece := range s.pieces {
			at, found := slices.BinarySearch(t.buckets[k].parameters, piece.Parameter)
			if !found {
				continue
			}
			name := t.buckets[k].names[at]
			if !t.isWhole(piece) {
				name = pieceName(name, piece.From, piece.To)
			}
			b.pieces, b.parameters = append(b.pieces, piece), append(b.parameters, piece.Parameter)
			b.inBucket, b.names, b.owners = append(b.inBucket, at), append(b.names, name), append(b.owners, piece.Owner)
		}
		for i := range s.replicas {
			r, n := &s.replicas[i], len(b.pieces)
			r.gradients = append(r.gradients, make([]*tensor.Tensor, n))
			r.sums, r.values = append(r.sums, make([]*tensor.Tensor, n)), append(r.values, make([]*tensor.Tensor, n))
		}
	}
}

// memory sets the lists of a bucket's gradients.
func (s *sharded) memory(p *localReplica, k int) {
	b, r := &s.buckets[k], &s.replicas[p.local]
	for i, piece := range b.pieces {
		r.gradients[k][i] = s.t.pieceOf(piece, p.gradients[k][b.inBucket[i]], r.gradients[k][i])
		if piece.Owner == s.t.ids()[p.local] {
			r.sums[k][i] = r.gradients[k][i]
		}
	}
}

// pieceOf returns the elements of a piece in the memory of its whole parameter. It keeps before if that is the same
// memory.
func (t *Trainer) pieceOf(p engine.Piece, whole, before *tensor.Tensor) *tensor.Tensor {
	if t.isWhole(p) {
		return whole
	}
	from := p.From * whole.DType().Bytes()
	if before != nil && before.Memory() == whole.Memory().Slice(from, p.To*whole.DType().Bytes()) {
		return before
	}
	return whole.Reshape(whole.Len()).Rows(p.From, p.To)
}

// start implements exchange. The scalars follow the gradients in another call if these go to their owners.
func (s *sharded) start(p *localReplica, k int, scalars []float64) error {
	if !p.updates || !s.toOwners() {
		return s.allReduce.start(p, k, scalars)
	}
	s.memory(p, k)
	b, r := &s.buckets[k], &s.replicas[p.local]
	h, err := p.replica.StartReduceToOwners(p.ctx, distribute.Sum,
		distribute.Bucket{Dst: r.sums[k], Src: r.gradients[k], Names: b.names, Owners: b.owners})
	if err == nil {
		started := &s.reductions[p.local][k].started
		*started = append((*started)[:0], h)
	}
	return err
}

func (s *sharded) finish(ctx context.Context, p *localReplica, each func(k int) error) error {
	if err := s.allReduce.finish(ctx, p, each); err != nil || !p.updates || !s.toOwners() {
		return err
	}
	return s.sumScalars(ctx, p)
}

func (s *sharded) checkSums(p *localReplica, k int) {
	if !p.updates || !s.toOwners() {
		s.allReduce.checkSums(p, k)
		return
	}
	for i, sum := range s.replicas[p.local].sums[k] {
		if piece := &s.buckets[k].pieces[i]; sum != nil { // else another replica owns it
			s.t.checkSum(p, sum, piece.Parameter, piece.From/normBlock, 0, 1)
		}
	}
}

func (s *sharded) apply(ctx context.Context, p *localReplica, k int) error {
	s.memory(p, k)
	if p.first {
		if err := s.t.update(ctx, p, k, s.replicas[p.local].sums[k], s.buckets[k].parameters); err != nil {
			return err
		}
	}
	return s.send(ctx, p, k)
}

// send starts to copy the new values of the buckets up to bucket upto that have been updated on the replica's device to
// all devices.
func (s *sharded) send(ctx context.Context, p *localReplica, upto int) error {
	device := s.t.deviceOf[p.local]
	d, r := s.t.devices[device], &s.replicas[p.local]
	for k := p.sent; k <= upto; k++ {
		if p.first && slices.ContainsFunc(d.updates[k], func(update int) bool { return d.left[update] > 0 }) {
			return nil
		}
		for i, piece := range s.buckets[k].pieces {
			if !p.first { // its memory receives what its device gets by the first replica
				r.values[k][i] = r.gradients[k][i]
				continue
			}
			value, err := s.t.program.Updated(device, piece.Parameter)
			if err != nil {
				return fmt.Errorf("the new value of %s: %w", s.buckets[k].names[i], err)
			}
			r.values[k][i] = s.t.pieceOf(piece, value, r.values[k][i])
		}
		if err := s.sendValues(ctx, p, k, r.values[k]); err != nil {
			return err
		}
	}
	return nil
}

// sendValues starts to copy the owners' values of a bucket to all devices.
func (s *sharded) sendValues(ctx context.Context, p *localReplica, k int, values []*tensor.Tensor) error {
	b := &s.buckets[k]
	h, err := p.replica.StartGatherFromOwners(ctx,
		distribute.Bucket{Dst: values, Src: values, Names: b.names, Owners: b.owners})
	if err == nil {
		p.sending, p.sent = append(p.sending, h), k+1
	}
	return err
}

// transfer sends the gradients of a bucket in place of new values: to measure it.
func (s *sharded) transfer(ctx context.Context, p *localReplica, k int) error {
	s.memory(p, k)
	return s.sendValues(ctx, p, k, s.replicas[p.local].gradients[k])
}

// sumScalars adds loss, metrics and the values that workers compare over all replicas, with what only owners know:
// whether their sums of gradients are finite, and the sums' squares.
func (s *sharded) sumScalars(ctx context.Context, p *localReplica) error {
	if p.notFinite >= 0 {
		p.scalars[s.notFinite] = 1
	}
	for i, l := range s.leaves {
		if l.owner == p.replica.ID() {
			p.scalars[s.squares+i] = treeSum(s.t.squares[l.parameter][l.from:l.to])
		}
	}
	h, err := p.replica.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Scalars: p.scalars})
	if err == nil {
		err = h.Wait(ctx)
	}
	if err != nil || s.squares < 0 || p.local > 0 {
		return err
	}
	for i, l := range s.leaves {
		blocks := s.t.squares[l.parameter][l.from:l.to]
		clear(blocks)
		blocks[0] = p.scalars[s.squares+i] // the sum of the blocks; adding 0 changes no bit
	}
	return nil
}

// notOwnedError returns the error that explains why a slot cannot be read.
func (t *Trainer) notOwnedError(variable int) error {
	list := t.table[variable].entries
	if len(list) > 1 {
		return fmt.Errorf("Sharded: %w (%d replicas have parts of it): call Trainer.Snapshot on all workers, "+
			"or use AllReduce", engine.ErrNotOwned, len(list))
	}
	return fmt.Errorf("Sharded: %w (that of replica %d): read it on its worker, or call Trainer.Snapshot "+
		"on all workers, or use AllReduce", engine.ErrNotOwned, list[0].owner)
}
