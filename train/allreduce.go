package train

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// allReduce is the plain exchange: all replicas get all sums, and every device updates all parameters.
type allReduce struct {
	t          *Trainer
	reductions [][]reduction // by local replica and bucket
}

func (t *Trainer) newAllReduce(codecs compression) *allReduce {
	x := &allReduce{t: t}
	for local := range t.local {
		list := make([]reduction, len(t.buckets))
		if codecs != nil {
			for k, c := range codecs[local] {
				list[k].codec, list[k].next = c, c.Next
			}
		}
		x.reductions = append(x.reductions, list)
	}
	return x
}

func (x *allReduce) start(p *localReplica, k int, scalars []float64) error {
	return x.reductions[p.local][k].start(p.ctx, p.replica, x.t.committed,
		distribute.Bucket{Dst: p.gradients[k], Src: p.gradients[k], Names: x.t.buckets[k].names, Scalars: scalars})
}

func (x *allReduce) finish(ctx context.Context, p *localReplica, each func(k int) error) error {
	for k := range x.reductions[p.local] {
		if err := x.reductions[p.local][k].finish(ctx); err != nil {
			return err
		}
		if err := each(k); err != nil {
			return err
		}
	}
	return nil
}

// checkSums implements exchange: each replica of a worker reads its part of every sum, because all have the same.
func (x *allReduce) checkSums(p *localReplica, k int) {
	for i, parameter := range x.t.buckets[k].parameters {
		x.t.checkSum(p, p.gradients[k][i], parameter, 0, p.local, len(x.t.local))
	}
}

func (x *allReduce) apply(ctx context.Context, p *localReplica, k int) error {
	if !p.first {
		return nil
	}
	return x.t.update(ctx, p, k, p.gradients[k], x.t.buckets[k].parameters)
}

// compression is the compressed exchange of the buckets, by local replica; nil: there is none.
type compression [][]compress.Exchange

// compressions returns the compression by a codec.
func (t *Trainer) compressions(codec compress.Codec) (list compression) {
	n := t.strategy.NumReplicasInSync()
	if codec.Method == compress.None || n == 1 {
		return nil
	}
	parameters := t.program.Parameters()
	for _, replica := range t.ids() {
		var codecs []compress.Exchange
		for _, b := range t.buckets {
			var of []compress.Parameter
			for _, i := range b.parameters {
				p := parameters[i]
				of = append(of, compress.Parameter{Name: p.Name, DType: p.DType, Shape: p.Shape})
			}
			codecs = append(codecs, codec.New(of, replica, n, uint64(t.config.Seed)))
		}
		list = append(list, codecs)
	}
	return list
}

func (c compression) each(f func(compress.Exchange)) {
	for _, codecs := range c {
		for _, x := range codecs {
			f(x)
		}
	}
}

// compressed lists what compression has rounded away, and what it has learned, as values of the state table.
func (t *Trainer) compressed() (list []*stateValue) {
	if t.compression == nil {
		return nil
	}
	states := make([][]compress.State, len(t.compression)) // by local replica
	for local, codecs := range t.compression {
		for _, c := range codecs {
			states[local] = append(states[local], c.State()...)
		}
	}
	for i, s := range states[0] {
		v := &stateValue{
			name: s.Name, kind: kindCompression, dtype: s.Value.DType(), shape: s.Value.Shape(),
			mirrored: s.Shared, shared: s.Shared,
			read: func(local int) (*tensor.Tensor, error) { return states[local][i].Value.Clone(), nil },
			write: func(local int, value *tensor.Tensor) error {
				copy(states[local][i].Value.Memory().HostBytes(), value.Memory().HostBytes())
				return nil
			},
		}
		if !s.Shared {
			v.scope = ofReplica
		}
		list = append(list, t.addEntries(v))
	}
	return list
}

// reduction is a replica's exchange of the gradients of one bucket.
type reduction struct {
	codec   compress.Exchange   // nil: the gradients are all-reduced as they are
	next    func()              // codec.Next
	started []distribute.Handle // the calls in progress
	follows distribute.Follower // the one that started the last call of a second round
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
