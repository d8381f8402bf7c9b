package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// conformanceSections are the sections of the table of TensorFlow's behaviours, with their numbers of rows.
var conformanceSections = []struct {
	letter string
	rows   int
}{
	{"A", 46},
	{"B", 35},
	{"C", 15},
	{"D", 30},
	{"E", 40},
	{"F", 21},
	{"G", 17},
	{"H", 22},
	{"I", 13},
	{"J", 8},
	{"K", 10},
	{"L", 31},
	{"M", 11},
	{"N", 27},
}

// conformanceTests are the rows of the table that are not data.
var conformanceTests = map[string]func(*testing.T){
	"B35": testReduceVariableDirectly,
	"E21": testDefaultScopeDoesNotNest,
	"E26": testTypesOfNestsAreKept,
	"E27": testComponentsRegroup,
	"H09": testNoMeanOfIntegers,
	"I13": testAllReduceOfSyncOnRead,
	"L24": testPerReplicaOfDataset,
	"L31": testInputOptionsDefaults,
	"M10": testCallOptionsPrevail,
}

// conformanceNone are the rows that mean nothing here, with the reason.
var conformanceNone = map[string]string{
	"B08": "values and destinations are two lists",
	"B24": "no strategy of TensorFlow 2.21 chooses by the older rule",
	"B28": "there are no graphs, so every shape is known",
	"B33": "a CollectiveAllReduce is used by its pointer; it has no keys",
	"B34": "NCCL's launches: there is no NCCL here",
	"D28": "there are no graphs: calls are always eager",
	"E34": "TensorFlow's own update does not call the check; a component's part of any distributed value is taken",
	"E40": "there are no summaries, and no graphs whose names would need scopes",
	"I12": "there is no such context: a variable is read in replica or cross-replica context, by type",
	"J08": "there are no SavedModels; Saved and Restore are what checkpoints hold",
	"M11": "peers in other processes: the transports' tests",
	"N27": "peers in other processes: the rendezvous's tests",
}

// conformanceElsewhere lists the rows that other tests of this package verify, by the text of a test's declaration.
var conformanceElsewhere = map[string]string{
	"B03": "func TestAccumulationFn(",
	"B20": "func TestGather(",
	"B32": "func TestConcurrentBatches(",
	"C10": "func TestSparseSumIsTheDenseSum(",
	"C15": "func TestGatherErrors(",
}

// TestConformance checks that every row of the table has its cases, its test or its reason, and carries the tests out.
func TestConformance(t *testing.T) {
	text, err := os.ReadFile("testdata/conformance.txt")
	if err != nil {
		t.Fatal(err)
	}
	cases, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	tests := ""
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if file != "conformance_test.go" {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			tests += string(text)
		}
	}
	byData := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		byData[words[0]] = words[1:]
	}
	rows := []string{"L02b"}
	for _, s := range conformanceSections {
		for i := range s.rows {
			rows = append(rows, fmt.Sprintf("%s%02d", s.letter, i+1))
		}
	}
	if len(rows) != 327 {
		t.Errorf("%d rows, want 327", len(rows))
	}
	for _, row := range rows {
		ops, isData := byData[row]
		test, isTest := conformanceTests[row]
		_, isNone := conformanceNone[row]
		_, isElsewhere := conformanceElsewhere[row]
		switch {
		case isData && (isTest || isNone || isElsewhere):
			t.Errorf("%s is both data and not", row)
		case isData:
			for _, op := range ops {
				_, known := goldenOps[op]
				if !known || !strings.Contains(string(cases), `"op": "`+op+`"`) {
					t.Errorf("%s: no cases of the operation %s", row, op)
				}
			}
		case isTest:
			t.Run(row, test)
		case isElsewhere && !strings.Contains(tests, conformanceElsewhere[row]):
			t.Errorf("%s: there is no %s", row, conformanceElsewhere[row])
		case !isNone && !isElsewhere:
			t.Errorf("%s has neither cases nor a test nor a reason to have none", row)
		}
	}
}

