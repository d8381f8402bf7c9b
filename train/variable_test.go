package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestVariables checks that the program's variables are variables of the strategy: their kinds and contexts, and that
// what is written is what Weights returns and the next step trains on.
func TestVariables(t *testing.T) {
	trainer, p := newFake(t, 2, 4, fakeModel{})
	in, err := trainer.Strategy().Cross(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range trainer.Variables() {
		d := trainer.Variable(v.Name)
		kind := "MirroredVariable"
		if v.Name == "seen" {
			kind = "SyncOnReadVariable"
		}
		if d.Name() != v.Name+":0" || d.Kind() != kind || d.Strategy() != trainer.Strategy() || d.DType() != v.DType ||
			!slices.Equal(d.Shape(), v.Shape) || d.Config().Trainable != (i < 2) {
			t.Errorf("%s: %v of %v%v, trainable %v", d.Name(), d.Kind(), d.DType(), d.Shape(), d.Config().Trainable)
		}
	}
	if trainer.Variable("nothing") != nil {
		t.Error("there is a variable of another name")
	}
	weights, seen := trainer.Variable("weights"), trainer.Variable("seen")
	if got, err := weights.Read(in); err != nil || fmt.Sprint(got.Float64s()) != "[3 0]" {
		t.Errorf("weights: %v, %v", got, err)
	}
	if err := weights.AssignAdd(in, tensor.Of([]float64{1, 2})); err != nil {
		t.Fatal(err)
	}
	for replica, r := range p.replicas {
		if fmt.Sprint(r.now[1]) != "[4 2]" {
			t.Errorf("replica %d: weights %v after AssignAdd", replica, r.now[1])
		}
	}
	err = weights.Update(in, func(_ context.Context, c *distribute.Component) error {
		now, err := weights.Read(c)
		if err != nil {
			return err
		}
		return weights.Assign(c, tensor.Of([]float64{now.Float64s()[0], 7}))
	})
	if got := fmt.Sprint(p.replicas[0].now[1], p.replicas[1].now[1]); err != nil || got != "[4 7] [4 7]" {
		t.Errorf("weights %s after Update: %v", got, err)
	}
	if text := weights.String(); !strings.Contains(text, "MirroredVariable:{") ||
		!strings.Contains(text, "weights/replica_1:0") {
		t.Errorf("printed as %s", text)
	}
	// In a step, each replica reads and writes its own value of a sync-on-read variable; writes to a mirrored one are
	// combined.
	step := func(failure error) error {
		_, err := distribute.Run(t.Context(), trainer.Strategy(), func(_ context.Context, r *distribute.Replica,
			_ struct{},
		) (struct{}, error) {
			if err := seen.Assign(r, float64(10+r.ID())); err != nil {
				return struct{}{}, err
			}
			if got, err := seen.Read(r); err != nil || got.Float64s()[0] != float64(10+r.ID()) {
				return struct{}{}, fmt.Errorf("replica %d reads %v, %w", r.ID(), got, err)
			}
			if err := weights.Assign(r, tensor.Of([]float64{float64(2 * r.ID()), 5})); err != nil {
				return struct{}{}, err
			}
			return struct{}{}, failure
		}, nil)
		return err
	}
	cause := errors.New("failed")
	if err := step(cause); !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if got := fmt.Sprint(p.snapshot()); !strings.HasPrefix(got,
		"[[[0] [4 7] [0] [0 0] [0]] [[0] [4 7] [0] [0 0] [0]]]") {
		t.Errorf("after a failed Run: %s", got)
	}
	if err := step(nil); err != nil {
		t.Fatal(err)
	}
	if got, err := seen.Read(in); err != nil || got.Float64s()[0] != 10.5 {
		t.Errorf("the mean is %v, %v", got, err)
	}
	if got := fmt.Sprint(p.snapshot()); !strings.HasPrefix(got,
		"[[[0] [1 5] [0] [0 0] [10]] [[0] [1 5] [0] [0 0] [11]]]") {
		t.Errorf("after a Run: %s", got)
	}
	if err := trainer.SetVariable("weights", tensor.Of([]float64{0, 0})); err != nil {
		t.Fatal(err)
	}
	if _, err := trainer.Fit(t.Context(), sizes(lineExamples(4), 4), FitConfig{}); err != nil {
		t.Fatal(err)
	}
	after, err := weights.Read(in)
	if err != nil {
		t.Fatal(err)
	}
	list, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(list, func(w Weight) bool { return w.Name == "weights" }); !list[i].Value.Equal(after) ||
		fmt.Sprint(after.Float64s()) != fmt.Sprint(p.replicas[1].now[1]) || after.Float64s()[0] == 0 {
		t.Errorf("after a step: %v in Weights, %v by Read, %v in the program", list[i].Value, after, p.replicas[1].now[1])
	}
}

// TestVariableErrors checks the errors of writes that do not fit, and of a program that cannot be read.
func TestVariableErrors(t *testing.T) {
	broken := false
	trainer, _ := newFake(t, 2, 4, fakeModel{fail: func(phase string, replica int) error {
		if broken && phase == "read" && replica == 1 {
			return errors.New("the device is gone")
		}
		return nil
	}})
	in, err := trainer.Strategy().Cross(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	seen := trainer.Variable("seen")
	if err := seen.Assign(in, tensor.Of([]float64{1, 2})); err == nil || !strings.Contains(err.Error(), "shape mismatch") {
		t.Errorf("another shape: %v", err)
	}
	if err := seen.Assign(in, tensor.Scalar(float32(1))); err == nil ||
		!strings.Contains(err.Error(), "has dtype float64") {
		t.Errorf("another type: %v", err)
	}
	broken = true
	if _, err := seen.Read(in); err == nil ||
		!strings.Contains(err.Error(), "reading seen/replica_1:0: the device is gone") {
		t.Errorf("a broken engine: %v", err)
	}
	if _, err := trainer.Weights(t.Context()); err == nil || !strings.Contains(err.Error(), "the device is gone") {
		t.Errorf("a broken engine: %v", err)
	}
	broken = false
}

// TestVariablesOfWorkers checks that workers train on what all of them wrote to a variable, and that a write on one of
// them alone is an error of the next step on all.
func TestVariablesOfWorkers(t *testing.T) {
	for _, both := range []bool{true, false} {
		for w, err := range overWorkers(t, []int{1, 2}, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{rate: 0}, fakeConfig(3))
			if err != nil {
				return err
			}
			defer trainer.Close()
			in, err := s.Cross(t.Context())
			if err != nil {
				return err
			}
			if both || w == 1 {
				if err := trainer.Variable("weights").Assign(in, tensor.Of([]float64{8, 9})); err != nil {
					return err
				}
			}
			if _, err := trainer.Fit(t.Context(), sizes(lineExamples(3), 3), FitConfig{}); err != nil {
				return err
			}
			if mean, err := trainer.Variable("seen").Read(in); err != nil || mean.Len() != 1 {
				return fmt.Errorf("the mean over all workers: %v, %w", mean, err)
			}
			if got, err := trainer.Variable("weights").Read(in); err != nil || fmt.Sprint(got.Float64s()) != "[8 9]" {
				return fmt.Errorf("weights %v after a step of rate 0: %w", got, err)
			}
			return nil
		}) {
			if both && err != nil || !both && (err == nil ||
				!strings.Contains(err.Error(), "variables were set between steps on some workers only")) {
				t.Errorf("on both workers %v: worker %d: %v", both, w, err)
			}
		}
	}
}
