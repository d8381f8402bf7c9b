package gomlx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/stages"
	"github.com/lockstep-ml/lockstep/tensor"
)

// compile builds every program of m, draws the initial values, and copies them to each replica.
func compile(ctx context.Context, m *Model, b *backend, spec engine.Spec) (*program, error) {
	if spec.Replicas == 0 {
		spec.Replicas = spec.LocalReplicas()
	}
	bl, err := newBuilder(m, b, spec)
	if err != nil {
		return nil, err
	}
	p, err := bl.build(ctx)
	if err != nil {
		for _, x := range bl.graphs {
			x.close()
		}
		return nil, err
	}
	return p, nil
}

// builder builds the graphs of a model with one store, which has the variables' names but no values.
type builder struct {
	m              *Model
	b              *backend
	spec           engine.Spec
	store          *model.Store
	layers         *model.Store // that of the model function: store, or one whose variables have half width
	width          dtypes.DType // in which layers compute, of a mixed precision
	inputs, labels []shapes.Shape
	graphs         []*executable // all that were created, for cleanup

	lossType dtypes.DType // known once the training graph is built
	trained  []*model.Variable
	changed  []*model.Variable // by the gradients program, except trained ones and random state
	hooks    map[string]any    // per-step updates that layers have registered
	classes  []int             // by label; 0: not a class
	sums     []int             // by metric: their number

	pieces      []engine.Piece
	ofUpdates   map[string]bool // paths of the variables that an update of all parameters uses
	wholeUpdate []string        // its description, if updates are sharded
}

func newBuilder(m *Model, b *backend, spec engine.Spec) (*builder, error) {
	bl := &builder{m: m, b: b, spec: spec, store: newStore(m, spec)}
	var err error
	if bl.width, err = m.Precision.width(); err != nil {
		return nil, err
	}
	bl.layers = bl.store
	if bl.width != dtypes.InvalidDType {
		bl.layers = newStore(m, spec)
	}
	for _, list := range []struct {
		what     string
		features []engine.Feature
		shapes   *[]shapes.Shape
	}{{"input", spec.Inputs, &bl.inputs}, {"label", spec.Labels, &bl.labels}} {
		for i, f := range list.features {
			s, err := batchShape(f, spec.Rows)
			if err != nil {
				return nil, fmt.Errorf("%s %d: %w", list.what, i, err)
			}
			*list.shapes = append(*list.shapes, s)
		}
	}
	return bl, nil
}

// newStore returns a store without variables.
func newStore(m *Model, spec engine.Spec) *model.Store {
	s := model.NewStore()
	s.SetParam(model.ParamInitialSeed, spec.Seed) // must be int64: GoMLX reads another type as 0
	for name, value := range m.Params {
		s.SetParam(name, value)
	}
	return s
}

// build builds the graphs in the order in which GoMLX's trainer would create the variables: the model's, then
// the optimizer's. Initial values depend on that order.
func (bl *builder) build(ctx context.Context) (*program, error) {
	if err := bl.masters(); err != nil {
		return nil, err
	}
	gradients, err := bl.training()
	if err != nil {
		return nil, bl.explain(err)
	}
	buckets := bl.buckets(gradients)
	gradients.buckets = resultsOf(buckets)
	updates, err := bl.updating(buckets)
	if err != nil {
		return nil, err
	}
	evaluate, err := bl.evaluation()
	if err != nil {
		return nil, bl.explain(err)
	}
	predict, err := bl.prediction()
	if err != nil {
		return nil, bl.explain(err)
	}
	var step *executable
	if bl.replicas() == 1 && bl.spec.Shards <= 1 && bl.b.whole && bl.layers == bl.store {
		if step, err = bl.wholeStep(); err != nil {
			return nil, err
		}
	}

	p := &program{
		backend: bl.b, spec: bl.spec, lossType: bl.lossType,
		parameters: len(bl.trained), buckets: buckets, pieces: bl.pieces, updates: updates, wholeUpdate: bl.wholeUpdate,
		model: bl.m,
	}
	p.shape = bl.shape(true)
	p.gradients, p.step, p.evaluate, p.predict = gradients, step, evaluate, predict
	p.shapes = []*shape{p.shape}
	for i, x := range bl.m.Metrics {
		p.metrics = append(p.metrics, x.Name)
		p.info.Summaries = append(p.info.Summaries, engine.Summary{Sums: bl.sums[i], Value: x.Value, Stream: x.stream})
		p.sums += bl.sums[i]
	}
	if p.variables, err = bl.variables(); err != nil {
		return nil, err
	}
	for _, v := range p.variables {
		p.ofUpdates = append(p.ofUpdates, bl.ofUpdates[v.Name])
	}
	index := map[string]int{}
	for i, v := range p.variables {
		index[v.Name] = i
	}
	for _, x := range bl.graphs {
		if err := x.bind(index); err != nil {
			return nil, err
		}
		if err := x.finish(); err != nil {
			return nil, err
		}
	}
	p.makeCells()
	if err := p.averagesNeedDevices(p.spec); err != nil {
		return nil, err
	}
	// XLA compiles slowly: programs that every step needs are compiled now, the others on first use.
	compiled := []*executable{gradients}
	for k, u := range p.updates {
		if p.spec.Shards <= 1 || slices.Contains(p.spec.ReplicaShards, k) {
			compiled = append(compiled, u.programs...)
		}
	}
	for _, x := range compiled {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("gomlx: compile: %w", context.Cause(ctx))
		}
		if err := x.compile(); err != nil {
			return nil, err
		}
	}
	err = p.open()
	if p.inPlace = p.mayUpdateInPlace(); err == nil {
		err = initialValues(bl.b.Backend, bl.store, p.variables, p.writeInitial, p.adoptInitial)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	bl.describe(p)
	return p, nil
}

