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
