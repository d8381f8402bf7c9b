package train

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// counted is a dataset of examples that counts how often each was read.
type counted struct {
	mu    sync.Mutex
	reads map[int]int
}

func (c *counted) of(n int) data.Pipeline {
	c.reads = map[int]int{}
	all := fromTensors(lineExamples(n))
	r, _ := data.Open(context.Background(), all)
	return data.FromFunc(n, func(ctx context.Context, i int) (data.Element, error) {
		c.mu.Lock()
		c.reads[i]++
		c.mu.Unlock()
		return r.At(ctx, i)
	})
}

// TestReadsOwnRows checks that each worker reads only the rows of its replicas, and one more a step, and that the
// result is the same on any number of workers.
func TestReadsOwnRows(t *testing.T) {
	const n, rows, epochs = 40, 7, 2 // fakeConfig(7): a share is 2 rows, of the last batch of 5 rows 2, 2, 1, 0
	var want string
	for _, layout := range [][]int{{4}, {2, 2}, {1, 1, 1, 1}, {1, 2, 1}} {
		sources := make([]counted, len(layout))
		_, weights, errs := fitOver(t, layout, func(w int) data.Dataset {
			return sources[w].of(n).Shuffle(1).Workers(2).Batch(rows).Prefetch(2)
		}, func(int, *Trainer) FitConfig { return FitConfig{Epochs: epochs} })
		for w, err := range errs {
			if err != nil {
				t.Fatalf("%v: worker %d: %v", layout, w, err)
			}
		}
		if want == "" {
			want = weights[0]
		}
		for w := range layout {
			if weights[w] != want {
				t.Errorf("%v: worker %d has the weights %s, want %s", layout, w, weights[w], want)
			}
		}
		total, most := 0, 0
		for w := range sources {
			mine := 0
			for _, times := range sources[w].reads {
				mine += times
			}
			total += mine
			most = max(most, mine)
		}
		const batches = epochs * (n + rows - 1) / rows
		if len(layout) == 1 && total != epochs*n || len(layout) > 1 && (total < epochs*n || total > epochs*n+5*batches) {
			t.Errorf("%v: %d rows were read", layout, total)
		}
		if len(layout) > 1 && most > epochs*n*slices.Max(layout)*2/7+2*batches+4 {
			t.Errorf("%v: one worker read %d rows of %d", layout, most, epochs*n)
		}
	}
}

// TestRowsEqualBatches checks that a training whose workers read only their rows has the bits of one whose workers read
// everything.
func TestRowsEqualBatches(t *testing.T) {
	p := fromTensors(lineExamples(40)).Shuffle(1).Batch(7)
	for _, layout := range [][]int{{1, 1}, {1, 2, 1}} {
		var hashes []string
		for _, ds := range []data.Dataset{p, p.Map(func(_ context.Context, e data.Element) (data.Element, error) {
			return e, nil
		}), data.FromSeq(-1, p.Iter)} {
			_, weights, errs := fitOver(t, layout, func(int) data.Dataset { return ds },
				func(int, *Trainer) FitConfig { return FitConfig{Epochs: 2} })
			for _, err := range errs {
				if err != nil {
					t.Fatal(err)
				}
			}
			hashes = append(hashes, weights...)
		}
		for _, h := range hashes {
			if h != hashes[0] {
				t.Errorf("%v: weights %v differ", layout, hashes)
			}
		}
	}
}

// TestSecondReader checks that the row that is read twice is read by two workers, also if they have different numbers
// of replicas.
func TestSecondReader(t *testing.T) {
	for _, layout := range [][]int{{1, 1}, {3, 1}, {1, 3}, {1, 5, 1}, {4, 1, 1, 2}} {
		trainer, workers := &Trainer{}, []int{}
		for w, n := range layout {
			var ids []int
			for range n {
				ids, workers = append(ids, len(workers)), append(workers, w)
			}
			trainer.replicasOf = append(trainer.replicasOf, ids)
		}
		for owner, w := range workers {
			if second := trainer.secondReader(owner); second < 0 || second >= len(workers) || workers[second] == w {
				t.Errorf("%v: a row of replica %d is also read by replica %d", layout, owner, second)
			}
		}
	}
}

// wrongRows is a dataset whose reader reads other rows than it should.
type wrongRows struct{ data.Pipeline }

func (w wrongRows) Open(ctx context.Context) (data.Reader, error) {
	r, err := data.Open(ctx, w.Pipeline)
	return wrongReader{r.(data.RowReader)}, err
}

func (w wrongRows) Fingerprint() uint64 { return data.Fingerprint(w.Pipeline) }

type wrongReader struct{ data.RowReader }

func (w wrongReader) ReadRows(ctx context.Context, p int, rows []int) (data.Element, []uint64, error) {
	if p == 2 {
		rows = slices.Clone(rows)
		rows[0] = (rows[0] + 1) % w.Rows(p) // an example is doubled, and one is missing
	}
	return w.RowReader.ReadRows(ctx, p, rows)
}

