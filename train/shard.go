package train

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// Sharding specifies whether the optimizer is sharded: see Config.ShardOptimizer. It implements encoding.TextMarshaler
// and encoding.TextUnmarshaler.
type Sharding uint8

// The values of Config.ShardOptimizer.
const (
	ShardAuto Sharding = iota // the default: shards where the engine expects shorter steps
	ShardOn                   // shards; New returns an error if it cannot
	ShardOff                  // every device updates all parameters
)

var shardingNames = [...]string{"auto", "on", "off"}

// String returns "auto", "on" or "off".
func (s Sharding) String() string {
	if int(s) < len(shardingNames) {
		return shardingNames[s]
	}
	return fmt.Sprintf("Sharding(%d)", uint8(s))
}

// MarshalText implements encoding.TextMarshaler.
func (s Sharding) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Sharding) UnmarshalText(text []byte) error {
	i := slices.Index(shardingNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("%q: want auto, on or off", text)
	}
	*s = Sharding(i)
	return nil
}

// shards describes a sharded optimizer.
type shards struct {
	shares []engine.Share // the owner is the replica that updates it, the first one of its device
	pieces [][]piece      // by variable: its elements, each at the first replica that has them
	whole  []bool         // by variable: all devices have all of it
	leaves []leaf         // of the sums of squares

	// The numbers that replicas exchange after those of every step:
	notFinite int // index in part.scalars: the number of replicas with gradient sums that are not finite
	squares   int // index in part.scalars: by leaf, the sum of squares; -1: there is none
}

// piece is a range of the elements of a variable that a replica has.
type piece struct{ from, to, replica int }

// leaf is a range of the blocks of a parameter's squares, whose sum is part of the tree of all (treeSum).
type leaf struct{ parameter, from, to, owner int }

