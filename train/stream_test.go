package train

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
)

// TestStreamReaders trains on a stream: the same weights on 1, 2 and 4 workers. If the reader of one worker fails, all
// workers end with an error, in its last step or right after it.
func TestStreamReaders(t *testing.T) {
	const batch, batches, failAt = 4, 6, 3
	all := lineExamples(batch * batches)
	stream := func(fails bool) data.Dataset {
		return data.FromSeq(-1, func(ctx context.Context) iter.Seq2[data.Element, error] {
			return func(yield func(data.Element, error) bool) {
				at := 0
				for e, err := range sizes(all, slices.Repeat([]int{batch}, batches)...).Iter(ctx) {
					if at == failAt && fails {
						e, err = nil, errors.New("the pipe broke")
					}
					if at++; !yield(e, err) || err != nil {
						return
					}
				}
			}
		})
	}
	want := ""
	for _, layout := range [][]int{{4}, {2, 2}, {1, 1, 1, 1}} {
		for failing := -1; failing < len(layout); failing++ {
			hashes, steps := make([]string, len(layout)), make([]int64, len(layout))
			errs := overWorkers(t, layout, func(w int, s *distribute.Strategy) error {
				trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(batch))
				if err != nil {
					return err
				}
				defer trainer.Close()
				_, err = trainer.Fit(t.Context(), stream(w == failing), FitConfig{})
				steps[w] = trainer.Steps()
				if err != nil {
					return err
				}
				hashes[w], err = trainer.WeightsHash(t.Context())
				return err
			})
			for w, err := range errs {
				switch {
				case failing >= 0 && (err == nil || steps[w] != failAt && (w == failing || steps[w] != failAt-1)):
					// the failure may reach the others while they finish their last step
					t.Errorf("%v, reader %d fails: worker %d took %d steps, %v", layout, failing, w, steps[w], err)
				case failing >= 0 && w == failing && !strings.Contains(err.Error(), "the pipe broke"):
					t.Errorf("%v: the failing worker reports %v", layout, err)
				case failing < 0 && err != nil:
					t.Fatal(err)
				}
			}
			if failing >= 0 {
				continue
			}
			if want == "" {
				want = hashes[0]
			}
			if text := fmt.Sprint(hashes); strings.Count(text, want) != len(layout) {
				t.Errorf("%v: weights %v, want %s", layout, hashes, want)
			}
		}
	}
}
