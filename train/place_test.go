package train

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// testView is a placement of a job: by worker, the name of the process and its replicas.
type testView struct {
	names    []string
	replicas [][]int
	ends     []transport.Endpoint
	lost     bool // it follows a failure
}

// evenly gives n replicas to the named processes, in a rotated order.
func evenly(n, turn int, names ...string) testView {
	v := testView{names: names, replicas: make([][]int, len(names))}
	for id := range n {
		w := id * len(names) / n
		v.replicas[(w+turn)%len(names)] = append(v.replicas[(w+turn)%len(names)], id)
	}
	return v
}

// elasticTest is a job of which each process is a goroutine with an engine, a strategy and a trainer.
type elasticTest struct {
	t        *testing.T
	replicas int
	devices  int // of each process
	model    func() *gomlx.Model
	config   Config
	fit      FitConfig
	data     func() data.Dataset
	steps    []int                                // the step after which each view but the first is published
	onStep   func(name string, steps int64) error // nil: nothing

	mu        sync.Mutex
	published int // views
	views     []testView
	changed   chan struct{} // closed when a view is published
	running   sync.WaitGroup
	seen      map[string][]int64 // by process: the steps that its callbacks saw
	errs      map[string]error
	hash      string
}

// run runs the job with views, and returns the hash of the final state.
func (j *elasticTest) run(views ...testView) string {
	j.t.Helper()
	for i := range views {
		views[i].ends = mem.NewPipes(j.replicas)
	}
	j.views, j.published, j.hash = views, 0, ""
	j.changed, j.seen, j.errs = make(chan struct{}), map[string][]int64{}, map[string]error{}
	j.publish(0)
	j.running.Wait()
	for name, err := range j.errs {
		if err != nil && !errors.Is(err, errLeft) {
			j.t.Errorf("%s: %v", name, err)
		}
	}
	return j.hash
}

// publish publishes the views up to one, and starts their new processes.
func (j *elasticTest) publish(view int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for ; j.published <= view; j.published++ {
		for _, name := range j.views[j.published].names {
			if j.published == 0 || !slices.Contains(j.views[j.published-1].names, name) {
				at := j.published
				j.running.Go(func() {
					err := j.process(name, at)
					j.mu.Lock()
					defer j.mu.Unlock()
					j.errs[name] = err
				})
			}
		}
		close(j.changed)
		j.changed = make(chan struct{})
	}
}

// testPlacements are the placements of a process.
type testPlacements struct {
	j    *elasticTest
	name string
	next int // view
}

func (p *testPlacements) Due() bool {
	p.j.mu.Lock()
	defer p.j.mu.Unlock()
	return p.next < p.j.published && !p.j.views[p.next].lost
}

func (p *testPlacements) Next(ctx context.Context, cause error) (distribute.Placement, error) {
	for {
		p.j.mu.Lock()
		published, changed := p.j.published, p.j.changed
		p.j.mu.Unlock()
		if p.next < published {
			break
		}
		if cause == nil || p.next >= len(p.j.views) || !p.j.views[p.next].lost {
			return distribute.Placement{}, cause
		}
		<-changed
	}
	v := p.j.views[p.next]
	p.next++
	place := distribute.Placement{Worker: slices.Index(v.names, p.name), Replicas: v.replicas}
	if place.Worker < 0 {
		return place, nil
	}
	var own []transport.Endpoint
	for _, id := range v.replicas[place.Worker] {
		own = append(own, v.ends[id])
		place.Devices = append(place.Devices, fmt.Sprintf("CPU:%d", (id+p.next)%p.j.devices))
	}
	var err error
	place.Group, err = collective.Open(own, collective.Config{Timeout: time.Minute})
	return place, err
}

// process is a process of the job from a view on.
func (j *elasticTest) process(name string, view int) (err error) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: j.devices})
	if err != nil {
		return err
	}
	defer e.Close()
	var devices []string
	for id := range j.replicas {
		devices = append(devices, fmt.Sprintf("CPU:%d", id%j.devices))
	}
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Devices: devices, Engine: e, Elastic: true, Options: distribute.Options{Timeout: time.Minute},
	})
	if err != nil {
		return err
	}
	defer s.Close()
	cfg := j.config
	cfg.placements = &testPlacements{j, name, view}
	trainer, err := New(j.t.Context(), s, j.model(), cfg)
	if err != nil {
		return err
	}
	defer trainer.Close()
	fit := j.fit
	fit.Callbacks = []Callback{{OnStepEnd: func(context.Context, Step) error {
		steps := trainer.Steps()
		j.mu.Lock()
		j.seen[name] = append(j.seen[name], steps)
		j.mu.Unlock()
		for i, at := range j.steps {
			if steps == int64(at) {
				j.publish(i + 1)
			}
		}
		if j.onStep != nil {
			return j.onStep(name, steps)
		}
		return nil
	}}}
	history, err := trainer.Fit(j.t.Context(), j.data(), fit)
	if err != nil {
		return err
	}
	state, err := trainer.Snapshot(j.t.Context())
	if err != nil || state == nil {
		return err
	}
	last := history.Epochs[len(history.Epochs)-1].Result
	j.hash = fmt.Sprint(HashWeights(state.Variables), HashWeights(state.Compression), state.Step, history.Steps, last)
	return nil
}

