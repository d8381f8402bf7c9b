package gomlx_test

import (
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/gomlx/gomlx/core/tensors"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// eachEngine runs a test on the Go engine, and on XLA if this build contains it and the plugin is set.
func eachEngine(t *testing.T, devices int, f func(t *testing.T, e engine.Engine)) {
	t.Helper()
	for _, name := range gomlx.Names {
		t.Run(name, func(t *testing.T) {
			if name == "xla" && (!builtWithXLA || os.Getenv(gomlx.PluginEnv) == "") {
				t.Skipf("no XLA: built with it: %v, $%s is %q", builtWithXLA, gomlx.PluginEnv, os.Getenv(gomlx.PluginEnv))
			}
			f(t, openEngine(t, name, devices))
		})
	}
}

func openEngine(t *testing.T, name string, devices int) engine.Engine {
	t.Helper()
	e, err := gomlx.Open(name, gomlx.Options{Devices: devices})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func compile(t *testing.T, m engine.Model, e engine.Engine, s engine.Spec) engine.Program {
	t.Helper()
	p, err := m.Compile(t.Context(), e, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// features is a spec of one replica for rows of float32 numbers and integer labels.
func features(e engine.Engine, rows int, shape ...int) engine.Spec {
	return engine.Spec{
		Rows: rows, Seed: 1, Devices: e.Devices()[:1],
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: shape}}, Labels: []engine.Feature{{DType: tensor.Int32}},
	}
}

func randomBatch(seed uint64, rows, features, classes int) engine.Batch {
	r := rand.New(rand.NewPCG(seed, 1))
	x, y := tensor.New(tensor.Float32, rows, features), tensor.New(tensor.Int32, rows)
	for i := range tensor.Data[float32](x) {
		tensor.Data[float32](x)[i] = float32(r.NormFloat64())
	}
	for i := range tensor.Data[int32](y) {
		tensor.Data[int32](y)[i] = r.Int32N(int32(classes))
	}
	return engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: ones(rows)}
}

func ones(n int) []float32 {
	w := make([]float32, n)
	for i := range w {
		w[i] = 1
	}
	return w
}

// share splits rows [lo, hi) of a batch over n replicas of per rows each, padded with weight 0.
func share(b engine.Batch, lo, hi, per, n int) []engine.Batch {
	list := make([]engine.Batch, n)
	for i := range list {
		from, to := min(hi, lo+i*per), min(hi, lo+(i+1)*per)
		pad := func(t *tensor.Tensor) *tensor.Tensor {
			out := tensor.New(t.DType(), append([]int{per}, t.Shape()[1:]...)...)
			copy(out.Memory().HostBytes(), t.Rows(from, to).Memory().HostBytes())
			return out
		}
		w := make([]float32, per)
		copy(w, ones(to-from))
		list[i] = engine.Batch{
			Inputs: []*tensor.Tensor{pad(b.Inputs[0])}, Labels: []*tensor.Tensor{pad(b.Labels[0])}, Weights: w,
			Padding: per - (to - from),
		}
	}
	return list
}

// trainStep runs one step on all replicas concurrently. The gradients are added in the order of replicas.
func trainStep(t testing.TB, p engine.Program, batches []engine.Batch, weightSum float64) float64 {
	t.Helper()
	g := make([]enginetest.Result, len(batches))
	each := func(f func(r int) error) {
		var wg sync.WaitGroup
		for r := range batches {
			wg.Go(func() {
				if err := f(r); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			t.FailNow()
		}
	}
	each(func(r int) (err error) {
		g[r], err = enginetest.Gradients(t.Context(), p, r, batches[r], weightSum, [3]uint64{1, uint64(r), 3})
		return err
	})
	for i, sum := range g[0].Tensors {
		for _, other := range g[1:] {
			for j, x := range tensor.Data[float32](other.Tensors[i]) {
				tensor.Data[float32](sum)[j] += x
			}
		}
		for _, other := range g[1:] {
			copy(other.Tensors[i].Memory().HostBytes(), sum.Memory().HostBytes())
		}
	}
	each(func(r int) error { return enginetest.Update(t.Context(), p, r, r) })
	p.Commit()
	loss := 0.0
	for r := range batches {
		loss += g[r].Loss
	}
	return loss
}

func readVariable(t testing.TB, p engine.Program, replica, i int) *tensor.Tensor {
	t.Helper()
	x, err := p.Read(replica, i)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// variable finds a variable by its name.
func variable(t testing.TB, p engine.Program, name string) int {
	t.Helper()
	for i, v := range p.Variables() {
		if v.Name == name {
			return i
		}
	}
	t.Fatalf("no variable %s in %v", name, p.Variables())
	return -1
}

// toGoMLX copies a tensor into a GoMLX tensor.
func toGoMLX(t *testing.T, x *tensor.Tensor) *tensors.Tensor {
	t.Helper()
	switch x.DType() {
	case tensor.Float32:
		return tensors.FromFlatDataAndDimensions(tensor.Data[float32](x), x.Shape()...)
	case tensor.Int32:
		return tensors.FromFlatDataAndDimensions(tensor.Data[int32](x), x.Shape()...)
	case tensor.Int64:
		return tensors.FromFlatDataAndDimensions(tensor.Data[int64](x), x.Shape()...)
	}
	t.Fatalf("no test needs a %v of GoMLX's", x.DType())
	return nil
}
