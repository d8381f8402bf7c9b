// Package enginetest is the conformance suite for implementations of package engine. An engine's tests call
// [Run] with a function that opens the engine, and with the models to train, written for that engine.
package enginetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Shapes of the models. Inputs are float32 rows of Features numbers; labels are int32 scalars from 0 to
// Classes-1.
const (
	Features = 6
	Classes  = 4
)

// Config holds the engine and the models for [Run]. All models are classifiers with a softmax cross-entropy
// loss and one metric, "accuracy". Their optimizer is Adam or another one with slots.
type Config struct {
	// Open opens an engine with at least n devices.
	Open func(n int) (engine.Engine, error)

	// Plain returns a model with at least four parameters, no randomness and no regularisation. Its optimizer
	// does not combine gradients of several parameters.
	Plain func() engine.Model
	// Random returns a model that uses dropout in training.
	Random func() engine.Model
	// Averaging returns a model with a moving average that inference uses.
	Averaging func() engine.Model
	// Regularised returns a model that adds a penalty on its weights to the loss.
	Regularised func() engine.Model
	// Wide returns a model with a parameter of at least 5 times engine.PieceElements elements, whose optimizer works
	// element by element, if the engine divides such parameters among shards. It may be nil.
	Wide func() engine.Model
	// Panicking returns a model that panics with a value containing "deliberate" while it is built.
	Panicking func() engine.Model

	// Memory runs only the tests of what passes between the host's memory and the devices': for an engine that passed
	// all tests with another kind of memory.
	Memory bool
}

// Run tests an engine, in subtests of t.
func Run(t *testing.T, c Config) {
	for _, test := range []struct {
		name   string
		run    func(*testing.T, Config)
		memory bool
	}{
		{"devices", testDevices, false},
		{"variables", testVariables, false},
		{"initial values", testInitialValues, false},
		{"read and write", testReadWrite, true},
		{"gradients by differences", testDifferences, false},
		{"gradients of shares", testShares, false},
		{"padding rows do not matter", testPadding, false},
		{"weights count as copies", testWeights, false},
		{"commit makes values visible, discard drops them", testCommit, true},
		{"a failed step changes nothing", testFailedStep, true},
		{"buckets", testBuckets, true},
		{"parts give the same bits", testParts, true},
		{"gradients of the caller's", testFilledGradients, true},
		{"incomplete gradients", testIncompleteGradients, true},
		{"factor", testFactor, true},
		{"accumulation", testAccumulation, true},
		{"averages over micro-batches", testAccumulatedAverages, true},
		{"loss scale", testLossScale, true},
		{"gradient memory", testGradientMemory, true},
		{"updated memory", testUpdatedMemory, true},
		{"several replicas of a device", testSharedDevice, true},
		{"shards", testShards, true},
		{"replicas placed anew", testPlace, true},
		{"a whole step", testWholeStep, true},
		{"random state", testRandom, false},
		{"moving averages", testAverages, true},
		{"averages alone", testAveragesAlone, false},
		{"regularisation counts once", testRegularisation, false},
		{"evaluate and predict", testEvaluate, true},
		{"batch buffers", testBatchBuffers, true},
		{"batches of several shapes", testShapes, true},
		{"wrong arguments", testWrongArguments, false},
		{"a model that panics", testPanic, false},
		{"replicas at the same time", testConcurrent, true},
		{"closed", testClosed, true},
	} {
		if test.memory || !c.Memory {
			t.Run(test.name, func(t *testing.T) { test.run(t, c) })
		}
	}
}

func testDevices(t *testing.T, c Config) {
	e := open(t, c, 2)
	if e.Name() == "" || e.Description() == "" || strings.Contains(e.Description(), "\n") {
		t.Errorf("name %q, description %q: want one line each", e.Name(), e.Description())
	}
	d := e.Devices()
	if len(d) < 2 {
		t.Fatalf("%d devices, want at least 2", len(d))
	}
	for i, x := range d {
		if x.Kind == "" || slices.Index(d, x) != i {
			t.Errorf("device %d is %+v: want a kind, and no device twice in %v", i, x, d)
		}
	}
	s := spec(e, 1, 4)
	s.Devices[0].Index = 1000
	if p, err := c.Plain().Compile(t.Context(), e, s); err == nil {
		p.Close()
		t.Error("compiled for a device that is not there")
	}
}

func testVariables(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 1, 4)
	parameters, all := p.Parameters(), p.Variables()
	if len(parameters) < 4 || len(all) <= len(parameters) {
		t.Fatalf("%d parameters of %d variables: want at least 4, and slots", len(parameters), len(all))
	}
	if !slices.IsSortedFunc(all, func(a, b engine.Variable) int {
		if a.Role != b.Role {
			return int(a.Role) - int(b.Role)
		}
		return strings.Compare(a.Name, b.Name)
	}) {
		t.Errorf("variables are not sorted by role and name: %v", all)
	}
	names := map[string]bool{}
	for i, v := range all {
		if names[v.Name] || v.Name == "" {
			t.Errorf("name %q is empty or used twice", v.Name)
		}
		names[v.Name] = true
		if isParameter := i < len(parameters); isParameter != (v.Role == engine.Parameter) {
			t.Errorf("variable %d of %d parameters has role %v", i, len(parameters), v.Role)
		} else if isParameter && fmt.Sprint(parameters[i]) != fmt.Sprint(v) {
			t.Errorf("parameter %d is %v, variable %d is %v", i, parameters[i], i, v)
		}
	}
	for i, v := range parameters {
		if want := len(tensor.New(v.DType, v.Shape...).Memory().HostBytes()); v.Bytes() != want {
			t.Errorf("%s has %d bytes, want %d", v.Name, v.Bytes(), want)
		}
		x := must(p.Gradient(0, i))(t)
		if !x.Equal(tensor.New(v.DType, v.Shape...)) {
			t.Errorf("the gradient of %s, without a call of Gradients, is %v: want zeros", v.Name, x)
		}
	}
	p.Discard()
	if got := p.Metrics(); !slices.Equal(got, []string{"accuracy"}) {
		t.Errorf("metrics %v, want [accuracy]", got)
	}
}

func testInitialValues(t *testing.T, c Config) {
	e := open(t, c, 2)
	values := func(seed int64) [][]*tensor.Tensor {
		s := spec(e, 2, 4)
		s.Seed = seed
		p := mustCompile(t, c.Plain(), e, s)
		return [][]*tensor.Tensor{read(t, p, 0), read(t, p, 1)}
	}
	a, b, other := values(7), values(7), values(8)
	sameBits(t, "replica 1 against replica 0", a[1], a[0])
	sameBits(t, "a second program of the same seed", b[0], a[0])
	if equal(a[0], other[0]) {
		t.Error("another seed gives the same initial values")
	}
}

func testReadWrite(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 2, 4)
	before := read(t, p, 1)
	for i, v := range p.Variables() {
		x := tensor.New(v.DType, v.Shape...)
		for j := range x.Memory().HostBytes() {
			x.Memory().HostBytes()[j] = byte(i + 3*j)
		}
		want := x.Clone()
		check(t, p.Write(0, i, x))
		clear(x.Memory().HostBytes()) // the value was copied
		got := must(p.Read(0, i))(t)
		if !got.Equal(want) {
			t.Errorf("%s: read %v after writing %v", v.Name, got, want)
		}
		clear(got.Memory().HostBytes()) // and is copied again
		if again, err := p.Read(0, i); err != nil || !again.Equal(want) {
			t.Errorf("%s: changing what Read returned changed the variable, or %v", v.Name, err)
		}
	}
	sameBits(t, "replica 1 after writing to replica 0", read(t, p, 1), before)
	v := p.Parameters()[0]
	for name, err := range map[string]error{
		"another shape":  p.Write(0, 0, tensor.New(v.DType, append(slices.Clone(v.Shape), 2)...)),
		"another dtype":  p.Write(0, 0, tensor.New(tensor.Int8, v.Shape...)),
		"nil":            p.Write(0, 0, nil),
		"no such one":    p.Write(0, len(p.Variables()), tensor.New(v.DType, v.Shape...)),
		"no replica":     p.Write(2, 0, tensor.New(v.DType, v.Shape...)),
		"read no such":   second(p.Read(0, -1)),
		"read no replic": second(p.Read(-1, 0)),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// testDifferences compares gradients with finite differences of the loss that Evaluate returns.
func testDifferences(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 1, 8)
	b := batch(1, 8)
	g := gradients(t, p, 0, b, 8)
	loss := func() float64 {
		l, _ := evaluate(t, p, 0, b, 8)
		return l
	}
	if l := loss(); math.Abs(l-g.Loss) > 1e-5 {
		t.Errorf("loss %v in training, %v in evaluation of a model without randomness", g.Loss, l)
	}
	r := rand.New(rand.NewPCG(1, 1))
	const h = 1e-2
	for i, v := range p.Parameters() {
		x := must(p.Read(0, i))(t)
		for range 4 {
			j := r.IntN(x.Len())
			at := func(d float32) float64 {
				y := x.Clone()
				tensor.Data[float32](y)[j] += d
				check(t, p.Write(0, i, y))
				return loss()
			}
			slope := (at(h) - at(-h)) / (2 * h)
			got := float64(tensor.Data[float32](g.Tensors[i])[j])
			if math.Abs(slope-got) > 2e-3+2e-2*math.Abs(slope) {
				t.Errorf("gradient of %s at %d is %v, the loss's slope %v", v.Name, j, got, slope)
			}
		}
		check(t, p.Write(0, i, x))
	}
}

