// Package predict has the commands that use the weights of a run of lockstep train: eval, predict and generate.
package predict

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/datasets"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/training"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// savedFlags are the flags of the commands that use the weights of a run of lockstep train.
type savedFlags struct {
	dir    string
	engine setup.EngineFlags
}

func (o *savedFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.dir, "from", "", "`folder` of --out or --checkpoint-dir of lockstep train (required)")
}

// savedRun is a run of lockstep train whose weights are used.
type savedRun struct {
	from    savedFlags
	flags   *training.Flags // nil if it is not of lockstep train
	config  string          // the file that describes the model
	source  string          // of the weights: a file, or a snapshot
	weights []train.Weight

	metadata map[string]string // of the weights
}

// load reads the flags and the weights of a run.
func (o savedFlags) load() (*savedRun, error) {
	if o.dir == "" {
		return nil, cli.Usagef("--from is missing: want the folder of --out or --checkpoint-dir of lockstep train")
	}
	if err := o.engine.Check(); err != nil {
		return nil, err
	}
	file := filepath.Join(o.dir, training.ConfigFile)
	if info, err := os.Stat(o.dir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("--from %s: no such folder: want that of --out or --checkpoint-dir of lockstep train", o.dir)
	} else if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("--from %s: the folder has no %s, which lockstep train writes into --out and "+
			"--checkpoint-dir: want such a folder", o.dir, training.ConfigFile)
	}
	flags, err := training.ReadFlags(file)
	if err != nil { // of the file, not of this command's flags
		text := strings.TrimPrefix(err.Error(), "--config ")
		if !strings.HasPrefix(text, file) {
			text = file + ": " + text
		}
		return nil, fmt.Errorf("--from %s: %s\nthe file has the flags of lockstep train: restore the one that it wrote, or "+
			"train again", o.dir, text)
	}
	r := &savedRun{from: o, flags: flags, config: file}
	r.flags.Data.FindTokenizer(o.dir)
	if err := r.loadWeights(); err != nil {
		return nil, fmt.Errorf("--from %s: %w", o.dir, err)
	}
	return r, nil
}

// prepare reads what the metadata of the weights say about the inputs.
func (r *savedRun) prepare() (err error) {
	if r.flags.Data.Prepared, err = datasets.PreparationOf(r.metadata, &r.flags.Data); err != nil {
		return r.explain(err)
	}
	return nil
}

// loadWeights reads the file of weights or, if there is none, the newest snapshot.
func (r *savedRun) loadWeights() (err error) {
	r.source = filepath.Join(r.from.dir, training.WeightsFile)
	if _, e := os.Stat(r.source); e == nil {
		var tensors []checkpoint.Tensor
		tensors, r.metadata, err = checkpoint.Load(r.source)
		for _, t := range tensors {
			r.weights = append(r.weights, train.Weight(t))
		}
		return err
	}
	s, _, err := checkpoint.Latest(r.from.dir)
	switch {
	case err != nil:
		return err
	case s == nil:
		return fmt.Errorf("the folder has no %s and no snapshot: let lockstep train finish an epoch, or stop it with "+
			"Ctrl-C, which writes both", training.WeightsFile)
	}
	r.source = s.Path
	state, err := train.SnapshotOf(&s.Contents)
	if err != nil {
		return fmt.Errorf("%s: %w", s.Path, err)
	}
	r.metadata = state.Metadata
	if r.weights = state.Variables; r.flags.Averages() && state.Step > 0 {
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
func (r *savedRun) loadExamples() (*datasets.Examples, error) {
	x, ok, err := r.flags.Data.PreparedExamples()
	if !ok {
		x, err = datasets.Kinds[r.flags.Data.Name].Load(&r.flags.Data, r.flags.Positions)
	}
	hint := ""
	if errors.Is(err, fs.ErrNotExist) && !ok {
		hint = "\nwithout the data of the training, give other data: --data-file, --data-dir or, for predict, files"
	}
	if err != nil {
		return nil, fmt.Errorf("reading the data of %s: %w%s", r.from.dir, err, hint)
	}
	return x, nil
}

// predictor compiles the predictions of the run's model for one row of each input.
func (r *savedRun) predictor(ctx context.Context, e engine.Engine, x *datasets.Examples, batch int,
) (*train.Predictor, error) {
	inputs, _ := x.Features()
	return r.predictorOf(ctx, e, r.flags.NewModel(x, nil), inputs, batch)
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
	hint := ""
	if r.flags != nil {
		hint = "\nif the tokenizer or the classes of the data have changed, restore them or train again"
	}
	return fmt.Errorf("%s does not fit the model in %s: %w%s", r.source, r.config, err, hint)
}
