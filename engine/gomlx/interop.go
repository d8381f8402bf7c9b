package gomlx

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"unsafe"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/metric"

	"github.com/lockstep-ml/lockstep/engine"
)

// MetricFrom makes a Metric of a metric of GoMLX, under its name. The metric must be a mean over the examples of a
// batch, as GoMLX's accuracies and losses are; Compile returns an error for any other. Then its value for a batch is
// that of the global batch on any number of replicas, without padding, and each example counts by its weight.
//
// GoMLX's kinds of metrics differ in how the values of batches become one value:
//
//   - a mean metric weights each batch by its examples, or counts it once (WithDynamicBatch(false));
//   - an exponential moving average, and the median of batches, follow the order of the batches;
//   - a base metric, or a metric of another type that has no variables, is the value of the last batch.
//
// An epoch and an evaluation start anew, as in Keras; GoMLX's Loop resets the metrics of training only when it starts.
// With Accumulate, the batches of a step count as one. The median of more batches than its sample size takes a random
// sample that is the same on every worker. MetricFrom changes nothing in m, so m may be used several times.
//
// A metric with other variables, or that updates itself in Go, is an error of Compile, because Lockstep cannot combine
// its state over replicas: write it as a [Metric] with Sums.
func MetricFrom(m metric.Interface) Metric {
	x := Metric{Name: m.Name(), mean: true}
	f, err := batchGraph(m)
	if err == nil {
		x.stream, err = streamOf(m)
	}
	x.PerExample = func(labels, predictions []*graph.Node) *graph.Node {
		if err != nil {
			panic(fmt.Errorf("metric %q (%T): %w", m.Name(), m, err))
		}
		y := f(labels, predictions)
		each := meanedOver(y, predictions[0].Shape().Dim(0))
		if each == nil {
			panic(fmt.Errorf("metric %q gives %s, which is not the mean of a value per example (graph.ReduceAllMean, or "+
				"graph.ReduceAllSum divided by the number of elements, of a node whose first dimension is the rows), so it "+
				"cannot be combined over replicas: want such a mean, or a gomlx.Metric with Sums; weights belong to the "+
				"batch, not to its labels", m.Name(), shapeOf(y)))
		}
		return each
	}
	return x
}

// lossPerExample returns a loss as one number per example. It accepts what GoMLX's trainer does, except for a scalar
// that is not a mean over the examples: a number per example, several, or their mean.
func lossPerExample(x *graph.Node, rows int) *graph.Node {
	switch {
	case x == nil || x.Rank() == 1:
		return x
	case x.IsScalar():
		if each := meanedOver(x, rows); each != nil {
			return each
		}
	case x.Shape().Dim(0) == rows:
		return perExample(x)
	}
	return x
}

// followsRows returns an error unless f, which found the values per example of a mean of the batch, finds them for
// another number of rows, too. Otherwise it found an axis that has as many elements as the batch has rows by chance.
func (bl *builder) followsRows(what string, batch batchNodes, predictions []*graph.Node,
	f func(labels, predictions []*graph.Node, rows int) *graph.Node,
) error {
	x := bl.newExecutable(what + " for another number of rows")
	defer bl.drop([]*executable{x})
	rows := bl.spec.Rows + 1
	resized := func(kind string, list []*graph.Node) (out []*graph.Node) {
		for i, n := range list {
			dims := slices.Clone(n.Shape().Dimensions)
			dims[0] = rows
			out = append(out, graph.Parameter(x.g, fmt.Sprintf("%s %d", kind, i), shapes.Make(n.DType(), dims...)))
		}
		return out
	}
	var each *graph.Node
	err := catch("build "+x.name, func() error {
		x.g.AttachState(weightsKey{}, resized("weights", []*graph.Node{batch.weights})[0])
		x.g.AttachState(examplesKey{}, &examples{rows: rows})
		each = f(resized("label", batch.labels), resized("prediction", predictions), rows)
		return nil
	})
	if err == nil && each != nil && each.Rank() == 1 && each.Shape().Dim(0) == rows {
		return nil
	}
	why := ""
	if err != nil {
		why = ": " + err.Error()
	}
	return fmt.Errorf("%s gives a mean over an axis of %d elements, as many as the batch has rows, but with %d rows it "+
		"does not give one over the rows: want the mean of a value per example; gomlx.BatchLoss takes a loss that combines "+
		"examples%s", what, bl.spec.Rows, rows, why)
}

