package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/data/tokenizer"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// dataFlags are the flags of lockstep train that describe the data.
type dataFlags struct {
	name            string
	dir, testFile   string
	files           []string
	imageSize       string
	height, width   int // imageSize as numbers; 0: not given
	channels        int
	label           string
	loss            string // of a column of numbers; "": the column has classes
	textColumns     []string
	missing         []string
	noHeader        bool
	tokenizer       string
	testSplit       float64
	validationSplit float64
	shift           int
	flip            bool
	set             *pflag.FlagSet // the flags of single data sets

	// evaluated is a file of text or a folder of images that is the test data instead; "": none
	evaluated string
	// unlabelled: the labels in testFile are not used, and may be missing
	unlabelled bool
}

func (o *dataFlags) add(f *pflag.FlagSet) {
	f.StringVar(&o.name, "data", "digits", "data: digits (built in), mnist, images (a folder per class), csv (rows of a "+
		"table), text (sequences of tokens)")
	f.StringVar(&o.dir, "data-dir", "", "`folder` of the IDX files of mnist, gzipped or not, or of the images")
	f.StringSliceVar(&o.files, "data-file", nil, "`file` of csv or text, gzipped or not; several for text (default for "+
		"text: made-up sums such as 12+30=42)")
	f.IntVar(&o.shift, "shift", 0, "shift training images at random by up to this many pixels (default 1 for digits, 0 "+
		"for others)")
	f.Float64Var(&o.validationSplit, "validation-split", 0,
		"fraction of the training data to hold out and evaluate after each epoch, from 0 to 1")
	o.set = pflag.NewFlagSet("", pflag.ContinueOnError)
	o.set.SortFlags = false
	o.set.Float64Var(&o.testSplit, "test-split", 0.1, "fraction of the data to hold out as test data, if there are none "+
		"(images: a folder test beside train; csv: --test-file); of a text, the end")
	o.set.StringVar(&o.imageSize, "image-size", "", "resize images to this `size`, 32 or 48x32 (width x height), cropped "+
		"to its shape (default that of the first image, which all must have)")
	o.set.IntVar(&o.channels, "channels", 3, "channels of images: 1 for grey, 3 for colour")
	o.set.BoolVar(&o.flip, "flip", false, "mirror half of the training images, left to right")
	o.set.StringVar(&o.testFile, "test-file", "", "`file` of csv with the test data")
	o.set.StringVar(&o.label, "label", "", "column of csv to predict, which has classes: texts, or numbers from 0 "+
		"(default the last); with --loss, any numbers")
	o.set.StringVar(&o.loss, "loss", "", "regression: the column of csv to predict is a number, by the mean squared "+
		"error (mse), the mean absolute error (mae) or the Huber loss (huber)")
	o.set.StringSliceVar(&o.textColumns, "text-columns", nil, "columns of csv that are text, one category per value; "+
		"others are numbers")
	o.set.StringSliceVar(&o.missing, "missing", nil, "fields of csv that mean a missing value, such as ? or NA, "+
		"beside empty fields")
	o.set.BoolVar(&o.noHeader, "no-header", false, "the first line of csv has no names; columns are named 0, 1, …")
	o.set.StringVar(&o.tokenizer, "tokenizer", "", "tokenizer.json `file` of Hugging Face, for text (default the bytes)")
	f.AddFlagSet(o.set)
}

// dataSet is a kind of data for training, with its default options.
type dataSet struct {
	load   func(o *dataFlags, length int) (*examples, error)
	flags  []string // those of dataFlags.set that it takes, and data-dir and data-file
	needs  string   // the flag without which it cannot be read
	epochs int
	batch  int    // global
	shift  int    // pixels
	side   int    // of its images, in pixels; 0: unknown
	model  string // by default
	rate   float64
}

