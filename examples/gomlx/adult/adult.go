// Package adult has the parts of a GoMLX program that predicts incomes from a table with categories, numbers and
// missing values, in the shape of GoMLX's example for the data set UCI adult: vocabularies, quantiles, embeddings,
// piecewise-linear calibration and a feed-forward network. The rows are made: they have the columns of UCI adult, and
// a rule decides the label. The commands plain and distributed train it by GoMLX's train.Trainer and train.Loop.
package adult

import (
	"bytes"
	_ "embed"
	"encoding/csv"
	"fmt"
	"math/rand"
	"slices"
	"strconv"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/dataset"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/fnn"
	"github.com/gomlx/gomlx/ml/layers/regularizer"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"
)

//go:embed adult.csv
var rows []byte

// columns of the table, in the order of the file; the last is the label.
var columns = []struct {
	name        string
	categorical bool
}{
	{"age", false},
	{"workclass", true},
	{"fnlwgt", false},
	{"education", true},
	{"education-num", false},
	{"marital-status", true},
	{"occupation", true},
	{"relationship", true},
	{"race", true},
	{"sex", true},
	{"capital-gain", false},
	{"capital-loss", false},
	{"hours-per-week", false},
	{"native-country", true},
	{"income", true},
}

// Table is the data: categories as numbers, of which 0 is a missing value, and the quantiles of the numbers.
type Table struct {
	categories [][]int64
	numbers    [][]float32
	labels     [][]float32
	vocabulary []int       // by categorical column: its number of values
	quantiles  [][]float32 // by number column
}

// Load parses the table.
func Load() (*Table, error) {
	records, err := csv.NewReader(bytes.NewReader(rows)).ReadAll()
	if err != nil {
		return nil, err
	}
	t := &Table{}
	var known []map[string]int64
	for _, c := range columns[:len(columns)-1] {
		if c.categorical {
			known = append(known, map[string]int64{"?": 0})
		}
	}
	for _, r := range records {
		var categories []int64
		var numbers []float32
		for i, c := range columns[:len(columns)-1] {
			if !c.categorical {
				x, err := strconv.ParseFloat(r[i], 32)
				if err != nil {
					return nil, fmt.Errorf("column %s: %w", c.name, err)
				}
				numbers = append(numbers, float32(x))
				continue
			}
			m := known[len(categories)]
			if _, ok := m[r[i]]; !ok {
				m[r[i]] = int64(len(m))
			}
			categories = append(categories, m[r[i]])
		}
		label := float32(0)
		if r[len(r)-1] == ">50K" {
			label = 1
		}
		t.categories, t.numbers, t.labels = append(t.categories, categories), append(t.numbers, numbers),
			append(t.labels, []float32{label})
	}
	for _, m := range known {
		t.vocabulary = append(t.vocabulary, len(m))
	}
	for i := range t.numbers[0] {
		var values []float32
		for _, r := range t.numbers {
			values = append(values, r[i])
		}
		slices.Sort(values)
		values = slices.Compact(values)
		var q []float32
		for k := range 10 {
			q = append(q, values[k*(len(values)-1)/9])
		}
		t.quantiles = append(t.quantiles, slices.Compact(q))
	}
	return t, nil
}

// NewStore returns a store with the hyperparameters.
func NewStore() *model.Store {
	store := model.NewStore()
	store.SetParams(map[string]any{
		optimizer.ParamOptimizer:    "adam",
		optimizer.ParamLearningRate: 0.01,
		regularizer.ParamL2:         1e-5,
		fnn.ParamNumHiddenLayers:    1,
		fnn.ParamNumHiddenNodes:     8,
		fnn.ParamNormalization:      "layer",
	})
	return store
}

// NewDatasets returns four fifths of the rows for training, shuffled and repeated without end, and the others. The
// seed of the shuffle is fixed, so every process reads the same order.
func (t *Table) NewDatasets(b compute.Backend, batch int) (trainDS, testDS *dataset.InMemoryDataset, err error) {
	n := len(t.labels) * 4 / 5
	trainDS, err = dataset.InMemoryFromData(b, "train", []any{t.categories[:n], t.numbers[:n]}, []any{t.labels[:n]})
	if err != nil {
		return nil, nil, err
	}
	testDS, err = dataset.InMemoryFromData(b, "test", []any{t.categories[n:], t.numbers[n:]}, []any{t.labels[n:]})
	if err != nil {
		return nil, nil, err
	}
	trainDS.WithRand(rand.New(rand.NewSource(1))).Shuffle().Infinite(true).BatchSize(batch, true)
	return trainDS, testDS.BatchSize(batch, false), nil
}

// Model is the model function. Its inputs are the categories and the numbers. It returns logits.
func (t *Table) Model(s *model.Scope, _ any, inputs []*graph.Node) []*graph.Node {
	g := inputs[0].Graph()
	var parts []*graph.Node
	for i, n := range t.vocabulary {
		column := graph.Slice(inputs[0], graph.AxisRange(), graph.AxisRange(i, i+1))
		parts = append(parts, layers.Embedding(s.In("categorical_%d", i), column, dtypes.Float32, n, 4))
	}
	for i, q := range t.quantiles {
		column := graph.Slice(inputs[1], graph.AxisRange(), graph.AxisRange(i, i+1))
		parts = append(parts, layers.PieceWiseLinearCalibration(s.In("continuous_%d", i), column, graph.Const(g, q), true))
	}
	return []*graph.Node{fnn.New(s.In("fnn"), graph.Concatenate(parts, -1), 1).Done()}
}
