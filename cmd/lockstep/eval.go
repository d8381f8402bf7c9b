package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/train"
)

// evalFlags are the flags of lockstep eval.
type evalFlags struct {
	from            savedFlags
	file, dir       string
	replicas, batch int
	format          string
}

func newEval() *cobra.Command {
	var o evalFlags
	cmd := &cobra.Command{
		Use:   "eval",
		Short: "Evaluate the weights of a run on test data",
		Long: `Eval computes loss and accuracy of the weights that lockstep train has written,
the perplexity of a text, and the errors of a regression. The data are the test
data of the training or, with --data-file or --data-dir, other data, all of
them. The data of the training must still be where they were: the classes and
the scale of the inputs follow from them (except for text).`,
		Example: `  lockstep eval --from run1
  lockstep eval --from run1 --data-file other.txt
  lockstep eval --from run2 --data-dir photos --format json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return interruptible(cmd, o.run)
		},
	}
	f := cmd.Flags()
	o.from.add(f)
	f.StringVar(&o.file, "data-file", "", "`file` of csv, parquet or text to evaluate on")
	f.StringVar(&o.dir, "data-dir", "", "`folder` of images to evaluate on, a subfolder for each class")
	f.IntVar(&o.replicas, "replicas", 0, "number of replicas (default one per core)")
	f.IntVar(&o.batch, "global-batch", 0, "examples that are computed at once (default that of the training)")
	f.StringVar(&o.format, "format", "table", "table or json")
	o.from.addEngine(f)
	return cmd
}

// loadOther reads a run, and its test data or, if a file or folder is given, these data.
func (o savedFlags) loadOther(file, dir string) (*savedRun, *examples, error) {
	r, err := o.load()
	if err != nil {
		return nil, nil, err
	}
	d := &r.flags.data
	switch kind := d.name; {
	case file != "" && dir != "":
		return nil, nil, usagef("--data-file and --data-dir exclude each other: give one of them")
	case file != "" && slices.Contains(tables, kind):
		d.testFile = file
	case file != "" && kind == "text", dir != "" && kind == "images":
		d.evaluated = file + dir
	case dir != "" && kind == "mnist":
		d.dir = dir
	case file != "":
		return nil, nil, usagef("--data-file is for runs of --data csv, parquet and text: %s is a run of --data %s", o.dir,
			kind)
	case dir != "":
		return nil, nil, usagef("--data-dir is for runs of --data images and mnist: %s is a run of --data %s", o.dir, kind)
	}
	x, err := r.loadExamples()
	return r, x, err
}

// evaluation is the result of lockstep eval.
type evaluation struct {
	Data       string            `json:"data"`
	Model      string            `json:"model"`
	Weights    string            `json:"weights"` // the file or snapshot
	Unit       string            `json:"unit"`    // of an example
	Examples   int               `json:"examples"`
	Loss       number            `json:"loss"`
	Accuracy   number            `json:"accuracy"`             // null: a regression has none
	Metrics    map[string]number `json:"metrics"`              // all
	Perplexity number            `json:"perplexity,omitempty"` // of a text
}

func (o *evalFlags) run(ctx context.Context, out io.Writer) (err error) {
	switch {
	case o.format != "table" && o.format != "json":
		return usagef("--format %s: want table or json", o.format)
	case o.replicas < 0 || o.replicas > replicasMax:
		return usagef("--replicas %d: want 1 to %d", o.replicas, replicasMax)
	case o.batch < 0:
		return usagef("--global-batch %d: want at least 1", o.batch)
	}
	r, x, err := o.from.loadOther(o.file, o.dir)
	if err != nil {
		return err
	}
	result, err := o.evaluate(ctx, r, x)
	if err != nil {
		return err
	}
	e := evaluation{
		Data: r.flags.data.name, Model: r.flags.model, Weights: r.source, Unit: x.unit, Examples: x.test.Len(),
		Loss: number(result.Loss), Accuracy: accuracy(result), Metrics: numbersOf(result),
	}
	if x.text {
		e.Perplexity = number(math.Exp(result.Loss))
	}
	if o.format == "json" {
		return writeJSON(out, e)
	}
	var t table
	t.row("model", "%s, weights of %s", e.Model, e.Weights)
	t.row("data", "%s: %s %s", e.Data, grouped(e.Examples), x.described(e.Examples))
	x.rows(&t, "", result)
	return t.print(out)
}

// evaluate computes loss and metrics on the test data, as lockstep train does.
func (o *evalFlags) evaluate(ctx context.Context, r *savedRun, x *examples) (result train.Result, err error) {
	batch := o.batch
	if batch == 0 {
		batch = max(r.flags.globalBatch, r.flags.batchPerReplica)
	}
	replicas := o.replicas
	if replicas == 0 {
		replicas = min(runtime.GOMAXPROCS(0), batch)
	}
	s, err := openSession(ctx, sessionConfig{
		engine: o.from.engine, plugin: o.from.plugin, replicas: o.replicas, logicalCPUs: replicas, globalBatch: batch,
	})
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	inputs, labels := x.features()
	m := r.flags.newModel(x, optimizers["sgd"].make(1, defaultOptimizer))
	if err := s.compile(ctx, m, inputs, labels); err != nil {
		return result, err
	}
	loaded, err := s.trainer.LoadWeights(r.weights, train.LoadOptions{Partial: true})
	if err == nil {
		err = r.complete(loaded)
	} else {
		err = r.explain(err)
	}
	if err != nil {
		return result, err
	}
	result, err = s.trainer.Evaluate(ctx, x.test.Batch(batch))
	if err != nil {
		err = fmt.Errorf("evaluating: %w", err)
	}
	return result, err
}
