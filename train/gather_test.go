package train

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
)

// TestMessagesOfWorkers checks that the messages of workers, here numbers, arrive one by one, in the workers' order.
func TestMessagesOfWorkers(t *testing.T) {
	for _, ids := range append(scattered, [][]int{{0, 1}}, [][]int{{0}, {1, 2}, {3}}) {
		errs := overReplicas(t, ids, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(6))
			if err != nil {
				return err
			}
			defer trainer.Close()
			var want []int
			for w := range ids {
				want = append(want, 10+w)
			}
			got, err := fromWorkers(t.Context(), trainer, 10+w)
			if err != nil || !slices.Equal(got, want) {
				return fmt.Errorf("from workers: %v, %v", got, err)
			}
			if w > 0 {
				want = nil
			}
			got, err = toChief(t.Context(), trainer, "numbers", 10+w)
			if err != nil || !slices.Equal(got, want) {
				return fmt.Errorf("to the chief: %v, %v", got, err)
			}
			chiefs, err := fromChief(t.Context(), trainer, 10+w, nil)
			if err != nil || chiefs != 10 {
				return fmt.Errorf("from the chief: %v, %v", chiefs, err)
			}
			return nil
		})
		if err := errors.Join(errs...); err != nil {
			t.Error(ids, err)
		}
	}
}
