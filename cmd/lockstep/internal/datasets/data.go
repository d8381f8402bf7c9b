// Package datasets reads the data sets of lockstep train by its flags, and describes how the inputs of a model are
// made, so that other commands can use its weights.
package datasets

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

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/data/parquet"
	"github.com/lockstep-ml/lockstep/data/tokenizer"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Flags are the flags of lockstep train that describe the data.
type Flags struct {
	Name            string
	Dir, testFile   string
	files           []string
	imageSize       string
	height, width   int // imageSize as numbers; 0: not given
	channels        int
	columns         []string
	label           string
	loss            string // of a column of numbers; "": the column has classes
	textColumns     []string
	dateColumns     []string
	dropColumns     []string
	missing         []string
	noHeader        bool
	tokenizer       string
	testSplit       float64
	ValidationSplit float64
	Shift           int
	Flip            bool
	Set             *pflag.FlagSet // the flags of single data sets

	// evaluated is a file of text or a folder of images that is the test data instead; "": none
	Evaluated string
	// unlabelled: the labels in testFile are not used, and may be missing
	Unlabelled bool
	// prepared has what the weights say about the inputs, for other data than those of the training; nil: unknown
	Prepared *Preparation
}

// Add adds the flags.
func (o *Flags) Add(f *pflag.FlagSet) {
	cli.ChoiceVar(f, &o.Name, "data", "digits", "digits (built in), mnist, images, csv, parquet, text",
		cli.Sorted(Kinds)...)
	f.StringVar(&o.Dir, "data-dir", "", "`folder` of mnist's IDX files, or of images")
	f.StringSliceVar(&o.files, "data-file", nil, "`file` of csv, parquet or text, several for the last two "+
		"(default for text: made-up sums)")
	f.IntVar(&o.Shift, "shift", 0, "random shift of training images, in pixels (default 1 for digits, 0 for others)")
	f.Float64Var(&o.ValidationSplit, "validation-split", 0, "fraction held out to validate by, 0 to 1")
	o.Set = pflag.NewFlagSet("", pflag.ContinueOnError)
	o.Set.SortFlags = false
	o.Set.Float64Var(&o.testSplit, "test-split", 0.1, "fraction held out as test data")
	o.Set.StringVar(&o.imageSize, "image-size", "", "resize images to this `size`, 32 or 48x32")
	o.Set.IntVar(&o.channels, "channels", 3, "channels of images: 1 for grey, 3 for colour")
	o.Set.BoolVar(&o.Flip, "flip", false, "mirror half of the training images")
	o.Set.StringVar(&o.testFile, "test-file", "", "`file` of csv or parquet with the test data")
	o.Set.StringSliceVar(&o.columns, "columns", nil, "of csv or parquet to read (default all)")
	o.Set.StringVar(&o.label, "label", "", "column to predict (default the last)")
	cli.ChoiceVar(o.Set, &o.loss, "loss", "", "predict numbers, by mse, mae or huber", cli.Sorted(regressionLosses)...)
	o.Set.StringSliceVar(&o.textColumns, "text-columns", nil, "columns of csv that are categories")
	o.Set.StringSliceVar(&o.dateColumns, "date-columns", nil, "columns of csv that are dates")
	o.Set.StringSliceVar(&o.dropColumns, "drop-columns", nil, "columns of csv to leave out")
	o.Set.StringSliceVar(&o.missing, "missing", nil, "fields of csv that mean a missing value")
	o.Set.BoolVar(&o.noHeader, "no-header", false, "the first line of csv has no names")
	o.Set.StringVar(&o.tokenizer, "tokenizer", "", "tokenizer.json `file` of Hugging Face")
	cli.Limit(o.Set, "(0,1)", "test-split")
	cli.Limit(f, "[0,1)", "validation-split")
	cli.Limit(f, "[0,)", "shift")
	f.AddFlagSet(o.Set)
	cli.NotCompared(f, "data-dir", "data-file", "test-file", "tokenizer") // the contents are compared
}

// dataSet is a kind of data for training, with its default options.
type dataSet struct {
	Load   func(o *Flags, length int) (*Examples, error)
	flags  []string // those of dataFlags.set that it takes, and data-dir and data-file
	needs  string   // the flag without which it cannot be read
	Epochs int
	Batch  int    // global
	Shift  int    // pixels
	side   int    // of its images, in pixels; 0: unknown
	Model  string // by default
	Rate   float64
}