// describe sets what Info returns besides the metrics' summaries.
func (bl *builder) describe(p *program) {
	i := &p.info
	i.Operations, i.Classes, i.EMA = p.operations(), bl.classes, p.ema()
	i.ComputeDType = tensor.Float32
	if half(bl.width) {
		i.ComputeDType, _ = fromGoMLX(bl.width)
	}
	i.LastStep = p.named(lastStepPath) // which GoMLX's train.Loop sets
	i.LearningRate, i.RateScheduled = p.learningRate()
	i.Central, i.WholeStep, i.UpdatesInCommit = p.central != nil, p.step != nil, p.inPlace
}

// resultsOf lists the outputs of the gradients program that are handed over together.
func resultsOf(buckets []engine.Bucket) (list [][]int) {
	for _, b := range buckets {
		var results []int
		for _, i := range b.Parameters {
			results = append(results, firstGradient+i)
		}
		list = append(list, results)
	}
	return list
}

// firstGradient is the index of the first gradient among the outputs of the gradients program. Loss and metrics,
// and the losses of the rows, are before it.
const firstGradient = 2

// training builds the gradients program. Its inputs are the weights of the examples, the weight sum of the
// global batch, and the batch. Its outputs are loss and metrics, the gradients in the order of names, and the
// variables that the model function changed.
func (bl *builder) training() (*executable, error) {
	x := bl.newExecutable("gradients")
	bl.overReplicas(x)
	err := catch("build the gradients program", func() error {
		g, batch := bl.begin(x, true)
		stats, each, objective, err := bl.objective(g, batch)
		if err != nil {
			return err
		}
		if err := bl.checkWidth(g); err != nil {
			return err
		}
		for v := range bl.layers.IterVariables() {
			if v.Path() == rngPath || !v.InUseByGraph(g) {
				continue
			}
			trained, changed := v.Trainable && v.DType().IsFloat(), v.ChangedInGraph(g)
			switch {
			case trained && changed:
				return fmt.Errorf("the model function sets trainable variable %s, which only the optimizer may change: "+
					"make it SetTrainable(false) to have it averaged over the replicas", v.Path())
			case trained:
				bl.trained = append(bl.trained, v)
			case changed:
				bl.changed = append(bl.changed, v)
			}
		}
		if len(bl.trained) == 0 {
			return errors.New("the model has no trainable variable")
		}
		sort.Slice(bl.trained, func(i, j int) bool { return bl.trained[i].Path() < bl.trained[j].Path() })
		weights := make([]*graph.Node, len(bl.trained))
		for i, v := range bl.trained {
			weights[i] = v.NodeValue(g)
		}
		scale := graph.Parameter(g, argName(lossScaleArg, 0), shapes.Make(bl.lossType))
		gradients := graph.Gradient(graph.Mul(objective, scale), weights...)
		if bl.trained, err = bl.mastersOf(bl.trained); err != nil {
			return err
		}
		if bl.changed, err = bl.mastersOf(bl.changed); err != nil {
			return err
		}
		for i, v := range bl.trained {
			gradients[i] = graph.ConvertDType(gradients[i], v.DType())
		}
		x.outputs = append([]*graph.Node{stats, each}, gradients...)
		for _, v := range bl.changed {
			value := bl.layers.GetVariable(v.Path()).NodeValue(g)
			if bl.spec.Central != nil && v.DType().IsFloat() {
				value = AllReduce(value, Mean)
			}
			x.outputs = append(x.outputs, value)
			x.changes = append(x.changes, v.Path())
		}
		if bl.layers != bl.store {
			return nil // masters has set the hooks
		}
		bl.hooks = map[string]any{}
		for h := range bl.store.IterGraphParams(g) {
			if h.Key == train.TrainerPerStepUpdateGraphFnParamKey {
				bl.hooks[model.JoinPath(h.Scope, h.Key)] = h.Value
			}
		}
		return nil
	})
	if err == nil {
		err = x.finish()
	}
	return x, err
}