var dataSets = map[string]dataSet{
	"digits": {
		load: func(*dataFlags, int) (*examples, error) {
			set, err := digits.Load()
			return imageExamples(set, err)
		},
		epochs: 25, batch: 64, shift: 1, side: 8, model: "cnn",
	},
	"mnist": {
		load: func(o *dataFlags, _ int) (*examples, error) {
			set, err := data.MNIST(o.dir)
			return imageExamples(set, err)
		},
		flags: []string{"data-dir"}, needs: "data-dir", epochs: 3, batch: 128, side: 28, model: "cnn",
	},
	"images": {
		load:  (*dataFlags).loadImages,
		flags: []string{"data-dir", "test-split", "image-size", "channels", "flip"}, needs: "data-dir",
		epochs: 10, batch: 64, model: "cnn",
	},
	"csv": {
		load:  (*dataFlags).loadCSV,
		flags: []string{"data-file", "test-split", "test-file", "label", "loss", "text-columns", "missing", "no-header"},
		needs: "data-file", epochs: 10, batch: 64, model: "mlp",
	},
	"text": {
		load:  (*dataFlags).loadText,
		flags: []string{"data-file", "test-split", "tokenizer"}, epochs: 5, batch: 32, model: "gpt", rate: 0.001,
	},
}

// check returns an error for flags that do not fit the data.
func (o *dataFlags) check(given func(flag string) bool) error {
	set := dataSets[o.name]
	var stray error
	visit := func(name string) {
		if stray == nil && given(name) && !slices.Contains(set.flags, name) {
			var takers []string
			for _, other := range sorted(dataSets) {
				if slices.Contains(dataSets[other].flags, name) {
					takers = append(takers, other)
				}
			}
			stray = usagef("--%s is for --data %s, not %s", name, strings.Join(takers, " and "), o.name)
		}
	}
	visit("data-dir")
	visit("data-file")
	o.set.VisitAll(func(f *pflag.Flag) { visit(f.Name) })
	if stray != nil {
		return stray
	}
	if set.needs != "" && !given(set.needs) {
		what := map[string]string{
			"mnist": "the folder of its IDX files", "images": "the folder with a subfolder of images per class",
			"csv": "the file to read",
		}
		return usagef("--data %s needs --%s, %s", o.name, set.needs, what[o.name])
	}
	switch {
	case !(o.validationSplit >= 0 && o.validationSplit < 1):
		return usagef("--validation-split %v: want at least 0 and less than 1", o.validationSplit)
	case !(o.testSplit > 0 && o.testSplit < 1):
		return usagef("--test-split %v: want more than 0 and less than 1", o.testSplit)
	case o.channels != 1 && o.channels != 3:
		return usagef("--channels %d: want 1 or 3", o.channels)
	case o.shift < 0:
		return usagef("--shift %d: want at least 0", o.shift)
	case o.shift > 0 && set.model != "cnn":
		return usagef("--shift is for images, not --data %s", o.name)
	case o.loss != "" && regressionLosses[o.loss] == nil:
		return usagef("--loss %s: want %s", o.loss, oneOf(sorted(regressionLosses)))
	case o.name == "csv" && len(o.files) != 1:
		return usagef("--data-file: %d files for --data csv: want one, and --test-file for the test data", len(o.files))
	}
	if given("image-size") {
		if err := o.parseImageSize(); err != nil {
			return err
		}
	}
	side := set.side
	if o.height > 0 {
		side = min(o.height, o.width)
	}
	if side > 0 && o.shift >= side {
		return usagef("--shift %d: want less than %d, the width in pixels of an image of %s", o.shift, side, o.name)
	}
	return nil
}

func (o *dataFlags) parseImageSize() (err error) {
	width, height, both := strings.Cut(o.imageSize, "x")
	if !both {
		height = width
	}
	if o.width, err = strconv.Atoi(width); err == nil {
		o.height, err = strconv.Atoi(height)
	}
	if err != nil || o.width < 1 || o.height < 1 || o.width > imageSideMax || o.height > imageSideMax {
		return usagef("--image-size %s: want a width and height from 1 to %d, such as 32 or 48x32", o.imageSize,
			imageSideMax)
	}
	return nil
}

const imageSideMax = 4096

// examples are the data of a training.
type examples struct {
	train, test data.Pipeline
	unit        string      // what an example is, in the plural: images
	what        string      // "images of 28x28x1"
	shape       []int       // of an input
	classes     int         // of the labels; the size of the vocabulary of a text
	names       []string    // of the classes; nil: numbers
	text        bool        // inputs and labels are sequences of tokens
	regression  *regression // nil: the labels are classes
}

// described describes n examples. They are in the plural in x.what.
func (x *examples) described(n int) string {
	if n != 1 {
		return x.what
	}
	return strings.TrimSuffix(x.unit, "s") + strings.TrimPrefix(x.what, x.unit)
}

