package train

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestFlippedBits flips a random bit of a parameter or slot of one of three workers after a random step. All workers
// fail in the next step that compares, with an error that names the worker.
func TestFlippedBits(t *testing.T) {
	flips := 1000
	if testing.Short() || race.Enabled {
		flips = 50
	}
	r := rand.New(rand.NewPCG(1, 2))
	for flip := range flips {
		bad, after, variable, bit := r.IntN(3), 1+r.IntN(4), r.IntN(4), r.IntN(52)
		const steps = 6
		errs := overWorkers(t, []int{1, 2, 1}, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(4)
			cfg.VerifyEvery = 1
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			_, err = trainer.Fit(t.Context(), sizes(lineExamples(4*steps), 4, 4, 4, 4, 4, 4),
				FitConfig{Callbacks: []Callback{{OnStepEnd: func(_ context.Context, s Step) error {
					if s.Step != after || w != bad {
						return nil
					}
					for _, replica := range trainer.program.(*fakeProgram).replicas {
						x := &replica.now[variable][0]
						*x = math.Float64frombits(math.Float64bits(*x) ^ 1<<bit)
					}
					return nil
				}}}})
			if got := trainer.Steps(); got != int64(after) {
				t.Errorf("flip %d: worker %d ended after %d steps, want %d", flip, w, got, after)
			}
			return err
		})
		right := []string{"workers 1, 2", "workers 0, 2", "workers 0, 1"}[bad]
		want := fmt.Sprintf("after %d steps the bits of the variables of worker %d differ from those of %s", after, bad,
			right)
		for w, err := range errs {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("flip %d of bit %d of variable %d on worker %d: worker %d: %v, want %q", flip, bit, variable, bad, w,
					err, want)
			}
		}
	}
}

// TestVerifyEvery: the variables are compared at the multiples of the number of steps only, and never if it is
// negative.
func TestVerifyEvery(t *testing.T) {
	for every, ends := range map[int]int64{3: 3, 4: 4, -1: 5} {
		errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(4)
			cfg.VerifyEvery = every
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			_, err = trainer.Fit(t.Context(), sizes(lineExamples(20), 4, 4, 4, 4, 4),
				FitConfig{Callbacks: []Callback{{OnStepEnd: func(_ context.Context, s Step) error {
					if s.Step == 1 && w == 1 {
						trainer.program.(*fakeProgram).replicas[0].now[1][0]++
					}
					return nil
				}}}})
			if got := trainer.Steps(); got != ends {
				t.Errorf("every %d steps: worker %d ended after %d steps, want %d", every, w, got, ends)
			}
			return err
		})
		for w, err := range errs {
			if err == nil { // Fit itself compares at its end
				t.Errorf("every %d steps: worker %d found no difference", every, w)
			}
		}
	}
}