// updates are the update programs of a shard.
type updates struct {
	parts    [][]int // the parameters of each program
	programs []*executable
	cells    []int // by variable: the cell with the elements that the shard keeps; -1: it keeps none
}

// updating builds the update programs of all shards: one per bucket if the optimizer computes the same new values from
// a part of the gradients as from all of them, else one for all. Of a parameter that is divided, each piece has a
// program. Those of other processes' shards are kept for [program.Place]; they are compiled if they are needed.
func (bl *builder) updating(buckets []engine.Bucket) ([]*updates, error) {
	all := make([]int, len(bl.trained))
	for i := range all {
		all[i] = i
	}
	one, err := bl.updatesOf([]part{{parameters: all}})
	if err != nil {
		return nil, err
	}
	bl.ofUpdates = map[string]bool{}
	for v := range bl.store.IterVariables() {
		bl.ofUpdates[v.Path()] = v.InUseByGraph(one[0].g)
	}
	shards := max(1, bl.spec.Shards)
	if shards > 1 && bl.spec.ShardIfFaster && !bl.shardsFaster(buckets) {
		bl.unshard()
		shards = 1
	}
	bl.pieces = engine.BucketPieces(bl.parameters(), buckets, shards, shards > 1 && divisible(one[0]))
	if shards == 1 && len(buckets) == 1 {
		return []*updates{{parts: [][]int{all}, programs: one}}, nil
	}
	sets, separable := bl.separate(one, buckets, shards)
	if !separable && bl.divided() { // a part has another formula than the whole
		bl.pieces = engine.BucketPieces(bl.parameters(), buckets, shards, false)
		sets, separable = bl.separate(one, buckets, shards)
	}
	if bl.spec.ShardIfFaster && shards > 1 && (!separable || bl.idleShard()) {
		for _, set := range sets {
			bl.drop(set.programs)
		}
		bl.unshard()
		shards = 1
		bl.pieces = engine.BucketPieces(bl.parameters(), buckets, shards, false)
		if sets, separable = nil, false; len(buckets) > 1 {
			sets, separable = bl.separate(one, buckets, shards)
		}
	}
	if !separable && shards > 1 {
		return nil, fmt.Errorf("gomlx: Spec.Shards is %d, but %T, or a layer that changes weights after each step, combines "+
			"gradients of several parameters: want one shard", shards, bl.m.Optimizer)
	}
	if !separable {
		return []*updates{{parts: [][]int{all}, programs: one}}, nil
	}
	if shards > 1 { // workers compare their models, but not which shards they have
		if err := one[0].finish(); err != nil {
			return nil, err
		}
		bl.wholeUpdate = one[0].description
	}
	bl.drop(one)
	return sets, nil
}

// separate builds the update programs of all shards. ok is false, and there are none, if they do not compute what the
// program for all parameters does.
func (bl *builder) separate(one []*executable, buckets []engine.Bucket, shards int) (sets []*updates, ok bool) {
	var programs []*executable
	if len(bl.hooks) > 0 { // they may read any weight
		return nil, false
	}
	for _, parts := range bl.partsOf(buckets, shards) {
		set := &updates{}
		for _, p := range parts {
			set.parts = append(set.parts, p.parameters)
		}
		var err error
		set.programs, err = bl.updatesOf(parts)
		if sets, programs = append(sets, set), append(programs, set.programs...); err != nil { // with all gradients it works
			bl.drop(programs)
			return nil, false
		}
	}
	if !sameFormulas(one, programs) {
		bl.drop(programs)
		return nil, false
	}
	return sets, true
}

// parameters describes the trained variables.
func (bl *builder) parameters() []engine.Variable {
	list := make([]engine.Variable, len(bl.trained))
	for i, v := range bl.trained {
		d, _ := fromGoMLX(v.DType()) // variables reports an error
		list[i] = engine.Variable{DType: d, Shape: v.Shape().Dimensions}
	}
	return list
}

