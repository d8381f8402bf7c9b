package distribute_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
)

func TestOptionsMerge(t *testing.T) {
	base := distribute.Options{
		BytesPerPack: 5, Timeout: time.Second, Implementation: distribute.ImplementationRing,
		Order: collective.Any, Accumulate: collective.AccumulateFloat32,
	}
	if got := base.Merge(distribute.Options{}); got != base {
		t.Errorf("no field set: got %+v, want %+v", got, base)
	}
	over := distribute.Options{
		BytesPerPack: 7, Timeout: -1, Implementation: distribute.ImplementationNCCL,
		Order: collective.Canonical, Accumulate: collective.AccumulateDType,
	}
	if got := base.Merge(over); got != over {
		t.Errorf("all set: got %+v, want %+v", got, over)
	}
}

// TestCollectiveHints: options that hold TensorFlow's older hints.
func TestCollectiveHints(t *testing.T) {
	if err := (distribute.Options{BytesPerPack: -3}).Validate(); !errors.Is(err, distribute.ErrInvalid) ||
		!strings.Contains(err.Error(), "must be >=0, received -3") {
		t.Errorf("got %v", err)
	}
	waits := distribute.Options{Timeout: time.Second}.Merge(distribute.Options{Timeout: distribute.NoTimeout})
	if waits.Timeout != distribute.NoTimeout {
		t.Errorf("no timeout does not replace one: %+v", waits)
	}
}

func TestOptionsNames(t *testing.T) {
	for name, want := range map[string]distribute.Implementation{
		"auto": distribute.ImplementationAuto,
		"Ring": distribute.ImplementationRing, "NCCL": distribute.ImplementationNCCL, "mpi": distribute.ImplementationMPI,
	} {
		if got, err := distribute.ParseImplementation(name); err != nil || got != want {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	if _, err := distribute.ParseImplementation("GLOO"); !errors.Is(err, distribute.ErrInvalid) ||
		!strings.Contains(err.Error(), "'GLOO' is not a valid CommunicationImplementation") {
		t.Errorf("got %v", err)
	}
	for _, bad := range []distribute.Options{{BytesPerPack: -1}, {Implementation: 9}, {Order: 9}, {Accumulate: 9}} {
		if err := bad.Validate(); !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%+v: got %v, want ErrInvalid", bad, err)
		}
	}
}

func TestNCCLFallsBackWithAWarning(t *testing.T) {
	var log bytes.Buffer
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) {
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		cfg.Options.Implementation = distribute.ImplementationNCCL
	})
	checkRunsAgain(t, s)
	if n := strings.Count(log.String(), "NCCL is not available"); n != 1 {
		t.Errorf("%d warnings, want 1: %s", n, &log)
	}
}

func TestTimeoutOfOneCall(t *testing.T) {
	for name, ops := range map[string]distribute.CrossDeviceOps{
		"collectives":  nil,
		"a user's ops": distribute.NewReductionToOneDevice("", nil),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger, cfg.CrossDeviceOps = quiet, ops })
				start := time.Now()
				err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
					if r.ID() == 1 {
						<-ctx.Done()
						return nil
					}
					_, err := distribute.AllReduce(ctx, r, distribute.Sum, float32(1), distribute.Options{Timeout: 3 * time.Second})
					return err
				})
				if passed := time.Since(start); passed != 3*time.Second || !errors.Is(err, distribute.ErrTimeout) {
					t.Errorf("got %v after %v, want ErrTimeout after 3s", err, passed)
				}
			})
		})
	}
}

func TestMPIIsForSeveralProcesses(t *testing.T) {
	_, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		LogicalCPUs: 2,
		Options:     distribute.Options{Implementation: distribute.ImplementationMPI},
	})
	if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "use NewMultiWorkerMirroredStrategy") {
		t.Errorf("a strategy of one process: %v", err)
	}
}
