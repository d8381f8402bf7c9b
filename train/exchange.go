package train

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// reduction is a replica's exchange of the gradients of one bucket.
type reduction struct {
	codec   compress.Exchange   // nil: the gradients are all-reduced as they are
	next    func()              // codec.Next
	started []distribute.Handle // the calls in progress
	follows distribute.Follower // the one that started the last call of a second round
}

// exchanges returns the compressed exchange of each bucket for a replica, or nothing if there is none.
func (t *Trainer) exchanges(replica int) (list []compress.Exchange) {
	n := t.strategy.NumReplicasInSync()
	if t.config.Compress.Method == compress.None || n == 1 {
		return nil
	}
	parameters := t.program.Parameters()
	for _, b := range t.buckets {
		var of []compress.Parameter
		for _, i := range b.parameters {
			of = append(of, compress.Parameter{Name: parameters[i].Name, DType: parameters[i].DType, Shape: parameters[i].Shape})
		}
		list = append(list, t.config.Compress.New(of, replica, n, uint64(t.config.Seed)))
	}
	return list
}

// starter starts calls: a replica, or what starts a call that follows another one.
type starter interface {
	StartAllReduce(context.Context, distribute.ReduceOp, distribute.Bucket, ...distribute.Options) (
		distribute.Handle, error)
	StartAllGather(ctx context.Context, dst, src *tensor.Tensor, name string, opts ...distribute.Options) (
		distribute.Handle, error)
}

// start starts the exchange of a bucket's gradients, and of scalars. The second round of a codec begins as soon as the
// first has ended, while the replica computes other gradients.
func (r *reduction) start(ctx context.Context, replica *distribute.Replica, step int64, b distribute.Bucket) error {
	r.started = r.started[:0]
	if r.codec == nil {
		return r.reduce(ctx, replica, b)
	}
	var last distribute.Handle // of the round before
	for round, calls := range r.codec.Start(b.Dst, step) {
		for _, c := range calls {
			if err := r.make(ctx, replica, last, &c, &b.Scalars, round > 0); err != nil {
				return err
			}
		}
		last = r.started[len(r.started)-1]
	}
	if len(b.Scalars) == 0 {
		return nil
	}
	return r.reduce(ctx, replica, distribute.Bucket{Scalars: b.Scalars})
}

// make starts a call of the codec. If follows is set, it follows the last call of the round before. The scalars are
// reduced by the first reduction.
func (r *reduction) make(ctx context.Context, replica *distribute.Replica, last distribute.Handle, c *compress.Call,
	scalars *[]float64, follows bool,
) error {
	on := starter(replica)
	if follows {
		r.follows = last.Then(r.next)
		on = &r.follows
	}
	var h distribute.Handle
	var err error
	switch c.Op {
	case compress.AllToAll:
		h, err = replica.StartAllToAll(ctx, c.Dst[0], c.Src[0], c.Names[0])
	case compress.AllGather:
		h, err = on.StartAllGather(ctx, c.Dst[0], c.Src[0], c.Names[0])
	default:
		err = r.reduce(ctx, on, distribute.Bucket{Dst: c.Dst, Src: c.Src, Names: c.Names, Scalars: *scalars})
		*scalars = nil
		return err
	}
	if err == nil {
		r.started = append(r.started, h)
	}
	return err
}

// reduce starts an all-reduce.
func (r *reduction) reduce(ctx context.Context, on starter, b distribute.Bucket) error {
	h, err := on.StartAllReduce(ctx, distribute.Sum, b)
	if err == nil {
		r.started = append(r.started, h)
	}
	return err
}

// finish waits until the gradients are summed.
func (r *reduction) finish(ctx context.Context) error {
	for _, h := range r.started {
		if err := h.Wait(ctx); err != nil {
			return err
		}
	}
	r.started = r.started[:0]
	if r.codec != nil {
		r.codec.Next()
	}
	return nil
}