// divided reports whether a parameter has several pieces.
func (bl *builder) divided() bool { return len(bl.pieces) > len(bl.trained) }

// partsOf lists, for each shard, what it updates of each bucket, without empty parts.
func (bl *builder) partsOf(buckets []engine.Bucket, shards int) [][]part {
	list := make([][]part, shards)
	for _, b := range buckets {
		of := make([]part, shards)
		var pieces []engine.Piece
		for _, s := range bl.pieces {
			switch {
			case !slices.Contains(b.Parameters, s.Parameter):
			case s.To-s.From < bl.trained[s.Parameter].Shape().Size():
				pieces = append(pieces, s)
			default:
				of[s.Owner].parameters = append(of[s.Owner].parameters, s.Parameter)
			}
		}
		for k, p := range of {
			if len(p.parameters) > 0 {
				list[k] = append(list[k], p)
			}
		}
		for i, s := range pieces {
			list[s.Owner] = append(list[s.Owner], part{[]int{s.Parameter}, &pieces[i]})
		}
	}
	return list
}

// drop removes programs that are not used.
func (bl *builder) drop(programs []*executable) {
	for _, x := range programs {
		bl.graphs = slices.DeleteFunc(bl.graphs, func(y *executable) bool { return x == y })
		x.close()
	}
}

// updatesOf builds programs that compute new values of parameters and optimizer state from reduced gradients,
// one for each part of the parameters. Step counters belong to every part, with the same new value in each.
func (bl *builder) updatesOf(parts []part) (updates []*executable, err error) {
	for k, part := range parts {
		name := fmt.Sprintf("update %d of %d", k+1, len(parts))
		if part.piece != nil {
			x, err := bl.updatePiece(name, part.piece)
			if updates = append(updates, x); err != nil {
				return updates, err
			}
			continue
		}
		x := bl.newExecutable(name)
		updates = append(updates, x)
		err := catch(fmt.Sprintf("build the update program with %T", bl.m.Optimizer), func() error {
			g := x.g
			model.SetStore(g, bl.store)
			bl.store.SetTraining(g, true)
			byPath := map[string]*graph.Node{}
			for _, i := range part.parameters {
				v := bl.trained[i]
				byPath[v.Path()] = graph.Parameter(g, argName(gradientArg, i), v.Shape())
				v.NodeValue(g)
			}
			bl.addUpdate(bl.store, g, byPath)
			bl.addChanges(bl.store, x)
			if len(x.outputs) == 0 {
				return errors.New("the optimizer changes no variable")
			}
			return nil
		})
		if err != nil {
			return updates, err
		}
	}
	return updates, nil
}

// averagesNeedDevices returns an error if a variable that the model function changes is changed by an update,
// too, while several replicas share a device: an update computes one new value per device.
func (p *program) averagesNeedDevices(spec engine.Spec) error {
	used, err := placed(spec)
	if err != nil || slices.Max(used) < 2 || spec.Central != nil {
		return err
	}
	for _, x := range p.allUpdates() {
		for _, v := range x.changed {
			if p.cells[v].Role == engine.Average {
				return fmt.Errorf("gomlx: variable %s is changed by the model function and by the update, so replicas cannot "+
					"share a device: want as many devices as replicas", p.cells[v].Name)
			}
		}
	}
	return nil
}

// wholeStep builds the program of a whole step of the only replica. Its outputs are loss and metrics, the losses of
// the rows, whether all gradients are finite, and the variables that the step changes.
func (bl *builder) wholeStep() (*executable, error) {
	x := bl.newExecutable("step")
	bl.overReplicas(x)
	err := catch("build the step program", func() error {
		g, batch := bl.begin(x, true)
		stats, each, objective, err := bl.objective(g, batch)
		if err != nil {
			return err
		}
		weights, byPath := make([]*graph.Node, len(bl.trained)), map[string]*graph.Node{}
		for i, v := range bl.trained {
			weights[i] = v.NodeValue(g)
		}
		finite := graph.Const(g, true)
		for i, gradient := range graph.Gradient(objective, weights...) {
			byPath[bl.trained[i].Path()] = gradient
			finite = graph.LogicalAnd(finite, graph.LogicalAll(graph.IsFinite(gradient)))
		}
		bl.addUpdate(bl.store, g, byPath)
		x.outputs = []*graph.Node{stats, each, graph.ConvertDType(finite, dtypes.Int32)}
		bl.addChanges(bl.store, x)
		return nil
	})
	return x, err
}

