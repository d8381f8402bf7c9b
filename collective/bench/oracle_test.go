package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// TestContributionsAreExact checks that every contribution, and every reduction but a mean, is a whole number that the
// type holds, also in the middle of a reduction in any order.
func TestContributionsAreExact(t *testing.T) {
	for _, dtype := range tensor.DTypes {
		if !dtype.IsNumeric() {
			continue
		}
		for reduce := collective.Sum; reduce <= collective.Prod; reduce++ {
			for _, ranks := range []int{1, 2, 3, 8, 100, 127, 300, 1024} {
				o := (&Options{Op: collective.AllReduce, Type: dtype, Reduce: reduce}).newOracle(ranks)
				for i := range 50 {
					total := 0.0
					for rank := range ranks {
						v := o.contribution(rank, i)
						if v != math.Trunc(v) || v < 0 {
							t.Fatalf("%v %v: rank %d of %d contributes %v", dtype, reduce, rank, ranks, v)
						}
						total += v
					}
					got := o.fold(i)
					if reduce == collective.Mean {
						got = math.Round(got * float64(ranks))
					}
					if got != math.Trunc(got) || got > float64(exactMax(dtype)) ||
						(reduce == collective.Sum || reduce == collective.Mean) && got != total {
						t.Fatalf("%v %v of %d ranks: %v at %d", dtype, reduce, ranks, got, i)
					}
				}
			}
		}
	}
}

// TestContributionsDiffer checks that the oracle notices data of another rank, place or group.
func TestContributionsDiffer(t *testing.T) {
	const n = 64
	vector := func(group, rank, shift int) []byte {
		o := (&Options{Op: collective.Broadcast, Type: tensor.Float32, group: group}).newOracle(4)
		return elements(tensor.Float32, n, func(i int) float64 { return o.contribution(rank, i+shift) })
	}
	seen := [][]byte{}
	for _, v := range [][]byte{vector(0, 0, 0), vector(0, 1, 0), vector(0, 0, 1), vector(1, 0, 0), vector(0, 0, 2)} {
		for _, other := range seen {
			if bytes.Equal(v, other) {
				t.Errorf("two vectors are equal: %x", v)
			}
		}
		seen = append(seen, v)
	}
}

// brokenGroup is a group whose calls of float32 are changed by a function.
type brokenGroup struct {
	collective.Group
	change func(rank int, call *collective.Call, do func() error) error
}

func (g brokenGroup) Local() []collective.Communicator {
	list := append([]collective.Communicator(nil), g.Group.Local()...)
	for i, c := range list {
		list[i] = broken{c, g.change}
	}
	return list
}

type broken struct {
	collective.Communicator
	change func(rank int, call *collective.Call, do func() error) error
}

func (b broken) Do(ctx context.Context, call *collective.Call) error {
	do := func() error { return b.Communicator.Do(ctx, call) }
	if call.Type != tensor.Float32 {
		return do()
	}
	return b.change(b.Rank(), call, do)
}

func TestWrongResults(t *testing.T) {
	flip := func(rank int, call *collective.Call, do func() error) error {
		err := do()
		if rank == 1 && call.Dst.Bytes == 40 {
			for _, i := range []int{12, 13, 39} { // in elements 3 and 9
				unsafe.Slice((*byte)(call.Dst.Ptr), call.Dst.Bytes)[i] ^= 1
			}
		}
		return err
	}
	nothing := func(int, *collective.Call, func() error) error { return nil }
	for _, c := range []struct {
		name   string
		change func(rank int, call *collective.Call, do func() error) error
		check  int
		wrong  []int64
		text   string
	}{
		{"flipped bits", flip, 2, []int64{0, 4, 0}, "rank 1 has 4 wrong elements, the first is element 3 of its result"},
		{"no call at all", nothing, 1, []int64{6, 30, 60}, "rank 0 has 2 wrong elements, the first is element 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts, err := Options{Ranks: 3, Sizes: []int{8, 40, 80}, Calls: 2, Check: c.check}.filled()
			if err != nil {
				t.Fatal(err)
			}
			group, err := collective.Open(mem.New(3), opts.config())
			if err != nil {
				t.Fatal(err)
			}
			defer group.Close()
			var results []Result
			if err := measureGroup(t.Context(), brokenGroup{group, c.change}, opts, func(r Result) error {
				results = append(results, r)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			for i, r := range results {
				if r.Wrong == nil || *r.Wrong != c.wrong[i] || r.Checks != c.check ||
					(*r.Wrong == 0) != (r.WrongText == "") {
					t.Errorf("%d bytes: %v wrong in %d checks, %q; want %d", r.Bytes, r.Wrong, r.Checks, r.WrongText, c.wrong[i])
				}
			}
			err = wrongResults(results)
			if !errors.Is(err, ErrWrong) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %q", err, c.text)
			}
		})
	}
}

func TestMismatchEncoding(t *testing.T) {
	want := mismatch{3, 1 << 40, math.MaxUint64, 7}
	all := make([]int64, fields)
	if want.encode(all); decodeMismatch(all) != want {
		t.Errorf("%+v, want %+v", decodeMismatch(all), want)
	}
}

func TestSplit(t *testing.T) {
	for text, sizes := range map[string]string{
		"": "[5]", "mod:1": "[5]", "mod:2": "[3 2]", "mod:9": "[1 1 1 1 1]", "div:2": "[2 2 1]", "div:5": "[5]",
		"div:100": "[5]",
	} {
		s, err := ParseSplit(text)
		if err != nil || s.String() != text || fmt.Sprint(s.Sizes(5)) != sizes {
			t.Errorf("%q: %v, %q, sizes %v, want %s", text, err, s, s.Sizes(5), sizes)
		}
	}
	for _, text := range []string{
		"mod", "mod:", "mod:0", "div:-1", "2", "and:2", "mod:x", ":", "div:9223372036854775808",
	} {
		if s, err := ParseSplit(text); err == nil {
			t.Errorf("%q: %v without an error", text, s)
		}
	}
}