// Kinds are the values of --data.
var Kinds = map[string]dataSet{
	"digits": {
		Load: func(*Flags, int) (*Examples, error) {
			set, err := digits.Load()
			return imageExamples(set, err)
		},
		Epochs: 25, Batch: 64, Shift: 1, side: 8, Model: "cnn",
	},
	"mnist": {
		Load: func(o *Flags, _ int) (*Examples, error) {
			set, err := data.MNIST(o.Dir)
			return imageExamples(set, err)
		},
		flags: []string{"data-dir"}, needs: "data-dir", Epochs: 3, Batch: 128, side: 28, Model: "cnn",
	},
	"images": {
		Load:  (*Flags).loadImages,
		flags: []string{"data-dir", "test-split", "image-size", "channels", "flip"}, needs: "data-dir",
		Epochs: 10, Batch: 64, Model: "cnn",
	},
	"csv": {
		Load: (*Flags).loadTable,
		flags: []string{
			"data-file", "test-split", "test-file", "columns", "label", "loss", "text-columns",
			"date-columns", "drop-columns", "missing", "no-header",
		},
		needs: "data-file", Epochs: 10, Batch: 64, Model: "mlp",
	},
	"parquet": {
		Load:  (*Flags).loadTable,
		flags: []string{"data-file", "test-split", "test-file", "columns", "label", "loss"},
		needs: "data-file", Epochs: 10, Batch: 64, Model: "mlp",
	},
	"text": {
		Load:  (*Flags).loadText,
		flags: []string{"data-file", "test-split", "tokenizer"}, Epochs: 5, Batch: 32, Model: "gpt", Rate: 0.001,
	},
}