// addUpdate adds the optimizer's update, and the layers' changes after each step, to a graph. The optimizer pairs
// gradients with the trainable variables in use, in order of creation.
func (bl *builder) addUpdate(store *model.Store, g *graph.Graph, gradients map[string]*graph.Node) {
	var ordered []*graph.Node
	for v := range store.IterVariables() {
		if node := gradients[v.Path()]; node != nil {
			ordered = append(ordered, node)
		}
	}
	bl.m.Optimizer.(train.OptimizeWithGradients).UpdateGraphWithGradients(store.RootScope(), ordered, bl.lossType)
	for path, hook := range bl.hooks {
		model.SetGraphParam(g, path, hook)
	}
	train.ExecPerStepUpdateGraphFn(g)
}

// addChanges adds the new values of the variables that a graph changes to the outputs. The random state is an input.
func (bl *builder) addChanges(store *model.Store, x *executable) {
	for v := range store.IterVariables() {
		if v.Path() != rngPath && v.InUseByGraph(x.g) && v.ChangedInGraph(x.g) {
			x.outputs = append(x.outputs, v.NodeValue(x.g))
			x.changes = append(x.changes, v.Path())
		}
	}
}

// evaluation builds the program for loss and metrics in inference mode.
func (bl *builder) evaluation() (*executable, error) {
	x := bl.newExecutable("evaluate")
	x.inference = true
	bl.inference(x)
	err := catch("build the evaluate program", func() error {
		g, batch := bl.begin(x, false)
		stats, each, _, err := bl.objective(g, batch)
		x.outputs = []*graph.Node{stats, each}
		return err
	})
	return x, err
}

// prediction builds the program for the model's outputs in inference mode.
func (bl *builder) prediction() (*executable, error) {
	x := bl.newExecutable("predict")
	x.inference = true
	bl.inference(x)
	err := catch("build the predict program", func() error {
		g := x.g
		model.SetStore(g, bl.layers)
		bl.layers.SetTraining(g, false)
		var err error
		x.outputs, err = bl.forward(g, parameters(g, inputArg, bl.inputs))
		return err
	})
	return x, err
}

// batchNodes are the nodes of one batch.
type batchNodes struct {
	inputs, labels []*graph.Node
	weights        *graph.Node
}

// begin prepares a graph whose input is a whole batch.
func (bl *builder) begin(x *executable, training bool) (*graph.Graph, batchNodes) {
	g := x.g
	model.SetStore(g, bl.layers)
	bl.layers.SetTraining(g, training)
	n := batchNodes{
		inputs:  parameters(g, inputArg, bl.inputs),
		labels:  parameters(g, labelArg, bl.labels),
		weights: graph.Parameter(g, argName(weightsArg, 0), shapes.Make(dtypes.Float32, bl.spec.Rows)),
	}
	g.AttachState(weightsKey{}, n.weights)
	g.AttachState(examplesKey{}, &examples{rows: bl.spec.Rows})
	return g, n
}

// examplesKey is the key of a graph's [examples].
type examplesKey struct{}

// examples builds the nodes for Examples on first use, because most models do not need them.
type examples struct {
	rows int
	mask *graph.Node
}

// Examples returns a float32 node of shape (rows) in the graph that is being built: 1 for each row of the
// batch that is an example, 0 for padding. It is for layers that combine several examples. An example of
// weight 0 counts as an example. Examples returns nil in prediction, where every row is an example.
func Examples(g *graph.Graph) *graph.Node {
	e, _ := g.State(examplesKey{}).(*examples)
	if e == nil {
		return nil
	}
	if e.mask == nil {
		count := graph.Parameter(g, argName(examplesArg, 0), shapes.Make(dtypes.Int32))
		e.mask = graph.ConvertDType(graph.LessThan(graph.Iota(g, shapes.Make(dtypes.Int32, e.rows), 0), count),
			dtypes.Float32)
	}
	return e.mask
}

// weightsKey is the key of a graph's example weights.
type weightsKey struct{}

// ExampleWeights returns a float32 node of shape (rows) with the weights of the examples in the graph that is
// being built. It is for layers that combine several examples by weight. Padding has weight 0; [Examples]
// distinguishes it from examples of weight 0. ExampleWeights returns nil in prediction, which has no weights.
func ExampleWeights(g *graph.Graph) *graph.Node {
	n, _ := g.State(weightsKey{}).(*graph.Node)
	return n
}

