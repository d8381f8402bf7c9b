package dataparallel_test

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/norm"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/engine/gomlx/dataparallel"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// cnn is a network of GoMLX's layers: convolution, pooling, and on request batch normalization and dropout.
func cnn(random bool) func(s *model.Scope, x *graph.Node) *graph.Node {
	return func(s *model.Scope, x *graph.Node) *graph.Node {
		rows := x.Shape().Dim(0)
		x = activation.Relu(layers.Convolution(s.In("conv"), x).Channels(4).KernelSize(3).PadSame().Done())
		if random {
			x = norm.BatchNorm(s.In("norm"), x, -1).UseBackendInference(false).Done()
		}
		x = graph.Reshape(graph.MaxPool(x).Window(2).Done(), rows, -1)
		if random {
			x = layers.DropoutStatic(s.In("dropout"), x, 0.3)
		}
		return layers.Dense(s.In("readout"), x, true, 3)
	}
}

// images is a dataset of batches that depend on their number alone.
type images struct{ rows, batches int }

func (d images) Name() string { return "images" }

func (d images) Iter() iter.Seq2[train.Batch, error] {
	return func(yield func(train.Batch, error) bool) {
		for k := range d.batches {
			x, y := make([]float32, d.rows*36), make([]int32, d.rows)
			for i := range x {
				x[i] = float32(math.Sin(float64(k*len(x) + i)))
			}
			for i := range y {
				y[i] = int32((k*len(y) + i) % 3)
			}
			b := train.Batch{
				Inputs: []*tensors.Tensor{tensors.FromFlatDataAndDimensions(x, d.rows, 6, 6, 1)},
				Labels: []*tensors.Tensor{tensors.FromFlatDataAndDimensions(y, d.rows, 1)},
			}
			if !yield(b, nil) {
				return
			}
		}
	}
}

// backend returns a Go backend, which the test finalizes.
func backend(t *testing.T) compute.Backend {
	t.Helper()
	b, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Finalize)
	return b
}

// program is a training that does not know of other workers, unless it has a job.
func program(job *dataparallel.Job, b compute.Backend, random bool, opt optimizer.Interface, ds train.Dataset,
	steps int, change func(*model.Store, *train.Loop),
) (*model.Store, error) {
	store := model.NewStore()
	if err := store.ResetRNGState(); err != nil { // another seed in every process
		return nil, err
	}
	if job != nil {
		b, opt, ds = job.Backend(b), job.Optimizer(opt), job.Dataset(ds)
	}
	trainer := train.NewTrainer(b, store, cnn(random), loss.SparseCategoricalCrossEntropyLogits, opt,
		[]metric.Interface{metric.NewMovingAverageSparseCategoricalAccuracy("accuracy", "~acc", 0.1)}, nil)
	loop := train.NewLoop(trainer)
	if job != nil {
		job.Attach(loop)
	}
	if change != nil {
		change(store, loop)
	}
	_, err := loop.RunSteps(ds, steps)
	return store, err
}

// together runs f on every rank of a new group, each with a Go backend, and returns the results.
func together[T any](t *testing.T, ranks int, f func(job *dataparallel.Job, b compute.Backend) (T, error)) ([]T,
	[]error,
) {
	t.Helper()
	return togetherOn(t, backend, ranks, f)
}