// testShares checks that the replicas' shares of a global batch add up to the whole, however it is split.
func testShares(t *testing.T, c Config) {
	const rows = 12
	whole := compile(t, c, c.Plain(), 1, rows)
	b := batch(2, rows)
	want := gradients(t, whole, 0, b, rows)
	wantTensors := cloneAll(want.Tensors)
	for _, n := range []int{2, 3, 5} {
		p := compile(t, c, c.Plain(), n, 8)
		sum := make([]*tensor.Tensor, len(wantTensors))
		var loss, accuracy float64
		for i := range n {
			g := gradients(t, p, i, part(b, n, i, 8), rows)
			loss, accuracy = loss+g.Loss, accuracy+g.Metrics[0]
			addAll(sum, g.Tensors)
		}
		for i, s := range sum {
			if d := distance(s, wantTensors[i]); d > 1e-5 {
				t.Errorf("%d shares: gradient of %s differs by %g", n, p.Parameters()[i].Name, d)
			}
		}
		if math.Abs(loss-want.Loss) > 1e-5 || accuracy != want.Metrics[0] {
			t.Errorf("%d shares: loss %v, accuracy %v; whole: %v, %v", n, loss, accuracy, want.Loss, want.Metrics[0])
		}
	}
}

func testPadding(t *testing.T, c Config) {
	const rows, used = 8, 5
	p := compile(t, c, c.Plain(), 1, rows)
	b := batch(3, rows)
	for i := used; i < rows; i++ {
		b.Weights[i] = 0
	}
	g := gradients(t, p, 0, b, used)
	want, wantLoss, wantMetric := cloneAll(g.Tensors), g.Loss, g.Metrics[0]
	other := batch(4, rows)
	for i := range used * Features {
		tensor.Data[float32](other.Inputs[0])[i] = tensor.Data[float32](b.Inputs[0])[i]
	}
	for i := range used {
		tensor.Data[int32](other.Labels[0])[i] = tensor.Data[int32](b.Labels[0])[i]
	}
	copy(other.Weights, b.Weights)
	g = gradients(t, p, 0, other, used)
	sameBits(t, "gradients with other padding", g.Tensors, want)
	if g.Loss != wantLoss || g.Metrics[0] != wantMetric {
		t.Errorf("loss %v, metric %v with other padding: want %v, %v", g.Loss, g.Metrics[0], wantLoss, wantMetric)
	}
	clear(other.Weights)
	g = gradients(t, p, 0, other, used)
	for i, x := range g.Tensors {
		for _, v := range x.Float64s() {
			if v != 0 {
				t.Fatalf("gradient of %s is not zero for a replica without examples", p.Parameters()[i].Name)
			}
		}
	}
	if g.Loss != 0 || g.Metrics[0] != 0 {
		t.Errorf("loss %v, metric %v of a replica without examples: want 0", g.Loss, g.Metrics[0])
	}
}

func testWeights(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 1, 4)
	weighted := batch(5, 4)
	copy(weighted.Weights, []float32{2, 1, 1, 0})
	g := gradients(t, p, 0, weighted, 4)
	want, wantLoss, wantMetric := cloneAll(g.Tensors), g.Loss, g.Metrics[0]
	copied := batch(5, 4)
	x, y := tensor.Data[float32](copied.Inputs[0]), tensor.Data[int32](copied.Labels[0])
	copy(x[3*Features:], x[:Features])
	y[3] = y[0]
	g = gradients(t, p, 0, copied, 4)
	for i := range want {
		if d := distance(g.Tensors[i], want[i]); d > 1e-6 {
			t.Errorf("gradient of %s: weight 2 and the row twice differ by %g", p.Parameters()[i].Name, d)
		}
	}
	if math.Abs(g.Loss-wantLoss) > 1e-6 || g.Metrics[0] != wantMetric {
		t.Errorf("loss and metric %v, %v with weight 2; %v, %v with the row twice", wantLoss, wantMetric, g.Loss,
			g.Metrics[0])
	}
}

func testCommit(t *testing.T, c Config) {
	for _, model := range []struct {
		name string
		m    engine.Model
	}{{"plain", c.Plain()}, {"averaging", c.Averaging()}} {
		t.Run(model.name, func(t *testing.T) {
			p := compile(t, c, model.m, 2, 4)
			b := batch(6, 4)
			start := read(t, p, 0)
			run := func() {
				g := gradients(t, p, 0, b, 4)
				fill(t, p, 1, g.Tensors)
				update(t, p, 0, 1)
				update(t, p, 1, 1)
				sameBits(t, "before the commit", read(t, p, 0), start)
			}
			run()
			p.Discard()
			sameBits(t, "after the discard", read(t, p, 0), start)
			p.Commit()
			sameBits(t, "after a commit of what was discarded", read(t, p, 0), start)
			run()
			p.Commit()
			first := read(t, p, 0)
			for i, v := range p.Variables() {
				changes := v.Role == engine.Parameter || v.Role == engine.Average
				if changes && first[i].Equal(start[i]) {
					t.Errorf("%s is the same after a step", v.Name)
				}
				if v.Role == engine.Frozen && !first[i].Equal(start[i]) {
					t.Errorf("%s is frozen and has changed", v.Name)
				}
			}
			for i, x := range read(t, p, 1) { // it computed no averages
				want := first
				if p.Variables()[i].Role == engine.Average {
					want = start
				}
				if !x.Equal(want[i]) {
					t.Errorf("%s of replica 1 is %v, want %v", p.Variables()[i].Name, x, want[i])
				}
			}
			p.Discard()
			p.Commit()
			sameBits(t, "after a discard and a commit of nothing", read(t, p, 0), first)

			// The same step of another program, after one that was discarded, gives the same bits.
			q := compile(t, c, model.m, 2, 4)
			fill(t, q, 1, gradients(t, q, 0, batch(60, 4), 4).Tensors)
			update(t, q, 0, 1)
			q.Discard()
			step(t, q, 0, b, 4)
			sameBits(t, "the same step of another program", read(t, q, 0), first)
		})
	}
}

