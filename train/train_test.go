package train

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"reflect"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // the tests use little memory, and a fifth of their time went into collecting it
	goleak.VerifyTestMain(m)
}

// batches returns a dataset of the batches.
func batches(list ...data.Batch) data.Dataset {
	return data.FromSeq(len(list), func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for _, b := range list {
				if !yield(b, nil) {
					return
				}
			}
		}
	})
}

// oracle trains the fake's model in a plain loop over whole batches.
type oracle struct {
	bias, w0, w1, mb, m0, m1 float64
	seen                     float64
}

func (o *oracle) step(rate float64, b data.Batch) (loss, near, weight float64) {
	x, y := tensor.Data[float64](b.Inputs[0]), tensor.Data[float64](b.Labels[0])
	w := make([]float64, len(y))
	for i := range w {
		w[i] = 1
		if b.Weights != nil {
			w[i] = float64(tensor.Data[float32](b.Weights)[i])
		}
		weight += w[i]
	}
	if weight == 0 {
		return 0, 0, 0
	}
	var gb, g0, g1 float64
	for i := range y {
		d := x[2*i]*o.w0 + x[2*i+1]*o.w1 + o.bias - y[i]
		loss += w[i] * d * d
		if math.Abs(d) <= 0.5 {
			near += w[i]
		}
		gb += 2 * w[i] * d
		g0 += 2 * w[i] * d * x[2*i]
		g1 += 2 * w[i] * d * x[2*i+1]
		o.seen += w[i] * x[2*i]
	}
	o.mb, o.m0, o.m1 = o.mb/2+gb/weight, o.m0/2+g0/weight, o.m1/2+g1/weight
	o.bias, o.w0, o.w1 = o.bias-rate*o.mb, o.w0-rate*o.m0, o.w1-rate*o.m1
	return loss, near, weight
}

// TestFitEqualsOneLoop checks that for any number of replicas and any sizes and weights of batches, variables, loss and
// metrics equal those of a plain loop over whole batches.
func TestFitEqualsOneLoop(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		replicas := rapid.IntRange(1, 4).Draw(rt, "replicas")
		globalBatch := rapid.IntRange(1, 9).Draw(rt, "global batch")
		var list []data.Batch
		for range rapid.IntRange(1, 5).Draw(rt, "batches") {
			n := rapid.IntRange(0, globalBatch).Draw(rt, "examples")
			b := lineExamples(n)
			if rapid.Bool().Draw(rt, "weighted") {
				w := rapid.SliceOfN(rapid.SampledFrom([]float32{0, 0, 0.5, 1, 3}), n, n).Draw(rt, "weights")
				b.Weights = tensor.Of(w, n)
			}
			list = append(list, b)
		}
		trainer, p := newFake(t, replicas, globalBatch, fakeModel{})
		h, err := trainer.Fit(t.Context(), batches(list...), FitConfig{Epochs: 2})
		if err != nil {
			rt.Fatal(err)
		}
		o := oracle{w0: 3}
		skipped := 0
		for epoch := range 2 {
			var loss, near, weight float64
			for _, b := range list {
				l, n, w := o.step(1.0/64, b)
				loss, near, weight = loss+l, near+n, weight+w
				if w == 0 {
					skipped++
				}
			}
			got := h.Epochs[epoch]
			if !close64(got.Loss, loss/weight) || !close64(got.Metrics["near"], near/weight) {
				rt.Errorf("epoch %d: got %v, want loss %v and near %v", epoch, got.Result, loss/weight, near/weight)
			}
		}
		if h.Steps != 2*len(list) || h.Skipped != skipped || trainer.Steps() != int64(2*len(list)-skipped) {
			rt.Errorf("%d steps, %d skipped, %d committed: want %d, %d", h.Steps, h.Skipped, trainer.Steps(), 2*len(list),
				skipped)
		}
		var seen float64
		for replica, v := range p.snapshot() {
			got := []float64{v[0][0], v[1][0], v[1][1], v[2][0], v[3][0], v[3][1]}
			want := []float64{o.bias, o.w0, o.w1, o.mb, o.m0, o.m1}
			for i, variable := range []int{0, 1, 1, 2, 3, 3} {
				if p.owned(replica, variable) && !close64(got[i], want[i]) {
					rt.Errorf("replica %d: got %v, want %v", replica, got, want)
					break
				}
			}
			seen += v[4][0]
		}
		if !close64(seen, o.seen) {
			rt.Errorf("the replicas together saw %v, want %v", seen, o.seen)
		}
	})
}

