package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// stepFlags say how a training step is made. Train and bench train have them.
type stepFlags struct {
	bucketBytes bytesFlag
	compress    codecFlag
	shard       shardFlag
	accumulate  int
	precision   string
}

func (o *stepFlags) add(f *pflag.FlagSet) {
	f.Var(&o.bucketBytes, "bucket-bytes", "bytes of gradients per bucket, such as 1MiB; the buckets are "+
		"all-reduced one after the other, while later ones are computed (default by engine)")
	f.Var(&o.compress, "compress", "exchange gradients in fewer bytes, over slow links: none, bfloat16, float16, int8, "+
		"powersgd[:RANK[:AFTER]] (AFTER: uncompressed steps first)")
	o.shard.add(f)
	f.IntVar(&o.accumulate, "accumulate", 1, "number of batches whose gradients a step accumulates: one all-reduce and "+
		"one update for all of them")
	f.StringVar(&o.precision, "precision", string(gomlx.Float32), "type in which the layers compute, over float32 "+
		"variables: "+strings.Join(precisions(), ", ")+" (half width is for accelerators)")
}

func (o *stepFlags) check() error {
	switch {
	case o.bucketBytes.text != "" && o.bucketBytes.n < 1:
		return usagef("--bucket-bytes %s: want at least 1", o.bucketBytes.text)
	case o.accumulate < 1:
		return usagef("--accumulate %d: want at least 1", o.accumulate)
	case o.accumulate > train.MaxAccumulate:
		return usagef("--accumulate %d: want at most %d: for larger steps, use larger batches", o.accumulate,
			train.MaxAccumulate)
	case !slices.Contains(precisions(), o.precision):
		return usagef("--precision %s: want %s", o.precision, oneOf(precisions()))
	}
	return nil
}

// plain formats the flags that were set, for other programs, to be appended to a line.
func (o *stepFlags) plain() (text string) {
	if o.bucketBytes.n > 0 {
		text += fmt.Sprintf(" bucket_bytes=%d", o.bucketBytes.n)
	}
	if o.compress.Codec != (compress.Codec{}) {
		text += " compress=" + o.compress.String()
	}
	if o.accumulate > 1 {
		text += fmt.Sprintf(" accumulate=%d", o.accumulate)
	}
	if o.precision != string(gomlx.Float32) {
		text += " precision=" + o.precision
	}
	return text
}

// bytesFlag is a number of bytes with a unit.
type bytesFlag struct {
	text string
	n    int // 0: not given
}

// String implements pflag.Value.
func (b *bytesFlag) String() string { return b.text }

// Set implements pflag.Value.
func (b *bytesFlag) Set(text string) (err error) {
	b.text = text
	b.n, err = parseBytes(text)
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
