package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/data/parquet"
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
	columns         []string
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
	f.StringVar(&o.name, "data", "digits", "data: digits (built in), mnist, images (a folder per class), csv and parquet "+
		"(rows of a table), text (sequences of tokens)")
	f.StringVar(&o.dir, "data-dir", "", "`folder` of the IDX files of mnist, gzipped or not, or of the images")
	f.StringSliceVar(&o.files, "data-file", nil, "`file` of csv, parquet or text; several for parquet and text (default "+
		"for text: made-up sums such as 12+30=42); csv and text may be gzipped")
	f.IntVar(&o.shift, "shift", 0, "shift training images at random by up to this many pixels (default 1 for digits, 0 "+
		"for others)")
	f.Float64Var(&o.validationSplit, "validation-split", 0,
		"fraction of the training data to hold out and evaluate after each epoch, from 0 to 1")
	o.set = pflag.NewFlagSet("", pflag.ContinueOnError)
	o.set.SortFlags = false
	o.set.Float64Var(&o.testSplit, "test-split", 0.1, "fraction of the data to hold out as test data, if there are none "+
		"(images: a folder test beside train; csv and parquet: --test-file); of a text, the end")
	o.set.StringVar(&o.imageSize, "image-size", "", "resize images to this `size`, 32 or 48x32 (width x height), cropped "+
		"to its shape (default that of the first image, which all must have)")
	o.set.IntVar(&o.channels, "channels", 3, "channels of images: 1 for grey, 3 for colour")
	o.set.BoolVar(&o.flip, "flip", false, "mirror half of the training images, left to right")
	o.set.StringVar(&o.testFile, "test-file", "", "`file` of csv or parquet with the test data")
	o.set.StringSliceVar(&o.columns, "columns", nil, "columns of csv or parquet to read, with the label (default all)")
	o.set.StringVar(&o.label, "label", "", "column of csv or parquet to predict, which has classes: texts, or numbers "+
		"from 0 (default the last); with --loss, any numbers")
	o.set.StringVar(&o.loss, "loss", "", "regression: the column to predict is a number, by the mean squared "+
		"error (mse), the mean absolute error (mae) or the Huber loss (huber)")
	o.set.StringSliceVar(&o.textColumns, "text-columns", nil, "columns of csv that are text, one category per value; "+
		"others are numbers (parquet has types)")
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
		load: (*dataFlags).loadTable,
		flags: []string{
			"data-file", "test-split", "test-file", "columns", "label", "loss", "text-columns", "missing", "no-header",
		},
		needs: "data-file", epochs: 10, batch: 64, model: "mlp",
	},
	"parquet": {
		load:  (*dataFlags).loadTable,
		flags: []string{"data-file", "test-split", "test-file", "columns", "label", "loss"},
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
			stray = usagef("--%s is for --data %s, not %s", name, allOf(takers), o.name)
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
			"csv": "the file to read", "parquet": "the files to read",
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
	case given("columns") && len(o.columns) == 0:
		return usagef("--columns: no names: want those of the columns to read")
	}
	for i, name := range o.columns {
		if slices.Contains(o.columns[:i], name) {
			return usagef("--columns: %s twice: want each column once", name)
		}
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
	field, column := (*data.FieldError)(nil), (*parquet.ColumnError)(nil)
	switch {
	case errors.As(err, &column):
		return fmt.Errorf("%w\nto leave the column out, name the others in --columns", err)
	case errors.As(err, &field):
		return fmt.Errorf("%w\nif the column is text, list it in --text-columns; if the field means a missing value, list "+
			"it in --missing; if the file has no line of names, give --no-header; to leave the column out, name the "+
			"others in --columns", err)
	case errors.Is(err, data.ErrImageSize):
		return fmt.Errorf("%w\nto resize the images, give --image-size", err)
	}
	return err
}
