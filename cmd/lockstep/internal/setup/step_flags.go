package setup

import (
	"fmt"
	"slices"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// StepFlags say how a training step is made. Train and bench train have them.
type StepFlags struct {
	BucketBytes bytesFlag
	Compress    codecFlag
	shard       shardFlag
	Accumulate  int
	Precision   string
}

// Add adds the flags.
func (o *StepFlags) Add(f *pflag.FlagSet) {
	f.Var(&o.BucketBytes, "bucket-bytes", "gradients per bucket (default by engine)")
	f.Var(&o.Compress, "compress", "compress gradients: none, bfloat16, float16, int8, powersgd[:RANK[:AFTER]]")
	o.shard.add(f)
	f.IntVar(&o.Accumulate, "accumulate", 1, "batches of a step")
	f.StringVar(&o.Precision, "precision", string(gomlx.Float32), cli.OneOf(precisions()))
}

// Check validates the flags.
func (o *StepFlags) Check() error {
	switch {
	case o.BucketBytes.text != "" && o.BucketBytes.N < 1:
		return cli.Usagef("--bucket-bytes %s: want at least 1", o.BucketBytes.text)
	case o.Accumulate < 1:
		return cli.Usagef("--accumulate %d: want at least 1", o.Accumulate)
	case o.Accumulate > train.MaxAccumulate:
		return cli.Usagef("--accumulate %d: want at most %d: for larger steps, use larger batches", o.Accumulate,
			train.MaxAccumulate)
	case !slices.Contains(precisions(), o.Precision):
		return cli.Usagef("--precision %s: want %s", o.Precision, cli.OneOf(precisions()))
	}
	return nil
}

// Exchange returns train.Config.Exchange: nil if the engine chooses.
func (o *StepFlags) Exchange() train.Exchange {
	switch codec := o.Compress.Codec; {
	case o.shard == shardOn:
		return train.Sharded{Compress: codec}
	case o.shard == shardOff || codec.Method != compress.None:
		return train.AllReduce{Compress: codec}
	}
	return nil
}

// Sharded reports whether the optimizer is sharded in any case.
func (o *StepFlags) Sharded() bool { return o.shard == shardOn }

// Plain formats the flags that were set, for other programs, to be appended to a line.
func (o *StepFlags) Plain() (text string) {
	if o.BucketBytes.N > 0 {
		text += fmt.Sprintf(" bucket_bytes=%d", o.BucketBytes.N)
	}
	if o.Compress.Codec != (compress.Codec{}) {
		text += " compress=" + o.Compress.String()
	}
	if o.Accumulate > 1 {
		text += fmt.Sprintf(" accumulate=%d", o.Accumulate)
	}
	if o.Precision != string(gomlx.Float32) {
		text += " precision=" + o.Precision
	}
	return text
}

// bytesFlag is a number of bytes with a unit.
type bytesFlag struct {
	text string
	N    int // 0: not given
}

// String implements pflag.Value.
func (b *bytesFlag) String() string { return b.text }

// Set implements pflag.Value.
func (b *bytesFlag) Set(text string) (err error) {
	b.text = text
	b.N, err = cli.ParseBytes(text)
	return err
}

// Type implements pflag.Value. It names the value in help texts.
func (b *bytesFlag) Type() string { return "size" }

// codecFlag is the flag --compress.
type codecFlag struct{ compress.Codec }

// Set implements pflag.Value.
func (c *codecFlag) Set(text string) (err error) {
	c.Codec, err = compress.Parse(text)
	return err
}

// Type implements pflag.Value. It names the value in help texts.
func (c *codecFlag) Type() string { return "codec" }

// shardFlag is the flag --shard-optimizer.
type shardFlag string

const (
	shardAuto shardFlag = "auto"
	shardOn   shardFlag = "on"
	shardOff  shardFlag = "off"
)

func (s *shardFlag) add(f *pflag.FlagSet) {
	*s = shardAuto
	f.Var(s, "shard-optimizer", "divide the optimizer's state (ZeRO stage 1): auto, on or off")
}

// String implements pflag.Value.
func (s shardFlag) String() string { return string(s) }

// Set implements pflag.Value.
func (s *shardFlag) Set(text string) error {
	switch mode := shardFlag(text); mode {
	case shardAuto, shardOn, shardOff:
		*s = mode
		return nil
	}
	return fmt.Errorf("%q: want auto, on or off", text)
}

// Type implements pflag.Value. It names the value in help texts.
func (s shardFlag) Type() string { return "mode" }