// leavesOf divides each parameter into ranges of a power of two of blocks, so that each belongs to one share.
func leavesOf(parameters []engine.Variable, shares []engine.Share) (list []leaf, err error) {
	unit := make([]int, len(parameters)) // by parameter: of blocks; 0: it is whole
	for _, s := range shares {
		if s.From%normBlock != 0 {
			return nil, fmt.Errorf("the engine divides %s at element %d: want a multiple of %d", parameters[s.Parameter].Name,
				s.From, normBlock)
		}
		block := s.From / normBlock
		if power := block & -block; block > 0 && (unit[s.Parameter] == 0 || power < unit[s.Parameter]) {
			unit[s.Parameter] = power
		}
	}
	for _, s := range shares {
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

// shardSpec decides whether the optimizer is sharded, and completes the spec then. It returns, by shard, the first
// replica of its device. With several workers, every worker calls it, and an error is one on all of them.
func (t *Trainer) shardSpec(ctx context.Context, spec *engine.Spec) ([]int, error) {
	first, local := t.strategy.LocalReplicas()
	mode := t.config.ShardOptimizer
	if mode == ShardAuto && (t.config.DiLoCo != nil || t.central || !t.strategy.HasCollectives() ||
		t.config.Compress.Method != compress.None) { // impossible, or all new values follow the compressed gradients
		mode = ShardOff
	}
	rows := make([]distribute.Value, local)
	for replica := range rows {
		device := first + t.devices[t.deviceOf[replica]].replicas[0]
		rows[replica] = tensor.From([]int64{int64(mode), int64(device)}, 1, 2)
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return nil, fmt.Errorf("comparing the workers' Config.ShardOptimizer: %w", err)
	}
	var owners []int
	list := tensor.Data[int64](all)
	for replica := range len(list) / 2 {
		if wanted := Sharding(list[2*replica]); wanted != Sharding(list[0]) {
			return nil, fmt.Errorf("Config.ShardOptimizer is %v for replica %d and %v for replica 0: want the same on all "+
				"workers", wanted, replica, Sharding(list[0]))
		}
		if device := int(list[2*replica+1]); device == replica {
			owners = append(owners, replica)
		}
	}
	if mode == ShardOff || len(owners) == 1 {
		return nil, nil // a single device has everything
	}
	switch {
	case t.config.DiLoCo != nil:
		return nil, errors.New("Config.ShardOptimizer is on, and with Config.DiLoCo the workers have different states of " +
			"the optimizer: want off, or no DiLoCo")
	case t.central:
		return nil, fmt.Errorf("Config.ShardOptimizer is on, and %v has one copy of the variables, which one device "+
			"updates: want off, or another strategy", t.strategy)
	case !t.strategy.HasCollectives():
		return nil, fmt.Errorf("Config.ShardOptimizer is on, and %v only reduces: want off, or a strategy without "+
			"CrossDeviceOps", t.strategy.CrossDeviceOps())
	}
	spec.Shards, spec.ShardIfFaster = len(owners), mode == ShardAuto
	for _, d := range t.devices {
		spec.DeviceShards = append(spec.DeviceShards, slices.Index(owners, first+d.replicas[0]))
	}
	return owners, nil
}

// shard records which replica has what, once the program is compiled for these owners of the shards.
func (t *Trainer) shard(ctx context.Context, owners []int) error {
	if owners == nil {
		return nil
	}
	if t.config.ShardOptimizer == ShardAuto {
		chosen := slices.ContainsFunc(t.program.Shares(), func(s engine.Share) bool { return s.Owner > 0 })
		if err := t.sameChoice(ctx, chosen); err != nil || !chosen {
			return err
		}
	}
	parameters := t.program.Parameters()
	s := &shards{shares: slices.Clone(t.program.Shares()), squares: -1}
	updates := map[int]bool{}
	for i := range s.shares {
		owner := owners[s.shares[i].Owner]
		s.shares[i].Owner, updates[owner] = owner, true
	}
	rows := make([]distribute.Value, len(t.deviceOf))
	for replica, device := range t.deviceOf {
		var has []int64
		for i := range t.variables {
			from, to := t.program.Kept(device, i)
			has = append(has, int64(from), int64(to))
		}
		rows[replica] = tensor.Of(has, 1, len(has))
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return fmt.Errorf("comparing the workers' shards: %w", err)
	}
	has := tensor.Data[int64](all)
	for i, v := range t.variables {
		elements := v.Bytes() / v.DType.Bytes()
		var pieces []piece
		whole := true
		for replica := range t.strategy.NumReplicasInSync() {
			at := 2 * (replica*len(t.variables) + i)
			p := piece{int(has[at]), int(has[at+1]), replica}
			if whole = whole && p.to-p.from == elements; p.from == p.to && elements > 0 {
				continue
			}
			if v.Role == engine.Slot && slices.Contains(owners, replica) && !updates[replica] {
				return fmt.Errorf("Config.ShardOptimizer is on for %d devices, and the model has %s: replica %d would update "+
					"none, though the model reads %s, which updates change; want off", len(owners),
					plural(len(parameters), "parameter"), replica, v.Name)
			}
			if !slices.ContainsFunc(pieces, func(q piece) bool { return q.from == p.from && q.to == p.to }) {
				pieces = append(pieces, p)
			}
		}
		slices.SortFunc(pieces, func(a, b piece) int { return a.from - b.from })
		at := 0
		for _, p := range pieces {
			if p.from != at {
				at = -1
				break
			}
			at = p.to
		}
		if at != elements || len(pieces) == 0 {
			return fmt.Errorf("the engine %s does not keep each element of the %v %s on one device: %v",
				t.strategy.Engine().Name(), v.Role, v.Name, pieces)
		}
		s.pieces, s.whole = append(s.pieces, pieces), append(s.whole, whole)
	}
	s.notFinite = t.summedScalars()
	if t.config.needsSquares() {
		s.squares = s.notFinite + 1
		if s.leaves, err = leavesOf(parameters, s.shares); err != nil {
			return err
		}
	}
	t.shards = s
	return nil
}

// sameChoice returns an error if the workers' engines have chosen differently whether the optimizer is sharded: engines
// of two kinds may. All workers get the same result.
func (t *Trainer) sameChoice(ctx context.Context, sharded bool) error {
	if !t.others() {
		return nil
	}
	rows := make([]distribute.Value, len(t.deviceOf))
	for i := range rows {
		if rows[i] = tensor.New(tensor.Bool, 0, 1); i == 0 {
			rows[i] = tensor.From([]bool{sharded}, 1, 1)
		}
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return fmt.Errorf("comparing whether the workers' engines shard the optimizer: %w", err)
	}
	var chosen [2][]int // by worker
	for w, yes := range tensor.Data[bool](all) {
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
		"worker the engine is %s: use the same on all workers, or set Config.ShardOptimizer to ShardOn or ShardOff",
		ranges.Text("worker", chosen[1]), ranges.Text("worker", chosen[0]), t.strategy.Engine().Name())
}

// scalars returns the number of further scalars of a step.
func (s *shards) scalars() int {
	if s == nil {
		return 0
	}
	return 1 + len(s.leaves)
}

// isWhole reports whether a share is all of its parameter.
func (t *Trainer) isWhole(s engine.Share) bool {
	v := t.variables[s.Parameter]
	return s.To-s.From == v.Bytes()/v.DType.Bytes()
}

// divided reports whether some devices do not have all of a variable.
func (t *Trainer) divided(variable int) bool { return t.shards != nil && !t.shards.whole[variable] }

// owned reports whether a local replica's device has all of a variable.
func (t *Trainer) owned(replica, variable int) bool {
	if !t.divided(variable) {
		return true
	}
	from, to := t.program.Kept(t.deviceOf[replica], variable)
	v := t.variables[variable]
	return to-from == v.Bytes()/v.DType.Bytes()
}

// piecesOf returns the pieces of a mirrored variable.
func (t *Trainer) piecesOf(variable int) []piece {
	if t.shards == nil {
		v := t.variables[variable]
		return []piece{{0, v.Bytes() / v.DType.Bytes(), 0}}
	}
	return t.shards.pieces[variable]
}

// keeper returns the first replica that has all of a variable, and its local number, or -1 if it is another worker's or
// if no replica has all.
func (t *Trainer) keeper(variable int) (replica, local int) {
	list := t.piecesOf(variable)
	if len(list) > 1 {
		return list[0].replica, -1
	}
	return list[0].replica, t.localOf(list[0].replica)
}

// localOf returns the local number of a replica, or -1 if it is another worker's.
func (t *Trainer) localOf(replica int) int {
	first, n := t.strategy.LocalReplicas()
	if replica < first || replica >= first+n {
		return -1
	}
	return replica - first
}

// readPiece returns the elements of a piece of a variable, of a local replica.
func (t *Trainer) readPiece(variable int, p piece) (*tensor.Tensor, error) {
	value, err := t.program.Read(t.localOf(p.replica), variable)
	if err != nil {
		return nil, err
	}
	return value.Reshape(value.Len()), nil
}

// Sharded reports whether the optimizer is sharded.
func (t *Trainer) Sharded() bool { return t.shards != nil }

// OptimizerBytes returns the size of the optimizer's slots that this worker's devices keep.
func (t *Trainer) OptimizerBytes() (bytes int) {
	for device := range t.devices {
		for i, v := range t.variables {
			if v.Role == engine.Slot {
				from, to := t.program.Kept(device, i)
				bytes += (to - from) * v.DType.Bytes()
			}
		}
	}
	return bytes
}

// toOwners reports whether a step that updates reduces each gradient to its owner only. Compressed gradients are
// decoded on all replicas.
func (t *Trainer) toOwners() bool {
	return t.shards != nil && t.config.Compress.Method == compress.None
}

// shareOf returns the elements of a share in the memory of its whole parameter. It keeps before if that is the same
// memory.
func (t *Trainer) shareOf(s engine.Share, whole, before *tensor.Tensor) *tensor.Tensor {
	if t.isWhole(s) {
		return whole
	}
	from := s.From * whole.DType().Bytes()
	if before != nil && before.Memory() == whole.Memory().Slice(from, s.To*whole.DType().Bytes()) {
		return before
	}
	return whole.Reshape(whole.Len()).Rows(s.From, s.To)
}

// startToOwners starts to reduce a bucket to the owners of its parameters.
func (t *Trainer) startToOwners(p *part, k int) error {
	b := &t.buckets[k]
	h, err := p.replica.StartReduceToOwners(p.ctx, distribute.Sum,
		distribute.Bucket{Dst: p.sums[k], Src: p.pieces[k], Names: b.pieceNames, Owners: b.owners})
	if err == nil {
		p.reducing[k].started = append(p.reducing[k].started[:0], h)
	}
	return err
}

// startGathers starts to copy the new values of the buckets from upto on that have been updated on the replica's
// device, to all devices, in the order of the buckets. It returns the first bucket that was not.
func (t *Trainer) startGathers(ctx context.Context, r *distribute.Replica, from, upto int) (int, error) {
	local := r.LocalID()
	p, d := &t.parts[local], t.devices[t.deviceOf[local]]
	for k := from; k < upto; k++ {
		if d.replicas[0] == local && slices.ContainsFunc(d.partsOf[k], func(part int) bool { return d.left[part] > 0 }) {
			return k, nil
		}
		b := &t.buckets[k]
		for i, s := range b.shares {
			if d.replicas[0] != local { // its memory receives what its device gets by the first replica
				p.values[k][i] = p.pieces[k][i]
				continue
			}
			value, err := t.program.Updated(t.deviceOf[local], s.Parameter)
			if err != nil {
				return k, fmt.Errorf("the new value of %s: %w", b.pieceNames[i], err)
			}
			p.values[k][i] = t.shareOf(s, value, p.values[k][i])
		}
		h, err := r.StartGatherFromOwners(ctx, distribute.Bucket{
			Dst: p.values[k], Src: p.values[k], Names: b.pieceNames, Owners: b.owners,
		})
		if err != nil {
			return k, err
		}
		p.gathering = append(p.gathering, h)
	}
	return upto, nil
}

// finishGathers waits for the new values.
func (p *part) finishGathers(ctx context.Context) error {
	for _, h := range p.gathering {
		if err := h.Wait(ctx); err != nil {
			return err
		}
	}
	p.gathering = p.gathering[:0]
	return nil
}

// exchange adds loss, metrics and the values that workers compare over all replicas, with what only owners know:
// whether their sums of gradients are finite, and the sums' squares.
func (t *Trainer) exchange(ctx context.Context, r *distribute.Replica) error {
	s, p := t.shards, &t.parts[r.LocalID()]
	if p.notFinite >= 0 {
		p.scalars[s.notFinite] = 1
	}
	for i, l := range s.leaves {
		if l.owner == r.ID() {
			p.scalars[s.squares+i] = treeSum(t.squares[l.parameter][l.from:l.to])
		}
	}
	h, err := r.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Scalars: p.scalars})
	if err == nil {
		err = h.Wait(ctx)
	}
	if err != nil || s.squares < 0 || r.LocalID() > 0 {
		return err
	}
	for i, l := range s.leaves {
		blocks := t.squares[l.parameter][l.from:l.to]
		clear(blocks)
		blocks[0] = p.scalars[s.squares+i] // the sum of the blocks; adding 0 changes no bit
	}
	return nil
}

