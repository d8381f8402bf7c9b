package gomlx_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

// BenchmarkStep measures whole training steps with SGD, reduction by a plain loop included, in images per second.
func BenchmarkStep(b *testing.B) {
	for _, name := range gomlx.Names {
		for _, m := range []struct {
			name    string
			shape   []int
			forward models.Forward
		}{
			{"mlp", []int{28, 28, 1}, models.MLP{}.Forward},
			{"cnn", []int{28, 28, 1}, models.CNN{}.Forward},
			{"digits", []int{8, 8, 1}, models.CNN{Same: true, Dropout: 0.5}.Forward},
			{"gpt", []int{64}, models.GPT{}.Forward},
			{"mlp of GoMLX's layers", []int{28, 28, 1}, mlpOfGoMLX},
			{"cnn of GoMLX's layers", []int{28, 28, 1}, cnnOfGoMLX},
			{"gpt of GoMLX's layers", []int{64}, gptOfGoMLX},
		} {
			for _, replicas := range []int{1, 2} {
				for _, rows := range []int{16, 32, 64, 256} {
					b.Run(fmt.Sprintf("%s/%s/replicas=%d/rows=%d", name, m.name, replicas, rows), func(b *testing.B) {
						if name == "xla" && os.Getenv(gomlx.PluginEnv) == "" {
							b.Skip("no XLA: $" + gomlx.PluginEnv + " is not set")
						}
						e, err := gomlx.Open(name, gomlx.Options{Devices: replicas})
						if err != nil {
							b.Skip(err)
						}
						defer e.Close()
						benchmarkStep(b, e, m.forward, m.shape, rows)
					})
				}
			}
		}
	}
}

// mlpOfGoMLX is models.MLP{} built of GoMLX's layers.
func mlpOfGoMLX(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	x := graph.Reshape(inputs[0], inputs[0].Shape().Dim(0), -1)
	for i := range 2 {
		x = activation.Relu(layers.Dense(s.In("hidden_%d", i), x, true, 512))
	}
	return []*graph.Node{layers.Dense(s.In("readout"), x, true, 10)}
}

// cnnOfGoMLX is models.CNN{} built of GoMLX's layers.
func cnnOfGoMLX(s *model.Scope, inputs []*graph.Node) []*graph.Node {
	x := inputs[0]
	for i, n := range []int{32, 64} {
		x = layers.Convolution(s.In("stage_%d", i), x).Channels(n).KernelSize(3).NoPadding().Done()
		x = graph.MaxPool(activation.Relu(x)).Window(2).NoPadding().Done()
	}
	x = graph.Reshape(x, x.Shape().Dim(0), -1)
	x = activation.Relu(layers.Dense(s.In("hidden"), x, true, 128))
	return []*graph.Node{layers.Dense(s.In("readout"), x, true, 10)}
}

// BenchmarkWholeStep compares a step in one program with one in two programs, in turns.
func BenchmarkWholeStep(b *testing.B) {
	for _, name := range gomlx.Names {
		for _, m := range cutModels[:2] {
			for _, rows := range []int{64, 256} {
				b.Run(fmt.Sprintf("%s/%s/rows=%d", name, m.name, rows), func(b *testing.B) {
					if name == "xla" && os.Getenv(gomlx.PluginEnv) == "" {
						b.Skip("no XLA: $" + gomlx.PluginEnv + " is not set")
					}
					e, err := gomlx.Open(name, gomlx.Options{Devices: 1})
					if err != nil {
						b.Skip(err)
					}
					defer e.Close()
					p, err := cutModel(m.forward).Compile(context.Background(), e, features(e, rows, m.shape...))
					if err != nil {
						b.Fatal(err)
					}
					defer p.Close()
					x := randomBatch(1, rows, tensor.New(tensor.Float32, m.shape...).Len(), 10)
					x.Inputs[0] = x.Inputs[0].Reshape(append([]int{rows}, m.shape...)...)
					if !p.Info().WholeStep {
						b.Skip("two programs are always used")
					}
					micro := engine.Micro{Batch: x, WeightSum: float64(rows), Last: true}
					var one, two []float64
					for i := 0; b.Loop(); i++ {
						start := time.Now()
						if _, _, err := p.Step(context.Background(), micro); err != nil {
							b.Fatal(err)
						}
						p.Commit()
						middle := time.Now()
						if _, err := p.Gradients(context.Background(), 0, micro, nil); err != nil {
							b.Fatal(err)
						}
						if err := p.Update(context.Background(), 0, 0, 0, 1); err != nil {
							b.Fatal(err)
						}
						p.Commit()
						one = append(one, float64(middle.Sub(start).Microseconds()))
						two = append(two, float64(time.Since(middle).Microseconds()))
					}
					slices.Sort(one)
					slices.Sort(two)
					b.ReportMetric(one[len(one)/2], "µs-one")
					b.ReportMetric(two[len(two)/2], "µs-two")
				})
			}
		}
	}
}

