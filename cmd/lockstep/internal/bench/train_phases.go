package bench

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/train"
)

// stepPhases are the parts of a mean step, and the parts of its computation.
type stepPhases struct {
	setup.StepTimes

	Forward time.Duration `json:"forward_ns"` // of a step's batches, measured apart
	whole   bool          // computation includes the update: one program
}

// divide measures the parts of the computation, and the communication alone.
func (s *stepPhases) divide(ctx context.Context, t *train.Trainer, batches data.Dataset, accumulate int) (err error) {
	if s.Communication, err = t.CommunicationTime(ctx, benchSteps); err != nil {
		return err
	}
	forward, err := t.ForwardTime(ctx, batches, forwardPasses)
	s.Forward, s.whole = forward*time.Duration(accumulate), t.WholeSteps() && accumulate == 1
	return err
}

func (s stepPhases) table(out io.Writer) error {
	total := s.Total()
	row := func(d time.Duration) string {
		return fmt.Sprintf("%.0f µs (%.1f %%)", micros(d), 100*float64(d)/float64(max(total, 1)))
	}
	rest := ""
	if s.whole {
		rest = ", with the update, which is in the same program"
	}
	_, err := fmt.Fprintf(out, `a step        %.0f µs on the first replica:
  input       %s
  computation %s
    forward   %.0f µs: loss and metrics in inference mode, measured apart
    backward  %.0f µs: the rest of the computation%s
  exposed     %s communication that the replica waits for
  update      %s
hidden        communication: %.0f µs of %.0f µs, which the same calls take alone
`, micros(total), row(s.Input), row(s.Compute), micros(s.Forward),
		micros(max(0, s.Compute-s.Forward)), rest, row(s.Exposed), row(s.Update),
		micros(max(0, s.Communication-s.Exposed)), micros(s.Communication))
	return err
}
