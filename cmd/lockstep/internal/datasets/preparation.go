package datasets

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/tokenizer"
)

// Preparation describes how the inputs of a model are made of files, and what its outputs mean. The metadata of weights
// and snapshots contain it, so that they are used without the data of the training.
type Preparation struct {
	Shape      []int         `json:"shape"`             // of an input: (height, width, channels) for images
	Classes    int           `json:"classes,omitempty"` // of the labels; the size of the vocabulary of a text
	Names      []string      `json:"names,omitempty"`   // of the classes; nil: numbers
	Regression *regression   `json:"regression,omitempty"`
	Label      string        `json:"label,omitempty"`   // the column to predict
	Columns    []inputColumn `json:"columns,omitempty"` // the others of a table, in the order of its files
}

// inputColumn describes a column of a table: categories, or the mean and deviation by which numbers are standardised.
type inputColumn struct {
	Name       string   `json:"name"`
	Categories []string `json:"categories,omitempty"`
	Mean       float64  `json:"mean"`
	Deviation  float64  `json:"deviation"`
}

// PreparationKey is the key of a preparation in metadata. The value is JSON.
const PreparationKey = "preparation"

// PreparationOf returns the preparation in metadata, or nil if an older version of the program wrote them.
func PreparationOf(metadata map[string]string, d *Flags) (*Preparation, error) {
	text, ok := metadata[PreparationKey]
	if !ok {
		return nil, nil
	}
	p := &Preparation{}
	err := json.Unmarshal([]byte(text), p)
	if err == nil {
		err = p.check(d)
	}
	if err != nil {
		return nil, fmt.Errorf("the %s in its metadata: %w", PreparationKey, err)
	}
	return p, nil
}

// check returns an error if the preparation is not one for the data of the flags.
func (p *Preparation) check(d *Flags) error {
	rank := 3
	if d.Name == "text" || slices.Contains(Tables, d.Name) {
		rank = 1
	}
	if len(p.Shape) != rank || slices.Min(p.Shape) < 1 || slices.Max(p.Shape) > setup.DimensionMax {
		return fmt.Errorf("inputs of shape %v for --data %s", p.Shape, d.Name)
	}
	if rank == 3 && p.Shape[2] != 1 && p.Shape[2] != 3 {
		return fmt.Errorf("images with %d channels", p.Shape[2])
	}
	if (d.loss != "") != (p.Regression != nil) {
		return fmt.Errorf("a regression, %v, for --loss %q", p.Regression != nil, d.loss)
	}
	if r := p.Regression; r != nil && (regressionLosses[r.Loss] == nil || !(r.Deviation > 0)) {
		return fmt.Errorf("a regression of loss %q and deviation %v", r.Loss, r.Deviation)
	}
	if p.Regression == nil && (p.Classes < 1 || int64(p.Classes) > cli.NumberMax || len(p.Names) > p.Classes) {
		return fmt.Errorf("%d classes with %d names", p.Classes, len(p.Names))
	}
	if !slices.Contains(Tables, d.Name) {
		return nil
	}
	width, names := 0, map[string]bool{p.Label: true}
	for _, c := range p.Columns {
		if names[c.Name] || len(c.Categories) == 0 && !(c.Deviation > 0) {
			return fmt.Errorf("column %q: twice, or of deviation %v", c.Name, c.Deviation)
		}
		names[c.Name] = true
		width += max(1, len(c.Categories))
	}
	if width != p.Shape[0] {
		return fmt.Errorf("the columns have %d numbers, where the inputs have %d", width, p.Shape[0])
	}
	return nil
}

// columns returns the names of the columns of the inputs.
func (p *Preparation) columns() []string {
	names := make([]string, len(p.Columns))
	for i, c := range p.Columns {
		names[i] = c.Name
	}
	return names
}

// categories returns the categories of the columns of text.
func (p *Preparation) categories() map[string][]string {
	out := map[string][]string{}
	for _, c := range p.Columns {
		if len(c.Categories) > 0 {
			out[c.Name] = c.Categories
		}
	}
	if len(p.Names) > 0 {
		out[p.Label] = p.Names
	}
	return out
}

// setColumns sets the columns to those of a table of training rows: numbers get their mean and deviation.
func (p *Preparation) setColumns(f *data.Frame) error {
	for _, name := range f.Without(p.Label) {
		c := inputColumn{Name: name, Categories: f.Categories[name], Deviation: 1}
		if c.Categories == nil {
			mean, deviation, err := f.Mean(name)
			if err != nil {
				return err
			}
			if math.IsNaN(mean) {
				return fmt.Errorf("column %q: all values are missing: remove it", name)
			}
			if c.Mean = mean; deviation != 0 {
				c.Deviation = deviation
			}
		}
		p.Columns = append(p.Columns, c)
	}
	if len(p.Columns) == 0 {
		return fmt.Errorf("the only column is the label, %s: want others to predict it from", p.Label)
	}
	return nil
}

// PreparedExamples returns the examples of other data than those of the training, by what the weights say about the
// inputs. It reports false if it needs the data of the training.
func (o *Flags) PreparedExamples() (*Examples, bool, error) {
	if o.Prepared == nil {
		return nil, false, nil
	}
	x := &Examples{Preparation: *o.Prepared}
	switch {
	case o.Name == "images" && o.Evaluated != "":
		held, err := data.ImageFolder(o.Evaluated, data.ImageOptions{
			Height: x.Shape[0], Width: x.Shape[1], Channels: x.Shape[2], Crop: true, Classes: x.Names,
		})
		if err != nil {
			return nil, true, o.Explain(err)
		}
		x.Test = held.Images
		x.describeImages()
		return x, true, nil
	case slices.Contains(Tables, o.Name) && o.testFile != "":
		held, err := o.loadTestTable(x.categories(), x.Label)
		if err == nil {
			err = o.sameColumns(held, &x.Preparation)
		}
		if err == nil {
			x.Test, err = o.rowsOf(x, held)
		}
		if err == nil && x.Regression == nil && x.Classes > o.Prepared.Classes {
			err = fmt.Errorf("%s: class %d of column %s: the model has the classes 0 to %d", o.testFile, x.Classes-1, x.Label,
				o.Prepared.Classes-1)
		}
		x.describeRows()
		return x, true, err
	}
	return nil, false, nil
}

// UseTable makes a file of rows the test data of a saved run. Without a preparation it returns an error if training
// split the data by chance: all of them have other means.
func (o *Flags) UseTable(file string) error {
	if o.Prepared == nil && o.testFile == "" {
		return errors.New("the weights have no description of their inputs, because an older version of lockstep wrote " +
			"them: train again to use other rows")
	}
	o.testFile = file
	return nil
}

// tokenizerFile is the copy of the tokenizer beside the weights.
const tokenizerFile = "tokenizer.json"

// WriteTokenizer copies the tokenizer of the run into a folder.
func (o *Flags) WriteTokenizer(dir string) error {
	if o.tokenizer == "" {
		return nil
	}
	text, err := os.ReadFile(o.tokenizer)
	if err == nil {
		_, err = tokenizer.Parse(text)
	}
	if err == nil {
		err = cli.WriteFile(filepath.Join(dir, tokenizerFile), text)
	}
	if err != nil {
		return fmt.Errorf("copying --tokenizer: %w", err)
	}
	return nil
}

// FindTokenizer prefers the copy in the folder of a run.
func (o *Flags) FindTokenizer(dir string) {
	file := filepath.Join(dir, tokenizerFile)
	if _, err := os.Stat(file); o.tokenizer != "" && err == nil {
		o.tokenizer = file
	}
}