// BenchmarkCuts measures what cutting the gradients program into buckets costs: programs of different cuts run in
// turns. It reports the median time of the uncut program, and for each cut the median of the ratio to it, of elapsed
// and of processor time.
func BenchmarkCuts(b *testing.B) {
	for _, name := range gomlx.Names {
		for _, m := range []struct {
			name    string
			shape   []int
			forward models.Forward
			rows    []int
			bytes   []int // of a bucket; 0: the default
		}{
			{"mlp", []int{28, 28, 1}, models.MLP{}.Forward, []int{64, 256}, []int{0, 1 << 20, 1 << 19, 1}},
			{"cnn", []int{28, 28, 1}, models.CNN{}.Forward, []int{64, 256}, []int{0, 1 << 19, 1 << 16, 1}},
			{"gpt", []int{64}, models.GPT{}.Forward, []int{4, 16}, []int{0, 2 << 20, 1 << 20, 1 << 19, 1 << 18, 1}},
		} {
			for _, rows := range m.rows {
				b.Run(fmt.Sprintf("%s/%s/rows=%d", name, m.name, rows), func(b *testing.B) {
					if name == "xla" && os.Getenv(gomlx.PluginEnv) == "" {
						b.Skip("no XLA: $" + gomlx.PluginEnv + " is not set")
					}
					e, err := gomlx.Open(name, gomlx.Options{Devices: 1})
					if err != nil {
						b.Skip(err)
					}
					defer e.Close()
					benchmarkCuts(b, e, m.forward, m.shape, rows, append([]int{1 << 40}, m.bytes...))
				})
			}
		}
	}
}

func benchmarkCuts(b *testing.B, e engine.Engine, forward models.Forward, shape []int, rows int, bytes []int) {
	ctx := context.Background()
	m, spec, batches := benchmarked(forward, shape, rows, 1)
	spec.Devices, spec.Replicas = e.Devices(), 2
	var programs []engine.Program
	for _, spec.BucketBytes = range bytes {
		p, err := m.Compile(ctx, e, spec)
		if err != nil {
			b.Fatal(err)
		}
		defer p.Close()
		programs = append(programs, p)
	}
	elapsed, processor := make([][]float64, len(programs)), make([][]float64, len(programs))
	round := func(record bool) {
		for i, p := range programs {
			start, before := time.Now(), cpuTime()
			if _, err := enginetest.Gradients(ctx, p, 0, batches[0], 1, [3]uint64{}); err != nil {
				b.Fatal(err)
			}
			if record {
				elapsed[i] = append(elapsed[i], float64(time.Since(start).Microseconds()))
				processor[i] = append(processor[i], float64((cpuTime() - before).Microseconds()))
			}
			p.Discard()
		}
	}
	for range 3 {
		round(false)
	}
	for b.Loop() {
		round(true)
	}
	middle := func(list []float64) float64 {
		list = slices.Clone(list)
		slices.Sort(list)
		return list[len(list)/2]
	}
	for i, p := range programs[1:] {
		kind := ""
		if bytes[1+i] == 0 {
			kind = "-by-default"
		}
		for what, times := range map[string][][]float64{"elapsed": elapsed, "cpu": processor} {
			ratios := make([]float64, len(times[1+i]))
			for j, t := range times[1+i] {
				ratios[j] = t / max(1, times[0][j])
			}
			b.ReportMetric(middle(ratios), fmt.Sprintf("%s-x-%d-buckets%s", what, len(p.Buckets()), kind))
		}
	}
	b.ReportMetric(middle(elapsed[0]), "µs-uncut")
	b.ReportMetric(middle(processor[0]), "cpu-µs-uncut")
}