// finishAll waits until the gradients of all buckets are summed, in their order, and calls each, if it is not nil,
// after each.
func finishAll(ctx context.Context, list []reduction, each func(k int) error) error {
	for k := range list {
		if err := list[k].finish(ctx); err != nil {
			return err
		}
		if each != nil {
			if err := each(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// commit makes what a step has computed visible on all replicas.
func (t *Trainer) commit() {
	t.program.Commit()
	t.commitExchanges()
}

// commitExchanges makes the residuals of completed exchanges those of the next ones.
func (t *Trainer) commitExchanges() {
	for i := range t.parts {
		for _, r := range t.parts[i].exchanging {
			if r.codec != nil {
				r.codec.Commit()
			}
		}
	}
}

// discard drops it.
func (t *Trainer) discard() {
	t.program.Discard()
	for i := range t.parts {
		for _, r := range t.parts[i].exchanging {
			if r.codec != nil {
				r.codec.Discard()
			}
		}
	}
}

// compression lists what the compressed exchanges of a replica keep from step to step.
func (t *Trainer) compression(replica int) (list []compress.State) {
	for _, r := range t.parts[replica].exchanging {
		if r.codec != nil {
			list = append(list, r.codec.State()...)
		}
	}
	return list
}

// readCompression returns what all replicas keep: of each replica a row, if they differ. That is much memory: they
// are sent to the chief only, and the other workers return none.
func (t *Trainer) readCompression(ctx context.Context, chief bool) (list []Weight, err error) {
	states := make([][]compress.State, len(t.parts))
	for replica := range states {
		states[replica] = t.compression(replica)
	}
	for i, s := range states[0] {
		value := s.Value
		if s.Shared && chief {
			value = value.Clone()
		} else if !s.Shared {
			rows := make([]*tensor.Tensor, len(states))
			for replica := range rows {
				rows[replica] = states[replica][i].Value
			}
			if value, err = t.gatherAtChief(ctx, s.Name, rows, false); err != nil {
				return nil, fmt.Errorf("reading the %s: %w", s.Name, err)
			}
		}
		if chief {
			list = append(list, Weight{s.Name, value})
		}
	}
	return list, nil
}

// restoreCompression sets what the compressed exchanges keep to that of a snapshot. It returns a reason why bits differ
// from here on, or "".
func (t *Trainer) restoreCompression(s *Snapshot) string {
	saved := map[string]*tensor.Tensor{}
	if s.Compress == t.config.Compress {
		for _, w := range s.Compression {
			saved[w.Name] = w.Value
		}
	}
	n := t.strategy.NumReplicasInSync()
	first, _ := t.strategy.LocalReplicas()
	for replica := range t.parts {
		for _, state := range t.compression(replica) {
			to, shape := tensor.Data[float32](state.Value), state.Value.Shape()
			clear(to)
			if !state.Shared {
				shape = rowShape(s.Replicas, shape)
			}
			value := saved[state.Name]
			switch {
			case value == nil || value.DType() != tensor.Float32 || !slices.Equal(value.Shape(), shape): // starts anew
			case state.Shared:
				copy(to, tensor.Data[float32](value))
			case s.Replicas == n:
				copy(to, tensor.Data[float32](value.Rows(first+replica, first+replica+1)))
			default: // only the sum over the replicas matters
				for i, mean := range tensor.Data[float32](meanOfRows(value, state.Value.Shape())) {
					to[i] = mean * float32(s.Replicas) / float32(n)
				}
			}
		}
	}
	if s.Compress != t.config.Compress {
		return fmt.Sprintf("the snapshot was made with compression %v, and this training has %v: what compression has "+
			"rounded away and kept for the next step is dropped", s.Compress, t.config.Compress)
	}
	return ""
}

// compressible returns an error if the strategy cannot exchange compressed gradients of these parameters.
func compressible(c compress.Codec, parameters []engine.Variable, s *distribute.Strategy) error {
	if c.Method == compress.Int8 && !s.HasCollectives() {
		return fmt.Errorf("Config.Compress is %v, which exchanges parts of the gradients, and %v only reduces: use a "+
			"strategy without CrossDeviceOps, or bfloat16", c, s.CrossDeviceOps())
	}
	if c.Method == compress.None || slices.ContainsFunc(parameters, func(v engine.Variable) bool {
		return v.DType == tensor.Float32
	}) {
		return nil
	}
	return fmt.Errorf("Config.Compress is %v, and no parameter is float32: other types are not compressed; "+
		"leave it out", c)
}