func testFailedStep(t *testing.T, c Config) {
	p := compile(t, c, c.Averaging(), 1, 4)
	step(t, p, 0, batch(7, 4), 4)
	start := read(t, p, 0)
	reason := errors.New("a peer is gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	gradients(t, p, 0, batch(8, 4), 4)
	cancel(reason)
	if err := p.Update(ctx, 0, 0, 0, 1); !errors.Is(err, reason) {
		t.Errorf("update with a cancelled context: %v, want its cause", err)
	}
	p.Discard()
	sameBits(t, "after a failed update", read(t, p, 0), start)
	if _, err := Gradients(ctx, p, 0, batch(8, 4), 4, [3]uint64{}); !errors.Is(err, reason) {
		t.Errorf("gradients with a cancelled context: %v, want its cause", err)
	}
	p.Discard()
	sameBits(t, "after failed gradients", read(t, p, 0), start)
	if _, _, err := p.Evaluate(ctx, 0, batch(8, 4), 4); !errors.Is(err, reason) {
		t.Errorf("evaluate with a cancelled context: %v, want its cause", err)
	}
	if _, err := p.Predict(ctx, 0, batch(8, 4).Inputs); !errors.Is(err, reason) {
		t.Errorf("predict with a cancelled context: %v, want its cause", err)
	}

	testOneFails(t, c)

	// The program still works as before.
	q := compile(t, c, c.Averaging(), 1, 4)
	step(t, q, 0, batch(7, 4), 4)
	for _, x := range []engine.Program{p, q} {
		step(t, x, 0, batch(8, 4), 4)
	}
	sameBits(t, "the next step after a failed one", read(t, p, 0), read(t, q, 0))
}

// testOneFails makes one replica's gradients fail while another one's device is updated, and checks that both
// keep their values.
func testOneFails(t *testing.T, c Config) {
	t.Helper()
	p := compile(t, c, c.Averaging(), 2, 4)
	start := [][]*tensor.Tensor{read(t, p, 0), read(t, p, 1)}
	gradients(t, p, 0, batch(7, 4), 8)
	var updated, failed error
	var wg sync.WaitGroup
	wg.Go(func() { updated = p.Update(t.Context(), 0, 0, 0, 1) })
	wg.Go(func() { _, failed = Gradients(t.Context(), p, 1, batch(8, 3), 8, [3]uint64{}) })
	wg.Wait()
	if updated != nil || failed == nil {
		t.Errorf("replica 0: %v, want no error; replica 1, with too few rows: %v", updated, failed)
	}
	p.Discard()
	for r := range start {
		sameBits(t, fmt.Sprintf("replica %d after replica 1 failed", r), read(t, p, r), start[r])
	}
}

// bucketed is a spec of n local replicas of a job of at least two, with buckets of so many bytes.
func bucketed(e engine.Engine, n, rows, bytes int) engine.Spec {
	s := spec(e, n, rows)
	s.Replicas, s.BucketBytes = max(2, n), bytes
	return s
}

// bucketSizes lists values of Spec.BucketBytes: the default, one parameter per bucket, some, and all.
var bucketSizes = []int{0, 1, 150, 1 << 20}

// testBuckets checks that the buckets contain every parameter once, and that each is handed over in order, complete.
func testBuckets(t *testing.T, c Config) {
	e := open(t, c, 1)
	for _, bytes := range bucketSizes {
		p := mustCompile(t, c.Plain(), e, bucketed(e, 1, 4, bytes))
		parameters, buckets := p.Parameters(), p.Buckets()
		switch n := len(buckets); {
		case bytes == 1 && n != len(parameters):
			t.Errorf("%d buckets of 1 byte, want one per parameter, %d", n, len(parameters))
		case bytes == 150 && (n == 1 || n == len(parameters)):
			t.Errorf("%d buckets of %d bytes for %d parameters: want some between", n, bytes, len(parameters))
		case bytes == 1<<20 && n != 1:
			t.Errorf("%d buckets of %d bytes, want 1", n, bytes)
		}
		if bytes == 150 { // one size will do, because an engine may compile slowly
			again := mustCompile(t, c.Plain(), e, bucketed(e, 1, 8, bytes)).Buckets()
			if !slices.EqualFunc(buckets, again, func(a, b engine.Bucket) bool {
				return slices.Equal(a.Parameters, b.Parameters) && a.Bytes == b.Bytes
			}) {
				t.Errorf("buckets %v, of another program %v", buckets, again)
			}
		}
		seen := make([]bool, len(parameters))
		for _, b := range buckets {
			sum := 0
			for _, i := range b.Parameters {
				if seen[i] {
					t.Errorf("%s is in two buckets", parameters[i].Name)
				}
				seen[i] = true
				sum += parameters[i].Bytes()
			}
			if sum != b.Bytes || len(b.Parameters) == 0 || !slices.IsSorted(b.Parameters) {
				t.Errorf("bucket %v of %d bytes: want %d bytes and ascending parameters", b.Parameters, b.Bytes, sum)
			}
		}
		if i := slices.Index(seen, false); i >= 0 {
			t.Errorf("%s is in no bucket", parameters[i].Name)
		}

		var order []int
		early := make([]*tensor.Tensor, len(parameters))
		m := engine.Micro{Batch: batch(20, 4), WeightSum: 4, Last: true}
		check(t, second(p.Gradients(t.Context(), 0, m, func(k int) {
			order = append(order, k)
			for _, i := range buckets[k].Parameters {
				x := must(p.Gradient(0, i))(t)
				early[i] = x.Clone()
				clear(x.Memory().HostBytes()) // it belongs to the caller
			}
		})))
		if !slices.IsSorted(order) || len(order) != len(buckets) {
			t.Errorf("buckets were handed over in the order %v of %d", order, len(buckets))
		}
		rest := must(Memory(p, 0))(t)
		for i, x := range rest {
			if !x.Equal(tensor.New(x.DType(), x.Shape()...)) {
				t.Errorf("the gradient of %s was written after it was handed over", parameters[i].Name)
			}
		}
		p.Discard()
		sameBits(t, "gradients of a call without a function", gradients(t, p, 0, batch(20, 4), 4).Tensors, early)
		p.Discard()
		m.Last = false
		check(t, second(p.Gradients(t.Context(), 0, m, func(k int) {
			t.Errorf("bucket %d was handed over before the last micro-batch", k)
		})))
	}
	if n := len(mustCompile(t, c.Plain(), e, spec(e, 1, 4)).Buckets()); n != 1 {
		t.Errorf("%d buckets for the only replica of a job, want 1", n)
	}
}

// testParts checks that parts consist of whole buckets, and that their number does not change the bits of an update.
func testParts(t *testing.T, c Config) {
	e := open(t, c, 1)
	var want []*tensor.Tensor
	var given [][]*tensor.Tensor
	for _, bytes := range bucketSizes {
		p := mustCompile(t, c.Plain(), e, bucketed(e, 1, 4, bytes))
		parts := p.Parts(0)
		if len(parts) != len(p.Buckets()) {
			t.Errorf("%d parts of %d buckets", len(parts), len(p.Buckets()))
		}
		seen := make([]int, len(p.Parameters()))
		for _, part := range parts {
			for _, i := range part {
				seen[i]++
			}
			for _, b := range p.Buckets() {
				inside := 0
				for _, i := range b.Parameters {
					if slices.Contains(part, i) {
						inside++
					}
				}
				if inside != 0 && inside != len(b.Parameters) {
					t.Errorf("part %v contains %d parameters of bucket %v", part, inside, b.Parameters)
				}
			}
		}
		if slices.Max(seen) != 1 || slices.Min(seen) != 1 {
			t.Errorf("parts %v do not contain every parameter once", parts)
		}
		for i := range 5 {
			if want == nil && len(given) == i {
				given = append(given, cloneAll(gradients(t, p, 0, batch(uint64(10+i), 4), 4).Tensors))
				p.Discard()
			}
			fill(t, p, 0, given[i])
			for k := range slices.Backward(parts) {
				check(t, p.Update(t.Context(), 0, 0, k, 1))
			}
			p.Commit()
		}
		if got := read(t, p, 0); want == nil {
			want = got
		} else {
			sameBits(t, fmt.Sprintf("after 5 updates of %d parts", len(parts)), got, want)
		}
	}
}

// testFilledGradients checks that gradients that the program did not compute can be applied.
func testFilledGradients(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 2, 4)
	own := cloneAll(gradients(t, p, 0, batch(9, 4), 4).Tensors)
	update(t, p, 0, 1)
	if err := p.Update(t.Context(), 1, 1, 0, 1); err == nil {
		t.Error("updated from a replica without gradients: no error")
	}
	if err := p.Update(t.Context(), 1, 0, 0, 1); err == nil {
		t.Error("updated from a replica of another device: no error")
	}
	fill(t, p, 1, own)
	update(t, p, 1, 1)
	p.Commit()
	sameBits(t, "applied without a gradients step", read(t, p, 1), read(t, p, 0))
	if err := p.Update(t.Context(), 0, 0, 0, 1); err == nil {
		t.Error("updated after a commit: no error")
	}
	gradients(t, p, 0, batch(9, 4), 4)
	p.Discard()
	if err := p.Update(t.Context(), 0, 0, 0, 1); err == nil {
		t.Error("updated after a discard: no error")
	}
	x, err := p.Gradient(0, 0)
	if err != nil || !x.Equal(tensor.New(x.DType(), x.Shape()...)) {
		t.Errorf("the gradient after a discard is %v, %v: want zeros", x, err)
	}
	p.Discard()
}

// testFactor checks that a factor has the effect of gradients multiplied by it.
func testFactor(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 2, 4)
	for i := range uint64(3) {
		g := cloneAll(gradients(t, p, 0, batch(60+i, 4), 4).Tensors)
		for _, x := range g {
			for j := range tensor.Data[float32](x) {
				tensor.Data[float32](x)[j] *= 0.3
			}
		}
		fill(t, p, 1, g)
		update(t, p, 0, 0.3)
		update(t, p, 1, 1)
		p.Commit()
		sameBits(t, "an update with a factor", read(t, p, 0), read(t, p, 1))
	}
}

// testAccumulation checks that gradients of micro-batches are their sum, and that loss and metrics are those of one.
func testAccumulation(t *testing.T, c Config) {
	const rows, micro = 12, 4
	p := compile(t, c, c.Plain(), 1, micro)
	whole := compile(t, c, c.Plain(), 1, rows)
	b := batch(21, rows)
	want := gradients(t, whole, 0, b, rows)
	sum := make([]*tensor.Tensor, len(want.Tensors))
	var single []Result
	for i := range rows / micro {
		g := gradients(t, p, 0, part(b, rows/micro, i, micro), rows)
		addAll(sum, g.Tensors)
		g.Metrics = slices.Clone(g.Metrics)
		single = append(single, g)
		p.Discard()
	}
	for round := range 3 {
		for i := range rows / micro {
			last := i == rows/micro-1
			s := must(p.Gradients(t.Context(), 0, engine.Micro{
				Batch: part(b, rows/micro, i, micro), WeightSum: rows, RNG: [3]uint64{1, 2, 3}, Add: i > 0, Last: last,
			}, nil))(t)
			if s.Loss != single[i].Loss || !slices.Equal(s.Metrics, single[i].Metrics) {
				t.Errorf("micro-batch %d: loss %v, metrics %v; alone: %v, %v", i, s.Loss, s.Metrics, single[i].Loss,
					single[i].Metrics)
			}
			if _, err := p.Gradient(0, 0); (err == nil) != last {
				t.Errorf("the memory of a gradient after micro-batch %d of %d: %v", i, rows/micro, err)
			}
		}
		got := must(Memory(p, 0))(t)
		sameBits(t, fmt.Sprintf("accumulated gradients, round %d", round), got, sum)
		for i := range got {
			if d := distance(got[i], want.Tensors[i]); d > 1e-5 {
				t.Errorf("accumulated gradient of %s differs from the whole batch's by %g", p.Parameters()[i].Name, d)
			}
		}
		if round == 1 { // another round starts over without a discard
			p.Discard()
		}
	}
	p.Discard()
	add := engine.Micro{Batch: part(b, 3, 0, micro), WeightSum: rows, Add: true}
	if _, err := p.Gradients(t.Context(), 0, add, nil); err == nil {
		t.Error("a first micro-batch that adds: no error")
	}
	add.Add = false
	check(t, second(p.Gradients(t.Context(), 0, add, nil)))
	if err := p.Update(t.Context(), 0, 0, 0, 1); err == nil {
		t.Error("updated before the last micro-batch: no error")
	}
	p.Discard()
	step(t, p, 0, part(b, 3, 0, micro), rows)
}

// testAccumulatedAverages checks that every micro-batch of a step changes the averages, one after the other.
func testAccumulatedAverages(t *testing.T, c Config) {
	p, q := compile(t, c, c.Averaging(), 1, 4), compile(t, c, c.Averaging(), 1, 4)
	start := read(t, p, 0)
	micro := func(p engine.Program, i int, add, last bool) {
		m := engine.Micro{Batch: batch(uint64(80+i), 4), WeightSum: 4, Add: add, Last: last}
		check(t, second(p.Gradients(t.Context(), 0, m, nil)))
	}
	for i := range 3 {
		micro(p, i, false, true)
		p.Commit()
		micro(q, i, i > 0, i == 2)
		sameBits(t, "variables during a step", read(t, q, 0), start)
	}
	q.Commit()
	sameBits(t, "averages after three micro-batches", read(t, q, 0), read(t, p, 0))
}

