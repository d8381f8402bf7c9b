package main

import (
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/train"
)

// shardFlag is the flag --shard-optimizer.
type shardFlag struct{ train.Sharding }

func (s *shardFlag) add(f *pflag.FlagSet) {
	f.Var(s, "shard-optimizer", "divide the optimizer's state and update among the replicas' devices (ZeRO stage 1), "+
		"with the same bits: auto, on, off (auto: where steps are shorter, docs/train.md)")
}

// Set implements pflag.Value.
func (s *shardFlag) Set(text string) error { return s.UnmarshalText([]byte(text)) }

// Type implements pflag.Value. It names the value in help texts.
func (s *shardFlag) Type() string { return "mode" }
