package train_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/compress"
)

const module = "github.com/lockstep-ml/lockstep/"

// allocations counts allocated objects by the call stack that allocated them.
type allocations map[[32]uintptr]int64

// countAllocations returns all since the start of the program; runtime.MemProfileRate must be 1.
func countAllocations() allocations {
	for range 3 { // the profile shows what was allocated before the last collection but one
		runtime.GC()
	}
	var records []runtime.MemProfileRecord
	for n, ok := runtime.MemProfile(nil, true); !ok; n, ok = runtime.MemProfile(records, true) {
		records = make([]runtime.MemProfileRecord, n+100)
		if n, ok = runtime.MemProfile(records, true); ok {
			records = records[:n]
			break
		}
	}
	list := allocations{}
	for _, r := range records {
		list[r.Stack0] += r.AllocObjects
	}
	return list
}

// outside counts the allocations since before, by the package of Lockstep that has made them, and lists their stacks.
// It leaves out the engine, the dataset, this test, what the runtime keeps for goroutines that wait, and the state of
// the training that is published ten times a second for those who watch it.
func (a allocations) outside(before allocations) (byPackage map[string]int64, sites []string) {
	byPackage = map[string]int64{}
	for stack, n := range a {
		if n -= before[stack]; n <= 0 {
			continue
		}
		depth := slices.Index(stack[:], 0)
		if depth < 0 {
			depth = len(stack)
		}
		var functions []string
		frames := runtime.CallersFrames(stack[:depth])
		for more := true; more; {
			var f runtime.Frame
			f, more = frames.Next()
			functions = append(functions, fmt.Sprintf("%s:%d", f.Function, f.Line))
		}
		text := strings.Join(functions, " < ")
		i := slices.IndexFunc(functions, func(f string) bool { return strings.Contains(f, module) })
		left := func(part string) bool { return strings.Contains(text, part) }
		if i < 0 || slices.ContainsFunc([]string{
			"gomlx", module + "data.", "countAllocations", "(*fit).publish:", "runtime.acquireSudog",
			"train_test.allocations.outside", "testing.(*common)", // of the count before
		}, left) {
			continue
		}
		name := strings.TrimPrefix(functions[i], module)
		name, _, _ = strings.Cut(name, "/")
		name, _, _ = strings.Cut(name, ".")
		byPackage[name] += n
		sites = append(sites, fmt.Sprintf("%5d %s", n, strings.ReplaceAll(text, module, "")))
	}
	slices.Sort(sites)
	slices.Reverse(sites)
	return byPackage, sites
}

// runObjects is the number of objects that a Run allocates, for any model: its context and replicas must not be used
// after it, so the next Run cannot use them again.
const runObjects = 9

// tooMany reports whether the allocations of some steps are more than those of each Run, and of pools and lists that
// grow for the first time.
func tooMany(byPackage map[string]int64, steps int64) bool {
	for name, n := range byPackage {
		limit := steps / 4
		if name == "distribute" {
			limit += steps * runObjects
		}
		if n > limit {
			return true
		}
	}
	return false
}

// TestStepsAllocateNothing checks that a step allocates nothing in steady state besides what the engine does, the
// dataset, and a few objects of its Run. It counts again in later steps if there is more: each rank allocates once when
// it waits for long for the first time, which happens at any step on a busy machine. What each step allocates is in
// every count.
func TestStepsAllocateNothing(t *testing.T) {
	if race.Enabled {
		t.Skip("sync.Pool drops items at random under the race detector")
	}
	defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
	runtime.MemProfileRate = 1
	const first, steps, counts = 10, 40, 5
	compressed := func(c compress.Codec) train.Config { return train.Config{Exchange: train.AllReduce{Compress: c}} }
	for _, test := range []struct {
		name     string
		replicas int
		cfg      train.Config
		fit      train.FitConfig
	}{
		{"one replica", 1, train.Config{}, train.FitConfig{}},
		{"two replicas", 2, train.Config{BucketBytes: 1}, train.FitConfig{}},
		{"clipped", 2, train.Config{ClipNorm: 1}, train.FitConfig{}},
		{"sharded", 2, train.Config{Exchange: train.Sharded{}, ClipNorm: 1}, train.FitConfig{}},
		{"accumulated", 2, train.Config{}, train.FitConfig{Accumulate: 2}},
		{"compressed", 2, compressed(compress.Codec{Method: compress.BFloat16}), train.FitConfig{}},
		{"int8", 2, compressed(compress.Codec{Method: compress.Int8}), train.FitConfig{}},
		{"PowerSGD", 2, compressed(compress.Codec{Method: compress.PowerSGD, Rank: 2}), train.FitConfig{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.name != "sharded" {
				t.Skip("-short: the sharded step makes every kind of call")
			}
			test.cfg.GlobalBatch, test.cfg.Seed = 8, 1
			trainer := newTrainerWith(t, "go", test.replicas, test.cfg, unchanged, optimizer.Adam().Done(),
				models.MLP{Hidden: []int{16}}.Forward)
			var before allocations
			var byPackage map[string]int64
			var sites []string
			test.fit.StepsPerEpoch = first + counts*steps + 5
			test.fit.Callbacks = []train.Callback{{OnStepEnd: func(_ context.Context, s train.Step) error {
				if s.Step < first || (s.Step-first)%steps != 0 {
					return nil
				}
				now := countAllocations()
				if before != nil {
					byPackage, sites = now.outside(before)
					t.Log(byPackage)
					if !tooMany(byPackage, steps) {
						return train.ErrStop
					}
				}
				before = now
				return nil
			}}}
			if _, err := trainer.Fit(t.Context(), loadDigits(t).Train.Repeat(-1).Batch(8), test.fit); err != nil {
				t.Fatal(err)
			}
			if byPackage == nil || tooMany(byPackage, steps) {
				t.Errorf("%d steps have allocated too many objects:\n%s", steps, strings.Join(sites, "\n"))
			}
		})
	}
}