// benchmarked returns a model, its spec without devices, and a batch of random examples for each of n replicas. Inputs
// of one dimension are sequences of bytes.
func benchmarked(forward models.Forward, shape []int, rows, n int) (*gomlx.Model, engine.Spec, []engine.Batch) {
	m := cutModel(forward)
	spec := engine.Spec{
		Rows: rows, Seed: 1,
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: shape}}, Labels: []engine.Feature{{DType: tensor.Int32}},
	}
	sequences := len(shape) == 1
	if sequences {
		spec.Inputs[0].DType, spec.Labels[0].Shape = tensor.Int32, shape
		m.Metrics = nil
	}
	r := rand.New(rand.NewPCG(1, 2))
	batches := make([]engine.Batch, n)
	for i := range batches {
		x := tensor.New(spec.Inputs[0].DType, append([]int{rows}, shape...)...)
		if sequences {
			for j := range tensor.Data[int32](x) {
				tensor.Data[int32](x)[j] = r.Int32N(256)
			}
		} else {
			for j := range tensor.Data[float32](x) {
				tensor.Data[float32](x)[j] = r.Float32()
			}
		}
		y := tensor.New(tensor.Int32, append([]int{rows}, spec.Labels[0].Shape...)...)
		for j := range tensor.Data[int32](y) {
			tensor.Data[int32](y)[j] = r.Int32N(10)
		}
		batches[i] = engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: ones(rows)}
	}
	return m, spec, batches
}

func benchmarkStep(b *testing.B, e engine.Engine, forward models.Forward, shape []int, rows int) {
	ctx := context.Background()
	n := len(e.Devices())
	m, spec, batches := benchmarked(forward, shape, rows, n)
	spec.Devices = e.Devices()
	p, err := m.Compile(ctx, e, spec)
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	gradients := make([]enginetest.Result, n)
	each := func(f func(i int) error) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				if err := f(i); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}
	step := func() {
		each(func(i int) (err error) {
			gradients[i], err = enginetest.Gradients(ctx, p, i, batches[i], float64(n*rows), [3]uint64{1, 2, uint64(i)})
			return err
		})
		each(func(i int) error {
			for j := range gradients[i].Tensors { // each replica adds its part of every gradient
				sum := tensor.Data[float32](gradients[0].Tensors[j])
				lo, hi := i*len(sum)/n, (i+1)*len(sum)/n
				for k := 1; k < n; k++ {
					for l, x := range tensor.Data[float32](gradients[k].Tensors[j])[lo:hi] {
						sum[lo+l] += x
					}
				}
				for k := 1; k < n; k++ {
					copy(tensor.Data[float32](gradients[k].Tensors[j])[lo:hi], sum[lo:hi])
				}
			}
			return nil
		})
		each(func(i int) error { return enginetest.Update(ctx, p, i, i) })
		p.Commit()
	}
	for range 3 {
		step()
	}
	var before, after runtime.MemStats
	cpu := cpuTime()
	runtime.ReadMemStats(&before)
	for b.Loop() {
		step()
	}
	cpu = cpuTime() - cpu
	runtime.ReadMemStats(&after)
	b.ReportMetric(float64(b.N*n*rows)/b.Elapsed().Seconds(), "images/s")
	b.ReportMetric(float64(cpu.Microseconds())/float64(b.N*n*rows), "cpu-µs/image")
	b.ReportMetric(float64(after.NumGC-before.NumGC)/float64(b.N), "gc/step")
	b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/float64(b.N)/1024, "KiB/step")
}