// testIncompleteGradients checks that there is neither a gradient nor an update before ready of its bucket, nor after
// an error, until the step is discarded.
func testIncompleteGradients(t *testing.T, c Config) {
	e := open(t, c, 1)
	p := mustCompile(t, c.Plain(), e, bucketed(e, 1, 4, 1))
	incomplete := func(when string, buckets []engine.Bucket) {
		t.Helper()
		for _, b := range buckets {
			for _, i := range b.Parameters {
				if x, err := p.Gradient(0, i); err == nil {
					t.Errorf("%s: the gradient of %s is %v, want an error", when, p.Parameters()[i].Name, x)
				}
			}
		}
	}
	m := engine.Micro{Batch: batch(90, 4), WeightSum: 4, RNG: [3]uint64{1, 2, 3}, Last: true}
	var want []*tensor.Tensor
	for round := range 2 {
		check(t, second(p.Gradients(t.Context(), 0, m, func(k int) {
			if round == 1 {
				incomplete(fmt.Sprintf("in ready(%d)", k), p.Buckets()[k+1:])
			}
		})))
		got := must(Memory(p, 0))(t)
		if round == 0 {
			want = cloneAll(got)
		}
		sameBits(t, "gradients after others were requested too early", got, want)
		p.Discard()
	}
	m.Batch = batch(90, 3)
	if _, err := p.Gradients(t.Context(), 0, m, nil); err == nil {
		t.Error("gradients of too few rows: no error")
	}
	incomplete("after an error", p.Buckets())
	if err := p.Update(t.Context(), 0, 0, 0, 1); err == nil {
		t.Error("updated after failed gradients: no error")
	}
	p.Discard()
	if x, err := p.Gradient(0, 0); err != nil || !x.Equal(tensor.New(x.DType(), x.Shape()...)) {
		t.Errorf("the gradient after a discard is %v, %v: want zeros", x, err)
	}
}

// testLossScale checks that a loss scale that is a power of 2 has no effect on a model without half-width numbers.
func testLossScale(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 1, 4)
	want := gradients(t, p, 0, batch(22, 4), 4)
	tensors, loss := cloneAll(want.Tensors), want.Loss
	for _, scale := range []float64{0, 1, 1024, 1.0 / 8} {
		s := must(p.Gradients(t.Context(), 0, engine.Micro{
			Batch: batch(22, 4), WeightSum: 4, RNG: [3]uint64{1, 2, 3}, Last: true, LossScale: scale,
		}, nil))(t)
		got := must(Memory(p, 0))(t)
		sameBits(t, fmt.Sprintf("gradients with loss scale %v", scale), got, tensors)
		if s.Loss != loss {
			t.Errorf("loss %v with loss scale %v, want %v", s.Loss, scale, loss)
		}
	}
	for _, scale := range []float64{-1, math.NaN(), math.Inf(1), 1e300, 1e-300, 1e-40} {
		if _, err := p.Gradients(t.Context(), 0, engine.Micro{
			Batch: batch(22, 4), WeightSum: 4, Last: true, LossScale: scale,
		}, nil); err == nil {
			t.Errorf("loss scale %v: no error", scale)
		}
	}
}

// testGradientMemory checks that an update reads what the caller wrote to gradients, and that writing to them changes
// nothing else.
func testGradientMemory(t *testing.T, c Config) {
	for name, m := range map[string]engine.Model{
		"plain": c.Plain(), "averaging": c.Averaging(),
		"regularised": c.Regularised(),
	} {
		p := compile(t, c, m, 2, 4)
		start := read(t, p, 0)
		g := gradients(t, p, 0, batch(70, 4), 4).Tensors
		want := cloneAll(g)
		for i, x := range g {
			for at := range x.Memory().HostBytes() {
				x.Memory().HostBytes()[at] ^= 0xff
			}
			sameBits(t, name+": gradients beside one that was written to", g[i+1:], want[i+1:])
		}
		p.Discard()
		sameBits(t, name+": variables after gradients were written to", read(t, p, 0), start)
		sameBits(t, name+": the same gradients again", gradients(t, p, 0, batch(70, 4), 4).Tensors, want)
		for range 3 { // the sums of two replicas, reduced in place on one and copied to the other
			sum := make([]*tensor.Tensor, len(p.Parameters()))
			for r := range 2 {
				addAll(sum, gradients(t, p, r, batch(uint64(50+r), 4), 8).Tensors)
			}
			fill(t, p, 0, sum)
			fill(t, p, 1, sum)
			update(t, p, 0, 1)
			update(t, p, 1, 1)
			p.Commit()
			a, b := read(t, p, 0), read(t, p, 1)
			for i, v := range p.Variables() {
				if v.Role != engine.Average && !a[i].Equal(b[i]) {
					t.Errorf("%s: %s differs between replicas with the same sums", name, v.Name)
				}
			}
		}
	}
}

// testUpdatedMemory checks that Updated shows the new values, and that what the caller writes there is committed.
func testUpdatedMemory(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 2, 4)
	if _, err := p.Updated(0, 0); err == nil {
		t.Error("the new value of a parameter before an update: no error")
	}
	for round := range uint64(3) {
		fill(t, p, 1, gradients(t, p, 0, batch(23+round, 4), 4).Tensors)
		update(t, p, 0, 1)
		update(t, p, 1, 1)
		before := read(t, p, 0)
		var news []*tensor.Tensor
		for i, v := range p.Parameters() {
			x := must(p.Updated(0, i))(t)
			news = append(news, x.Clone())
			if x.Equal(before[i]) {
				t.Errorf("the new value of %s is the old one", v.Name)
			}
			if round == 1 {
				continue
			}
			other := must(p.Updated(1, i))(t)
			for j := range tensor.Data[float32](other) {
				tensor.Data[float32](other)[j] += float32(j + 1)
			}
		}
		sameBits(t, "variables before the commit", read(t, p, 0), before)
		if round == 2 {
			p.Discard()
			sameBits(t, "variables after a discard of written values", read(t, p, 0), before)
			continue
		}
		p.Commit()
		sameBits(t, "parameters", read(t, p, 0)[:len(news)], news)
		for i, x := range read(t, p, 1)[:len(news)] {
			want := news[i].Clone()
			for j := range tensor.Data[float32](want) {
				if round == 0 {
					tensor.Data[float32](want)[j] += float32(j + 1)
				}
			}
			if !x.Equal(want) {
				t.Errorf("%s is %v after a write to its new value, want %v", p.Parameters()[i].Name, x, want)
			}
		}
		first, _ := evaluate(t, p, 0, batch(90, 4), 4)
		second, _ := evaluate(t, p, 1, batch(90, 4), 4)
		if (first == second) != (round == 1) {
			t.Errorf("losses %v and %v after round %d: the programs do not read the written values", first, second, round)
		}
		for i := range news { // equal again
			check(t, p.Write(1, i, must(p.Read(0, i))(t)))
		}
	}
}

// testSharedDevice checks that replicas that share a device compute the same bits as replicas with devices of their
// own, and keep separate averages.
func testSharedDevice(t *testing.T, c Config) {
	const n = 4
	e := open(t, c, n)
	var want [][]*tensor.Tensor
	for _, devices := range [][]int{nil, {0, 0, 0, 0}, {0, 1, 1, 0}} {
		s := spec(e, n, 4)
		if s.ReplicaDevices = devices; devices != nil {
			s.Devices = s.Devices[:slices.Max(devices)+1]
		}
		p := mustCompile(t, c.Averaging(), e, s)
		for i := range 3 {
			g, errs := make([]Result, n), make([]error, n)
			var wg sync.WaitGroup
			for r := range n {
				wg.Go(func() {
					g[r], errs[r] = Gradients(t.Context(), p, r, batch(uint64(100*i+r), 4), 4*n, [3]uint64{uint64(i), uint64(r)})
				})
			}
			wg.Wait()
			check(t, errors.Join(errs...))
			sum := make([]*tensor.Tensor, len(g[0].Tensors))
			for r := range n {
				addAll(sum, g[r].Tensors)
			}
			for r := range n {
				fill(t, p, r, sum)
			}
			for d := range s.Devices {
				r := d
				for s.DeviceOf(r) != d {
					r++
				}
				check(t, Update(t.Context(), p, d, r))
			}
			p.Commit()
		}
		var got [][]*tensor.Tensor
		for r := range n {
			got = append(got, read(t, p, r))
		}
		if want == nil {
			want = got
		}
		for r := range n {
			sameBits(t, fmt.Sprintf("replica %d of %d devices", r, len(s.Devices)), got[r], want[r])
		}
	}
}

// testShards checks that shards which exchange their parameters have the bits of a device that updates everything,
// and only the slots of what they own.
func testShards(t *testing.T, c Config) {
	testShardsOf(t, c, c.Plain, false)
	if c.Wide != nil {
		testShardsOf(t, c, c.Wide, true)
	}
}