// features returns one row of the inputs and labels.
func (x *examples) features() (inputs, labels []engine.Feature) {
	if x.text {
		sequence := []engine.Feature{{DType: tensor.Int32, Shape: x.shape}}
		return sequence, sequence
	}
	labels = []engine.Feature{{DType: tensor.Int32}}
	if x.regression != nil {
		labels[0].DType = tensor.Float32
	}
	return []engine.Feature{{DType: tensor.Float32, Shape: x.shape}}, labels
}

// imageExamples returns the examples of a data set of images.
func imageExamples(set *data.Set, err error) (*examples, error) {
	if err != nil {
		return nil, err
	}
	x := &examples{train: set.Train, test: set.Test, unit: "images", shape: set.Shape, classes: set.Classes}
	x.what = fmt.Sprintf("images of %dx%dx%d", x.shape[0], x.shape[1], x.shape[2])
	return x, nil
}

// testFolders are the names of folders of test images beside a folder train.
var testFolders = []string{"test", "val", "valid", "validation"}

// loadImages lists the images in a folder. If it has subfolders train and test, they are the training and test data.
func (o *dataFlags) loadImages(int) (*examples, error) {
	options := data.ImageOptions{Height: o.height, Width: o.width, Channels: o.channels, Crop: true}
	dir, test := o.dir, o.evaluated
	if info, err := os.Stat(filepath.Join(dir, "train")); err == nil && info.IsDir() {
		for _, name := range testFolders {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.IsDir() {
				dir, test = filepath.Join(o.dir, "train"), cmp.Or(test, filepath.Join(o.dir, name))
				break
			}
		}
	}
	all, err := data.ImageFolder(dir, options)
	if err != nil {
		return nil, o.explain(err)
	}
	set := &data.Set{Shape: all.Shape, Classes: len(all.Classes), Train: all.Images}
	if test == "" {
		set.Train, set.Test = all.Images.Split(o.testSplit, splitSeed)
	} else {
		options.Classes, options.Height, options.Width = all.Classes, all.Shape[0], all.Shape[1]
		held, err := data.ImageFolder(test, options)
		if err != nil {
			return nil, o.explain(err)
		}
		set.Test = held.Images
	}
	x, err := imageExamples(set, o.checkSplit("images", set.Train, set.Test))
	if err == nil {
		x.names = all.Classes
	}
	return x, err
}

// splitSeed is the seed by which test data are chosen. It is fixed, so that other seeds train on the same data.
const splitSeed = 1

// checkSplit returns an error if the training or the test data are empty.
func (o *dataFlags) checkSplit(unit string, train, test data.Pipeline) error {
	if train.Len() == 0 || test.Len() == 0 {
		return usagef("--test-split %v: of %d %s, this leaves %d for training and %d for the test", o.testSplit,
			train.Len()+test.Len(), unit, train.Len(), test.Len())
	}
	return nil
}

