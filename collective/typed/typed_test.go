package typed_test

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/typed"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// ranks runs f on n ranks and returns their errors.
func ranks(t *testing.T, n int, f func(c collective.Communicator) error) []error {
	t.Helper()
	group, err := collective.Open(mem.New(n), collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	errs := make([]error, n)
	var all sync.WaitGroup
	for i, c := range group.Local() {
		all.Go(func() { errs[i] = f(c) })
	}
	all.Wait()
	return errs
}

func TestSlices(t *testing.T) {
	for _, n := range []int{1, 3} {
		for rank, err := range ranks(t, n, func(c collective.Communicator) error {
			r := float32(c.Rank())
			sums, largest, sent := []float32{r, 1}, []int64{int64(c.Rank()), -5}, []float64{float64(r), 7}
			err := errors.Join(
				typed.Sum(t.Context(), c, sums),
				typed.AllReduce(t.Context(), c, collective.Max, largest),
				typed.Broadcast(t.Context(), c, n-1, sent),
			)
			last := n - 1
			if want := []float32{float32(n*last) / 2, float32(n)}; !reflect.DeepEqual(sums, want) {
				t.Errorf("sums %v, want %v", sums, want)
			}
			if want := []int64{int64(last), -5}; !reflect.DeepEqual(largest, want) {
				t.Errorf("largest %v, want %v", largest, want)
			}
			if want := []float64{float64(last), 7}; !reflect.DeepEqual(sent, want) {
				t.Errorf("sent %v, want %v", sent, want)
			}
			return err
		}) {
			if err != nil {
				t.Errorf("rank %d of %d: %v", rank, n, err)
			}
		}
	}
}

type result struct {
	Name   string
	Losses []float64
	Best   *int
}

// TestGather: values of different lengths, with what JSON has no text for, also without an element.
func TestGather(t *testing.T) {
	best := 4
	want := []result{{"a", nil, &best}, {}, {strings.Repeat("c", 5000), []float64{math.Inf(1), 0.5}, nil}}
	for rank, err := range ranks(t, len(want), func(c collective.Communicator) error {
		got, err := typed.Gather(t.Context(), c, want[c.Rank()])
		if !reflect.DeepEqual(got, want) {
			t.Errorf("rank %d: %v, want %v", c.Rank(), got, want)
		}
		return err
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

// TestGatherFails: where one rank cannot encode its value, all ranks get the reason, and the next call works.
func TestGatherFails(t *testing.T) {
	type message struct{ Value any }
	for rank, err := range ranks(t, 2, func(c collective.Communicator) error {
		m := message{"text"}
		if c.Rank() == 1 {
			m.Value = struct{ X int }{1} // not registered
		}
		_, err := typed.Gather(t.Context(), c, m)
		if e := typed.Sum(t.Context(), c, []float32{1}); e != nil {
			t.Error(e)
		}
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "rank 1 cannot encode a typed_test.message: gob: ") {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}
