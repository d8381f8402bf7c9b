package gomlx_test

import (
	"runtime"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// adamModel has layers of three sizes and an optimizer with two slots per parameter.
func adamModel() *gomlx.Model {
	m := cutModel(func(s *model.Scope, in []*graph.Node) []*graph.Node {
		x := layer.DenseRelu(s.In("one"), in[0], 300)
		return []*graph.Node{layer.Dense(s.In("three"), layer.DenseRelu(s.In("two"), x, 200), 10)}
	})
	m.Optimizer = optimizer.Adam().Done()
	return m
}

// TestMemoryOfAStep checks what a program holds during a step: old values, new values, slots and gradients, each once
// per device or replica, and no other copy of the parameters; with sharded updates, the slots of the shard only.
func TestMemoryOfAStep(t *testing.T) {
	const rows, width, replicas, small = 4, 100, 4, 64 << 10
	eachEngine(t, replicas, func(t *testing.T, e engine.Engine) {
		for _, test := range []struct {
			name    string
			devices []int // nil: one per replica
			shards  int
		}{{"a device per replica", nil, 0}, {"one device", []int{0, 0, 0, 0}, 0}, {"sharded", nil, replicas}} {
			t.Run(test.name, func(t *testing.T) {
				s := features(e, rows, width)
				s.Devices, s.ReplicaDevices = e.Devices()[:replicas], test.devices
				if test.devices != nil {
					s.Devices = s.Devices[:1]
				}
				if s.Shards = test.shards; s.Shards > 0 {
					s.ReplicaShards = []int{0, 1, 2, 3}
				}
				p := compile(t, adamModel(), e, s)
				model, largest, devices := 0, 0, len(s.Devices)
				for _, v := range p.Parameters() {
					model, largest = model+v.Bytes(), max(largest, v.Bytes())
				}
				slotBytes := 2 * devices * model
				if s.Shards > 0 {
					slotBytes = 2 * model
				}
				check := func(when string, wantPending, wantGradients int) {
					t.Helper()
					values, pending, slots, gradients, others := gomlx.LiveBytes(p)
					if values != devices*model || pending != wantPending || gradients != wantGradients || others > small {
						t.Errorf("%s: %d bytes of values, %d of new ones, %d of gradients, %d others: want %d, %d, %d, and at most %d",
							when, values, pending, gradients, others, devices*model, wantPending, wantGradients, small)
					}
					if slots < slotBytes || slots > slotBytes+1000 { // and counters
						t.Errorf("%s: %d bytes of slots, want %d and the counters'", when, slots, slotBytes)
					}
				}
				check("at first", 0, 0)
				for round := range 3 {
					kept := 0 // memory for new values of other shards is used again
					again := func() int {
						if s.Shards == 0 {
							return 0
						}
						total, pieces := 0, map[int]int{}
						for _, piece := range p.Pieces() {
							pieces[piece.Parameter]++
						}
						for i, v := range p.Parameters() {
							if total += devices * v.Bytes(); pieces[i] == 1 {
								total -= v.Bytes() // its owner's program makes it
							}
						}
						return total
					}
					if round > 1 {
						kept = again()
					}
					for r := range replicas {
						if _, err := enginetest.Gradients(t.Context(), p, r, randomBatch(uint64(r), rows, width, 10), rows*replicas,
							[3]uint64{}); err != nil {
							t.Fatal(err)
						}
					}
					check("after gradients", kept, replicas*model)
					for d := range s.Devices {
						if err := enginetest.Update(t.Context(), p, d, d); err != nil {
							t.Fatal(err)
						}
						for i := range p.Parameters() {
							if _, err := p.Updated(d, i); err != nil {
								t.Fatal(err)
							}
						}
					}
					values, pending, _, gradients, _ := gomlx.LiveBytes(p)
					if values != devices*model || pending != devices*model || gradients != replicas*model {
						t.Errorf("after updates: %d bytes of values, %d of new ones, %d of gradients: want %d, %d, %d", values, pending,
							gradients, devices*model, devices*model, replicas*model)
					}
					p.Commit()
					if kept = 0; round > 0 {
						kept = again()
					}
					check("after the commit", kept, 0)
				}
			})
		}
	})
}

// TestUpdateInPlace checks that the update of an only replica needs no memory for new values, computes what one in
// separate memory does, and that a discard drops it.
func TestUpdateInPlace(t *testing.T) {
	const rows, width = 4, 100
	e := openEngine(t, "go", 1)
	p, q := compile(t, adamModel(), e, features(e, rows, width)), compile(t, adamModel(), e, features(e, rows, width))
	if !p.Info().UpdatesInCommit {
		t.Fatal("the update of an only replica is not in place")
	}
	update := func(p engine.Program, seed uint64) {
		t.Helper()
		_, err := enginetest.Gradients(t.Context(), p, 0, randomBatch(seed, rows, width, 10), rows, [3]uint64{})
		if err == nil {
			err = enginetest.Update(t.Context(), p, 0, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	same := func(when string) {
		t.Helper()
		for i, v := range p.Variables() {
			if got, want := readVariable(t, p, 0, i), readVariable(t, q, 0, i); !got.Equal(want) {
				t.Fatalf("%s: %s is %v, and %v without an update in place", when, v.Name, got, want)
			}
		}
	}
	for step := range uint64(3) {
		update(p, 10+step)
		p.Discard()
		same("after a discard")
		update(p, step)
		if _, pending, _, _, _ := gomlx.LiveBytes(p); pending != 0 {
			t.Errorf("after the update: %d bytes of new values, want none", pending)
		}
		same("after the update")
		p.Commit()
		update(q, step)
		for i := range q.Parameters() {
			if _, err := q.Updated(0, i); err != nil {
				t.Fatal(err)
			}
		}
		q.Commit()
		same("after the commit")
		if _, _, _, gradients, _ := gomlx.LiveBytes(p); gradients != 0 {
			t.Errorf("after the commit: %d bytes of gradients, want none", gradients)
		}
	}
}

// TestStepsAllocateLittle checks that a step allocates a bounded number of objects, whatever the model's size.
func TestStepsAllocateLittle(t *testing.T) {
	if race.Enabled {
		t.Skip("sync.Pool drops items at random under the race detector")
	}
	e := openEngine(t, "go", 1)
	const rows, width = 8, 300
	p := compile(t, adamModel(), e, features(e, rows, width))
	b, err := p.NewBatch(0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Weights {
		b.Weights[i] = 1
	}
	step := func() {
		m := engine.Micro{Batch: b, WeightSum: rows, Last: true}
		if _, err := p.Gradients(t.Context(), 0, m, nil); err != nil {
			t.Fatal(err)
		}
		if err := p.Update(t.Context(), 0, 0, 0, 1); err != nil {
			t.Fatal(err)
		}
		p.Commit()
	}
	for range 5 {
		step()
	}
	const objectsMax, bytesMax = 1000, 64 << 10
	objects, bytes := allocations(20, objectsMax, bytesMax, step)
	t.Logf("%d objects and %d bytes a step", objects, bytes)
	if objects > objectsMax || bytes > bytesMax {
		t.Errorf("%d objects and %d bytes a step", objects, bytes)
	}
}

// allocations returns the objects and bytes that a step allocates, on average over some steps. It measures up to ten
// times, until both are within the bounds: a sync.Pool allocates once more for each processor on which the scheduler
// continues a goroutine, and after garbage collections. What each step allocates itself is in every measurement.
func allocations(steps, objectsMax, bytesMax uint64, step func()) (objects, bytes uint64) {
	for range 10 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range steps {
			step()
		}
		runtime.ReadMemStats(&after)
		objects, bytes = (after.Mallocs-before.Mallocs)/steps, (after.TotalAlloc-before.TotalAlloc)/steps
		if objects <= objectsMax && bytes <= bytesMax {
			break
		}
	}
	return objects, bytes
}