// testShardsOf is testShards for a model. divides reports whether it has a parameter that is divided.
func testShardsOf(t *testing.T, c Config, build func() engine.Model, divides bool) {
	const devices = 3
	e := open(t, c, devices)
	whole := mustCompile(t, build(), e, bucketed(e, 1, 4, 150))
	parameters := whole.Parameters()
	for _, shards := range []int{2, 3, 2 + len(parameters)} {
		s := bucketed(e, devices, 4, 150)
		s.Shards, s.ReplicaShards = shards, []int{0, 1, shards - 1}
		p := mustCompile(t, build(), e, s)
		pieces := p.Pieces()
		want := engine.BucketPieces(parameters, p.Buckets(), shards, divides)
		if all := engine.BucketPieces(parameters, p.Buckets(), shards, true); !divides && len(all) == len(parameters) &&
			slices.Equal(pieces, all) { // the optimizer works element by element, and no parameter is large enough
			want = all
		}
		if !slices.Equal(pieces, want) ||
			divides != (len(pieces) > len(parameters)) {
			t.Fatalf("%d shards: pieces %v, want %v", shards, pieces, want)
		}
		of := func(parameter, shard int) (from, to int) { // what a shard owns
			for _, s := range pieces {
				if s.Parameter == parameter && s.Owner == shard {
					return s.From, s.To
				}
			}
			return 0, 0
		}
		part := func(x *tensor.Tensor, from, to int) *tensor.Tensor { return x.Reshape(x.Len()).Rows(from, to) }
		if !slices.EqualFunc(p.Variables(), whole.Variables(), func(a, b engine.Variable) bool {
			return a.Name == b.Name && a.Role == b.Role
		}) {
			t.Errorf("%d shards: variables %v, want %v", shards, p.Variables(), whole.Variables())
		}
		for d, k := range s.ReplicaShards {
			var got []int
			for _, part := range p.Parts(d) {
				if len(part) == 0 {
					t.Errorf("%d shards: device %d has an empty part", shards, d)
				}
				got = append(got, part...)
			}
			slices.Sort(got)
			for i := range parameters {
				if _, to := of(i, k); slices.Contains(got, i) != (to > 0) || len(got) != len(slices.Compact(slices.Clone(got))) {
					t.Errorf("%d shards: parts %v of shard %d, pieces %v", shards, p.Parts(d), k, pieces)
				}
			}
		}
		for i := range p.Variables() { // as in the other program
			for d := range devices {
				check(t, p.Write(d, i, must(whole.Read(0, i))(t)))
			}
		}
		for round := range uint64(4) {
			g := cloneAll(gradients(t, whole, 0, batch(60+round, 4), 4).Tensors)
			update(t, whole, 0, 1)
			for d := range devices {
				fill(t, p, d, g)
				update(t, p, d, 1)
			}
			for i := range parameters {
				from := must(whole.Updated(0, i))(t)
				for d, k := range s.ReplicaShards {
					x := must(p.Updated(d, i))(t)
					if lo, hi := of(i, k); hi > lo {
						sameBits(t, "an owner's new value", []*tensor.Tensor{part(x, lo, hi)}, []*tensor.Tensor{part(from, lo, hi)})
					}
					copy(x.Memory().HostBytes(), from.Memory().HostBytes())
				}
			}
			if round == 1 {
				whole.Discard()
				p.Discard()
			} else {
				whole.Commit()
				p.Commit()
			}
			for i, v := range whole.Variables() {
				want := must(whole.Read(0, i))(t)
				readable := 0
				for d := range devices {
					got, err := p.Read(d, i)
					lo, hi := p.Kept(d, i)
					if (lo == hi) != errors.Is(err, engine.ErrNotOwned) {
						t.Errorf("%d shards: device %d keeps %d to %d of %s, reading it: %v", shards, d, lo, hi, v.Name, err)
					}
					want := want
					if hi-lo < want.Len() && v.Role == engine.Slot {
						want = part(want, lo, hi)
					}
					switch {
					case errors.Is(err, engine.ErrNotOwned) && v.Role == engine.Slot:
						continue
					case err != nil:
						t.Fatal(err)
					case !got.Equal(want):
						t.Errorf("%d shards, step %d: %s on device %d is %v, want %v", shards, round, v.Name, d, got, want)
					}
					readable++
				}
				moment := v.Role == engine.Slot && len(v.Shape) > 0
				if moment && readable > 2 && !divides || !moment && readable == 0 {
					t.Errorf("%d shards: %d of the devices have %s", shards, readable, v.Name)
				}
			}
		}
		loss := func(p engine.Program, replica int) float64 {
			l, _ := evaluate(t, p, replica, batch(99, 4), 4)
			return l
		}
		for d := range devices {
			if got, want := loss(p, d), loss(whole, 0); got != want {
				t.Errorf("%d shards: device %d evaluates to %v, want %v", shards, d, got, want)
			}
		}
	}
	for name, change := range map[string]func(s *engine.Spec){
		"no shards of devices": func(s *engine.Spec) { s.ReplicaShards = nil },
		"too few":              func(s *engine.Spec) { s.ReplicaShards = s.ReplicaShards[:1] },
		"a shard too many":     func(s *engine.Spec) { s.ReplicaShards[1] = 2 },
		"a negative shard":     func(s *engine.Spec) { s.ReplicaShards[1] = -1 },
	} {
		s := bucketed(e, 2, 4, 0)
		s.Shards, s.ReplicaShards = 2, []int{0, 1}
		change(&s)
		if p, err := c.Plain().Compile(t.Context(), e, s); err == nil {
			p.Close()
			t.Errorf("compiled for %s", name)
		}
	}
}

// testPlace checks that four replicas which move between two programs and their devices, while they train, make the
// bits of replicas that stay where they are.
func testPlace(t *testing.T, c Config) {
	testPlaceOf(t, c, c.Averaging, 0)
	testPlaceOf(t, c, c.Plain, 4)
	if c.Wide != nil {
		testPlaceOf(t, c, c.Wide, 4)
	}
}

func testPlaceOf(t *testing.T, c Config, build func() engine.Model, shards int) {
	const n, devices = 4, 2
	e := open(t, c, n)
	whole := mustCompile(t, build(), e, bucketed(e, n, 4, 150))
	s := bucketed(e, devices, 4, 150)
	s.Replicas, s.Shards = n, shards
	s.ReplicaDevices, s.ReplicaShards = []int{0, 0, 1, 1}, []int{0, 1, 2, 3}
	if shards == 0 {
		s.ReplicaShards = nil
	}
	programs := []engine.Program{mustCompile(t, build(), e, s), mustCompile(t, build(), e, s)}
	type place struct{ program, device, local int }
	var now []place // by replica
	variables, parameters := whole.Variables(), len(whole.Parameters())
	locate := func(where [n][2]int) {
		values := make([][]*tensor.Tensor, n) // by replica and variable
		for id, at := range now {
			for v := range variables {
				x, err := programs[at.program].Read(at.local, v)
				if err != nil && !errors.Is(err, engine.ErrNotOwned) {
					t.Fatal(err)
				}
				values[id] = append(values[id], x)
			}
		}
		before := now
		now = nil
		var lists, ids [2][]int
		for id, w := range where {
			now = append(now, place{w[0], w[1], len(lists[w[0]])})
			lists[w[0]], ids[w[0]] = append(lists[w[0]], w[1]), append(ids[w[0]], id)
		}
		for i, p := range programs {
			if lists[i] == nil {
				lists[i], ids[i] = []int{0}, []int{0} // no replica of the test
			}
			check(t, p.Place(lists[i], ids[i]))
		}
		for id, at := range now {
			for v, x := range variables {
				stayed := before != nil && before[id].program == at.program
				switch {
				case before == nil:
					check(t, programs[at.program].Write(at.local, v, must(whole.Read(id, v))(t)))
				case values[id][v] != nil && (!stayed || x.Role == engine.Average || before[id].device != at.device):
					check(t, programs[at.program].Write(at.local, v, values[id][v]))
				}
			}
		}
	}
	for round, where := range [][n][2]int{
		{{0, 0}, {0, 0}, {0, 1}, {0, 1}},
		{{0, 0}, {0, 1}, {1, 0}, {1, 1}},
		{{0, 1}, {1, 1}, {0, 1}, {1, 1}},
		{{1, 0}, {1, 1}, {0, 0}, {1, 1}},
		{{1, 1}, {1, 1}, {1, 1}, {1, 1}},
		{{0, 0}, {0, 0}, {0, 1}, {0, 0}},
	} {
		locate(where)
		for i := range 2 {
			sum := make([]*tensor.Tensor, parameters)
			for id, at := range now {
				b, rng := batch(uint64(100*round+10*i+id), 4), [3]uint64{uint64(round), uint64(id)}
				want := must(Gradients(t.Context(), whole, id, b, 4*n, rng))(t)
				got := must(Gradients(t.Context(), programs[at.program], at.local, b, 4*n, rng))(t)
				sameBits(t, fmt.Sprintf("gradients of replica %d, placement %d", id, round), got.Tensors, want.Tensors)
				addAll(sum, want.Tensors)
			}
			done := map[[2]int]bool{}
			for id, at := range now {
				fill(t, whole, id, sum)
				update(t, whole, id, 1)
				p := programs[at.program]
				fill(t, p, at.local, sum)
				if device := [2]int{at.program, at.device}; !done[device] {
					done[device] = true
					check(t, Update(t.Context(), p, at.device, at.local))
				}
			}
			for device := range done {
				for v := range parameters {
					x := must(programs[device[0]].Updated(device[1], v))(t)
					want := must(whole.Updated(0, v))(t)
					for _, piece := range programs[0].Pieces() { // what the device's shards own is there
						owner := now[piece.Owner]
						if piece.Parameter == v && (shards == 0 || [2]int{owner.program, owner.device} == device) {
							part := func(x *tensor.Tensor) []*tensor.Tensor {
								return []*tensor.Tensor{x.Reshape(x.Len()).Rows(piece.From, piece.To)}
							}
							sameBits(t, fmt.Sprintf("new values of variable %d, placement %d", v, round), part(x), part(want))
						}
					}
					copy(x.Memory().HostBytes(), want.Memory().HostBytes())
				}
			}
			for _, p := range append(programs, whole) {
				p.Commit()
			}
		}
		for id, at := range now {
			p := programs[at.program]
			for v, x := range variables {
				want, from := must(whole.Read(id, v))(t), 0
				to := want.Len()
				if x.Role == engine.Slot {
					if from, to = p.Kept(at.local, v); from < to && to-from < want.Len() {
						want = want.Reshape(want.Len()).Rows(from, to)
					}
				}
				if from < to {
					sameBits(t, fmt.Sprintf("%s of replica %d, placement %d", x.Name, id, round),
						[]*tensor.Tensor{must(p.Read(at.local, v))(t)}, []*tensor.Tensor{want})
				}
			}
		}
	}
	bad := map[string][2][]int{"no replica": {{}, {}}, "device 2": {{2}, {0}}, "device -1": {{-1}, {0}}}
	if shards > 0 {
		bad["shard 4"], bad["too few shards"] = [2][]int{{0}, {4}}, [2][]int{{0, 0}, {0}}
	}
	for name, list := range bad {
		if programs[0].Place(list[0], list[1]) == nil {
			t.Errorf("placed with %s", name)
		}
	}
	check(t, programs[0].Close())
	if programs[0].Place([]int{0}, []int{0}) == nil {
		t.Error("placed replicas of a closed program")
	}
}

