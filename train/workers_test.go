package train

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
)

// fitted formats the results of a training, and of evaluating and predicting with its model.
func fitted(ctx context.Context, s *distribute.Strategy) (string, error) {
	trainer, err := New(ctx, s, fakeModel{rate: 1.0 / 64, shift: 1.0 / 16}, fakeConfig(7))
	if err != nil {
		return "", err
	}
	examples := lineExamples(16)
	fit, err := trainer.Fit(ctx, sizes(examples, 7, 7, 2), FitConfig{Epochs: 3})
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	evaluated, err := trainer.Evaluate(ctx, sizes(examples, 7, 1))
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	outputs, err := trainer.Predict(ctx, sizes(examples, 7, 1, 3))
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	weights, err := trainer.Weights(ctx)
	if err != nil {
		return "", errors.Join(err, trainer.Close())
	}
	if err := trainer.SetWeights(weights); err != nil { // every replica's average is now that of the weights
		return "", errors.Join(err, trainer.Close())
	}
	again, err := trainer.Evaluate(ctx, sizes(examples, 7, 1))
	if err == nil && !reflect.DeepEqual(again, evaluated) {
		err = fmt.Errorf("evaluated %v, and with the weights %v", evaluated, again)
	}
	last := fit.Epochs[len(fit.Epochs)-1]
	return fmt.Sprintf("%v\n%v\n%v\n%v", last.Result, evaluated, outputs, weights), errors.Join(err, trainer.Close())
}

// Three replicas train to the same bits on one worker, on three, and on two of different sizes; a last batch leaves
// replicas without examples.
func TestTrainOverWorkers(t *testing.T) {
	one, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{3}})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	want, err := fitted(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	for _, ids := range [][][]int{
		{{0}, {1}, {2}}, {{0}, {1, 2}}, {{0, 1}, {2}}, {{0, 2}, {1}}, {{1}, {0, 2}}, {{2}, {0, 1}}, {{1}, {2}, {0}},
	} {
		t.Run(fmt.Sprint(ids), func(t *testing.T) {
			errs := overReplicas(t, ids, func(w int, s *distribute.Strategy) error {
				got, err := fitted(t.Context(), s)
				if err != nil || got != want {
					t.Errorf("worker %d: got\n%s, %v, want\n%s", w, got, err, want)
				}
				return nil
			})
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
		})
	}
}
