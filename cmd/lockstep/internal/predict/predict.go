package predict

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/datasets"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// predictFlags are the flags of lockstep predict.
type predictFlags struct {
	from      savedFlags
	file, dir string
	args      []string
	format    string
}

// predictionsAtOnce is the number of rows of a batch.
const predictionsAtOnce = 64

// NewPredict returns lockstep predict.
func NewPredict() *cobra.Command {
	var o predictFlags
	cmd := &cobra.Command{
		Use:   "predict [FILE...]",
		Short: "Classify images or rows of a table with a trained model, or predict numbers",
		Long: `Predict prints a line for each image or row: its file or number (from 0), the
likeliest class by the weights that lockstep train has written, and the
probability of that class. After a regression (--loss) it prints the predicted
number instead of both. The arguments are images or folders of them, or the file
of a table, which needs no column of labels; --data-dir and --data-file are the
same. The weights say how the inputs are made of them, so the data of the
training are not needed. Without arguments it classifies the test data of the
training.`,
		Example: `  lockstep predict --from run1 a.png b.png
  lockstep predict --from run1 --data-dir photos
  lockstep predict --from run2 new.csv --format json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.args = args
			return cli.Interruptible(cmd, o.run)
		},
	}
	f := cmd.Flags()
	o.from.add(f)
	f.StringVar(&o.file, "data-file", "", "`file` of csv or parquet with the rows to classify")
	f.StringVar(&o.dir, "data-dir", "", "`folder` of images to classify, with or without subfolders")
	cli.ChoiceVar(f, &o.format, "format", "plain", "plain (fields separated by tabs) or json (an object on each line)",
		"plain", "json")
	o.from.engine.Add(f)
	return cmd
}

// prediction is a line of lockstep predict.
type prediction struct {
	Row         int     `json:"row"`
	File        string  `json:"file,omitempty"` // of an image
	Class       string  `json:"class"`
	Probability float64 `json:"probability"`
}

// predictedNumber is a line of lockstep predict after a regression.
type predictedNumber struct {
	Row   int     `json:"row"`
	Value float64 `json:"value"`
}

func (o *predictFlags) run(ctx context.Context, out io.Writer) (err error) {
	r, err := o.from.load()
	if err != nil {
		return err
	}
	files, err := o.inputs(r)
	if err != nil {
		return err
	}
	var x *datasets.Examples
	var batches iter.Seq2[*tensor.Tensor, error]
	if p := r.flags.Data.Prepared; p != nil && files != nil {
		x = &datasets.Examples{Preparation: *p}
	} else if x, err = r.loadExamples(); err != nil {
		return err
	}
	if files != nil {
		batches = imageInputs(files, x.Shape)
	} else {
		batches = testInputs(ctx, x)
	}
	e, err := o.from.engine.Open(1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	p, err := r.predictor(ctx, e, x, predictionsAtOnce)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	return o.predict(ctx, out, p, x, files, batches)
}

// inputs returns the files of the images to classify. A file of rows becomes the test data of the run.
func (o *predictFlags) inputs(r *savedRun) (images []string, err error) {
	d, table := &r.flags.Data, slices.Contains(datasets.Tables, r.flags.Data.Name)
	paths := o.args
	for _, path := range []string{o.file, o.dir} {
		if path != "" {
			paths = append(paths, path)
		}
	}
	switch {
	case d.Name == "text":
		return nil, fmt.Errorf("--from %s: a run of --data text: to continue a text, use lockstep generate", o.from.dir)
	case o.file != "" && !table:
		return nil, cli.Usagef("--data-file is for runs of --data csv and parquet: %s is a run of --data %s", o.from.dir,
			d.Name)
	case o.dir != "" && table:
		return nil, cli.Usagef("--data-dir is for runs of images: %s is a run of --data %s", o.from.dir, d.Name)
	case table && len(paths) > 1:
		return nil, cli.Usagef("%s: a run of --data %s takes one file of rows", strings.Join(paths, ", "), d.Name)
	}
	switch err := r.prepare(); {
	case err != nil:
		return nil, err
	case len(paths) == 0:
		return nil, nil
	case table:
		d.Unlabelled = true
		return nil, d.UseTable(paths[0])
	}
	return filesBelow(paths)
}

// predict prints the predictions of all batches.
func (o *predictFlags) predict(ctx context.Context, out io.Writer, p *train.Predictor, x *datasets.Examples,
	files []string, batches iter.Seq2[*tensor.Tensor, error],
) error {
	w := bufio.NewWriter(out)
	row := 0
	for inputs, err := range batches {
		if err != nil {
			return errors.Join(err, w.Flush())
		}
		results, err := p.Predict(ctx, inputs)
		if err != nil {
			return errors.Join(err, w.Flush())
		}
		if x.Regression != nil {
			for _, predicted := range tensor.Data[float32](results[0]) {
				if err := o.printNumber(w, predictedNumber{row, x.Regression.Value(predicted)}); err != nil {
					return err
				}
				row++
			}
			continue
		}
		for logits := range slices.Chunk(tensor.Data[float32](results[0]), x.Classes) {
			class, probability := likeliest(logits)
			line := prediction{Row: row, Class: strconv.Itoa(class), Probability: probability}
			if x.Names != nil {
				line.Class = x.Names[class]
			}
			if files != nil {
				line.File = files[row]
			}
			if err := o.print(w, line); err != nil {
				return err
			}
			row++
		}
	}
	return w.Flush()
}

func (o *predictFlags) print(w io.Writer, line prediction) error {
	if o.format == "json" {
		if math.IsNaN(line.Probability) {
			return errNotFinite
		}
		return cli.WriteJSON(w, line)
	}
	name := line.File
	if name == "" {
		name = strconv.Itoa(line.Row)
	}
	_, err := fmt.Fprintf(w, "%s\t%s\t%s\n", name, line.Class, shortest(line.Probability))
	return err
}

// printNumber prints the prediction of a regression.
func (o *predictFlags) printNumber(w io.Writer, line predictedNumber) error {
	if o.format == "json" {
		if math.IsNaN(line.Value) || math.IsInf(line.Value, 0) {
			return errNotFinite
		}
		return cli.WriteJSON(w, line)
	}
	_, err := fmt.Fprintf(w, "%d\t%s\n", line.Row, shortest(line.Value))
	return err
}

// shortest formats a number that was computed in float32, without loss.
func shortest(x float64) string { return strconv.FormatFloat(x, 'g', -1, 32) }

// likeliest returns the class of the largest logit, and its probability.
func likeliest(logits []float32) (class int, probability float64) {
	sum := 0.0
	for i, x := range logits {
		if x > logits[class] {
			class = i
		}
	}
	for _, x := range logits {
		sum += math.Exp(float64(x) - float64(logits[class]))
	}
	return class, 1 / sum
}

// testInputs yields the inputs of the test data, in order.
func testInputs(ctx context.Context, x *datasets.Examples) iter.Seq2[*tensor.Tensor, error] {
	return func(yield func(*tensor.Tensor, error) bool) {
		for element, err := range x.Test.Batch(predictionsAtOnce).Iter(ctx) {
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(element.(data.Batch).Inputs[0], nil) {
				return
			}
		}
	}
}

// imageInputs yields images of a shape, read from files.
func imageInputs(files []string, shape []int) iter.Seq2[*tensor.Tensor, error] {
	options := data.ImageOptions{Height: shape[0], Width: shape[1], Channels: shape[2], Crop: true}
	return func(yield func(*tensor.Tensor, error) bool) {
		for batch := range slices.Chunk(files, predictionsAtOnce) {
			inputs := tensor.New(tensor.Float32, append([]int{len(batch)}, shape...)...)
			for i, file := range batch {
				contents, err := os.ReadFile(file)
				if err != nil {
					yield(nil, err)
					return
				}
				pixels, err := data.DecodeImage(contents, options)
				if err != nil {
					yield(nil, fmt.Errorf("%s: %w", file, err))
					return
				}
				copy(tensor.Data[float32](inputs)[i*pixels.Len():], tensor.Data[float32](pixels))
			}
			if !yield(inputs, nil) {
				return
			}
		}
	}
}

// imagesBelow returns the image files in dir and its subfolders, sorted by name.
func imagesBelow(dir string) (files []string, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		hidden := path != dir && strings.HasPrefix(filepath.Base(path), ".")
		switch {
		case err != nil:
			return err
		case hidden && entry.IsDir():
			return filepath.SkipDir
		case !hidden && slices.Contains([]string{".png", ".jpg", ".jpeg", ".gif"}, strings.ToLower(filepath.Ext(path))):
			files = append(files, path)
		}
		return nil
	})
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s: no images: want PNG, JPEG or GIF files in the folder or its subfolders", dir)
	}
	return files, err
}

// filesBelow returns the images among paths, and those in folders among them.
func filesBelow(paths []string) (files []string, err error) {
	for _, path := range paths {
		info, e := os.Stat(path)
		switch {
		case e != nil:
			err = errors.Join(err, e)
		case info.IsDir():
			below, e := imagesBelow(path)
			files, err = append(files, below...), errors.Join(err, e)
		default:
			files = append(files, path)
		}
	}
	return files, err
}
