package transport

import (
	"reflect"
	"testing"
)

// TestSum: a header that differs in any field, by one bit or by all, has another sum.
func TestSum(t *testing.T) {
	seen := map[uint64]Header{Header{}.sum(): {}}
	for i := range reflect.TypeFor[Header]().NumField() {
		var h Header
		field := reflect.ValueOf(&h).Elem().Field(i)
		for bit := range field.Type().Bits() {
			for _, value := range []uint64{1 << bit, ^uint64(0) << bit} {
				if field.CanInt() {
					field.SetInt(int64(value) << (64 - field.Type().Bits()) >> (64 - field.Type().Bits()))
				} else {
					field.SetUint(value << (64 - field.Type().Bits()) >> (64 - field.Type().Bits()))
				}
				if other, ok := seen[h.Sum()]; ok && other != h {
					t.Errorf("%+v has the sum of %+v", h, other)
				}
				seen[h.Sum()] = h
			}
		}
	}
}

func (h Header) sum() uint64 { return h.Sum() }

// TestSumStep: the sum of a header is that of call 0 and a step for each call since, also past the end of the numbers.
func TestSumStep(t *testing.T) {
	first := Header{
		Epoch: 1, Frame: 2, Comm: 3, Count: 4, Names: 5, Root: 6, Plan: 7, Op: 8, Reduce: 9, Type: 10,
		Order: 11,
	}
	for _, seq := range []uint64{0, 1, 2, 1000, 1 << 32, 1<<64 - 1} {
		h := first
		h.Seq = seq
		if got, want := h.Sum(), first.Sum()+seq*SumStep; got != want {
			t.Errorf("call %d: sum %#x, want %#x", seq, got, want)
		}
	}
}
