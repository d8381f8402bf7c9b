package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/parquet"
	"github.com/lockstep-ml/lockstep/tensor"
)

// tables are the kinds of data that are tables.
var tables = []string{"csv", "parquet"}

// readTable reads files of rows into memory: the named columns, or all if there are none. The categories are those of
// the columns of text; nil: those in the files.
func (o *dataFlags) readTable(files, columns []string, categories map[string][]string) (*data.Frame, error) {
	if o.name == "parquet" {
		return parquet.Load(context.Background(), files, parquet.Options{Columns: columns, Categories: categories})
	}
	return data.LoadCSV(files[0], data.CSV{
		NoHeader: o.noHeader, Columns: columns, Missing: append([]string{""}, o.missing...), Categories: categories,
	})
}

// loadTable reads a table. Numbers are standardised by the mean and deviation of the training rows, and texts become
// one-hot vectors; missing numbers become the mean, missing texts zeros. Rows without a label are left out.
func (o *dataFlags) loadTable(int) (*examples, error) {
	categories := map[string][]string{}
	for _, name := range o.textColumns {
		categories[strings.TrimSpace(name)] = nil
	}
	table, err := o.readTable(o.files, o.columns, categories)
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
		if held, err = o.loadTestTable(table.Categories, label); err != nil {
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
			return data.Pipeline{}, fmt.Errorf("--label %s: %w\nto predict numbers that are not classes, give --loss mse", label,
				err)
		}
		batch.Labels[0] = labels
		for i, class := range tensor.Data[int32](batch.Labels[0]) {
			if class < 0 || class >= classesMax {
				text := ""
				if o.name == "csv" {
					text = "list the column in --text-columns, or "
				}
				return data.Pipeline{}, fmt.Errorf("--label %s: row %d has the class %d: want 0 to %d, or %sgive --loss mse to "+
					"predict numbers", label, i, class, classesMax-1, text)
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

// loadTestTable reads the table of test data. If its labels are not used, a column without values replaces them.
func (o *dataFlags) loadTestTable(categories map[string][]string, label string) (*data.Frame, error) {
	files := []string{o.testFile}
	if o.unlabelled {
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