// close64 allows for other orders of summation.
func close64(a, b float64) bool {
	return math.Abs(a-b) <= 1e-9*(1+math.Abs(b)) || math.IsNaN(a) && math.IsNaN(b)
}

// TestFailedStepChangesNothing makes every phase of a step fail on every replica, by an error and by a panic, and
// checks that no variable of any replica changes.
func TestFailedStepChangesNothing(t *testing.T) {
	const replicas = 3
	_, parts := newFake(t, replicas, 6, fakeModel{})
	for _, phase := range []string{"gradients", "update 0", "update 1"} {
		for _, how := range []string{"error", "panic", "exit"} {
			for bad := range replicas {
				if part := strings.TrimPrefix(phase, "update "); part != phase && fmt.Sprint(len(parts.Parts(bad))) <= part {
					continue // a replica's shard may have fewer parts
				}
				t.Run(fmt.Sprintf("%s/%s/replica %d", phase, how, bad), func(t *testing.T) {
					armed := false
					cause := errors.New("out of luck")
					trainer, p := newFake(t, replicas, 6, fakeModel{fail: func(at string, replica int) error {
						if !armed || at != phase || replica != bad {
							return nil
						}
						switch how {
						case "panic":
							panic(cause)
						case "exit":
							runtime.Goexit()
						}
						return cause
					}})
					all := lineExamples(6)
					if _, err := trainer.Fit(t.Context(), batches(all), FitConfig{Epochs: 2}); err != nil {
						t.Fatal(err)
					}
					before, steps := p.snapshot(), trainer.Steps()
					armed = true
					_, err := trainer.Fit(t.Context(), batches(all), FitConfig{})
					if err == nil || !strings.Contains(err.Error(), "epoch 1, step 1") {
						t.Fatalf("got %v, want an error that names epoch and step", err)
					}
					if how == "error" && !errors.Is(err, cause) {
						t.Errorf("the error does not wrap its cause: %v", err)
					}
					if got := p.snapshot(); !reflect.DeepEqual(got, before) || trainer.Steps() != steps {
						t.Errorf("a failed step changed variables:\n%v, were\n%v", got, before)
					}
					armed = false // training continues as if nothing had happened
					if _, err := trainer.Fit(t.Context(), batches(all), FitConfig{}); err != nil {
						t.Fatalf("after a failed step: %v", err)
					}
					o := oracle{w0: 3}
					for range 3 {
						o.step(1.0/64, all)
					}
					if got := p.snapshot()[bad][0][0]; !close64(got, o.bias) {
						t.Errorf("bias after three good steps is %v, want %v", got, o.bias)
					}
				})
			}
		}
	}
}

// TestBitsRepeat trains twice on batches that do not divide evenly.
func TestBitsRepeat(t *testing.T) {
	for replicas := range 4 {
		var hashes []string
		for range 2 {
			trainer, _ := newFake(t, replicas+1, 7, fakeModel{})
			all := lineExamples(40)
			if _, err := trainer.Fit(t.Context(), sizes(all, 7, 7, 7, 7, 7, 5), FitConfig{Epochs: 3}); err != nil {
				t.Fatal(err)
			}
			h, err := trainer.WeightsHash(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			hashes = append(hashes, h)
		}
		if hashes[0] != hashes[1] || len(hashes[0]) != 64 {
			t.Errorf("%d replicas: hashes %v", replicas+1, hashes)
		}
	}
}

// TestCentralStorageRefused checks that an engine that keeps separate variables for every replica does not train with a
// strategy that has one copy of them.
func TestCentralStorageRefused(t *testing.T) {
	s, err := distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{
		ComputeDevices: []string{"CPU:0", "CPU:1"}, Engine: fakeEngine{2},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = New(t.Context(), s, fakeModel{}, fakeConfig(4))
	want := "train: compiling the model: the engine fake gives every replica its own variables, " +
		"where CentralStorageStrategy(CPU:0, CPU:1) keeps them on /job:localhost/replica:0/task:0/device:CPU:0: use " +
		"NewMirroredStrategy"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
