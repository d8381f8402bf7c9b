package predict

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/datasets"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/train"
)

// evalFlags are the flags of lockstep eval.
type evalFlags struct {
	from            savedFlags
	file, dir       string
	replicas, batch int
	format          string
}

// NewEval returns lockstep eval.
func NewEval() *cobra.Command {
	var o evalFlags
	cmd := &cobra.Command{
		Use:   "eval",
		Short: "Evaluate the weights of a run on test data",
		Long: `Eval computes loss and accuracy of the weights that lockstep train has written,
the perplexity of a text, and the errors of a regression. The data are the test
data of the training or, with --data-file or --data-dir, other data, all of
them. Other data need none of the training: the weights say how inputs are made.`,
		Example: `  lockstep eval --from run1
  lockstep eval --from run1 --data-file other.txt
  lockstep eval --from run2 --data-dir photos --format json`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cli.Interruptible(cmd, o.run)
		},
	}
	f := cmd.Flags()
	o.from.add(f)
	f.StringVar(&o.file, "data-file", "", "`file` of csv, parquet or text to evaluate on")
	f.StringVar(&o.dir, "data-dir", "", "`folder` of images to evaluate on, a subfolder for each class")
	f.IntVar(&o.replicas, "replicas", 0, "number of replicas (default one per core)")
	f.IntVar(&o.batch, "global-batch", 0, "examples that are computed at once (default that of the training)")
	cli.ChoiceVar(f, &o.format, "format", "table", "", "table", "json")
	o.from.engine.Add(f)
	cli.Limit(f, fmt.Sprintf("[0,%d]", setup.ReplicasMax), "replicas")
	cli.Limit(f, "[0,)", "global-batch")
	return cmd
}

// loadOther reads a run, and its test data or, if a file or folder is given, these data.
func (o savedFlags) loadOther(file, dir string) (*savedRun, *datasets.Examples, error) {
	r, err := o.load()
	if err == nil {
		err = r.prepare()
	}
	if err != nil {
		return nil, nil, err
	}
	d := &r.flags.Data
	switch kind := d.Name; {
	case file != "" && dir != "":
		return nil, nil, cli.Usagef("--data-file and --data-dir exclude each other: give one of them")
	case file != "" && slices.Contains(datasets.Tables, kind):
		if err := d.UseTable(file); err != nil {
			return nil, nil, err
		}
	case file != "" && kind == "text", dir != "" && kind == "images":
		d.Evaluated = file + dir
	case dir != "" && kind == "mnist":
		d.Dir = dir
	case file != "":
		return nil, nil, cli.Usagef("--data-file is for runs of --data csv, parquet and text: %s is a run of --data %s",
			o.dir, kind)
	case dir != "":
		return nil, nil, cli.Usagef("--data-dir is for runs of --data images and mnist: %s is a run of --data %s", o.dir,
			kind)
	}
	x, err := r.loadExamples()
	return r, x, err
}

// evaluation is the result of lockstep eval.
type evaluation struct {
	Data       string                `json:"data"`
	Model      string                `json:"model"`
	Weights    string                `json:"weights"` // the file or snapshot
	Unit       string                `json:"unit"`    // of an example
	Examples   int                   `json:"examples"`
	Loss       cli.Number            `json:"loss"`
	Accuracy   cli.Number            `json:"accuracy"`             // null: a regression has none
	Metrics    map[string]cli.Number `json:"metrics"`              // all
	Perplexity cli.Number            `json:"perplexity,omitempty"` // of a text
}

func (o *evalFlags) run(ctx context.Context, out io.Writer) (err error) {
	r, x, err := o.from.loadOther(o.file, o.dir)
	if err != nil {
		return err
	}
	result, err := o.evaluate(ctx, r, x)
	if err != nil {
		return err
	}
	e := evaluation{
		Data: r.flags.Data.Name, Model: r.flags.Model, Weights: r.source, Unit: x.Unit, Examples: x.Test.Len(),
		Loss: cli.Number(result.Loss), Accuracy: datasets.Accuracy(result), Metrics: datasets.Numbers(result),
	}
	if x.Text {
		e.Perplexity = cli.Number(math.Exp(result.Loss))
	}
	if o.format == "json" {
		return cli.WriteJSON(out, e)
	}
	var t cli.Table
	t.Row("model", "%s, weights of %s", e.Model, e.Weights)
	t.Row("data", "%s: %s %s", e.Data, cli.Grouped(e.Examples), x.Described(e.Examples))
	x.Rows(&t, "", result)
	return t.Print(out)
}

// evaluate computes loss and metrics on the test data, as lockstep train does.
func (o *evalFlags) evaluate(ctx context.Context, r *savedRun, x *datasets.Examples) (result train.Result, err error) {
	batch := o.batch
	if batch == 0 {
		batch = max(r.flags.GlobalBatch, r.flags.BatchPerReplica)
	}
	replicas := o.replicas
	if replicas == 0 {
		replicas = min(runtime.GOMAXPROCS(0), batch)
	}
	s, err := setup.OpenSession(ctx, setup.SessionConfig{
		Engine: o.from.engine, Replicas: o.replicas, LogicalCPUs: replicas, GlobalBatch: batch,
	})
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	inputs, labels := x.Features()
	m := r.flags.NewModel(x, setup.Optimizers["sgd"].Make(1, setup.DefaultOptimizer))
	if err := s.Compile(ctx, m, inputs, labels); err != nil {
		return result, err
	}
	loaded, err := s.Trainer.LoadWeights(r.weights, train.LoadOptions{Partial: true})
	if err == nil {
		err = r.complete(loaded)
	} else {
		err = r.explain(err)
	}
	if err != nil {
		return result, err
	}
	result, err = s.Trainer.Evaluate(ctx, x.Test.Batch(batch))
	if err != nil {
		err = fmt.Errorf("evaluating: %w", err)
	}
	return result, err
}