// loadCSV reads a table. Numbers are standardised by the mean and deviation of the training rows, and texts become
// one-hot vectors; missing numbers become the mean, missing texts zeros. Rows without a label are left out.
func (o *dataFlags) loadCSV(int) (*examples, error) {
	format := data.CSV{
		NoHeader: o.noHeader, Missing: append([]string{""}, o.missing...), Categories: map[string][]string{},
	}
	for _, name := range o.textColumns {
		format.Categories[strings.TrimSpace(name)] = nil
	}
	table, err := data.LoadCSV(o.files[0], format)
	if err != nil {
		return nil, o.explain(err)
	}
	label := o.label
	if label == "" {
		label = table.Names[len(table.Names)-1]
	}
	if table, err = table.DropMissing(label); err != nil {
		return nil, usagef("--label: %v", err)
	}
	complete, err := table.DropMissing()
	if err != nil {
		return nil, err
	}
	incomplete := table.Rows() - complete.Rows()
	held := (*data.Frame)(nil)
	if o.testFile != "" {
		format.Categories = table.Categories
		if held, err = o.loadTestCSV(format, label); err != nil {
			return nil, err
		}
		if got, want := held.Without(label), table.Without(label); !slices.Equal(got, want) {
			return nil, fmt.Errorf("%s has the columns %s: want those of %s, %s", o.testFile, strings.Join(got, ", "),
				o.files[0], strings.Join(want, ", "))
		}
	}
	if held == nil {
		if table, held, err = splitRows(table, o.testSplit); err != nil {
			return nil, err
		}
	}
	x := &examples{unit: "rows", names: table.Categories[label]}
	means := map[string][2]float64{} // and deviations, of the training rows
	if o.loss != "" {
		if x.regression, err = newRegression(o.loss, table, label); err != nil {
			return nil, err
		}
	}
	rows := func(f *data.Frame) (data.Pipeline, error) {
		batch, err := standardised(f, label, means)
		if err != nil {
			return data.Pipeline{}, err
		}
		x.shape = batch.Inputs[0].Shape()[1:]
		if x.regression != nil {
			batch.Labels[0], err = x.regression.labels(f, label)
			return data.FromTensors(batch), err
		}
		labels, err := f.Ints(label)
		if err != nil {
			return data.Pipeline{}, fmt.Errorf("--label %s: %w\nto predict numbers that are no classes, give --loss mse", label,
				err)
		}
		batch.Labels[0] = labels
		for i, class := range tensor.Data[int32](batch.Labels[0]) {
			if class < 0 || class >= classesMax {
				return data.Pipeline{}, fmt.Errorf("--label %s: row %d has the class %d: want 0 to %d, or list the column in "+
					"--text-columns, or give --loss mse to predict numbers", label, i, class, classesMax-1)
			}
			x.classes = max(x.classes, int(class)+1)
		}
		return data.FromTensors(batch), nil
	}
	if x.train, err = rows(table); err != nil {
		return nil, err
	}
	if x.test, err = rows(held); err != nil {
		return nil, err
	}
	x.what = fmt.Sprintf("rows of %s, %s to predict %s", count(len(table.Names)-1, "column"), count(x.shape[0], "number"),
		label)
	if incomplete > 0 {
		x.what += fmt.Sprintf("; %s with missing values", count(incomplete, "row"))
	}
	return x, o.checkSplit("rows", x.train, x.test)
}

// splitRows divides a table in training and test rows, by chance.
func splitRows(table *data.Frame, fraction float64) (kept, held *data.Frame, err error) {
	numbers := data.FromFunc(table.Rows(), func(_ context.Context, i int) (data.Element, error) { return i, nil })
	pick := func(p data.Pipeline) (f *data.Frame, err error) {
		var rows []int
		for e, err := range p.Iter(context.Background()) {
			if err != nil {
				return nil, err
			}
			rows = append(rows, e.(int))
		}
		return table.Select(rows)
	}
	train, test := numbers.Split(fraction, splitSeed)
	if kept, err = pick(train); err == nil {
		held, err = pick(test)
	}
	return kept, held, err
}

// loadTestCSV reads the table of test data. If its labels are not used, a column without values replaces them.
func (o *dataFlags) loadTestCSV(format data.CSV, label string) (*data.Frame, error) {
	if o.unlabelled {
		format.Categories = maps.Clone(format.Categories)
		all := format.Categories[label]
		delete(format.Categories, label)
		table, err := data.LoadCSV(o.testFile, format)
		if err == nil && !slices.Contains(table.Names, label) {
			return withColumn(table, label), nil
		}
		if all != nil {
			format.Categories[label] = all
		}
	}
	table, err := data.LoadCSV(o.testFile, format)
	switch {
	case err != nil:
		return nil, o.explain(err)
	case o.unlabelled:
		return table, table.Fill(label, 0)
	}
	if table, err = table.DropMissing(label); err != nil {
		return nil, fmt.Errorf("--test-file: %w", err)
	}
	return table, nil
}

// withColumn returns the table with one more column of zeros.
func withColumn(table *data.Frame, name string) *data.Frame {
	var values []float64
	for row := range slices.Chunk(tensor.Data[float64](table.Values), len(table.Names)) {
		values = append(append(values, row...), 0)
	}
	names := append(slices.Clone(table.Names), name)
	return &data.Frame{
		Names: names, Values: tensor.Of(values, table.Rows(), len(names)), Categories: table.Categories,
	}
}

// classesMax is the largest number of classes of a column, so that a typing error is not taken for a class.
const classesMax = 1 << 16

