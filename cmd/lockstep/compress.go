package main

import (
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/train/compress"
)

// codecFlag is the flag --compress.
type codecFlag struct{ compress.Codec }

func (c *codecFlag) add(f *pflag.FlagSet) {
	f.Var(c, "compress", "exchange gradients in fewer bytes, over slow links: none, bfloat16, float16, int8, "+
		"powersgd[:RANK[:AFTER]] (AFTER: uncompressed steps first)")
}

// Set implements pflag.Value.
func (c *codecFlag) Set(text string) (err error) {
	c.Codec, err = compress.Parse(text)
	return err
}

// Type implements pflag.Value. It names the value in help texts.
func (c *codecFlag) Type() string { return "codec" }
