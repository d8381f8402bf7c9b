package setup

import (
	"fmt"

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
	shard       string // auto, on or off
	Accumulate  int
	Precision   string
}

// Add adds the flags.
func (o *StepFlags) Add(f *pflag.FlagSet) {
	f.Var(&o.BucketBytes, "bucket-bytes", "gradients per bucket (default by engine)")
	f.Var(&o.Compress, "compress", "compress gradients: none, bfloat16, float16, int8, powersgd[:RANK[:AFTER]]")
	cli.ChoiceVar(f, &o.shard, "shard-optimizer", "auto", "divide the optimizer's state (ZeRO stage 1): auto, on or off",
		"auto", "on", "off")
	f.IntVar(&o.Accumulate, "accumulate", 1, "batches of a step")
	var precisions []string
	for _, p := range gomlx.Precisions {
		precisions = append(precisions, string(p))
	}
	cli.ChoiceVar(f, &o.Precision, "precision", string(gomlx.Float32), "", precisions...)
	cli.Limit(f, "[1,)", "bucket-bytes")
	cli.Limit(f, fmt.Sprintf("[1,%d]: for larger steps, use larger batches", train.MaxAccumulate), "accumulate")
}

// Exchange returns train.Config.Exchange: nil if the engine chooses.
func (o *StepFlags) Exchange() train.Exchange {
	switch codec := o.Compress.Codec; {
	case o.Sharded():
		return train.Sharded{Compress: codec}
	case o.shard == "off" || codec.Method != compress.None:
		return train.AllReduce{Compress: codec}
	}
	return nil
}

// Sharded reports whether the optimizer is sharded in any case.
func (o *StepFlags) Sharded() bool { return o.shard == "on" }

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