func testReduceVariableDirectly(t *testing.T) {
	s := mirrored(t, 2)
	v, err := newVariable(t.Context(), s, 3, distribute.VariableConfig{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := reduceWith(t.Context(), distribute.NewReductionToOneDevice("", nil), distribute.Mean, v, v)
	if m, ok := got.(*distribute.Mirrored); err != nil || !ok || len(m.Values) != 2 ||
		!m.Values[1].(*tensor.Tensor).Equal(scalar(3)) {
		t.Errorf("got %v, %v, want tensors of 3 on both devices", got, err)
	}
}

func testDefaultScopeDoesNotNest(t *testing.T) {
	s := mirrored(t, 2)
	_, err := distribute.Default().Cross(distribute.Default().Scope(s.Scope(t.Context())))
	if !errors.Is(err, distribute.ErrContext) || !strings.Contains(err.Error(), "must not nest") {
		t.Errorf("got %v, want ErrContext", err)
	}
}

// pair is a nest of a user's type.
type pair struct{ A, B any }

func testTypesOfNestsAreKept(t *testing.T) {
	got, err := tf.Regroup([]distribute.Value{
		pair{scalar(1), []any{scalar(2)}},
		pair{scalar(3), []any{scalar(4)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	p, ok := got.(pair)
	if !ok || p.A.(*distribute.Components).Len() != 2 || p.B.([]any)[0].(*distribute.Components).Len() != 2 {
		t.Errorf("got %T %v, want a pair of values per replica", got, got)
	}
}

func testComponentsRegroup(t *testing.T) {
	s := mirrored(t, 2)
	v, err := newVariable(t.Context(), s, 3, distribute.VariableConfig{})
	if err != nil {
		t.Fatal(err)
	}
	itself := func(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
		if c.Variable() != v {
			t.Error("a component's container is its variable")
		}
		return c, nil
	}
	if got, err := s.Extended().Update(t.Context(), v, itself); err != nil || got != v {
		t.Errorf("got %v, %v, want the variable", got, err)
	}
	if got, err := tf.Regroup([]distribute.Value{v, v}); err != nil || got != v {
		t.Errorf("the variable on each replica: got %v, %v, want it", got, err)
	}
}

func testNoMeanOfIntegers(t *testing.T) {
	s := mirrored(t, 2)
	for _, sync := range []distribute.Synchronization{distribute.OnWrite, distribute.OnRead} {
		_, err := s.NewVariable(t.Context(),
			distribute.VariableConfig{Initial: 1, Aggregation: distribute.AggregateMean, Synchronization: sync})
		if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "aggregation=MEAN") {
			t.Errorf("%v: got %v, want ErrInvalid", sync, err)
		}
	}
}

func testAllReduceOfSyncOnRead(t *testing.T) {
	s := mirrored(t, 3)
	v, err := newVariable(t.Context(), s, 1,
		distribute.VariableConfig{Synchronization: distribute.OnRead, Aggregation: distribute.AggregateSum})
	if err != nil {
		t.Fatal(err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if err := v.Assign(r, float64(r.ID())); err != nil {
			return err
		}
		got, err := distribute.AllReduce(ctx, r, distribute.Sum, distribute.Value(v))
		if err == nil && !got.(*tensor.Tensor).Equal(scalar(3)) {
			t.Errorf("replica %d got %v, want 3", r.ID(), got)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func testPerReplicaOfDataset(t *testing.T) {
	s := mirrored(t, 2)
	_, err := s.DistributeDataset(fromTensors(counting(0, 4)).Batch(2),
		distribute.InputOptions{ReplicationMode: distribute.PerReplicaInput})
	if !errors.Is(err, distribute.ErrUnsupported) || !strings.Contains(err.Error(), "DistributeDatasetsFromFunction") {
		t.Errorf("got %v, want ErrUnsupported", err)
	}
}

func testInputOptionsDefaults(t *testing.T) {
	s := mirrored(t, 2)
	var o distribute.InputOptions
	if o.KeepOnHost || o.PlaceOnDevice || o.ReplicationMode != distribute.PerWorker ||
		o.AutoShard != distribute.ShardAuto {
		t.Errorf("got %+v", o)
	}
	for _, c := range []struct {
		o    distribute.InputOptions
		want []int
	}{{o, []int{0, 1}}, {distribute.InputOptions{KeepOnHost: true, Prefetch: 1}, []int{0, 0}}} {
		set, err := s.DistributeDataset(fromTensors(counting(0, 8)).Batch(2), c.o)
		if err != nil {
			t.Fatal(err)
		}
		steps := 0
		for v, err := range set.Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			steps++
			for i, x := range s.Extended().LocalResults(v) {
				if d, _ := device.Of(x); d.Index != c.want[i] {
					t.Errorf("%+v: replica %d has its share on %v, want CPU:%d", c.o, i, d, c.want[i])
				}
			}
		}
		if steps != 4 {
			t.Errorf("%+v: %d steps, want 4", c.o, steps)
		}
	}
}

// optionsSpy is a user's CrossDeviceOps that keeps the options it was given.
type optionsSpy struct {
	distribute.CrossDeviceOps
	seen *[]distribute.Options
}

func (o optionsSpy) BatchReduce(
	ctx context.Context, op distribute.ReduceOp, batch []distribute.Reduction, opts distribute.Options,
) ([]distribute.Value, error) {
	*o.seen = append(*o.seen, opts)
	return o.CrossDeviceOps.BatchReduce(ctx, op, batch, opts)
}

func testCallOptionsPrevail(t *testing.T) {
	var seen []distribute.Options
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		LogicalCPUs: 2, CrossDeviceOps: optionsSpy{distribute.NewReductionToOneDevice("", nil), &seen},
		Options: distribute.Options{BytesPerPack: 100, Timeout: 7},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	v := distribute.NewComponents(scalar(1), scalar(2))
	if _, err := s.Extended().BatchReduceTo(t.Context(), distribute.Sum, []distribute.Value{v}, []distribute.Value{v},
		distribute.Options{BytesPerPack: 5}); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 1 || seen[0].BytesPerPack != 5 || seen[0].Timeout != 7 {
		t.Errorf("got %+v, want the call's bytes and the strategy's timeout", seen)
	}
}