// meanedOver returns the values per example whose mean x is, or nil if the graph does not show it: x is the sum of all
// elements of a node of shape (rows, …), divided by their number.
func meanedOver(x *graph.Node, rows int) *graph.Node {
	if x == nil || !x.IsScalar() || !x.DType().IsFloat() {
		return nil
	}
	switch x.Type() {
	case graph.NodeTypeConvertDType:
		if in := x.Inputs()[0]; in.DType().IsFloat() {
			if each := meanedOver(in, rows); each != nil {
				return graph.ConvertDType(each, x.DType())
			}
		}
		return nil
	case graph.NodeTypeMul, graph.NodeTypeDiv:
	default:
		return nil
	}
	in := x.Inputs()
	sum, factor := in[0], in[1]
	if x.Type() == graph.NodeTypeMul && sum.Type() == graph.NodeTypeConstant {
		sum, factor = factor, sum
	}
	if sum.Type() != graph.NodeTypeReduceSum {
		return nil
	}
	values := sum.Inputs()[0]
	if values.Rank() == 0 || values.Shape().Dim(0) != rows {
		return nil
	}
	scale, ok := constantOf(factor)
	if ok && x.Type() == graph.NodeTypeDiv {
		scale = 1 / scale
	}
	precision := 1e-5
	if x.DType() == dtypes.Float16 || x.DType() == dtypes.BFloat16 {
		precision = 1.0 / 256
	}
	if size := float64(values.Shape().Size()); !ok || math.Abs(scale*size-1) > precision {
		return nil
	}
	return perExample(values)
}

// constantOf returns the value of a scalar constant.
func constantOf(x *graph.Node) (value float64, ok bool) {
	t := x.ConstantValue()
	if t == nil || !t.Shape().IsScalar() || !t.DType().IsFloat() {
		return 0, false
	}
	switch v := t.Value().(type) {
	case float32:
		return float64(v), true
	case float64:
		return v, true
	case interface{ Float32() float32 }:
		return float64(v.Float32()), true
	}
	return 0, false
}

// batchGraph returns the function that computes the metric of one batch without state.
func batchGraph(m metric.Interface) (func(labels, predictions []*graph.Node) *graph.Node, error) {
	scope := model.NewStore().RootScope()
	if _, known := kindOf(m); known {
		f, err := field[metric.BaseMetricGraph](m, "metricFn")
		if err == nil && f == nil {
			err = errors.New("its function is nil")
		}
		return func(labels, predictions []*graph.Node) *graph.Node { return f(scope, labels, predictions) }, err
	}
	if _, ok := m.(metric.UpdateGo); ok {
		return nil, errors.New("it updates itself in Go (UpdateGo), so its state cannot be combined over replicas: want a " +
			"gomlx.Metric with Sums")
	}
	return func(labels, predictions []*graph.Node) *graph.Node {
		x := m.UpdateGraph(scope, labels, predictions)
		for v := range scope.Store().IterVariables() {
			panic(fmt.Errorf("metric %q (%T) keeps the variable %s, and Lockstep cannot combine it over replicas: want a "+
				"gomlx.Metric with Sums", m.Name(), m, v.Path()))
		}
		return x
	}, nil
}

// kind is how a metric of GoMLX makes one value of those of batches.
type kind uint8

const (
	lastBatch kind = iota
	meanOfBatches
	movingAverage
	medianOfBatches
)

// kinds are those of GoMLX's types, three of which are not exported.
var kinds = map[reflect.Type]kind{
	reflect.TypeOf(metric.NewBaseMetric("", "", "", nil, nil)):                        lastBatch,
	reflect.TypeFor[*metric.MeanMetric]():                                             meanOfBatches,
	reflect.TypeOf(metric.NewExponentialMovingAverageMetric("", "", "", nil, nil, 1)): movingAverage,
	reflect.TypeFor[*metric.StreamingMedianMetric]():                                  medianOfBatches,
}

// kindOf returns the kind of a metric, if its type is one of GoMLX's.
func kindOf(m metric.Interface) (k kind, known bool) {
	k, known = kinds[reflect.TypeOf(m)]
	return k, known
}