// Check returns an error for flags that do not fit the data.
func (o *Flags) Check(given func(flag string) bool) error {
	set := Kinds[o.Name]
	var stray error
	visit := func(name string) {
		if stray == nil && given(name) && !slices.Contains(set.flags, name) {
			var takers []string
			for _, other := range cli.Sorted(Kinds) {
				if slices.Contains(Kinds[other].flags, name) {
					takers = append(takers, other)
				}
			}
			stray = cli.Usagef("--%s is for --data %s, not %s", name, cli.AllOf(takers), o.Name)
		}
	}
	visit("data-dir")
	visit("data-file")
	o.Set.VisitAll(func(f *pflag.Flag) { visit(f.Name) })
	if stray != nil {
		return stray
	}
	if set.needs != "" && !given(set.needs) {
		what := map[string]string{
			"mnist": "the folder of its IDX files", "images": "the folder with a subfolder of images per class",
			"csv": "the file to read", "parquet": "the files to read",
		}
		return cli.Usagef("--data %s needs --%s, %s", o.Name, set.needs, what[o.Name])
	}
	switch {
	case o.channels != 1 && o.channels != 3:
		return cli.Usagef("--channels %d: want 1 or 3", o.channels)
	case o.Shift > 0 && set.Model != "cnn":
		return cli.Usagef("--shift is for images, not --data %s", o.Name)
	case o.Name == "csv" && len(o.files) != 1:
		return cli.Usagef("--data-file: %d files for --data csv: want one, and --test-file for the test data", len(o.files))
	case given("columns") && len(o.columns) == 0:
		return cli.Usagef("--columns: no names: want those of the columns to read")
	}
	for i, name := range o.columns {
		if slices.Contains(o.columns[:i], name) {
			return cli.Usagef("--columns: %s twice: want each column once", name)
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
	if side > 0 && o.Shift >= side {
		return cli.Usagef("--shift %d: want less than %d, the width in pixels of an image of %s", o.Shift, side, o.Name)
	}
	return nil
}

func (o *Flags) parseImageSize() (err error) {
	width, height, both := strings.Cut(o.imageSize, "x")
	if !both {
		height = width
	}
	if o.width, err = strconv.Atoi(width); err == nil {
		o.height, err = strconv.Atoi(height)
	}
	if err != nil || o.width < 1 || o.height < 1 || o.width > imageSideMax || o.height > imageSideMax {
		return cli.Usagef("--image-size %s: want a width and height from 1 to %d, such as 32 or 48x32", o.imageSize,
			imageSideMax)
	}
	return nil
}

const imageSideMax = 4096

// Examples are the data of a training.
type Examples struct {
	Train, Test data.Pipeline
	Unit        string // what an example is, in the plural: images
	what        string // "images of 28x28x1"
	Text        bool   // inputs and labels are sequences of tokens

	Preparation
}

// Described describes n examples. They are in the plural in x.what.
func (x *Examples) Described(n int) string {
	if n != 1 {
		return x.what
	}
	return strings.TrimSuffix(x.Unit, "s") + strings.TrimPrefix(x.what, x.Unit)
}

// Features returns one row of the inputs and labels.
func (x *Examples) Features() (inputs, labels []engine.Feature) {
	if x.Text {
		sequence := []engine.Feature{{DType: tensor.Int32, Shape: x.Shape}}
		return sequence, sequence
	}
	labels = []engine.Feature{{DType: tensor.Int32}}
	if x.Regression != nil {
		labels[0].DType = tensor.Float32
	}
	return []engine.Feature{{DType: tensor.Float32, Shape: x.Shape}}, labels
}

// imageExamples returns the examples of a data set of images.
func imageExamples(set *data.Set, err error) (*Examples, error) {
	if err != nil {
		return nil, err
	}
	x := &Examples{Train: set.Train, Test: set.Test, Preparation: Preparation{Shape: set.Shape, Classes: set.Classes}}
	x.describeImages()
	return x, nil
}

func (x *Examples) describeImages() {
	x.Unit, x.what = "images", fmt.Sprintf("images of %dx%dx%d", x.Shape[0], x.Shape[1], x.Shape[2])
}

// testFolders are the names of folders of test images beside a folder train.
var testFolders = []string{"test", "val", "valid", "validation"}

// loadImages lists the images in a folder. If it has subfolders train and test, they are the training and test data.
func (o *Flags) loadImages(int) (*Examples, error) {
	options := data.ImageOptions{Height: o.height, Width: o.width, Channels: o.channels, Crop: true}
	dir, test := o.Dir, o.Evaluated
	if info, err := os.Stat(filepath.Join(dir, "train")); err == nil && info.IsDir() {
		for _, name := range testFolders {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.IsDir() {
				dir, test = filepath.Join(o.Dir, "train"), cmp.Or(test, filepath.Join(o.Dir, name))
				break
			}
		}
	}
	all, err := data.ImageFolder(dir, options)
	if err != nil {
		return nil, o.Explain(err)
	}
	set := &data.Set{Shape: all.Shape, Classes: len(all.Classes), Train: all.Images}
	if test == "" {
		set.Train, set.Test = all.Images.Split(o.testSplit, splitSeed)
	} else {
		options.Classes, options.Height, options.Width = all.Classes, all.Shape[0], all.Shape[1]
		held, err := data.ImageFolder(test, options)
		if err != nil {
			return nil, o.Explain(err)
		}
		set.Test = held.Images
	}
	x, err := imageExamples(set, o.checkSplit("images", set.Train, set.Test))
	if err == nil {
		x.Names = all.Classes
	}
	return x, err
}

// splitSeed is the seed by which test data are chosen. It is fixed, so that other seeds train on the same data.
const splitSeed = 1

// checkSplit returns an error if the training or the test data are empty.
func (o *Flags) checkSplit(unit string, train, test data.Pipeline) error {
	if train.Len() == 0 || test.Len() == 0 {
		return cli.Usagef("--test-split %v: of %d %s, this leaves %d for training and %d for the test", o.testSplit,
			train.Len()+test.Len(), unit, train.Len(), test.Len())
	}
	return nil
}

// loadText reads texts as sequences of length tokens. The end of the text is the test data.
func (o *Flags) loadText(length int) (*Examples, error) {
	tokens, err := o.LoadTokenizer()
	if err != nil {
		return nil, err
	}
	files := o.files
	if o.Evaluated != "" {
		files = []string{o.Evaluated}
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
	if o.Evaluated != "" {
		held = n
	}
	x := &Examples{
		Train: sequences.Take(n - held), Test: sequences.Skip(n - held), Unit: "sequences", Text: true,
		what: fmt.Sprintf("sequences of %d tokens (%s of text, vocabulary of %s)", length, cli.Count(all.Len(), "token"),
			cli.Grouped(tokens.Size())),
		Preparation: Preparation{Shape: []int{length}, Classes: tokens.Size()},
	}
	if o.Evaluated != "" {
		return x, nil
	}
	return x, o.checkSplit("sequences", x.Train, x.Test)
}

// LoadTokenizer returns the tokenizer of a text.
func (o *Flags) LoadTokenizer() (data.Tokenizer, error) {
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

// Explain adds the flags that may help to an error of reading data.
func (o *Flags) Explain(err error) error {
	field, column := (*data.FieldError)(nil), (*parquet.ColumnError)(nil)
	switch {
	case errors.As(err, &column):
		return fmt.Errorf("%w\nto leave the column out, name the others in --columns", err)
	case errors.As(err, &field):
		return explainFields(err, field)
	case errors.Is(err, data.ErrImageSize):
		return fmt.Errorf("%w\nto resize the images, give --image-size", err)
	}
	return err
}

// explainFields adds what to do about columns that cannot be read.
func explainFields(err error, first *data.FieldError) error {
	var all, texts, dates []string
	for _, f := range append([]data.FieldError{*first}, first.Others...) {
		all = append(all, f.Column)
		if f.Date {
			dates = append(dates, f.Column)
		} else {
			texts = append(texts, f.Column)
		}
	}
	var advice []string
	if len(dates) > 0 {
		advice = append(advice, "to read dates as days, give --date-columns "+strings.Join(dates, ","))
	}
	if len(texts) > 0 {
		advice = append(advice, "to read texts as categories, give --text-columns "+strings.Join(texts, ","))
	}
	return fmt.Errorf("%w\n%s; to leave columns out, give --drop-columns %s; if a field means a missing value, list it "+
		"in --missing; if the file has no line of names, give --no-header", err, strings.Join(advice, "; "),
		strings.Join(all, ","))
}