// forward calls the model function and checks its results.
func (bl *builder) forward(g *graph.Graph, inputs []*graph.Node) ([]*graph.Node, error) {
	out := bl.m.Forward(bl.layers.RootScope(), bl.cast(g, inputs))
	if len(out) == 0 {
		return nil, errors.New("the model function returned no prediction")
	}
	for i, n := range out {
		if n == nil {
			return nil, fmt.Errorf("the model function returned nil as prediction %d", i)
		}
		if n.Rank() == 0 || n.Shape().Dim(0) != bl.spec.Rows {
			return nil, fmt.Errorf("the model function returned a prediction of shape %s: want %d rows, one per example",
				n.Shape(), bl.spec.Rows)
		}
		if bl.width != dtypes.InvalidDType {
			out[i] = AtLeastFloat32(n)
		}
	}
	return out, nil
}

// objective builds loss and metrics. stats is a vector of the loss followed by the metrics. losses has one
// loss per row. objective is the loss to differentiate.
//
// Let W be the weight sum of the global batch. A replica's loss is the sum over its examples of weight times
// loss, divided by W. Its share of the regularisation is its share of W. So the sum over replicas contains
// both exactly once.
func (bl *builder) objective(g *graph.Graph, batch batchNodes) (stats, losses, objective *graph.Node, err error) {
	predictions, err := bl.forward(g, batch.inputs)
	if err != nil {
		return nil, nil, nil, err
	}
	loss := bl.m.Loss(batch.labels, predictions)
	each := lossPerExample(loss, bl.spec.Rows)
	if err := bl.perExample("Model.Loss", each); err != nil {
		return nil, nil, nil, err
	}
	if loss.IsScalar() {
		again := func(labels, predictions []*graph.Node, rows int) *graph.Node {
			return lossPerExample(bl.m.Loss(labels, predictions), rows)
		}
		if err := bl.followsRows("Model.Loss", batch, predictions, again); err != nil {
			return nil, nil, nil, err
		}
	}
	if !each.DType().IsFloat() {
		return nil, nil, nil, fmt.Errorf("Model.Loss gives %s: want a floating-point type", each.DType())
	}
	// 8 or 11 bits of precision are too few for sums of weights, counts and Adam's coefficients.
	each = AtLeastFloat32(each)
	if t := bl.lossType; t != dtypes.InvalidDType && t != each.DType() {
		return nil, nil, nil, fmt.Errorf("Model.Loss gives %s in training and %s in inference: want one type", t,
			each.DType())
	}
	bl.lossType = each.DType()
	bl.classes = classesOf(g, batch.labels)
	if train.GetMainLoss(g) != nil {
		return nil, nil, nil, errors.New("the model function calls train.AddMainLoss, whose mean is not weighted " +
			"by example: put the loss into " +
			"Model.Loss, or call train.AddRegularizationLoss for a term that does not depend on the examples")
	}
	weights := graph.ConvertDType(batch.weights, bl.lossType)
	sum := graph.Parameter(g, argName(weightSumArg, 0), shapes.Make(bl.lossType))
	objective = graph.Div(weightedSum(each, weights), sum)
	if r := train.GetRegularizationLoss(g); r != nil {
		share := graph.Div(graph.ReduceAllSum(weights), sum)
		objective = graph.Add(objective, graph.Mul(graph.ConvertDType(r, bl.lossType), share))
	}
	list := []*graph.Node{graph.Reshape(objective, 1)}
	bl.sums = nil
	for _, m := range bl.m.Metrics {
		x, what := m.PerExample(batch.labels, predictions), "metric "+m.Name
		if m.Sums > 0 {
			if x == nil || !x.Shape().EqualDimensions(shapes.Make(dtypes.Float32, bl.spec.Rows, m.Sums)) {
				return nil, nil, nil, fmt.Errorf("%s gives %s: want %d numbers per example, shape (%d, %d)", what, shapeOf(x),
					m.Sums, bl.spec.Rows, m.Sums)
			}
			bl.sums = append(bl.sums, m.Sums)
			list = append(list, weightedSums(graph.ConvertDType(x, bl.lossType), weights))
			continue
		}
		if err := bl.perExample(what, x); err != nil {
			return nil, nil, nil, err
		}
		if m.mean {
			err := bl.followsRows(what, batch, predictions, func(labels, predictions []*graph.Node, _ int) *graph.Node {
				return m.PerExample(labels, predictions)
			})
			if err != nil {
				return nil, nil, nil, err
			}
		}
		bl.sums = append(bl.sums, 1)
		list = append(list, graph.Reshape(weightedSum(graph.ConvertDType(x, bl.lossType), weights), 1))
	}
	if stats = list[0]; len(list) > 1 {
		stats = graph.Concatenate(list, 0)
	}
	return graph.StopGradient(stats), graph.StopGradient(each), objective, nil
}

