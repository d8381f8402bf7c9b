package gomlx_test

import (
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/enginetest"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestCentral checks that with Spec.Central every replica reads and writes the same variables, that a step computes
// their new values once, and that a discarded step leaves none.
func TestCentral(t *testing.T) {
	eachEngine(t, 3, func(t *testing.T, e engine.Engine) {
		const replicas = 3
		spec := features(e, 4, 5)
		spec.Devices, spec.Central = e.Devices()[:replicas], &e.Devices()[1]
		p := compile(t, dense(nil), e, spec)
		if !p.Info().Central {
			t.Fatal("the program does not keep its variables in one place")
		}
		spec.Central = nil
		mirrored := compile(t, dense(nil), e, spec)
		if mirrored.Info().Central {
			t.Error("a program without Spec.Central says that it keeps its variables in one place")
		}
		same := func(when string) {
			t.Helper()
			for i, v := range p.Variables() {
				for r := range replicas {
					if got, want := readVariable(t, p, r, i), readVariable(t, mirrored, r, i); !got.Equal(want) {
						t.Errorf("%s: %s of replica %d is %v, mirrored %v", when, v.Name, r, got, want)
					}
				}
			}
		}
		same("at first")
		for step := range 3 {
			var batches []engine.Batch
			for r := range replicas {
				batches = append(batches, randomBatch(uint64(10*step+r), 4, 5, 3))
			}
			if a, b := trainStep(t, p, batches, 12), trainStep(t, mirrored, batches, 12); a != b {
				t.Errorf("step %d: loss %v, mirrored %v", step, a, b)
			}
			same("after a step")
		}
		w := tensor.New(tensor.Float32, p.Parameters()[0].Shape...)
		if err := p.Write(2, 0, w); err != nil {
			t.Fatal(err)
		}
		for r := range replicas {
			if !readVariable(t, p, r, 0).Equal(w) {
				t.Errorf("replica %d does not read what replica 2 wrote", r)
			}
			if err := mirrored.Write(r, 0, w); err != nil {
				t.Fatal(err)
			}
		}
		b := randomBatch(99, 4, 5, 3)
		for r := range replicas {
			got, _, err := p.Evaluate(t.Context(), r, b, 4)
			if err != nil {
				t.Fatal(err)
			}
			want, _, err := mirrored.Evaluate(t.Context(), r, b, 4)
			if err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("replica %d evaluates %v after a write, mirrored %v", r, got, want)
			}
			if _, err := enginetest.Gradients(t.Context(), p, r, b, 4, [3]uint64{}); err != nil {
				t.Fatal(err)
			}
			if err := enginetest.Update(t.Context(), p, r, r); err != nil {
				t.Fatal(err)
			}
		}
		p.Discard()
		same("after a discarded step")
	})
}

// TestCentralRefused checks that the central device must be one of the engine's replicas, all of which must be in this
// process.
func TestCentralRefused(t *testing.T) {
	e := openEngine(t, "go", 2)
	for want, change := range map[string]func(s *engine.Spec){
		"has no device GPU:0": func(s *engine.Spec) { s.Central = &engine.Device{Kind: "GPU"} },
		"Spec.Central is set for 3 replicas of which 2 are local": func(s *engine.Spec) { s.Replicas = 3 },
	} {
		spec := features(e, 4, 5)
		spec.Devices, spec.Central = e.Devices(), &e.Devices()[0]
		change(&spec)
		p, err := dense(nil).Compile(t.Context(), e, spec)
		if err == nil {
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}
