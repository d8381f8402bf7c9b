package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// savedFlags are the flags of the commands that use the weights of a run of lockstep train.
type savedFlags struct {
	dir, engine, plugin string
}

func (o *savedFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.dir, "from", "", "`folder` of --out or --checkpoint-dir of lockstep train (required)")
}

func (o *savedFlags) addEngine(f *pflag.FlagSet) {
	f.StringVar(&o.engine, "engine", "go", "compute engine: "+strings.Join(gomlx.Names, ", "))
	f.StringVar(&o.plugin, "xla-plugin", "", "PJRT plugin `file` for --engine xla (default $"+gomlx.PluginEnv+")")
}

// savedRun is a run of lockstep train whose weights are used.
type savedRun struct {
	from    savedFlags
	flags   trainFlags
	source  string // of the weights: a file, or a snapshot
	weights []train.Weight
}

// load reads the flags and the weights of a run.
func (o savedFlags) load() (*savedRun, error) {
	switch {
	case o.dir == "":
		return nil, usagef("--from is missing: want the folder of --out or --checkpoint-dir of lockstep train")
	case !slices.Contains(gomlx.Names, o.engine):
		return nil, usagef("--engine %s: want %s", o.engine, oneOf(gomlx.Names))
	case o.engine != "xla" && o.plugin != "":
		return nil, usagef("--xla-plugin is for --engine xla, not %s", o.engine)
	}
	file := filepath.Join(o.dir, configFile)
	if info, err := os.Stat(o.dir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("--from %s: no such folder: want that of --out or --checkpoint-dir of lockstep train", o.dir)
	} else if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("--from %s: the folder has no %s, which lockstep train writes into --out and "+
			"--checkpoint-dir: want such a folder", o.dir, configFile)
	}
	r := &savedRun{from: o}
	cmd := trainCommand(&r.flags)
	err := cmd.Flags().Set("config", file)
	if err == nil {
		err = r.flags.config.read(cmd)
	}
	if err == nil {
		err = r.flags.complete(cmd.Flags().Changed)
	}
	if err != nil { // of the file, not of this command's flags
		text := strings.TrimPrefix(err.Error(), "--config ")
		if !strings.HasPrefix(text, file) {
			text = file + ": " + text
		}
		return nil, fmt.Errorf("--from %s: %s\nthe file has the flags of lockstep train: restore the one that it wrote, or "+
			"train again", o.dir, text)
	}
	return r, r.loadWeights()
}

// loadWeights reads the file of weights or, if there is none, the newest snapshot.
func (r *savedRun) loadWeights() (err error) {
	r.source = filepath.Join(r.from.dir, weightsFile)
	if _, e := os.Stat(r.source); e == nil {
		if r.weights, err = train.LoadWeights(r.source); err != nil {
			return fmt.Errorf("--from %s: %w", r.from.dir, err)
		}
		return nil
	}
	s, _, err := checkpoint.Latest(r.from.dir)
	switch {
	case err != nil:
		return fmt.Errorf("--from %s: %w", r.from.dir, err)
	case s == nil:
		return fmt.Errorf("--from %s: the folder has no %s and no snapshot: let lockstep train finish an epoch, or stop it "+
			"with Ctrl-C, which writes both", r.from.dir, weightsFile)
	}
	r.source = s.Path
	state, err := train.SnapshotOf(&s.Contents)
	if err != nil {
		return fmt.Errorf("--from %s: %s: %w", r.from.dir, s.Path, err)
	}
	if r.weights = state.Variables; r.flags.callbacks.ema > 0 && state.Step > 0 {
		r.weights = averaged(r.weights)
	}
	return nil
}

// averaged replaces the weights by their moving averages, which training with --ema validates by and ends with.
func averaged(weights []train.Weight) (list []train.Weight) {
	averages := map[string]*tensor.Tensor{}
	for _, w := range weights {
		if name, ok := strings.CutPrefix(w.Name, optimizer.EMAScope); ok {
			averages[name] = w.Value
		}
	}
	for _, w := range weights {
		if value := averages[w.Name]; value != nil {
			w.Value = value
		}
		list = append(list, w)
	}
	return list
}

// loadExamples reads the run's data.
func (r *savedRun) loadExamples() (*examples, error) {
	x, err := dataSets[r.flags.data.name].load(&r.flags.data, r.flags.positions)
	if err != nil {
		return nil, fmt.Errorf("reading the data of %s: %w", r.from.dir, err)
	}
	return x, nil
}

// predictor compiles the predictions of the run's model for one row of each input.
func (r *savedRun) predictor(ctx context.Context, e engine.Engine, x *examples, batch int) (*train.Predictor, error) {
	inputs, _ := x.features()
	return r.predictorOf(ctx, e, r.flags.newModel(x, nil), inputs, batch)
}

// predictorOf compiles the predictions of a model with the run's weights.
func (r *savedRun) predictorOf(ctx context.Context, e engine.Engine, m *gomlx.Model, inputs []engine.Feature, batch int,
) (*train.Predictor, error) {
	p, err := train.NewPredictor(ctx, m, train.PredictorConfig{
		Engine: e, Inputs: inputs, Batch: batch, Weights: r.weights, Load: train.LoadOptions{Partial: true},
	})
	if err != nil {
		return nil, r.explain(err)
	}
	if err := r.complete(p.Loaded()); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// complete returns an error if a variable of the model has no weight. Weights that the model does not use, such
// as the optimizer's state in a snapshot, are none.
func (r *savedRun) complete(l train.Loaded) error {
	if len(l.Missing) == 0 {
		return nil
	}
	return r.explain(fmt.Errorf("no weights for %s", checkpoint.FormatNames(l.Missing)))
}

// explain adds what may have changed since the training.
func (r *savedRun) explain(err error) error {
	return fmt.Errorf("%s does not fit the model in %s: %w\nif the tokenizer or the classes of the data have changed, "+
		"restore them or train again", r.source, filepath.Join(r.from.dir, configFile), err)
}

// openEngine opens the engine that computes.
func (o savedFlags) openEngine(devices int) (engine.Engine, error) {
	return gomlx.Open(o.engine, gomlx.Options{Devices: devices, Plugin: o.plugin})
}