// streamOf returns what makes one value of a metric's values of batches. Nil: the mean over all examples.
func streamOf(m metric.Interface) (func() engine.Stream, error) {
	switch k, _ := kindOf(m); k {
	case meanOfBatches:
		weighted, err := field[bool](m, "dynamicBatch")
		if weighted || err != nil {
			return nil, err
		}
		return func() engine.Stream { return new(meanStream) }, nil
	case movingAverage:
		share, err := field[float64](m, "newExampleWeight")
		return func() engine.Stream { return &averageStream{share: share} }, err
	case medianOfBatches:
		size, err := field[int](m, "maxNumSamples")
		return func() engine.Stream { return newMedianStream(max(size, 1)) }, err
	default:
		return func() engine.Stream { return &lastStream{math.NaN()} }, nil
	}
}

// field reads a field of a metric of GoMLX that is not exported. GoMLX offers no other way to read it.
func field[T any](m metric.Interface, name string) (value T, err error) {
	f := reflect.ValueOf(m).Elem().FieldByName(name)
	if !f.IsValid() || f.Type() != reflect.TypeFor[T]() {
		return value, fmt.Errorf("this version of GoMLX has no field %s of type %T in it: want the version that Lockstep is "+
			"built for, or a gomlx.Metric", name, value)
	}
	return *(*T)(unsafe.Pointer(f.UnsafeAddr())), nil
}

// lastStream is the value of the last batch.
type lastStream struct{ value float64 }

func (s *lastStream) Add(sums []float64, weight float64) { s.value = sums[0] / weight }
func (s *lastStream) Value() float64                     { return s.value }
func (s *lastStream) State() []float64                   { return []float64{s.value} }
func (s *lastStream) SetState(state []float64) error     { return set(state, &s.value) }

// meanStream is the mean of the batches' values, each of which counts once.
type meanStream struct{ sum, count float64 }

func (s *meanStream) Add(sums []float64, weight float64) {
	s.sum, s.count = s.sum+sums[0]/weight, s.count+1
}
func (s *meanStream) Value() float64                 { return s.sum / s.count }
func (s *meanStream) State() []float64               { return []float64{s.sum, s.count} }
func (s *meanStream) SetState(state []float64) error { return set(state, &s.sum, &s.count) }

// averageStream is an exponential moving average. It begins as the mean, until a batch's share is that of the average.
type averageStream struct{ share, mean, count float64 }

func (s *averageStream) Add(sums []float64, weight float64) {
	s.count++
	w := max(s.share, 1/s.count)
	s.mean = s.mean*(1-w) + w*sums[0]/weight
}

func (s *averageStream) Value() float64 {
	if s.count == 0 {
		return math.NaN()
	}
	return s.mean
}
func (s *averageStream) State() []float64               { return []float64{s.mean, s.count} }
func (s *averageStream) SetState(state []float64) error { return set(state, &s.mean, &s.count) }

// medianStream is the median of the values of at most size batches, a random sample of all (reservoir sampling).
type medianStream struct {
	size    int
	seen    float64
	samples []float64
}

func newMedianStream(size int) *medianStream { return &medianStream{size: size} }

func (s *medianStream) Add(sums []float64, weight float64) {
	s.seen++
	x := sums[0] / weight
	if len(s.samples) < s.size {
		s.samples = append(s.samples, x)
		return
	}
	// A generator for each batch makes the sample the same on every worker, and after resuming.
	if at := rand.New(rand.NewPCG(uint64(s.seen), 0)).Int64N(int64(s.seen)); at < int64(s.size) {
		s.samples[at] = x
	}
}

func (s *medianStream) Value() float64 {
	if len(s.samples) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s.samples))
	return sorted[len(sorted)/2]
}

func (s *medianStream) State() []float64 { return append([]float64{s.seen}, s.samples...) }

func (s *medianStream) SetState(state []float64) error {
	samples := len(state) - 1
	if samples < 0 || !(state[0] >= float64(samples)) || state[0] > 1<<53 || samples > s.size ||
		samples < s.size && state[0] > float64(samples) {
		return fmt.Errorf("the state of a median has %d numbers: want the batches and at most %d samples", len(state), s.size)
	}
	s.seen, s.samples = state[0], slices.Clone(state[1:])
	return nil
}

// set copies a state to its fields.
func set(state []float64, fields ...*float64) error {
	if len(state) != len(fields) {
		return fmt.Errorf("the state of a metric has %d numbers: want %d", len(state), len(fields))
	}
	for i, f := range fields {
		*f = state[i]
	}
	return nil
}