// togetherOn is together with backends that open returns.
func togetherOn[T any](t *testing.T, open func(*testing.T) compute.Backend, ranks int,
	f func(job *dataparallel.Job, b compute.Backend) (T, error),
) ([]T, []error) {
	t.Helper()
	group, err := collective.Open(mem.New(ranks), collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	out, errs := make([]T, ranks), make([]error, ranks)
	var wg sync.WaitGroup
	for i, c := range group.Local() {
		b := open(t)
		wg.Go(func() { out[i], errs[i] = f(dataparallel.New(t.Context(), c), b) })
	}
	wg.Wait()
	return out, errs
}

// valuesOf returns the bytes of all variables but those of metrics.
func valuesOf(t *testing.T, store *model.Store) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	for v := range store.IterVariables() {
		if strings.Contains(v.Path(), "/metrics") {
			continue
		}
		if err := v.MustValue().ConstBytes(func(b []byte) { all[v.Path()] = slices.Clone(b) }); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestEqualBits trains a CNN of GoMLX's layers in GoMLX's loop on two and three workers, which draw other random
// numbers at their start. All variables end with the same bits: weights, optimizer, and moving averages.
func TestEqualBits(t *testing.T) {
	equalBits(t, backend, true, optimizer.Adam().LearningRate(0.01).Done(), 2, 3)
}

func equalBits(t *testing.T, open func(*testing.T) compute.Backend, random bool, opt optimizer.Interface,
	numbers ...int,
) {
	for _, workers := range numbers {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			stores, errs := togetherOn(t, open, workers, func(job *dataparallel.Job, b compute.Backend) (*model.Store, error) {
				return program(job, b, random, opt, images{4, 1 << 20}, 7, nil)
			})
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			want := valuesOf(t, stores[0])
			if len(want) < 4 {
				t.Fatalf("%d variables", len(want))
			}
			for rank, s := range stores[1:] {
				got := valuesOf(t, s)
				for name := range want {
					if !slices.Equal(got[name], want[name]) {
						t.Errorf("%s of worker %d differs from that of worker 0", name, rank+1)
					}
				}
			}
		})
	}
}