// eachStepOnce checks that some process saw each step, and none saw one twice.
func (j *elasticTest) eachStepOnce(steps int64) {
	j.t.Helper()
	all := map[int64]bool{}
	for name, list := range j.seen {
		for i, step := range list {
			if all[step] = true; i > 0 && step != list[i-1]+1 {
				j.t.Errorf("%s saw the steps %v", name, list)
			}
		}
	}
	if len(all) != int(steps) {
		j.t.Errorf("callbacks saw the steps %v, want %d", slices.Sorted(maps.Keys(all)), steps)
	}
}

// placedModels are the jobs of the tests, of 12 replicas.
func placedModels(t *testing.T) map[string]*elasticTest {
	small := wide{8, 20, 3}
	uneven := wide{70, 320, 12} // of whose parameters one is divided
	images := func() data.Dataset {
		x, y := tensor.New(tensor.Float32, 96, 8, 8, 1), tensor.New(tensor.Int32, 96)
		for i := range tensor.Data[float32](x) {
			tensor.Data[float32](x)[i] = float32(i*i%17-8) / 8
		}
		for i := range tensor.Data[int32](y) {
			tensor.Data[int32](y)[i] = int32(i * 7 % 5)
		}
		return fromTensors(data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}}).Shuffle(1).Batch(24)
	}
	text := func() data.Dataset {
		x := tensor.New(tensor.Int32, 96, 9)
		for i := range tensor.Data[int32](x) {
			tensor.Data[int32](x)[i] = int32(i * i % 13)
		}
		return fromTensors(data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{x}}).Shuffle(2).Batch(24)
	}
	dense := func(m wide) func() data.Dataset {
		return func() data.Dataset { return fromTensors(m.batch(96, 0)).Shuffle(3).Batch(24) }
	}
	with := func(cfg Config, x Exchange) Config {
		cfg.GlobalBatch, cfg.Seed, cfg.Exchange = 24, 7, x
		return cfg
	}
	jobs := map[string]*elasticTest{
		"mlp": {model: small.model, config: with(small.config(), AllReduce{}), data: dense(small)},
		"cnn": {
			model: func() *gomlx.Model {
				return &gomlx.Model{
					Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
						x := layer.Relu(layer.BatchNorm(s.In("norm"), layer.Conv2D(s.In("conv"), in[0], 3, 3, true)))
						x = layer.Dropout(s, graph.Reshape(layer.MaxPool2D(x), x.Shape().Dim(0), -1), 0.3)
						return []*graph.Node{layer.Dense(s.In("readout"), x, 5)}
					},
					Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
					Optimizer: optimizer.EMA(gomlxoptimizer.Adam().Done(), optimizer.EMAConfig{Momentum: 0.9}),
				}
			},
			config: with(Config{
				Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
				Labels: []engine.Feature{{DType: tensor.Int32}},
			}, AllReduce{}),
			data: images, fit: FitConfig{Accumulate: 2},
		},
		"gpt, sharded": {
			model: func() *gomlx.Model {
				return &gomlx.Model{
					Forward:   models.GPT{Vocabulary: 13, Width: 16, Heads: 2, Blocks: 1, Dropout: 0.1}.Forward,
					Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
					Optimizer: gomlxoptimizer.Adam().Done(),
				}
			},
			config: with(Config{
				Inputs: []engine.Feature{{DType: tensor.Int32, Shape: []int{9}}},
				Labels: []engine.Feature{{DType: tensor.Int32, Shape: []int{9}}},
			}, Sharded{}),
			data: text,
		},
		"pieces": {
			model: uneven.model, data: dense(uneven),
			config: func() Config {
				c := with(uneven.config(), Sharded{})
				c.ClipNorm = 0.01
				return c
			}(),
		},
		"powersgd": {
			model: uneven.model, data: dense(uneven),
			config: with(uneven.config(), AllReduce{Compress: compress.Codec{Method: compress.PowerSGD, Rank: 2}}),
		},
		"powersgd, sharded": {
			model: uneven.model, data: dense(uneven),
			config: with(uneven.config(), Sharded{Compress: compress.Codec{Method: compress.PowerSGD, Rank: 1}}),
		},
	}
	for _, j := range jobs {
		j.t, j.replicas, j.devices = t, 12, 1
		if j.fit.Epochs = 3; j.fit.Accumulate > 0 {
			j.fit.Epochs = 6
		}
	}
	return jobs
}

