package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// variableModel models a variable in plain arithmetic, with one number per component.
type variableModel struct {
	kind     string
	agg      distribute.Aggregation
	replicas int
	values   []float64
}

// errModel is returned for a write or a read that must be rejected.
var errModel = errors.New("refused")

func (m *variableModel) on(replica int) int { return min(replica, len(m.values)-1) }

// inReplica models a write by all replicas at once, each with its number.
func (m *variableModel) inReplica(apply func(old, x float64) float64, xs []float64) error {
	switch {
	case m.kind == "AggregatingVariable" && m.agg == distribute.AggregateNone:
		return errModel
	case m.kind == "ResourceVariable" || m.kind == "SyncOnReadVariable" ||
		m.agg == distribute.AggregateNone || m.replicas == 1:
		for i := range m.values {
			m.values[i] = apply(m.values[i], xs[i])
		}
		return nil
	}
	one := xs[0]
	if m.agg != distribute.AggregateFirst {
		one = 0
		for _, x := range xs {
			one += x
		}
		if m.agg == distribute.AggregateMean {
			one /= float64(len(xs))
		}
	}
	return m.inCross("", apply, one)
}

// inCross models a write for all replicas; op distinguishes assignments.
func (m *variableModel) inCross(op string, apply func(old, x float64) float64, x float64) error {
	if m.kind == "SyncOnReadVariable" && m.agg == distribute.AggregateSum {
		if op != "assign" {
			return errModel
		}
		x /= float64(m.replicas)
	}
	for i := range m.values {
		m.values[i] = apply(m.values[i], x)
	}
	return nil
}

func (m *variableModel) read() (float64, error) {
	if m.kind != "SyncOnReadVariable" || m.agg == distribute.AggregateFirst {
		return m.values[0], nil
	}
	sum := 0.0
	for _, v := range m.values {
		sum += v
	}
	switch m.agg {
	case distribute.AggregateNone:
		return 0, errModel
	case distribute.AggregateMean:
		sum /= float64(m.replicas)
	}
	return sum, nil
}

// TestVariablesAgainstAModel writes, reads, saves and restores variables of every strategy, synchronization and
// aggregation in both contexts, and compares with the model. Numbers are multiples of 12 so that sums and means
// of up to four are exact for long enough.
func TestVariablesAgainstAModel(t *testing.T) {
	writes := map[string]func(old, x float64) float64{
		"assign":     func(_, x float64) float64 { return x },
		"assign_add": func(old, x float64) float64 { return old + x },
		"assign_sub": func(old, x float64) float64 { return old - x },
	}
	rapid.Check(t, func(rt *rapid.T) {
		s := anyStrategy(rt)
		defer s.Close()
		ctx := context.Background()
		cfg := distribute.VariableConfig{
			Initial: tensor.Scalar(12.0),
			Synchronization: rapid.SampledFrom([]distribute.Synchronization{
				distribute.Auto, distribute.OnWrite,
				distribute.OnRead,
			}).Draw(rt, "synchronization"),
			Aggregation: rapid.SampledFrom([]distribute.Aggregation{
				distribute.AggregateNone, distribute.AggregateSum,
				distribute.AggregateMean, distribute.AggregateFirst,
			}).Draw(rt, "aggregation"),
		}
		v, err := s.NewVariable(ctx, cfg)
		if err != nil {
			rt.Fatal(err)
		}
		cross, err := s.Cross(ctx)
		if err != nil {
			rt.Fatal(err)
		}
		m := &variableModel{kind: v.Kind(), agg: cfg.Aggregation, replicas: s.NumReplicasInSync()}
		for range v.Values() {
			m.values = append(m.values, 12)
		}
		number := rapid.Custom(func(rt *rapid.T) float64 { return float64(12 * rapid.IntRange(-9, 9).Draw(rt, "twelfth")) })
		for i := range rapid.IntRange(1, 6).Draw(rt, "steps") {
			do := rapid.SampledFrom([]string{"assign", "assign_add", "assign_sub", "save", "read"}).Draw(rt, "do")
			var got, want error
			switch apply, write := writes[do], variableMutations[do]; {
			case do == "save":
				var saved float64
				if saved, want = m.read(); want == nil {
					_ = m.inCross("assign", writes["assign"], saved)
				}
				var x *tensor.Tensor
				if x, got = v.Saved(cross); got == nil {
					got = v.Restore(cross, x)
				}
			case do == "read":
				var number float64
				number, want = m.read()
				var x *tensor.Tensor
				if x, got = v.Read(cross); got == nil && x.Float64s()[0] != number {
					rt.Fatalf("step %d reads %v, want %v", i, x, number)
				}
			case rapid.Bool().Draw(rt, "in cross-replica context"):
				x := number.Draw(rt, "x")
				got, want = write(v, cross, tensor.Scalar(x)), m.inCross(do, apply, x)
			default:
				xs := rapid.SliceOfN(number, m.replicas, m.replicas).Draw(rt, "xs")
				want = m.inReplica(apply, xs)
				_, got = distribute.Run(ctx, s, func(_ context.Context, r *distribute.Replica, x float64) (int, error) {
					if err := write(v, r, tensor.Scalar(x).OnDevice(r.ID())); err != nil {
						return 0, err
					}
					own, err := v.Read(r)
					if err == nil && own.Float64s()[0] != m.values[m.on(r.ID())] {
						err = fmt.Errorf("replica %d reads %v, want %v", r.ID(), own, m.values[m.on(r.ID())])
					}
					return 0, err
				}, xs)
			}
			if (want != nil) != errors.Is(got, distribute.ErrInvalid) || want == nil && got != nil {
				rt.Fatalf("step %d, %s of %v %v %v: got %v, want %v", i, do, s, m.kind, m.agg, got, want)
			}
			for k, x := range v.Values() {
				if x.(*tensor.Tensor).Float64s()[0] != m.values[k] {
					rt.Fatalf("step %d, %s of %v %v %v: component %d is %v, want %v", i, do, s, m.kind, m.agg, k, x, m.values[k])
				}
			}
		}
	})
}

// anyStrategy makes a strategy of any kind with up to four replicas.
func anyStrategy(rt *rapid.T) *distribute.Strategy {
	devices := []string{"CPU:0", "CPU:1", "CPU:2", "CPU:3"}[:rapid.SampledFrom([]int{1, 2, 4}).Draw(rt, "replicas")]
	var s *distribute.Strategy
	var err error
	switch kind := rapid.SampledFrom([]string{"mirrored", "central", "multi-worker", "one device", "default"}).Draw(rt,
		"strategy"); kind {
	case "mirrored":
		s, err = distribute.NewMirroredStrategy(distribute.MirroredConfig{Devices: devices, LogicalCPUs: 4})
	case "central":
		s, err = distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{
			ComputeDevices: devices,
			LogicalCPUs:    4,
		})
	case "multi-worker":
		s, err = distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{Devices: devices, LogicalCPUs: 4})
	case "one device":
		s, err = distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{LogicalCPUs: 1})
	default:
		s = distribute.Default()
	}
	if err != nil {
		rt.Fatal(err)
	}
	return s
}
