package datasets

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/parquet"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Tables are the kinds of data that are tables.
var Tables = []string{"csv", "parquet"}

// readTable reads files of rows into memory: the named columns, or all if there are none. The categories are those of
// the columns of text; nil: those in the files.
func (o *Flags) readTable(files, columns []string, categories map[string][]string) (*data.Frame, error) {
	if o.Name == "parquet" {
		return parquet.Load(context.Background(), files, parquet.Options{Columns: columns, Categories: categories})
	}
	return data.LoadCSV(files[0], data.CSV{
		NoHeader: o.noHeader, Columns: columns, Missing: append([]string{""}, o.missing...), Categories: categories,
		Dates: o.dateColumns, Drop: o.dropColumns,
	})
}

// loadTable reads a table. Numbers are standardised by the mean and deviation of the training rows, and texts become
// one-hot vectors; missing numbers become the mean, missing texts zeros. Rows without a label are left out.
func (o *Flags) loadTable(int) (*Examples, error) {
	categories := map[string][]string{}
	for _, name := range o.textColumns {
		categories[strings.TrimSpace(name)] = nil
	}
	table, err := o.readTable(o.files, o.columns, categories)
	if err != nil {
		return nil, o.Explain(err)
	}
	label := o.label
	if label == "" {
		label = table.Names[len(table.Names)-1]
	}
	if table, err = table.DropMissing(label); err != nil {
		return nil, cli.Usagef("--label: %v", err)
	}
	complete, err := table.DropMissing()
	if err != nil {
		return nil, err
	}
	incomplete := table.Rows() - complete.Rows()
	x := &Examples{Preparation: Preparation{Names: table.Categories[label], Label: label}}
	held := (*data.Frame)(nil)
	if o.testFile != "" {
		if held, err = o.loadTestTable(table.Categories, label); err != nil {
			return nil, err
		}
	} else if table, held, err = splitRows(table, o.testSplit); err != nil {
		return nil, err
	}
	if o.loss != "" {
		if x.Regression, err = newRegression(o.loss, table, label); err != nil {
			return nil, err
		}
	}
	if err := x.setColumns(table); err != nil {
		return nil, err
	}
	if err := o.sameColumns(held, &x.Preparation); err != nil {
		return nil, err
	}
	if x.Train, err = o.rowsOf(x, table); err != nil {
		return nil, err
	}
	if x.Test, err = o.rowsOf(x, held); err != nil {
		return nil, err
	}
	if x.describeRows(); incomplete > 0 {
		x.what += fmt.Sprintf("; %s with missing values", cli.Count(incomplete, "row"))
	}
	return x, o.checkSplit("rows", x.Train, x.Test)
}

func (x *Examples) describeRows() {
	x.Unit = "rows"
	x.what = fmt.Sprintf("rows of %s, %s to predict %s", cli.Count(len(x.Columns), "column"), cli.Count(x.Shape[0],
		"number"), x.Label)
}

// sameColumns returns an error if the test data have other columns than the training data.
func (o *Flags) sameColumns(held *data.Frame, p *Preparation) error {
	if got, want := held.Without(p.Label), p.columns(); !slices.Equal(got, want) {
		return fmt.Errorf("%s has the columns %s: want those of the training, %s", o.testFile, strings.Join(got, ", "),
			strings.Join(want, ", "))
	}
	return nil
}

// rowsOf returns the rows of a table as examples, and sets their shape and number of classes.
func (o *Flags) rowsOf(x *Examples, f *data.Frame) (data.Pipeline, error) {
	inputs, err := standardised(f, x.Columns)
	if err != nil {
		return data.Pipeline{}, err
	}
	x.Shape = inputs.Shape()[1:]
	batch := data.Batch{Inputs: []*tensor.Tensor{inputs}, Labels: []*tensor.Tensor{nil}}
	if x.Regression != nil {
		if batch.Labels[0], err = x.Regression.labels(f, x.Label); err != nil {
			return data.Pipeline{}, err
		}
		return data.FromTensors(batch)
	}
	if batch.Labels[0], err = f.Ints(x.Label); err != nil {
		return data.Pipeline{}, fmt.Errorf("--label %s: %w\nto predict numbers that are not classes, give --loss mse",
			x.Label, err)
	}
	for i, class := range tensor.Data[int32](batch.Labels[0]) {
		if class < 0 || class >= classesMax {
			text := ""
			if o.Name == "csv" {
				text = "list the column in --text-columns, or "
			}
			return data.Pipeline{}, fmt.Errorf("--label %s: row %d has the class %d: want 0 to %d, or %sgive --loss mse to "+
				"predict numbers", x.Label, i, class, classesMax-1, text)
		}
		x.Classes = max(x.Classes, int(class)+1)
	}
	return data.FromTensors(batch)
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

// loadTestTable reads the table of test data. If its labels are not used, a column without values replaces them.
func (o *Flags) loadTestTable(categories map[string][]string, label string) (*data.Frame, error) {
	files := []string{o.testFile}
	if o.Unlabelled {
		others := maps.Clone(categories)
		delete(others, label)
		columns := slices.DeleteFunc(slices.Clone(o.columns), func(name string) bool { return name == label })
		table, err := o.readTable(files, columns, others)
		if err == nil && !slices.Contains(table.Names, label) {
			return withColumn(table, label), nil
		}
	}
	table, err := o.readTable(files, o.columns, categories)
	switch {
	case err != nil:
		return nil, o.Explain(err)
	case o.Unlabelled:
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

// standardised returns the columns of a table as inputs (rows, numbers). It fills the missing numbers in f.
func standardised(f *data.Frame, described []inputColumn) (*tensor.Tensor, error) {
	var columns [][]float32 // one after the other
	for _, c := range described {
		if f.Categories[c.Name] != nil {
			hot, err := f.OneHot(c.Name)
			if err != nil {
				return nil, err
			}
			values, width := tensor.Data[float32](hot), hot.Shape()[1]
			for i := range width {
				column := make([]float32, f.Rows())
				for row := range column {
					column[row] = values[row*width+i]
				}
				columns = append(columns, column)
			}
			continue
		}
		if err := f.Fill(c.Name, c.Mean); err != nil {
			return nil, err
		}
		values, err := f.Floats(c.Name)
		if err != nil {
			return nil, err
		}
		column := tensor.Data[float32](values)
		for i, v := range column {
			column[i] = float32((float64(v) - c.Mean) / c.Deviation)
		}
		columns = append(columns, column)
	}
	inputs := make([]float32, 0, f.Rows()*len(columns))
	for row := range f.Rows() {
		for _, column := range columns {
			inputs = append(inputs, column[row])
		}
	}
	return tensor.Of(inputs, f.Rows(), len(columns)), nil
}
