package train

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestSharedDevices checks that replicas that share devices compute the bits of replicas with a device each, and that
// each device is updated once per part and step.
func TestSharedDevices(t *testing.T) {
	const replicas, steps = 4, 6
	for name, change := range map[string]func(*Config){
		"plain":     func(*Config) {},
		"ClipNorm":  func(c *Config) { c.ClipNorm = 0.1 }, // all replicas add their squares before an update
		"ClipValue": func(c *Config) { c.ClipValue = 0.1 },
	} {
		t.Run(name, func(t *testing.T) {
			var want []fakeValues
			for _, deviceOf := range [][]int{{0, 1, 2, 3}, {0, 0, 0, 0}, {0, 1, 1, 0}} {
				cfg := fakeConfig(8)
				change(&cfg)
				trainer, _ := newFakeWith(t, replicas, cfg, fakeModel{})
				p := share(t, trainer, deviceOf...)
				if _, err := trainer.Fit(t.Context(), sizes(lineExamples(8*steps+3), 8, 8, 8, 8, 8, 8, 3),
					FitConfig{Accumulate: 2}); err != nil {
					t.Fatal(err)
				}
				g, _, err := trainer.Gradients(t.Context(), lineExamples(8))
				if err == nil {
					err = trainer.ApplyGradients(t.Context(), g)
				}
				if err != nil {
					t.Fatal(err)
				}
				got := p.snapshot()
				if want == nil {
					want = got
				}
				if !reflect.DeepEqual(got, want) {
					t.Errorf("devices %v: got %v, want %v", deviceOf, got, want)
				}
				for i, d := range p.devices {
					if most := int(trainer.Steps()) * len(p.buckets); d.updates != most {
						t.Errorf("devices %v: %d updates of device %d in %d steps of 2 parts", deviceOf, d.updates, i,
							trainer.Steps())
					}
				}
			}
		})
	}
}

// TestUpdateAfterAllReplicas checks that a device is not updated before all of its replicas have computed: the second
// replica goes on only after a while, when all have the sums of the first bucket.
func TestUpdateAfterAllReplicas(t *testing.T) {
	var last atomic.Pointer[fakeReplica]
	trainer, _ := newFake(t, 3, 6, fakeModel{ready: func(r *fakeReplica, bucket int) {
		if r == last.Load() && bucket == 0 {
			time.Sleep(50 * time.Millisecond)
		}
	}})
	p := share(t, trainer, 0, 0, 0)
	for i := range 3 {
		last.Store(p.replicas[i])
		if _, err := trainer.Fit(t.Context(), sizes(lineExamples(6), 6), FitConfig{}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSharedDeviceFails checks that a step of which one replica fails changes nothing and ends on the others, and that
// training continues.
func TestSharedDeviceFails(t *testing.T) {
	var failing atomic.Pointer[string]
	broken := errors.New("broken")
	trainer, _ := newFake(t, 3, 6, fakeModel{fail: func(phase string, replica int) error {
		if f := failing.Load(); f != nil && fmt.Sprint(phase, " ", replica) == *f {
			return broken
		}
		return nil
	}})
	p := share(t, trainer, 0, 0, 1)
	examples := sizes(lineExamples(12), 6, 6)
	for _, where := range []string{
		"gradients 0", "gradients 1", "gradients 2", "update 0 0", "update 1 0", "update 0 2", "update 1 2",
	} {
		before := p.snapshot()
		failing.Store(&where)
		if _, err := trainer.Fit(t.Context(), examples, FitConfig{}); !errors.Is(err, broken) ||
			!strings.Contains(err.Error(), "replica "+where[len(where)-1:]) {
			t.Errorf("%s: %v", where, err)
		}
		if got := p.snapshot(); !reflect.DeepEqual(got, before) {
			t.Errorf("%s: variables changed from %v to %v", where, before, got)
		}
		failing.Store(nil)
		if _, err := trainer.Fit(t.Context(), examples, FitConfig{}); err != nil {
			t.Errorf("after %s: %v", where, err)
		}
	}
}