// weightedSum is the sum of weight times x over the examples. An example of weight 0 does not count, even if
// its x is not finite.
func weightedSum(x, weights *graph.Node) *graph.Node {
	zero := graph.ScalarZero(x.Graph(), x.DType())
	return graph.ReduceAllSum(graph.Mul(graph.Where(graph.NotEqual(weights, zero), x, zero), weights))
}

// weightedSums is weightedSum for each column.
func weightedSums(x, weights *graph.Node) *graph.Node {
	zero := graph.ScalarZero(x.Graph(), x.DType())
	wide := graph.BroadcastToDims(graph.InsertAxes(weights, -1), x.Shape().Dimensions...)
	return graph.ReduceSum(graph.Mul(graph.Where(graph.NotEqual(wide, zero), x, graph.ZerosLike(x)), wide), 0)
}

// perExample checks that a loss or a metric gives one number per example.
func (bl *builder) perExample(what string, x *graph.Node) error {
	if x == nil || x.Rank() != 1 || x.Shape().Dim(0) != bl.spec.Rows {
		hint := ""
		if x != nil && x.IsScalar() {
			hint = ": its graph does not end in the mean of a value per example (graph.ReduceAllMean); gomlx.BatchLoss takes " +
				"a loss that combines examples, and gomlx.MetricFrom a metric of GoMLX"
		}
		return fmt.Errorf("%s gives %s: want one number per example, shape (%d)%s", what, shapeOf(x), bl.spec.Rows, hint)
	}
	return nil
}

// shapeOf describes a node's type and shape in errors.
func shapeOf(x *graph.Node) string {
	if x == nil {
		return "nil"
	}
	return x.Shape().String()
}

// variables lists every variable that a program uses, by role and name. The random state is not among them:
// it is an input.
func (bl *builder) variables() ([]variable, error) {
	role := map[string]engine.Role{}
	for _, v := range bl.trained {
		role[v.Path()] = engine.Parameter
	}
	for _, v := range bl.changed {
		role[v.Path()] = engine.Average
	}
	var list []variable
	for v := range bl.store.IterVariables() {
		path := v.Path()
		used := bl.ofUpdates[path] ||
			slices.ContainsFunc(bl.graphs, func(x *executable) bool { return bl.uses(x, v) })
		if path == rngPath || !used {
			continue
		}
		r, known := role[path]
		if !known {
			r = engine.Frozen
			if path == lastStepPath || bl.ofUpdates[path] { // lastStepPath is state of this training, not of the model
				r = engine.Slot
			}
		}
		d, err := fromGoMLX(v.DType())
		if err != nil {
			return nil, fmt.Errorf("%w (variable %s)", err, path)
		}
		list = append(list, variable{
			Variable: engine.Variable{Name: path, Role: r, DType: d, Shape: slices.Clone(v.Shape().Dimensions)},
			shape:    v.Shape(),
		})
	}
	slices.SortFunc(list, func(a, b variable) int {
		if a.Role != b.Role {
			return int(a.Role) - int(b.Role)
		}
		return strings.Compare(a.Name, b.Name)
	})
	return list, nil
}

// newExecutable creates an executable with an empty graph. With several replicas the graph is recorded, for
// its all-reduces and its description.
func (bl *builder) newExecutable(name string) *executable {
	return bl.newExecutableOn(name, func(b compute.Backend) compute.Backend { return b })
}

// newExecutableOn is newExecutable on a wrapper of the backend.
func (bl *builder) newExecutableOn(name string, wrap func(compute.Backend) compute.Backend) *executable {
	x := &executable{name: name}
	b := bl.b.Backend
	if bl.replicas() > 1 {
		x.recorder = stages.New(b)
		x.recorder.Defer = true
		b = x.recorder
	}
	if bl.layers != bl.store {
		b = castingBackend(b, bl.store)
	}
	x.g = graph.NewGraph(wrap(b), "lockstep: "+name)
	bl.graphs = append(bl.graphs, x)
	return x
}

// rngPath is the name of the variable that GoMLX keeps random state in.
const rngPath = "/" + model.RNGStateVariableName

// lastStepPath is the name of the variable that GoMLX keeps the number of the last step in, for schedules over a whole
// training.
var lastStepPath = model.JoinPath(train.TrainerAbsoluteScope, train.TrainLastStepVarName)

// argKind is the source of a program's argument.
type argKind uint8

