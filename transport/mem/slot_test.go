package mem

import (
	"testing"
	"unsafe"
)

// TestSlotLines: what peers read of a rank in a small call is one cache line.
func TestSlotLines(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("laid out for 64 bits")
	}
	var s slotLines
	if end := unsafe.Offsetof(s.Sum) + 8; end > 64 || unsafe.Offsetof(s.data)%8 != 0 {
		t.Errorf("the flags, the data and the sum end at byte %d, want at most 64", end)
	}
	h := newHub(9, true)
	for r := range h.ends {
		for i, s := range h.ends[r].slots {
			if at := uintptr(unsafe.Pointer(s)); at%64 != 0 {
				t.Errorf("slot %d of rank %d begins %d bytes after the beginning of a cache line", i, r, at%64)
			}
		}
	}
}