// standardised returns the rows of a table without labels: the inputs are all columns but the label. It
// computes means and deviations that are not in means yet.
func standardised(f *data.Frame, label string, means map[string][2]float64) (batch data.Batch, err error) {
	var columns [][]float32 // one after the other
	for _, name := range f.Without(label) {
		if f.Categories[name] != nil {
			hot, err := f.OneHot(name)
			if err != nil {
				return data.Batch{}, err
			}
			values, width := tensor.Data[float32](hot), hot.Shape()[1]
			for c := range width {
				column := make([]float32, f.Rows())
				for row := range column {
					column[row] = values[row*width+c]
				}
				columns = append(columns, column)
			}
			continue
		}
		by, ok := means[name]
		if !ok {
			if by[0], by[1], err = f.Mean(name); err != nil {
				return data.Batch{}, err
			}
			if math.IsNaN(by[0]) {
				return data.Batch{}, fmt.Errorf("column %q: all values are missing: remove it", name)
			}
			if by[1] == 0 {
				by[1] = 1
			}
			means[name] = by
		}
		if err := f.Fill(name, by[0]); err != nil {
			return data.Batch{}, err
		}
		values, err := f.Floats(name)
		if err != nil {
			return data.Batch{}, err
		}
		column := tensor.Data[float32](values)
		for i, v := range column {
			column[i] = float32((float64(v) - by[0]) / by[1])
		}
		columns = append(columns, column)
	}
	if len(columns) == 0 {
		return data.Batch{}, fmt.Errorf("the only column is the label, %s: want others to predict it from", label)
	}
	inputs := make([]float32, 0, f.Rows()*len(columns))
	for row := range f.Rows() {
		for _, column := range columns {
			inputs = append(inputs, column[row])
		}
	}
	return data.Batch{
		Inputs: []*tensor.Tensor{tensor.Of(inputs, f.Rows(), len(columns))}, Labels: []*tensor.Tensor{nil},
	}, nil
}

// loadText reads texts as sequences of length tokens. The end of the text is the test data.
func (o *dataFlags) loadText(length int) (*examples, error) {
	tokens, err := o.loadTokenizer()
	if err != nil {
		return nil, err
	}
	files := o.files
	if o.evaluated != "" {
		files = []string{o.evaluated}
	}
	var all *tensor.Tensor
	if len(files) > 0 {
		all, err = data.LoadText(tokens, files...)
	} else {
		var made []int32
		made, err = tokens.Encode(sums())
		all = tensor.Of(made)
	}
	if err != nil {
		return nil, err
	}
	sequences, err := data.Sequences(all, length)
	if err != nil {
		return nil, fmt.Errorf("--data-file: %w", err)
	}
	n := sequences.Len()
	held := max(1, int(math.RoundToEven(o.testSplit*float64(n))))
	if o.evaluated != "" {
		held = n
	}
	x := &examples{
		train: sequences.Take(n - held), test: sequences.Skip(n - held), unit: "sequences", text: true,
		what: fmt.Sprintf("sequences of %d tokens (%s of text, vocabulary of %s)", length, count(all.Len(), "token"),
			grouped(tokens.Size())),
		shape: []int{length}, classes: tokens.Size(),
	}
	if o.evaluated != "" {
		return x, nil
	}
	return x, o.checkSplit("sequences", x.train, x.test)
}

// loadTokenizer returns the tokenizer of a text.
func (o *dataFlags) loadTokenizer() (data.Tokenizer, error) {
	if o.tokenizer == "" {
		return data.Bytes{}, nil
	}
	t, err := tokenizer.Load(o.tokenizer)
	if err != nil {
		return nil, fmt.Errorf("--tokenizer: %w", err)
	}
	return t, nil
}

// sums returns the text that is trained on if no file is given: all sums of two numbers below 100, in random order.
func sums() string {
	list := make([]string, 0, 100*100)
	for a := range 100 {
		for b := range 100 {
			list = append(list, fmt.Sprintf("%d+%d=%d\n", a, b, a+b))
		}
	}
	state := uint64(1)
	for i := len(list) - 1; i > 0; i-- { // Fisher and Yates, by a linear congruential generator (Knuth's MMIX)
		state = state*6364136223846793005 + 1442695040888963407
		j := int((state >> 33) % uint64(i+1))
		list[i], list[j] = list[j], list[i]
	}
	return strings.Join(list, "")
}

// explain adds the flags that may help to an error of reading data.
func (o *dataFlags) explain(err error) error {
	field := (*data.FieldError)(nil)
	switch {
	case errors.As(err, &field):
		return fmt.Errorf("%w\nif the column is text, list it in --text-columns; if the field means a missing value, list "+
			"it in --missing; if the file has no line of names, give --no-header", err)
	case errors.Is(err, data.ErrImageSize):
		return fmt.Errorf("%w\nto resize the images, give --image-size", err)
	}
	return err
}