// testWholeStep checks that a step in one program is that of two, but for rounding.
func testWholeStep(t *testing.T, c Config) {
	p := compile(t, c, c.Averaging(), 1, 4)
	if !p.Info().WholeStep {
		t.Skip("the program has no whole step")
	}
	q := compile(t, c, c.Averaging(), 1, 4)
	micro := engine.Micro{Batch: batch(30, 4), WeightSum: 4, RNG: [3]uint64{1, 2, 3}, Last: true}
	for round := range 4 {
		micro.Batch = batch(uint64(30+round), 4)
		start := read(t, p, 0)
		s, finite, err := p.Step(t.Context(), micro)
		if err != nil || !finite {
			t.Fatalf("finite gradients: %v; %v", finite, err)
		}
		sameBits(t, "variables before the commit", read(t, p, 0), start)
		if round == 1 {
			p.Discard()
			sameBits(t, "variables after a discard", read(t, p, 0), start)
			continue
		}
		if _, err := p.Gradient(0, 0); err == nil {
			t.Error("a whole step's gradient: no error")
		}
		p.Commit()
		g := gradients(t, q, 0, micro.Batch, 4)
		update(t, q, 0, 1)
		q.Commit()
		if math.Abs(s.Loss-g.Loss) > 1e-5 || !slices.Equal(s.Metrics, g.Metrics) {
			t.Errorf("loss %v and metrics %v, of two programs %v and %v", s.Loss, s.Metrics, g.Loss, g.Metrics)
		}
		want := read(t, q, 0)
		for i, x := range read(t, p, 0) {
			if d := distance(x, want[i]); d > 1e-5 {
				t.Errorf("%s differs by %g from that of two programs", p.Variables()[i].Name, d)
			}
		}
	}
	start := read(t, p, 0)
	tensor.Data[float32](micro.Inputs[0])[0] = float32(math.Inf(1))
	if _, finite, err := p.Step(t.Context(), micro); err != nil || finite {
		t.Errorf("gradients of an infinite input: finite: %v; %v", finite, err)
	}
	p.Discard()
	sameBits(t, "variables after a step that was not finite", read(t, p, 0), start)
	micro.Add = true
	if _, _, err := p.Step(t.Context(), micro); err == nil {
		t.Error("a whole step that adds: no error")
	}
	micro.Add, micro.LossScale = false, 2
	if _, _, err := p.Step(t.Context(), micro); err == nil {
		t.Error("a whole step with a loss scale: no error")
	}
	if compile(t, c, c.Averaging(), 2, 4).Info().WholeStep {
		t.Error("a whole step for two replicas")
	}
}

func testRandom(t *testing.T, c Config) {
	p := compile(t, c, c.Random(), 2, 16)
	b := batch(11, 16)
	loss := func(replica int, rng [3]uint64) float64 {
		g := must(Gradients(t.Context(), p, replica, b, 16, rng))(t)
		p.Discard()
		return g.Loss
	}
	one, two := [3]uint64{1, 2, 3}, [3]uint64{4, 5, 6}
	if a, b := loss(0, one), loss(0, one); a != b {
		t.Errorf("the same random state gives losses %v and %v", a, b)
	}
	if a, b := loss(0, one), loss(0, two); a == b {
		t.Errorf("two random states give the same loss %v", a)
	}
	if a, b := loss(0, one), loss(1, one); a != b {
		t.Errorf("the same random state gives losses %v and %v on two replicas", a, b)
	}
	eval := func() float64 {
		l, _ := evaluate(t, p, 0, b, 16)
		return l
	}
	before := eval()
	loss(0, two)
	if after := eval(); after != before {
		t.Errorf("evaluation depends on the random state: %v and %v", before, after)
	}
	for _, v := range p.Variables() {
		if strings.Contains(strings.ToLower(v.Name), "rng") {
			t.Errorf("the random state is a variable: %s", v.Name)
		}
	}
}

func testAverages(t *testing.T, c Config) {
	p := compile(t, c, c.Averaging(), 2, 4)
	var averages []int
	for i, v := range p.Variables() {
		if v.Role == engine.Average {
			averages = append(averages, i)
		}
	}
	if len(averages) == 0 {
		t.Fatal("the averaging model has no variable of role Average")
	}
	// Replicas get different examples, so their averages differ. Parameters get the same gradients, so they
	// do not.
	var sum []*tensor.Tensor
	g0 := gradients(t, p, 0, batch(12, 4), 8)
	sum = make([]*tensor.Tensor, len(g0.Tensors))
	addAll(sum, g0.Tensors)
	addAll(sum, gradients(t, p, 1, batch(13, 4), 8).Tensors)
	for r := range 2 {
		fill(t, p, r, sum)
		update(t, p, r, 1)
	}
	p.Commit()
	a, b := read(t, p, 0), read(t, p, 1)
	differ := false
	for i, v := range p.Variables() {
		same := a[i].Equal(b[i])
		if v.Role == engine.Average {
			differ = differ || !same
		} else if !same {
			t.Errorf("%s differs between replicas", v.Name)
		}
	}
	if !differ {
		t.Error("replicas with other examples have the same averages")
	}
	before, _ := evaluate(t, p, 0, batch(14, 4), 4)
	for _, i := range averages {
		check(t, p.Write(0, i, b[i]))
	}
	after, _ := evaluate(t, p, 0, batch(14, 4), 4)
	if before == after {
		t.Error("inference does not depend on the averages")
	}
}

// testAveragesAlone checks that a commit after gradients alone sets the averages as a complete step does, and
// nothing else.
func testAveragesAlone(t *testing.T, c Config) {
	p, q := compile(t, c, c.Averaging(), 1, 4), compile(t, c, c.Averaging(), 1, 4)
	b := batch(19, 4)
	start := read(t, q, 0)
	step(t, p, 0, b, 4)
	whole := read(t, p, 0)
	gradients(t, q, 0, b, 4)
	q.Commit()
	got := read(t, q, 0)
	for i, v := range p.Variables() {
		want, of := start[i], "before"
		if v.Role == engine.Average {
			want, of = whole[i], "after the whole step"
		}
		if !got[i].Equal(want) {
			t.Errorf("%s is %v after gradients and a commit, %v %s", v.Name, got[i], want, of)
		}
	}
}

func testRegularisation(t *testing.T, c Config) {
	const rows = 7
	b := batch(15, rows)
	whole := compile(t, c, c.Regularised(), 1, rows)
	want := gradients(t, whole, 0, b, rows)
	plain := compile(t, c, c.Plain(), 1, rows)
	if without := gradients(t, plain, 0, b, rows); without.Loss >= want.Loss {
		t.Errorf("loss %v with a penalty, %v without", want.Loss, without.Loss)
	}
	p := compile(t, c, c.Regularised(), 3, 4)
	var loss float64
	sum := make([]*tensor.Tensor, len(want.Tensors))
	for i := range 3 { // 4, 3 and no examples
		g := gradients(t, p, i, part(b, 2, i, 4), rows)
		loss += g.Loss
		addAll(sum, g.Tensors)
	}
	if math.Abs(loss-want.Loss) > 1e-5 {
		t.Errorf("losses of 3 replicas add up to %v, one replica has %v", loss, want.Loss)
	}
	for i := range sum {
		if d := distance(sum[i], want.Tensors[i]); d > 1e-5 {
			t.Errorf("gradient of %s differs by %g", p.Parameters()[i].Name, d)
		}
	}
}

func testEvaluate(t *testing.T, c Config) {
	for _, model := range []struct {
		name string
		m    engine.Model
	}{{"plain", c.Plain()}, {"random", c.Random()}, {"averaging", c.Averaging()}} {
		t.Run(model.name, func(t *testing.T) {
			p := compile(t, c, model.m, 2, 8)
			step(t, p, 0, batch(16, 8), 8)
			start := read(t, p, 0)
			b := batch(17, 8)
			loss, metrics := evaluate(t, p, 0, b, 8)
			out := must(p.Predict(t.Context(), 0, b.Inputs))(t)
			sameBits(t, "after evaluating and predicting", read(t, p, 0), start)
			if len(out) != 1 || !slices.Equal(out[0].Shape(), []int{8, Classes}) {
				t.Fatalf("predicted %v, want one tensor of shape (8, %d)", out, Classes)
			}
			wantLoss, wantHits := softmaxLoss(out[0], b.Labels[0])
			if math.Abs(loss-wantLoss) > 1e-4 || metrics[0] != wantHits {
				t.Errorf("loss %v, hits %v; from the predictions: %v, %v", loss, metrics[0], wantLoss, wantHits)
			}
			again := must(p.Predict(t.Context(), 0, b.Inputs))(t)
			sameBits(t, "a second prediction", again, out)
		})
	}
}

// testBatchBuffers checks that a batch in the program's memory gives the same results as any other batch, also when
// refilled or mixed with others.
func testBatchBuffers(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 2, 6)
	filled := make([]engine.Batch, 2)
	for i := range filled {
		filled[i] = must(p.NewBatch(1))(t)
		for _, x := range []*tensor.Tensor{filled[i].Inputs[0], filled[i].Labels[0], tensor.Of(filled[i].Weights)} {
			if !x.Equal(tensor.New(x.DType(), x.Shape()...)) {
				t.Errorf("a new batch holds %v: want zeros", x)
			}
		}
	}
	if _, err := p.NewBatch(2); err == nil {
		t.Error("a batch for replica 2 of 2: no error")
	}
	for i := range uint64(6) {
		want, to := batch(40+i, 6), filled[i%2]
		copy(to.Inputs[0].Memory().HostBytes(), want.Inputs[0].Memory().HostBytes())
		copy(to.Labels[0].Memory().HostBytes(), want.Labels[0].Memory().HostBytes())
		copy(to.Weights, want.Weights)
		if i == 4 { // part of it in other memory
			to.Labels = []*tensor.Tensor{want.Labels[0]}
			to.Weights = want.Weights
		}
		a := gradients(t, p, 0, want, 6)
		b := gradients(t, p, 1, to, 6)
		sameBits(t, "gradients of a batch in the program's memory", b.Tensors, a.Tensors)
		if a.Loss != b.Loss {
			t.Errorf("loss of a batch in the program's memory is %v, want %v", b.Loss, a.Loss)
		}
		loss, _ := evaluate(t, p, 0, want, 6)
		own, _ := evaluate(t, p, 1, to, 6)
		x, y := must(p.Predict(t.Context(), 0, want.Inputs))(t), must(p.Predict(t.Context(), 1, to.Inputs))(t)
		if loss != own {
			t.Errorf("loss of a batch in the program's memory in inference is %v, want %v", own, loss)
		}
		sameBits(t, "predictions of a batch in the program's memory", y, x)
		update(t, p, 0, 1)
		update(t, p, 1, 1)
		p.Commit()
	}
}

