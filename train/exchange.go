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

// Exchange is how the replicas exchange what they compute: [AllReduce], [Sharded] or [DiLoCo].
type Exchange interface {
	fmt.Stringer
	codec() compress.Codec
	// complete returns the exchange with its defaults, or an error if it is invalid or not possible with the rest of c.
	complete(c *Config) (Exchange, error)
}

// AllReduce sums the gradients of each step over all replicas. Every device updates all parameters.
type AllReduce struct {
	// Compress specifies how gradients are exchanged. The default exchanges them as they are. Anything else changes the
	// results, and pays off over links of about 1 Gbit/s and less; see package compress. A single replica exchanges
	// nothing.
	Compress compress.Codec
}

// Sharded divides the optimizer's state and the update of the parameters among the devices of the job, as DeepSpeed's
// ZeRO stage 1 and PyTorch's ZeroRedundancyOptimizer do: each device updates parameters of about the same total size,
// and has the slots of those only. Large ones are divided, if the optimizer works element by element. Gradients are
// reduced to the owners, which then send the new values to all devices. The bits of weights and slots are those of
// AllReduce. New returns an error with central storage and with CrossDeviceOps.
type Sharded struct {
	Compress compress.Codec // as of AllReduce: gradients only; new values are sent as they are
}

// engineChoice is the Exchange of a Config without one: Sharded, if the engine expects shorter steps, or AllReduce.
type engineChoice struct{}

func (x AllReduce) codec() compress.Codec  { return x.Compress }
func (x Sharded) codec() compress.Codec    { return x.Compress }
func (engineChoice) codec() compress.Codec { return compress.Codec{} }

// String returns "AllReduce", and the codec if there is one.
func (x AllReduce) String() string { return "AllReduce" + compressedBy(x.Compress) }

// String returns "Sharded", and the codec if there is one.
func (x Sharded) String() string { return "Sharded" + compressedBy(x.Compress) }

func (engineChoice) String() string { return "the engine's choice" }

func compressedBy(c compress.Codec) string {
	if c.Method == compress.None {
		return ""
	}
	return fmt.Sprintf(" compressed by %v", c)
}

func (x AllReduce) complete(*Config) (_ Exchange, err error) {
	x.Compress, err = completeCodec(x.Compress)
	return x, err
}

func (x Sharded) complete(*Config) (_ Exchange, err error) {
	x.Compress, err = completeCodec(x.Compress)
	return x, err
}

func (x engineChoice) complete(*Config) (Exchange, error) { return x, nil }

func completeCodec(c compress.Codec) (compress.Codec, error) {
	err := c.Check()
	if c.Method == compress.PowerSGD {
		c.Rank = max(1, c.Rank)
	}
	return c, err
}

// diloco returns the exchange if it is DiLoCo, or nil.
func (c *Config) diloco() *DiLoCo {
	if d, ok := c.Exchange.(DiLoCo); ok {
		return &d
	}
	return nil
}

// exchange is how the replicas sum the gradients of a step and apply the sums: [allReduce] or [sharded]. The goroutine
// of each replica calls these functions for this replica. They allocate nothing in a step.
type exchange interface {
	// start starts to sum the gradients of a bucket over all replicas, and with those of the last bucket scalars.
	start(p *localReplica, bucket int, scalars []float64) error
	// finish waits for the sums of all buckets, and calls each after those of a bucket, in the order of the buckets.
	// Then the scalars are summed too.
	finish(ctx context.Context, p *localReplica, each func(bucket int) error) error
	// checkSums notes which sums of a bucket are not finite, and adds up their squares: see checkSum.
	checkSums(p *localReplica, bucket int)
	// apply computes new values from the sums of a bucket, if the replica is the first of its device, and starts to send
	// them where they are needed: see localReplica.sending. The buckets are applied in their order.
	apply(ctx context.Context, p *localReplica, bucket int) error
}

// fitStep takes a step of Fit, unless its examples weigh 0, and adds its loss and metrics to mean. Examples of weight 0
// count.
func (t *Trainer) fitStep(ctx context.Context, b *stepBatches, mean *mean) (result stepResult, err error) {
	if t.diloco != nil {
		return t.diloco.fitStep(ctx, b, mean)
	}
	if b.weightSum > 0 {
		b.stop, b.place = t.wantsStop(), t.placementDue()
		result, err = t.step(ctx, b)
	}
	if err == nil && (result.taken || b.weightSum == 0) {
		mean.add(b, t)
	}
	return result, err
}

// stepResult is the result of fitStep.
type stepResult struct {
	taken   bool            // the variables have new values
	stop    bool            // a worker requested a stop; no worker took the step
	problem *NotFiniteError // loss or gradients are not finite
	outer   bool            // an outer step followed
	round   *mean           // over the steps since the last outer step, of this worker; nil: all are in mean
}

// openExchange makes the exchange.
func (t *Trainer) openExchange(ctx context.Context) (err error) {
	if d := t.config.diloco(); d != nil {
		if t.diloco, err = t.newDiLoCo(*d); err != nil {
			return fmt.Errorf("train: Config.Exchange: DiLoCo: %w", err)
		}
		t.exchange, t.compression = t.newAllReduce(nil), t.diloco.compression
		return nil
	}
	t.compression = t.compressions(t.config.Exchange.codec())
	all := t.newAllReduce(t.compression)
	if t.exchange = all; !t.shards {
		return nil
	}
	if t.exchange, err = t.newSharded(ctx, all); err != nil {
		return fmt.Errorf("train: %w", err)
	}
	return nil
}

// commit makes what a step has computed visible on all replicas.
func (t *Trainer) commit() {
	t.program.Commit()
	t.compression.each(compress.Exchange.Commit)
}

// discard keeps the values from before the step.
func (t *Trainer) discard() {
	t.program.Discard()
	t.compression.each(compress.Exchange.Discard)
}

// compressible returns an error if the strategy cannot exchange compressed gradients of these parameters.
func compressible(c compress.Codec, parameters []engine.Variable, s *distribute.Strategy) error {
	if c.Method == compress.Int8 && !s.HasCollectives() {
		return fmt.Errorf("Config.Exchange compresses by %v, which exchanges parts of the gradients, and %v only reduces: "+
			"use a strategy without CrossDeviceOps, or bfloat16", c, s.CrossDeviceOps())
	}
	if c.Method == compress.None || slices.ContainsFunc(parameters, func(v engine.Variable) bool {
		return v.DType == tensor.Float32
	}) {
		return nil
	}
	return fmt.Errorf("Config.Exchange compresses by %v, and no parameter is float32: other types are not compressed; "+
		"leave it out", c)
}