// TestWrongRows checks that workers that read only their own rows notice in the step that would use them that one has
// other data, another order, or other rows.
func TestWrongRows(t *testing.T) {
	const rows, n = 8, 24
	good := func(b data.Batch) data.Pipeline { return fromTensors(b).Shuffle(1) }
	same := func(_ context.Context, e data.Element) (data.Element, error) { return e, nil }
	for _, c := range []struct {
		name  string
		right data.Pipeline
		wrong data.Dataset // of the last worker
		step  int
		want  string
	}{
		{
			"the order", good(lineExamples(n)).Batch(rows), good(lineExamples(n)).Shuffle(2).Batch(rows), 1,
			" read other examples than worker",
		},
		{"a bit of one input", good(lineExamples(n)).Batch(rows), func() data.Dataset {
			b := lineExamples(n)
			x := tensor.Data[float64](b.Inputs[0])
			x[2*n-1] = math.Nextafter(x[2*n-1], 9)
			return good(b).Batch(rows)
		}(), 1, " has other data than worker"},
		{
			"a stage", good(lineExamples(n)).Batch(rows), good(lineExamples(n)).Map(same).Batch(rows), 1,
			" has other data than worker",
		},
		{
			"a function", good(lineExamples(n)).Map(same).Batch(rows),
			good(lineExamples(n)).Map(func(_ context.Context, e data.Element) (data.Element, error) {
				b := e.(data.Batch)
				return data.Batch{Inputs: b.Inputs, Labels: []*tensor.Tensor{tensor.Scalar(99.0)}}, nil
			}).Batch(rows), 0, " read different contents of the same example, number ",
		},
		{
			"the rows", good(lineExamples(n)).Batch(rows),
			wrongRows{good(lineExamples(n)).Batch(rows)},
			3,
			" has not read the examples at the rows ",
		},
		{
			"weights", good(lineExamples(n)).Batch(rows), func() data.Dataset {
				b := lineExamples(n)
				b.Weights = tensor.From(slices.Repeat([]float32{2}, n))
				return good(b).Batch(rows)
			}(), 1, "only one of them has weights",
		},
		{
			"a stream", good(lineExamples(n)).Batch(rows), data.FromSeq(-1, good(lineExamples(n)).Batch(rows).Iter), 1,
			"only one of them has weights, or random access",
		},
	} {
		for _, layout := range [][]int{{1, 1}, {1, 2, 1}} {
			t.Run(fmt.Sprint(c.name, layout), func(t *testing.T) {
				errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
					trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(rows))
					if err != nil {
						return err
					}
					defer trainer.Close()
					var ds data.Dataset = c.right
					if w == len(layout)-1 {
						ds = c.wrong
					}
					h, err := trainer.Fit(t.Context(), ds, FitConfig{Epochs: 9})
					if c.step > 0 && h.Steps != c.step-1 {
						t.Errorf("worker %d made %d steps; the data differ in step %d", w, h.Steps, c.step)
					}
					return err
				})
				for w, err := range errs {
					if err == nil || !strings.Contains(err.Error(), c.want) ||
						!strings.Contains(err.Error(), fmt.Sprint("worker ", len(layout)-1)) {
						t.Errorf("worker %d ends with %v, want %q", w, err, c.want)
					}
				}
			})
		}
	}
}

// TestWrongRowsElsewhere checks that evaluation and prediction compare the rows that were read too.
func TestWrongRowsElsewhere(t *testing.T) {
	for name, do := range map[string]func(trainer *Trainer, ds data.Dataset) error{
		"evaluate": func(trainer *Trainer, ds data.Dataset) error {
			_, err := trainer.Evaluate(t.Context(), ds)
			return err
		},
		"predict": func(trainer *Trainer, ds data.Dataset) error {
			_, err := trainer.Predict(t.Context(), ds)
			return err
		},
	} {
		for w, err := range overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(8))
			if err != nil {
				return err
			}
			defer trainer.Close()
			right := fromTensors(lineExamples(24)).Batch(8)
			if w != 2 {
				return do(trainer, right)
			}
			return do(trainer, wrongRows{right})
		}) {
			if err == nil || !strings.Contains(err.Error(), "worker 2 has not read the examples at the rows") {
				t.Errorf("%s: worker %d ends with %v", name, w, err)
			}
		}
	}
}

// TestWrongRowsDiLoCo checks that inner steps of DiLoCo, in which workers exchange nothing, do not hide wrong rows.
func TestWrongRowsDiLoCo(t *testing.T) {
	right := fromTensors(lineExamples(24)).Map(func(_ context.Context, e data.Element) (data.Element, error) {
		return e, nil
	}).Batch(8)
	other := fromTensors(lineExamples(24)).Map(func(_ context.Context, e data.Element) (data.Element, error) {
		return data.Batch{Inputs: e.(data.Batch).Inputs, Labels: []*tensor.Tensor{tensor.Scalar(99.0)}}, nil
	}).Batch(8)
	for want, wrong := range map[string]data.Dataset{
		"read different contents of the same example": other,
		"has not read the examples at the rows":       wrongRows{right},
	} {
		for w, err := range overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(8)
			cfg.Exchange = DiLoCo{InnerSteps: 3, LearningRate: 0.5}
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			ds := data.Dataset(right)
			if w == 2 {
				ds = wrong
			}
			_, err = trainer.Fit(t.Context(), ds, FitConfig{Epochs: 9})
			return err
		}) {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("worker %d ends with %v, want %q", w, err, want)
			}
		}
	}
}

// fromTensors is data.FromTensors for tensors that have equally many rows. It panics at an error.
func fromTensors(e data.Element) data.Pipeline {
	p, err := data.FromTensors(e)
	if err != nil {
		panic(err)
	}
	return p
}
