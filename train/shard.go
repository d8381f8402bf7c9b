package train

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// Sharding says whether the optimizer is sharded: see Config.ShardOptimizer. It implements encoding.TextMarshaler and
// encoding.TextUnmarshaler.
type Sharding uint8

// The values of Config.ShardOptimizer.
const (
	ShardAuto Sharding = iota // the default: does not shard
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
	owners  []int  // by parameter: the replica that updates it, the first one of its device
	keepers []int  // by variable: the first replica that has its value
	divided []bool // by variable: some devices do not have it

	// The numbers that replicas exchange after those of every step:
	notFinite int // index in part.scalars: the number of replicas with gradient sums that are not finite
	writing   int // index in part.scalars: the number of replicas whose worker is writing its part of a snapshot
	squares   int // index in part.scalars: by parameter, the sum of squares; -1: there is none
}

// shardSpec decides whether the optimizer is sharded, and completes the spec then. It returns, by shard, the first
// replica of its device. With several workers, every worker calls it, and an error is one on all of them.
func (t *Trainer) shardSpec(ctx context.Context, spec *engine.Spec) ([]int, error) {
	first, local := t.strategy.LocalReplicas()
	rows := make([]distribute.Value, local)
	for replica := range rows {
		device := first + t.devices[t.deviceOf[replica]].replicas[0]
		rows[replica] = tensor.From([]int64{int64(t.config.ShardOptimizer), int64(device)}, 1, 2)
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
	if t.config.ShardOptimizer != ShardOn || len(owners) == 1 {
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
	spec.Shards = len(owners)
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
	parameters := t.program.Parameters()
	s := &shards{owners: engine.Owners(parameters, len(owners)), squares: -1}
	for i, shard := range s.owners {
		s.owners[i] = owners[shard]
	}
	rows := make([]distribute.Value, len(t.deviceOf))
	for replica, device := range t.deviceOf {
		has := make([]uint8, len(t.variables))
		for i := range has {
			if t.program.Owned(device, i) {
				has[i] = 1
			}
		}
		rows[replica] = tensor.Of(has, 1, len(has))
	}
	all, err := t.gather(ctx, rows)
	if err != nil {
		return fmt.Errorf("comparing the workers' shards: %w", err)
	}
	has := tensor.Data[uint8](all)
	for i, v := range t.variables {
		keeper, keepers := -1, 0
		for replica := range t.strategy.NumReplicasInSync() {
			if has[replica*len(t.variables)+i] == 0 {
				continue
			}
			if keepers++; keeper < 0 {
				keeper = replica
			}
			empty := slices.Contains(owners, replica) && !slices.Contains(s.owners, replica)
			if v.Role == engine.Slot && empty {
				return fmt.Errorf("Config.ShardOptimizer is on for %d devices, and the model has %s: replica %d would update "+
					"none, though the model reads %s, which updates change; want off", len(owners),
					plural(len(parameters), "parameter"), replica, v.Name)
			}
		}
		if keeper < 0 {
			return fmt.Errorf("the engine %s keeps the %v %s on no device", t.strategy.Engine().Name(), v.Role, v.Name)
		}
		s.keepers = append(s.keepers, keeper)
		s.divided = append(s.divided, keepers < t.strategy.NumReplicasInSync())
	}
	s.notFinite, s.writing = t.summedScalars(), t.summedScalars()+1
	if t.config.needsSquares() {
		s.squares = s.writing + 1
	}
	t.shards = s
	return nil
}

// scalars returns the number of further scalars of a step.
func (s *shards) scalars() int {
	switch {
	case s == nil:
		return 0
	case s.squares < 0:
		return 2
	}
	return 2 + len(s.owners)
}

// divided reports whether some devices do not have a variable.
func (t *Trainer) divided(variable int) bool { return t.shards != nil && t.shards.divided[variable] }

// owned reports whether a local replica's device has a variable.
func (t *Trainer) owned(replica, variable int) bool {
	return !t.divided(variable) || t.program.Owned(t.deviceOf[replica], variable)
}

// keeper returns the first replica that has a variable, and its local number, or -1 if it is another worker's.
func (t *Trainer) keeper(variable int) (replica, local int) {
	if t.shards == nil {
		replica = 0
	} else {
		replica = t.shards.keepers[variable]
	}
	first, n := t.strategy.LocalReplicas()
	if replica < first || replica >= first+n {
		return replica, -1
	}
	return replica, replica - first
}

// Sharded reports whether the optimizer is sharded.
func (t *Trainer) Sharded() bool { return t.shards != nil }

// OptimizerBytes returns the size of the optimizer's slots that this worker's devices keep.
func (t *Trainer) OptimizerBytes() (bytes int) {
	for device := range t.devices {
		for i, v := range t.variables {
			if v.Role == engine.Slot && t.program.Owned(device, i) {
				bytes += v.Bytes()
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

// startToOwners starts to reduce a bucket to the owners of its parameters.
func (t *Trainer) startToOwners(p *part, k int) error {
	b := &t.buckets[k]
	h, err := p.replica.StartReduceToOwners(p.ctx, distribute.Sum,
		distribute.Bucket{Dst: p.sums[k], Src: p.gradients[k], Names: b.names, Owners: b.owners})
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
		for i, parameter := range b.parameters {
			if d.replicas[0] != local { // its memory receives what its device gets by the first replica
				p.values[k][i] = p.gradients[k][i]
				continue
			}
			value, err := t.program.Updated(t.deviceOf[local], parameter)
			if err != nil {
				return k, fmt.Errorf("the new value of %s: %w", b.names[i], err)
			}
			p.values[k][i] = value
		}
		h, err := r.StartGatherFromOwners(ctx, distribute.Bucket{
			Dst: p.values[k], Src: p.values[k], Names: b.names, Owners: b.owners,
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
	if t.writing() {
		p.scalars[s.writing] = 1
	}
	if s.squares >= 0 {
		for parameter, owner := range s.owners {
			if owner == r.ID() {
				p.scalars[s.squares+parameter] = treeSum(t.squares[parameter])
			}
		}
	}
	h, err := r.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Scalars: p.scalars})
	if err == nil {
		err = h.Wait(ctx)
	}
	if err != nil || s.squares < 0 || r.LocalID() > 0 {
		return err
	}
	for parameter, blocks := range t.squares {
		if len(blocks) > 0 {
			clear(blocks)
			blocks[0] = p.scalars[s.squares+parameter] // the sum of the blocks; adding 0 changes no bit
		}
	}
	return nil
}

// fromKeeper returns the value of a mirrored variable of the first replica that has it, on every worker.
func (t *Trainer) fromKeeper(ctx context.Context, variable int) (*tensor.Tensor, error) {
	v := t.variables[variable]
	value := tensor.New(v.DType, v.Shape...)
	_, local := t.keeper(variable)
	if local >= 0 {
		var err error
		if value, err = t.program.Read(local, variable); err != nil || !t.others() {
			return value, err
		}
	}
	bits, err := t.fromWorker(ctx, local >= 0, value.Memory().HostBytes())
	if err == nil {
		copy(value.Memory().HostBytes(), bits)
	}
	return value, err
}

// keptAtChief returns, on the chief, the value of a mirrored variable of the first replica that has it. Other workers,
// of which one sends it, get nil.
func (t *Trainer) keptAtChief(ctx context.Context, variable int) (*tensor.Tensor, error) {
	v := t.variables[variable]
	keeper, local := t.keeper(variable)
	chief := t.strategy.Properties().ShouldCheckpoint
	if !t.others() {
		return t.program.Read(local, variable)
	}
	var all *tensor.Tensor
	if chief {
		all = tensor.New(v.DType, v.Shape...)
	}
	values := slices.Repeat([]*tensor.Tensor{tensor.New(v.DType, 0)}, len(t.parts))
	if local >= 0 {
		var err error
		if values[local], err = t.program.Read(local, variable); err != nil {
			return nil, err
		}
	}
	counts := make([]int, t.strategy.NumReplicasInSync())
	counts[keeper] = v.Bytes() / v.DType.Bytes()
	return all, t.sendToChief(ctx, v.Name, all, values, counts)
}

// notHere explains why a slot cannot be read.
func (t *Trainer) notHere(variable int) error {
	replica, _ := t.keeper(variable)
	return fmt.Errorf("Config.ShardOptimizer: %w (that of replica %d): read it on its worker, or call Trainer.Snapshot "+
		"on all workers", engine.ErrNotOwned, replica)
}

// checkSharding returns an error if the value is invalid.
func (c *Config) checkSharding() error {
	if c.ShardOptimizer > ShardOff {
		return errors.New("train: Config.ShardOptimizer is " + c.ShardOptimizer.String() +
			": want ShardAuto, ShardOn or ShardOff")
	}
	return nil
}