// TestEqualsLargeBatch compares two workers with one process that has twice the batch. Images of the same numbers
// are in a step, so the mean of the gradients is the same but for rounding.
func TestEqualsLargeBatch(t *testing.T) {
	for name, opt := range map[string]func() optimizer.Interface{
		"sgd": func() optimizer.Interface {
			return optimizer.StochasticGradientDescent().WithDecay(false).WithLearningRate(0.1)
		},
		"adam": func() optimizer.Interface { return optimizer.Adam().LearningRate(0.01).Epsilon(1e-2).Done() },
	} {
		t.Run(name, func(t *testing.T) {
			seeded := func(s *model.Store, _ *train.Loop) { s.SetParam(model.ParamInitialSeed, int64(5)) }
			alone, err := program(nil, backend(t), false, opt(), images{8, 6}, 6, func(s *model.Store, _ *train.Loop) {
				seeded(s, nil)
				if err := s.ResetRNGState(); err != nil {
					t.Error(err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			stores, errs := together(t, 2, func(job *dataparallel.Job, b compute.Backend) (*model.Store, error) {
				return program(job, b, false, opt(), images{4, 12}, 6, func(s *model.Store, _ *train.Loop) {
					seeded(s, nil)
					if err := s.ResetRNGState(); err != nil {
						t.Error(err)
					}
				})
			})
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			compared := 0
			for v := range alone.IterVariables() {
				if !v.Trainable || !v.DType().IsFloat() {
					continue
				}
				want := tensors.MustCopyFlatData[float32](v.MustValue())
				got := tensors.MustCopyFlatData[float32](stores[1].GetVariable(v.Path()).MustValue())
				for i := range want {
					if d := math.Abs(float64(got[i] - want[i])); !(d < 1e-5) {
						t.Fatalf("%s[%d] is %v, want %v", v.Path(), i, got[i], want[i])
					}
				}
				compared++
			}
			if compared != 4 {
				t.Errorf("compared %d variables, want 4", compared)
			}
		})
	}
}

// TestOtherWeights has workers whose weights diverge, or that start with other variables: an error on all of them
// names the worker.
func TestOtherWeights(t *testing.T) {
	for want, change := range map[string]func(rank int, s *model.Store, l *train.Loop){
		"the workers 1 have other weights than worker 0": func(rank int, s *model.Store, l *train.Loop) {
			l.OnStep("change", -2000, func(*train.Loop, []*tensors.Tensor) error {
				v := s.GetVariable("/readout/dense/biases")
				return v.SetValue(tensors.FromValue([]float32{float32(rank), 0, 0}))
			})
		},
		"the workers 1 have other variables than worker 0": func(rank int, s *model.Store, _ *train.Loop) {
			if rank == 1 {
				s.VariableWithValue("/more", float32(1))
			}
		},
	} {
		_, errs := together(t, 2, func(job *dataparallel.Job, b compute.Backend) (*model.Store, error) {
			return program(job, b, false, optimizer.Adam().Done(), images{2, 8}, 3, func(s *model.Store, l *train.Loop) {
				change(job.Rank(), s, l)
			})
		})
		for rank, err := range errs {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("worker %d: got %v, want %q in it", rank, err, want)
			}
		}
	}
}

// TestAccumulate accumulates gradients by GoMLX's trainer: an all-reduce for each update.
func TestAccumulate(t *testing.T) {
	stores, errs := together(t, 2, func(job *dataparallel.Job, b compute.Backend) (*model.Store, error) {
		return program(job, b, false, optimizer.Adam().Done(), images{2, 1 << 20}, 6, func(_ *model.Store, l *train.Loop) {
			if err := l.Trainer.AccumulateGradients(3); err != nil {
				t.Error(err)
			}
		})
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	a, b := valuesOf(t, stores[0]), valuesOf(t, stores[1])
	for name := range a {
		if strings.Contains(name, "acc_grads") {
			continue // of this worker's batches
		}
		if !slices.Equal(a[name], b[name]) {
			t.Errorf("%s differs", name)
		}
	}
	if got := optimizer.GetGlobalStep(stores[0]); got != 2 {
		t.Errorf("global step %d, want 2", got)
	}
}

func TestDataset(t *testing.T) {
	first, errs := together(t, 3, func(job *dataparallel.Job, _ compute.Backend) ([]float32, error) {
		var list []float32
		for b, err := range job.Dataset(images{1, 8}).Iter() {
			if err != nil {
				return nil, err
			}
			list = append(list, tensors.MustCopyFlatData[float32](b.Inputs[0])[0])
			if err := b.Finalize(); err != nil {
				return nil, err
			}
		}
		return list, nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for rank, list := range first {
		var want []float32
		for _, k := range []int{rank, 3 + rank} { // the batches 6 and 7 are left out
			want = append(want, float32(math.Sin(float64(k*36))))
		}
		if !slices.Equal(list, want) {
			t.Errorf("worker %d: got %v, want %v", rank, list, want)
		}
	}
}

func TestMean(t *testing.T) {
	means, errs := together(t, 2, func(job *dataparallel.Job, _ compute.Backend) ([]float64, error) {
		return job.Mean(float64(job.Rank()), 4)
	})
	if err := errors.Join(errs...); err != nil || !slices.Equal(means[1], []float64{0.5, 4}) {
		t.Errorf("got %v, %v, want 0.5 and 4", means, err)
	}
}

// TestMisuse has graphs of another backend, and an optimizer that takes no gradients.
func TestMisuse(t *testing.T) {
	_, errs := together(t, 2, func(job *dataparallel.Job, b compute.Backend) (*model.Store, error) {
		store := model.NewStore()
		trainer := train.NewTrainer(b, store, cnn(false), loss.SparseCategoricalCrossEntropyLogits,
			job.Optimizer(optimizer.Adam().Done()), nil, nil)
		_, err := train.NewLoop(trainer).RunSteps(images{2, 8}, 1)
		return store, err
	})
	for _, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "want that of Job.Backend") {
			t.Errorf("another backend: %v", err)
		}
	}
	_, errs = together(t, 2, func(job *dataparallel.Job, b compute.Backend) (*model.Store, error) {
		return program(job, b, false, lossOnly{}, images{2, 8}, 1, nil)
	})
	for _, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "no method UpdateGraphWithGradients") {
			t.Errorf("another optimizer: %v", err)
		}
	}
}

// lossOnly is an optimizer that computes gradients itself.
type lossOnly struct{}

func (lossOnly) UpdateGraph(*model.Scope, *graph.Graph, *graph.Node) {}
func (lossOnly) Clear(*model.Scope) error                            { return nil }
