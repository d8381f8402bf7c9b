package training

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// weightsFlags are the flags of lockstep train about initial weights.
type weightsFlags struct {
	path, names string
	partial     bool
}

func (o *weightsFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.path, "weights", "", "initial weights: a `file` or folder")
	f.StringVar(&o.names, "weights-map", "", "`file` of rules for the names in --weights")
	f.BoolVar(&o.partial, "weights-partial", false, "accept missing and superfluous weights")
	cli.ComparedIfGiven(f, "weights") // the contents are compared later
	cli.NotCompared(f, "weights-map")
}

func (o *weightsFlags) check(given func(flag string) bool) error {
	for _, flag := range []string{"weights-map", "weights-partial"} {
		if given(flag) && o.path == "" {
			return cli.Usagef("--%s needs --weights, the file of the weights", flag)
		}
	}
	return nil
}

// loadWeights sets the model's variables to --weights, if given.
func (r *trainRun) loadWeights() (err error) {
	o := r.flags.weights
	if o.path == "" {
		return nil
	}
	options := train.LoadOptions{Partial: o.partial}
	if o.names != "" {
		if options.Names, err = checkpoint.LoadNameMap(o.names); err != nil {
			return fmt.Errorf("--weights-map: %w", err)
		}
	}
	weights, err := train.LoadWeights(o.path)
	if err != nil {
		return fmt.Errorf("--weights: %w", err)
	}
	if r.loaded, err = r.Trainer.LoadWeights(weights, options); err == nil {
		return nil
	}
	hint := ""
	if len(r.loaded.Missing)+len(r.loaded.Unexpected) > 0 {
		hint = "\nto rename them, give --weights-map; to load those that fit, give --weights-partial"
	}
	return fmt.Errorf("--weights %s: %w%s", o.path, err, hint)
}

// announceWeights adds rows about weights that were not all those of the model.
func (r *trainRun) announceWeights(t *cli.Table) {
	for _, list := range []struct {
		what  string
		names []string
	}{{"keeps its initial values", r.loaded.Missing}, {"not in the model", r.loaded.Unexpected}} {
		if len(list.names) > 0 {
			t.Row("weights", "%s: %s", list.what, checkpoint.FormatNames(list.names))
		}
	}
	if n := len(r.loaded.Converted); n > 0 {
		t.Row("weights", "%s converted from another type", cli.Count(n, "tensor"))
	}
}