const (
	variableArg argKind = iota
	inputArg
	labelArg
	weightsArg
	weightSumArg
	lossScaleArg
	examplesArg
	gradientArg
	rngArg
)

// argPrefix is the name prefix of a graph's parameter that is not a variable. A variable's name begins with a
// slash.
var argPrefix = map[argKind]string{
	inputArg: "#input", labelArg: "#label", weightsArg: "#weights", weightSumArg: "#weightSum", lossScaleArg: "#lossScale",
	examplesArg: "#examples", gradientArg: "#gradient",
}

// argName names the parameter of a graph; index counts among its kind.
func argName(k argKind, index int) string { return fmt.Sprintf("%s/%d", argPrefix[k], index) }

// parameters declares one parameter per shape.
func parameters(g *graph.Graph, k argKind, list []shapes.Shape) []*graph.Node {
	nodes := make([]*graph.Node, len(list))
	for i, s := range list {
		nodes[i] = graph.Parameter(g, argName(k, i), s)
	}
	return nodes
}

// argument is one argument of a program.
type argument struct {
	kind  argKind
	index int
}

// executable is a graph with the meaning of its parameters and outputs. It is compiled once, on first use.
// All replicas may run it concurrently.
type executable struct {
	name        string
	g           *graph.Graph
	args        []argument       // by the graph's parameters
	changes     []string         // variables whose new values are the last outputs, in this order
	changed     []int            // the same, by index
	recorder    *stages.Recorder // nil for one replica
	description []string         // of the operations, if they are recorded
	positions   []int            // of the outputs in the order of recording, if they are recorded
	buckets     [][]int          // outputs that are handed over when they are computed, if they are recorded
	inference   bool             // an evaluate or predict program
	piece       *engine.Piece    // of an update program: the elements of its only parameter; nil: all of its parameters
	whole, flat string           // with a piece: the dimensions of the parameter, and of the piece
	slots       []string         // with a piece: the slots of which it has these elements
	divided     []int            // the same, by variable; args and changed have their cells

	mu       sync.Mutex
	outputs  []*graph.Node
	compiled bool
	exe      compute.Executable // nil: not compiled yet
}

// bind maps each parameter of the graph to its argument.
func (x *executable) bind(variables map[string]int) error {
	x.args = make([]argument, x.g.NumParameters())
	for h := range x.args {
		name := x.g.GetParameterByHandle(graph.ParameterHandle(h)).GetParameterName()
		a, err := bindOne(name, variables)
		if err != nil {
			return fmt.Errorf("gomlx: the %s program: %w", x.name, err)
		}
		x.args[h] = a
	}
	for _, path := range x.changes {
		x.changed = append(x.changed, variables[path])
	}
	for _, path := range x.slots {
		x.divided = append(x.divided, variables[path])
	}
	return nil
}

func bindOne(name string, variables map[string]int) (argument, error) {
	if name == rngPath {
		return argument{kind: rngArg}, nil
	}
	if i, ok := variables[name]; ok {
		return argument{kind: variableArg, index: i}, nil
	}
	for kind, prefix := range argPrefix {
		var i int
		if n, err := fmt.Sscanf(name, prefix+"/%d", &i); err == nil && n == 1 {
			return argument{kind: kind, index: i}, nil
		}
	}
	return argument{}, fmt.Errorf("parameter %q is neither a variable nor part of the batch: a model function must not "+
		"call graph.Parameter", name)
}

// finish ends the recording of a graph that has one, and describes it.
func (x *executable) finish() error {
	if x.recorder == nil || x.positions != nil {
		return nil
	}
	return catch("build the "+x.name+" program", func() error {
		if err := x.g.Compile(x.outputs...); err != nil {
			return err
		}
		d := x.g.Executable().(*stages.Deferred)
		x.description, x.positions = d.Describe(), d.Positions()
		return nil
	})
}

// compile compiles the graph if it is not compiled yet.
func (x *executable) compile() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.compiled {
		return nil
	}
	if err := x.finish(); err != nil {
		return err
	}
	return catch("compile the "+x.name+" program", func() (err error) {
		defer func() { x.compiled = err == nil }()
		if err := collectivesOf(x.g).misused(); err != nil {
			return err
		}
		if x.recorder != nil {
			x.exe, err = x.g.Executable().(*stages.Deferred).Compile(x.buckets)
			return err
		}
		if err = x.g.Compile(x.outputs...); err == nil {
			x.exe = x.g.Executable()
		}
		return err
	})
}

func (x *executable) close() {
	if x.g != nil {
		x.g.Finalize()
		x.g, x.exe = nil, nil
	}
}