// testShapes checks that a program to which shapes were added computes the bits of programs that were compiled for
// them.
func testShapes(t *testing.T, c Config) {
	const replicas, rows, evaluated = 2, 4, 12
	e := open(t, c, replicas)
	p := mustCompile(t, c.Averaging(), e, spec(e, replicas, rows))
	add := func(s engine.Shape) error { return p.AddShape(t.Context(), s) }
	like := spec(e, replicas, rows)
	for _, s := range []engine.Shape{
		{Rows: 2 * rows, Inputs: like.Inputs, Labels: like.Labels, Training: true},
		{Rows: evaluated, Inputs: like.Inputs, Labels: like.Labels},
	} {
		check(t, add(s))
	}
	var programs []engine.Program // by rows / 4
	for _, n := range []int{rows, 2 * rows, evaluated} {
		programs = append(programs, mustCompile(t, c.Averaging(), e, spec(e, replicas, n)))
	}
	both := func(p engine.Program, n int, seed uint64) {
		b := batch(seed, replicas*n)
		for r := range replicas {
			gradients(t, p, r, part(b, replicas, r, n), float64(replicas*n))
		}
		for d := range replicas {
			check(t, Update(t.Context(), p, d, d))
		}
		p.Commit()
	}
	for i, n := range []int{rows, 2 * rows, rows, 2 * rows, 2 * rows} {
		both(p, n, uint64(i))
		one := programs[n/rows-1]
		both(one, n, uint64(i))
		for r := range replicas {
			sameBits(t, fmt.Sprintf("step %d, replica %d", i, r), read(t, p, r), read(t, one, r))
			for _, other := range programs {
				for v, x := range read(t, p, r) {
					check(t, other.Write(r, v, x))
				}
			}
		}
	}
	for i, n := range []int{rows, 2 * rows, evaluated} {
		b := batch(9, n)
		loss, metrics := evaluate(t, p, 1, b, float64(n))
		wantLoss, wantMetrics := evaluate(t, programs[i], 1, b, float64(n))
		if loss != wantLoss || !slices.Equal(metrics, wantMetrics) {
			t.Errorf("%d rows: loss %v, metrics %v, want %v, %v", n, loss, metrics, wantLoss, wantMetrics)
		}
		out := must(p.Predict(t.Context(), 0, b.Inputs))(t)
		want := must(programs[i].Predict(t.Context(), 0, b.Inputs))(t)
		sameBits(t, fmt.Sprintf("predictions of %d rows", n), out, want)
	}
	if _, err := Gradients(t.Context(), p, 0, batch(1, evaluated), 1, [3]uint64{}); err == nil {
		t.Error("a batch of a shape for evaluation was trained on")
	}
	p.Discard()
	if _, err := Gradients(t.Context(), p, 0, batch(1, rows+1), 1, [3]uint64{}); err == nil {
		t.Error("a batch of an unknown shape was trained on")
	}
	p.Discard()
	wide := engine.Feature{DType: tensor.Float32, Shape: []int{Features + 1}}
	if err := add(engine.Shape{
		Rows: rows, Inputs: []engine.Feature{wide}, Labels: like.Labels, Training: true,
	}); err == nil {
		t.Error("a shape was added that needs variables of other shapes")
	}
	if err := add(engine.Shape{Rows: 0, Inputs: like.Inputs, Labels: like.Labels}); err == nil {
		t.Error("a shape without rows was added")
	}
	both(p, rows, 7) // what failed has changed nothing
}

func testWrongArguments(t *testing.T, c Config) {
	p := compile(t, c, c.Plain(), 1, 4)
	start := read(t, p, 0)
	good := func() engine.Batch { return batch(18, 4) }
	for name, change := range map[string]func(b *engine.Batch){
		"no inputs":       func(b *engine.Batch) { b.Inputs = nil },
		"nil input":       func(b *engine.Batch) { b.Inputs = []*tensor.Tensor{nil} },
		"too many inputs": func(b *engine.Batch) { b.Inputs = append(b.Inputs, b.Inputs[0]) },
		"too few rows":    func(b *engine.Batch) { b.Inputs = []*tensor.Tensor{b.Inputs[0].Rows(0, 3)} },
		"input dtype":     func(b *engine.Batch) { b.Inputs = []*tensor.Tensor{tensor.New(tensor.Float64, 4, Features)} },
		"input rank":      func(b *engine.Batch) { b.Inputs = []*tensor.Tensor{tensor.New(tensor.Float32, 4*Features)} },
		"input width":     func(b *engine.Batch) { b.Inputs = []*tensor.Tensor{tensor.New(tensor.Float32, 4, Features+1)} },
		"no labels":       func(b *engine.Batch) { b.Labels = nil },
		"label dtype":     func(b *engine.Batch) { b.Labels = []*tensor.Tensor{tensor.New(tensor.Int64, 4)} },
		"few weights":     func(b *engine.Batch) { b.Weights = b.Weights[:3] },
	} {
		b := good()
		change(&b)
		if _, err := Gradients(t.Context(), p, 0, b, 4, [3]uint64{}); err == nil {
			t.Errorf("gradients, %s: no error", name)
		}
		if _, _, err := p.Evaluate(t.Context(), 0, b, 4); err == nil {
			t.Errorf("evaluate, %s: no error", name)
		}
		if strings.Contains(name, "input") {
			if _, err := p.Predict(t.Context(), 0, b.Inputs); err == nil {
				t.Errorf("predict, %s: no error", name)
			}
		}
	}
	for _, sum := range []float64{0, -1, math.NaN()} {
		if _, err := Gradients(t.Context(), p, 0, good(), sum, [3]uint64{}); err == nil {
			t.Errorf("weight sum %v: no error", sum)
		}
	}
	for _, replica := range []int{-1, 1} {
		if _, err := Gradients(t.Context(), p, replica, good(), 4, [3]uint64{}); err == nil {
			t.Errorf("replica %d of 1: no error", replica)
		}
		if err := p.Update(t.Context(), 0, replica, 0, 1); err == nil {
			t.Errorf("update from replica %d of 1: no error", replica)
		}
		if err := p.Update(t.Context(), replica, 0, 0, 1); err == nil {
			t.Errorf("update of device %d of 1: no error", replica)
		}
		if err := p.Update(t.Context(), 0, 0, replica, 1); err == nil {
			t.Errorf("update of part %d of 1: no error", replica)
		}
		for _, err := range []error{
			second(p.Gradient(replica, 0)), second(p.Gradient(0, replica*len(p.Parameters()))),
			second(p.Updated(replica, 0)), second(p.Updated(0, replica*len(p.Parameters()))),
		} {
			if err == nil {
				t.Errorf("memory of replica, device or parameter %d: no error", replica)
			}
		}
	}
	p.Discard()
	sameBits(t, "after wrong arguments", read(t, p, 0), start)
	step(t, p, 0, good(), 4)

	e := open(t, c, 1)
	for name, change := range map[string]func(s *engine.Spec){
		"no rows":      func(s *engine.Spec) { s.Rows = 0 },
		"no inputs":    func(s *engine.Spec) { s.Inputs = nil },
		"no devices":   func(s *engine.Spec) { s.Devices = nil },
		"strings":      func(s *engine.Spec) { s.Inputs[0].DType = tensor.String },
		"no label":     func(s *engine.Spec) { s.Labels = nil },
		"empty inputs": func(s *engine.Spec) { s.Inputs[0].Shape = []int{0} },
		"bucket bytes": func(s *engine.Spec) { s.BucketBytes = -1 },
		"no device 1":  func(s *engine.Spec) { s.ReplicaDevices = []int{0, 1} },
		"device -1":    func(s *engine.Spec) { s.ReplicaDevices = []int{-1} },
		"no replicas":  func(s *engine.Spec) { s.ReplicaDevices = []int{} },
	} {
		s := spec(e, 1, 4)
		change(&s)
		if p, err := c.Plain().Compile(t.Context(), e, s); err == nil {
			p.Close()
			t.Errorf("compiled a spec with %s", name)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p, err := c.Plain().Compile(ctx, e, spec(e, 1, 4)); !errors.Is(err, context.Canceled) {
		t.Errorf("compile with a cancelled context: %v", err)
		if err == nil {
			p.Close()
		}
	}
}

func testPanic(t *testing.T, c Config) {
	e := open(t, c, 1)
	p, err := c.Panicking().Compile(t.Context(), e, spec(e, 1, 4))
	if err == nil {
		p.Close()
		t.Fatal("a model that panics compiled")
	}
	if !strings.Contains(err.Error(), "deliberate") {
		t.Errorf("error %q does not contain the model's text", err)
	}
	compiled := mustCompile(t, c.Plain(), e, spec(e, 1, 4))
	step(t, compiled, 0, batch(1, 4), 4)
}

// testConcurrent checks that concurrent replicas compute the same bits as sequential ones.
func testConcurrent(t *testing.T, c Config) {
	const n, steps = 3, 20
	train := func(each func(f func(r int))) [][]*tensor.Tensor {
		p := compile(t, c, c.Averaging(), n, 4)
		g := make([]Result, n)
		for s := range steps {
			each(func(r int) {
				var err error
				g[r], err = Gradients(t.Context(), p, r, batch(uint64(100*s+r), 4), 4*n, [3]uint64{uint64(s), uint64(r), 1})
				if err != nil {
					t.Error(err)
				}
			})
			if t.Failed() {
				t.FailNow()
			}
			sum := make([]*tensor.Tensor, len(g[0].Tensors))
			for r := range n {
				addAll(sum, g[r].Tensors)
			}
			each(func(r int) {
				fill(t, p, r, sum)
				for k := range p.Parts(r) {
					if err := p.Update(t.Context(), r, r, k, 1); err != nil {
						t.Error(err)
					}
				}
			})
			p.Commit()
			each(func(r int) {
				if _, _, err := p.Evaluate(t.Context(), r, batch(1, 4), 4); err != nil {
					t.Error(err)
				}
			})
		}
		var all [][]*tensor.Tensor
		for r := range n {
			all = append(all, read(t, p, r))
		}
		return all
	}
	one := train(func(f func(r int)) {
		for r := range n {
			f(r)
		}
	})
	together := train(func(f func(r int)) {
		var wg sync.WaitGroup
		for r := range n {
			wg.Go(func() { f(r) })
		}
		wg.Wait()
	})
	for r := range n {
		sameBits(t, fmt.Sprintf("replica %d at the same time as others", r), together[r], one[r])
	}
}

func testClosed(t *testing.T, c Config) {
	e := open(t, c, 1)
	p := must(c.Plain().Compile(t.Context(), e, spec(e, 1, 4)))(t)
	check(t, p.Close())
	if _, err := Gradients(t.Context(), p, 0, batch(1, 4), 4, [3]uint64{}); err == nil {
		t.Error("gradients of a closed program: no error")
	}
	if _, err := p.Read(0, 0); err == nil {
		t.Error("read from a closed program: no error")
	}
	if err := p.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
}

// open opens an engine for the test.
func open(t *testing.T, c Config, n int) engine.Engine {
	t.Helper()
	e := must(c.Open(n))(t)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// spec is a spec of n replicas on the engine's first devices.
func spec(e engine.Engine, n, rows int) engine.Spec {
	return engine.Spec{
		Rows: rows, Seed: 42, Devices: slices.Clone(e.Devices()[:n]),
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{Features}}},
		Labels: []engine.Feature{{DType: tensor.Int32}},
	}
}

// compile opens an engine and compiles a model for n replicas.
func compile(t *testing.T, c Config, m engine.Model, n, rows int) engine.Program {
	t.Helper()
	e := open(t, c, n)
	return mustCompile(t, m, e, spec(e, n, rows))
}

func mustCompile(t *testing.T, m engine.Model, e engine.Engine, s engine.Spec) engine.Program {
	t.Helper()
	p := must(m.Compile(t.Context(), e, s))(t)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// batch returns a batch of random rows, all of weight 1.
func batch(seed uint64, rows int) engine.Batch {
	r := rand.New(rand.NewPCG(seed, 0))
	x, y := tensor.New(tensor.Float32, rows, Features), tensor.New(tensor.Int32, rows)
	for i := range tensor.Data[float32](x) {
		tensor.Data[float32](x)[i] = float32(r.NormFloat64())
	}
	for i := range tensor.Data[int32](y) {
		tensor.Data[int32](y)[i] = r.Int32N(Classes)
	}
	w := make([]float32, rows)
	for i := range w {
		w[i] = 1
	}
	return engine.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}, Weights: w}
}