// fromKeeper returns the value of a mirrored variable of the first replicas that have it, on every worker.
func (t *Trainer) fromKeeper(ctx context.Context, variable int) (*tensor.Tensor, error) {
	v := t.variables[variable]
	value := tensor.New(v.DType, v.Shape...)
	to := value.Memory().HostBytes()
	for _, p := range t.piecesOf(variable) {
		bits := to[:(p.to-p.from)*v.DType.Bytes()]
		to = to[len(bits):]
		local := t.localOf(p.replica) >= 0
		if local {
			mine, err := t.readPiece(variable, p)
			if err != nil {
				return nil, err
			}
			copy(bits, mine.Memory().HostBytes())
		}
		if t.others() {
			got, err := t.fromWorker(ctx, local, bits)
			if err != nil {
				return nil, err
			}
			copy(bits, got)
		}
	}
	return value, nil
}

// keptAtChief returns, on the chief, the value of a mirrored variable of the first replicas that have it. Other
// workers, of which some send it, get nil.
func (t *Trainer) keptAtChief(ctx context.Context, variable int) (*tensor.Tensor, error) {
	if !t.others() {
		return t.fromKeeper(ctx, variable)
	}
	v := t.variables[variable]
	counts := make([]int, t.strategy.NumReplicasInSync())
	values := slices.Repeat([]*tensor.Tensor{tensor.New(v.DType, 0)}, len(t.parts))
	pieces := slices.Clone(t.piecesOf(variable))
	for _, p := range pieces {
		counts[p.replica] = p.to - p.from
		if local := t.localOf(p.replica); local >= 0 {
			var err error
			if values[local], err = t.readPiece(variable, p); err != nil {
				return nil, err
			}
		}
	}
	chief := t.strategy.Properties().ShouldCheckpoint
	var all *tensor.Tensor
	if chief {
		all = tensor.New(v.DType, v.Shape...)
	}
	if err := t.sendToChief(ctx, v.Name, all, values, counts); err != nil || !chief || len(pieces) == 1 {
		return all, err
	}
	slices.SortFunc(pieces, func(a, b piece) int { return a.replica - b.replica }) // the order in which they lie
	value := tensor.New(v.DType, v.Shape...)
	from := all.Memory().HostBytes()
	for _, p := range pieces {
		n := (p.to - p.from) * v.DType.Bytes()
		copy(value.Memory().HostBytes()[p.from*v.DType.Bytes():], from[:n])
		from = from[n:]
	}
	return value, nil
}

// notHere explains why a slot cannot be read.
func (t *Trainer) notHere(variable int) error {
	list := t.piecesOf(variable)
	if len(list) > 1 {
		return fmt.Errorf("Config.ShardOptimizer: %w (%d replicas have parts of it): call Trainer.Snapshot on all workers, "+
			"or set ShardOff", engine.ErrNotOwned, len(list))
	}
	return fmt.Errorf("Config.ShardOptimizer: %w (that of replica %d): read it on its worker, or call Trainer.Snapshot "+
		"on all workers, or set ShardOff", engine.ErrNotOwned, list[0].replica)
}

// checkSharding returns an error if the value is invalid.
func (c *Config) checkSharding() error {
	if c.ShardOptimizer > ShardOff {
		return errors.New("train: Config.ShardOptimizer is " + c.ShardOptimizer.String() +
			": want ShardAuto, ShardOn or ShardOff")
	}
	return nil
}