// TestPlacement checks that 12 replicas which move from 4 workers to 2, to 6 and to 1 make the bits of those that stay.
func TestPlacement(t *testing.T) {
	for name, j := range placedModels(t) {
		t.Run(name, func(t *testing.T) {
			j.t = t
			four := evenly(12, 0, "a", "b", "c", "d")
			want := j.run(four)
			j.steps = []int{3, 5, 8}
			got := j.run(four, evenly(12, 1, "b", "c"), evenly(12, 1, "b", "e", "f", "c", "g", "h"), evenly(12, 0, "e"))
			if got != want || got == "" {
				t.Errorf("got %s, want %s", got, want)
			}
			j.eachStepOnce(12)
		})
	}
}

// TestPlacementRandomly moves replicas at random steps between random numbers of processes with two devices each.
func TestPlacementRandomly(t *testing.T) {
	seeds := 12
	if testing.Short() {
		seeds = 3
	}
	for _, name := range []string{"mlp", "cnn", "pieces", "powersgd"} {
		j := placedModels(t)[name]
		j.replicas, j.devices = 5, 2
		want := j.run(evenly(5, 0, "a"))
		for seed := range uint64(seeds) {
			r := rand.New(rand.NewPCG(seed, 1))
			var views []testView
			j.steps = nil
			fresh, names := 0, []string{}
			for step := 0; step < 11; step += 1 + r.IntN(5) {
				if names = names[:(len(names)+1)/2]; r.IntN(3) > 0 || len(names) == 0 { // at least one stays
					for range 1 + r.IntN(5-len(names)) {
						names = append(names, fmt.Sprint("p", fresh))
						fresh++
					}
				}
				r.Shuffle(len(names), func(i, k int) { names[i], names[k] = names[k], names[i] })
				v := testView{names: slices.Clone(names), replicas: make([][]int, len(names))}
				ids := r.Perm(5)
				for i, id := range ids {
					w := i
					if i >= len(names) {
						w = r.IntN(len(names))
					}
					v.replicas[w] = append(v.replicas[w], id)
				}
				for _, of := range v.replicas {
					slices.Sort(of)
				}
				if views = append(views, v); step > 0 {
					j.steps = append(j.steps, step)
				}
			}
			if got := j.run(views...); got != want {
				var text []string
				for _, v := range views {
					text = append(text, fmt.Sprint(v.names, v.replicas))
				}
				t.Errorf("%s, seed %d: got %s, want %s after %v at steps %v", name, seed, got, want, strings.Join(text, ", "),
					j.steps)
			}
			j.eachStepOnce(12)
		}
	}
}

// TestPlacementAfterLoss checks that a training goes on with its bits after a worker was lost, if no replica has
// values that no other has, and else returns an error that names the replicas: those of the lost worker, and of one
// that is a step behind.
func TestPlacementAfterLoss(t *testing.T) {
	lost := errors.New("lost")
	for name, want := range map[string]string{
		"mlp": "", "cnn": ": restore a snapshot", "pieces": ": restore a snapshot", "powersgd": ": restore a snapshot",
	} {
		j := placedModels(t)[name]
		four := evenly(12, 0, "a", "b", "c", "d")
		undisturbed := ""
		if want == "" {
			undisturbed = j.run(four)
		}
		after := evenly(12, 0, "c", "a", "d")
		after.lost = true
		j.onStep = func(name string, steps int64) error {
			if name == "b" && steps == 5 {
				j.publish(1)
				return lost
			}
			return nil
		}
		views := []testView{four, after}
		for i := range views {
			views[i].ends = mem.NewPipes(12)
		}
		j.views, j.published, j.hash = views, 0, ""
		j.changed, j.seen, j.errs = make(chan struct{}), map[string][]int64{}, map[string]error{}
		j.publish(0)
		j.running.Wait()
		for process, err := range j.errs {
			switch {
			case process == "b" || want == "" && err == nil:
			case want == "" || err == nil || !strings.Contains(err.Error(), want):
				t.Errorf("%s, %s: %v, want %q", name, process, err, want)
			}
		}
		if j.hash != undisturbed {
			t.Errorf("%s: got %s, want %s", name, j.hash, undisturbed)
		}
	}
}