// part is share i of n of a batch, padded to rows rows.
func part(b engine.Batch, n, i, rows int) engine.Batch {
	all := len(b.Weights)
	per := (all + n - 1) / n
	lo, hi := min(all, i*per), min(all, (i+1)*per)
	pad := func(t *tensor.Tensor) *tensor.Tensor {
		out := tensor.New(t.DType(), append([]int{rows}, t.Shape()[1:]...)...)
		copy(out.Memory().HostBytes(), t.Rows(lo, hi).Memory().HostBytes())
		return out
	}
	w := make([]float32, rows)
	copy(w, b.Weights[lo:hi])
	return engine.Batch{
		Inputs: []*tensor.Tensor{pad(b.Inputs[0])}, Labels: []*tensor.Tensor{pad(b.Labels[0])}, Weights: w,
		Padding: rows - (hi - lo),
	}
}

// Result is the result of one micro-batch: a view of the gradients, loss and metrics.
type Result struct {
	engine.Scalars
	Tensors []*tensor.Tensor // the memory of Program.Gradient, by parameter
}

// Gradients computes the gradients of a step without accumulation.
func Gradients(ctx context.Context, p engine.Program, replica int, b engine.Batch, weightSum float64, rng [3]uint64) (
	Result, error,
) {
	var r Result
	var err error
	r.Scalars, err = p.Gradients(ctx, replica, engine.Micro{Batch: b, WeightSum: weightSum, RNG: rng, Last: true}, nil)
	if err != nil {
		return r, err
	}
	r.Tensors, err = Memory(p, replica)
	return r, err
}

// Memory returns the memory of all gradients of a replica.
func Memory(p engine.Program, replica int) ([]*tensor.Tensor, error) {
	list := make([]*tensor.Tensor, len(p.Parameters()))
	for i := range list {
		var err error
		if list[i], err = p.Gradient(replica, i); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// Update updates all parts of a device with the gradients of a replica.
func Update(ctx context.Context, p engine.Program, device, replica int) error {
	for k := range p.Parts(device) {
		if err := p.Update(ctx, device, replica, k, 1); err != nil {
			return err
		}
	}
	return nil
}

func gradients(t *testing.T, p engine.Program, replica int, b engine.Batch, weightSum float64) Result {
	t.Helper()
	g := must(Gradients(t.Context(), p, replica, b, weightSum, [3]uint64{1, 2, 3}))(t)
	if len(g.Metrics) != len(p.Metrics()) {
		t.Fatalf("%d metrics: want %d", len(g.Metrics), len(p.Metrics()))
	}
	for i, v := range p.Parameters() {
		if g.Tensors[i].DType() != v.DType || !slices.Equal(g.Tensors[i].Shape(), v.Shape) {
			t.Fatalf("gradient of %s is %v %v", v.Name, g.Tensors[i].DType(), g.Tensors[i].Shape())
		}
	}
	return g
}

// fill writes gradients into a replica's memory.
func fill(t *testing.T, p engine.Program, replica int, list []*tensor.Tensor) {
	t.Helper()
	to := must(Memory(p, replica))(t)
	for i, x := range list {
		copy(to[i].Memory().HostBytes(), x.Memory().HostBytes())
	}
}

// update updates all parts of a device with factor times the gradients of the replica of the same index.
func update(t *testing.T, p engine.Program, device int, factor float64) {
	t.Helper()
	for k := range p.Parts(device) {
		check(t, p.Update(t.Context(), device, device, k, factor))
	}
}

// step takes one training step on one replica and its device only.
func step(t *testing.T, p engine.Program, replica int, b engine.Batch, weightSum float64) {
	t.Helper()
	gradients(t, p, replica, b, weightSum)
	update(t, p, replica, 1)
	p.Commit()
}

// read returns all variables of a replica.
func read(t *testing.T, p engine.Program, replica int) []*tensor.Tensor {
	t.Helper()
	list := make([]*tensor.Tensor, len(p.Variables()))
	for i := range list {
		list[i] = must(p.Read(replica, i))(t)
	}
	return list
}

func cloneAll(list []*tensor.Tensor) []*tensor.Tensor {
	out := make([]*tensor.Tensor, len(list))
	for i, t := range list {
		out[i] = t.Clone()
	}
	return out
}

// addAll adds float32 tensors to sum. A nil sum means zeros.
func addAll(sum, list []*tensor.Tensor) {
	for i, t := range list {
		if sum[i] == nil {
			sum[i] = t.Clone()
			continue
		}
		for j, x := range tensor.Data[float32](t) {
			tensor.Data[float32](sum[i])[j] += x
		}
	}
}

// distance is the largest difference of two elements.
func distance(a, b *tensor.Tensor) float64 {
	d := 0.0
	for i, x := range a.Float64s() {
		d = math.Max(d, math.Abs(x-b.Float64s()[i]))
	}
	return d
}

func equal(a, b []*tensor.Tensor) bool {
	return slices.EqualFunc(a, b, func(x, y *tensor.Tensor) bool {
		return x.SameShape(y) && bytes.Equal(x.Memory().HostBytes(), y.Memory().HostBytes())
	})
}

func sameBits(t *testing.T, what string, got, want []*tensor.Tensor) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d tensors, want %d", what, len(got), len(want))
	}
	for i := range got {
		if !got[i].Equal(want[i]) {
			t.Errorf("%s: tensor %d is %v, want %v", what, i, got[i], want[i])
		}
	}
}

// softmaxLoss is the mean cross entropy of logits, and the number of hits.
func softmaxLoss(logits, labels *tensor.Tensor) (loss, hits float64) {
	rows := logits.Shape()[0]
	x, y := logits.Float64s(), tensor.Data[int32](labels)
	for i := range rows {
		row := x[i*Classes : (i+1)*Classes]
		sum, best := 0.0, 0
		for j, v := range row {
			sum += math.Exp(v)
			if v > row[best] {
				best = j
			}
		}
		loss += math.Log(sum) - row[y[i]]
		if best == int(y[i]) {
			hits++
		}
	}
	return loss / float64(rows), hits
}

func second[T any](_ T, err error) error { return err }

// must returns a function that returns x, or ends the test if there is an error.
func must[T any](x T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		check(t, err)
		return x
	}
}

// check ends the test if there is an error.
func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// evaluate returns loss and metrics of a batch.
func evaluate(t *testing.T, p engine.Program, replica int, b engine.Batch, weightSum float64) (float64, []float64) {
	t.Helper()
	loss, metrics, err := p.Evaluate(t.Context(), replica, b, weightSum)
	check(t, err)
	return loss, metrics
}
